"""How benches take time: variants in turns, steps in processes of their own, calls of kernels.

On a noisy machine variants alternate and the order is reversed after each turn, so that noise slows
all of them alike; ratios are taken within a turn. A turn that is not counted comes first.

Whole steps are made in a process for each variant, because a program's memory and threads are part
of what is compared. Only one process works at a time. The first step of its turn is not timed: it
finds the caches full of another variant's arrays. Then steps are timed back to back for half a
second, one at least, and their median is what the turn took.

A GPU's clock is steady, but its memory may not hold what all variants need in a step: there each
makes all its turns and leaves before the next one begins. Calls of kernels take turns within one
process. On a GPU they are timed between two events, and it sleeps first, so that the host is ahead.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple, TypeVar

import torch
from record import ROOT  # noqa: F401, which makes the project's modules importable

from support.step import machine

T = TypeVar("T")

WAIT_SECONDS = 0.02  # until the threads of the previous program have stopped spinning
TIMED_SECONDS = 0.5  # of a turn
ASLEEP = 30_000_000  # cycles, some 17 ms: longer than the host takes for a round of calls


def in_turns(variants: dict[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """Call all variants in each turn; what each returned, without the first turn."""
    taken: dict[str, list[T]] = {name: [] for name in variants}
    order = list(variants)
    for turn in range(turns + 1):
        for name in order:
            result = variants[name]()
            if turn:
                taken[name].append(result)
        order.reverse()
    return taken


# ---- steps


class Taken(NamedTuple):
    """What one step took. Bytes are torch's on a GPU, without the context; 0 on a CPU."""

    seconds: float
    peak_bytes: int = 0
    resident_bytes: int = 0  # before the step: weights and the optimizer's state


def measured(step: Callable[[], object]) -> Taken:
    on_gpu = torch.cuda.is_initialized()
    resident = 0
    if on_gpu:  # wait until it has done what it was given, here and after the step
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
    began = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return Taken(seconds, torch.cuda.max_memory_allocated() if on_gpu else 0, resident)


def turn_of(step: Callable[[], object]) -> Taken:
    """One step that is not timed, then the median of the steps of half a second."""
    time.sleep(WAIT_SECONDS)
    step()
    taken = [measured(step)]
    while sum(each.seconds for each in taken) < TIMED_SECONDS:
        taken.append(measured(step))
    return taken[-1]._replace(seconds=statistics.median(each.seconds for each in taken))


def seconds_in_turns(
    variants: dict[str, Callable[[], object]],
    turns: int,
    measure: Callable[[Callable], Taken] = measured,
) -> dict[str, list[float]]:
    """Seconds of each variant in each turn, all in this process.

    Args: measure  `measured` for one call, `turn_of` for the median of half a second
    """
    calls = {name: partial(measure, action) for name, action in variants.items()}
    return {name: [t.seconds for t in taken] for name, taken in in_turns(calls, turns).items()}


def take_turns(
    variants: dict[str, tuple], turns: int, device: str
) -> Iterator[tuple[list[str], dict[str, list[Taken]]]]:
    """Yield the variants that are done since the last time, and what all that are done took.

    On a GPU a variant that fails does not end the others.

    Args:   variants name -> (build, *arguments): what a fresh process calls to get the function
                     that makes a step
    Raises: ValueError naming a variant and what is wrong with it
    """
    with ExitStack() as stack:
        programs, building = {}, {}
        for name, job in variants.items():
            alone = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            programs[name] = stack.enter_context(alone)
            building[name] = alone.submit(build_step, *job)
        wait(building.values())  # before the first turn, which building would disturb

        def turn(name: str) -> Taken:
            try:
                building[name].result()
                return programs[name].submit(turn_of_built).result()
            except Exception as error:  # a GPU's memory is full, or a kernel does not compile
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                raise ValueError(f"{name}: {kind}{str(error).splitlines()[0]}") from error

        if device == "cpu":
            yield list(variants), in_turns({name: partial(turn, name) for name in variants}, turns)
            return
        taken, failed = {}, []
        for name in variants:
            try:
                taken |= in_turns({name: partial(turn, name)}, turns)
            except ValueError as error:
                print(f"failed: {error}", file=sys.stderr, flush=True)
                failed.append(str(error))
            else:
                yield [name], taken
            programs[name].shutdown()
        if failed:
            raise ValueError("; ".join(failed))


def build_step(build: Callable[..., Callable], *arguments: object) -> None:
    """In a process of its own: keep the step that later calls make."""
    global built
    built = build(*arguments)


def turn_of_built() -> Taken:
    return turn_of(built)


# ---- calls of kernels


class Call(NamedTuple):
    """Milliseconds of a call, of the device and of the host, which on a GPU goes on meanwhile."""

    ms: float
    host_ms: float


def timed(calls: list[Callable[[], object]], device: str) -> Call:
    """The mean of one round of calls."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(ASLEEP)
        start.record()
    began = time.perf_counter()
    for call in calls:
        call()
    host_ms = 1e3 * (time.perf_counter() - began) / len(calls)
    if device == "cpu":
        return Call(host_ms, host_ms)
    end.record()
    torch.cuda.synchronize()
    return Call(start.elapsed_time(end) / len(calls), host_ms)


def peak_flops(device: str) -> float:
    """Operations a second of a large matrix product, measured here and now."""
    if device == "cpu":
        return machine.measured_peak(torch.float32)
    return machine.measured(torch.device(device), torch.bfloat16).flops
