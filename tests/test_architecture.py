"""Who may import whom, read off the source; and that no import goes round in a circle.

A technique can be understood, tested and deleted alone only while it knows nothing of the model,
the data, the loop or another technique; the rules below are what keeps that true. Does not judge
behaviour: that off is absent and neutral is identity is each technique's own test.

    python -m pytest tests/test_architecture.py
"""

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from config import Config
from support.base.technique import techniques_of

ROOT = Path(__file__).resolve().parent.parent

TECHNIQUES = {entry.settings.__module__ for entry in techniques_of(Config).values()}
FIXED_NAMES = {"config", "curriculum", "data", "ltd", "model", "packing", "plan", "train"}
# What each kind of file may import of this repository and of other libraries, besides the standard
# library. A command (main) may import more, a function only what is listed as late.
ALLOWED_IN = {
    "technique": {"torch", "numpy", "kernels"},
    "kernels": {"torch", "triton", "kernels"},
    "model": {"torch", "kernels"},
}
FIRST_PARTY_IN_SUPPORT = {"support", "model", "kernels"}
# Pure functions, and copies of tensors, that import nothing of the trainer's.
SHARED_BY_TECHNIQUES = {
    "support.base.clock",
    "support.rows.cutting_stock",
    "support.rows.packs",
    "pseudo",
    "support.step.placement",
    "support.step.link",
}
COMMAND_OF_A_TECHNIQUE = {
    "support.base.runtime",
    "support.base.settings",
    "support.report.figures",
    "support.step.costs",
    "packing",
    "support.step.placement",
    "support.step.machine",
}
LATE = {"packing": {"scipy"}}  # extras of pyproject.toml, imported by the function that needs them
REPLACED = {  # Hugging Face's libraries: this project does without them
    "transformers",
    "datasets",
    "accelerate",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
}


@dataclass(frozen=True)
class Import:
    """One imported module, and where the statement stands."""

    module: str  # of this repository's folders with the file: support.runtime
    row: int
    where: str  # module | guarded (try, if) | typing | function | main

    @property
    def library(self) -> str:
        return self.module.split(".")[0]


def where_inside(node: ast.AST, where: str) -> str:
    """Where a statement directly inside `node` stands, given where `node` itself stands."""
    if where == "main":
        return "main"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "main" if node.name.strip("_") == "main" else "function"
    if isinstance(node, ast.If) and where in ("module", "guarded"):
        condition = ast.unparse(node.test)
        if condition == "__name__ == '__main__'":
            return "main"
        return "typing" if condition.endswith("TYPE_CHECKING") else "guarded"
    if isinstance(node, ast.Try) and where == "module":
        return "guarded"
    return where


def imports_of(source: str, package: str = "") -> list[Import]:
    """Every import of a source text. A relative one is read as one of `package`.

    Example:  'import torch.nn as nn' -> [Import('torch.nn', 1, 'module')];
              'from support import rng' -> [Import('support.base.rng', 1, 'module')]
    """
    imports: list[Import] = []

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.Import):
            imports.extend(Import(alias.name, node.lineno, where) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{package}.{node.module or ''}".strip(".") if node.level else node.module
            names = [module]
            if module in ("support", "kernels"):  # folders: what is imported are their files
                names = [f"{module}.{alias.name}" for alias in node.names]
            imports.extend(Import(name, node.lineno, where) for name in names)
        inside = where_inside(node, where)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), "module")
    return imports


def modules_named(paths) -> set[str]:
    """The modules among paths relative to the root: 'ltd.py' is 'ltd', 'support/base/rng.py'
    too."""
    return {
        path.removesuffix(".py").replace("/", ".")
        for path in paths
        if path.startswith(("support/", "kernels/")) or "/" not in path
    }


def problems_with(path: str, source: str) -> list[str]:
    """Name each import of one file that its place in the design forbids."""
    name, folder = path.removesuffix(".py"), path.split("/")[0]
    kind = "technique" if name in TECHNIQUES else folder if folder == "kernels" else name
    problems = []

    def refuse(item: Import, remedy: str) -> None:
        problems.append(f"{path}:{item.row}: imports {item.module}: {remedy}")

    for item in imports_of(source, package=folder):
        standard = item.library in sys.stdlib_module_names
        ours = item.library in FIRST_PARTY_IN_SUPPORT or (ROOT / f"{item.library}.py").exists()
        if item.library in REPLACED and folder not in ("tests", "bench"):
            refuse(item, "this project does without it")
        elif item.module == "train" and folder not in ("tests", "bench"):
            refuse(item, "train.py is the end of the line: only tests and benches import it")
        elif folder == "support" and ours and item.library not in FIRST_PARTY_IN_SUPPORT:
            refuse(item, "support is for any trainer: it has support, model and kernels")
        elif kind in ALLOWED_IN and not standard and not may_import(kind, name, item):
            refuse(item, f"a {kind} has {', '.join(sorted(ALLOWED_IN[kind]))}")
        elif kind == "kernels" and item.library == "triton" and item.where == "module":
            refuse(item, "a kernel file imports without it: put it in a try or an if")
    return problems


