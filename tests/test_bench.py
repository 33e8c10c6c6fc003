"""The benches start, describe the machine alike, and have names of their own."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from types import ModuleType

import pytest
import torch

from support.runtime import ROOT

BENCHES = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))
COMMANDS = [
    name for name in BENCHES if name not in ("nanogpt", "peak", "record", "tables", "turns")
]


@pytest.fixture
def bench(monkeypatch):
    """Import a bench by its file, as bench/kernels.py shares its name with a package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "bench")])

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / f"bench/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_no_bench_has_the_name_of_a_module():
    products = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("support/*.py"))}
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
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    for _ in range(2):
        record.append("step", here | {"ms": record.quartiles([1, 2, 3, 4, 5])})
    record.append("step", here | {"device": "cuda"})
    lines = (tmp_path / "results/step.jsonl").read_text().splitlines()
    assert len(lines) == 2 and json.loads(lines[1])["ms"] == [2, 3, 4]
    assert (tmp_path / "results/gpu-step.jsonl").exists()


def test_a_gpu_that_is_not_there_is_refused(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch sees no GPU here"):
        bench("record").surroundings("cuda")


def test_on_a_gpu_what_is_compared_with_nanogpt_runs_by_itself(bench):
    step = bench("step")
    variants = dict.fromkeys(["nanoGPT", *step.VARIANTS], ())
    assert step.groups_of(variants, "cpu") == [variants]
    ours, theirs = step.groups_of(variants, "cuda")
    assert list(ours) == ["plain", "packed", "packed, 64", "keep 3/4", "keep 1/2", "keep 1/4"]
    assert list(theirs) == ["nanoGPT", "AdamW", "AdamW, exact GELU", "Muon"]
    assert step.groups_of(ours, "cuda") == [ours]


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
# A machine with a GPU ($FAKE_GPU is 0: without) that misses $FAKE_MISSING; runs nothing, notes it.
case "$1 $2" in
"-c "*is_available*) exit $((1 - ${FAKE_GPU:-1})) ;;
"-c "*) echo "$FAKE_MISSING" ;;
*) echo "$*" >>"$FAKE_LOG"
   [[ "$*" == *$FAKE_SLOW* ]] && sleep 60
   [[ "$*" != *$FAKE_FAILS* ]] ;;
