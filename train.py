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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

# Before torch loads OpenMP, whose threads wait spinning for milliseconds. Beside another torch
# program on two cores the slowest of 20 nano steps took 10.6 s like that, and 2.2 s like this.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import config
import report
import sample
from data import Data, open_data
from evaluate import Evaluation
from kernels.triton_here import why_not
from model import Predicted, RunBlock, Transformer, run_plain, run_recomputed
from plan import Plan, Step, read_ahead
from support.base.clock import StepContext, due
from support.base.rng import generator, seed_of
from support.base.runtime import Runtime, exit_cleanly, made_by, on_device, start
from support.base.sharded import (
    assign,
    check_agreement,
    join,
    refuse_step,
    shard,
    sync_gradients,
)
from support.base.technique import Edit, is_on, techniques_of, techniques_on
from support.evaluation.scoring import HeldOut
from support.rows.batch import Batch, shares_of
from support.run import progress
from support.run.folder import commit
from support.run.run import Run
from support.step.flops import Work, work_of
from support.step.memory import memory_of, micro_batch
from support.step.optim import Optimizers, learning_rate
from support.step.placement import Placement
from support.step.sizes import empty_model
from support.weights.initial import initial_model, model_size

SAMPLE_TOKENS = 100  # written at the end of a run
MOST_CODES = 256  # that torch.compile makes of a block: for each new shape, until any will do


def main(argv: list[str] | None = None) -> int:
    settings, started = config.parse_or_resume(sys.argv[1:] if argv is None else argv)
    runtime = start(settings.run.device, settings.run.dtype)
    runtime.check_same({"commit": commit()} | made_by(runtime) | config.shared_by_ranks(settings))
    if settings.run.fsdp:
        join(runtime)
    micro_batch(settings, runtime)  # refused before anything is read
    settings, data = open_data(settings, runtime)
    runtime.check_same({"the text of --data": data.store.meta["sha256"]})
    size = started.size if started else model_size(settings, data.encoding)
    with Run(settings, runtime, started, size, data.store) as run:
        return go(run, data)


def go(run: Run, data: Data) -> int:
    """Begin a run or go on with it, to its end or until a signal; the exit status."""
    settings, runtime = run.settings, run.runtime
    plan = Plan(settings, data.store, data.special_ids, runtime)
    evaluation = held_out(settings, data, settings.run.eval_tokens)
    shape = config.transformer_config(settings, *run.size)
    saved = run.restore(shape) if run.started else None
    if runtime.on_rank0(run.is_complete):
        runtime.say(f"{run.folder} is finished: its {settings.optim.tokens:,} tokens are consumed")
        return 0
    # of the whole model: --pseudo may begin with less of it, and must not be refused in mid-run
    placement = placement_of(settings, empty_model(shape), runtime)
    rows_at_once = micro_batch(settings, runtime, shape, placement)
    memory = memory_of(settings, runtime, rows_at_once.count, shape, placement)
    assembled = partial(assemble, runtime=runtime, rows_at_once=rows_at_once.count)
    announce = partial(progress.announce, run, plan, shape, batches=rows_at_once, memory=memory)
    if settings.run.dry_run:
        announce(placement)
        return 0
    model = empty_model(shape) if saved else initial_model(shape, settings, runtime.say)
    try:
        run.use(assembled(settings, model=model, state=saved))
    except ValueError as error:
        if saved is None:
            raise
        raise ValueError(f"{run.resumed_from}: {error}") from None
    del saved  # so that its memory is free
    run.make_folder()
    run.open_log()
    announce(run.trainer.placement)  # with --pseudo of less than the whole model
    progress.say_assembled(run)
    bar, stop = progress.progress_bar(run), StopSignal()
    try:
        is_whole = train(run, plan, evaluation, bar, stop)
        if is_whole:
            finish(run, data, bar)
    finally:
        bar.close()
        stop.close()
    if is_whole:
        return 0
    resume = f"python train.py --resume --out {run.folder}"
    runtime.say(f"stopped at step {run.clock.step}; go on with: {resume}")
    return 128 + (stop.number or signal.SIGTERM)


