"""The documents are right: commands run, flags exist, links lead somewhere.

In every document a block fenced as ```bash must parse and start known programs with known flags.
In the README a block fenced as ```bash run is also executed, in a copy of the repository, so it
stands alone and takes seconds. Blocks that train are marked `slow`, and so is the first command.
What reads documents without running them is marked `structure`.

    python tests/test_readme.py                # write the flags table into README.md again
"""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # when this file is the command

import config  # noqa: E402

FOLDERS = ("bench", "corpus", "docs", "kernels", "results", "support", "tests")

FIRST_SCREEN = 40  # rows
ENVIRONMENT = "python3 -m venv .venv && . .venv/bin/activate && "
TRAIN = "torchrun train.py --curriculum seqlen --ltd --pack"
TRAIN_COMMAND = ENVIRONMENT + "pip install -e . && " + TRAIN
TEST_COMMAND = ENVIRONMENT + "pip install -e '.[test]' && pytest"
TRAIN_TIMEOUT_S = 1200  # 180 are meant; the rest is for a machine that has other work
FAST_TIMEOUT_S = 120  # for commands of seconds, likewise
WORST_BITS_PER_BYTE = 1.95

FLAGS_BEGIN, FLAGS_END = "<!-- flags -->", "<!-- /flags -->"
REFRESH = "python tests/test_readme.py"

# Programs that a reader of the README has, or has after `pip install`.
KNOWN_PROGRAMS = {"python3", "python", "pip", "torchrun", "pytest", "make", "pre-commit", "ruff"}
KNOWN_PROGRAMS |= {".", "bash", "cat", "cd", "cp", "git", "head", "ls", "mkdir", "rm", "tail"}
OTHER_SHELLS = {"sh", "shell", "console", "zsh"}  # fences that the checks below would not see
SEPARATORS = {"&&", "||", "|", ";", "&"}
FILE_NAME = re.compile(
    rf"([\w./-]+\.(py|md|toml|sh|cff|yaml|svg|png)|({'|'.join(FOLDERS)})/[\w./-]*)"
)


@dataclass(frozen=True)
class Block:
    """A fenced block: the document, the row of its first line, what follows the fence, the text."""

    document: str
    row: int
    info: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One string a command: comments dropped, lines that end in a backslash joined."""
        joined = self.text.replace("\\\n", " ")
        lines = [line.strip() for line in joined.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def documents() -> list[str]:
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    found += sorted(ROOT.glob("docs/**/*.md"))
    return [path.relative_to(ROOT).as_posix() for path in found if path.exists()]


def read(document: str) -> str:
    """A document's text, or '' where there is none: that it exists is a test of its own."""
    path = ROOT / document
    return path.read_text(encoding="utf-8") if path.exists() else ""


def blocks_of(document: str, text: str) -> list[Block]:
    """Every fenced block, in order. Example: '```bash run\\nls\\n```' -> [Block(.., 2, ..)]"""
    blocks: list[Block] = []
    info, lines, first_row = None, [], 0
    for row, line in enumerate(text.splitlines(), 1):
        fence = line.strip()
        if info is None and fence.startswith("```"):
            info, lines, first_row = fence.removeprefix("```").strip(), [], row + 1
        elif info is not None and fence == "```":
            blocks.append(Block(document, first_row, info, "\n".join(lines)))
            info = None
        elif info is not None:
            lines.append(line)
    if info is not None:  # left open: the prose after it will not pass for commands
        blocks.append(Block(document, first_row, info, "\n".join(lines)))
    return blocks


def bash_blocks(document: str, text: str) -> list[Block]:
    return [block for block in blocks_of(document, text) if block.info in ("bash", "bash run")]


def run_blocks() -> list[Block]:
    return [b for b in bash_blocks("README.md", read("README.md")) if b.info == "bash run"]


def argument_lists(command: str) -> list[list[str]]:
    """Split a command line into its programs, each with its arguments.

    Example:  "A=1 pip install '.[test]' && pytest" -> [['pip', 'install', '.[test]'], ['pytest']]
    Raises:   ValueError where a quote is left open
    """
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        assignment = not found[-1] and re.match(r"[A-Za-z_]\w*=", word)
        if word in SEPARATORS:
            found.append([])
        elif not assignment:
            found[-1].append(word)
    return [arguments for arguments in found if arguments]


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", read("Makefile"), flags=re.MULTILINE))


