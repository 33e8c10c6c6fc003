"""Pretrain a GPT or a BERT: parse, runtime, data, plan, resume, model, assembly, loop, finish.

    torchrun train.py --curriculum seqlen --ltd --pack            # three techniques at once
    torchrun --nproc-per-node 8 train.py --size 124M --data DIR   # a larger model on eight GPUs
    python train.py --resume                                      # continue the newest run

Everything a step does follows from the settings and the `Clock` before it: which samples it reads,
how long they are, which tokens are dropped, how far the weights move. So a killed run continues as
if nothing had happened, and more processes or micro-batches change its speed, not its curve (except
with --dropout, whose masks are drawn for each micro-batch). One step, in the order of the calls:

    read_ahead           plan.py: draw samples, pack them into rows, read this rank's rows as a
                         Batch; it plans the next step while this one computes
    enter_stage          --pseudo: rebuild the model where a stage has ended
    Trainer.train_step   calls `backward`; with --pseudo averages the gradients of shared weights;
                         clips them; updates the weights, on the host where --offload keeps them
      Trainer.backward   forward and backward, one micro-batch at a time; `block_runner` runs each
                         block on the tokens that --ltd keeps; --offload brings a block's weights
                         before it runs and takes its gradients away
    train                advance the clock, write a line of the log, evaluate and save if due
"""

import math
import os
import shutil
import signal
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

# Must be set before torch loads OpenMP. By default idle threads spin for milliseconds: next to
# another torch program on two cores, the slowest of 20 small steps took 10.6 s, with this 2.2 s.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import config
import ltd
import offload
import pseudo
import report
import sample
from announce import announce, spent
from config import Config
from data import Data, open_data
from evaluate import Evaluation
from kernels.triton_here import why_not
from model import Batch, BlockRunner, Transformer, TransformerConfig, run_plain, run_recomputed
from plan import Plan, Step, read_ahead
from support import runtime as ranks
from support.checkpoint import load_weights
from support.clock import StepContext, due, generator, seed_of
from support.fsdp import shard, sync_gradients
from support.optim import Optimizers, learning_rate
from support.process import StopSignal, exit_cleanly, one_line
from support.run import Log, Run, commit
from support.runtime import Runtime
from support.sizes import empty_model, micro_batch_rows, parameter_count, peak_flops
from support.weights import initial_model, model_size

SAMPLE_TOKENS = 100  # generated at the end of a run
MOST_SHAPES = 256  # versions of a block that torch.compile may make, one for each new shape


def main(argv: list[str] | None = None) -> int:
    settings, started = config.parse_or_resume(sys.argv[1:] if argv is None else argv)
    runtime = ranks.start(settings.run.device, settings.run.dtype)
    about = ranks.made_by(runtime) | config.shared_by_ranks(settings)
    runtime.check_same({"commit": commit()} | about)
    by_document = settings.pack.batch == "documents"
    micro_batch = micro_batch_rows(settings.optim, settings.data.seq_len, runtime, by_document)
    data = open_data(settings.data, runtime)
    with_tokenizer = replace(settings.data, tokenizer=data.encoding.name)
    settings = replace(settings, data=with_tokenizer)
    runtime.check_same({"the text of --data": data.store.meta["sha256"]})
    size = started.size if started else model_size(settings, data.encoding)
    with Run(settings, runtime, size, data.store.meta, started) as run:
        try:
            with ranks.reporting_lost_ranks(lambda: run.clock.step):
                return run_training(run, data, micro_batch)
        except RuntimeError as error:  # on a CPU torch has no OutOfMemoryError
            known = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
            if not known:
                raise
            remedy = "choose less, or add --checkpoint-activations or --offload"
            too_much = f"the model, or --micro-batch-size {micro_batch}, is too much: {remedy}"
            raise ValueError(f"{too_much} ({one_line(error)})") from None