def may_import(kind: str, name: str, item: Import) -> bool:
    if item.library in ALLOWED_IN[kind]:
        return True
    if item.library in LATE.get(name, set()):
        return item.where in ("function", "main")
    if kind != "technique":
        return False
    if item.where == "main":
        return item.module in COMMAND_OF_A_TECHNIQUE
    return item.module in SHARED_BY_TECHNIQUES


def undeclared(sources: dict[str, str], requirements: list[str]) -> list[str]:
    """Name each import that neither this repository nor pyproject.toml provides."""
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in requirements}
    ours = {module.split(".")[0] for module in modules_named(sources)}
    known = declared | ours | sys.stdlib_module_names | REPLACED
    return [
        f"{path}:{item.row}: imports {item.library}: declare it in pyproject.toml"
        for path, source in sources.items()
        for item in imports_of(source, package=path.split("/")[0])
        if item.library not in known
    ]


def import_cycle(sources: dict[str, str]) -> list[str]:
    """A circle among the modules' imports, wherever in a file they stand, or [].

    An import inside a function hides a circle, it does not end it: whoever reads one of the two
    files has to read the other. Only an import for a type checker is left out.

    Example:  a imports b, b imports a -> ['a', 'b', 'a']
    """
    modules = modules_named(sources)
    follows = {}
    for path, source in sources.items():
        imported = imports_of(source, package=path.split("/")[0])
        names = {item.module for item in imported if item.where != "typing"}
        follows[path.removesuffix(".py").replace("/", ".")] = sorted(names & modules)
    finished: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for following in follows[module]:
            if cycle := walk(following, [*path, module]):
                return cycle
        finished.add(module)
        return []

    for module in sorted(modules):
        if cycle := walk(module, []):
            return cycle
    return []


def repository() -> dict[str, str]:
    """Path relative to the root -> source, of every Python file that the rules speak of."""
    patterns = ("*.py", "support/**/*.py", "kernels/*.py", "bench/**/*.py", "tests/**/*.py")
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def product() -> dict[str, str]:
    """The part of `repository` that is not tests or benches."""
    return {
        path: source
        for path, source in repository().items()
        if not path.startswith(("bench/", "tests/"))
    }


def project_file() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_file_imports_only_what_its_place_allows():
    problems = [p for path, source in repository().items() for p in problems_with(path, source)]
    assert not problems, "\n".join(problems)


def test_every_import_is_declared():
    project = project_file()["project"]
    extras = project["optional-dependencies"].values()
    requirements = project["dependencies"] + [line for extra in extras for line in extra]
    problems = undeclared(product(), requirements)
    assert not problems, "\n".join(problems)


def test_no_import_cycle():
    assert import_cycle(product()) == []


def test_the_fixed_names_exist():
    missing = FIXED_NAMES - modules_named(repository())
    assert not missing, f"renamed or not written: {', '.join(sorted(missing))}"


def test_a_bench_is_named_unlike_any_module_of_the_product():
    names = [path.stem for path in (ROOT / "bench").glob("*.py")]
    taken = {module.split(".")[-1] for module in modules_named(product())} | {"report"}
    assert not taken & set(names), "`import plan` in a bench would be the bench itself"


OFFENCES = {
    "a technique imports another": ("ltd.py", "import packing\n"),
    "a technique imports part of another": ("packing.py", "from curriculum import pacing\n"),
    "a technique imports the model": ("ltd.py", "from model import Transformer\n"),
    "a technique imports the data": ("curriculum.py", "def f():\n    import data\n"),
    "a technique imports the config": ("packing.py", "import os, config\n"),
    "a technique imports the loop": ("ltd.py", "import train\n"),
    "a technique imports support": ("ltd.py", "from support.rng import seed_of\n"),
    "a technique imports the model for its type": (
        "ltd.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from model import Block\n",
    ),
    "runtime at a technique's module level": ("curriculum.py", "from support import runtime\n"),
    "runtime in a technique's function": ("ltd.py", "def f():\n    from support import runtime\n"),
    "runtime where the name is compared otherwise": (
        "ltd.py",
        "if __name__ == 'ltd':\n    import support.runtime\n",
    ),
    "another part of support in a command": ("ltd.py", "def main():\n    import support.optim\n"),
    "another library": ("curriculum.py", "import tqdm\n"),
    "an extra at module level": ("packing.py", "import scipy\n"),
    "an extra in a try at module level": (
        "packing.py",
        "try:\n    import scipy\nexcept ImportError:\n    scipy = None\n",
    ),
    "another technique's extra": ("ltd.py", "def f():\n    import scipy\n"),
    "the model imports the data": ("model.py", "from data import Batch\n"),
    "the model imports a technique": ("model.py", "def f():\n    from ltd import run_block\n"),
    "the model imports support": ("model.py", "from support import rng\n"),
    "support imports a technique": ("support/step/optim.py", "import ltd\n"),
    "support imports the data": (
        "support/base/runtime.py",
        "def f():\n    from data import Batch\n",
    ),
    "support imports the config": ("support/run/folder.py", "import config\n"),
    "a kernel imports numpy": ("kernels/token_drop.py", "import numpy as np\n"),
    "a kernel imports a module": ("kernels/token_drop.py", "from model import Block\n"),
    "a kernel needs Triton": ("kernels/token_drop.py", "import triton.language as tl\n"),
    "the loop imported by a helper": ("sample.py", "from train import assemble\n"),
    "the loop imported by support": ("support/run/run.py", "import train\n"),
    "transformers in the product": (
        "support/text/tokenizer.py",
        "def f():\n    import transformers\n",
    ),
    "a part of safetensors": (
        "support/run/checkpoint.py",
        "from safetensors.torch import save_file\n",
    ),
    "the hub in a technique": ("packing.py", "import huggingface_hub\n"),
}

