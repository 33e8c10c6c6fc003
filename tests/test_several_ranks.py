"""Runs on several ranks whose model changes on the way, or is sharded: the curve is that of one."""

import shutil
from pathlib import Path

import pytest
from conftest import ALL_ON, SMALL, read_log, start_ranks

import train

pytestmark = pytest.mark.dist
# 12 rows a step, so that 1, 2 and 3 ranks share them; at this rate rounding is not amplified
FLAGS = f"{SMALL} --batch-tokens 384 --lr 1e-3 --tokens 3840 --checkpoint-every 1152 --keep 9"
SHARED = "--pseudo --pseudo-group 2 --pseudo-until 0.5 --optimizer adamw"
GROWING = "--pseudo --pseudo-layers 2 --pseudo-until 0.5"


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder, "train")]


def closely(wanted: list[float]):
    return pytest.approx(wanted, abs=1e-5)


def test_ranks_share_weights_and_part_with_them_as_one_process_does(store_dir, tmp_path):
    flags = [*FLAGS.split(), *SHARED.split(), *ALL_ON.split(), "--data", str(store_dir)]
    assert train.main([*flags, "--out", str(tmp_path / "one")]) == 0
    start_ranks(2, [*flags, "--out", str(tmp_path / "two")])
    assert len(read_log(tmp_path / "two", "stage")) == 1
    assert losses(tmp_path / "two") == closely(losses(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("technique", [GROWING, SHARED])
def test_a_sharded_run_goes_on_with_other_ranks(store_dir, tmp_path, technique):
    """From a checkpoint of two ranks before the switch: plainly in one process, and with three."""
    flags = [*FLAGS.split(), *technique.split(), *ALL_ON.split(), "--data", str(store_dir)]
    assert train.main([*flags, "--out", str(tmp_path / "one")]) == 0
    wanted = losses(tmp_path / "one")
    start_ranks(2, [*flags, "--fsdp", "--out", str(tmp_path / "two")])
    assert losses(tmp_path / "two") == closely(wanted)
    scores = [read_log(tmp_path / out, "eval")[-1]["val_bpb"] for out in ("one", "two")]
    assert scores[1] == closely(scores[0])
    folders = sorted((tmp_path / "two").glob("step-*"))
    assert len(folders) >= 3
    for folder in folders[1:]:
        shutil.rmtree(folder)
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    assert train.main(["--resume", "--out", str(tmp_path / "two"), "--no-fsdp"]) == 0
    assert losses(tmp_path / "two") == closely(wanted)
    assert list((tmp_path / "two").glob("step-*.pt")), "a plain run's checkpoints are files"
    start_ranks(3, ["--resume", "--out", str(tmp_path / "three")])
    assert losses(tmp_path / "three") == closely(wanted)
    assert len(read_log(tmp_path / "three", "run")) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_process_alone_trains_sharded_and_goes_on_without(store_dir, tmp_path, device):
    flags = [*FLAGS.split(), "--device", device, "--dtype", "fp32", "--data", str(store_dir)]
    assert train.main([*flags, "--out", str(tmp_path / "plain")]) == 0
    # on a GPU Muon orthogonalises in bf16, which makes more of a difference in rounding
    wanted = pytest.approx(losses(tmp_path / "plain"), abs=1e-5 if device == "cpu" else 1e-3)
    start_ranks(1, [*flags, "--fsdp", "--out", str(tmp_path / "sharded")])
    assert losses(tmp_path / "sharded") == wanted
    first, *others = sorted((tmp_path / "sharded").glob("step-*"))
    assert first.is_dir() and others
    for folder in others:
        shutil.rmtree(folder)
    assert train.main(["--resume", "--out", str(tmp_path / "sharded"), "--no-fsdp"]) == 0
    assert losses(tmp_path / "sharded") == wanted
    assert len(read_log(tmp_path / "sharded", "run")) == 2