# from schedulers, Ctrl-C, a terminal that closes, and Slurm before the time is over
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopSignal:
    """Remembers a signal until the step is over; a run under nohup goes on at SIGHUP."""

    def __init__(self) -> None:
        self.number = 0
        heard = [number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, self.note) for number in heard}

    def note(self, number: int, _frame: object) -> None:
        self.number = number

    def close(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def train(run: Run, plan: Plan, evaluation: Evaluation, bar: tqdm, stop: StopSignal) -> bool:
    """Step after step until the budget is consumed; evaluations and checkpoints as they are due.

    Returns: False if some rank was asked to stop before that; a checkpoint is saved
    """
    if run.evaluation_due:  # the run was stopped before it
        evaluate_and_save(run, evaluation, bar, checkpoint_due=False)
    for step, waited_ms in read_ahead(plan, run.clock, run.runtime.device):
        if run.is_finished:
            break
        began = time.perf_counter()
        progress.change_trainer(run, next_trainer(run.trainer, step), bar)
        done = run.trainer.step(step)
        ms = (time.perf_counter() - began) * 1e3 + waited_ms
        flops = run.advance(step)
        progress.log_step(run, step, done, bar, ms=ms, waited_ms=waited_ms, model_flops=flops.model)
        if run.runtime.on_any_rank(stop.number > 0):
            run.save()
            return False
        every = run.settings.run.checkpoint_every
        checkpoint_due = run.is_finished or due(every, step.before, step.after)
        evaluate_and_save(run, evaluation, bar, checkpoint_due)
    return True


def evaluate_and_save(run: Run, evaluation: Evaluation, bar: tqdm, checkpoint_due: bool) -> None:
    """Evaluate and save when due; the best model so far is always saved."""
    is_best = False
    if run.evaluation_due:
        found = evaluate(run, evaluation, bar)
        is_best = run.evaluated(found.val_bpb)
    if checkpoint_due or is_best:
        run.save(is_best)


def evaluate(run: Run, evaluation: Evaluation, bar: tqdm, last: bool = False) -> HeldOut:
    """Evaluate the model and write a line of the log."""
    began, trainer = time.perf_counter(), run.trainer
    found = evaluation.run(trainer.model, run.runtime, trainer.rows_at_once)
    progress.log_evaluation(run, found.logged(), time.perf_counter() - began, last)
    if not last:
        progress.write(bar, f"step {run.clock.step}: held-out {found}, on {evaluation.text}")
    return found


def held_out(settings: config.Config, data: Data, tokens: int | None) -> Evaluation:
    return Evaluation(data, settings.data.seq_len, nsp=settings.model.nsp, tokens=tokens)


def finish(run: Run, data: Data, bar: tqdm) -> None:
    """The last evaluation, what the techniques saved, a sample, and the report of all of it."""
    s, runtime = run.settings, run.runtime
    evaluation = held_out(s, data, s.run.final_eval_tokens)
    found = evaluate(run, evaluation, bar, last=True)
    bar.close()
    progress.conclude(run, str(found), evaluation.text)
    if s.model.model == "gpt" and (runtime.is_rank0 or s.run.fsdp):  # which needs all ranks
        random = generator(torch.device("cpu"), s.run.seed, "sample")
        # a row that grows would compile each time
        with runtime.autocast(), torch.compiler.set_stance("force_eager"):
            pieces = sample.write(
                run.trainer.model, data.encoding, "", SAMPLE_TOKENS, generator=random
            )
            text = "".join(pieces)
        run.log.write("sample", step=run.clock.step, text=text)
        runtime.say(f"a sample:\n{textwrap.indent(text, '    ')}")
    page = runtime.on_rank0(lambda: str(report.write(run.folder)))
    run.log.write("finished", step=run.clock.step)
    runtime.say(f"checkpoint: {run.saved_path}\nlog: {run.folder / 'log.jsonl'}\nreport: {page}")


# ---- assembly


def next_trainer(trainer: "Trainer", step: Step) -> "Trainer":
    """The trainer of this step: a new one if a technique's stage has just ended."""
    ended = [edit for edit in trainer.edits.values() if edit.has_ended(step.context)]
    if not ended:
        return trainer
    state = trainer.state()
    for edit in ended:
        state = edit.handed_over(state, step.context)
    new = assemble(
        trainer.settings,
        model=empty_model(trainer.model.config),
        runtime=trainer.runtime,
        rows_at_once=trainer.rows_at_once,
        state=state,
    )
    check_agreement(new.runtime, new.optimizers.named)
    return new


def assemble(
    settings: config.Config,
    *,
    model: Transformer,
    runtime: Runtime,
    rows_at_once: int,
    state: dict | None = None,
) -> "Trainer":
    """Put a model together with all that acts on it. The order matters, line by line.

    Called again, on an empty model, where a run goes on and where a technique's stage ends.

    Args: rows_at_once full rows of a micro-batch
          state        of `Trainer.state`: what the model and the optimizers go on from
    """
    s = settings
    # which parameters there are comes before all that holds on to them
    edits = {
        name: technique.edit(s, model, runtime, state.get(name) if state else None)
        for name, technique in techniques_of(s).items()
        if technique.edit and is_on(s, name)
    }
    # compile before wrapping: with a wrapper's hooks inside, every new length would compile again
    compiled = is_compiled(s, runtime)
    if compiled:
        # blocks share their code, and a shape too many would run uncompiled without a word
        torch._dynamo.config.recompile_limit = MOST_CODES
        for block in set(model.h):
            block.compile()
    # shards before values: they are other parameters, and those of a state are shards already
    if s.run.fsdp:
        shard(model, runtime)
    if state:
        assign(model, state["model"])
    # to the device once the values are there, or as much of it as has room
    moved = [edit.move(model, runtime.device) for edit in edits.values()]
    if not s.run.fsdp and not any(moved):
        model.to(runtime.device)
    wrapped: nn.Module = model
    # DDP before the optimizers: it hooks into gradients and may regroup them
    if runtime.world_size > 1 and not s.run.fsdp:
        unused = any(technique.skips_layers for technique in techniques_on(s))
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, find_unused_parameters=unused
        )
    # the optimizers last, on the parameters that then exist
    named = dict(model.named_parameters())
    for edit in edits.values():
        named = edit.parameters(named)
    optimizers = Optimizers(
        named,
        kind=s.optim.optimizer,
        weight_decay=s.optim.weight_decay,
        betas=(s.optim.beta1, s.optim.beta2),
        device=runtime.device,
    )
    if state:
        optimizers.load_state_dict(state["optimizers"])
    own = [edit.blocks for edit in edits.values() if edit.blocks is not None]
    blocks = min(own, default=model.config.layers)
    streamed = [layer for edit in edits.values() for layer in edit.streamed]
    return Trainer(
        settings=s,
        runtime=runtime,
        model=model,
        wrapped=wrapped,
        optimizers=optimizers,
        edits=edits,
        rows_at_once=rows_at_once,
        compiled=compiled,
        work=work_of(s, runtime, model.config, rows_at_once, blocks, streamed),
    )


