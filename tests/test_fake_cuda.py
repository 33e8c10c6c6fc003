"""train.py, evaluate.py and sample.py on a pretended CUDA device (tests/fake_cuda.py).

No tensors of two devices meet, the host waits for the device once a step, what it sends is
page-locked, nothing is computed in float64 there, and the losses are those of a CPU.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import read_log

from tests import fake_cuda

SMALL = (
    "--tokenizer bytes --layers 3 --heads 1 --width 32 --seq-len 16 --batch-tokens 32"
    " --micro-batch-size 1 --tokens 64 --lr 1e-3"
    " --eval-every 0 --final-eval-tokens 16 --compile off"
)
IN_FP32 = "--dtype fp32 --optimizer adamw"  # so that rounding is not amplified
# Left out: most of the sample. Triton's interpreter is faster with the head's columns in small
# blocks.
UNTIMED = {
    "train.SAMPLE_TOKENS": "3",
    "kernels.cross_entropy.COLS": "256",
    "kernels.attention_tiles.tiles": "lambda *_: dict(OWN=16, VISITED=16, num_warps=4,"
    " num_stages=2)",
}
# And what is no step: a last evaluation and a sample.
STEPS_ALONE = UNTIMED | {"train.finish": "lambda *_: None"}
READ = "update: a copy to the host in train.py"  # the loss and the norm of the gradient
# Gradients that come home, and the norm of those that are there: one number each way.
COMING_HOME = {
    "gradients: synchronize in offload.py",
    "update: a copy from the host in support/optim.py",
    "update: a copy to the host in support/optim.py",
    "update: from pageable memory in support/optim.py",
}
ALSO = {  # what a step waits for besides
    "offload": COMING_HOME,
    "offload of all": COMING_HOME | {"update: a copy to the host in support/optim.py"},
}

QUICK = {
    "everything": "--curriculum seqlen --ltd --pack --layers 4 --batch-tokens 16 --tokens 12",
    "bert": "--model bert --nsp --pack --loss-per document --layers 2 --tokens 40",
    "recomputed": f"--checkpoint-activations --pseudo --pseudo-until 0.5 {IN_FP32}",
    "in fp32": IN_FP32,
    "offload": f"--offload --offload-budget 450KB {IN_FP32}",
}
MORE = {
    "plain": "",
    "pack": "--pack --pack-batch documents",
    "reshape": f"--curriculum seqlen-reshape {IN_FP32}",
    "everything in fp32": f"--curriculum seqlen --ltd --pack {IN_FP32}",
    "bert of rows": f"--model bert {IN_FP32}",
    "growth": "--pseudo --pseudo-layers 2 --ltd",
    "dropout": "--dropout 0.1 --pack",
    "offload of all": "--offload --offload-budget 450KB --pack --ltd",
}
# Problems that mistakes made on purpose lead to.
MISTAKES = {
    "on the same device": {"model.Batch.to": "lambda self, device: self"},
    "from pageable memory": {"model.on_device": "lambda t, device: t.to(device)"},
    "waits: gradients: _local_scalar_dense": {
        "train.shares_of": "lambda batch, *_: batch.tokens.sum().item() and None"
    },
    "computes in float64": {"train.shares_of": "lambda batch, *_: batch.tokens.double()"},
}
# Kept tokens looked at layer by layer.
APART = {"model.TokenMeta.take_each": "lambda self, kept: [self.take(one) for one in kept]"}
LAUNCHES = {  # of a micro-batch of 12 layers, where gradients are new, and of an update
    "plain, 12 layers": ("", 650, 150),
    "everything, 12 layers": ("--curriculum seqlen --ltd --pack", 790, 150),
    "bert, 12 layers": ("--model bert --nsp --pack", 760, 150),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not fake_cuda.is_cpu_build():
        pytest.skip("this torch has CUDA of its own: tests marked gpu are for it")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, by which torch would be told of a device")
    return fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))


class Runs:
    """Commands to run on the device, one after the other in one process."""

    def __init__(self, folder: Path, store: Path):
        self.folder, self.store = folder, store
        self.runs: dict[str, dict] = {}

    def train(self, name: str, flags: str, patch: dict = STEPS_ALONE, **more: object) -> None:
        words = f"--device cuda {SMALL} --data {self.store} {flags}".split()
        words += ["--out", str(self.folder / name)]
        self.runs[name] = {"flags": words, "patch": patch, **more}

    def recipe(self, name: str, flags: str) -> None:
        """On the device, and in fp32 on the host."""
        self.train(name, flags)
        on_host = flags + " --dtype fp32 --device cpu"
        self.train(f"{name} on the host", on_host)

    def reports(self, library: Path) -> dict[str, dict]:
        command = [sys.executable, "-m", "tests.fake_cuda", library, self.folder / "r.json"]
        inputs = {"input": json.dumps(self.runs), "cwd": fake_cuda.ROOT}
        env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, **inputs, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return json.loads((self.folder / "r.json").read_text())


@pytest.fixture(scope="module")
def reports(library, store_dir, tmp_path_factory):
    """All that the quick tests look at, and the folder of the runs under "folder"."""
    runs = Runs(tmp_path_factory.mktemp("runs"), store_dir)
    for name, flags in QUICK.items():
        runs.recipe(name, flags)
    runs.train("apart", QUICK["everything"], STEPS_ALONE | APART)
    for problem, patch in MISTAKES.items():
        runs.train(problem, f"{IN_FP32} --tokens 32", STEPS_ALONE | patch)
    runs.train("stopped", QUICK["recomputed"], UNTIMED, stop=2)
    again = ["--resume", "--out", str(runs.folder / "stopped")]
    runs.runs["resumed"] = {"flags": again, "patch": UNTIMED}
    for command, more in {"evaluate": [], "sample": ["--prompt", "x"]}.items():
        flags = [str(runs.folder / "stopped"), "--tokens", "8", "--device", "cuda", *more]
        runs.runs[command] = {"command": command, "flags": flags}
    return runs.reports(library) | {"folder": runs.folder}


def problems_with(name: str, report: dict) -> list[str]:
    """What a run did that it must not."""
    problems = [report["error"]] if report["status"] else []
    expected = {READ} | ALSO.get(name, set())
    for number, step in enumerate(report["steps"], 1):
        unexpected = set(step["syncs"]) - expected
        pageable = {kind for kind in step["copies"] if "pageable" in kind} - expected
        problems += [f"step {number} waits: {sync}" for sync in sorted(unexpected)]
        if step["syncs"].get(READ) != 1:
            problems.append(f"step {number} reads its loss {step['syncs']} times")
        problems += [f"step {number}: {kind}" for kind in sorted(pageable)]
        problems += [f"step {number} computes in float64: {kind}" for kind in step["doubles"]]
    return problems


def losses_of(report: dict) -> list[float]:
    return [step["loss"] for step in report["steps"]]


def check_recipe(name: str, flags: str, reports: dict[str, dict]) -> None:
    problems = problems_with(name, reports[name])
    found, expected = losses_of(reports[name]), losses_of(reports[f"{name} on the host"])
    tolerance = 2e-4 if "fp32" in flags else 2e-3  # AdamW makes much of a small gradient
    if name == "dropout":  # every device draws its own
        tolerance = 0.02
    if expected != pytest.approx(found, rel=tolerance) or len(found) < 2:
        problems.append(f"losses {found}, on the host {expected}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", QUICK)
def test_recipes_on_the_device(name, reports):
    check_recipe(name, QUICK[name], reports)


def test_offload_changes_no_bit(reports):
    assert losses_of(reports["offload"]) == losses_of(reports["in fp32"])


def test_what_saves_launches_changes_nothing(reports):
    together, apart = reports["everything"], reports["apart"]
    assert losses_of(together) == losses_of(apart)
    for step, other in zip(together["steps"], apart["steps"], strict=True):
        assert step["launches"]["gradients"] < 0.96 * other["launches"]["gradients"]


def test_a_run_is_resumed_evaluated_and_sampled(reports):
    """Stopped and resumed on the device, a run is the same, bit for bit; its checkpoint is read."""
    statuses = {"stopped": 143, "resumed": 0, "evaluate": 0, "sample": 0}
    for name, status in statuses.items():
        assert reports[name]["status"] == status, reports[name]["error"]
    whole, stopped = (
        [line["loss"] for line in read_log(reports["folder"] / name, "train")]
        for name in ("recomputed", "stopped")
    )
    assert len(whole) > 1 and stopped == whole
    assert "bits per byte" in reports["evaluate"]["said"]
    assert reports["sample"]["said"].strip()


@pytest.mark.parametrize("problem", MISTAKES)
def test_mistakes_are_found(problem, reports):
    assert problem in "\n".join(problems_with(problem, reports[problem]))


@pytest.mark.slow
def test_more_recipes_on_the_device(library, store_dir, tmp_path):
    """Launches are as docs/step.md has them; they do not depend on a model's width."""
    runs = Runs(tmp_path, store_dir)
    for name, flags in MORE.items():
        runs.recipe(name, flags)
    shape = "--layers 12 --pos learned --micro-batch-size 2"
    for name, (flags, _, _) in LAUNCHES.items():
        runs.train(name, f"{flags} {shape}")
    reports = runs.reports(library)
    for name, flags in MORE.items():
        check_recipe(name, flags, reports)
    for name, (_, micro_batch, update) in LAUNCHES.items():
        second = reports[name]["steps"][1]["launches"]  # the first makes the optimizers' state
        assert second["gradients"] <= micro_batch and second["update"] <= update, (name, second)
