"""Pretrain a GPT or a BERT: parse, runtime, data, plan, model, assembly, resume, loop, finish.

    torchrun train.py --curriculum seqlen --ltd --pack            # the three techniques at once
    torchrun --nproc-per-node 8 train.py --size 124M --data DIR   # the same on eight GPUs
    python train.py --resume                                      # go on with the newest run

Everything a step does follows from the settings and the `Clock` before it: which samples, how long,
what is dropped, how far the weights move. So a run that was killed goes on as if it had not been,
and more processes or micro-batches change its speed, not its curve (but for --dropout, whose masks
are drawn for each micro-batch).
"""

import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

# Before torch loads OpenMP, whose threads wait spinning for milliseconds. Beside another torch
# program on two cores the slowest of 20 nano steps took 10.6 s like that, and 2.2 s like this.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import config
import offload
import pseudo
import report
import sample
from data import Data, open_data
from evaluate import Evaluation
from model import Predicted, RunBlock, Transformer, run_plain, run_recomputed
from plan import Plan, Step, read_ahead
from pseudo import Uses, average
from support.base.clock import StepContext, due, tokens_by_layer
from support.base.rng import generator, seed_of
from support.base.runtime import Runtime, exit_cleanly, on_device, start
from support.base.settings import is_on, techniques_on
from support.base.sharded import (
    assign,
    check_agreement,
    is_sharded,
    join,
    refuse_step,
    shard,
    sync_gradients,
)
from support.base.stop_signal import Stopped, StopSignal
from support.evaluation.scoring import HeldOut, on_each_store
from support.rows.batch import Batch, shares_of
from support.run import progress
from support.run.dry_run import Makers, dry_run
from support.run.progress import write
from support.run.run import Run
from support.step.blocks import Choice, choice, with_rounded_weights
from support.step.flops import work_of
from support.step.memory import memory_of, micro_batch
from support.step.optim import Optimizers, learning_rate
from support.step.sizes import empty_model
from support.weights.initial import initial_model, model_size


def main(argv: list[str] | None = None) -> int:
    settings, folder = config.parse_or_resume(sys.argv[1:] if argv is None else argv)
    runtime = start(settings.run.device, settings.run.dtype)
    if settings.run.fsdp:
        join(runtime)
    micro_batch(settings, runtime)  # refused before anything is read
    settings, data = open_data(settings, runtime)
    plan = Plan(settings, data.store, data.special_ids, runtime)
    evaluation = held_out(settings, data, settings.run.eval_tokens)
    size = model_size(settings, data.encoding, folder)
    shape = config.transformer_config(settings, *size)
    run = Run(settings, runtime, folder, size, data.store)
    saved = run.restore(shape) if folder else None
    if runtime.on_rank0(run.is_complete):
        consumed = f"{run.folder} is finished: its {settings.optim.tokens:,} tokens are consumed"
        runtime.say(f"{consumed}; a larger --tokens extends it")
        return 0
    # of the whole model, which --pseudo makes of a shadow in mid-run: refused now, not then
    away = offload.planned(settings, empty_model(shape), runtime) if settings.offload.on else None
    rows_at_once = micro_batch(settings, runtime, shape, away)
    memory = memory_of(settings, runtime, rows_at_once.count, shape, away)
    if settings.run.dry_run:
        make = Makers(
            plan=partial(Plan, store=data.store, special_ids=data.special_ids, runtime=runtime),
            trainer=lambda s: assemble(s, initial_model(shape, s), runtime, rows_at_once.count),
            next_stage=next_stage,
        )
        last = held_out(settings, data, settings.run.final_eval_tokens)
        dry_run(run, rows_at_once, memory, shape, away, (evaluation, last), make)
        return 0
    model = empty_model(shape) if saved else initial_model(shape, settings, runtime.say)
    run.trainer = assemble(settings, model, runtime, rows_at_once.count, saved)
    del saved  # what is not in use now is only memory
    run.make_folder()
    run.open_log()
    progress.announce(run, plan, rows_at_once.why, memory)
    bar = progress.progress_bar(run)
    # from here on a signal waits until the run can be saved; what came before is no loss
    stop = StopSignal(tqdm.write if runtime.is_rank0 else lambda line: None)

    def between(what: str, done: int, of: int) -> None:
        """After every micro-batch of a step or an evaluation, as often on each rank."""
        progress.show_part(bar, what, done, of)
        if what == "row" and runtime.world_size > 1:
            return  # ranks ask each other once a step, for who asks waits for the slowest
        if runtime.on_any_rank(stop.number > 0):
            raise Stopped

    run.trainer.between = between
    blank = Batch.blank(rows_at_once.count, settings.data.seq_len)
    try:
        with compiled_ahead(run.trainer, config.shapes(settings), blank, bar):
            train(run, plan, evaluation, bar)
            finish(run, data, bar)
    except Stopped:
        bar.close()
        run.save()
        runtime.say(f"stopped at step {run.clock.step}; go on with: {run.resume_command}")
        return 128 + (stop.number or signal.SIGTERM)
    finally:
        bar.close()
        run.log.close()
        stop.close()
    return 0


