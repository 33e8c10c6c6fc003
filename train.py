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
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

# Before torch loads OpenMP, whose threads wait spinning for milliseconds. Beside another torch
# program on two cores the slowest of 20 nano steps took 10.6 s like that, and 2.2 s like this.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import config
import ltd
import pseudo
import report
import sample
from data import Data, open_data, shares_of
from evaluate import Evaluation
from kernels.triton_here import why_not
from model import BlockRunner, Transformer, run_plain, run_recomputed
from offload import Offload, placement_for
from plan import Plan, Step, read_ahead
from support.clock import due, generator, seed_of
from support.evaluation.scoring import HeldOut
from support.run import progress
from support.run.folder import commit
from support.run.run import Run
from support.runtime import (
    Runtime,
    assign,
    check_agreement,
    exit_cleanly,
    join,
    made_by,
    refuse_step,
    shard,
    start,
    sync_gradients,
)
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
    data = open_data(settings.data, settings.model.model == "bert", runtime)
    tokenizer = data.encoding.name
    settings = replace(settings, data=replace(settings.data, tokenizer=tokenizer))
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
    placement = placement_of(settings, empty_model(shape), runtime) if settings.offload.on else None
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
    announce(
        run.trainer.offloaded and run.trainer.offloaded.placement
    )  # with --pseudo of less than the whole model
    if is_compiled(settings, runtime):
        runtime.say("compile: blocks are compiled as their shapes come, which takes seconds")
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
        done = run.trainer.train_step(step)
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
    """The trainer of this step: a new one where a stage of --pseudo has just ended."""
    s, runtime = trainer.settings, trainer.runtime
    if not s.pseudo.on:
        return trainer
    owners = pseudo.owners_at(s.pseudo, s.model.layers, step.context.progress)
    if owners == trainer.owners:
        return trainer
    state = pseudo.handed_over(trainer.state(), owners, s.pseudo.state, s.pseudo.new)
    model = empty_model(trainer.model.config)
    new = assemble(s, model=model, runtime=runtime, rows_at_once=trainer.rows_at_once, state=state)
    check_agreement(runtime, new.optimizers.named)
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

    Called again, on an empty model, where a run goes on and where a stage of --pseudo ends.

    Args: rows_at_once full rows of a micro-batch
          state        of `Trainer.state`: what the model and the optimizers go on from
    """
    s = settings
    # 1. Which parameters there are comes before all that holds on to them.
    owners = None
    if s.pseudo.on:
        owners = pseudo.owners_at(s.pseudo, s.model.layers, 0.0)
        owners = tuple(state["pseudo"]["owners"]) if state else owners
        pseudo.share(model, owners)
    # 2. Compile before wrapping: with a wrapper's hooks inside, every new length compiles again.
    if is_compiled(s, runtime):
        # blocks share their code, and a shape too many would run uncompiled without a word
        torch._dynamo.config.recompile_limit = MOST_CODES
        for block in set(model.h):
            block.compile()
    # 3. Shard before loading: FSDP replaces the parameters, and a state's are sharded already.
    if s.run.fsdp:
        shard(model, runtime)
    if state:
        assign(model, state["model"])
    # 4. To the device once the values are there, or as much of it as has room.
    offloaded = None
    if s.offload.on:
        offloaded = Offload(placement_of(s, model, runtime), early=runtime.world_size == 1)
        offloaded.move(model, runtime.device)
    elif not s.run.fsdp:
        model.to(runtime.device)
    # 5. DDP before the optimizers: it hooks into gradients and may regroup them.
    wrapped: nn.Module = model
    if runtime.world_size > 1 and not s.run.fsdp:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # 6. The optimizers last, on the parameters that then exist.
    named = dict(model.named_parameters())
    optimizers = Optimizers(
        offloaded.parameters(named) if offloaded else named,
        kind=s.optim.optimizer,
        weight_decay=s.optim.weight_decay,
        betas=(s.optim.beta1, s.optim.beta2),
        device=runtime.device,
    )
    if state:
        optimizers.load_state_dict(state["optimizers"])
    blocks = pseudo.own_blocks(owners) if owners else s.model.layers
    return Trainer(
        settings=s,
        runtime=runtime,
        model=model,
        wrapped=wrapped,
        optimizers=optimizers,
        rows_at_once=rows_at_once,
        owners=owners,
        offloaded=offloaded,
        work=work_of(
            s,
            runtime,
            model.config,
            rows_at_once,
            blocks,
            offloaded.streamed if offloaded else (),
        ),
    )


def is_compiled(settings: config.Config, runtime: Runtime) -> bool:
    """Whether blocks are compiled: by default on a GPU, for which torch writes code in Triton."""
    asked, kind = settings.run.compile, runtime.device.type
    return asked == "on" or (asked == "auto" and kind == "cuda" and why_not(kind) is None)


def placement_of(settings: config.Config, model: nn.Module, runtime: Runtime) -> Placement:
    """What --offload keeps in host memory."""
    return placement_for(settings.offload, settings.optim.optimizer == "muon", model, runtime)


@dataclass
class Trainer:
    """An assembled model, and one optimizer step."""

    settings: config.Config
    runtime: Runtime
    model: Transformer
    wrapped: nn.Module  # the model, under DDP where that is on
    optimizers: Optimizers
    rows_at_once: int  # of full length
    owners: pseudo.Owners | None  # --pseudo: the layer whose weights each layer uses
    offloaded: Offload | None
    work: Work

    def train_step(self, step: Step) -> progress.Done:
        """Forward and backward over this rank's rows, micro-batch by micro-batch; clip; step."""
        s, runtime = self.settings, self.runtime
        loss = self.backward(step)
        if s.pseudo.on:
            pseudo.average(self.optimizers.named, self.owners)
        norm = self.optimizers.clip_gradients(s.optim.grad_clip)
        # read together: a GPU is waited for once a step
        mean, norm = torch.stack((runtime.reduce(loss), norm.to(runtime.device))).tolist()
        mean /= max(step.targets, 1)
        if not math.isfinite(mean):
            refuse_step(runtime, step.context.step, "loss", loss.item())
        if not math.isfinite(norm):
            refuse_step(runtime, step.context.step, "gradient", norm)
        lr = learning_rate(s, step.before, step.after)
        if self.offloaded:
            self.offloaded.update(partial(self.optimizers.step, lr))
        else:
            self.optimizers.step(lr)
        return progress.Done(loss=mean, grad_norm=norm, lr=lr)

    def backward(self, step: Step) -> torch.Tensor:
        """Add up the gradients of this rank's rows; the sum of their losses.

        Both are divided by the targets of all ranks, not by counts of micro-batches, so that
        neither ranks nor accumulation weigh in.
        """
        s, runtime = self.settings, self.runtime
        B, T = step.batch.tokens.shape
        micro_batch = self.rows_at_once * (s.data.seq_len // T)  # rows: more if they are shorter
        total = torch.zeros((), device=runtime.device)
        for first in range(0, B, micro_batch):
            part = step.part(slice(first, min(first + micro_batch, B)))
            is_last = first + micro_batch >= B
            if s.model.dropout:
                seed = seed_of(s.run.seed, "dropout", step.context.step, runtime.rank, first)
                torch.manual_seed(seed)
            sync_gradients(self.wrapped, is_last)  # over ranks once, with the last part
            part = part.to(runtime.device)
            with runtime.autocast():
                loss = self.wrapped(
                    part.batch,
                    run_block=block_runner(s, part, self.offloaded),
                    shares=shares_of(part.batch, s.optim.loss_per == "document", part.of_answer),
                    predicted=part.predicted,
                )
            scale = runtime.world_size / max(step.targets, 1)  # the mean over ranks made a sum
            with self.offloaded.around_backward(is_last) if self.offloaded else nullcontext():
                (loss * scale).backward()
            total += loss.detach()
        return total

    def state(self) -> dict:
        """All that `assemble` needs to go on from here."""
        weights = self.model.state_dict()
        state = {
            "model": self.offloaded.weights(weights) if self.offloaded else weights,
            "optimizers": self.optimizers.state_dict(),
        }
        return state | ({"pseudo": {"owners": self.owners}} if self.owners else {})


def block_runner(settings: config.Config, part: Step, offloaded: Offload | None) -> BlockRunner:
    """How the blocks of a micro-batch run. Each technique wraps those before it."""
    recomputes = settings.run.checkpoint_activations
    run_block = run_recomputed if recomputes else run_plain
    if offloaded:
        run_block = offloaded.run_block(run_block, recomputes)
    if settings.ltd.on:
        run_block = ltd.wrap_block(run_block, settings.ltd, part.context, part.rows, part.batch)
    if settings.pseudo.on:
        run_block = pseudo.wrap_block(run_block)
    return run_block


if __name__ == "__main__":
    exit_cleanly(main)