def run_training(run: Run, data: Data, micro_batch: int) -> int:
    """Start or continue a run, until it ends or a signal stops it.

    Args:    micro_batch rows of a micro-batch, at full length
    Returns: the exit status
    """
    settings, runtime = run.settings, run.runtime
    compiled = is_compiled(settings, runtime)
    shape = config.transformer_config(settings, *run.size)
    plan = Plan(settings, data.store, config.task_of(settings, data.encoding), runtime, shape)
    state = run.restore() if run.started else None
    if run.started and runtime.on_rank0(run.has_ended):
        runtime.say(f"{run.folder} is finished: its {settings.optim.tokens:,} tokens are consumed")
        return 0
    models = models_to_come(run, shape)
    if settings.offload.on:
        muon = settings.optim.optimizer == "muon"
        offload.preview(settings.offload, models, runtime, muon)
    announce(plan, run, models, micro_batch)
    if compiled:
        runtime.say("compile: blocks are compiled as their shapes come, which takes seconds")
    if settings.run.dry_run:
        return 0
    trainer = first_trainer(run, shape, micro_batch, state)
    del state  # free its memory
    meta = data.store.meta
    about = {"parameters": parameter_count(shape), "train_tokens": meta["train_tokens"]}
    about["held_out_bytes"] = meta["bytes"] - meta["train_bytes"]
    about |= {"ranks": runtime.world_size, "peak_flops": peak_flops(runtime)}
    run.open_folder(bytes=trainer.optimizers.memory(), **about)
    runtime.say(f"run: {run.folder}")
    stopped_by = train(run, data, plan, trainer)
    if stopped_by == 0:
        return 0
    runtime.say(f"stopped at step {run.clock.step}; continue with --resume --out {run.folder}")
    return 128 + stopped_by


def models_to_come(run: Run, shape: TransformerConfig) -> list[Transformer]:
    """The model, and with --pseudo that of every stage from now on, without their weights."""
    settings, models = run.settings, [empty_model(shape)]
    if settings.pseudo.on:
        progress = run.clock.consumed_tokens / settings.optim.schedule_tokens
        stages = pseudo.owners_to_come(settings.pseudo, settings.model.layers, progress)
        models = [pseudo.share_weights(empty_model(shape), owners) for owners in stages]
    return models


def first_trainer(
    run: Run, shape: TransformerConfig, micro_batch: int, state: dict | None
) -> "Trainer":
    """Make the trainer that a run starts with, from a checkpoint's state if it resumes."""
    settings, runtime, kept = run.settings, run.runtime, None
    if settings.pseudo.on:
        # Blocks that share another's weights need none of their own.
        kept = {*pseudo.owners_at(settings.pseudo, settings.model.layers, 0.0)}
    model = empty_model(shape) if state else initial_model(shape, settings, runtime.say, kept)
    if settings.model.init and not state:  # each machine reads its own file: they must be the same
        bits = sum(ranks.sum_of_bits(tensor).item() for tensor in model.state_dict().values())
        runtime.check_same({"the weights of --init": bits})
    try:
        return assemble(settings, model, runtime, micro_batch=micro_batch, state=state)
    except ValueError as error:
        if state is None:
            raise
        raise ValueError(f"{run.resumed_from}: {error}") from None