def train(run: Run, plan: Plan, evaluation: Evaluation, bar: tqdm) -> None:
    """Step after step until the budget is consumed; evaluations and checkpoints as they are due."""
    s = run.settings.run
    if run.evaluation_due:  # the run was stopped in the middle of it
        evaluate_and_save(run, evaluation, bar, checkpoint_due=False)
    for step, waited_ms in read_ahead(plan, run.clock, run.runtime.device):
        if run.is_finished:
            return
        run.keep_trunk(step.before, step.after)
        began = time.perf_counter()
        progress.change_trainer(run, next_stage(run.trainer, step), bar)
        done = run.trainer.step(step)
        ms = (time.perf_counter() - began) * 1e3 + waited_ms
        flops = run.advance(step)
        progress.log_step(run, step, done, progress.Took(ms, waited_ms, flops.model), bar)
        last = run.is_finished
        run.evaluation_due = due(s.eval_every, step.before, step.after, last)
        checkpoint_due = last or due(s.checkpoint_every, step.before, step.after)
        evaluate_and_save(run, evaluation, bar, checkpoint_due)
        run.trainer.between("step", 1, 1)


def next_stage(old: "Trainer", step: Step) -> "Trainer":
    """Who makes this step: where a stage of --pseudo ended before it, the model of the next one."""
    s = old.settings
    owners = pseudo.shadow_at(s, step.context.progress, old.shadow).owners if old.shadow else ()
    if not old.shadow or owners == old.shadow.owners:
        return old
    state = pseudo.handed_over(old.state(), owners, s.pseudo.state, s.pseudo.new)
    new = assemble(s, empty_model(old.model.config), old.runtime, old.rows_at_once, state)
    new.between = old.between
    check_agreement(old.runtime, new.optimizers.named)
    return new


def assemble(
    settings: config.Config,
    model: Transformer,
    runtime: Runtime,
    rows_at_once: int,
    state: dict | None = None,
) -> "Trainer":
    """Put a model together with all that acts on it. The order matters, line by line.

    Called again, on an empty model, where a run goes on and where --pseudo changes its parameters.

    Args: state of `Trainer.state`: what the model and the optimizers go on from
    """
    s, shadow, held, placement = settings, None, None, None
    # which parameters there are comes before all that holds on to them
    if is_on(s, "pseudo"):
        shadow = pseudo.Shadow(**state["pseudo"]) if state else pseudo.shadow_at(s, 0.0, None)
        pseudo.share(model, shadow.owners)
    # compile before wrapping: with a wrapper's hooks inside, every new length would compile again
    shapes = config.shapes(s)
    compiled = choice(s, runtime, shapes)
    for block in set(model.h) if compiled.on else ():
        # known shapes get code of their own, others a general one
        block.compile(dynamic=False if shapes else None)
    # what goes where before anything goes there
    if is_on(s, "offload"):
        placement = offload.planned(s, model, runtime)
    # shards before values: they are other parameters, and those of a state are shards already
    if s.run.fsdp:
        shard(model, runtime, placement.layers_away if placement else ())
    if state:
        assign(model, state["model"], runtime.device)
    # to the device once the values are there, or as much of it as has room
    if placement and not s.run.fsdp:
        held = offload.Offloaded(model, placement, runtime.device, runtime.world_size == 1)
        model.run_block = held.run_block(run_plain)
    elif not s.run.fsdp:
        model.to(runtime.device)
    wrapped: nn.Module = model
    # DDP before the optimizers: it hooks into gradients and may regroup them
    if runtime.world_size > 1 and not s.run.fsdp:
        unused = any(technique.skips_layers for technique in techniques_on(s))
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=unused
        )
    # the optimizers last, on the parameters that then exist
    named = held.parameters() if held else dict(model.named_parameters())
    betas, fp16 = (s.optim.beta1, s.optim.beta2), runtime.dtype == torch.float16
    how = (s.optim.optimizer, s.optim.weight_decay, betas, fp16, runtime.device)
    optimizers = Optimizers(named, *how)
    if state:
        optimizers.load_state_dict(state["optimizers"])
    return Trainer(
        settings=s,
        runtime=runtime,
        model=model,
        wrapped=wrapped,
        optimizers=optimizers,
        rows_at_once=rows_at_once,
        shadow=shadow,
        placement=placement,
        held=held,
        compiled=compiled,
    )


