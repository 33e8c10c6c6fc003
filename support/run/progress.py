"""What a run says while it goes on: its first lines, the bar, and the log's line of a step."""

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from tqdm import tqdm

from config import TECHNIQUES
from data import MixedSamples
from kernels.packed_attention import IMPLS
from model import TransformerConfig
from pseudo import in_words, own_blocks, owners_at
from support.clock import Clock
from support.run.run import Run
from support.runtime import Runtime, peak_memory
from support.settings import short
from support.step.flops import attention_of, flops_of_step, work_of
from support.step.memory import Memory, MicroBatch, bytes_free
from support.step.memory import in_words as memory_in_words
from support.step.placement import Placement, describe
from support.step.sizes import parameters_in_words

if TYPE_CHECKING:
    from config import Config
    from plan import Plan, Step
    from train import Trainer


class Done(NamedTuple):
    """The result of a step; each field is logged.

    A further number of the device joins those that `Trainer.update` reads together, summed over
    ranks.
    """

    loss: float  # mean, in nats
    grad_norm: float
    lr: float


# ---- the first lines

MANY_EPOCHS = 4
LESS = "text that is read more than 4 times teaches less and less (arXiv 2305.16264)"


def announce(
    run: Run,
    plan: "Plan",
    shape: TransformerConfig,
    placement: Placement | None,
    *,
    batches: MicroBatch,
    memory: Memory,
) -> None:
    """Say what is trained, on what, and what is ahead: all that --dry-run prints.

    Args: shape     of the model
          placement of --offload
          batches   how a step is cut into micro-batches
          memory    what the run takes, by estimate
    """
    s, say, store, samples = run.settings, run.runtime.say, run.store, plan.samples
    say(f"{s.model.model} {s.model.size}: {parameters_in_words(shape)}, {run.runtime.why}")
    say(f"memory, by estimate: {memory_in_words(memory, bytes_free(run.runtime))}")
    if placement:
        say(placement_in_words(run, placement, batches.count))
    say(f"batches: {batches.why}")
    if s.pack.on or s.model.model == "bert":
        impl = attention_of(s, run.runtime, shape)
        say(f"attention: {impl}, {IMPLS[impl]}")
    say(f"data: {store.meta['train_tokens']:,} training tokens in {store.path}")
    if isinstance(samples, MixedSamples):
        say(f"mixture of {samples.passes(s.optim.tokens)}")
    if run.resumed_from:
        say(f"resumed from {run.resumed_from} at step {run.clock.step}")
    streamed = placement.streamed if placement else ()
    say(f"ahead: {ahead_in_words(run, plan, shape, batches.count, streamed)}")
    if any(getattr(s, name).on for name in TECHNIQUES):
        say(f"without techniques: {ahead_in_words(run, plan.plain(), shape, batches.count)}")


def ahead_in_words(
    run: Run,
    plan: "Plan",
    shape: TransformerConfig,
    rows_at_once: int,
    streamed: Collection[int] = (),
) -> str:
    """What the rest of a run takes if its rows are full, as `Plan.ahead` says.

    Args:    streamed layers whose weights are fetched (--offload)
    Example: 489 steps, 2,002,944 tokens of text (0.73 epochs), 10.9 TFLOP executed
    """
    s, steps, tokens, flops = plan.settings, 0, 0, 0
    for count, step in plan.ahead(run.clock):
        blocks = s.model.layers
        if s.pseudo.on:
            blocks = own_blocks(owners_at(s.pseudo, blocks, step.context.progress))
        work = work_of(s, run.runtime, shape, rows_at_once, blocks, streamed)
        steps += count
        tokens += count * (step.after.real_tokens - step.before.real_tokens)
        flops += count * flops_of_step(s, work, step).executed
    epochs = tokens / max(run.store.meta["train_tokens"], 1)
    rows = ", if every row is full" if s.pack.on or s.model.model == "bert" else ""
    warning = f"; {LESS}" if epochs > MANY_EPOCHS else ""
    return (
        f"{steps:,} steps, {tokens:,} tokens of text ({epochs:,.2f} epochs),"
        f" {short(flops, 'FLOP')} executed{rows}{warning}"
    )


def say_assembled(run: Run) -> None:
    """What is known once the model is put together and the run has its folder."""
    peak = run.peak
    rate = f"of {short(peak.flops, 'FLOP/s')}, " if peak.flops else ""
    run.runtime.say(f"run: {run.folder}; MFU: {rate}{peak.why}")


