"""The documents are right: commands run, flags exist, links lead somewhere.

In every document a block fenced as ```bash must parse and start known programs with known flags.
In the README a block fenced as ```bash run is also executed, in a copy of the repository, so it
stands alone and takes seconds. Blocks that train are marked `slow`, and so is the first command.
What reads documents without running them is marked `structure`.

    python tests/test_readme.py                # write the flags table into README.md again
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "corpus", "docs", "kernels", "results", "support", "tests")

FIRST_SCREEN = 40  # rows
ENVIRONMENT = "python3 -m venv .venv && . .venv/bin/activate && "
TRAIN = "torchrun train.py --curriculum seqlen --ltd --pack"
TRAIN_COMMAND = ENVIRONMENT + "pip install -e . && " + TRAIN
TEST_COMMAND = ENVIRONMENT + "pip install -e '.[test]' && pytest"
TRAIN_TIMEOUT_S = 1200  # 180 are meant; the rest is for a machine that has other work
FAST_TIMEOUT_S = 120  # for commands of seconds, likewise
WORST_BITS_PER_BYTE = 1.95  # a run that learned nothing ends far above

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


@functools.cache
def flags_table() -> str:
    """The table as config.py of this checkout makes it, whatever else is installed.

    Raises:  ValueError if it makes none, with the last line of its complaint
    """
    program = "import config; print(config.flags_table())"
    result = run([sys.executable, "-c", program], cwd=ROOT, timeout=FAST_TIMEOUT_S)
    if result.returncode:
        reason = result.stdout.strip().rpartition("\n")[2]
        raise ValueError(f"config.flags_table() makes no table: mend config.py first: {reason}")
    return result.stdout.strip()


def flags_in(table: str) -> set[str]:
    """Example: '| `--[no-]ltd` | `--ltd-min 64` |' -> {'--ltd', '--ltd-min'}"""
    return set(re.findall(r"--[a-z0-9][a-z0-9-]*", table.replace("--[no-]", "--")))


def between_markers(text: str) -> str:
    """What stands between the two markers of the flags table.

    Raises:  ValueError if they are not there once each, in order
    """
    table, ended, _ = text.partition(FLAGS_BEGIN)[2].partition(FLAGS_END)
    if not ended or text.count(FLAGS_BEGIN) + text.count(FLAGS_END) != 2:
        raise ValueError(
            f"README.md: the flags table stands between {FLAGS_BEGIN} and {FLAGS_END}, "
            "once each: put the two markers back"
        )
    return table.strip()


def with_table(text: str, table: str) -> str:
    """`text` with `table` between the markers."""
    between_markers(text)
    before = text.partition(FLAGS_BEGIN)[0]
    after = text.partition(FLAGS_END)[2]
    return f"{before}{FLAGS_BEGIN}\n{table}\n{FLAGS_END}{after}"


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


def record_problem(path: Path) -> str:
    """Why a linked record holds no number, or ''. A .jsonl is read line by line."""
    if not path.is_file():
        return f"{path.name}: does not exist"
    lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else []
    for row, line in enumerate(lines, 1):
        try:
            json.loads(line)
        except ValueError:
            return f"{path.name}:{row}: not JSON"
    return "" if path.stat().st_size else f"{path.name}: empty"


@dataclass(frozen=True)
class Ending:
    """What a training run says at its end."""

    bits_per_byte: float | None
    log: str | None
    checkpoints: tuple[str, ...]  # the words with a slash on lines that speak of a checkpoint


def ending_of(output: str) -> Ending:
    """Read the last held-out figure and the paths from what train.py printed.

    Example:  'held-out 1.87 bits per byte' -> 1.87; so does 'held-out: bits per byte 1.87'
    """
    figures: list[str] = []
    checkpoints: list[str] = []
    for line in output.splitlines():
        if "held-out" in line:
            figures += re.findall(r"(\d+\.\d+) bits per byte|bits per byte[:=]? (\d+\.\d+)", line)
        if "checkpoint" in line:
            checkpoints += [word.strip("(),;:'") for word in line.split() if "/" in word]
    log = re.search(r"[^\s=('\"]*log\.jsonl", output)
    return Ending(
        bits_per_byte=float("".join(figures[-1])) if figures else None,
        log=log.group() if log else None,
        checkpoints=tuple(checkpoints),
    )


def run(
    command: list[str], cwd: Path, timeout: int, all_cores: bool = False
) -> subprocess.CompletedProcess:
    """Run with this interpreter's programs first; both streams end in `stdout`."""
    first = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{first}{os.pathsep}{os.environ['PATH']}"}
    if all_cores:  # as a reader has them; what takes seconds is no faster
        environment.pop("OMP_NUM_THREADS", None)
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        timeout=timeout,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_line(
    command: str, cwd: Path, timeout: int, all_cores: bool = False
) -> subprocess.CompletedProcess:
    return run(["bash", "-euo", "pipefail", "-c", command], cwd, timeout, all_cores)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository's files, without environments, runs and caches."""
    copy = tmp_path / "parsimony"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy2(path, copy)
    for folder in FOLDERS:
        if (ROOT / folder).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    return copy


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
    text, flags = read(document), flags_in(flags_table())
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
    assert between_markers(read("README.md")) == flags_table(), message


@pytest.mark.structure
def test_the_results_table_rests_on_records():
    records = records_linked(read("README.md"))
    assert records, "README.md: no table row links to a record under results/"
    problems = [record_problem(ROOT / record) for record in records]
    assert not any(problems), "\n".join(problems)


