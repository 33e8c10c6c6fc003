"""Steps of several programs in turns, each in a process of its own.

A process of its own, for a program's memory and threads are part of what is compared: nothing that
one sets up is there for another. The order is reversed after each turn, so that a noisy machine
slows all alike, and only one process works at a time.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

WAIT_SECONDS = 0.02  # until the threads of the program before have stopped spinning


def take_turns(
    variants: dict[str, tuple], turns: int, before: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Seconds of each variant's steps, after two steps of each that do not count.

    Args: variants name -> (build, *arguments): what a fresh process calls to get the function that
                   makes a step
          before   called before each turn
    """
    with processes(variants) as step_of:
        for _ in range(2):
            for step in step_of.values():
                step()
        seconds = {name: [] for name in variants}
        order = list(variants)
        for _ in range(turns):
            if before:
                before()
            for name in order:
                time.sleep(WAIT_SECONDS)
                seconds[name].append(step_of[name]())
            order.reverse()
    return seconds


@contextmanager
def processes(variants: dict[str, tuple]) -> Iterator[dict[str, Callable[[], float]]]:
    """A function for each variant that has its process make a step, and returns the seconds."""
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


def ask(name: str, pipe: Connection) -> Callable[[], float]:
    def step() -> float:
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
            pipe.send(seconds_of(step) if step else refused)
    except (EOFError, KeyboardInterrupt):
        return


def seconds_of(step: Callable[[], Any]) -> float:
    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began


def wait() -> None:
    """Until the GPU, if this process uses one, has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
