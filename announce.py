"""What train.py prints about a run, before it starts and at its end.

    announce    model, memory, batch, data and what lies ahead: all that --dry-run prints
    spent       tokens, FLOPs and time, beside the same run without techniques

`Plan.forecast` estimates what lies ahead. Nothing here changes a run.
"""

from kernels.packed_attention import IMPLS, chosen_impl
from mixture import MixedSamples
from plan import Plan
from support.clock import Clock
from support.numbers import duration, several, short
from support.optim import state_bytes
from support.run import Run, read_log
from support.sizes import empty_model, parameters_in_words

MANY_EPOCHS = 4
REPEATED = "text read more than 4 times teaches less each time (arXiv 2305.16264)"


def announce(plan: Plan, run: Run, micro_batch: int) -> None:
    """Print what is trained, on what, and what lies ahead: all that --dry-run prints.

    Args: micro_batch rows that a rank runs through the model together
    """
    s, runtime, model, store = plan.settings, plan.runtime, plan.model, plan.store
    say = runtime.say
    name = f"from {s.model.init}" if s.model.init else s.model.size
    say(f"{s.model.model} {name}: {parameters_in_words(model)}, {runtime.why}")
    named, muon = dict(empty_model(model).named_parameters()), s.optim.optimizer == "muon"
    state = state_bytes(named, muon, shards=runtime.world_size if s.run.fsdp else 1)
    sizes = ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in state.items())
    memory = f"memory: {sizes}, and activations"
    if s.run.fsdp:
        whole = state_bytes(named, muon)
        checkpoint = short(whole["weights"] + whole["optimizer"], "B")
        memory += f", per rank; a checkpoint takes {checkpoint} of rank 0's host memory"
    say(memory)
    each = f" on each of {runtime.world_size} ranks" if runtime.world_size > 1 else ""
    rows = f"{several(plan.rows_per_step, 'row')} of {plan.seq_len} tokens a step"
    attention = ""
    if s.pack.on or s.model.model == "bert":  # rows may hold several documents, or padding
        impl = chosen_impl(
            runtime.device.type,
            runtime.dtype,
            head_width=model.head_width,
            dropout=model.dropout,
            compiled=s.run.compile == "on",
        )
        attention = f"; attention: {impl}, {IMPLS[impl]}"
    say(f"batch: {rows}, in micro-batches of {several(micro_batch, 'row')}{each}{attention}")
    text = f"data: {store.meta['train_tokens']:,} training tokens in {store.path}"
    if isinstance(plan.samples, MixedSamples):
        text += f"; {plan.samples.passes(s.optim.tokens)}"
    say(text)
    if run.resumed_from:
        say(f"resumed from {run.resumed_from} at step {run.clock.step}")
    ahead = plan.forecast(run.clock)
    epochs = ahead.tokens / max(store.meta["train_tokens"], 1)
    line = f"ahead: about {ahead} ({epochs:,.2f} epochs"
    line += f"; {REPEATED})" if epochs > MANY_EPOCHS else ")"
    plain = plan.without_techniques().forecast(run.clock)
    if plain != ahead:
        line += f"; without techniques: about {plain}"
    say(line)


def spent(plan: Plan, run: Run) -> str:
    """Say what the run has read and computed, and what it would have without techniques.

    Example: read 3,953,296 tokens in 27.6 TFLOP and 0:03:55 of steps; without techniques about 269
             steps, 2,203,648 tokens of text, 31.3 TFLOP
    """
    seconds = sum(line["ms"] for line in read_log(run.folder) if line["event"] == "train") / 1e3
    text = f"read {run.clock.real_tokens:,} tokens in {short(run.clock.flops, 'FLOP')}"
    text = f"{text} and {duration(seconds)} of steps"
    plain = plan.without_techniques()
    if plain.settings != plan.settings:
        text += f"; without techniques about {plain.forecast(Clock())}"
    return text
