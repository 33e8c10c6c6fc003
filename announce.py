"""What train.py prints about a run, before it starts and at its end.

    announce    model, memory, batch, data and what lies ahead, before a run or with --dry-run
    spent       steps, time, tokens and FLOPs, above a forecast of the same without techniques

`Plan.forecast` estimates what lies ahead. Nothing here changes a run.
"""

from kernels.packed_attention import IMPLS, chosen_impl
from mixture import MixedSamples
from model import Transformer
from plan import Forecast, Plan
from support.clock import Clock
from support.numbers import duration, several, short
from support.optim import lr_at, state_bytes
from support.run import Run, read_log
from support.settings import as_flags, flattened
from support.sizes import parameters_in_words
from support.weights import missing_for_export

MANY_EPOCHS = 4  # beyond these, text teaches less each time (arXiv 2305.16264)


def announce(plan: Plan, run: Run, models: list[Transformer], micro_batch: int) -> None:
    """Print what is trained, on what, and what lies ahead.

    Args: models      the present one and, with --pseudo, that of each later stage
          micro_batch rows that a rank runs through the model together
    """
    settings, say = plan.settings, plan.runtime.say
    name = f"from {settings.model.init}" if settings.model.init else settings.model.size
    say(f"{settings.model.model} {name}: {parameters_in_words(plan.model)}, {plan.runtime.why}")
    say(f"memory: {'; then '.join(memory(plan, model) for model in models)}")
    say(f"batch: {batch(plan, micro_batch)}")
    say(f"data: {data(plan)}")
    if run.resumed_from:
        say(f"resumed from {run.resumed_from} at step {run.clock.step}")
    forecast = plan.forecast(run.clock)
    say(f"ahead: {ahead(plan, run.clock, forecast)}")
    say(f"rate: {rate(plan, run.clock, forecast)}")
    if limits := afterwards(plan):
        say(f"afterwards: {limits}")


def memory(plan: Plan, model: Transformer) -> str:
    """Say what weights, gradients and optimizer state take, and with --fsdp a checkpoint."""
    settings, ranks = plan.settings, plan.runtime.world_size
    named = dict(model.named_parameters())
    muon = settings.optim.optimizer == "muon"
    sizes = state_bytes(named, muon, shards=ranks if settings.run.fsdp else 1)
    text = ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in sizes.items())
    text = f"{text}, and activations"
    if not settings.run.fsdp:
        return text
    whole = state_bytes(named, muon)
    checkpoint = short(whole["weights"] + whole["optimizer"], "B")
    return f"{text}, per rank; a checkpoint takes {checkpoint} of rank 0's host memory"


def batch(plan: Plan, micro_batch: int) -> str:
    """Say how many rows a step has, and how attention keeps the documents of a row apart."""
    settings, runtime = plan.settings, plan.runtime
    text = f"{several(plan.rows_per_step, 'row')} of {plan.seq_len} tokens a step"
    text = f"{text}, in micro-batches of {several(micro_batch, 'row')}"
    if runtime.world_size > 1:
        text = f"{text} on each of {runtime.world_size} ranks"
    if not (settings.pack.on or plan.store.has_prompts) and settings.model.model == "gpt":
        return text  # each row is one document, without padding
    model, kind, compiled = plan.model, runtime.device.type, settings.run.compile == "on"
    impl = chosen_impl(kind, runtime.dtype, model.head_width, model.dropout, compiled)
    return f"{text}; attention: {impl}, {IMPLS[impl]}"


def data(plan: Plan) -> str:
    text = f"{plan.store.meta['train_tokens']:,} training tokens in {plan.store.path}"
    if isinstance(plan.samples, MixedSamples):
        text = f"{text}; {plan.samples.passes(plan.settings.optim.tokens)}"
    for part in getattr(plan.samples, "parts", [plan.samples]):
        if part.store.has_prompts and part.too_long:
            longer = f"{several(part.too_long, 'document')} of {part.store.path} longer than a row"
            text = f"{text}; {longer}, cut: --seq-len {part.longest} would cut none"
    return text


def ahead(plan: Plan, clock: Clock, forecast: Forecast) -> str:
    """Say what the rest of the run takes, and what it takes without techniques.

    Example: about 248 steps, 1,972,046 tokens of text, 13.8 TFLOP (0.72 epochs); without
             techniques about 135 steps, 1,105,920 tokens of text, 15.7 TFLOP
    """
    plain = plan.without_techniques().forecast(clock)
    epochs = forecast.tokens / max(plan.store.meta["train_tokens"], 1)
    clauses = [f"about {forecast} ({epochs:,.2f} epochs)"]
    if epochs > MANY_EPOCHS:
        clauses.append(f"beyond {MANY_EPOCHS} epochs, text teaches less each time")
    if plain != forecast:
        clauses.append(f"without techniques about {plain}")
    return "; ".join(clauses)


def rate(plan: Plan, clock: Clock, forecast: Forecast) -> str:
    """Say how the learning rate goes.

    Example: 0.00202 in the first step, 0.0102 halfway, 4.11e-05 in the last (linear)
    """
    optim = plan.settings.optim
    half_step = (optim.tokens - clock.consumed_tokens) / max(forecast.steps, 1) / 2
    ends = clock.consumed_tokens + half_step, optim.tokens - half_step
    first, middle, last = (f"{lr_at(optim, at):.3g}" for at in (ends[0], sum(ends) / 2, ends[1]))
    return f"{first} in the first step, {middle} halfway, {last} in the last ({optim.schedule})"


def afterwards(plan: Plan) -> str:
    """Say what the finished run cannot be used for, with the flags that would allow it."""
    only = []
    if plan.settings.optim.min_lr < 1:
        rates = "--min-lr 1 or, before its decay, --schedule wsd"
        only.append(f"extended (--resume --tokens) only with {rates}")
    if missing := missing_for_export(flattened(plan.settings)):
        only.append(f"exported only with {as_flags(missing)}")
    return f"can be {'; '.join(only)}" if only else ""


def spent(plan: Plan, run: Run) -> str:
    """Say what the run took and, below, what the same --tokens take without techniques.

    Example: spent: 248 steps in 0:04:15, 1,972,007 tokens of text, 13.8 TFLOP
             without techniques: 135 steps, 1,105,920 tokens of text, 15.7 TFLOP (forecast)
    """
    seconds = sum(line["ms"] for line in read_log(run.folder) if line["event"] == "train") / 1e3
    clock = run.clock
    text = f"spent: {several(clock.step, 'step')} in {duration(seconds)}"
    text += f", {clock.real_tokens:,} tokens of text, {short(clock.flops, 'FLOP')}"
    plain = plan.without_techniques()
    if plain.settings != plan.settings:
        text += f"\nwithout techniques: {plain.forecast(Clock())} (forecast)"
    return text