esac
"""


@pytest.fixture
def gpu_sh(tmp_path):
    """bench/gpu.sh with a python that only notes what it is asked to run."""
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    log = tmp_path / "ran"

    def start(*flags: str, **given: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        fake = {"FAKE_MISSING": "", "FAKE_SLOW": "no-one", "FAKE_FAILS": "no-one"} | given
        env = os.environ | {"PYTHON": str(tmp_path / "python"), "FAKE_LOG": str(log), "CC": "sh"}
        log.write_text("")
        done = subprocess.run(
            ["bash", str(ROOT / "bench/gpu.sh"), *flags],
            env=env | fake,
            capture_output=True,
            text=True,
        )
        return done, log.read_text().splitlines()

    return start


def test_without_a_gpu_one_line_and_status_2(gpu_sh):
    done, ran = gpu_sh(FAKE_GPU="0")
    assert done.returncode == 2 and ran == []
    assert done.stderr == "bench/gpu.sh: torch sees no GPU here, so nothing was run\n"
    if not torch.cuda.is_available():
        done, _ = gpu_sh(PYTHON=sys.executable)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
    done, _ = gpu_sh(PYTHON="/nowhere/python")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_with_a_gpu_everything_that_needs_one_is_run(gpu_sh):
    done, ran = gpu_sh()
    assert done.returncode == 0 and "skipped" not in done.stderr
    assert "-o addopts=" in ran[0] and "tests/test_kernels_token_drop.py" in ran[0]
    steps = [line for line in ran if "bench/step.py" in line]
    assert sum("--compile" in line for line in steps) == 3 == len(steps) / 2
    assert all("--variants plain packed keep 3/4" in line for line in steps)
    assert all("--device cuda --record" in line for line in ran[1:])
    assert {line.split()[0] for line in ran[1:]} == {
        "bench/kernels.py", "bench/attention.py", "bench/pieces.py", "bench/step.py",
        "bench/gather_scatter.py", "bench/scale.py", "bench/generation.py", "bench/evaluation.py",
    }  # fmt: skip
    parts = {line.split()[-1] for line in ran if "bench/scale.py" in line}
    assert parts == {"adamw", "shared", "growth", "offload", "fsdp", "capped"}
    _, ran = gpu_sh("--nanogpt", "there")
    assert all("--record --nanogpt there" in line for line in ran if "bench/step.py" in line)


@pytest.mark.parametrize(
    ("missing", "reasons", "stays"),
    [
        ("pytest", ["tests: skipped, pytest is missing"], 19),
        ("triton", ["bench/step.py --compile: skipped, triton is missing"], 15),
        ("tiktoken", ["tests: skipped, tiktoken", "bench/step.py: skipped, tiktoken"], 3),
        ("hypothesis", [], 20),
        ("torchao", ["torchao's part of bench/scale.py: skipped, torchao is missing"], 20),
        ("numpy", ["tests: skipped", "kernels.py: skipped", "gather_scatter.py: skipped"], 0),
    ],
)
def test_what_is_missing_skips_what_needs_it_and_says_so(gpu_sh, missing, reasons, stays):
    done, ran = gpu_sh(FAKE_MISSING=missing)
    assert done.returncode == 0 and len(ran) == stays
    for reason in reasons:
        assert reason in done.stderr


def test_without_a_c_compiler_nothing_of_triton_is_run(gpu_sh, tmp_path):
    for name in ("bash", "dirname", "grep", "timeout", "env", "sh"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done, ran = gpu_sh(PATH=str(tmp_path), CC="nowhere")
    assert done.returncode == 0 and "-k not triton" in ran[0]
    assert "bench/step.py --compile: skipped, a-C-compiler is missing" in done.stderr
    assert not [line for line in ran if "--compile" in line or "gather_scatter" in line]


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_does_not_end_the_others(gpu_sh):
    done, ran = gpu_sh(FAKE_FAILS="kernels.py")
    assert done.returncode == 1 and len(ran) == 20
    assert "bench/kernels.py: failed with status 1" in done.stderr
    done, ran = gpu_sh(FAKE_SLOW="kernels.py", GPU_SECONDS="12")
    assert done.returncode == 1 and len(ran) == 2
    assert "bench/kernels.py: stopped, its 1" in done.stderr
    assert "bench/step.py, nano: skipped, the 12 s are used up" in done.stderr


def test_one_bench_alone_may_be_asked_for(gpu_sh):
    done, ran = gpu_sh(GPU_ONLY="scale")
    assert done.returncode == 0 and len(ran) == 6
    assert all(line.startswith("bench/scale.py --device cuda --record ") for line in ran)


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
        module.measure("nano", 2, "cpu", turns=2)


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


@pytest.mark.slow
@pytest.mark.dist
def test_variants_take_turns_each_in_its_process(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    from turns import take_turns  # by its own name, for the other process to find

    taken = take_turns({"slow": (sleeper, 0.2), "fast": (sleeper, 0.01)}, turns=3)
    seconds = {name: [one.seconds for one in steps] for name, steps in taken.items()}
    assert [len(values) for values in seconds.values()] == [3, 3]
    assert min(seconds["slow"]) > 0.2 > min(seconds["fast"]) > 0.01


@pytest.mark.dist
def test_a_variant_that_cannot_be_built_is_named(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    from turns import take_turns

    with pytest.raises(ValueError, match=r"^broken: no such variant$"):
        take_turns({"broken": (refused,)}, turns=1)


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

TOY = dict(shape=(4, 2, 16, 32), rows=2, vocab_size=64, turns=2, pos="rope")


def toy_of(step: ModuleType):
    return step.Case(**TOY | {"shape": step.Size(*TOY["shape"])})


@pytest.fixture
def scale(bench, monkeypatch):
    """The bench with its turns in this process."""
    module = bench("scale")
    import step
    import turns

    def take_turns(variants: dict[str, tuple], number: int) -> dict[str, list]:
        steps = {name: build(*arguments) for name, (build, *arguments) in variants.items()}
        one_each = {name: lambda step=step: turns.turn_of(step) for name, step in steps.items()}
        return turns.alternated(one_each, number)

    monkeypatch.setattr(turns, "TIMED_SECONDS", 0)
    monkeypatch.setattr(module, "take_turns", take_turns)
    monkeypatch.setitem(step.CASES, "toy", toy_of(step))
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
    """Weight, gradient and two moments in fp32; away is the state of the blocks' matrices."""
    import step
    from turns import Taken

    case, asked = toy_of(step), {}

    def take_turns(jobs: dict[str, tuple], turns: int) -> dict[str, list]:
        asked.update(jobs)
        return {name: [Taken(1.0, peak_bytes=100_000)] for name in jobs}

    start = scale.runtime.start
    monkeypatch.setattr(scale.runtime, "start", lambda *_: start("cpu", "fp32"))
    monkeypatch.setattr(scale, "take_turns", take_turns)
    variants = {scale.HERE: step.Variant(None, "adamw"), "torchao": step.Variant(None, "adamw")}
    variants["blocks' state"] = step.Variant(None, "adamw", flags="--offload")
    jobs = {name: (scale.build, case, variants[name], "cuda") for name in variants}
    jobs["blocks' state"] = (*jobs["blocks' state"], "blocks' state")
    peaks = scale.peaks_of(jobs, variants, case)
    settings = step.settings_of(case, variants[scale.HERE], "cpu", False)
    numel = sum(p.numel() for p in scale.like(settings, case).parameters())
    assert peaks["torchao"] == {"lean_peak_gb": 0.0001}
    assert peaks[scale.HERE]["planned_gb"] == pytest.approx(16 * numel / 1e9, rel=1e-3)
    without = (16 * numel - 8 * 4 * 12 * 16 * 16) / 1e9
    assert peaks["blocks' state"]["planned_gb"] == pytest.approx(without, rel=1e-3)
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
    import step

    monkeypatch.setitem(step.CASES, "toy", toy_of(step))
    found = scale.measure_fsdp(scale.Setup("cpu", "toy"))["steps"]
    assert list(found) == ["plain", "--fsdp"] and found["--fsdp"]["to"] == "plain"


def test_parts_are_run_by_name_and_recorded_apart(scale, monkeypatch, capsys):
    records = []
    monkeypatch.setattr(scale, "append", lambda name, record: records.append((name, record)))
    monkeypatch.setitem(scale.PARTS, "growth", lambda setup: {"size": setup.size})
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
    from small_stores import ONE  # here, as other tests start processes that find bench/kernels.py

    from model import TransformerConfig
    from support.tokenizer import byte_lengths, get_encoding

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
