"""The benches start, describe the machine alike, and have names of their own."""

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.base.runtime import ROOT

BENCHES = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))
COMMANDS = [name for name in BENCHES if name not in ("nanogpt", "record", "tables", "turns")]


@pytest.fixture
def bench(monkeypatch):
    """Import a bench by its file."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "bench")])

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / f"bench/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_no_bench_has_the_name_of_a_module():
    products = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("support/**/*.py"))}
    assert not products & set(BENCHES)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_bench_says_what_its_flags_are(name, bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        bench(name).main()
    assert end.value.code == 0 and "--record" in capsys.readouterr().out


def test_packers_refuse_a_histogram_of_absurd_counts(tmp_path, bench, monkeypatch):
    pytest.importorskip("scipy", reason="SciPy is not installed")
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"max_len": 8, "counts": [0, 9 * 10**18]}))
    monkeypatch.setattr(sys, "argv", ["packers.py", str(path)])
    with pytest.raises(ValueError, match=f"lengths.json: the histogram has {18 * 10**18:,} tokens"):
        bench("packers").main()  # started as a program, it says so in one line


def test_a_record_says_where_it_was_taken_and_a_gpus_are_kept_apart(tmp_path, bench, monkeypatch):
    record = bench("record")
    here = record.surroundings()
    assert {"date", "hardware", "threads", "torch", "commit"} <= set(here)
    assert f"{here['threads']}" == str(torch.get_num_threads()) and "cores" in here["hardware"]
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    for _ in range(2):
        record.append("step", here | {"ms": record.quartiles([1, 2, 3, 4, 5])})
    record.append("step", here | {"device": "cuda"})
    lines = (tmp_path / "results/step.jsonl").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["ms"] == [2, 3, 4]
    assert (tmp_path / "results/gpu-step.jsonl").exists()


def test_records_go_where_they_are_asked_to_go_with_the_commit_that_is_given(bench, monkeypatch):
    monkeypatch.setenv("OUT", "/elsewhere")
    monkeypatch.setenv("COMMIT", "1234abc")
    record = bench("record")
    assert record.RESULTS == Path("/elsewhere")
    assert record.surroundings()["commit"] == "1234abc"
    monkeypatch.delenv("OUT")
    assert bench("record").RESULTS == ROOT / "results"


def test_a_gpu_that_is_not_there_is_refused(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch sees no GPU here"):
        bench("record").surroundings("cuda")


def test_on_a_gpu_a_step_has_many_tokens(bench):
    step = bench("step")
    assert step.on_device("124M", "cpu") == step.CASES["124M"]
    rows = {size: step.on_device(size, "cuda").rows for size in ("124M", "350M", "350M-2048")}
    assert rows == {"124M": 32, "350M": 32, "350M-2048": 16}


def test_a_steps_peak_of_memory_stands_beside_what_kept_tokens_predict(bench):
    """12 layers, of which 10 keep half: 7/12 of the 6 GB above weights and optimizer."""
    step = bench("step")
    case = step.CASES["124M"]
    taken = {
        "plain": [step.Taken(0.2, peak_bytes=8 * 10**9, resident_bytes=2 * 10**9)],
        "keep 1/2": [step.Taken(0.1, peak_bytes=6 * 10**9, resident_bytes=2 * 10**9)],
    }
    figures = step.summarise({name: 2 * steps for name, steps in taken.items()}, case, "cuda")
    assert "predicted_peak_gb" not in figures["plain"]
    assert figures["keep 1/2"]["peak_gb"] == 6
    assert figures["keep 1/2"]["predicted_peak_gb"] == 2 + 6 * 7 / 12
    assert "peak 6.00 GB, 5.50 predicted" in step.show("keep 1/2", figures["keep 1/2"])
    on_cpu = step.summarise({"plain": 2 * [step.Taken(0.2)]}, case, "cpu")
    assert "peak_gb" not in on_cpu["plain"]


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
STAGES = {"A": 6, "B": 1, "C": 5, "D": 7, "E": 1}  # parts of each


@pytest.fixture
def gpu_sh(tmp_path):
    """Start a stage of bench/gpu.sh with a python that only notes what it is asked to run."""
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    log = tmp_path / "ran"

    def start(*flags: str, **given: str) -> subprocess.Popen:
        env = os.environ | {"PYTHON": str(tmp_path / "python"), "FAKE_LOG": str(log)}
        env |= {"OUT": str(tmp_path / "out"), "GPU_FAKE": ""} | given
        log.write_text("")
        return subprocess.Popen(
            ["bash", str(ROOT / "bench/gpu.sh"), *flags],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def ended(process: subprocess.Popen, tmp_path: Path) -> tuple[int, str, list[str]]:
    """Status, what was said, and the commands that were run."""
    out, _ = process.communicate()
    return process.returncode, out, (tmp_path / "ran").read_text().splitlines()


def test_without_a_gpu_or_with_a_wrong_argument_one_line_and_status_2(gpu_sh, tmp_path):
    for flags, given, said in (
        (["A"], {"FAKE_GPU": "0"}, "torch sees no GPU here, so nothing was run"),
        (["A"], {"PYTHON": "/nowhere/python"}, "torch sees no GPU here, so nothing was run"),
        ([], {}, "there is no stage '': choose A, B, C, D or E"),
        (["F"], {}, "there is no stage 'F': choose A, B, C, D or E"),
        (["A", "--nanogpt", "/nowhere"], {}, "--nanogpt /nowhere: has no model.py"),
        (["E", "--corpus", "/nowhere"], {}, "--corpus /nowhere: there is no such file"),
        (["A", "--commit"], {}, "--commit needs a value"),
        (["A", "--size", "nano"], {}, "--size is unknown: choose --nanogpt, --corpus or --commit"),
        (["A"], {"GPU_FAKE": "1", "OUT": ""}, "GPU_FAKE: set OUT, as toys are no results"),
    ):
        process = gpu_sh(*flags, **given)
        _, error = process.communicate()
        assert (process.returncode, error) == (2, f"bench/gpu.sh: {said}\n")
    assert not (tmp_path / "out").exists() and (tmp_path / "ran").read_text() == ""


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_fits_nine_minutes_and_its_commands_have_flags_that_exist(
    stage, gpu_sh, tmp_path, bench, monkeypatch
):
    (tmp_path / "model.py").write_text("")
    flags = ["--nanogpt", str(tmp_path), "--commit", "1234abc"]
    status, said, ran = ended(gpu_sh(stage, *flags), tmp_path)
    assert status == 0 and "left out" not in said and len(ran) == STAGES[stage]
    assert f"stage {stage}, commit 1234abc" in said and "ended with status 0" in said
    assert (tmp_path / f"out/gpu-{stage}.log").read_text() == said
    seconds = [int(number) for number in re.findall(r": at most (\d+) s: ", said)]
    assert len(seconds) == len(ran) and sum(seconds) <= 540
    commands = [
        shlex.split(line.split(" s: ", 1)[1]) for line in said.splitlines() if " s: " in line
    ]
    for _, path, *arguments in commands:
        assert "--device cuda --record" in " ".join(arguments)
        assert accepts(bench(Path(path).stem), arguments, monkeypatch)
        with pytest.raises(SystemExit):
            accepts(bench(Path(path).stem), ["--no-such-flag", *arguments], monkeypatch)


def accepts(module: ModuleType, arguments: list[str], monkeypatch) -> bool:
    class AcceptedError(Exception):
        pass

    def parse_args(self, *args):
        parse(self, *args)
        raise AcceptedError

    parse = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", ["bench.py", *arguments])
        try:
            module.main()
        except AcceptedError:
            return True
    return False


def test_nanogpt_and_a_corpus_go_to_what_uses_them(gpu_sh, tmp_path):
    (tmp_path / "model.py").write_text("")
    _, _, ran = ended(gpu_sh("A", "--nanogpt", str(tmp_path)), tmp_path)
    steps = [line for line in ran if "bench/step.py" in line]
    assert len(steps) == 2 and all(f"--nanogpt {tmp_path} " in line for line in steps)
    _, _, ran = ended(gpu_sh("A"), tmp_path)
    assert not [line for line in ran if "nanogpt" in line]
    status, _, ran = ended(gpu_sh("E", "--corpus", str(tmp_path / "model.py")), tmp_path)
    assert status == 0 and ran[0].startswith(f"prepare.py {tmp_path / 'model.py'} --out ")
    store = ran[0].split()[-1]
    assert ran[1].endswith(f"--data {store}") and not Path(store).parent.exists()


def test_a_part_that_fails_does_not_end_the_others(gpu_sh, tmp_path):
    status, said, ran = ended(gpu_sh("C", FAKE_FAILS="bench/attention.py"), tmp_path)
    assert status == 1 and len(ran) == STAGES["C"]
    assert "attention: failed with status 1" in said and said.count(": passed in") == 4
    assert len((tmp_path / "out/gpu-fake.jsonl").read_text().splitlines()) == 4


def test_a_part_whose_time_is_over_is_named_and_does_not_end_the_others(gpu_sh, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "timeout").write_text("#!/bin/bash\n[[ $* != *generation.py* ]] || exit 124\n")
    (tools / "timeout").chmod(0o755)
    status, said, _ = ended(gpu_sh("D", PATH=f"{tools}:{os.environ['PATH']}"), tmp_path)
    assert status == 1 and "generation: stopped after" in said
    assert "left out: the rest of generation; \n" in said and said.count(": passed in") == 6


def test_a_sigterm_leaves_the_records_so_far_and_says_what_is_missing(gpu_sh, tmp_path):
    process = gpu_sh("C", FAKE_SLOW="bench/attention.py")
    while "bench/attention.py" not in (tmp_path / "ran").read_text():
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
          "step.jsonl": "optimizer sizes compile"},
    "B": {"tests.jsonl": "test outcome seconds", "gpu-tests.xml": ""},
    "C": {"step.jsonl": "sizes", "kernels.jsonl": "peak_tflops cases sizes kernel"},
    "D": {"scale.jsonl": "part steps", "generation.jsonl": "ms_of_a_token",
          "evaluation.jsonl": "items_per_s", "forecast.jsonl": "seconds_said seconds"},
    "E": {"ablate.jsonl": "curve val_bpb mfu recipe"},
}  # fmt: skip
ABOUT = {"date", "hardware", "device", "torch", "python", "commit", "bench"}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_works_with_toys_on_a_cpu(stage, gpu_sh, tmp_path):
    results = {path: path.stat().st_mtime_ns for path in (ROOT / "results").iterdir()}
    fake = {"GPU_FAKE": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    process = gpu_sh(stage, "--commit", "1234abc", **fake)
    said, _ = process.communicate()
    assert process.returncode == 0, said
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {f"gpu-{stage}.log", *RECORDS[stage]} and len(found) <= 8
    for name, keys in RECORDS[stage].items():
        if name.endswith(".jsonl"):
            lines = (tmp_path / "out" / name).read_text().splitlines()
            records = [json.loads(line) for line in lines]
            assert set(keys.split()) <= set().union(*records)
            for record in records:
                assert set(record) >= ABOUT and record["commit"] == "1234abc"
    assert results == {path: path.stat().st_mtime_ns for path in (ROOT / "results").iterdir()}


@pytest.mark.slow
@pytest.mark.dist
def test_a_sigterm_in_a_real_bench_leaves_what_was_recorded(gpu_sh, tmp_path):
    fake = {"GPU_FAKE": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    process, kernels = gpu_sh("C", **fake), tmp_path / "out/kernels.jsonl"
    while process.poll() is None and not kernels.exists():
        time.sleep(0.1)
    process.terminate()
    said, _ = process.communicate()
    assert process.returncode == 1 and "step, compiled; \n" in said
    records = [json.loads(line) for line in kernels.read_text().splitlines()]
    assert records and set(records[0]) >= ABOUT
    assert (tmp_path / "out/step.jsonl").exists()


def test_tests_of_offload_and_fsdp_come_first_on_a_gpu(bench):
    files = bench("gpu_tests").files()
    assert files[:2] == ["tests/test_offload.py", "tests/test_several_ranks.py"]
    assert len(files) == len(set(files)) > 2 and "tests/test_kernels_token_drop.py" in files
    assert "tests/test_sizes.py" not in files


def test_what_became_of_a_test_is_recorded_as_it_ends(bench, monkeypatch):
    gpu_tests, records = bench("gpu_tests"), []
    monkeypatch.setattr(gpu_tests, "append", lambda name, record: records.append(record))
    recorder = gpu_tests.Recorder({"commit": "1234abc"})

    def report(when: str, outcome: str, why: str | None = None) -> None:
        location = ("tests/test_x.py", 1, "test_x")
        recorder.pytest_runtest_logreport(
            pytest.TestReport("x::test_x", location, {}, outcome, why, when, duration=1.25)
        )

    report("setup", "passed")
    assert records == []
    report("call", "failed", "E   assert 1 == 2")
    report("teardown", "passed")
    (record,) = records
    assert record["outcome"] == "failed" and record["why"] == "E   assert 1 == 2"
    assert (record["test"], record["commit"], record["seconds"]) == ("x::test_x", "1234abc", 1.25)
    report("setup", "failed", "no GPU")
    assert records[1]["outcome"] == "failed", "what fails before the test is no pass"


def test_a_run_follows_a_cpus_losses_within_its_dtypes_rounding(bench):
    look = bench("first_look")
    curves = {"plain": [3.0, 2.0, 1.0], "plain, rounded": [3.0, 2.01, 1.0]}
    near, far = look.FACTOR * 0.009, look.FACTOR * 0.011
    found = look.compared(look.Way("", "plain"), [3.0, 2.0, 1.0 - near], curves)
    assert found["follows"] and found["at_step"] == 3
    assert found["tolerance"] == pytest.approx(look.FACTOR * 0.01)
    assert not look.compared(look.Way("", "plain"), [3.0 + far, 2.0, 1.0], curves)["follows"]
    finer = look.compared(look.Way("", "plain", finer=8), [3.0, 2.0, 1.0 - near], curves)
    assert not finer["follows"], "what TF32 rounds is less"
    assert not look.compared(look.Way("", "plain"), [3.0, 2.0], curves)["follows"], "too short"
    recorded = look.recorded_curves(ROOT / "results")
    for name, way in look.WAYS.items():
        exact, rounded = recorded[way.like], recorded[f"{way.like}, rounded"]
        assert len(exact) == len(rounded) >= 30, name
        assert 0 < max(look.differences(exact, rounded)) < 0.1
    another = look.compared(look.Way("", "plain"), recorded["AdamW"], recorded)
    assert not another["follows"], "another optimizer is no rounding"


def test_a_run_whose_losses_are_others_or_that_fails_is_named(bench, monkeypatch):
    look, kept = bench("first_look"), []
    monkeypatch.setattr(look, "embedded_store", lambda name: None)
    monkeypatch.setattr(
        look, "WAYS", {name: look.WAYS[name] for name in ("plain", "ltd", "fsdp", "fp16")}
    )
    recorded = look.recorded_curves(ROOT / "results")

    def losses_of(name: str, flags: str) -> list[float]:
        assert "--device cuda" in flags
        if name == "fsdp":
            raise ValueError("ended with status 1: no NCCL")
        return [loss + (name != "plain") for loss in recorded[look.WAYS[name].like]]

    monkeypatch.setattr(look, "losses_of", losses_of)
    with pytest.raises(ValueError, match=r"^losses of (ltd, fsdp|fsdp, ltd): not those of a CPU"):
        look.look_at_losses(look.Setup("cuda", kept.append))
    follows = {record["run"]: record["follows"] for record in kept}
    assert follows == {"plain": True, "ltd": False, "fsdp": False, "fp16": False}
    assert [record["error"] for record in kept if "error" in record] == [
        "ended with status 1: no NCCL"
    ]


@pytest.mark.parametrize("operation", ["gather", "scatter", "layer"])
def test_copies_are_measured_against_a_plain_copy_of_as_many_bytes(operation, bench):
    module = bench("gather_scatter")
    shape = module.Shape(B=2, T=16, C=8)
    figures = module.measure(operation, shape, K=4, device="cpu", turns=2)
    assert list(figures["forms"]) == ["copy", "reference", "torch"]
    moved = {"gather": 16, "scatter": 64, "layer": 160}[operation]  # states, of 8 float32
    assert figures["bytes_moved"] == moved * 8 * 4
    assert figures["forms"]["copy"]["percent_of_peak"] == 100
    assert figures["forms"]["reference"]["ratio"] == [1, 1, 1]
    for figure in figures["forms"].values():
        low, median, high = figure["ms"]
        assert 0 < low <= median <= high


def test_a_copy_that_differs_from_the_reference_is_not_timed(bench, monkeypatch):
    module = bench("gather_scatter")
    monkeypatch.setattr(module, "gather", lambda x, kept, impl: x[:, : kept.shape[1]] + 1)
    with pytest.raises(ValueError, match="gather, torch: differs from the reference: nothing is"):
        module.measure("gather", module.Shape(B=2, T=16, C=8), K=4, device="cpu", turns=2)


def test_a_text_that_a_cache_changes_is_not_timed(bench, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    module = bench("generation")
    assert module.same_tokens([3, 1, 4], [3, 1, 5]) == 2 and module.same_tokens([3], [3]) == 1
    draws = {True: lambda: [3, 1], False: lambda: [3, 2]}
    monkeypatch.setattr(module, "build", lambda size, count, device, cached: draws[cached])
    with pytest.raises(ValueError, match="with a cache token 2 is another: nothing is timed"):
        next(module.measure("nano", 2, "cpu", turns=2))


def test_the_tables_follow_from_the_records(bench, capsys):
    bench("tables").main()
    out = capsys.readouterr().out
    assert out.count("| flags | bits per byte |") == 9 and out.count("| run | seconds") == 1
    assert "| `--pack` | 1.789 (1.787 to 1.793)" in out


def sleeper(seconds: float):
    """Module level, as another process has to find it by name."""

    def step() -> None:
        time.sleep(seconds)

    return step


def refused():
    raise ValueError("no such variant")


def fails_in_a_step():
    def step() -> None:
        raise RuntimeError("out of memory\nand more of it")

    return step


@pytest.mark.slow
@pytest.mark.dist
def test_variants_take_turns_each_in_its_process(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    from turns import take_turns  # by its own name, for the other process to find

    variants = {"slow": (sleeper, 0.2), "fast": (sleeper, 0.01)}
    ((new, taken),) = take_turns(variants, 3, "cpu")
    seconds = {name: [one.seconds for one in steps] for name, steps in taken.items()}
    assert new == ["slow", "fast"] and [len(values) for values in seconds.values()] == [3, 3]
    assert min(seconds["slow"]) > 0.2 > min(seconds["fast"]) > 0.01


@pytest.mark.slow
@pytest.mark.dist
def test_on_a_gpu_variants_come_one_by_one_and_one_that_fails_does_not_end_the_others(
    monkeypatch, capfd
):
    """The order alone is a GPU's: what is run needs none."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    from turns import take_turns

    variants = {
        "first": (sleeper, 0.01),
        "unbuilt": (refused,),
        "full": (fails_in_a_step,),
        "last": (sleeper, 0.01),
    }
    came = []
    with pytest.raises(ValueError) as failed:
        for new, taken in take_turns(variants, 2, "cuda"):
            came.append((new, list(taken)))
    assert came == [(["first"], ["first"]), (["last"], ["first", "last"])]
    assert str(failed.value) == "unbuilt: no such variant; full: RuntimeError: out of memory"
    assert "failed: unbuilt: no such variant" in capfd.readouterr().err


