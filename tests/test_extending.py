"""docs/extending.md is right: its example is applied to a copy of this repository."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def blocks(language: str) -> list[tuple[str, str]]:
    """(file, text) of every block fenced as ```language file."""
    return re.findall(rf"^```{language} (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def patched(text: str, hunk: str) -> str:
    """The text with the hunk's added lines; its other lines are there, one below the other."""
    before = "".join(line[1:] for line in hunk.splitlines(True) if not line.startswith("+"))
    after = "".join(line[1:] for line in hunk.splitlines(True))
    assert text.count(before) == 1, f"config.py does not hold once:\n{before}"
    return text.replace(before, after)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the repository with the example in it."""
    if (ROOT / "skip.py").exists():
        pytest.skip("the example is applied here already")
    copy = tmp_path_factory.mktemp("extended")
    for path in ROOT.glob("*.py"):
        shutil.copy2(path, copy)
    shutil.copy2(ROOT / "pyproject.toml", copy)
    for folder in ("support", "kernels", "corpus"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    for name in ("conftest.py", "test_budget.py", "test_architecture.py"):
        shutil.copy2(ROOT / "tests" / name, copy / "tests")
    for file, text in blocks("python"):
        (copy / file).write_text(text)
    for file, hunk in blocks("diff"):
        (copy / file).write_text(patched((copy / file).read_text(), hunk))
    return copy


def train(copy: Path, store: Path, out: str, ranks: int) -> tuple[list[dict], str]:
    """Three steps of the example's command, in processes of their own: their log, and stdout."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    flags = f"{SMALL} --data {store} --out {out} --skip 0.6 --ltd --ltd-start 16 --pack"
    flags = flags.replace("--tokens 4096", "--tokens 400 --lr 1e-3")
    done = subprocess.run(
        [*launch, "train.py", *flags.split()],
        cwd=copy,
        text=True,
        capture_output=True,
    )
    if done.returncode:
        raise ValueError(done.stderr)
    lines = [json.loads(line) for line in (copy / out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "train"], done.stdout


TEST_OF_FLAGS = """
import pytest

import train
from support.base.runtime import exit_cleanly


def test_help_and_refusals_follow_from_the_line(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert "--skip" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        exit_cleanly(lambda: train.main(["--skip", "1.5"]))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --skip 1.5 must be at least 0 and below 1")
"""


def pytest_there(copy: Path, *files: str) -> str:
    """What pytest says in the copy, where these files have to pass."""
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-rp", "-o", "addopts="]
    command = [*pytest_command, "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_examples_own_test_passes_there_and_flags_follow_from_the_line(extended):
    files = {file for file, _ in [*blocks("python"), *blocks("diff")]}
    assert files == {"skip.py", "config.py", "tests/test_skip.py"}
    (extended / "tests/test_flags.py").write_text(TEST_OF_FLAGS)
    said = pytest_there(extended, "tests/test_skip.py", "tests/test_flags.py")
    (extended / "tests/test_flags.py").unlink()
    assert said.count("PASSED tests/test_skip.py") == 3


@pytest.mark.structure
def test_the_checks_pass_with_the_example(extended):
    pytest_there(extended, "tests/test_budget.py", "tests/test_architecture.py")
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command]
        files = ["skip.py", "config.py", "tests/test_skip.py"]
        done = subprocess.run([*ruff, *files], cwd=extended, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.dist
def test_the_example_trains_on_two_ranks_as_on_one(extended, store_dir, tmp_path):
    one, out = train(extended, store_dir, "one", ranks=1)
    two, _ = train(extended, store_dir, "two", ranks=2)
    assert len(one) == len(two) >= 3
    for a, b in zip(one, two, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5
        assert a["layer_tokens"] == b["layer_tokens"]
    assert any(step["kept_tokens"] == 0 for step in one), "a layer was skipped"
    assert re.search(r"saved: \d+\.\d% of layer-tokens", out)
    # without skips_layers, as the page has it, DDP waits for gradients that never come
    broken = shutil.copytree(extended, tmp_path / "broken")
    text = (broken / "config.py").read_text().replace("        skips_layers=True,\n", "")
    (broken / "config.py").write_text(text)
    with pytest.raises(ValueError, match="Expected to have finished reduction"):
        train(broken, store_dir, "waiting", ranks=2)
