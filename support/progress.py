"""What a run says while it goes on: its first lines, and the bar."""

from typing import Any

from tqdm import tqdm

from support.clock import Clock
from support.run_folder import Run
from support.token_store import Store


def announce(run: Run, store: Store) -> None:
    """What is trained, on what, and where it is written."""
    m, say = run.settings.model, run.runtime.say
    parameters = sum(p.numel() for p in run.model.parameters())
    say(f"{m.model} {m.size}: {parameters / 1e6:.2f} M parameters, {run.runtime.why}")
    say(f"data: {store.train_tokens} training tokens in {store.path}; run: {run.folder}")
    if run.resumed_from:
        say(f"resumed from {run.resumed_from} at step {run.clock.step}")


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


def show_step(bar: tqdm, before: Clock, now: Clock, done: Any, ms: float) -> None:
    real = now.real_tokens - before.real_tokens
    bar.set_postfix_str(f"loss {done.loss:.3f}, {real / ms * 1e3:.0f} tokens/s", refresh=False)
    bar.update(now.consumed_tokens - before.consumed_tokens)
