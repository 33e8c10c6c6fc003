"""Pretrain a GPT or a BERT: parse, runtime, data, plan, resume, model, assembly, loop, finish.

    torchrun train.py --curriculum seqlen --ltd --pack            # the three techniques at once
    torchrun --nproc-per-node 8 train.py --size 124M --data DIR   # the same on eight GPUs
    python train.py --resume                                      # go on with the newest run

Everything a step does follows from the settings and the `Clock` before it: which samples, how long,
what is dropped, how far the weights move. So a run that was killed goes on as if it had not been,
and more processes or micro-batches change its speed, not its curve (but for --dropout, whose masks
are drawn for each micro-batch). One step of the first command, with 16 rows of 256; after a dash
what --pseudo and --offload do in it:

    read_ahead           in plan.py: samples -> 16 packed rows, this rank's Batch, targets on all
                         ranks: 4,090
    train                - next_trainer, where a stage of --pseudo has ended
    Trainer.backward     micro-batch by micro-batch: forward, backward. block_runner hands a block
                         the tokens that --ltd keeps - and its weights, while gradients leave
    Trainer.train_step   - gradients of shared weights become their mean; clip, and one step of the
                         optimizers - on the host, whose new weights come back
    train                the clock goes on, a line of the log; evaluate and save where they are due
"""

import math
import os
import signal
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

# Before torch loads OpenMP, whose threads wait spinning for milliseconds. Beside another torch
# program on two cores the slowest of 20 nano steps took 10.6 s like that, and 2.2 s like this.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import config
import ltd
import offload
import pseudo
import report
import sample
from config import Config
from data import Data, open_data, shares_of
from evaluate import Evaluation
from kernels.triton_here import why_not
from model import BlockRunner, Transformer, run_plain, run_recomputed
from offload import Offload, Placement, placement_for
from plan import Plan, Step, announce, read_ahead
from support.clock import due, generator, seed_of
from support.optim import Optimizers, learning_rate
from support.run import Log, Run, commit
from support.runtime import (
    Runtime,
    StopSignal,
    assign,
    check_agreement,
    exit_cleanly,
    launcher,
    made_by,
    naming_step,
    one_line,
    refuse_step,
    shard,
    start,
    sum_of_bits,
    sync_gradients,
)
from support.sizes import empty_model, micro_batch_rows, parameter_count, peak_flops
from support.weights import initial_model, model_size

SAMPLE_TOKENS = 100  # written at the end of a run
MOST_CODES = 256  # that torch.compile makes of a block: for each new shape, until any will do


def main(argv: list[str] | None = None) -> int:
    settings, started = config.parse_or_resume(sys.argv[1:] if argv is None else argv)
    runtime = start(settings.run.device, settings.run.dtype)
    runtime.check_same({"commit": commit()} | made_by(runtime) | config.shared_by_ranks(settings))
    by_document = settings.pack.batch == "documents"
    micro_batch = micro_batch_rows(settings.optim, settings.data.seq_len, runtime, by_document)
    data = open_data(settings.data, settings.model.model == "bert", runtime)
    with_tokenizer = replace(settings.data, tokenizer=data.encoding.name)
    settings = replace(settings, data=with_tokenizer)
    runtime.check_same({"the text of --data": data.store.meta["sha256"]})
    size = started.size if started else model_size(settings, data.encoding, runtime.say)
    with Run(settings, runtime, size, data.store.meta, started) as run:
        try:
            with naming_step(lambda: run.clock.step):
                return go(run, data, micro_batch)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"--micro-batch-size {micro_batch} is too much for this device: choose less, or add"
                f" --checkpoint-activations or --offload ({one_line(error)})"
            ) from None


