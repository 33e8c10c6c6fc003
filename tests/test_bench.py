"""The benches: what they refuse to time, what figures follow, what gpu.sh starts and leaves."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.base.runtime import ROOT

sys.path.append(str(ROOT / "bench"))


@pytest.fixture
def on_tiny_text(monkeypatch, store_dir):
    """Steps are made of the small corpus, which needs no preparing."""
    monkeypatch.setattr(import_module("step"), "embedded_store", lambda name: store_dir)


# ---- records and turns

ABOUT = {"date", "hardware", "device", "torch", "python", "commit", "bench"}


def test_a_record_says_where_it_was_taken_and_a_gpus_are_kept_apart(tmp_path, monkeypatch, capsys):
    record = import_module("measure")
    monkeypatch.setenv("COMMIT", "1234abc")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    parse = record.command_line("A bench.\nMore.", turns=2).parse_args
    record.recorder("step", parse([]))({"ms": 1})
    assert not list(tmp_path.iterdir()), "only with --record"
    keep = record.recorder("step", parse(["--record"]), size="nano")
    keep({"ms": record.quartiles([1, 2, 3, 4, 5])})
    keep({"ms": record.quartiles([2])})
    first, second = map(json.loads, (tmp_path / "step.jsonl").read_text().splitlines())
    assert (first["ms"], second["ms"]) == ([2, 3, 4], [2, 2, 2])
    assert ABOUT | {"threads", "size"} <= set(first) and first["commit"] == "1234abc"
    assert first["threads"] == torch.get_num_threads() and "cores" in first["hardware"]
    assert "ms [2.0, 3.0, 4.0]" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--device cuda"):
        record.recorder("step", parse(["--device", "cuda"]))
    monkeypatch.setattr(record, "surroundings", lambda device: {"hardware": 0, "threads": 1} | on)
    on = {"device": "cuda"}
    record.recorder("step", parse(["--record"]))({})
    assert (tmp_path / "gpu-step.jsonl").exists()


def test_the_tables_follow_from_the_records(capsys):
    import_module("tables").main()
    out = capsys.readouterr().out
    assert out.count("| flags | bits per byte |") == 9 and out.count("| run | share") == 1
    assert "| `--pack` | 1.789 (1.787 to 1.793)" in out


def test_a_recipe_is_a_name_or_given_with_its_flags():
    chosen = import_module("ablate").chosen
    assert chosen("padded") == ("padded", "--pack --pack-max-per-row 1")
    assert chosen("mine = --lr=0.01 --pack") == ("mine", "--lr=0.01 --pack")
    with pytest.raises(ValueError, match="--recipes mine"):
        chosen("mine")


def test_variants_take_turns_in_an_order_that_is_reversed():
    called = []
    taken = import_module("measure").in_turns(
        {name: lambda name=name: called.append(name) or len(called) for name in "ab"}, turns=2
    )
    assert "".join(called) == "abbaab"
    assert taken == {"a": [4, 5], "b": [3, 6]}, "the first turn does not count"


def sleeper(seconds: float):
    """Module level, as another process has to find it by name."""
    return lambda: time.sleep(seconds)


def fails_in_a_step():
    def step() -> None:
        raise RuntimeError("out of memory\nand more of it")

    return step


@pytest.mark.slow
@pytest.mark.dist
def test_on_a_gpu_a_variant_that_fails_does_not_end_the_others(monkeypatch, capfd):
    """Each in its process. The order alone is a GPU's: what is run needs none."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    variants = {"full": (fails_in_a_step,), "last": (sleeper, 0.1)}
    done = []
    with pytest.raises(ValueError) as failed:
        for finished in import_module("measure").take_turns(variants, 2, "cuda"):
            done.append(finished)
    ((new, taken),) = done
    assert new == ["last"] and [turn.seconds > 0.1 for turn in taken["last"]] == [True, True]
    assert str(failed.value) == "full: RuntimeError: out of memory"
    assert "failed: full: RuntimeError" in capfd.readouterr().err


