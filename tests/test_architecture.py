"""Which file may import which, checked in the source; no import cycles.

A technique can be understood, tested and deleted alone only if it does not depend on the model, the
data, the training loop or another technique. A fork with other rules can delete this file: plain
`pytest` does not run it.

    python -m pytest -m structure
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.structure

ROOT = Path(__file__).resolve().parent.parent
TECHNIQUES = {"curriculum", "ltd", "offload", "packing", "pseudo"}
FLOORS = (  # from the bottom up; a file imports only from its own floor and the floors below
    {"kernels"},
    {"support", "model"},
    TECHNIQUES | {"bert", "prepare", "mixture", "data"},
    {"analyze"},
    {"config"},
    {"plan", "sample", "evaluate", "report"},
    {"announce"},
    {"train"},
)
UNDER = {"TYPE_CHECKING": "typing", "__name__ == '__main__'": "main"}  # a condition at the top
REPLACED = {"transformers", "datasets", "accelerate", "tokenizers", "safetensors"}


class Import(NamedTuple):
    module: str  # with the file's name in this repository's folders: support.clock
    row: int
    where: str  # module | function | main | typing


def imports_of(source: str) -> list[Import]:
    """Return every import in a source text.

    Example: 'from support import clock' -> [Import('support.clock', 1, 'module')]
    """
    imports: list[Import] = []

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                is_folder = node.module in ("support", "kernels")
                names = [f"{node.module}.{n}" for n in names] if is_folder else [node.module]
            imports.extend(Import(name, node.lineno, where) for name in names)
        if isinstance(node, ast.FunctionDef) and where != "main":
            where = "main" if node.name == "main" else "function"
        elif isinstance(node, ast.If) and where == "module":
            where = UNDER.get(ast.unparse(node.test), where)
        for child in ast.iter_child_nodes(node):
            visit(child, where)

    visit(ast.parse(source), "module")
    return imports


def product() -> dict[str, str]:
    """Return {module: source} of the product: everything but tests and benches."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("support/**/*.py"), *ROOT.glob("kernels/*.py")]
    named = {path: path.relative_to(ROOT).with_suffix("").as_posix() for path in paths}
    return {name.replace("/", "."): path.read_text("utf-8") for path, name in named.items()}


def floor(module: str) -> int:
    """Return the number of the module's floor. An unlisted file counts as a technique."""
    room = module.split(".")[0]
    return next((n for n, rooms in enumerate(FLOORS) if room in rooms), 2)


def is_allowed(module: str, item: Import, ours: set[str]) -> bool:
    if item.module.split(".")[0] in REPLACED:
        return False
    if item.module not in ours and item.module != "kernels":
        return True  # another library, see test_every_imported_library_is_declared
    if module in TECHNIQUES:
        beside = {"typing": ("model",), "main": ("data",)}.get(item.where, ())
        return item.module.startswith(("kernels", "support.", *beside))
    return floor(item.module) <= floor(module)


def test_every_file_imports_only_what_its_floor_allows():
    sources = product()
    refused = [
        f"{module}:{item.row} imports {item.module}"
        for module, source in sources.items()
        for item in imports_of(source)
        if not is_allowed(module, item, set(sources))
    ]
    assert not refused, "\n".join(refused)


def test_no_import_cycle():
    """Imports inside functions and for type checkers count too, because a reader of one file still
    has to read the other.
    """
    sources = product().items()
    imported = {module: {item.module for item in imports_of(text)} for module, text in sources}
    TopologicalSorter(imported).prepare()  # raises an error that names the modules of a cycle


def test_the_path_of_a_gpt_knows_no_bert():
    """config.py chooses the task and the model; plan.py asks whether there is text to pair."""
    sources = product()
    imported = {module: imports_of(source) for module, source in sources.items()}
    importing = {m for m, items in imported.items() if any(i.module == "bert" for i in items)}
    assert importing == {"config", "plan"} and "from bert import check_pairs\n" in sources["plan"]
    for module in ("model", "data", "evaluate", "config"):
        nodes = ast.walk(ast.parse(sources[module]))
        branches = [n for n in nodes if isinstance(n, ast.If | ast.IfExp | ast.While)]
        has_one = any("bert" in ast.unparse(branch.test).lower() for branch in branches)
        assert has_one == (module == "config"), "config is the control"
        assert module == "config" or "special_ids" not in sources[module]


def test_every_imported_library_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = project["dependencies"] + [line for extra in extras for line in extra]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in lines}
    sources = product()
    imported = {i.module.split(".")[0] for text in sources.values() for i in imports_of(text)}
    ours = {module.split(".")[0] for module in sources}
    assert imported <= declared | ours | sys.stdlib_module_names


# Public names that stand at the top of several files, and mean the same thing in each.
SHARED_NAMES = {
    "main": "a command",
    "parse": "a command line -> settings, of train.py and of evaluate.py",
    "resolved": "a technique's settings with defaults filled in",
    "tokens_by_layer": "what a technique costs on the clock",
    "reference": "a kernel's definition in plain PyTorch",
    "chosen_impl": "the implementation of a kernel on this machine",
    "forward": "of attention, by one implementation",
    "backward": "of attention, by one implementation",
    "wrap_block": "a technique's block runner",
}


def test_a_public_name_has_one_meaning():
    """Then grep, and go to definition, lead to one place."""
    sources = {module: source for module, source in product().items() if module != "lesson"}
    nodes = [node for source in sources.values() for node in ast.parse(source).body]
    names = Counter(n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef))
    several = {name for name, times in names.items() if times > 1 and not name.startswith("_")}
    assert several <= SHARED_NAMES.keys()


def test_heads_name_methods_that_exist():
    """A reader follows the `Class.method` that a file's head names."""
    trees = {module: ast.parse(source) for module, source in product().items()}
    nodes = [node for tree in trees.values() for node in tree.body]
    classes = {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.ClassDef)}
    for module, tree in trees.items():
        head = ast.get_docstring(tree) or ""
        for owner, name in re.findall(r"\b([A-Z]\w+)\.([a-z_]+)\b", head):
            has_it = rf"def {name}\b|\b{name}:|self\.{name}\b"
            assert re.search(has_it, classes.get(owner, f"{name}:")), f"{module}: {owner}.{name}"
