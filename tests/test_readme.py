"""The documents are right: commands run, flags exist, links lead somewhere.

In every document a block fenced as ```bash must parse and start known programs with known flags.
In docs/usage.md a block fenced as ```bash run is also executed, in a copy of the repository, so it
stands alone and takes seconds. What runs commands is marked `slow`.
What reads documents without running them is marked `structure`.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT
from test_technique import copy_project

import config
from model import TransformerConfig
from support.settings import settings_of
from support.sizes import parameter_count

sys.path.append(str(ROOT / "docs"))
import tables

FOLDERS = ("bench", "corpus", "docs", "kernels", "results", "support", "tests")

FIRST_SCREEN = 40  # rows
ENVIRONMENT = "python3 -m venv .venv && . .venv/bin/activate && "
TRAIN = "torchrun train.py --curriculum seqlen --ltd --pack"
TRAIN_COMMAND = ENVIRONMENT + "pip install -e . -c constraints.txt && " + TRAIN
TEST_COMMAND = ENVIRONMENT + "pip install -e '.[test]' -c constraints.txt && pytest"
TRAIN_TIMEOUT_S = 1200  # one thread needs 400; the rest is for a machine that has other work
FAST_TIMEOUT_S = 120  # for commands of seconds, likewise

TECHNIQUES = [f"docs/{name}.md" for name in ("curriculum", "packing", "ltd", "pseudo", "offload")]

FENCED = re.compile(r"^ *```([^\n`]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(
    rf"([\w./-]+\.(py|md|toml|sh|cff|yaml|svg|png)|({'|'.join(FOLDERS)})/[\w./-]*)"
)


def documents() -> list[str]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks_of(text: str) -> list[tuple[str, list[str]]]:
    """What follows the fence of each block, and its lines: without comments, continued ones joined.

    Example: '```bash run\nls\n```' -> [('bash run', ['ls'])]
    """
    blocks = []
    for info, body in FENCED.findall(text):
        lines = [line.strip() for line in body.replace("\\\n", " ").splitlines()]
        blocks.append((info, [line for line in lines if line and not line.startswith("#")]))
    return blocks


def commands_of(text: str) -> list[str]:
    return [line for info, lines in blocks_of(text) if info.startswith("bash") for line in lines]


def command_problems(command: str) -> list[str]:
    """Name what a reader who types this command would stumble over; an open quote raises."""
    targets = re.findall(r"^([\w-]+):", read("Makefile"), flags=re.MULTILINE)
    flags = [setting.flag for setting in settings_of(config.Config).values()]
    found = []
    for part in re.split(r" (?:&&|\|) ", command):
        program, *arguments = shlex.split(part, comments=True)
        files = [word.split("::")[0] for word in arguments if re.search(r"\.py(::|$)", word)]
        found += [f"no file {name}" for name in files if not (ROOT / name).exists()]
        if program == "make":
            found += [f"no target {name}" for name in arguments if name not in targets]
        if "train.py" in arguments:
            ours = arguments[arguments.index("train.py") :]
            given = re.findall(r"(?<!\S)--[a-z0-9-]+", " ".join(ours).replace("--no-", "--"))
            found += [f"no flag {word}" for word in given if word not in flags]
    return [f"{command}: {problem}" for problem in found]


def dead_references(document: str, text: str) -> list[str]:
    """The relative links and the file names in `code` that lead nowhere.

    A file of another project is named inside a link to it, and is not looked for here.
    """
    prose = FENCED.sub("", text)
    codes = re.findall(r"`([^`\n]+)`", re.sub(r"\[[^\]]*\]\(\w+:[^)]*\)", "", prose))
    names = [code for code in codes if FILE_NAME.fullmatch(code)]
    links = re.findall(r"(?:\]\(|(?:src|href)=\"|^\[[^\]]+\]:\s+)([^)\s\"]+)", prose, re.MULTILINE)
    targets = [link.split("#")[0] for link in links if not re.match(r"#|\w+:", link)]
    folder = Path(document).parent
    dead = [target for target in targets if not inside(folder / target)]
    dead += [name for name in names if not inside(Path(name)) and not inside(folder / name)]
    return [f"{document}: {name} does not exist" for name in dead]


def inside(path: Path) -> bool:
    """Whether a path relative to the root exists there; one that leads out of it does not."""
    full = Path(os.path.normpath(ROOT / path))
    return full.is_relative_to(ROOT) and full.exists()


def run_line(command: str, cwd: Path, timeout: int = FAST_TIMEOUT_S) -> str:
    """What a command line prints, run with this interpreter's programs first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=cwd,
        env=os.environ | {"PATH": path},
        timeout=timeout,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert result.returncode == 0, f"$ {command}\n{result.stdout}"
    return result.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_project(tmp_path / "copy")


