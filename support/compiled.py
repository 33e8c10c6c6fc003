"""--compile: every shape that a step may have is compiled before the first step, none later.

A compiler that meets a new shape stops the run for seconds, on a GPU for a minute. Which shapes
will come is known from the settings (config.shapes), so each is run once, forward and backward, on
rows of the layout that the run has. After that nothing compiles any more: an evaluation, the
sample, or a batch of another layout runs as it would without --compile.

On a GPU blocks are compiled by default where the shapes are listed and few: norms, GELU, residuals
and casts then take half as long, by an estimate from their bytes. On a CPU a block takes half a
minute to compile, and only --compile asks for it.

Where rows themselves grow (--curriculum seqlen without --pack), or a step has as many rows as its
documents need (--pack-batch documents), there is no such list. Then blocks compile as the shapes
come, the second time for shapes in general.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from kernels import token_drop
from support.blocks import run_block_of
from support.clock import StepContext, tokens_by_layer
from support.progress import write
from support.sharded import is_sharded

MOST_SHAPES = 16  # by default; each takes some seconds


class Choice(NamedTuple):
    on: bool
    why: str


def choice(settings: Any, runtime: Any, shapes: Sequence[Any]) -> Choice:
    """Whether blocks are compiled.

    Args: shapes from config.shapes
    """
    asked, kind = settings.run.compile, runtime.device.type
    if asked != "auto":
        return Choice(asked == "on", "as asked")
    if kind != "cuda":
        return Choice(False, f"--compile compiles on {kind} too")
    if token_drop.triton is None:
        return Choice(False, "Triton, in which torch writes a GPU's code, is not installed")
    if not shapes:
        return Choice(False, "no list of shapes; --compile compiles them as they come")
    if len(shapes) > MOST_SHAPES:
        return Choice(False, f"{len(shapes)} shapes would come; --compile compiles them all")
    return Choice(True, "shapes that are known before the first step")


@contextmanager
def compiled_ahead(trainer: Any, shapes: Sequence[Any], batch: Any, bar: tqdm) -> Iterator[None]:
    """Compile the trainer's blocks for each shape; within the context nothing else compiles.

    Args: trainer a train.Trainer; neither its weights nor its gradients are touched
          shapes  from config.shapes
          batch   full rows of any tokens, as many as a micro-batch has
    """
    if not trainer.compiled.on:
        yield
        return
    if not shapes:
        why = "steps differ in rows" if trainer.settings.pack.on else "rows grow"
        none = "with --pack --pack-batch rows none does"
        write(bar, f"--compile: {why}, so each new shape may compile; {none}")
        yield
        return
    began = time.perf_counter()
    batch = laid_out(trainer, batch).to(trainer.runtime.device)
    # blocks share their code, and so the number of shapes that the compiler keeps of it
    most = max(len(shapes), torch._dynamo.config.recompile_limit)
    with torch._dynamo.config.patch(recompile_limit=most):
        for number, settings in enumerate(shapes, 1):
            run_once(trainer, settings, batch)
            trainer.between("compile: shape", number, len(shapes))
    write(bar, f"{announcement(shapes)}, in {time.perf_counter() - began:.0f} s")
    with torch.compiler.set_stance("eager_on_recompile"):
        yield


def laid_out(trainer: Any, batch: Any) -> Any:
    """The batch in the layout that blocks are compiled for.

    A packed or a BERT's batch has positions and doc_ids, but by chance each of its rows may be one
    piece that fills it, and then has none.
    """
    in_pieces = trainer.settings.pack.on or trainer.settings.model.model == "bert"
    return batch.with_documents() if trainer.compiled.on and in_pieces else batch


def first_step(settings: Any) -> StepContext:
    return StepContext(seed=settings.run.seed, step=1, progress=0.0)


def run_once(trainer: Any, settings: Any, batch: Any) -> None:
    """Forward and backward as the first step of a run with these settings has them.

    Gradients are returned and dropped, not stored: DDP, which waits for stored ones, sees nothing
    of it. Only FSDP has to store them first. Every draw of a run has its key, so no generator needs
    to be set back either.
    """
    run_block = run_block_of(settings, trainer.held, first_step(settings), 0, batch)
    with trainer.runtime.autocast():
        loss = trainer.model(batch, run_block=run_block)
    if is_sharded(trainer.model):
        loss.backward()
        trainer.model.zero_grad()
        return
    weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    torch.autograd.grad(loss, weights, allow_unused=True)  # a skipped layer has no gradient


def announcement(shapes: Sequence[Any]) -> str:
    """Example: compiled for 3 shapes, 64, 160, 256 tokens of a row"""
    T = shapes[0].data.seq_len
    tokens = [min(tokens_by_layer(shape, first_step(shape), T)) for shape in shapes]
    listed = ", ".join(map(str, tokens))
    return f"compiled for {len(shapes)} shape{'s' * (len(shapes) > 1)}, {listed} tokens of a row"
