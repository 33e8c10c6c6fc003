"""How a step is cut into micro-batches."""

import pytest
import torch

import config
from support.base.runtime import Runtime
from support.step.memory import micro_batch


def rows(line, world_size=1, device="cpu"):
    ranks = Runtime(0, world_size, torch.device(device), torch.float32, "")
    return micro_batch(config.build(config.parse(line.split())), ranks)


def test_rows_are_shared_out_evenly():
    assert [rows("--batch-tokens 4096", n).count for n in (1, 2, 16)] == [16, 8, 1]
    assert rows("--batch-tokens 4096 --micro-batch-size 4").count == 4


def test_by_default_a_micro_batch_fits_the_device_and_says_why():
    cut = rows("--size 124M")
    assert cut.count == 4
    assert cut.why == "512 rows of 1024 a step, 4 at once a rank (at most 4096 tokens on cpu)"
    assert rows("--size 124M", device="cuda").count == 32
    assert rows("--seq-len 8192 --batch-tokens 8192").count == 1, "at least a row"


def test_documents_make_as_many_rows_as_they_need_which_any_ranks_can_share():
    cut = rows("--pack --pack-batch documents --batch-tokens 4096", 3)
    assert cut.count == 5 and cut.why.startswith("the documents of 16 rows of 256 a step")
    assert rows("--pack --pack-batch documents --batch-tokens 256", 2).count == 1


@pytest.mark.parametrize(("more", "world_size"), [("", 3), ("", 32), ("--micro-batch-size 5", 1)])
def test_what_cannot_be_shared_is_refused(more, world_size):
    with pytest.raises(ValueError, match=r"--batch-tokens 4096 makes 16 rows .*choose a"):
        rows(f"--batch-tokens 4096 {more}", world_size)