def unknown_flags(arguments: list[str], flags: set[str]) -> list[str]:
    """The flags after train.py that it does not have. `--no-x` is the twin of `--x`."""
    if "train.py" not in arguments:
        return []
    given = [word.split("=")[0] for word in arguments[arguments.index("train.py") + 1 :]]
    known = flags | {flag.replace("--", "--no-", 1) for flag in flags} | {"--help"}
    return [word for word in given if word.startswith("--") and word not in known]


def command_problems(command: str) -> list[str]:
    """Name what a reader who types this command would stumble over."""
    try:
        lists = argument_lists(command)
    except ValueError as error:
        return [f"{command}: {error}"]
    problems = []
    for program, *arguments in lists:
        if program not in KNOWN_PROGRAMS:
            problems.append(f"{command}: starts {program}, which a reader may not have")
        files = [word.split("::")[0] for word in arguments if re.search(r"\.py(::|$)", word)]
        problems += [f"{command}: no file {name}" for name in files if not (ROOT / name).exists()]
        if program == "make":
            targets = {word for word in arguments if "=" not in word}
            problems += [f"{command}: no target {name}" for name in targets - make_targets()]
    return problems


def flags_in(table: str) -> set[str]:
    """Example: '| `--[no-]ltd` | `--ltd-min 64` |' -> {'--ltd', '--ltd-min'}"""
    return set(re.findall(r"--[a-z0-9][a-z0-9-]*", table.replace("--[no-]", "--")))


def split_at_table(text: str) -> tuple[str, str, str]:
    """README.md up to its flags table, the table, and what follows."""
    before, _, rest = text.partition(f"{FLAGS_BEGIN}\n")
    table, _, after = rest.partition(f"\n{FLAGS_END}")
    if not after or FLAGS_BEGIN in rest or FLAGS_END in after:
        raise ValueError(f"README.md: put {FLAGS_BEGIN} and {FLAGS_END} back, once each")
    return before, table, after


def dead_references(document: str, text: str) -> list[str]:
    """The relative links and the file names in `code` that lead nowhere.

    A file of another project is named inside a link to it, and is not looked for here.
    """
    prose = re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)
    outside = re.compile(r"\[[^\]]*\]\(\w+:[^)]*\)")
    codes = re.findall(r"`([^`\n]+)`", outside.sub("", prose))
    names = [code for code in codes if FILE_NAME.fullmatch(code)]
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"", prose)
    links += re.findall(r"^\[[^\]]+\]:\s+(\S+)()", prose, flags=re.MULTILINE)
    targets = [(inline or attribute).split("#")[0] for inline, attribute in links]
    targets = [target for target in targets if target and not re.match(r"\w+:", target)]
    folder = Path(document).parent
    dead = [target for target in targets if not inside(folder / target)]
    dead += [name for name in names if not inside(Path(name)) and not inside(folder / name)]
    return [f"{document}: {name} does not exist" for name in dead]


def inside(path: Path) -> bool:
    """Whether a path relative to the root exists there; one that leads out of it does not."""
    full = Path(os.path.normpath(ROOT / path))
    return full.is_relative_to(ROOT) and full.exists()


def records_linked(text: str) -> list[str]:
    """The files under results/ that the rows of tables link to."""
    rows = [line for line in text.splitlines() if line.lstrip().startswith("|")]
    return [name for row in rows for name in re.findall(r"\]\((?:\./)?(results/[^)#\s]+)", row)]


