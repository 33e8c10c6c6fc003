"""How benches take time: whole steps, each variant in a process of its own, and calls of kernels.

A process of its own, for a program's memory and threads are part of what is compared: nothing that
one sets up is there for another. Only one works at a time. The first step of a turn is not timed:
it finds the caches full of another's arrays, as no step of a run does. Then steps are timed back to
back, as a run makes them, for half a second and at least one; their median is what the turn took.

On a CPU variants alternate, and the order is reversed after each turn, so that a noisy machine
slows all alike. A GPU's clock is steady, but its memory may not hold what all of them need in a
step: there each makes all its turns and leaves before the next begins.

Calls of kernels take turns within one process. On a GPU their time is the GPU's own, between two
events: it sleeps first, so that the host is ahead.
"""

import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

WAIT_SECONDS = 0.02  # until the threads of the program before have stopped spinning
TIMED_SECONDS = 0.5  # of a turn
ASLEEP = 30_000_000  # cycles, some 17 ms: longer than the host takes for a round of calls
PEAK_SIZE = {"cpu": 2048, "cuda": 8192}  # rows and columns of the product that measures the peak


class Taken(NamedTuple):
    """What one step took. Bytes are torch's on a GPU, without the context; 0 on a CPU."""

    seconds: float
    peak_bytes: int = 0
    resident_bytes: int = 0  # before the step: weights and the optimizer's state


# ---- steps, each variant in a process of its own


def take_turns(
    variants: dict[str, tuple], turns: int, device: str
) -> Iterator[tuple[list[str], dict[str, list[Taken]]]]:
    """Yield which variants are done since the last time, and what all that are done took.

    A turn comes before that does not count. On a GPU a variant that fails does not end the others.

    Args:   variants name -> (build, *arguments): what a fresh process calls to get the function
                     that makes a step
    Raises: ValueError naming a variant and what is wrong with it
    """
    with processes(variants) as programs:
        if device == "cpu":
            turn_of_each = {name: program.turn for name, program in programs.items()}
            yield list(programs), alternated(turn_of_each, turns)
            return
        taken, failed = {}, []
        for name, program in programs.items():
            try:
                taken |= alternated({name: program.turn}, turns)
            except ValueError as error:
                print(f"failed: {error}", file=sys.stderr, flush=True)
                failed.append(str(error))
            else:
                yield [name], taken
            program.close()
        if failed:
            raise ValueError("; ".join(failed))


def alternated(turn_of_each: dict[str, Callable[[], Taken]], turns: int) -> dict[str, list[Taken]]:
    """What each took in each turn, after one that does not count."""
    for turn in turn_of_each.values():
        turn()
    taken = {name: [] for name in turn_of_each}
    order = list(turn_of_each)
    for _ in range(turns):
        for name in order:
            time.sleep(WAIT_SECONDS)
            taken[name].append(turn_of_each[name]())
        order.reverse()
    return taken


def ratios(steps: list[Taken], others: list[Taken]) -> list[float]:
    """Of seconds, within each turn."""
    return [one.seconds / other.seconds for one, other in zip(steps, others, strict=True)]


class Program:
    """A process that builds a variant and makes its steps."""

    def __init__(self, name: str, build: Callable, arguments: list[Any]):
        context = get_context("spawn")
        self.name, self.refused = name, None
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=work, args=(there, build, arguments), daemon=True)
        self.process.start()
        there.close()

    def answer(self) -> Taken | str | None:
        """Its next message: None once it is built, then what each turn took; else what is wrong."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return "its process was killed, perhaps for want of memory"

    def turn(self) -> Taken:
        with suppress(OSError):  # of one that is gone, which its answer says
            self.pipe.send(None)
        found = self.refused or self.answer()
        if isinstance(found, str):
            raise ValueError(f"{self.name}: {found}")
        return found

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


@contextmanager
def processes(variants: dict[str, tuple]) -> Iterator[dict[str, Program]]:
    """A program for each variant, all built by then: to build one disturbs one that is timed."""
    started = {
        name: Program(name, build, arguments) for name, (build, *arguments) in variants.items()
    }
    try:
        for program in started.values():
            program.refused = program.answer()
        yield started
    finally:
        for program in started.values():
            program.close()


def work(pipe: Connection, build: Callable, arguments: list[Any]) -> None:
    """In the process: build once, then a turn whenever asked, until the pipe is closed."""
    try:
        step = build(*arguments)
        pipe.send(None)
        while True:
            pipe.recv()
            pipe.send(turn_of(step))
    except (EOFError, KeyboardInterrupt):
        return
    except ValueError as error:
        pipe.send(str(error))
    except Exception as error:  # a GPU's memory is full, or a kernel does not compile
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def turn_of(step: Callable[[], Any]) -> Taken:
    step()
    taken = [measured(step)]
    while sum(one.seconds for one in taken) < TIMED_SECONDS:
        taken.append(measured(step))
    return taken[-1]._replace(seconds=statistics.median(one.seconds for one in taken))


def measured(step: Callable[[], Any]) -> Taken:
    """What one step takes."""
    on_gpu, resident = torch.cuda.is_initialized(), 0
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


# ---- calls of kernels


class Call(NamedTuple):
    """Milliseconds of a call, of the device and of the host, which on a GPU goes on meanwhile."""

    ms: float
    host_ms: float


def timed(calls: list[Callable[[], object]], device: str) -> Call:
    """The mean of one round of calls."""
    if device == "cpu":
        began = time.perf_counter()
        for call in calls:
            call()
        ms = 1e3 * (time.perf_counter() - began) / len(calls)
        return Call(ms, ms)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(ASLEEP)
    start.record()
    began = time.perf_counter()
    for call in calls:
        call()
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return Call(start.elapsed_time(end) / len(calls), 1e3 * host / len(calls))


def timed_in_turns(
    forms: dict[str, list[Callable[[], object]]], turns: int, device: str
) -> dict[str, list[Call]]:
    """What each form's round took in each turn, after one that does not count."""
    took: dict[str, list[Call]] = {form: [] for form in forms}
    order = list(forms)
    for turn in range(turns + 1):
        for form in order:
            one = timed(forms[form], device)
            if turn:
                took[form].append(one)
        order.reverse()
    return took


def peak_flops(device: str) -> float:
    """Operations a second of a large matrix product here and now, the best of five."""
    n = PEAK_SIZE[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = torch.randn(2, n, n, device=device).to(dtype)
    (calls,) = timed_in_turns({"product": [lambda: left @ right]}, 5, device).values()
    return 2e3 * n**3 / min(one.ms for one in calls)