# ---- steps


def test_a_step_has_the_flops_of_its_layers_and_documents(on_tiny_text):
    step = import_module("step")
    case = step.CASES["nano"]
    known = {name: step.predicted(case, step.VARIANTS[name], "cpu") for name in step.OURS}
    flops = {name: variant.flops for name, variant in known.items()}
    quarter, half = (flops["plain"] - flops[f"keep {name}"] for name in ("1/4", "1/2"))
    assert 0 < half < quarter < 2 * half, "attention falls with the square"
    assert known["keep 1/2"].seen_share == (2 + 4 / 2) / 6
    assert max(flops["AdamW"], flops["packed"]) < flops["plain"]
    # a layer's causal scores of one document are 6 C T^2 FLOPs, forward and back
    (packed,) = step.steps_of(step.VARIANTS["packed"].settings(case, "cpu"), "cpu", 1)
    unseen = (1 - packed.attention_share) * 8 * 256**2
    assert flops["plain"] - flops["packed"] == pytest.approx(6 * 6 * 128 * unseen, rel=0.01)


# ---- operators


@pytest.mark.parametrize("operator", ["attention", "loss", "copies"])
def test_a_form_that_differs_from_the_definition_is_not_timed(operator, on_tiny_text):
    operators = import_module("operators")
    toy = operators.shape_of("toy", "cpu")
    operation = next(operators.OPERATORS[operator](toy, "cpu", 2))
    operation = operation._replace(more=lambda form: {})
    torch.manual_seed(0)

    def wrong() -> list:
        return [lambda: [1.001 * x for x in operation.forms[operation.definition]()[-1]()]]

    operation.forms["wrong"] = wrong
    operation.forms["absent"] = lambda: [][0]
    figures = operators.measure(operation, "cpu", turns=1, peak=1e9)
    assert "differs by" in figures.pop("wrong")["error"] and figures.pop("absent")["error"]
    assert len(figures) >= 2 and all("ms" in figure for figure in figures.values())


# ---- inference


def test_a_text_that_a_cache_changes_is_not_timed(monkeypatch):
    inference = import_module("inference")
    assert inference.same_tokens([3, 1, 4], [3, 1, 5]) == 2
    draws = {True: lambda: [3, 1], False: lambda: [3, 2]}
    monkeypatch.setattr(inference, "build", lambda size, count, device, cached: draws[cached])
    with pytest.raises(ValueError, match="with a cache token 2 is another: nothing is timed"):
        inference.measure_generation("nano", 2, "cpu", 2, keep=None)


# ---- first_look


def test_a_run_follows_a_cpus_losses_within_its_dtypes_rounding():
    look = import_module("first_look")
    curves = {"plain": [3.0, 2.0, 1.0], "plain, rounded": [3.0, 2.01, 1.0]}
    plain, near = look.Way("", "plain"), look.FACTOR * 0.009
    figures = look.compared(plain, [3.0, 2.0, 1.0 - near], curves)
    assert figures["follows"] and figures["at_step"] == 3
    assert figures["tolerance"] == pytest.approx(look.FACTOR * 0.01)
    for way, losses in {
        plain: [3.0 + look.FACTOR * 0.011, 2.0, 1.0],
        plain._replace(is_held=False): [3.0, 2.0],  # too short
        plain._replace(finer=8): [3.0, 2.0, 1.0 - near],  # what TF32 rounds is less
    }.items():
        assert not look.compared(way, losses, curves)["follows"]
    recorded = look.recorded_curves(ROOT / "results")
    for way in look.WAYS.values():
        figures = look.compared(way, recorded[way.like], recorded)
        assert figures["worst_difference"] == 0 < figures["tolerance"] < 0.1 * look.FACTOR
    assert not look.compared(plain, recorded["AdamW"], recorded)["follows"], "another optimizer"


