"""One budget for the whole: its size is a decision, taken below and nowhere else.

Counts code lines: rows with a token of code on them. Blank lines, comments and docstrings are free.
No single file has a cap, for caps on files cut subjects apart; a long one says in its head why it
is one subject. A fork may delete this file: it is not part of plain `pytest`.

    python -m tests.test_budget                 # every file and its lines, and the totals
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

pytestmark = pytest.mark.structure

ROOT = Path(__file__).resolve().parent.parent
# Raising a number is a commit of its own that says why. The goal for the product is 6,900 lines:
# what is added from here on makes something else simpler.
MOST = {"product": 7_376, "bench": 1_334, "tests": 8_220, "docs": 460, "lesson": 250}
MOST_FILES = 41  # of the product: the example of docs/extending.md adds one
LONG = 450  # code lines, above which a file's docstring says "one subject" and why
CODELESS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Rows with code.

    Example: "x = 1  # one", "", "# two" has 1
    """
    rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in CODELESS:
            rows.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            rows -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(rows)


def files_of(part: str) -> list[Path]:
    named = {"product": ("*.py", "support/**/*.py", "kernels/*.py"), "lesson": ("lesson.py",)}
    folders = named.get(part, (f"{part}/*.py",))
    found = [path for pattern in folders for path in sorted(ROOT.glob(pattern))]
    of_lesson = ["lesson.py"] * (part == "product")  # stands beside the product
    return [path for path in found if path.stat().st_size and path.name not in of_lesson]


@pytest.mark.parametrize("part", MOST)
def test_the_whole_is_within_its_budget(part):
    lines = sum(code_lines(path.read_text("utf-8")) for path in files_of(part))
    assert lines <= MOST[part], f"{part}: make something else simpler first"


def test_the_product_is_few_files_and_a_long_one_says_why():
    files = files_of("product")
    assert len(files) <= MOST_FILES
    for path in files:
        source = path.read_text("utf-8")
        if code_lines(source) > LONG:
            assert "one subject" in (ast.get_docstring(ast.parse(source)) or ""), path


def main() -> None:
    for part, most in MOST.items():
        lines = {path: code_lines(path.read_text("utf-8")) for path in files_of(part)}
        for path, count in lines.items():
            print(f"{count:6} {path.relative_to(ROOT)}")
        print(f"{sum(lines.values()):6} of {most} in {len(lines)} files: {part}\n")


if __name__ == "__main__":
    main()
