"""A checkpoint is written completely or not at all, and damage is always noticed.

Faults are real: flipped bits, truncated files, writes refused by the kernel. tests/test_run.py
kills a run before each change of the disk, tests/test_runtime.py tests what several ranks save.
"""

import os
import random
import resource
from contextlib import suppress
from pathlib import Path

import torch
from conftest import contents, names, refusal, same

from support.checkpoint import ENTRIES, find, load, outline, save, step_path


def state_of(step: int = 7, best_step: int = 0) -> dict:
    generator = torch.Generator().manual_seed(step)
    embedding = torch.randn(65, 8, generator=generator)
    return {name: kind() for name, kind in ENTRIES.items()} | {
        "model": {"wte": embedding, "h.0.bias": torch.ones(5), "empty": torch.ones(0, 4)},
        "optimizers": {"state": {"wte": {"step": torch.tensor(3.0), "exp_avg": embedding * 2}}},
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "step": step,
        "best": float("inf"),
        "best_step": best_step,
        "config": {"model.layers": 3, "run.argv": ["--fsdp"], "optim.beta2": None},
    }


def save_step(folder: Path, step: int = 7, best_step: int = 0, keep: int = 2) -> Path:
    path = step_path(folder, step)
    save(path, state_of(step, best_step), keep=keep)
    return path


def flip_bit(whole: bytes, begin: int, end: int, draw: random.Random) -> bytes:
    changed = bytearray(whole)
    changed[draw.randrange(begin, end)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def test_a_state_loads_unchanged_and_flipped_bits_and_truncation_are_noticed(tmp_path):
    """Fifty bits are flipped in a tensor's bytes, where torch.load notices none of them."""
    path = save_step(tmp_path)
    tensor = state_of()["model"]["wte"].numpy().tobytes()
    whole, draw = path.read_bytes(), random.Random(1)
    begin = whole.index(tensor)
    for _ in range(50):
        path.write_bytes(flip_bit(whole, begin, begin + len(tensor), draw))
        assert f"{path} is damaged" in refusal(load, path)
    for _ in range(100):  # anywhere in the file, a flipped bit is noticed or harmless
        path.write_bytes(flip_bit(whole, 0, len(whole), draw))
        with suppress(ValueError):
            assert same(load(path), state_of())
    for size in (0, 1, begin, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert str(path) in refusal(load, path)
    path.write_bytes(whole)
    assert outline(path)["config"]["model.layers"] == 3
    state = load(path)
    path.unlink()
    assert same(state, state_of()), "the tensors do not depend on the file any more"
    assert f"{path}: No such file" in refusal(load, path)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_code_in_a_checkpoint_file_never_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Malicious()}, "bad.pt")
    assert "Weights only load failed" in refusal(load, "bad.pt")
    assert not Path("ran").exists()


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, best in ((10, 10), (20, 20), (30, 20), (40, 20), (50, 20)):
        save_step(tmp_path, step, best)
    assert names(tmp_path) == [f"step-000000{step}.pt" for step in (20, 40, 50)]
    assert find(tmp_path, "last").stem == "step-00000050"
    assert find(tmp_path, "best").stem == "step-00000020"
    save_step(tmp_path, 60, 20)
    save_step(tmp_path, 60, 60, keep=1)  # evaluated later, it became the best
    assert find(tmp_path, "best") == find(tmp_path, "last")
    assert names(tmp_path) == ["step-00000060.pt"]


def test_files_of_other_programs_are_refused(tmp_path):
    path = tmp_path / "other.pt"
    half = state_of() | {"model": {"wte": torch.ones(3).half()}}
    for content in {"wte": torch.ones(3)}, torch.ones(3), [], state_of() | {"clock": None}, half:
        torch.save(content, path)
        for action in (load, outline):
            assert refusal(action, path).startswith(f"{path} is not a checkpoint of train.py (")


def test_find_has_no_fallback_to_another_checkpoint(tmp_path):
    assert "nowhere does not exist: name the folder of a run" in refusal(find, "nowhere", "last")
    assert "holds no checkpoint" in refusal(find, tmp_path, "last")
    path = save_step(tmp_path)
    assert find(tmp_path, str(path)) == find(path, "last") == path
    assert find(tmp_path, path.name) == path
    assert "has no best checkpoint" in refusal(find, tmp_path, "best")
    for which in ("previous", str(tmp_path / "step-00000008.pt")):
        message = refusal(find, tmp_path, which)
        assert message.startswith("checkpoint ") and message.endswith(f"holds {path.name}")
    (tmp_path / "step-00000009.pt").symlink_to("gone")
    assert "step-00000009.pt: not found" in refusal(find, tmp_path, "last")


def test_a_failing_write_changes_nothing(tmp_path):
    """The kernel refuses to let a file grow beyond a size (EFBIG)."""
    save_step(tmp_path, 1)
    before, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 1000, 4000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            message = refusal(save_step, tmp_path, 2, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "step-00000002.pt: not written" in message and "File too large" in message
        after = {name: b for name, b in contents(tmp_path).items() if name[0] != "."}
        assert after == before, "also the checkpoint that the new one would replace"
    save_step(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001.pt", "step-00000003.pt"], "leftovers are removed"


def test_nothing_is_written_or_removed_through_a_link(tmp_path):
    """A folder from somebody else may contain links with the names that we use."""
    elsewhere = save_step(tmp_path / "elsewhere").parent
    whole, run = contents(elsewhere), tmp_path / "run"
    run.mkdir()
    for name in (".step-00000007.tmp", ".step-00000008.pt.00000000.tmp", "step-00000003.pt"):
        (run / name).symlink_to(elsewhere)
    for step in (4, 7):
        step_path(run, step).symlink_to(step_path(elsewhere, 7))
    path = save_step(run, 7, keep=1)
    assert names(run) == [path.name] and not path.is_symlink() and same(load(path), state_of())
    assert contents(elsewhere) == whole