def test_a_run_with_other_losses_or_one_that_fails_is_named(monkeypatch):
    look, kept = import_module("first_look"), []
    recorded = look.recorded_curves(ROOT / "results")

    def losses_of(name: str, flags: str) -> list[float] | str:
        if name == "fsdp":
            return "ended with status 1: no NCCL"
        return [loss + (name != "plain") for loss in recorded[look.WAYS[name].like]]

    monkeypatch.setattr(look, "embedded_store", lambda name: None)
    monkeypatch.setattr(look, "losses_of", losses_of)
    monkeypatch.setattr(look, "WAYS", {n: look.WAYS[n] for n in ("plain", "ltd", "fsdp", "fp16")})
    with pytest.raises(ValueError, match=r"^losses of (ltd, fsdp|fsdp, ltd): not those of a CPU"):
        look.look_at_losses(look.Setup("cuda", kept.append))
    follows = {record["run"]: record["follows"] for record in kept}
    assert follows == {"plain": True, "ltd": False, "fsdp": False, "fp16": False}


# ---- scale, at the size of a toy


@pytest.fixture
def scale(on_tiny_text):
    return import_module("scale")


@pytest.fixture
def toy(scale):
    return scale.CASES["toy"]


def test_layers_that_share_a_block_hold_its_bytes_once(scale, toy):
    shared = scale.beside("", "--pseudo --pseudo-group 1 --pseudo-until 0.5")
    stages = scale.stages_of(toy, shared)
    block = 12 * 16 * 16 + 9 * 16 + 4 * 16  # parameters: matrices, their biases, two norms
    shared, own = stages["shared"], stages["own weights"]
    assert own["parameters"] - shared["parameters"] == 3 * block
    for stage in (shared, own):
        assert stage["weights"] == stage["gradients"] == 4 * stage["parameters"]
        assert stage["optimizer"] == stage["moments_held"] == 8 * stage["parameters"]


def test_wherever_the_state_is_a_step_is_the_same(scale, toy):
    away = scale.ADAMW._replace(flags=f"{scale.ADAMW.flags} --offload")
    steps = {mode: scale.build(toy, away, "cpu", mode) for mode in scale.MODES}
    plain = scale.build(toy, scale.ADAMW, "cpu")
    for _ in range(3):
        assert {mode: step() for mode, step in steps.items()} == dict.fromkeys(steps, plain())


def test_torchaos_step_is_of_the_same_model_and_batch(scale, toy, monkeypatch):
    """Its optimizer needs a GPU: AdamW in its place, called as it would be."""

    class CPUOffloadOptimizer(torch.optim.AdamW):
        def __init__(self, groups: list[dict], optimizer_class: type, **more):
            assert optimizer_class is torch.optim.AdamW
            super().__init__(groups, **more)

    optim = ModuleType("torchao.optim")
    optim.CPUOffloadOptimizer = CPUOffloadOptimizer
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", optim)
    at_peak = "--grad-clip 0 --schedule wsd"  # the learning rate too, halfway
    flags = f"{scale.ADAMW.flags} {at_peak} --micro-batch-size 1"
    variant = scale.ADAMW._replace(flags=flags)
    ours, theirs = scale.build(toy, variant, "cpu"), scale.build_torchao(toy, variant, "cpu")
    assert theirs() == ours()
    found, expected = [theirs() for _ in range(3)], [ours() for _ in range(3)]
    assert found == pytest.approx(expected, rel=1e-4) and found[-1] < found[0]


def test_a_model_that_is_larger_than_its_budget_trains_or_is_refused(scale, toy, monkeypatch):
    budget = "--offload --offload-budget 900KB --checkpoint-activations --micro-batch-size 1"
    case = toy._replace(turns=4)
    found = scale.train_capped(case, budget, "cpu", cap_bytes=0)
    assert len(found["losses"]) == 4 and found["losses"][-1] < found["losses"][0]
    assert 0 < found["planned_gb"] <= 900e-6 and found["host_gb"] > 300e-6
    with pytest.raises(ValueError, match="capped: the loss does not fall"):
        scale.train_capped(case, f"{budget} --lr 1e-30", "cpu", cap_bytes=0)
    monkeypatch.setattr(scale, "host_free", lambda: 1000)
    with pytest.raises(ValueError, match="capped: needs"):
        scale.train_capped(case, budget, "cpu", cap_bytes=0)


