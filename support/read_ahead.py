"""Plan the next step and read its rows while this one computes."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.clock import Clock


def read_ahead(plan: Callable[[Clock], Any], clock: Clock) -> Iterator[tuple[Any, float]]:
    """The steps from this clock on, each (plan.Step, the milliseconds it was waited for)."""
    with ThreadPoolExecutor(1) as loader:
        upcoming = loader.submit(plan, clock)
        while True:
            began = time.perf_counter()
            step = upcoming.result()
            waited_ms = (time.perf_counter() - began) * 1e3
            upcoming = loader.submit(plan, step.after)
            yield step, waited_ms