class Trainer:
    """An assembled model, and one optimizer step."""

    def __init__(
        self,
        settings: config.Config,
        runtime: Runtime,
        model: Transformer,
        wrapped: nn.Module,
        optimizers: Optimizers,
        rows_at_once: int,
        shadow: pseudo.Shadow | None,
        placement: offload.Placement | None,
        held: offload.Offloaded | None,
        compiled: Choice,
    ):
        self.settings, self.runtime, self.shadow = settings, runtime, shadow
        self.placement, self.held = placement, held
        self.model, self.wrapped, self.optimizers = model, wrapped, optimizers
        self.rows_at_once = rows_at_once  # of full length
        self.compiled = compiled
        self.between: Callable[[str, int, int], None] = lambda what, done, of: None
        self.uses: Uses | None = None  # of shared weights, where a step watches them
        blocks = len({*shadow.owners} - {pseudo.ABSENT}) if shadow else model.config.layers
        streamed = held.streamed if held else ()
        self.work = work_of(settings, runtime, model.config, rows_at_once, blocks, streamed)

    def step(self, step: Step) -> progress.Done:
        """Forward and backward over this rank's rows, part by part; clip; move the weights."""
        return self.update(step, self.gradients(step))

    def rows_together(self, step: Step) -> int:
        """Rows of a micro-batch: of shorter ones there are more."""
        return self.rows_at_once * (self.settings.data.seq_len // step.batch.tokens.shape[1])

    def gradients(self, step: Step) -> torch.Tensor:
        """Forward and backward over this rank's rows, part by part; the sum of their losses.

        It is divided by the targets of all ranks, not by counts of micro-batches, so that neither
        ranks nor accumulation weigh in.
        """
        s, runtime = self.settings, self.runtime
        device = runtime.device
        rows = len(step.batch.tokens)
        at_once = self.rows_together(step)
        total = torch.zeros((), device=device)
        self.uses = pseudo.uses_to_watch(s, self.shadow, step) if self.shadow else None
        for first in range(0, rows, at_once):
            stop = min(first + at_once, rows)
            part = step.part(slice(first, stop))
            if s.model.dropout:
                key = (s.run.seed, "dropout", step.context.step, runtime.rank, first)
                torch.manual_seed(seed_of(*key))
            last = stop == rows
            sync_gradients(self.wrapped, last)  # over ranks once, with the last part
            batch = laid_out(self, part.batch).to(device)
            predicted = part.predicted and Predicted(
                *(at if at is None else on_device(at, device) for at in part.predicted)
            )
            shares = shares_of(batch, s.optim.loss_per == "document", step.of_answer)
            first_row = runtime.rank * rows + first
            run_block = run_block_of(s, self.held, step.context, first_row, batch)
            run_block = self.uses.run_block(run_block) if self.uses else run_block
            with runtime.autocast():
                loss = self.wrapped(batch, run_block=run_block, shares=shares, predicted=predicted)
            scale = runtime.world_size / max(step.targets, 1)  # the mean over ranks made a sum
            scale *= self.optimizers.loss_scale.value
            with self.held.collecting(last) if self.held else nullcontext():
                (loss * scale).backward()
            total += loss.detach()
            if not last:
                self.between("row", stop, rows)
        return total

    def update(self, step: Step, total: torch.Tensor) -> progress.Done:
        """Move the weights by the gradients that are there; `total` is the loss of these."""
        s, runtime = self.settings, self.runtime
        if self.shadow:
            average(self.optimizers.named, self.shadow.owners)
        if self.uses:
            self.shadow = pseudo.checked(s, self.shadow, self.uses, runtime.reduce)
        norm = self.optimizers.clip_gradients(s.optim.grad_clip)
        # read together: a GPU is waited for once a step
        mean, norm = torch.stack((runtime.reduce(total), norm.to(runtime.device))).tolist()
        mean /= max(step.targets, 1)
        if not math.isfinite(mean):
            refuse_step(runtime, step.context.step, "loss", total.item())
        if not math.isfinite(norm) and runtime.dtype != torch.float16:
            refuse_step(runtime, step.context.step, "gradient", norm)
        lr = learning_rate(s, step.before, step.after)
        update = partial(self.optimizers.step, lr)
        self.held.step(update) if self.held else update()
        return progress.Done(loss=mean, grad_norm=norm, lr=lr)

    def state(self) -> dict:
        """All that `assemble` needs to go on from here."""
        weights = (self.held or self.model).state_dict()
        state = {"model": weights, "optimizers": self.optimizers.state_dict()}
        return {**state, "pseudo": self.shadow._asdict()} if self.shadow else state


def held_out(settings: config.Config, data: Data, tokens: int | None) -> Evaluation:
    how = (settings.data.seq_len, data.byte_lengths, data.special_ids)
    return on_each_store(Evaluation, data.store, tokens, *how, nsp=settings.model.nsp)


def finish(run: Run, data: Data, bar: tqdm) -> None:
    """The last evaluation, what the techniques saved, a sample, and the report of all of it."""
    s, runtime = run.settings, run.runtime
    evaluate_at_end(run, held_out(s, data, s.run.final_eval_tokens), bar)
    if s.model.model == "gpt" and (runtime.is_rank0 or s.run.fsdp):  # which needs all ranks
        random = generator(torch.device("cpu"), s.run.seed, "sample")
        # a row that grows would compile each time
        with runtime.autocast(), torch.compiler.set_stance("force_eager"):
            pieces = sample.write(run.trainer.model, data.encoding, "", 100, generator=random)
            text = "".join(pieces)
        run.log.write("sample", step=run.clock.step, text=text)
        runtime.say(f"a sample:\n{textwrap.indent(text, '    ')}")
    page = runtime.on_rank0(lambda: str(report.write(run.folder)))
    runtime.say(f"checkpoint: {run.saved_path}\nlog: {run.folder / 'log.jsonl'}\nreport: {page}")


# ---- held out
#
# The evaluations of a run, on its way and at its end: how good the model is on held-out text.


def evaluate(run: Run, evaluation: Any, bar: tqdm, last: bool = False) -> HeldOut:
    """How good the model is now (by an evaluate.Evaluation); a line of the log."""
    began, trainer = time.perf_counter(), run.trainer

    def between(done: int) -> None:
        trainer.between("evaluation: row", done, evaluation.rows_in_all)

    found = evaluation.run(trainer.model, run.runtime, trainer.rows_at_once, between)
    progress.log_evaluation(run, found, time.perf_counter() - began, last)
    if not last:
        progress.write(bar, f"step {run.clock.step}: held-out {found}, on {evaluation.text}")
    return found


def evaluate_and_save(run: Run, evaluation: Any, bar: tqdm, checkpoint_due: bool) -> None:
    """Do both as they are due; a model that is better than before is saved in any case."""
    is_best = False
    if run.evaluation_due:
        bits_per_byte = evaluate(run, evaluation, bar).val_bpb
        is_best = bits_per_byte < run.best
        run.best = min(bits_per_byte, run.best)
        run.evaluation_due = False
    if checkpoint_due or is_best:
        run.save(is_best)


def evaluate_at_end(run: Run, evaluation: Any, bar: tqdm) -> None:
    """The last evaluation, and what the techniques saved."""
    found = evaluate(run, evaluation, bar, last=True)
    bar.close()
    progress.conclude(run, found, evaluation.text)


def run_block_of(
    settings: Any, held: Any, context: StepContext, first_row: int, batch: Batch
) -> RunBlock:
    """For the micro-batch that begins at this row of all ranks' rows.

    Each technique wraps those before it, in the order of `Config`.

    Args: held offload.Offloaded, where weights may have to be fetched first, or None
    """
    recomputes = settings.run.checkpoint_activations
    run_block = run_recomputed if recomputes else run_plain
    if held:
        run_block = held.run_block(run_block, recomputes)
    elif batch.tokens.is_cuda and not settings.run.fsdp:
        run_block = with_rounded_weights(run_block)
    for technique in techniques_on(settings):
        if technique.run_block:
            run_block = technique.run_block(settings, context, first_row, batch, run_block)
    return run_block


# ---- compiled
#
# --compile: every shape that a step may have is compiled before the first step, none later.
#
# A compiler that meets a new shape stops the run for seconds, on a GPU for a minute. Which shapes
# will come is known from the settings (config.shapes), so each is run once, forward and backward,
# on rows of the layout that the run has. After that nothing compiles any more: an evaluation, the
# sample, or a batch of another layout runs as it would without --compile.
#
# On a GPU blocks are compiled by default where the shapes are listed and few: norms, GELU,
# residuals and casts then take half as long, by an estimate from their bytes. On a CPU a block
# takes half a minute to compile, and only --compile asks for it.
#
# Where rows themselves grow (--curriculum seqlen without --pack), or a step has as many rows as its
# documents need (--pack-batch documents), there is no such list. Then blocks compile as the shapes
# come, the second time for shapes in general.


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


if __name__ == "__main__":
    exit_cleanly(main)
