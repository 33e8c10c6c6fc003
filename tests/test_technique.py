"""On copies of the project: docs/extending.md works for adding a technique, docs/model.md for
adding a positional scheme, and a technique can be deleted.

Deleting means: its module, its tests, its line in `Config`, and the lines that grep finds.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


def copy_project(to: Path) -> Path:
    """Copy what a run and its tests need."""
    skip = shutil.ignore_patterns(".*", "__pycache__", "results", "runs", "*.egg-info")
    return Path(shutil.copytree(ROOT, to, ignore=skip))


def blocks(language: str, page: str = "extending") -> list[tuple[str, str]]:
    """Return (file, text) of every block of a page that is fenced as ```language file."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(rf"^```{language} (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def add_example(copy: Path, page: str = "extending") -> None:
    for file, text in blocks("python", page):
        (copy / file).write_text(text)
    for file, hunk in blocks("diff", page):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        text = (copy / file).read_text()
        assert text.count(before) == 1, f"{file} does not hold once:\n{before}"
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        (copy / file).write_text(text.replace(before, after))


def delete(technique: str, copy: Path) -> None:
    """Delete its module, its tests, its imports, its group in `Config`, and its `if` blocks."""
    (copy / f"{technique}.py").unlink()
    (copy / "tests" / f"test_{technique}.py").unlink()
    condition = rf"( *)if (\w+|\w+\.settings)\.{technique}\.on:\n"
    block = re.compile(rf"^{condition}(?:\1 .*\n|\n)*", re.MULTILINE)
    line = re.compile(rf"^(?:(import|from) {technique}\b|    {technique}: ).*\n", re.MULTILINE)
    for file in (copy / "config.py", copy / "plan.py", copy / "train.py"):
        file.write_text(line.sub("", block.sub("", file.read_text())))


def succeeds(copy: Path, *command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=copy, check=True)  # pytest shows what it prints


def pytest_passes(copy: Path, *arguments: str) -> None:
    options = ("-q", "-o", "addopts=", "-p", "no:cacheprovider")
    succeeds(copy, "-m", "pytest", *options, *arguments)


TEST_OF_THE_REST = """
import evaluate, pytest, sample, train

def test_the_rest_trains_samples_and_evaluates_without_the_flags_of_a_technique(run, capsys):
    run("--tokens 512 {flags}")
    sample.main(["run", "--prompt", "", "--tokens", "3"])
    evaluate.main(["run", "--device", "cpu", "--tokens", "500"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert "--{technique}" not in capsys.readouterr().out
"""


@pytest.mark.slow
def test_a_technique_can_be_added_and_others_deleted(tmp_path):
    """In a single copy, the page's example is added and three techniques are deleted."""
    copy = copy_project(tmp_path / "copy")
    add_example(copy)
    for technique, flags, files in (
        ("pseudo", "--ltd --offload", ["skip"]),
        ("ltd", "--offload", []),
        ("offload", "--curriculum seqlen", ["model", "data"]),
    ):
        delete(technique, copy)
        rest = TEST_OF_THE_REST.format(technique=technique, flags=f"{flags} --pack --skip 0.2")
        (copy / "tests/test_rest.py").write_text(rest)
        pytest_passes(copy, "tests/test_rest.py", *(f"tests/test_{file}.py" for file in files))


@pytest.mark.slow
def test_a_positional_scheme_can_be_added(tmp_path):
    copy = copy_project(tmp_path / "copy")
    add_example(copy, "model")
    changed = {file for file, _ in blocks("diff", "model")}
    succeeds(copy, "-m", "ruff", "format", "--check", *changed)
    flags = "--pos none --width 16 --heads 2 --seq-len 256 --tokens 4096 --ltd --pack --out run"
    succeeds(copy, "train.py", *flags.split(), "--curriculum", "seqlen", "--batch-tokens", "1024")
    check = """
import evaluate, torch
from model import TransformerConfig
from tests.conftest import widen
def scores(*row):
    return gpt.logits(gpt(torch.tensor([row])))[0, -1]
for layers, tells_order in ((1, False), (2, True)):
    gpt = widen(TransformerConfig(layers, 2, 16, 64, 8, 40, pos="none").build())
    assert torch.allclose(scores(1, 2, 3), scores(2, 1, 3), atol=1e-5) != tells_order
evaluate.main(["run", "--tokens", "500"])
"""
    succeeds(copy, "-c", check)


@pytest.mark.structure
def test_make_checks_tests_pass_with_the_example(tmp_path):
    copy = copy_project(tmp_path / "copy")
    add_example(copy)
    pytest_passes(copy, "tests/test_budget.py", "tests/test_architecture.py")
    files = {file for file, _ in [*blocks("python"), *blocks("diff")]}
    assert files == {"skip.py", "config.py", "plan.py", "train.py", "tests/test_skip.py"}
    succeeds(copy, "-m", "ruff", "check", *files)
    succeeds(copy, "-m", "ruff", "format", "--check", *files)
