"""Micro-batches that fit the memory, and memory that stays with the process once it is freed.

python -m pytest tests/test_memory.py
"""

import platform
import resource

import pytest
import torch
from conftest import start_ranks

import config
from support.base import runtime
from support.base.runtime import Runtime
from support.step.memory import MicroBatch, micro_batch


def cut(line: str, world_size: int = 1, device: str = "cpu") -> MicroBatch:
    ranks = Runtime(0, world_size, torch.device(device), torch.float32, "")
    return micro_batch(config.build(config.parse(line.split())), ranks)


def test_a_micro_batch_shares_rows_evenly_and_says_why():
    rows = "--batch-tokens 4096"
    assert [cut(rows, ranks).count for ranks in (1, 2, 16)] == [16, 8, 1]
    assert cut(f"{rows} --micro-batch-size 4").count == 4
    why = "512 rows of 1024 a step, 4 at once a rank (at most 4096 tokens on cpu)"
    assert cut("--size 124M") == (4, why)
    assert cut("--size 124M", device="cuda").count == 32
    assert cut("--seq-len 8192 --batch-tokens 8192").count == 1, "at least a row"
    documents = "--pack --pack-batch documents --batch-tokens"  # in as many rows as they need
    count, why = cut(f"{documents} 4096", 3)
    assert count == 5 and why.startswith("the documents of 16 rows of 256 a step")
    assert cut(f"{documents} 256", 2).count == 1


@pytest.mark.parametrize(("more", "world_size"), [("", 3), ("", 32), ("--micro-batch-size 5", 1)])
def test_rows_that_cannot_be_shared_are_refused(more, world_size):
    with pytest.raises(ValueError, match="--batch-tokens 4096"):
        cut(f"--batch-tokens 4096 {more}", world_size)


def check_faults(flags: list[str]) -> None:
    """Page faults of two steps after the first, before and after freed memory is kept."""

    def faults() -> int:
        [torch.ones(4_000_000) for _ in range(4)]  # 64 MB, freed together
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = [faults() for _ in range(3)]
    runtime.keep_freed_memory()
    after = [faults() for _ in range(3)]
    assert before[2] - before[0] > 7_000, "else there is nothing to mend here"
    assert after[2] - after[0] < (before[2] - before[0]) / 2


@pytest.mark.dist
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is told")
def test_steps_get_the_pages_of_the_steps_before():
    start_ranks(1, [], work=check_faults)


def test_without_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(runtime.ctypes, "CDLL", None)  # a call would fail
    runtime.keep_freed_memory()