def placement_in_words(run: Run, placement: Placement, rows_at_once: int) -> str:
    """What --offload leaves where, and what that costs a step."""
    s, runtime = run.settings, run.runtime
    rows_of_rank = s.optim.batch_tokens // s.data.seq_len // runtime.world_size
    return describe(
        placement,
        micro_batch_tokens=rows_at_once * s.data.seq_len,
        micro_batches=-(-rows_of_rank // rows_at_once),
    )


# ---- the bar


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


def write(bar: tqdm, line: str) -> None:
    """Print a line above the bar, on rank 0."""
    if not bar.disable:
        bar.write(line)


def evaluation_bar(rows: int, runtime: Runtime) -> Callable[[int], None]:
    """A bar of its own over the rows of an evaluation; call the result with the rows done."""
    hidden = not runtime.is_rank0 or None  # None: shown where there is a terminal
    bar = tqdm(total=rows, unit="row", disable=hidden, leave=False)

    def show(done: int) -> None:
        bar.update(done - bar.n)
        if done == bar.total:
            bar.close()

    return show


# ---- what happened


def change_trainer(run: Run, trainer: "Trainer", bar: tqdm) -> None:
    """Go on with this trainer; if it is a new one, say and log what changed."""
    if trainer is run.trainer:
        return
    before, now = run.trainer.optimizers.memory(), trainer.optimizers.memory()
    run.use(trainer)
    fields = {"step": run.clock.step, "consumed_tokens": run.clock.consumed_tokens}
    if trainer.owners:
        fields["owners"] = list(trainer.owners)
        words = in_words(trainer.owners)
        write(bar, f"after step {run.clock.step} --pseudo: layers use the weights of {words}")
    run.log.write("stage", **fields, bytes_before=before, bytes=now)
    write(bar, f"memory: {bytes_in_words(before)} before; {bytes_in_words(now)} now")
    if trainer.offloaded:
        write(bar, placement_in_words(run, trainer.offloaded.placement, trainer.rows_at_once))


def bytes_in_words(memory: dict[str, int]) -> str:
    """Example: weights 6.9 MB, gradients 6.9 MB, optimizer 9.0 MB"""
    return ", ".join(f"{what} {size / 1e6:,.1f} MB" for what, size in memory.items())


def log_step(
    run: Run,
    step: "Step",
    done: Done,
    bar: tqdm,
    *,
    ms: float,
    waited_ms: float,
    model_flops: int,
) -> None:
    """Log what a step consisted of and its result; move the bar past it.

    Each field becomes a column in support/report/run_page.py, which draws those that it names.

    Args: ms          of the step, with the `waited_ms` until its batch was there
          model_flops see support/step/flops.py; MFU is their rate as a share of the peak
    """
    after, peak = step.after, run.peak.flops
    epochs = after.real_tokens / run.store.meta["train_tokens"]
    mfu = model_flops / ms * 1e3 / peak if peak else None
    if note := run.first_note(step.note):
        write(bar, f"--curriculum: {note}; see difficulty in log.jsonl")
    run.log.write(
        "train",
        step=run.clock.step,
        consumed_tokens=run.clock.consumed_tokens,
        real_tokens=run.clock.real_tokens,
        layer_tokens=run.clock.layer_tokens,
        **{name: finite(value) for name, value in done._asdict().items()},
        flops=run.clock.flops,
        tokens_per_s=round((after.real_tokens - step.before.real_tokens) / ms * 1e3, 1),
        mfu=mfu if mfu is None else round(mfu, 4),
        epochs=round(epochs, 4),
        max_piece_len=step.max_piece_len,
        kept_tokens=min(step.tokens_by_layer),
        padding_share=round(step.padding_share, 6),
        pieces=step.pieces,
        attention_share=round(step.attention_share, 6),
        **step.difficulty,
        ms=round(ms, 2),
        data_ms=round(waited_ms, 2),
    )
    shown = f"loss {done.loss:.3f}"
    if epochs > 1:
        shown += f", epochs {epochs:.1f}"
    if mfu is not None:
        shown += f", MFU {mfu:.0%}"
    bar.set_postfix_str(shown, refresh=False)
    # the last step goes a little past the budget, and a bar beyond its end shows no time left
    bar.update(min(after.consumed_tokens, bar.total) - step.before.consumed_tokens)


def finite(value: object) -> object:
    """JSON has no NaN and no infinity: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def log_evaluation(run: Run, result: dict[str, object], seconds: float, last: bool) -> None:
    """Log the result of an evaluation (HeldOut.logged)."""
    run.log.write(
        "eval",
        step=run.clock.step,
        consumed_tokens=run.clock.consumed_tokens,
        **result,
        last=last,
        ms=round(seconds * 1e3, 1),
        peak_memory=peak_memory(run.runtime.device),
    )


def conclude(run: Run, result: str, text: str) -> None:
    """Say the result of the last evaluation, on that text, and what the techniques saved."""
    say = run.runtime.say
    say(f"held-out: {result}, on {text}, full length, nothing dropped")
    say(savings(run.settings, run.clock))
    owners = run.trainer.owners
    if owners and own_blocks(owners) < len(owners):
        say(f"--pseudo-until {run.settings.pseudo.until}: the model is still a shadow")


def savings(settings: "Config", clock: Clock) -> str:
    """One line: what the techniques saved compared with the plain run over the same text."""
    saved = []
    full = settings.model.layers * clock.positions
    if settings.ltd.on or settings.pseudo.on:
        saved.append(
            f"{1 - clock.layer_tokens / full:.1%} of layer-tokens"
            f" ({clock.layer_tokens / 1e6:.2f} M, plain {full / 1e6:.2f} M)"
        )
    if settings.pack.on:
        padding = 1 - clock.real_tokens / clock.positions
        alone = 1 - clock.real_tokens / (clock.pieces * settings.data.seq_len)
        saved.append(f"padding: {padding:.1%} of all positions, {alone:.1%} with one piece a row")
    return "saved: " + ("; ".join(saved) or "nothing (neither token dropping nor packing is on)")
