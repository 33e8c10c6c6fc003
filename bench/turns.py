"""Steps of several programs in turns, each in a process of its own.

A process of its own, for a program's memory and threads are part of what is compared: nothing that
one sets up is there for another. Only one works at a time. The first step of a turn is not timed:
it finds the caches full of another's arrays, as no step of a run does. Then steps are timed back to
back, as a run makes them, for half a second and at least one; their median is what the turn took.
The order is reversed after each turn, so that a noisy machine slows all alike.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

WAIT_SECONDS = 0.02  # until the threads of the program before have stopped spinning
TIMED_SECONDS = 0.5  # of a turn


class Taken(NamedTuple):
    """What one step took. Bytes are torch's on a GPU, without the context; 0 on a CPU."""

    seconds: float
    peak_bytes: int = 0
    resident_bytes: int = 0  # before the step: weights and the optimizer's state


def take_turns(variants: dict[str, tuple], turns: int) -> dict[str, list[Taken]]:
    """What each variant's steps took, after a turn that does not count.

    Args: variants name -> (build, *arguments): what a fresh process calls to get the function that
                   makes a step
    """
    with processes(variants) as turn_of_each:
        return alternated(turn_of_each, turns)


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


@contextmanager
def processes(variants: dict[str, tuple]) -> Iterator[dict[str, Callable[[], Taken]]]:
    """A function for each variant that has its process make a step."""
    context = get_context("spawn")
    started = {}
    for name, (build, *arguments) in variants.items():
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, build, arguments), daemon=True)
        process.start()
        there.close()
        started[name] = (process, here)
    try:
        yield {name: ask(name, here) for name, (_, here) in started.items()}
    finally:
        for process, here in started.values():
            here.close()
            process.join()


def ask(name: str, pipe: Connection) -> Callable[[], Taken]:
    def step() -> Taken:
        pipe.send(None)
        try:
            answer = pipe.recv()
        except EOFError:
            answer = "its process was killed, perhaps for want of memory"
        if isinstance(answer, str):
            raise ValueError(f"{name}: {answer}")
        return answer

    return step


def work(pipe: Connection, build: Callable, arguments: list[Any]) -> None:
    """In the process: build once, then a step whenever asked, until the pipe is closed."""
    try:
        step = build(*arguments)
    except ValueError as error:
        step, refused = None, str(error)
    try:
        while True:
            pipe.recv()
            pipe.send(turn_of(step) if step else refused)
    except (EOFError, KeyboardInterrupt):
        return


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
