"""The benches start, describe the machine alike, and have names of their own."""

import importlib.util
import json
import sys
import time
from types import ModuleType

import pytest
import torch

from support.runtime import ROOT

BENCHES = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))
COMMANDS = [name for name in BENCHES if name not in ("nanogpt", "record", "tables", "turns")]


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


def test_the_tables_follow_from_the_records(bench, capsys):
    bench("tables").main()
    out = capsys.readouterr().out
    assert out.count("| flags | bits per byte |") == 5 and out.count("| run | seconds") == 1
    assert "| `--pack` | 1.789 (1.787 to 1.793)" in out


def sleeper(seconds: float):
    """Module level, as another process has to find it by name."""

    def step() -> None:
        time.sleep(seconds)

    return step


def refused():
    raise ValueError("no such variant")


@pytest.mark.dist
def test_variants_take_turns_each_in_its_process(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    from turns import take_turns  # by its own name, for the other process to find

    seconds = take_turns({"slow": (sleeper, 0.05), "fast": (sleeper, 0.01)}, turns=3)
    assert [len(values) for values in seconds.values()] == [3, 3]
    assert min(seconds["slow"]) > 0.05 > max(seconds["fast"]) > 0.01


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
    assert flops["AdamW"] < flops["plain"] == flops["packed"]
    quarter, half = (flops["plain"] - flops[f"keep {name}"] for name in ("1/4", "1/2"))
    assert half < quarter < 2 * half, "attention falls with the square"
