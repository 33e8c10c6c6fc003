"""--compile: a new shape is compiled when it occurs, and losses do not change.

Graphs are counted with a backend that runs them uncompiled, so that a test takes only seconds.
"""

import pytest
import torch
from conftest import SMALL, metrics, read_log, start_ranks
from test_train import losses
from torch import nn
from torch._dynamo.testing import CompileCounter

import train
from kernels import packed_attention

pytestmark = pytest.mark.usefixtures("no_sample_or_report")
SLOW = pytest.mark.slow

# 16, 24 and 32 of 32 tokens
LTD = "--layers 3 --tokens 1024 --ltd --ltd-pace linear --ltd-start 16 --ltd-multiple 8"


def count_graphs(patch: pytest.MonkeyPatch) -> CompileCounter:
    """Count the graphs of blocks instead of compiling them. A graph break is an error."""
    torch.compiler.reset()
    counter, compile_module = CompileCounter(), nn.Module.compile

    def count(module, **options):
        compile_module(module, backend=counter, fullgraph=True, **options)

    patch.setattr(nn.Module, "compile", count)
    return counter


@pytest.fixture
def graphs(monkeypatch):
    """Count graphs; blocks of plain runs use the attention of compiled ones, for equal rounding."""
    chosen = packed_attention.chosen_impl
    monkeypatch.setattr("model.chosen_impl", lambda *args: chosen(*args[:4], compiled=True))
    yield count_graphs(monkeypatch)
    torch.compiler.reset()


CHANGING = (
    f"{LTD} --pack --curriculum seqlen,rarity --curriculum-start 8,1 --dropout 0.1",
    f"{LTD} --model bert --checkpoint-activations --dtype bf16 --tokens 512",
    "--pack --pack-batch documents --tokens 2000",
    "--pseudo --pseudo-layers 2 --pseudo-until 0.5 --tokens 512",
    "--model bert --nsp --pack --pack-batch rows --tokens 512",
)


@pytest.mark.parametrize(
    "flags", [CHANGING[0], *(pytest.param(flags, marks=SLOW) for flags in CHANGING[1:])]
)
def test_new_shapes_compile_and_metrics_stay_equal(run, graphs, monkeypatch, flags):
    seen, step = [], train.Trainer.train_step  # seen: the number of graphs before each step

    def counted(*args):
        seen.append(graphs.frame_count)
        return step(*args)

    monkeypatch.setattr(train.Trainer, "train_step", counted)
    with torch._dynamo.config.patch(recompile_limit=1):  # `assemble` must raise it
        compiled = metrics(run(f"{flags} --compile", out="compiled"))
    assert seen[0] == 0 < seen[1] and graphs.frame_count < 9, "code for one shape, then for any"
    assert metrics(run(flags, out="plain")) == compiled


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--offload --offload-budget 480KB --pack", "--fsdp"])
def test_no_technique_breaks_the_graph_of_a_block(run, graphs, flags):
    assert run(f"{flags} --tokens 512 --compile") and graphs.frame_count


def train_on_counted_graphs(flags: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        graphs = count_graphs(patch)
        status = train.main(flags)
    return status or int(not 0 < graphs.frame_count < 9)


@pytest.mark.slow
@pytest.mark.dist
def test_two_compiled_ranks_have_the_losses_of_one_process(store_dir, tmp_path, log_of):
    runs = {
        tmp_path / f"run{more}": f"{LTD} --pack --lr 1e-3 {more}"
        for more in ("", "--checkpoint-activations", "--fsdp")
    }
    begin = f"{SMALL} --data {store_dir} --compile --out"
    lines = [f"{begin} {out} {flags}".split() for out, flags in runs.items()]
    start_ranks(2, *lines, work=train_on_counted_graphs)
    for out, flags in runs.items():
        one = losses(log_of(flags.replace("--fsdp", "")))
        assert losses(read_log(out)) == pytest.approx(one, rel=0, abs=1e-5)


@pytest.mark.slow
def test_compiled_code_has_the_losses_of_plain_code(run):
    """With the default backend, forward and backward."""
    torch.compiler.reset()
    flags = f"{LTD} --pack --tokens 3000 --lr 1e-3"
    plain = losses(run(flags, out="plain"))
    coded = losses(run(f"{flags} --compile", out="compiled"))
    assert coded == pytest.approx(plain, rel=0, abs=1e-4)