# ---- gpu.sh

FAKE_PYTHON = """#!/usr/bin/env bash
# A machine with a GPU ($FAKE_GPU is 0: without); runs nothing, notes it, and leaves a record.
case "$1 $2" in
"-c "*is_available*) exit $((1 - ${FAKE_GPU:-1})) ;;
esac
printf '%s\\n' "$*" >>"$FAKE_LOG"
[[ -z ${FAKE_FAILS:-} || "$*" != *$FAKE_FAILS* ]] || exit 1
echo '{"bench": "'"$1"'"}' >>"$OUT/gpu-fake.jsonl"
[[ -z ${FAKE_SLOW:-} || "$*" != *$FAKE_SLOW* ]] || sleep 60
"""


@pytest.fixture
def gpu_sh(tmp_path):
    """Start a stage of bench/gpu.sh with a python that only notes what it is asked to run."""
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "model.py").write_text("")
    log = tmp_path / "ran"

    def start(*flags: str, **given: str) -> subprocess.Popen:
        env = os.environ | {"PYTHON": str(tmp_path / "python"), "FAKE_LOG": str(log)}
        env |= {"OUT": str(tmp_path / "out"), "GPU_FAKE": ""} | given
        log.write_text("")
        command = ["bash", str(ROOT / "bench/gpu.sh"), *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=env, text=True, **pipes)

    return start


def ended(process: subprocess.Popen, tmp_path: Path) -> tuple[int, str, list[str]]:
    """Status, output, and the commands that were run."""
    out, _ = process.communicate()
    return process.returncode, out, (tmp_path / "ran").read_text().splitlines()


@pytest.mark.parametrize(
    ("flags", "given", "named"),
    [
        (["A"], {"FAKE_GPU": "0"}, "no GPU"),
        (["F"], {}, "'F': choose A, B, C, D or E"),
        (["A", "--nanogpt", "/nowhere"], {}, "--nanogpt /nowhere"),
        (["E", "--corpus", "/nowhere"], {}, "--corpus /nowhere"),
        (["A", "--size", "nano"], {}, "--size is unknown"),
        (["A"], {"GPU_FAKE": "1", "OUT": ""}, "GPU_FAKE: set OUT"),
    ],
)
def test_without_a_gpu_or_with_a_wrong_argument_one_line_and_status_2(
    flags, given, named, gpu_sh, tmp_path
):
    process = gpu_sh(*flags, **given)
    _, error = process.communicate()
    assert process.returncode == 2 and named in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and (tmp_path / "ran").read_text() == ""


def accepts(module: ModuleType, arguments: list[str], monkeypatch) -> bool:
    parsed = []
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self, *args):
        parsed.append(parse(self, *args))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", ["bench.py", *arguments])
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            module.main()
    return bool(parsed)


@pytest.mark.parametrize("stage", "ABCDE")
def test_a_stage_fits_nine_minutes_and_its_commands_have_flags_that_exist(
    stage, gpu_sh, tmp_path, monkeypatch, capsys
):
    flags = ["--nanogpt", str(tmp_path), "--commit", "1234abc"]
    status, said, ran = ended(gpu_sh(stage, *flags), tmp_path)
    assert status == 0 and ran and "left out" not in said
    assert f"stage {stage}, commit 1234abc" in said and "ended with status 0" in said
    assert (tmp_path / f"out/gpu-{stage}.log").read_text() == said
    lines = [line for line in said.splitlines() if ": at most " in line]
    seconds = [int(re.search(r": at most (\d+) s: ", line)[1]) for line in lines]
    assert len(seconds) == len(ran) and sum(seconds) <= 540
    for line in lines:
        _, path, *arguments = shlex.split(line.split(" s: ", 1)[1])
        assert "--device cuda --record" in " ".join(arguments)
        module = import_module(Path(path).stem)
        assert accepts(module, arguments, monkeypatch)
        assert not accepts(module, ["--no-such-flag", *arguments], monkeypatch)
        assert path != "bench/step.py" or stage != "A" or str(tmp_path) in arguments


