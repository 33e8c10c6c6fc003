"""--compile: as many graphs as there are shapes, all of them before the first step, same losses.

Graphs are counted with a backend that runs them as they are, so that a test takes seconds.
"""

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import SMALL, metrics, read_log, start_ranks
from test_train import losses
from torch import nn
from torch._dynamo.testing import CompileCounter

import config
import data
import ltd
import model
import train
from kernels import packed_attention
from support.base.clock import StepContext
from support.step import blocks

pytestmark = pytest.mark.usefixtures("short_ends")

# 16, 24 and 32 of 32 tokens
LTD = "--tokens 1024 --ltd --ltd-pace linear --ltd-start 16 --ltd-multiple 8"


def count_graphs(patch: pytest.MonkeyPatch) -> CompileCounter:
    """Count the graphs of blocks, instead of making code of them. A break in one is an error."""
    torch.compiler.reset()
    counter, compile_module = CompileCounter(), nn.Module.compile

    def count(module, **options):
        compile_module(module, backend=counter, fullgraph=True, **options)

    patch.setattr(nn.Module, "compile", count)
    return counter


@pytest.fixture
def graphs(monkeypatch):
    """Blocks that are not compiled attend as the compiled ones, or would differ in a last bit."""
    chosen = packed_attention.chosen_impl
    as_compiled = partial(chosen, compiled=True)
    monkeypatch.setattr("model.chosen_impl", lambda *args: as_compiled(*args[:4]))
    yield count_graphs(monkeypatch)
    torch.compiler.reset()
    if dist.is_initialized():  # by --fsdp, and a command that ends would take it for its own
        dist.destroy_process_group()


def seen_by_step(look: Callable[[], object], patch: pytest.MonkeyPatch) -> list:
    """What a look tells before each step of the runs that follow, and at their ends."""
    seen, step, finish = [], train.Trainer.step, train.finish
    patch.setattr(train.Trainer, "step", lambda *args: seen.append(look()) or step(*args))
    patch.setattr(train, "finish", lambda *args: finish(*args) or seen.append(look()))
    return seen


def graphs_by_step(graphs: CompileCounter, patch: pytest.MonkeyPatch) -> list[int]:
    return seen_by_step(lambda: graphs.frame_count, patch)


SHAPES_KNOWN = (
    f"{LTD} --pack --curriculum seqlen,rarity --curriculum-start 8,1 --dropout 0.1",
    f"{LTD} --model bert --micro-batch-size 2 --checkpoint-activations --dtype bf16",
)


@pytest.mark.parametrize("flags", SHAPES_KNOWN)
def test_every_graph_is_made_before_the_first_step(run, graphs, monkeypatch, capsys, flags):
    """Also if the compiler keeps fewer by itself, and would run others as they are. Making them
    leaves no trace: the run is the same without."""
    seen = graphs_by_step(graphs, monkeypatch)
    with torch._dynamo.config.patch(recompile_limit=1):
        ahead = metrics(run(f"{flags} --compile", out="compiled"))
    assert len(seen) > 4 and set(seen) == {3}
    said = "".join(capsys.readouterr())
    assert "compiled for 3 shapes, " in said and "32 tokens of a row, in " in said
    assert metrics(run(flags, out="plain")) == ahead


TECHNIQUES = (
    f"{LTD} --model bert --nsp --pack --pack-batch rows",
    "--pseudo --pseudo-layers 2 --pseudo-until 0.5",
    "--offload --offload-budget 480KB --pack",
    "--fsdp",
)


@pytest.mark.parametrize("flags", TECHNIQUES)
def test_no_technique_breaks_the_graph_of_a_block(run, graphs, flags):
    assert run(f"{flags} --tokens 512 --compile") and graphs.frame_count


def test_a_break_in_the_graph_of_a_block_is_seen(run, graphs, monkeypatch):
    attend = model.TokenMeta.attend

    def broken(*args):
        torch._dynamo.graph_break()
        return attend(*args)

    monkeypatch.setattr(model.TokenMeta, "attend", broken)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run("--tokens 512 --compile")


def built(flags: str) -> config.Config:
    return config.build(config.parse(flags.split()))


