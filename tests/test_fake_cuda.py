"""train.py, evaluate.py and sample.py on a fake CUDA device (tests/fake_cuda.py).

Tensors of two devices never meet, the host waits for the device once a step, it copies only from
page-locked memory, nothing is computed in float64 on the device, and losses equal a CPU's.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests import fake_cuda

SMALL = "--tokenizer bytes --layers 3 --heads 1 --width 32 --seq-len 16 --batch-tokens 32"
SMALL += " --micro-batch-size 1 --tokens 64 --lr 1e-3"
SMALL += " --eval-every 0 --final-eval-tokens 16 --compile off"
IN_FP32 = "--dtype fp32 --optimizer adamw"  # which do not amplify rounding
# Shorten the sample; Triton's interpreter is faster with small blocks.
SHORT = {
    "train.SAMPLE_TOKENS": "3",
    "kernels.cross_entropy.COLS": "256",
    "kernels.attention_tiles.tiles": "lambda *_: dict(OWN=16, VISITED=16, num_warps=4,"
    " num_stages=2)",
}
# Also leave out everything but steps: the last evaluation, the sample and checkpoints.
STEPS_ALONE = SHORT | {"train.finish": "lambda *_: None", "train.Run.save": "lambda *_: None"}
READ = "waits for a copy to the host in train.py"  # reads the loss and the gradient's norm
# With --offload, gradients are copied to the host, and so is the norm of those on the device, one
# number each way. So are Muon's updates of offloaded matrices.
OFFLOAD_COSTS = {
    "waits for synchronize in offload.py",
    "waits for a copy from the host in optim.py",
    "waits for a copy to the host in optim.py",
    "copies from pageable memory in optim.py",
}

QUICK = {
    "everything": "--curriculum seqlen --ltd --pack --batch-tokens 16 --tokens 12",
    "bert": "--model bert --nsp --pack --loss-per document --layers 1 --tokens 40",
    "recomputed": f"--checkpoint-activations --pseudo --pseudo-until 0.5 {IN_FP32}",
    "in fp32": IN_FP32,
}
OFFLOAD = f"--offload --offload-budget 450KB {IN_FP32}"
MORE = {
    "reshape": f"--curriculum seqlen-reshape {IN_FP32}",
    "growth": "--pseudo --pseudo-layers 2 --ltd",
    "dropout": "--dropout 0.1 --pack",
    "offload of all": "--offload --offload-budget 450KB --pack --ltd",
}
# The problem that is reported -> a mistake made on purpose.
MISTAKES = {
    "on the same device": {"model.Batch.to": "lambda self, device: self"},
    "copies from pageable memory": {"plan.on_device": "lambda t, device: t.to(device)"},
    "computes in float64": {"model.Transformer.loss": "lambda self, x, *_: x.double().sum()"},
}


@pytest.fixture(scope="module")
def run_all(store_dir, tmp_path_factory):
    """Run commands on the device, one after the other in one process; return reports by name."""
    if (fake_cuda.TORCH / "lib" / "libtorch_cuda.so").exists():
        pytest.skip("this torch has CUDA: run the tests marked gpu instead")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler to build the fake device")
    folder = tmp_path_factory.mktemp("fake_cuda")
    library = fake_cuda.build(folder)

    def start(runs: dict[str, dict]) -> dict[str, dict]:
        for name, run in runs.items():
            if "--batch-tokens" in run["flags"]:
                run["flags"] += ["--data", str(store_dir), "--out", name]
        command = [sys.executable, "-m", "tests.fake_cuda", library, "report.json"]
        env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(fake_cuda.ROOT)}
        options = {"cwd": folder, "env": env, "text": True, "capture_output": True}
        done = subprocess.run(command, input=json.dumps(runs), **options)
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "report.json").read_text())

    return start


def with_flags(flags: str, patch: dict = STEPS_ALONE, **more: object) -> dict:
    return {"flags": f"--device cuda {SMALL} {flags}".split(), "patch": patch, **more}


def recipes(of: dict[str, str]) -> dict[str, dict]:
    """Return two runs of each recipe: on the device, and in fp32 on the host."""
    on_host = {f"{name} on the host": f"{of[name]} --dtype fp32 --device cpu" for name in of}
    return {name: with_flags(flags) for name, flags in (of | on_host).items()}


@pytest.fixture(scope="module")
def reports(run_all):
    """The reports of everything that the quick tests check."""
    runs = recipes(QUICK) | {"offload": with_flags(OFFLOAD)}
    for problem, patch in MISTAKES.items():
        # the third step is planned when the first is done, so its planning is seen
        runs[problem] = with_flags(f"{IN_FP32} --tokens 96 --layers 1", STEPS_ALONE | patch)
    runs["stopped"] = with_flags(QUICK["recomputed"], SHORT, stop=1)
    runs["resumed"] = {"flags": ["--resume", "--out", "stopped"], "patch": SHORT}
    for command, more in {"evaluate": [], "sample": ["--prompt", "x"]}.items():
        flags = ["stopped", "--tokens", "8", "--device", "cuda", *more]
        runs[command] = {"command": command, "flags": flags}
    return run_all(runs)


def problems_with(report: dict, offloaded: bool = False) -> list[str]:
    """List what a run did that it must not do."""
    problems = [report["error"]] if report["status"] else []
    for number, step in enumerate(report["steps"], 1):
        if step["costs"].pop(READ, 0) != 1:
            problems.append(f"step {number} does not read its loss once")
        unexpected = step["costs"].keys() - (OFFLOAD_COSTS if offloaded else set())
        problems += [f"step {number} {cost}" for cost in sorted(unexpected)]
    return problems


def losses_of(report: dict) -> list[float]:
    return [step["loss"] for step in report["steps"]]


def check_recipe(name: str, flags: str, reports: dict[str, dict]) -> None:
    assert problems_with(reports[name], "--offload" in flags) == []
    on_host = reports[f"{name} on the host"]
    tolerance = 2e-4 if "fp32" in flags else 2e-3  # AdamW amplifies errors of small gradients
    if name == "dropout":  # devices draw different masks
        tolerance = 0.02
    losses = losses_of(reports[name])
    assert losses == pytest.approx(losses_of(on_host), rel=tolerance), on_host["error"]
    assert len(losses) > 1


@pytest.mark.parametrize("name", QUICK)
def test_recipes_have_a_cpus_losses_and_no_needless_waits(name, reports):
    check_recipe(name, QUICK[name], reports)


def test_offload_changes_no_bit_and_tensors_are_where_the_placement_says(reports):
    """Norms and biases stay; the embedding's state and everything of the blocks is offloaded."""
    places = {tuple(place) for place in reports["offload"]["steps"][-1]["places"]}
    assert places == {(0, True, True), (1, True, False), (3, False, False)}
    assert problems_with(reports["offload"], offloaded=True) == []
    assert losses_of(reports["offload"]) == losses_of(reports["in fp32"])


def test_a_run_resumes_bit_for_bit_and_is_evaluated_and_sampled(reports):
    for name, status in {"stopped": 143, "resumed": 0, "evaluate": 0, "sample": 0}.items():
        assert reports[name]["status"] == status, reports[name]["error"]
    parts = losses_of(reports["stopped"]) + losses_of(reports["resumed"])
    assert losses_of(reports["recomputed"]) == parts
    assert "bits per byte" in reports["evaluate"]["said"]
    assert reports["sample"]["said"].strip()


@pytest.mark.parametrize("problem", MISTAKES)
def test_mistakes_made_on_purpose_are_reported(problem, reports):
    assert problem in "\n".join(problems_with(reports[problem]))


@pytest.mark.slow
def test_more_recipes_on_the_device(run_all):
    reports = run_all(recipes(MORE))
    for name, flags in MORE.items():
        check_recipe(name, flags, reports)
