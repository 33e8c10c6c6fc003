"""Who may import whom, read off the source: nothing is imported or run here.

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

ROOT = Path(__file__).resolve().parent.parent

TECHNIQUES = {"curriculum", "packing", "ltd", "pseudo", "offload"}
FIXED_NAMES = {  # the names that README, the papers' pages and other people's forks point at
    "train",
    "config",
    "model",
    "data",
    "tokenizer",
    "curriculum",
    "ltd",
    "packing",
    "optim",
    "checkpoint",
    "runtime",
    "evaluate",
    "sample",
    "difficulty",
    "plan",
    "published",
}
TECHNIQUE_LIBRARIES = {"torch", "numpy", "kernels"}
# An extra: imported by the function that needs it.
TECHNIQUE_EXTRAS = {"packing": {"scipy"}, "curriculum": {"matplotlib"}}
TECHNIQUE_COMMANDS = {"curriculum": {"difficulty"}}  # main() hands a verb on to this file
KERNEL_LIBRARIES = {"torch", "triton", "kernels"}
MODEL_STRANGERS = {"data", "plan", "train", "config"} | TECHNIQUES
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
    """One imported module, by the first part of its name, and where the statement stands."""

    module: str
    row: int
    where: str  # module | guarded (try, if) | typing | function | main


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

    Example:  'import torch.nn as nn' -> [Import('torch', 1, 'module')]
    """
    found: list[Import] = []

    def visit(node: ast.AST, where: str) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(a.name.split(".")[0], node.lineno, where) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = package if node.level else node.module.split(".")[0]
            found.append(Import(module, node.lineno, where))
        inside = where_inside(node, where)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), "module")
    return found


def modules_named(names: dict[str, object]) -> set[str]:
    """The top-level modules among paths relative to the root: 'ltd.py' is 'ltd'."""
    return {path.removesuffix(".py") for path in names if "/" not in path}


def problems_with(path: str, source: str) -> list[str]:
    """Name each import of one file that its place in the design forbids."""
    name = path.removesuffix(".py")
    in_kernels = path.startswith("kernels/")
    problems = []

    def refuse(item: Import, remedy: str) -> None:
        problems.append(f"{path}:{item.row}: imports {item.module}: {remedy}")

    for item in imports_of(source, package=path.split("/")[0]):
        standard = item.module in sys.stdlib_module_names
        if item.module in REPLACED and not path.startswith(("tests/", "bench/")):
            refuse(item, "this project does without it")
        elif item.module == "train" and not path.startswith("tests/"):
            refuse(item, "train.py is the end of the line: only tests import it")
        elif name == "model" and item.module in MODEL_STRANGERS:
            refuse(item, "the model knows nothing of it: go through run_block or the metadata")
        elif name in TECHNIQUES and not standard and not technique_may(name, item):
            refuse(item, "a technique has torch, numpy, kernels; runtime in main(); extras late")
        elif in_kernels and not standard and item.module not in KERNEL_LIBRARIES:
            refuse(item, "a kernel has torch, triton and the standard library")
        elif in_kernels and item.module == "triton" and item.where == "module":
            refuse(item, "a kernel file imports without it: put it in a try or an if")
    return problems


def technique_may(name: str, item: Import) -> bool:
    if item.module in TECHNIQUE_LIBRARIES:
        return True
    if item.module in TECHNIQUE_EXTRAS.get(name, set()):
        return item.where in ("function", "main")
    return item.where == "main" and item.module in {"runtime"} | TECHNIQUE_COMMANDS.get(name, set())


def undeclared(sources: dict[str, str], requirements: list[str]) -> list[str]:
    """Name each import that neither this repository nor pyproject.toml provides."""
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in requirements}
    known = declared | modules_named(sources) | sys.stdlib_module_names | {"kernels"} | REPLACED
    return [
        f"{path}:{item.row}: imports {item.module}: declare it in pyproject.toml"
        for path, source in sources.items()
        for item in imports_of(source, package=path.split("/")[0])
        if item.module not in known
    ]


def import_cycle(sources: dict[str, str]) -> list[str]:
    """A cycle among the top-level modules' imports at module level, or [].

    Example:  a imports b, b imports a -> ['a', 'b', 'a']
    """
    modules = modules_named(sources)
    follows = {
        module: sorted(
            {
                item.module
                for item in imports_of(sources[f"{module}.py"])
                if item.module in modules and item.where in ("module", "guarded")
            }
        )
        for module in modules
    }
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
    patterns = ("*.py", "kernels/**/*.py", "bench/**/*.py", "tests/**/*.py")
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def installed() -> dict[str, str]:
    """The part of `repository` that pip installs: top-level modules and kernels."""
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
    problems = undeclared(installed(), requirements)
    assert not problems, "\n".join(problems)