@pytest.mark.parametrize("more", ["", "--ltd-pace root", "--ltd-steps 50"])
@pytest.mark.parametrize("start", [16, 500])
def test_the_shapes_are_those_that_the_schedule_goes_through(start, more):
    settings = built(f"--size 124M --ltd --ltd-start {start} {more} --tokens 1000000")

    def kept(settings, step, progress):
        return ltd.kept_now(settings, StepContext(seed=0, step=step, progress=progress))

    first = [kept(shape, 1, 0.0) for shape in config.shapes(settings)]
    met = {kept(settings, 1 + i // 10, i / 1000) for i in range(1000)}
    assert met <= set(first) and len(first) == len(set(first)) <= 8
    assert {start, 1024} <= set(first)


def test_shapes_are_known_of_packed_rows_and_not_of_rows_that_grow():
    for flags in ("--curriculum length", "--curriculum seqlen,rarity"):
        assert len(config.shapes(built(f"{flags} --pack"))) == 1
    for flags in ("seqlen", "seqlen-reshape", "rarity --model bert"):
        assert config.shapes(built(f"--curriculum {flags}")) == []


SHAPES_UNKNOWN = {
    "--curriculum seqlen --tokens 1024": "rows grow",
    "--pack --pack-batch documents --tokens 3000": "steps differ in rows",
}


@pytest.mark.parametrize(("flags", "why"), SHAPES_UNKNOWN.items())
def test_rows_that_change_compile_as_they_come(run, graphs, capsys, monkeypatch, flags, why):
    seen = graphs_by_step(graphs, monkeypatch)
    compiled = metrics(run(f"{flags} --compile", out="compiled"))
    assert f"--compile: {why}" in "".join(capsys.readouterr())
    assert 0 < seen[-1] < len(seen), "one for a number of rows or tokens, then one for any"
    assert metrics(run(flags, out="plain")) == compiled


def test_a_batch_of_another_layout_makes_no_graph(run, graphs, monkeypatch):
    """It runs uncompiled: rows that miss the documents that the others have."""
    collate, calls = data.collate, []

    def odd(*args):
        batch = collate(*args)
        calls.append(batch)
        return batch if len(calls) % 3 else batch._replace(positions=None, doc_ids=None)

    seen = graphs_by_step(graphs, monkeypatch)
    monkeypatch.setattr("data.collate", odd)
    monkeypatch.setattr(train, "laid_out", lambda settings, batch: batch)
    run(f"{LTD} --pack --compile")
    assert set(seen) == {3} and len(calls) > 3


def test_full_rows_have_the_layout_of_the_others():
    def laid_out(flags, batch):
        settings = built(flags)
        on = blocks.Choice(settings.run.compile == "on", "")
        return train.laid_out(SimpleNamespace(settings=settings, compiled=on), batch)

    full = data.Batch.blank(3, 5)
    for flags in ("--compile", "--pack", "--model bert"):
        assert laid_out(flags, full) is full
    for flags in ("--compile --pack", "--compile --model bert"):
        batch = laid_out(flags, full)
        assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 3
        assert batch.doc_ids.tolist() == [[0] * 5] * 3
        assert laid_out(flags, batch) is batch


def test_without_the_warm_up_graphs_are_made_in_mid_run(run, graphs, monkeypatch):
    seen = graphs_by_step(graphs, monkeypatch)
    monkeypatch.setattr(train, "compiled_ahead", lambda *_: nullcontext())
    run(f"{LTD} --pack --compile")
    assert seen[:2] == [0, 2] and seen[-1] > 2, "layers that drop and those that do not; the rest"


def test_a_signal_between_two_shapes_stops_the_run(run, graphs, tmp_path, monkeypatch, log_of):
    """Which goes on the same."""
    flags = f"{LTD} --compile"
    real, calls = train.run_once, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "run_once", interrupted)
        with pytest.raises(AssertionError):  # the status is 143, not 0
            run(flags, out="stopped")
    assert len(calls) == 2 and not metrics(read_log(tmp_path / "stopped"))
    assert train.main(["--resume", "--out", "stopped"]) == 0
    assert metrics(read_log(tmp_path / "stopped")) == metrics(log_of(LTD))


def train_and_note_graphs(flags: list[str]) -> int:
    """In a rank: train, and leave how many graphs there were before each step and at the end."""
    with pytest.MonkeyPatch.context() as patch:
        seen = graphs_by_step(count_graphs(patch), patch)
        status = train.main(flags)
    folder = Path(flags[flags.index("--out") + 1])
    (folder / f"graphs-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    return status


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_make_them_ahead_too_and_draw_the_curve_of_one(store_dir, tmp_path, log_of):
    kinds = {"kept": f"{LTD} --pack --lr 1e-3"}
    kinds["recomputed"] = f"{kinds['kept']} --checkpoint-activations"
    runs = [
        f"{SMALL} --data {store_dir} --out {tmp_path / out} {flags} --compile".split()
        for out, flags in kinds.items()
    ]
    start_ranks(2, *runs, work=train_and_note_graphs)
    for out, flags in kinds.items():
        for rank in range(2):
            seen = json.loads((tmp_path / out / f"graphs-{rank}.json").read_text())
            assert len(seen) > 4 and set(seen) == {3}
        one, two = losses(log_of(flags)), losses(read_log(tmp_path / out))
        assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5


@pytest.mark.slow
def test_compiled_code_computes_the_same(run, monkeypatch):
    """The default backend, forward and backward; nothing is compiled after the first step."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    flags = f"{LTD} --pack --tokens 3000 --lr 1e-3"
    plain = losses(run(flags, out="plain"))
    made = (("stats", "unique_graphs"), ("aot_autograd", "ok"))
    seen = seen_by_step(lambda: [counters[kind][name] for kind, name in made], monkeypatch)
    coded = losses(run(f"{flags} --compile", out="compiled"))
    assert all(counts == [3, 3] for counts in seen)
    assert max(abs(a - b) for a, b in zip(plain, coded, strict=True)) < 1e-4
