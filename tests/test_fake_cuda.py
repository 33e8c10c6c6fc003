"""train.py, evaluate.py and sample.py on a CUDA device that is not there (tests/fake_cuda.py).

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
    "--layers 3 --heads 2 --width 32 --seq-len 32 --batch-tokens 128 --micro-batch-size 2"
    " --tokens 256 --eval-tokens 64 --final-eval-tokens 64 --compile off"
)
# Without what is no step: a last evaluation and a sample, and products that time the machine.
SHORT = {
    "train.finish": "lambda *_: None",
    "support.step.machine.measured": "lambda *_: importlib.import_module('support.step.machine')"
    ".Rates(link=25e9, flops=1e14, adamw=1e9)",
    "support.step.machine.measured_peak": "lambda *_: 1e14",
}
READ = "a copy to the host in train.py:update"  # the loss and the norm of the gradient
# What a step waits for besides.
ALSO = {
    "adaptive": {"update: _local_scalar_dense in pseudo.py:are_calm"},
    "fp16": {
        "update: _local_scalar_dense in support/step/optim.py:clip_gradients"
    },  # skip the step?
}
# Gradients that come home, and the norm of those that are there: one number each way.
ALSO["offload"] = {
    "gradients: Event.synchronize in support/step/link.py:settle",
    "update: a copy from the host in support/step/optim.py:<listcomp>",
    "update: a copy to the host in support/step/optim.py:clip_gradients",
    "update: from pageable memory in support/step/optim.py:<listcomp>",
}
ALSO["offload of all"] = ALSO["offload"] | {  # Muon's directions
    "update: a copy to the host in support/step/muon.py:step",
}

QUICK = {
    "everything": "--curriculum seqlen --ltd --pack",
    "bert": "--model bert --nsp --pack --loss-per document",
    "recomputed": "--checkpoint-activations --pseudo --pseudo-until 0.5 --dtype fp32"
    " --optimizer adamw",
    "in fp32": "--dtype fp32 --optimizer adamw",
    "offload": "--offload --offload-budget 2600KB --dtype fp32 --optimizer adamw",
}
MORE = {
    "plain": "",
    "learned": "--pos learned --dtype fp32 --optimizer adamw",
    "fp16": "--dtype fp16 --pack",
    "ltd": "--ltd --ltd-start 8",
    "pack": "--pack --pack-batch documents",
    "reshape": "--curriculum seqlen-reshape --dtype fp32 --optimizer adamw",
    "rarity": "--curriculum rarity --ltd --dtype fp32 --optimizer adamw",
    "everything in fp32": "--curriculum seqlen --ltd --pack --dtype fp32 --optimizer adamw",
    "bert of rows": "--model bert --dtype fp32 --optimizer adamw",
    "growth": "--pseudo --pseudo-layers 2 --ltd",
    "adaptive": "--pseudo --pseudo-until adaptive:0.5 --dtype fp32 --optimizer adamw",
    "dropout": "--dropout 0.1 --pack",
    "offload of all": "--offload --offload-budget 2400KB --pack --ltd",
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not fake_cuda.is_cpu_build():
        pytest.skip("this torch has CUDA of its own: tests marked gpu are for it")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, by which torch would be told of a device")
    return fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))


def reports_of(library: Path, runs: dict[str, dict], folder: Path) -> dict[str, dict]:
    """Run commands on the device, one after the other in one process."""
    command = [sys.executable, "-m", "tests.fake_cuda", str(library), str(folder / "report.json")]
    more = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        input=json.dumps(runs),
        text=True,
        capture_output=True,
        cwd=fake_cuda.ROOT,
        env=os.environ | more,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text())


def flags_of(more: str, out: Path, device: str = "cuda") -> list[str]:
    return [*SMALL.split(), *more.split(), "--device", device, "--out", str(out)]


def problems_with(name: str, report: dict) -> list[str]:
    """What a run did that it must not."""
    problems = [report["error"]] if report["status"] else []
    for number, step in enumerate(report["steps"], 1):
        expected = {f"update: {READ}"} | ALSO.get(name, set())
        unexpected = set(step["syncs"]) - expected
        pageable = {what for what in step["copies"] if "pageable" in what} - expected
        problems += [f"step {number} waits: {what}" for what in sorted(unexpected)]
        if step["syncs"].get(f"update: {READ}") != 1:
            problems.append(f"step {number} reads its loss {step['syncs']} times")
        problems += [f"step {number}: {what}" for what in sorted(pageable)]
        problems += [f"step {number} computes in float64: {what}" for what in step["doubles"]]
    return problems


def check_recipes(library: Path, recipes: dict[str, str], folder: Path) -> dict[str, list[float]]:
    """Run them on the device and on the host; the losses on the device."""
    runs = {
        name: {"flags": flags_of(flags, folder / name), "patch": SHORT}
        for name, flags in recipes.items()
    }
    in_fp32 = {name for name, flags in recipes.items() if "fp32" in flags}
    for name in recipes:
        flags = recipes[name] if name in in_fp32 else f"{recipes[name]} --dtype fp32"
        flags = flags.replace("--dtype fp16", "")
        host = flags_of(flags, folder / f"{name} on the host", "cpu")
        runs[f"{name} on the host"] = {"flags": host, "patch": SHORT}
    reports = reports_of(library, runs, folder)
    problems = []
    for name in recipes:
        problems += [f"{name}: {problem}" for problem in problems_with(name, reports[name])]
        found, expected = (
            [step["loss"] for step in reports[which]["steps"]]
            for which in (name, f"{name} on the host")
        )
        tolerance = 2e-4 if name in in_fp32 else 2e-3  # AdamW makes much of a small gradient
        if name == "dropout":  # every device draws its own
            tolerance = 0.02
        if expected != pytest.approx(found, rel=tolerance) or len(found) < 2:
            problems.append(f"{name}: losses {found}, on the host {expected}")
    assert not problems, "\n".join(problems)
    return {name: [step["loss"] for step in report["steps"]] for name, report in reports.items()}


def test_recipes_on_the_device(library, tmp_path):
    losses = check_recipes(library, QUICK, tmp_path)
    assert losses["offload"] == losses["in fp32"], "what is away changes no bit"


def test_what_saves_launches_changes_nothing(library, tmp_path):
    """Weights that are rounded together, and layers whose kept tokens are looked at together."""
    flags = "--ltd --pack --layers 4"
    apart = {
        "support.step.blocks.with_rounded_weights": "lambda inner: inner",
        "model.TokenMeta.take_each": "lambda self, kept: [self.take(one) for one in kept]",
    }
    runs = {
        "together": {"flags": flags_of(flags, tmp_path / "together"), "patch": SHORT},
        "apart": {"flags": flags_of(flags, tmp_path / "apart"), "patch": SHORT | apart},
    }
    together, apart = (report["steps"] for report in reports_of(library, runs, tmp_path).values())
    assert len(together) > 1
    for one, other in zip(together, apart, strict=True):
        assert one["loss"] == other["loss"]
        assert one["launches"]["gradients"] < 0.9 * other["launches"]["gradients"]


LAUNCHES = {  # of a micro-batch of 12 layers, where gradients are new, and of an update
    "plain": ("", 480, 150),
    "everything": ("--curriculum seqlen --ltd --pack", 620, 150),
}


@pytest.mark.slow
def test_launches_stay_few(library, tmp_path):
    """As docs/step.md has them, for a model of 12 layers; they do not depend on its width."""
    shape = "--layers 12 --pos learned --batch-tokens 64 --micro-batch-size 2"
    runs = {
        name: {"flags": flags_of(f"{more} {shape}", tmp_path / name), "patch": SHORT}
        for name, (more, _, _) in LAUNCHES.items()
    }
    for name, report in reports_of(library, runs, tmp_path).items():
        _, micro_batch, update = LAUNCHES[name]
        second = report["steps"][1]["launches"]  # the first makes the optimizers' state
        assert second["gradients"] <= micro_batch and second["update"] <= update, (name, second)


@pytest.mark.slow
def test_more_recipes_on_the_device(library, tmp_path):
    check_recipes(library, MORE, tmp_path)


def test_a_run_goes_on_and_is_read(library, tmp_path):
    """Stopped and resumed on the device, a run is the same, bit for bit; its checkpoint is read."""
    flags = "--ltd --tokens 384"
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    read = ["--device", "cuda"]
    evaluated = {"command": "evaluate", "flags": [str(whole), "--tokens", "64", *read]}
    sampled = {"command": "sample", "flags": [str(whole), "--tokens", "8", *read]}
    runs = {
        "whole": {"flags": flags_of(flags, whole)},
        "stopped": {"flags": flags_of(flags, stopped), "stop": 2},
        "resumed": {"flags": ["--resume", "--out", str(stopped)]},
        "evaluated": evaluated,
        "sampled": sampled,
    }
    reports = reports_of(library, runs, tmp_path)
    for name, status in zip(runs, (0, 143, 0, 0, 0), strict=True):
        assert reports[name]["status"] == status, reports[name]["error"]
    losses = {
        folder: [line["loss"] for line in read_log(folder, "train")] for folder in (stopped, whole)
    }
    assert len(losses[whole]) > 2 and losses[stopped] == losses[whole]
    last = read_log(whole, "eval")[-1]["val_bpb"]
    assert f"{last:.4f}" in reports["evaluated"]["said"]
    assert reports["sampled"]["said"].strip()


# What each mistake leads to, made on purpose.
MISTAKES = {
    "a mix of devices": (
        {"support.rows.batch.Batch.to": "lambda self, device: self"},
        "Expected all tensors to be on the same device",
    ),
    "a copy that is waited for": (
        {"support.rows.batch.on_device": "lambda tensor, device: tensor.to(device)"},
        "from pageable memory",
    ),
    "a number that is read": (
        {"train.shares_of": "lambda batch, *_: batch.tokens.sum().item() and None"},
        "waits: gradients: _local_scalar_dense",
    ),
    "float64": (
        {"train.shares_of": "lambda batch, *_: torch.ones_like(batch.tokens, dtype=torch.float64)"},
        "computes in float64: ones_like",
    ),
}


def test_mistakes_are_found(library, tmp_path):
    runs = {
        name: {
            "flags": flags_of("--dtype fp32 --optimizer adamw", tmp_path / name),
            "patch": patch | SHORT,
        }
        for name, (patch, _) in MISTAKES.items()
    }
    reports = reports_of(library, runs, tmp_path)
    for name, (_, said) in MISTAKES.items():
        problems = "\n".join(problems_with(name, reports[name]))
        assert said in problems, f"{name}: {problems}"