def test_no_import_cycle():
    assert import_cycle(installed()) == []


def test_the_fixed_names_exist():
    missing = FIXED_NAMES - modules_named(repository())
    assert not missing, f"renamed or not written: {', '.join(sorted(missing))}"


def test_pip_installs_every_module():
    setuptools = project_file()["tool"]["setuptools"]
    assert set(setuptools["py-modules"]) == modules_named(repository())
    if any(path.startswith("kernels/") for path in repository()):
        assert setuptools.get("packages") == ["kernels"]


OFFENCES = {
    "a technique imports another": ("ltd.py", "import packing\n"),
    "a technique imports part of another": ("packing.py", "from curriculum import pacing\n"),
    "a technique imports the model": ("pseudo.py", "from model import Transformer\n"),
    "a technique imports the data": ("curriculum.py", "def f():\n    import data\n"),
    "a technique imports the config": ("offload.py", "import os, config\n"),
    "a technique imports the loop": ("ltd.py", "import train\n"),
    "a technique imports the model for its type": (
        "ltd.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from model import Block\n",
    ),
    "runtime at a technique's module level": ("curriculum.py", "import runtime\n"),
    "runtime in a technique's function": ("ltd.py", "def draw():\n    import runtime\n"),
    "runtime where the name is compared otherwise": (
        "ltd.py",
        "if __name__ == 'ltd':\n    import runtime\n",
    ),
    "another library": ("curriculum.py", "import tqdm\n"),
    "an extra at module level": ("packing.py", "import scipy\n"),
    "an extra in a try at module level": (
        "packing.py",
        "try:\n    import scipy\nexcept ImportError:\n    scipy = None\n",
    ),
    "another technique's command": ("ltd.py", "def main():\n    import difficulty\n"),
    "a command's file outside of main": ("curriculum.py", "def pace():\n    import difficulty\n"),
    "another technique's extra": ("ltd.py", "def f():\n    import scipy\n"),
    "the model imports the data": ("model.py", "from data import Batch\n"),
    "the model imports a technique": ("model.py", "def f():\n    from ltd import run_block\n"),
    "the model imports the config": ("model.py", "import config\n"),
    "a kernel imports numpy": ("kernels/token_drop.py", "import numpy as np\n"),
    "a kernel imports a module": ("kernels/token_drop.py", "from model import Block\n"),
    "a kernel needs Triton": ("kernels/token_drop.py", "import triton.language as tl\n"),
    "the loop imported by a helper": ("sample.py", "from train import assemble\n"),
    "the loop imported by a bench": ("bench/ablate.py", "import train\n"),
    "transformers in the product": ("tokenizer.py", "def f():\n    import transformers\n"),
    "a part of safetensors": ("checkpoint.py", "from safetensors.torch import save_file\n"),
    "the hub in a technique": ("packing.py", "import huggingface_hub\n"),
}

ALLOWED = {
    "a technique's libraries": ("ltd.py", "import math\nimport torch.nn as nn\nimport numpy\n"),
    "a technique's kernel": ("ltd.py", "from kernels.token_drop import gather\n"),
    "a command's file in main": ("curriculum.py", "def main(argv):\n    import difficulty\n"),
    "runtime in main": ("curriculum.py", "def main(argv):\n    import runtime\n"),
    "runtime in a function within main": (
        "ltd.py",
        "def main():\n    def step():\n        import runtime\n",
    ),
    "runtime in the main block": (
        "packing.py",
        "if __name__ == '__main__':\n    from runtime import say\n",
    ),
    "an extra in its function": ("packing.py", "def nnls():\n    from scipy import optimize\n"),
    "a guarded Triton": (
        "kernels/token_drop.py",
        "try:\n    import triton\nexcept ImportError:\n    triton = None\n",
    ),
    "a kernel's neighbour": ("kernels/packed_attention.py", "from .token_drop import tune\n"),
    "the loop imports techniques": ("train.py", "import ltd, packing\nfrom config import parse\n"),
    "the loop in a test": ("tests/test_train.py", "import train\n"),
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
    late = {
        "a.py": "import b\n",
        "b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\n"
        "def f():\n    import a\n",
    }
    assert import_cycle(late) == []


def test_an_undeclared_import_is_reported():
    requirements = ["torch>=2.11,<2.14", "numpy"]
    sources = {"a.py": "import os, numpy, torch\nimport b\n", "b.py": "from tqdm import tqdm\n"}
    assert undeclared(sources, requirements) == [
        "b.py:1: imports tqdm: declare it in pyproject.toml"
    ]
    assert undeclared(sources, [*requirements, "tqdm"]) == []