ALLOWED = {
    "a technique's libraries": ("ltd.py", "import math\nimport torch.nn as nn\nimport numpy\n"),
    "pacing that techniques share": ("ltd.py", "from support.pacing import pace\n"),
    "a technique's kernel": ("ltd.py", "from kernels.token_drop import gather\n"),
    "runtime in main": ("curriculum.py", "def main(argv):\n    from support import runtime\n"),
    "runtime in a function within main": (
        "ltd.py",
        "def main():\n    def step():\n        from support import runtime\n",
    ),
    "runtime in the main block": (
        "packing.py",
        "if __name__ == '__main__':\n    from support.runtime import say\n",
    ),
    "an extra in its function": ("packing.py", "def nnls():\n    from scipy import optimize\n"),
    "a guarded Triton": (
        "kernels/token_drop.py",
        "try:\n    import triton\nexcept ImportError:\n    triton = None\n",
    ),
    "a kernel's neighbour": ("kernels/packed_attention.py", "from .token_drop import tune\n"),
    "the model's kernel": ("model.py", "from kernels.cross_entropy import IGNORE\n"),
    "support's other files": ("support/step/optim.py", "from support import rng\nimport tqdm\n"),
    "support's use of the model": (
        "support/weights/published.py",
        "from model import Transformer\n",
    ),
    "the loop imports techniques": ("train.py", "import ltd, packing\nfrom config import parse\n"),
    "the loop in a test": ("tests/test_train.py", "import train\n"),
    "the loop in a bench": ("bench/ablate.py", "import train\n"),
    "transformers in a comparison": ("bench/step.py", "import transformers\n"),
    "transformers in a test": ("tests/test_model.py", "import transformers\n"),
}


@pytest.mark.parametrize(("path", "source"), list(OFFENCES.values()), ids=list(OFFENCES))
def test_an_offence_is_reported(path, source):
    problems = problems_with(path, source)
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:")


@pytest.mark.parametrize(("path", "source"), list(ALLOWED.values()), ids=list(ALLOWED))
def test_what_is_allowed_is_not_reported(path, source):
    assert problems_with(path, source) == []


def test_the_row_of_an_offence_is_named():
    problems = problems_with("ltd.py", '"""Doc."""\n\nimport torch\nimport model\n')
    assert problems[0].startswith("ltd.py:4: imports model")


def test_a_cycle_is_reported():
    a_to_b = {"a.py": "import b\n", "b.py": "import c\n", "c.py": ""}
    assert import_cycle(a_to_b) == []
    assert import_cycle({**a_to_b, "c.py": "from b import x\n"}) == ["b", "c", "b"]
    assert import_cycle({**a_to_b, "c.py": "try:\n    import a\nfinally:\n    pass\n"})
    assert import_cycle({"a.py": "import a\n"}) == ["a", "a"]
    in_a_function = {"a.py": "import b\n", "b.py": "def f():\n    import a\n"}
    assert import_cycle(in_a_function) == ["a", "b", "a"]
    in_a_folder = {
        "support/a.py": "from support import b\n",
        "support/b.py": "def main():\n    from support.a import f\n",
    }
    assert import_cycle(in_a_folder) == ["support.a", "support.b", "support.a"]
    for_a_type = {
        "a.py": "import b\n",
        "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\n",
    }
    assert import_cycle(for_a_type) == []


def test_an_undeclared_import_is_reported():
    requirements = ["torch>=2.11,<2.14", "numpy"]
    sources = {"a.py": "import os, numpy, torch\nimport b\n", "b.py": "from tqdm import tqdm\n"}
    assert undeclared(sources, requirements) == [
        "b.py:1: imports tqdm: declare it in pyproject.toml"
    ]
    assert undeclared(sources, [*requirements, "tqdm"]) == []
