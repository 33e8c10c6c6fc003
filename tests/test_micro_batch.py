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
    found = rows("--size 124M")
    assert found.count == 4
    assert found.why == "512 rows of 1024 a step, 4 at once a rank (at most 4096 tokens on cpu)"
    assert rows("--size 124M", device="cuda").count == 32
    assert rows("--size 1.3B --seq-len 2048").count == 2
    assert rows("--seq-len 8192 --batch-tokens 8192").count == 1, "at least a row"


def test_documents_make_as_many_rows_as_they_need_which_any_ranks_can_share():
    found = rows("--pack --pack-batch documents --batch-tokens 4096", 3)
    assert found.count == 5
    assert found.why.startswith("the documents of 16 rows of 256 a step, 5 at once a rank")
    assert rows("--pack --pack-batch documents --batch-tokens 256", 2).count == 1


@pytest.mark.parametrize(
    ("line", "world_size", "said"),
    [
        ("--batch-tokens 4096", 3, "16 rows of 256, which 3 process"),
        ("--batch-tokens 4096", 32, "which 32 process"),
        (
            "--batch-tokens 4096 --micro-batch-size 5",
            1,
            "16 rows .* --micro-batch-size 5 at once: .*1280",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(line, world_size, said):
    with pytest.raises(ValueError, match=said):
        rows(line, world_size)