def is_compiled(settings: config.Config, runtime: Runtime) -> bool:
    """Whether blocks are compiled: by default on a GPU, for which torch writes code in Triton."""
    asked, kind = settings.run.compile, runtime.device.type
    return asked == "on" or (asked == "auto" and kind == "cuda" and why_not(kind) is None)


def placement_of(settings: config.Config, model: nn.Module, runtime: Runtime) -> Placement | None:
    """What a technique keeps in host memory, if one does."""
    found = [t.placement(settings, model, runtime) for t in techniques_on(settings) if t.placement]
    return found[0] if found else None


@dataclass
class Trainer:
    """An assembled model, and one optimizer step."""

    settings: config.Config
    runtime: Runtime
    model: Transformer
    wrapped: nn.Module  # the model, under DDP where that is on
    optimizers: Optimizers
    edits: dict[str, Edit]  # by technique
    rows_at_once: int  # of full length
    compiled: bool
    work: Work

    @property
    def placement(self) -> Placement | None:
        """What a technique keeps in host memory, if one does."""
        found = [edit.placement for edit in self.edits.values() if edit.placement]
        return found[0] if found else None

    def step(self, step: Step) -> progress.Done:
        """Forward and backward over this rank's rows, part by part; clip; move the weights."""
        return self.update(step, self.gradients(step))

    def rows_together(self, step: Step) -> int:
        """Rows of a micro-batch; there are more of them if they are shorter."""
        return self.rows_at_once * (self.settings.data.seq_len // step.batch.tokens.shape[1])

    def gradients(self, step: Step) -> torch.Tensor:
        """Forward and backward over this rank's rows, part by part; the sum of their losses.

        It is divided by the targets of all ranks, not by counts of micro-batches, so that neither
        ranks nor accumulation weigh in.
        """
        s, runtime = self.settings, self.runtime
        rows = len(step.batch.tokens)
        at_once = self.rows_together(step)
        total = torch.zeros((), device=runtime.device)
        for first in range(0, rows, at_once):
            stop = min(first + at_once, rows)
            last = stop == rows
            part = step.part(slice(first, stop))
            if s.model.dropout:
                seed = seed_of(s.run.seed, "dropout", step.context.step, runtime.rank, first)
                torch.manual_seed(seed)
            sync_gradients(self.wrapped, last)  # over ranks once, with the last part
            batch = part.batch.to(runtime.device)
            predicted = part.predicted and Predicted(
                *(at if at is None else on_device(at, runtime.device) for at in part.predicted)
            )
            shares = shares_of(batch, s.optim.loss_per == "document", step.of_answer)
            first_row = runtime.rank * rows + first
            run_block = run_block_of(s, self.edits, step.context, first_row, batch)
            with runtime.autocast():
                loss = self.wrapped(batch, run_block=run_block, shares=shares, predicted=predicted)
            scale = runtime.world_size / max(step.targets, 1)  # the mean over ranks made a sum
            with ExitStack() as around:
                for edit in self.edits.values():
                    around.enter_context(edit.around_backward(last))
                (loss * scale).backward()
            total += loss.detach()
        return total

    def update(self, step: Step, total: torch.Tensor) -> progress.Done:
        """Move the weights by the gradients that are there; `total` is the loss of these."""
        s, runtime = self.settings, self.runtime
        for edit in self.edits.values():
            edit.after_backward(self.optimizers.named)
        norm = self.optimizers.clip_gradients(s.optim.grad_clip)
        # read together: a GPU is waited for once a step
        mean, norm = torch.stack((runtime.reduce(total), norm.to(runtime.device))).tolist()
        mean /= max(step.targets, 1)
        if not math.isfinite(mean):
            refuse_step(runtime, step.context.step, "loss", total.item())
        if not math.isfinite(norm):
            refuse_step(runtime, step.context.step, "gradient", norm)
        lr = learning_rate(s, step.before, step.after)
        update = partial(self.optimizers.step, lr)
        for edit in self.edits.values():
            update = partial(edit.around_step, update)
        update()
        return progress.Done(loss=mean, grad_norm=norm, lr=lr)

    def state(self) -> dict:
        """All that `assemble` needs to go on from here."""
        weights = self.model.state_dict()
        for edit in self.edits.values():
            weights = edit.weights(weights)
        kept = {name: edit.state_dict() for name, edit in self.edits.items()}
        return {
            "model": weights,
            "optimizers": self.optimizers.state_dict(),
            **{name: state for name, state in kept.items() if state},
        }


def run_block_of(
    settings: config.Config,
    edits: dict[str, Edit],
    context: StepContext,
    first_row: int,
    batch: Batch,
) -> RunBlock:
    """How the micro-batch that begins at this row of all ranks' rows runs each block.

    Each technique wraps those before it, in the order of `Config`.
    """
    recomputes = settings.run.checkpoint_activations
    run_block = run_recomputed if recomputes else run_plain
    for edit in edits.values():
        run_block = edit.run_block(run_block, recomputes)
    for technique in techniques_on(settings):
        if technique.run_block:
            run_block = technique.run_block(settings, context, first_row, batch, run_block)
    return run_block


if __name__ == "__main__":
    exit_cleanly(main)
