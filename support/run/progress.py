"""What a run says while it goes on: its first lines, the bar, and the log's line of a step."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tqdm import tqdm

from kernels.packed_attention import IMPLS
from support.base.clock import savings
from support.base.numbers import short
from support.base.runtime import Runtime
from support.evaluation.scoring import HeldOut
from support.rows.mixture import MixedSamples
from support.run.dry_run import epochs, outlook
from support.run.run import Run
from support.step import machine
from support.step.memory import Memory, bytes_free
from support.step.memory import in_words as memory_in_words
from support.step.placement import Work


class Done(NamedTuple):
    """What a step found: mean loss in nats, norm of the gradient, learning rate."""

    loss: float
    grad_norm: float
    lr: float


class Took(NamedTuple):
    """What a step took."""

    ms: float  # all of it
    data_ms: float  # that its batch was waited for
    model_flops: int  # support/step/flops.py


class Speed(NamedTuple):
    """How fast a step was, and how far the run is through its text."""

    tokens_per_s: float  # real ones
    mfu: float | None  # model FLOPs a second as a share of the peak; None where that is unknown
    epochs: float  # passes over the store's training tokens


def speed_of(run: Run, step: Any, took: Took) -> Speed:
    tokens = step.after.real_tokens - step.before.real_tokens
    peak, seconds = run.peak.flops, took.ms / 1e3
    return Speed(
        tokens_per_s=round(tokens / seconds, 1),
        mfu=round(took.model_flops / seconds / peak, 4) if peak else None,
        epochs=round(step.after.real_tokens / run.store.train_tokens, 4),
    )


def announce(run: Run, plan: Any, batches: str, memory: Memory) -> None:
    """What is trained, on what, and where it is written.

    Args: plan   plan.Plan
          memory what the run takes, by estimate
    """
    samples, store = plan.samples, plan.samples.store
    s, m, say = run.settings, run.settings.model, run.runtime.say
    parameters = sum(p.numel() for p in run.trainer.model.parameters())
    say(f"{m.model} {m.size}: {parameters / 1e6:.2f} M parameters, {run.runtime.why}")
    say(f"memory: {memory_in_words(memory, bytes_free(run.runtime))}")
    if run.trainer.placement:
        say(placement_in_words(run))
    say(f"batches: {batches}")
    compiled = run.trainer.compiled
    if compiled.on or run.runtime.device.type == "cuda":
        say(f"compile: {'on' if compiled.on else 'off'} ({compiled.why})")
    if s.pack.on or m.model == "bert":
        say(f"attention: {run.trainer.work.impl}, {IMPLS[run.trainer.work.impl]}")
    say(f"data: {store.train_tokens:,} training tokens in {store.path}; run: {run.folder}")
    if isinstance(samples, MixedSamples):
        say(f"mixture of {samples.passes(run.settings.optim.tokens)}")
    found = outlook(s, lambda c: plan.stage_at(c).max_piece_len, run.trainer.work, plan(run.clock))
    say(f"about {found.steps:,} steps, {epochs(found.real_tokens, store.train_tokens)}")
    work, peak = short(found.flops, "FLOP"), run.peak
    rate = f" of {short(peak.flops, 'FLOP/s')}" if peak.flops else ""
    say(f"work: about {work} in matrix products; peak{rate}: {peak.why}")
    if samples.long == "truncate":
        documents, tokens = samples.beyond_a_row()
        longer = f"{documents:,} of {store.train_documents:,} documents are longer than a row"
        say(f"--long truncate: {longer}, {tokens:,} tokens of them are left out")
    if run.resumed_from:
        say(f"resumed from {run.resumed_from} at step {run.clock.step}")


def placement_in_words(run: Run) -> str:
    """What --offload leaves where, and what a step pays for it."""
    s, runtime, at_once = run.settings, run.runtime, run.trainer.rows_at_once
    placement = run.trainer.placement
    of_rank = s.optim.batch_tokens // s.data.seq_len // runtime.world_size
    work = Work(at_once * s.data.seq_len, -(-of_rank // at_once))
    rates = machine.measured(runtime.device, runtime.dtype)
    price = placement.price(placement, work, rates)
    return f"{placement.table(placement)}\n{price}"


def progress_bar(run: Run) -> tqdm:
    """A bar over the budget, on rank 0."""
    return tqdm(
        total=run.settings.optim.tokens,
        initial=run.clock.consumed_tokens,
        unit="tok",
        unit_scale=True,
        disable=not run.runtime.is_rank0,
        smoothing=0.05,
        dynamic_ncols=True,
    )


def show_step(bar: tqdm, step: Any, loss: float, speed: Speed) -> None:
    """Move the bar past a plan.Step; its rate and the time left are of consumed tokens."""
    shown = [f"loss {loss:.3f}"]
    if speed.epochs > 1:
        shown.append(f"epochs {speed.epochs:.1f}")
    if speed.mfu is not None:
        shown.append(f"MFU {speed.mfu:.0%}")
    bar.set_postfix_str(", ".join(shown), refresh=False)
    # the last step goes a little past the budget, and a bar beyond its end shows no time left
    now = min(step.after.consumed_tokens, bar.total)
    bar.update(now - step.before.consumed_tokens)


def write(bar: tqdm, line: str) -> None:
    """Print a line above the bar, on rank 0."""
    if not bar.disable:
        bar.write(line)


def show_part(bar: tqdm, what: str, done: int, of: int) -> None:
    """How far a step, or an evaluation, is on its way; redrawn once a second."""
    if not bar.disable and time.time() - bar.last_print_t > 1:
        bar.set_postfix_str(f"{what} {done} of {of}")
        bar.last_print_t = time.time()


def evaluation_bar(rows: int, runtime: Runtime) -> Callable[[int], None]:
    """A bar of its own over the rows of an evaluation, as the `between` of that."""
    hidden = not runtime.is_rank0 or None  # None: shown where there is a terminal
    bar = tqdm(total=rows, unit="row", disable=hidden, leave=False)

    def show(done: int) -> None:
        bar.update(done - bar.n)
        if done == bar.total:
            bar.close()

    return show


def in_words(memory: dict[str, int]) -> str:
    """Example: weights 6.9 MB, gradients 6.9 MB, optimizer 9.0 MB"""
    return ", ".join(f"{what} {size / 1e6:,.1f} MB" for what, size in memory.items())


def change_trainer(run: Run, trainer: Any, bar: tqdm) -> None:
    """Go on with this train.Trainer; if it is another one, say how; a line of the log."""
    if trainer is run.trainer:
        return
    before, run.trainer = run.trainer.optimizers.memory(), trainer
    now, owners = trainer.optimizers.memory(), trainer.shadow.owners
    clock = run.clock
    at = {"step": clock.step, "consumed_tokens": clock.consumed_tokens}
    run.log.write("stage", **at, owners=list(owners), bytes_before=before, bytes=now)
    used = " ".join("." if owner < 0 else str(owner) for owner in owners)
    write(bar, f"--pseudo: after step {clock.step} layers use the weights of {used}")
    write(bar, f"memory: {in_words(before)} before; {in_words(now)} now")
    if run.trainer.placement:
        write(bar, placement_in_words(run))


def conclude(run: Run, found: HeldOut, text: str) -> None:
    """What the last evaluation found on that text, and what the techniques saved."""
    say, shadow = run.runtime.say, run.trainer.shadow
    say(f"held-out: {found}, on {text}, full length, nothing dropped")
    say(savings(run.settings, run.clock))
    if shadow and len({*shadow.owners}) < len(shadow.owners):
        say(f"--pseudo-until {run.settings.pseudo.until}: the model is still a shadow")


def log_step(run: Run, step: Any, done: Done, took: Took, bar: tqdm) -> None:
    """Write what a step was made of (plan.Step) and what it found; move the bar past it."""
    speed = speed_of(run, step, took)
    if step.note and not run.noted:
        write(bar, f"--curriculum: {step.note}; see difficulty in log.jsonl")
        run.noted = True
    run.log.write(
        "train",
        step=run.clock.step,
        consumed_tokens=run.clock.consumed_tokens,
        real_tokens=run.clock.real_tokens,
        layer_tokens=run.clock.layer_tokens,
        **done._asdict(),
        flops=run.clock.flops,
        **speed._asdict(),
        max_piece_len=step.max_piece_len,
        kept_tokens=step.kept_tokens,
        padding_share=round(step.padding_share, 6),
        pieces=step.pieces,
        attention_share=round(step.attention_share, 6),
        **step.stage,
        ms=round(took.ms, 2),
        data_ms=round(took.data_ms, 2),
    )
    show_step(bar, step, done.loss, speed)


def log_evaluation(run: Run, found: HeldOut, seconds: float, last: bool) -> None:
    run.log.write(
        "eval",
        step=run.clock.step,
        consumed_tokens=run.clock.consumed_tokens,
        **found.logged(),
        last=last,
        ms=round(seconds * 1e3, 1),
    )