def trains(block: Block) -> bool:
    return any("train.py" in command for command in block.commands)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=pytest.mark.slow if trains(block) else (), id=f"row{block.row}")
        for block in run_blocks()
    ],
)
def test_the_commands_run(block, checkout):
    for command in block.commands:
        result = run_line(command, cwd=checkout, timeout=FAST_TIMEOUT_S)
        assert result.returncode == 0, f"$ {command}\n{result.stdout}"


def test_the_readme_has_commands_to_run(checkout):
    assert {trains(block) for block in run_blocks()} == {True, False}
    assert not any((checkout / name).exists() for name in (".git", ".venv", "runs"))
    assert (checkout / "tests/test_readme.py").exists()


@pytest.mark.slow
def test_the_training_command_learns(checkout):
    start = time.monotonic()
    result = run_line(TRAIN, cwd=checkout, timeout=TRAIN_TIMEOUT_S, all_cores=True)
    assert result.returncode == 0, result.stdout
    ending = ending_of(result.stdout)
    print(f"{TRAIN}: {time.monotonic() - start:.0f} s, {ending}")
    assert ending.bits_per_byte is not None, result.stdout
    assert ending.bits_per_byte <= WORST_BITS_PER_BYTE
    assert ending.log is not None, result.stdout
    assert record_problem(checkout / ending.log) == ""
    assert any((checkout / path).exists() for path in ending.checkpoints), result.stdout


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
```text
not a command
```
```bash
left open
"""


@pytest.mark.structure
def test_blocks_and_commands_of_a_page():
    blocks = blocks_of("page.md", PAGE)
    assert [(block.row, block.info) for block in blocks] == [
        (3, "bash"),
        (8, "bash run"),
        (11, "text"),
        (14, "bash"),
    ]
    assert argument_lists(blocks[0].commands[0]) == [
        ["pip", "install", "-e", ".[test]"],
        ["pytest"],
    ]
    assert argument_lists("A=1 python x.py  # why") == [["python", "x.py"]]


@pytest.mark.structure
@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("curl example.org | bash", "starts curl"),
        ("echo 'open", "No closing quotation"),
        ("pytest tests/test_nothing.py::test_it", "no file tests/test_nothing.py"),
        ("make love", "no target love"),
        ("python tests/test_readme.py && make check | head -3", ""),
    ],
)
def test_a_bad_command_is_reported(command, problem):
    problems = command_problems(command)
    assert problem in "\n".join(problems) and bool(problems) == bool(problem)


@pytest.mark.structure
def test_an_unknown_flag_is_reported():
    flags = flags_in("| `--[no-]ltd` | `--ltd-min 64` | `--curriculum` |")
    assert flags == {"--ltd", "--ltd-min", "--curriculum"}
    known = shlex.split("torchrun --standalone train.py --curriculum seqlen --no-ltd --ltd-min=8")
    assert unknown_flags(known, flags) == []
    assert unknown_flags([*known, "--ltd-max", "9"], flags) == ["--ltd-max"]


@pytest.mark.structure
def test_the_flags_table_is_found_and_replaced():
    page = f"before\n{FLAGS_BEGIN}\n| old |\n{FLAGS_END}\nafter\n"
    assert between_markers(with_table(page, "| new |")) == "| new |"
    assert with_table(page, "| old |") == page
    with pytest.raises(ValueError, match="put the two markers back"):
        with_table(page + page, "| new |")


@pytest.mark.structure
@pytest.mark.parametrize(
    "text",
    [
        "see [it](no/such/page.md)",
        "see [it](../outside.md#part)",
        '<img src="docs/none.png">',
        "[ref]: none.md",
        "`no_such_module.py` does it",
        "numbers in `results/none.jsonl`",
    ],
)
def test_a_dead_reference_is_reported(text):
    living = "[`here`](#below) `tests/test_readme.py`, `tests/test_<module>.py`, `log.jsonl`"
    elsewhere = "[`basic_layer.py`](https://example.org/basic_layer.py)"
    assert dead_references("README.md", f"{living} {elsewhere}") == []
    assert dead_references("docs/page.md", "[up](../tests/test_readme.py)") == []
    assert len(dead_references("README.md", f"{living}\n{text}")) == 1


@pytest.mark.structure
def test_a_missing_or_broken_record_is_reported(tmp_path):
    table = "text [a](results/a.jsonl)\n| 1.9 [r](results/b.jsonl) | [s](./results/c.csv) |\n"
    assert records_linked(table) == ["results/b.jsonl", "results/c.csv"]
    record = tmp_path / "r.jsonl"
    for text, problem in (
        (None, "does not exist"),
        ("", "empty"),
        ('{"a": 1}\n{"a":\n', "not JSON"),
        ('{"a": 1}\n', ""),
    ):
        if text is not None:
            record.write_text(text)
        found = record_problem(record)
        assert problem in found and bool(found) == bool(problem)


def test_the_ending_of_a_run_is_read():
    output = """step 10 train 2.50 bits per byte
step 20 held-out 2.10 bits per byte
held-out bits per byte: 1.87
log runs/a/log.jsonl
checkpoint (runs/a/last.pt)
"""
    assert ending_of(output) == Ending(1.87, "runs/a/log.jsonl", ("runs/a/last.pt",))
    assert ending_of("loss 1.2 bits per byte\n") == Ending(None, None, ())


def refresh() -> None:
    """Write the flags table into README.md, whole or not at all."""
    page = ROOT / "README.md"
    written = page.with_suffix(".md.new")
    text = with_table(read("README.md"), flags_table())
    written.write_text(text, encoding="utf-8")
    written.replace(page)


if __name__ == "__main__":
    try:
        refresh()
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