def train(run: Run, data: Data, plan: Plan, trainer: "Trainer") -> int:
    """Train until the budget is consumed; evaluate and save a checkpoint whenever due.

    Returns: 0, or the number of the signal that stopped the run, after saving a checkpoint
    """
    settings, runtime = run.settings, run.runtime
    on_the_way, peak = held_out(settings, data, settings.run.eval_tokens), peak_flops(runtime)
    has_noted = False
    with StopSignal() as stop, run.progress_bar() as bar:
        if evaluate_if_due(run, data, trainer, on_the_way):
            run.save(trainer.state(), trainer.optimizers.named)
        averaged, total = 0, {}
        for step, waited_ms in read_ahead(plan, run.clock):
            began = time.perf_counter()
            if settings.pseudo.on:
                enter_stage(trainer, step, run.log)
            done = trainer.train_step(step)
            run.advance(step.after)
            if step.context.progress >= 1 - settings.optim.average > 0 and settings.optim.average:
                averaged += 1
                for name, value in trainer.model.state_dict().items():
                    total[name] = total.get(name, 0) + value.double()
            ms = (time.perf_counter() - began) * 1e3 + waited_ms
            note = step.window.limits.note
            if note and not has_noted:
                runtime.say(f"--curriculum: {note}; see difficulty in log.jsonl")
                has_noted = True
            rate = (step.after.flops - step.before.flops) / ms * 1e3
            columns = done._asdict() | plan.columns(step) | {"mfu": peak and round(rate / peak, 4)}
            run.log_step(step.before, columns, bar, ms=ms, waited_ms=waited_ms)
            if runtime.on_any_rank(stop.number > 0):
                run.save(trainer.state(), trainer.optimizers.named)
                return stop.number or signal.SIGTERM
            if run.budget_is_consumed and averaged:
                trainer.model.load_state_dict({n: v / averaged for n, v in total.items()})
            if run.budget_is_consumed:  # the last evaluation may take minutes
                run.save(trainer.state(), trainer.optimizers.named)
            is_best = evaluate_if_due(run, data, trainer, on_the_way)
            is_due = due(settings.run.checkpoint_every, step.before, step.after)
            if is_best or (is_due and not run.budget_is_consumed):
                run.save(trainer.state(), trainer.optimizers.named)
        if runtime.on_any_rank(stop.number > 0):  # it came after the last step
            return stop.number or signal.SIGTERM
    finish(run, data, plan, trainer)
    return 0


def evaluate_if_due(run: Run, data: Data, trainer: "Trainer", on_the_way: Evaluation) -> bool:
    """Evaluate the model if the clock says so, after the last step on more text than before.

    Returns: whether it is the best so far
    """
    if not run.evaluation_due:
        return False
    began, runtime, is_last = time.perf_counter(), run.runtime, run.budget_is_consumed
    evaluation = on_the_way
    if is_last:
        evaluation = held_out(run.settings, data, run.settings.run.final_eval_tokens)
    found = evaluation.run(trainer.model, runtime, trainer.micro_batch)
    run.log_evaluation(found.columns(), is_last, ms=(time.perf_counter() - began) * 1e3)
    if is_last:
        runtime.say(f"held-out: {found}, on {evaluation.description}, full length, nothing dropped")
    else:
        runtime.say(f"step {run.clock.step}: held-out {found}, on {evaluation.description}")
    return run.record_evaluation(found.val_bpb)


def held_out(settings: Config, data: Data, tokens: int | None) -> Evaluation:
    task = config.task_of(settings, data.encoding)
    return Evaluation(data, task, settings.data.seq_len, tokens)


def finish(run: Run, data: Data, plan: Plan, trainer: "Trainer") -> None:
    """Say what the run took, generate a sample, write the report."""
    settings, runtime, model = run.settings, run.runtime, trainer.model
    runtime.say(spent(plan, run))
    # With --fsdp every rank takes part, because the weights are gathered from all of them.
    if settings.model.model == "gpt" and (runtime.is_rank0 or settings.run.fsdp):
        random = generator(torch.device("cpu"), settings.run.seed, "sample")
        compiled = is_compiled(settings, runtime)
        # The row grows token by token, and every new length would compile again.
        eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with runtime.autocast(), eager:
            pieces = sample.continue_text(model, data.encoding, "", SAMPLE_TOKENS, generator=random)
            text = "".join(pieces)
        run.log.write("sample", step=run.clock.step, text=text)
        runtime.say(f"a sample:\n{textwrap.indent(text, '    ')}")
    page = runtime.on_rank0(lambda: str(report.write_page(run.folder)))
    run.log.write("finished", step=run.clock.step)
    runtime.say(f"checkpoint: {run.saved_path}\nlog: {run.folder / 'log.jsonl'}\nreport: {page}")


class Done(NamedTuple):
    """The result of a step; each field is a column of the log."""

    loss: float  # mean, in nats
    grad_norm: float
    lr: float


# ---- assembly