def go(run: Run, data: Data, micro_batch: int) -> int:
    """Begin a run or go on with it, to its end or until a signal; the exit status.

    Args: micro_batch full rows of a micro-batch
    """
    s, runtime = run.settings, run.runtime
    shape = config.transformer_config(s, *run.size)
    plan = Plan(s, data.store, data.special_ids, runtime, shape)
    state = None
    if run.started:
        like = empty_model(shape)
        if s.run.fsdp:
            shard(like, runtime)
        state = run.restore(like.state_dict() if s.run.fsdp else {})
        if runtime.on_rank0(run.is_complete):
            runtime.say(f"{run.folder} is finished: its {s.optim.tokens:,} tokens are consumed")
            return 0
    if s.offload.on:
        models = [empty_model(shape)]
        if s.pseudo.on:  # no stage must be refused in mid-run
            progress = run.clock.consumed_tokens / s.optim.schedule_tokens
            stages = pseudo.owners_to_come(s.pseudo, s.model.layers, progress)
            models += [pseudo.share(empty_model(shape), owners) for owners in stages]
        placements = [placement_of(s, model, runtime) for model in models]
        runtime.say(offload.in_words(placements[0], runtime.host_free))
    announce(plan, run, micro_batch)
    if is_compiled(s, runtime):
        runtime.say("compile: blocks are compiled as their shapes come, which takes seconds")
    if s.run.dry_run:
        return 0
    model = empty_model(shape) if state else initial_model(shape, s, runtime.say)
    if s.model.init and not state:  # may be another file on another machine
        bits = sum(sum_of_bits(tensor).item() for tensor in model.state_dict().values())
        runtime.check_same({"the weights of --init": bits})
    try:
        trainer = assemble(s, model=model, runtime=runtime, micro_batch=micro_batch, state=state)
    except ValueError as error:
        if state is None:
            raise
        raise ValueError(f"{run.resumed_from}: {error}") from None
    del state  # so that its memory is free
    run.open(
        bytes=trainer.optimizers.memory(),
        ranks=runtime.world_size,
        parameters=parameter_count(shape),
        train_tokens=data.store.meta["train_tokens"],
        bytes_per_token=data.store.bytes_per_token,
        peak_flops=peak_flops(runtime),
    )
    runtime.say(f"run: {run.folder}")
    stopped_by = train(run, data, plan, trainer)
    if stopped_by == 0:
        return 0
    resume = f"{launcher()} train.py --resume --out {run.folder}"
    runtime.say(f"stopped at step {run.clock.step}; go on with: {resume}")
    return 128 + stopped_by


def train(run: Run, data: Data, plan: Plan, trainer: "Trainer") -> int:
    """Step after step until the budget is consumed; evaluations and checkpoints as they are due.

    Returns: 0, or the number of the signal that ended it before; a checkpoint is saved then
    """
    s, runtime = run.settings, run.runtime
    evaluation, peak = held_out(s, data, s.run.eval_tokens), peak_flops(runtime)
    with StopSignal() as stop, run.progress_bar() as bar:
        is_best = run.evaluation_due and run.evaluated(evaluate(run, trainer, evaluation))
        if is_best:
            run.save(trainer.state(), trainer.optimizers.named)
        for step, waited_ms in read_ahead(plan, run.clock, runtime.device):
            began = time.perf_counter()
            if s.pseudo.on:
                trainer = next_trainer(trainer, step, run.log)
            done = trainer.train_step(step)
            run.advance(step.after)
            ms = (time.perf_counter() - began) * 1e3 + waited_ms
            if note := plan.first_note(step):
                runtime.say(f"--curriculum: {note}; see difficulty in log.jsonl")
            rate = (step.after.flops - step.before.flops) / ms * 1e3
            columns = done._asdict() | step.columns() | {"mfu": peak and round(rate / peak, 4)}
            run.log_step(step.before, columns, bar, ms=ms, waited_ms=waited_ms)
            if runtime.on_any_rank(stop.number > 0):
                run.save(trainer.state(), trainer.optimizers.named)
                return stop.number or signal.SIGTERM
            is_best = run.evaluation_due and run.evaluated(evaluate(run, trainer, evaluation))
            is_due = due(s.run.checkpoint_every, step.before, step.after)
            if is_best or is_due or run.is_finished:
                run.save(trainer.state(), trainer.optimizers.named)
        finish(run, data, plan, trainer, bar)
    return 0


def evaluate(run: Run, trainer: "Trainer", evaluation: Evaluation, last: bool = False) -> float:
    """Evaluate the model, write a line of the log and say it; bits per byte."""
    began, runtime = time.perf_counter(), run.runtime
    found = evaluation.run(trainer.model, runtime, trainer.micro_batch)
    run.log_evaluation(found.logged(), last, ms=(time.perf_counter() - began) * 1e3)
    if last:
        runtime.say(f"held-out: {found}, on {evaluation.text}, full length, nothing dropped")
    else:
        runtime.say(f"step {run.clock.step}: held-out {found}, on {evaluation.text}")
    return found.val_bpb


def held_out(settings: Config, data: Data, tokens: int | None) -> Evaluation:
    return Evaluation(data, settings.data.seq_len, nsp=settings.model.nsp, tokens=tokens)


def finish(run: Run, data: Data, plan: Plan, trainer: "Trainer", bar: tqdm) -> None:
    """The last evaluation, what the run took, a sample, and the report of all of it."""
    s, runtime, model = run.settings, run.runtime, trainer.model
    bar.close()
    evaluate(run, trainer, held_out(s, data, s.run.final_eval_tokens), last=True)
    runtime.say(plan.spent(run))
    if s.model.model == "gpt" and (runtime.is_rank0 or s.run.fsdp):  # which needs all ranks
        random = generator(torch.device("cpu"), s.run.seed, "sample")
        # a row that grows would compile each time
        with runtime.autocast(), torch.compiler.set_stance("force_eager"):
            text = "".join(sample.write(model, data.encoding, "", SAMPLE_TOKENS, generator=random))
        run.log.write("sample", step=run.clock.step, text=text)
        runtime.say(f"a sample:\n{textwrap.indent(text, '    ')}")
    page = runtime.on_rank0(lambda: str(report.write(run.folder)))
    run.log.write("finished", step=run.clock.step)
    runtime.say(f"checkpoint: {run.saved_path}\nlog: {run.folder / 'log.jsonl'}\nreport: {page}")


