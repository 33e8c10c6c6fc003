"""Plan the next step, read its rows and send them to the device while this one computes."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from support.clock import Clock


def read_ahead(
    plan: Callable[[Clock], Any], clock: Clock, device: torch.device
) -> Iterator[tuple[Any, float]]:
    """The steps from this clock on, each (plan.Step, the milliseconds it was waited for)."""

    def use_device() -> None:
        """Which GPU is asked for page-locked memory is a thread's own choice, at first the first"""
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def read(clock: Clock) -> Any:
        step = plan(clock)
        return step._replace(batch=step.batch.to(device))

    with ThreadPoolExecutor(1, initializer=use_device) as loader:
        upcoming = loader.submit(read, clock)
        while True:
            began = time.perf_counter()
            step = upcoming.result()
            waited_ms = (time.perf_counter() - began) * 1e3
            upcoming = loader.submit(read, step.after)
            yield step, waited_ms