def enter_stage(trainer: "Trainer", step: Step, log: Log) -> None:
    """Rebuild the model if a stage of --pseudo has just ended; the trainer is changed in place."""
    settings, runtime, clock = trainer.settings, trainer.runtime, step.before
    owners = pseudo.owners_at(settings.pseudo, settings.model.layers, step.context.progress)
    if owners == trainer.owners:
        return
    state = pseudo.hand_over(trainer.state(), owners, settings.pseudo.state)
    model, micro_batch = empty_model(trainer.model.config), trainer.micro_batch
    new = assemble(settings, model, runtime, micro_batch=micro_batch, state=state)
    ranks.check_agreement(runtime, new.optimizers.named)
    before, now = trainer.optimizers.memory(), new.optimizers.memory()
    about = {"owners": [*owners], "bytes_before": before, "bytes": now}
    log.write("stage", step=clock.step, consumed_tokens=clock.consumed_tokens, **about)
    layers = pseudo.owners_in_words(owners)
    runtime.say(
        f"--pseudo: after step {clock.step} layers use the weights of {layers}; weights, gradients"
        f" and state {sum(now.values()) / 1e6:,.1f} MB, were {sum(before.values()) / 1e6:,.1f}"
    )
    vars(trainer).update(vars(new))  # in place, so that nobody else holds the old model


def assemble(
    settings: Config,
    model: Transformer,
    runtime: Runtime,
    *,
    micro_batch: int,
    state: dict | None = None,
) -> "Trainer":
    """Combine a model with everything that acts on it. Each numbered step says why it comes there.

    Called again, on an empty model, when a run resumes and when a stage of --pseudo ends.

    Args: micro_batch rows of a micro-batch, at full length
          state       from `Trainer.state`: the weights and optimizer state to continue from
    """
    # 1. Share weights first: this decides which parameters exist, and all below refers to them.
    owners = None
    if settings.pseudo.on:
        owners = pseudo.owners_at(settings.pseudo, settings.model.layers, 0.0)
        owners = tuple(state["pseudo"]["owners"]) if state else owners
        pseudo.share_weights(model, owners)
    # 2. Compile before wrapping: a wrapper's hooks inside a block would recompile at every length.
    if is_compiled(settings, runtime):
        # Blocks share their compiled code. Beyond this limit, new shapes silently run uncompiled.
        torch._dynamo.config.recompile_limit = MOST_SHAPES
        for block in set(model.h):
            block.compile()
    # 3. Shard before loading weights: FSDP replaces the parameters, and a checkpoint's are already
    #    sharded.
    if settings.run.fsdp:
        shard(model, runtime)
    if state:
        load_weights(model, state["model"])
    # 4. Move to the device after loading; with --offload only the part that has room there.
    offloaded = None
    if settings.offload.on:
        muon = settings.optim.optimizer == "muon"
        placement = offload.placement_for(settings.offload, model, runtime, muon)
        offloaded = offload.Offload(placement, model, runtime.device, early=runtime.world_size == 1)
    if not (offloaded or settings.run.fsdp):
        model.to(runtime.device)
    # 5. Wrap in DDP before making the optimizers: it regroups gradients into buckets of its own.
    loss_of: nn.Module = LossOf(model)
    if runtime.world_size > 1 and not settings.run.fsdp:
        loss_of = DistributedDataParallel(loss_of, gradient_as_bucket_view=True)
    # 6. Make the optimizers last, on the parameters that now exist.
    named = dict(model.named_parameters())
    optimizers = Optimizers(
        offloaded.parameters(named) if offloaded else named,
        kind=settings.optim.optimizer,
        weight_decay=settings.optim.weight_decay,
        beta2=settings.optim.beta2,
        device=runtime.device,
    )
    if state:
        optimizers.load_state_dict(state["optimizers"])
    return Trainer(settings, runtime, model, loss_of, optimizers, micro_batch, owners, offloaded)


def is_compiled(settings: Config, runtime: Runtime) -> bool:
    """Whether blocks are compiled: by default on a GPU where Triton works.

    Raises: ValueError naming --compile if this machine lacks the compiler that a CPU needs
    """
    asked, kind = settings.run.compile, runtime.device.type
    # $CXX or g++, as in torch/_inductor/config.py
    if asked == "on" and kind == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise ValueError("--compile on: torch needs a C++ compiler here: install g++, or set CXX")
    return asked == "on" or (asked == "auto" and kind == "cuda" and why_not(kind) is None)