@pytest.mark.dist
def test_a_variant_that_cannot_be_built_is_named(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    from turns import take_turns

    with pytest.raises(ValueError, match=r"^broken: no such variant$"):
        list(take_turns({"broken": (refused,)}, 1, "cpu"))


@pytest.mark.parametrize("size", ["nano", "124M"])
def test_a_step_that_drops_tokens_has_the_flops_of_its_layers(bench, size):
    step = bench("step")
    case = step.CASES[size]
    flops = {name: step.flops_of(case, step.VARIANTS[name], "cpu") for name in step.VARIANTS}
    assert flops["keep 1/4"] < flops["keep 1/2"] < flops["keep 3/4"] < flops["plain"]
    assert max(flops["AdamW"], flops["packed"]) < flops["plain"]
    T = case.shape.seq_len
    attention = case.rows * case.shape.layers * 6 * case.shape.width * T * T
    assert flops["plain"] - flops["packed, 64"] == attention * (T - 64) // T
    quarter, half = (flops["plain"] - flops[f"keep {name}"] for name in ("1/4", "1/2"))
    assert half < quarter < 2 * half, "attention falls with the square"


# ---- bench/scale.py, at the size of a toy


def toy_of(step: ModuleType):
    return step.CASES["toy"]


@pytest.fixture
def scale(bench, monkeypatch):
    """The bench with its turns in this process."""
    module = bench("scale")
    import step
    import turns

    def take_turns(variants: dict[str, tuple], number: int, device: str):
        steps = {name: build(*arguments) for name, (build, *arguments) in variants.items()}
        one_each = {name: lambda step=step: turns.turn_of(step) for name, step in steps.items()}
        yield list(steps), turns.alternated(one_each, number)

    monkeypatch.setattr(turns, "TIMED_SECONDS", 0)
    monkeypatch.setattr(step, "take_turns", take_turns)
    monkeypatch.setattr(module, "take_turns", take_turns)
    return module


def test_both_forms_of_adamw_move_the_models_parameters(scale, capsys):
    found = scale.measure_adamw(scale.Setup("cpu", "toy"))
    block = 16 * 16 * 12 + 13 * 16 + 16 * 4 - 4 * 16  # matrices; biases and norms
    assert found["parameters"] % 16 == 0 and found["parameters"] > 4 * block
    low, median, high = found["faster"]
    assert 0 < low <= median <= high and f"{median:.2f} [" in capsys.readouterr().out


def test_bytes_before_and_after_layers_get_weights_of_their_own(scale, capsys):
    found = scale.measure_shared(scale.Setup("cpu", "toy"))
    assert list(found["steps"]) == ["own weights", "shared"]
    assert found["steps"]["shared"]["to"] == "own weights"
    shared, own = (found["bytes"][stage] for stage in ("shared", "own weights"))
    block = 12 * 16 * 16 + 9 * 16 + 4 * 16  # matrices, their biases, two norms
    assert own["parameters"] - shared["parameters"] == 3 * block
    for stage in (shared, own):
        assert stage["weights"] == stage["gradients"] == 4 * stage["parameters"]
        assert stage["optimizer"] == stage["moments_held"] == 8 * stage["parameters"]
    assert "M parameters; weights " in capsys.readouterr().out


def test_fewer_layers_stand_beside_the_ratio_of_their_flops(scale):
    """A row of 32: a layer's matrices are 12 C^2 and its attention C T, the head's V C."""
    found = scale.measure_growth(scale.Setup("cpu", "toy"))["steps"]
    layer, head = 12 * 16 * 16 + 16 * 32, 64 * 16
    assert list(found) == ["all layers", "2 of 4", "1 of 4"]
    for few, name in ((2, "2 of 4"), (1, "1 of 4")):
        assert found[name]["predicted"] == round((few * layer + head) / (4 * layer + head), 4)
    assert "predicted" not in found["all layers"]


def test_whatever_is_away_a_step_is_the_same(scale, monkeypatch):
    import step

    case, plain = toy_of(step), step.Variant(None, "adamw")
    away = plain._replace(flags="--offload")
    steps = {mode: scale.build(case, away, "cpu", mode) for mode in scale.MODES}
    wanted = scale.build(case, plain, "cpu")
    for _ in range(3):
        loss = wanted().loss
        assert {mode: one().loss for mode, one in steps.items()} == dict.fromkeys(steps, loss)
    by_budget = scale.offload.plan
    scale.build(case, away, "cpu", "weights")
    assert scale.offload.plan is by_budget, "each mode is a process's own"


def test_offload_is_compared_mode_by_mode(scale, capsys):
    found = scale.measure_offload(scale.Setup("cpu", "toy"))["steps"]
    assert list(found) == ["no offload", *scale.MODES]
    assert all(found[mode]["to"] == "no offload" for mode in scale.MODES)
    assert "torchao: skipped, it needs --device cuda" in capsys.readouterr().out


def test_the_planned_peak_counts_sixteen_bytes_a_parameter(scale, monkeypatch):
    """Weight, gradient and two moments in fp32, and two gradients more of the embeddings at the
    end of a backward pass; away is the state of the blocks' matrices.
    """
    import step
    from turns import Taken

    case, asked = toy_of(step), {}

    def take_turns(jobs: dict[str, tuple], turns: int, device: str):
        asked.update(jobs)
        for done in range(1, 1 + len(jobs)):
            taken = {name: [Taken(1.0, peak_bytes=100_000)] for name in list(jobs)[:done]}
            yield [list(taken)[-1]], taken

    start = scale.runtime.start
    monkeypatch.setattr(scale.runtime, "start", lambda *_: start("cpu", "fp32"))
    monkeypatch.setattr(scale, "take_turns", take_turns)
    monkeypatch.setattr(scale, "find_spec", lambda name: True)
    kept = []
    peaks = scale.measure_peaks(scale.Setup("cuda", "toy", keep=kept.append))
    settings = step.settings_of(case, step.Variant(None, "adamw"), "cpu", False)
    model = scale.like(settings, case)
    numel = sum(p.numel() for p in model.parameters())
    embeddings = sum(p.numel() for p in model.parameters() if p.ndim > 1) - 4 * 12 * 16 * 16
    stays = 16 * numel + 8 * embeddings
    assert peaks["torchao"] == {"lean_peak_gb": 0.0001}
    assert peaks[scale.HERE]["planned_gb"] == pytest.approx(stays / 1e9, rel=3e-3)
    without = (stays - 8 * 4 * 12 * 16 * 16) / 1e9
    assert peaks["blocks' state"]["planned_gb"] == pytest.approx(without, rel=3e-3)
    assert [record["variant"] for record in kept] == list(peaks) and len(kept) == 6
    for _, lean, variant, *_ in asked.values():
        assert (lean.rows, lean.shape.seq_len) == (2, 64)
        assert variant.flags.endswith("--micro-batch-size 1")
    assert asked["blocks' state"][-1] == "blocks' state"


def test_torchaos_step_is_of_the_same_model_and_batch(scale, monkeypatch):
    """Its optimizer needs a GPU: AdamW in its place, called as it would be."""
    import step

    class CPUOffloadOptimizer(torch.optim.AdamW):
        def __init__(self, groups: list[dict], optimizer_class: type, **more):
            assert optimizer_class is torch.optim.AdamW
            super().__init__(groups, **more)

    optim = ModuleType("torchao.optim")
    optim.CPUOffloadOptimizer = CPUOffloadOptimizer
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", optim)
    case = toy_of(step)._replace(rows=4)
    at_peak = "--grad-clip 0 --schedule wsd"  # the learning rate too, halfway
    variant = step.Variant(None, "adamw", flags=f"{at_peak} --micro-batch-size 2")
    ours, theirs = scale.build(case, variant, "cpu"), scale.build_torchao(case, variant, "cpu")
    assert theirs() == ours().loss
    found, wanted = [theirs() for _ in range(3)], [ours().loss for _ in range(3)]
    assert found == pytest.approx(wanted, rel=1e-4) and found[-1] < found[0]


BUDGET = "--offload --offload-budget 110KB --checkpoint-activations --micro-batch-size 1"


def test_a_model_that_is_larger_than_its_budget_trains(scale):
    import step

    found = scale.train_capped(toy_of(step)._replace(turns=4), BUDGET, "cpu", cap_bytes=0)
    assert len(found["losses"]) == 4 and found["losses"][-1] < found["losses"][0]
    assert 0 < found["planned_gb"] <= 110e-6 < 220e-6 < found["host_gb"]


def test_a_model_that_cannot_be_trained_so_is_refused(scale, monkeypatch):
    import step

    case = toy_of(step)._replace(turns=4)
    with pytest.raises(ValueError, match="capped: the loss does not fall"):
        scale.train_capped(case, f"{BUDGET} --lr 1e-30", "cpu", cap_bytes=0)
    monkeypatch.setattr(scale, "host_free", lambda: 1000)
    with pytest.raises(ValueError, match=r"^capped needs .* KiB of host memory and 1000 bytes are"):
        scale.train_capped(case, BUDGET, "cpu", cap_bytes=0)


@pytest.mark.slow
@pytest.mark.dist
def test_a_process_alone_is_sharded_beside_a_plain_one(bench, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import scale  # by its own name, for the other processes to find

    found = scale.measure_fsdp(scale.Setup("cpu", "toy"))["steps"]
    assert list(found) == ["plain", "--fsdp"] and found["--fsdp"]["to"] == "plain"


def test_parts_are_run_by_name_and_recorded_apart(scale, monkeypatch, capsys):
    records = []
    monkeypatch.setattr(scale, "append", lambda name, record: records.append((name, record)))
    monkeypatch.setitem(scale.PARTS, "growth", lambda setup: setup.keep({"size": setup.size}))
    flags = ["growth", "capped", "--size", "nano", "--record"]
    monkeypatch.setattr(sys, "argv", ["scale.py", *flags])
    scale.main()
    ((name, record),) = records
    assert (name, record["part"], record["size"], record["device"]) == (
        "scale", "growth", "nano", "cpu"
    )  # fmt: skip
    assert capsys.readouterr().err == "capped: skipped, it needs --device cuda\n"
    monkeypatch.setattr(sys, "argv", ["scale.py", "grow"])
    with pytest.raises(ValueError, match="there is no part grow: choose from adamw, shared"):
        scale.main()
    monkeypatch.setattr(sys, "argv", ["scale.py", "--turns", "2"])
    with pytest.raises(ValueError, match="--turns 2 are too few for a spread: choose 3 or more"):
        scale.main()


def test_an_evaluation_is_timed_only_where_all_ways_find_the_same(bench, store_dir):
    from small_stores import ONE

    from model import TransformerConfig
    from support.text.tokenizer import byte_lengths, get_encoding

    evaluation = bench("evaluation")
    store, encoding = evaluation.Store.open(store_dir), get_encoding("bytes")
    samples = evaluation.Samples(store, "pieces", 512, "val")
    task = evaluation.last_words(store, samples, encoding, 2000)
    words = [question.continuations[0] for question in task.questions]
    assert len(words) > 10 and all(re.fullmatch(r"\s\S+", word) for word in words)
    torch.manual_seed(0)
    model = evaluation.Transformer(TransformerConfig("gpt", 1, 2, 8, 16, 512, 320))
    made = evaluation.Bench(model, ONE, store, byte_lengths(encoding), 4, 2000)
    items = evaluation.items_of(task, encoding, 512, show=False)
    variants = evaluation.task_variants(made, items)
    for some in (variants, evaluation.text_variants(made)):
        evaluation.check(some, 1e-5)
    with pytest.raises(ValueError, match="padded finds"):
        evaluation.check(variants | {"padded": lambda: variants["padded"]() + 1}, 1e-5)