def run_line(command: str, cwd: Path, timeout: int = FAST_TIMEOUT_S, **environment: str) -> str:
    """What a command line prints, run with this interpreter's programs first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=cwd,
        env=os.environ | {"PATH": path} | environment,
        timeout=timeout,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert result.returncode == 0, f"$ {command}\n{result.stdout}"
    return result.stdout


def run_script(arguments: list[str], cwd: Path, monkeypatch) -> None:
    """`python` with these arguments, in this process, which has loaded torch already."""
    is_module = arguments[0] == "-m"
    name, *flags = arguments[is_module:]
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    try:
        (runpy.run_module if is_module else runpy.run_path)(name, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, arguments


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository's files, without environments, runs and caches."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for path in ROOT.iterdir():
        if path.name in FOLDERS:
            shutil.copytree(path, tmp_path / path.name, ignore=ignored)
        elif path.is_file():
            shutil.copy2(path, tmp_path)
    return tmp_path


def commands_of(document: str) -> list[str]:
    blocks = bash_blocks(document, read(document))
    return [command for block in blocks for command in block.commands]


@pytest.mark.structure
def test_the_first_screen_trains_and_tests():
    first = "\n".join(read("README.md").splitlines()[:FIRST_SCREEN])
    commands = [command for b in bash_blocks("README.md", first) for command in b.commands]
    assert TRAIN_COMMAND in commands and TEST_COMMAND in commands


@pytest.mark.structure
@pytest.mark.parametrize("document", documents())
def test_a_document_names_programs_flags_and_files_that_exist(document):
    text, flags = read(document), flags_in(config.flags_table())
    blocks = blocks_of(document, text)
    problems = [f"{document}:{b.row}: fence it as bash" for b in blocks if b.info in OTHER_SHELLS]
    for command in commands_of(document):
        problems += command_problems(command)
        for arguments in argument_lists(command):
            problems += [f"{command}: train.py has no {f}" for f in unknown_flags(arguments, flags)]
    problems += dead_references(document, text)
    assert not problems, "\n".join(problems)


@pytest.mark.structure
def test_the_flags_table_is_what_config_generates():
    message = f"the flags table is not that of config.py: refresh it with `{REFRESH}`"
    assert split_at_table(read("README.md"))[1] == config.flags_table(), message


@pytest.mark.structure
def test_the_results_table_rests_on_records():
    records = records_linked(read("README.md"))
    assert records, "README.md: no table row links to a record under results/"
    for record in records:
        assert [json.loads(line) for line in read(record).splitlines()], record


def trains(block: Block) -> bool:
    return any("train.py" in command for command in block.commands)


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=pytest.mark.slow if trains(block) else (), id=f"row{block.row}")
        for block in run_blocks()
    ],
)
def test_the_commands_run(block, checkout, monkeypatch):
    for command in block.commands:
        (program, *arguments), *piped = argument_lists(command)
        if program == "python" and not piped and not trains(block):
            run_script(arguments, checkout, monkeypatch)
        else:
            run_line(command, checkout)


def test_the_readme_has_commands_to_run():
    assert {trains(block) for block in run_blocks()} == {True, False}


@pytest.mark.slow
def test_the_training_command_learns(checkout):
    """With all cores, as a reader has them."""
    output = run_line(TRAIN, checkout, TRAIN_TIMEOUT_S, OMP_NUM_THREADS=str(os.cpu_count()))
    assert re.findall(r"held-out: (\d\.\d+) bits per byte, on all", output), output
    (log,) = checkout.glob("runs/*/log.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    final = [line["val_bpb"] for line in lines if line.get("last")]
    assert final[-1] <= WORST_BITS_PER_BYTE, "a run that learned nothing ends far above"
    assert list(log.parent.glob("step-*.pt")) and (log.parent / "report.html").exists()


# ---- the checks above find what they are for


PAGE = """# Title
```bash
# a comment
pip install -e '.[test]' && \\
    pytest
```
  ```bash run
  ls | head
  ```
```bash
left open
"""


@pytest.mark.structure
def test_what_is_wrong_with_a_page_is_reported():
    blocks = blocks_of("page.md", PAGE)
    assert [(b.row, b.info) for b in blocks] == [(3, "bash"), (8, "bash run"), (11, "bash")]
    both = [["pip", "install", "-e", ".[test]"], ["pytest"]]
    assert argument_lists(blocks[0].commands[0]) == both
    assert argument_lists("A=1 python x.py  # why") == [["python", "x.py"]]
    for command, problem in {
        "curl example.org | bash": "starts curl",
        "echo 'open": "No closing quotation",
        "pytest tests/test_nothing.py::test_it": "no file tests/test_nothing.py",
        "make love": "no target love",
    }.items():
        assert problem in "\n".join(command_problems(command))
    assert not command_problems("python tests/test_readme.py && make check | head -3")
    flags = flags_in("| `--[no-]ltd` | `--ltd-min 64` | `--curriculum` |")
    known = shlex.split("torchrun --standalone train.py --curriculum seqlen --no-ltd --ltd-min=8")
    assert unknown_flags([*known, "--ltd-max", "9"], flags) == ["--ltd-max"]
    living = "[`here`](#below) `tests/test_<module>.py` [`up.py`](https://a.b/c.py)"
    dead = '[it](no/page.md) [it](../outside.md#part) <img src="docs/none.png"> `no_module.py`'
    assert len(dead_references("README.md", f"{living} {dead}\n[ref]: none.md")) == 5
    assert records_linked("[a](results/a)\n| 1 [r](results/b) |\n") == ["results/b"]


def refresh() -> None:
    before, _, after = split_at_table(read("README.md"))
    text = f"{before}{FLAGS_BEGIN}\n{config.flags_table()}\n{FLAGS_END}{after}"
    (ROOT / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    refresh()