@pytest.mark.structure
def test_pictures_are_what_the_code_draws(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawn = {f"{name}.svg": draw() for name, draw in import_module("pictures").PICTURES.items()}
    there = {path.name: path.read_text("utf-8") for path in (ROOT / "docs").glob("*.svg")}
    assert drawn == there, "python docs/pictures.py"


@pytest.mark.structure
def test_the_first_screen_trains_and_tests():
    text = read("README.md")
    assert TRAIN_COMMAND in commands_of("\n".join(text.splitlines()[:FIRST_SCREEN]))
    assert TEST_COMMAND in commands_of(text)


@pytest.mark.structure
def test_pages_are_short():
    """A page that nobody reads to its end helps nobody."""
    sizes = {name: len(read(name).encode()) for name in [*documents(), "CHANGELOG.md"]}
    assert sizes["README.md"] <= 7_000 and sizes["CHANGELOG.md"] <= 4_000
    assert all(sizes[page] <= 5_000 for page in TECHNIQUES)
    assert sum(size for name, size in sizes.items() if name.startswith("docs/")) <= 60_000


def sentences(text: str) -> list[str]:
    """Split prose into sentences: without code, tables, headings and the targets of links."""
    text = re.sub(r"^(\||    |#|!\[|<!--).*$", "\n", FENCED.sub("\n\n", text), flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`|\b\d{4}\.\d{5}\b", "code", text)  # numbers of papers, too
    paragraphs = re.split(r"\n\s*\n|\n(?=- |\d+\. )", text)
    return [s for p in paragraphs for s in re.split(r"(?<=[.!?:])\**\s+", " ".join(p.split()))]


HARD = {  # to read
    "three numbers": r"(?:(?<![\w.,/-])(?>\d[\d,]*(?:\.\d+)?)(?![\w-]).*){3}",
    "a number without a unit": r"(?<![\w.,/-])\d+\.\d+(?![\w.-])(?! ?[%A-Za-z])",
    "a bracket after a bracket": r"\)\s*\(",
    "two baselines": r"same model.*best plain model|best plain model.*same model",
    "a for per": r"\b(token|document|row|byte|FLOP|step)s an? (token|row|step|second|weight)",
}


def hard_to_read(sentence: str) -> list[str]:
    return [why for why, pattern in HARD.items() if re.search(pattern, sentence)]


@pytest.mark.structure
def test_a_sentence_says_one_thing():
    wrong = {
        "It takes 3 s, not 4 s, on 2 cores.": ["three numbers"],
        "The share is 0.6, which is small.": ["a number without a unit"],
        "It holds (in rows) (one seed).": ["a bracket after a bracket"],
        "0.6 of the same model's time, 2 of the best plain model's.": ["two baselines"],
        "84 tokens a row.": ["a for per"],
        "1.3B weights (in fp16) need 2.6 GB, or 1.3 GB as bytes.": [],
    }
    assert {sentence: hard_to_read(sentence) for sentence in wrong} == wrong
    found = {s: hard_to_read(s) for page in documents() for s in sentences(read(page))}
    assert not any(found.values()), {s: why for s, why in found.items() if why}


@pytest.mark.structure
def test_a_technique_has_one_headline():
    """The same number in README, on its page and in the changelog, from the records."""
    *_, best = tables.headline("two layers, `--tokens 4.6M --pack --curriculum seqlen`")
    *_, padded = tables.headline("`--pack` on short documents; plain is padded")
    *_, same, _ = tables.headline("eight layers, `--ltd`")
    (weights,) = re.findall(r"weights too .*? \| (\S+) \(", tables.steps())
    sizes = [TransformerConfig(n, 16, 2048, 8192, 2048, 50304) for n in (1, 4, 24)]  # of 1.3B
    least, shadow, real = (f"{16e-9 * parameter_count(size):.1f} GB" for size in sizes)
    assert {*re.findall(r"\d+\.\d GB", read("docs/pseudo.md"))} == {least, shadow, real}
    phrases = {
        "docs/curriculum.md": f"{best} of the best plain model's time",
        "docs/packing.md": f"{padded} of the padded run's time",
        "docs/ltd.md": f"{same} of the same model's time",
        "docs/pseudo.md": shadow,
        "docs/offload.md": f"{weights} times as long",
    }
    *_, same, _ = tables.headline("four layers, all three (README's command)")
    assert f"{1 / float(same):.1f} times as long." in read("README.md")
    for page, phrase in phrases.items():
        assert all(phrase in read(place) for place in ("README.md", page, "CHANGELOG.md")), phrase
    measured = read("docs/measured.md")
    for page in ("README.md", *TECHNIQUES):
        prose = " ".join(sentences(read(page)))
        shares = re.findall(r"(\d\.\d+ of the (?:\w+ )+?\w+'s time)", prose)
        assert {*shares} <= {phrase.removeprefix("under ") for phrase in phrases.values()}, page
        cells = " ".join(re.findall(r"^\|.*", read(page), re.MULTILINE))
        cells = re.sub(r"`[^`]*`|\]\([^)]*\)", "", cells)  # without code and links
        numbers = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", cells)
        assert all(n in measured or f"{n} GB" in phrases.values() for n in numbers), (page, numbers)


@pytest.mark.structure
@pytest.mark.parametrize("document", documents())
def test_a_document_names_programs_flags_and_files_that_exist(document):
    text = read(document)
    problems = [problem for line in commands_of(text) for problem in command_problems(line)]
    problems += dead_references(document, text)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_the_commands_run(checkout):
    blocks = [lines for info, lines in blocks_of(read("docs/usage.md")) if info == "bash run"]
    assert blocks
    for command in (line for lines in blocks for line in lines):
        run_line(command, checkout)


@pytest.mark.slow
def test_the_training_command_learns(checkout):
    """With one thread, because other tests run beside it: threads that wait for each other spin."""
    output = run_line(TRAIN, checkout, TRAIN_TIMEOUT_S)
    assert re.findall(r"held-out: (\d\.\d+) bits per byte, on all", output), output
    (log,) = checkout.glob("runs/*/log.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    final = [line["val_bpb"] for line in lines if line.get("last")]
    shown = re.search(r"^held-out: (\S+)", read("README.md"), re.MULTILINE)[1]
    assert final[-1] == pytest.approx(float(shown), abs=0.01), "two seeds differ by 0.003"
    assert list(log.parent.glob("step-*.pt")) and (log.parent / "report.html").exists()