class Done(NamedTuple):
    """The result of a step; each field is a column of the log."""

    loss: float  # mean, in nats
    grad_norm: float
    lr: float


# ---- assembly


def next_trainer(trainer: "Trainer", step: Step, log: Log) -> "Trainer":
    """The trainer of this step: a new one where a stage of --pseudo has just ended."""
    s, runtime, clock = trainer.settings, trainer.runtime, step.before
    owners = pseudo.owners_at(s.pseudo, s.model.layers, step.context.progress)
    if owners == trainer.owners:
        return trainer
    state = pseudo.handed_over(trainer.state(), owners, s.pseudo.state)
    model, micro_batch = empty_model(trainer.model.config), trainer.micro_batch
    new = assemble(s, model=model, runtime=runtime, micro_batch=micro_batch, state=state)
    check_agreement(runtime, new.optimizers.named)
    before, now = trainer.optimizers.memory(), new.optimizers.memory()
    log.write(
        "stage",
        step=clock.step,
        consumed_tokens=clock.consumed_tokens,
        owners=list(owners),
        bytes_before=before,
        bytes=now,
    )
    layers = pseudo.owners_in_words(owners)
    runtime.say(
        f"--pseudo: after step {clock.step} layers use the weights of {layers}; weights, gradients"
        f" and state {sum(now.values()) / 1e6:,.1f} MB, were {sum(before.values()) / 1e6:,.1f}"
    )
    return new


def assemble(
    settings: Config,
    *,
    model: Transformer,
    runtime: Runtime,
    micro_batch: int,
    state: dict | None = None,
) -> "Trainer":
    """Put a model together with all that acts on it. The order matters, line by line.

    Called again, on an empty model, where a run goes on and where a stage of --pseudo ends.

    Args: micro_batch full rows of a micro-batch
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
    if not (offloaded or s.run.fsdp):
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
    return Trainer(
        settings=s,
        runtime=runtime,
        model=model,
        wrapped=wrapped,
        optimizers=optimizers,
        micro_batch=micro_batch,
        owners=owners,
        offloaded=offloaded,
    )


def is_compiled(settings: Config, runtime: Runtime) -> bool:
    """Whether blocks are compiled: by default on a GPU, for which torch writes code in Triton."""
    asked, kind = settings.run.compile, runtime.device.type
    return asked == "on" or (asked == "auto" and kind == "cuda" and why_not(kind) is None)


def placement_of(settings: Config, model: Transformer, runtime: Runtime) -> "Placement":
    """What --offload keeps in host memory."""
    muon, fsdp = settings.optim.optimizer == "muon", settings.run.fsdp
    return placement_for(settings.offload, model, runtime, muon=muon, fsdp=fsdp)


@dataclass
class Trainer:
    """An assembled model, and one optimizer step."""

    settings: Config
    runtime: Runtime
    model: Transformer
    wrapped: nn.Module  # the model, under DDP where that is on
    optimizers: Optimizers
    micro_batch: int  # of full length
    owners: tuple[int, ...] | None  # --pseudo: the layer whose weights each layer uses
    offloaded: "Offload | None"

    def train_step(self, step: Step) -> Done:
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
        lr = learning_rate(s.optim, s.model.layers, step.before, step.after)
        if self.offloaded:
            self.offloaded.step(self.optimizers, lr)
        else:
            self.optimizers.step(lr)
        return Done(loss=mean, grad_norm=norm, lr=lr)

    def backward(self, step: Step) -> torch.Tensor:
        """Add up the gradients of this rank's rows; the sum of their losses.

        Both are divided by the targets of all ranks, not by counts of micro-batches, so that
        neither ranks nor accumulation weigh in.
        """
        s, runtime = self.settings, self.runtime
        B, T = step.batch.tokens.shape
        rows = self.micro_batch * (s.data.seq_len // T)  # of a micro-batch: more if they are short
        total = torch.zeros((), device=runtime.device)
        for first in range(0, B, rows):
            part = step.part(slice(first, min(first + rows, B)))
            is_last = first + rows >= B
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
        state = {
            "model": self.offloaded.weights() if self.offloaded else self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
        }
        if self.owners:
            state["pseudo"] = {"owners": self.owners}
        return state


def block_runner(settings: Config, part: Step, offloaded: "Offload | None") -> BlockRunner:
    """How the blocks of a micro-batch run. Each technique wraps those before it."""
    run_block = run_recomputed if settings.run.checkpoint_activations else run_plain
    if offloaded:
        run_block = offloaded.wrap_block(run_block)
    if settings.ltd.on:
        run_block = ltd.wrap_block(run_block, settings.ltd, part.context, part.rows, part.batch)
    return run_block


if __name__ == "__main__":
    exit_cleanly(main)