def test_a_corpus_is_prepared_and_trained_on(gpu_sh, tmp_path):
    status, _, ran = ended(gpu_sh("E", "--corpus", str(tmp_path / "model.py")), tmp_path)
    assert status == 0 and ran[0].startswith(f"prepare.py {tmp_path / 'model.py'} --out ")
    store = ran[0].split()[-1]
    assert ran[1].endswith(f"--data {store}") and not Path(store).parent.exists()


def test_a_part_that_fails_or_takes_too_long_does_not_end_the_others(gpu_sh, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    stub = '#!/bin/bash\n[[ $* != *"py loss"* ]] || exit 124\nshift 3\n"$@"\n'
    (tools / "timeout").write_text(stub)
    (tools / "timeout").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    status, said, ran = ended(gpu_sh("C", FAKE_FAILS="py attention", PATH=path), tmp_path)
    assert status == 1 and len(ran) == 4 and said.count(": passed in") == 3
    assert "attention: failed with status 1" in said and "loss: stopped after" in said
    assert "left out: the rest of loss; \n" in said
    assert len((tmp_path / "out/gpu-fake.jsonl").read_text().splitlines()) == 3


def test_a_sigterm_leaves_the_records_so_far_and_says_what_is_missing(gpu_sh, tmp_path):
    process = gpu_sh("C", FAKE_SLOW="py attention")
    while "py attention" not in (tmp_path / "ran").read_text():
        time.sleep(0.05)
    process.terminate()
    status, said, ran = ended(process, tmp_path)
    assert status == 1 and len(ran) == 2
    left = "the rest of attention; loss; copies; step, compiled; "
    assert f"left out: {left}\n" in said
    assert "ended with status 1" in (tmp_path / "out/gpu-C.log").read_text()
    assert len((tmp_path / "out/gpu-fake.jsonl").read_text().splitlines()) == 2


RECORDS = {  # of a stage on a CPU: file -> keys that its records have, between them
    "A": {"first-look.jsonl": "versions gb_per_s tflops us losses tolerance follows kernels",
          "step.jsonl": "optimizer size steps compile"},
    "B": {"gpu-tests.xml": ""},
    "C": {"step.jsonl": "size steps", "kernels.jsonl": "peak_tflops forms size kernel"},
    "D": {"scale.jsonl": "part steps", "generation.jsonl": "ms_of_a_token",
          "evaluation.jsonl": "items_per_s", "forecast.jsonl": "seconds_said seconds"},
    "E": {"ablate.jsonl": "curve val_bpb mfu recipe"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("stage", RECORDS)
def test_every_stage_works_with_toys_on_a_cpu(stage, gpu_sh, tmp_path):
    results = {path: path.stat().st_mtime_ns for path in (ROOT / "results").iterdir()}
    fake = {"GPU_FAKE": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    process = gpu_sh(stage, "--commit", "1234abc", **fake)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"gpu-{stage}.log", *RECORDS[stage]}
    for name, keys in RECORDS[stage].items():
        if name.endswith(".jsonl"):
            lines = (tmp_path / "out" / name).read_text().splitlines()
            records = [json.loads(line) for line in lines]
            assert set(keys.split()) <= set().union(*records)
            for record in records:
                assert set(record) >= ABOUT and record["commit"] == "1234abc"
    assert results == {path: path.stat().st_mtime_ns for path in (ROOT / "results").iterdir()}