class LossOf(nn.Module):
    """A model and its loss in one forward pass, which is what DDP has to wrap."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, run_block: BlockRunner) -> torch.Tensor:
        x = self.model(*batch.inputs, run_block=run_block)  # (B, T, C)
        return self.model.loss(x, batch)


@dataclass
class Trainer:
    """An assembled model, which can make optimizer steps."""

    settings: Config
    runtime: Runtime
    model: Transformer
    loss_of: nn.Module  # a LossOf, in DDP if there are several ranks
    optimizers: Optimizers
    micro_batch: int  # rows, at full length
    owners: tuple[int, ...] | None  # --pseudo: for each layer, the layer whose weights it uses
    offloaded: "offload.Offload | None"

    def train_step(self, step: Step) -> Done:
        """Forward and backward over this rank's rows, micro-batch by micro-batch; clip; step."""
        settings, runtime = self.settings, self.runtime
        loss = self.backward(step)
        if settings.pseudo.on:
            pseudo.average(self.optimizers.named, self.owners)
        norm = self.optimizers.clip_gradients(settings.optim.grad_clip)
        # Read both in one transfer, so that the host waits for a GPU only once a step.
        mean, norm = torch.stack((runtime.reduce(loss), norm.to(runtime.device))).tolist()
        mean /= max(step.divisor, 1)
        if not math.isfinite(mean):
            ranks.refuse_step(runtime, step.context.step, "loss", loss.item())
        if not math.isfinite(norm):
            ranks.refuse_step(runtime, step.context.step, "gradient", norm)
        lr = learning_rate(settings.optim, settings.model.layers, step.before, step.after)
        if self.offloaded:
            self.offloaded.step(self.optimizers, lr)
        else:
            self.optimizers.step(lr)
        return Done(loss=mean, grad_norm=norm, lr=lr)

    def backward(self, step: Step) -> torch.Tensor:
        """Accumulate the gradients of this rank's rows; returns the sum of their losses.

        Gradients are divided by the number of targets on all ranks, not by the number of
        micro-batches, so the curve depends neither on ranks nor on accumulation.
        """
        settings, runtime = self.settings, self.runtime
        B, T = step.batch.tokens.shape
        size = self.micro_batch * (settings.data.seq_len // T)  # rows of a micro-batch
        scale = runtime.world_size / max(step.divisor, 1)  # turns DDP's mean into a sum
        total = torch.zeros((), device=runtime.device)
        for first in range(0, B, size):
            part = slice(first, min(first + size, B))
            batch, is_last = step.batch.rows(part), part.stop == B
            if settings.model.dropout:
                seed = seed_of(settings.run.seed, "dropout", step.context.step, runtime.rank, first)
                torch.manual_seed(seed)
            # Gradients are averaged over ranks only once, in the last part.
            sync_gradients(self.model if settings.run.fsdp else self.loss_of, is_last)
            numbers = step.row_numbers[part]
            run_block = block_runner(settings, step.context, batch, numbers, self.offloaded)
            with runtime.autocast():
                loss = self.loss_of(batch, run_block)
            with self.offloaded.around_backward(is_last) if self.offloaded else nullcontext():
                (loss * scale).backward()
            total += loss.detach()
        return total

    def state(self) -> dict:
        """All that `assemble` needs to continue from here."""
        weights = self.offloaded.weights() if self.offloaded else self.model.state_dict()
        state = {"model": weights, "optimizers": self.optimizers.state_dict()}
        if self.owners:
            state["pseudo"] = {"owners": self.owners}
        return state


def block_runner(
    settings: Config,
    context: StepContext,
    batch: Batch,
    row_numbers: torch.Tensor,
    offloaded: "offload.Offload | None",
) -> BlockRunner:
    """How the blocks of a micro-batch are run. Each technique wraps the one before it."""
    run_block = run_recomputed if settings.run.checkpoint_activations else run_plain
    if offloaded:
        run_block = offloaded.wrap_block(run_block)
    if settings.ltd.on:
        run_block = ltd.wrap_block(run_block, settings.ltd, context, row_numbers, batch)
    return run_block


if __name__ == "__main__":
    exit_cleanly(main)
