"""On copies of the project: docs/extending.md works for adding a technique, docs/model.md for
adding a positional scheme, and a technique can be deleted.

Deleting means: its module, its tests, its line in `Config`, and the lines that grep finds.
"""

import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import ROOT, widen

from model import TokenMeta, TransformerConfig


def copy_project(to: Path) -> Path:
    """Copy what a run and its tests need."""
    skip = shutil.ignore_patterns(".*", "__pycache__", "results", "runs", "*.egg-info")
    return Path(shutil.copytree(ROOT, to, ignore=skip))


def blocks(language: str, page: str = "extending") -> list[tuple[str, str]]:
    """Return (file, text) of every block of a page that is fenced as ```language file."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(rf"^```{language} (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def copy_with_example(folder: Path, page: str = "extending") -> Path:
    """Copy the project, and do to the copy what a page says."""
    copy = copy_project(folder / "copy")
    for file, text in blocks("python", page):
        (copy / file).write_text(text)
    for file, hunk in blocks("diff", page):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        text = (copy / file).read_text()
        assert text.count(before) == 1, f"{file} does not hold once:\n{before}"
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        (copy / file).write_text(text.replace(before, after))
    succeeds(copy, "-m", "ruff", "check", ".")
    succeeds(copy, "-m", "ruff", "format", "--check", ".")
    return copy


def delete(technique: str, copy: Path) -> None:
    """Delete its module, its tests, its imports, its group in `Config`, and its `if` blocks."""
    (copy / f"{technique}.py").unlink()
    (copy / "tests" / f"test_{technique}.py").unlink()
    block = re.compile(rf"^( *)if [\w.]+\.{technique}\.on:\n(?:\1 .*\n|\n)*", re.MULTILINE)
    line = re.compile(rf"^(?:(import|from) {technique}\b|    {technique}: ).*\n", re.MULTILINE)
    for file in (copy / "config.py", copy / "plan.py", copy / "train.py"):
        file.write_text(line.sub("", block.sub("", file.read_text())))


def succeeds(copy: Path, *command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=copy, check=True)  # pytest shows what it prints


def pytest_passes(copy: Path, *arguments: str) -> None:
    succeeds(copy, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *arguments)


TEST_OF_THE_REST = """
import config, evaluate, sample
from support.settings import settings_of
def test_the_rest_trains_samples_and_evaluates_without_the_flags_of_a_technique(run):
    run("--tokens 512 {flags}")
    sample.main(["run", "--prompt", "", "--tokens", "3"])
    evaluate.main(["run", "--device", "cpu", "--tokens", "500"])
    assert "{technique}.on" not in settings_of(config.Config)
"""


@pytest.mark.slow
def test_a_technique_can_be_added_and_others_deleted(tmp_path):
    """In a single copy, the page's example is added and three techniques are deleted."""
    copy = copy_with_example(tmp_path)
    for technique, flags, files in (
        ("pseudo", "--ltd --offload", ["skip"]),
        ("ltd", "--offload", []),
        ("offload", "--curriculum seqlen", ["model", "data"]),
    ):
        delete(technique, copy)
        rest = TEST_OF_THE_REST.format(technique=technique, flags=f"{flags} --pack --skip 0.2")
        (copy / "tests/test_rest.py").write_text(rest)
        pytest_passes(copy, "tests/test_rest.py", *(f"tests/test_{file}.py" for file in files))


def check_alibi(H, slopes):
    """In a copy that has ALiBi, compare a layer with a softmax over the keys that a token may see.

    The row has documents of 3 and 2 tokens, with gaps in their positions, and a token of padding.
    """
    row, at, ids = torch.tensor([[[5, 7, 1, 6, 2, 9]], [[0, 2, 3, 0, 2, 0]], [[0, 0, 0, 1, 1, -1]]])
    gpt = widen(TransformerConfig(1, H, 8 * H, 32, 6, 40, pos="alibi", kv_heads=1).build())

    def by_hand(meta, q, k, v, dropout):
        y = torch.zeros_like(q)  # (1, 6, H, 8)
        for i, h in product(range(6), range(H)):
            seen = [j for j in range(i + 1) if ids[0, j] == ids[0, i]]
            scores = k[0, seen, 0] @ q[0, i, h] / 8**0.5 - slopes[h] * (at[0, i] - at[0, seen])
            y[0, i, h] = scores.softmax(0) @ v[0, seen, 0]
        return y

    # as it should be; without a mask; without distances; with positions that count through the row
    found = [gpt.logits(gpt(row, *m)) for m in ((at, ids), (at, None), (0 * at, ids), (None, ids))]
    alone = [gpt.logits(gpt(row[:, s], at[:, s])) for s in (slice(3), slice(3, 5))]
    assert torch.allclose(found[0][:, :5], torch.cat(alone, dim=1), atol=1e-5)
    x = gpt(row, at, ids, lambda _, b, x, m: b(x[:, ::2], m.of_kept(torch.tensor([[0, 2, 4]]))))
    assert torch.allclose(x, gpt(row[:, ::2], at[:, ::2], ids[:, ::2]), atol=1e-5)
    TokenMeta.attend = by_hand
    errors = [(x - gpt.logits(gpt(row, at, ids))).abs().max() for x in found]
    assert errors[0] < 1e-5 and min(errors[1:]) > 1e-2, errors


@pytest.mark.slow
def test_a_positional_scheme_can_be_added(tmp_path):
    copy = copy_with_example(tmp_path, "model")
    flags = "--pos alibi --width 16 --heads 2 --seq-len 256 --tokens 4096 --ltd --pack --out run"
    succeeds(copy, "train.py", *flags.split(), "--curriculum", "seqlen", "--batch-tokens", "1024")
    check = "import sys; sys.path.append('tests'); from test_technique import check_alibi as check;"
    succeeds(copy, "-c", f"{check} check(2, [1 / 16, 1 / 256])")
    succeeds(copy, "-c", f"{check} check(8, [2.0**-h for h in range(1, 9)])")  # as in the paper


@pytest.mark.structure
def test_make_checks_tests_pass_with_the_example(tmp_path):
    copy = copy_with_example(tmp_path)
    pytest_passes(copy, "tests/test_budget.py", "tests/test_architecture.py")
    files = {file for file, _ in [*blocks("python"), *blocks("diff")]}
    assert files == {"skip.py", "config.py", "plan.py", "train.py", "tests/test_skip.py"}
