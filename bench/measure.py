"""What all benches share: how they take time, the machine they describe, flags and records.

On a noisy machine variants alternate and the order is reversed after each turn, so that noise slows
all of them alike; ratios are taken within a turn. A turn that is not counted comes first.

Whole steps are made in a process for each variant, because a program's memory and threads are part
of what is compared. Only one process works at a time. The first step of its turn is not timed: it
finds the caches full of another variant's arrays. Then steps are timed back to back for half a
second, one at least, and their median is what the turn took.

A GPU's clock is steady, but its memory may not hold what all variants need in a step: there each
makes all its turns and leaves before the next one begins. Calls of kernels take turns within one
process. On a GPU they are timed between two events, and it sleeps first, so that the host is ahead.

A record is one JSON line in results/: what was measured, and on what. Records are added, never
edited. Those of a GPU are kept apart, in results/gpu-NAME.jsonl. bench/gpu.sh sends records to
another folder (OUT) and names the commit (COMMIT) where there is no git.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from pprint import pformat
from typing import NamedTuple, TypeVar

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for every bench: what is measured

from support.run import commit, provenance
from support.runtime import ROOT

T = TypeVar("T")
V = TypeVar("V")

WAIT_SECONDS = 0.02  # until the threads of the previous program have stopped spinning
TIMED_SECONDS = 0.5  # of a turn
ASLEEP = 30_000_000  # cycles, some 17 ms: longer than the host takes for a round of calls
RESULTS = Path(os.environ.get("OUT") or ROOT / "results")


# ---- records


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*: (.*)", text, re.M)
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def command_line(docstring: str, *, turns: int | None = None) -> argparse.ArgumentParser:
    """The flags that all benches have.

    Args: turns  the default of --turns; None where a bench has no such flag
    """
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    if turns:
        parser.add_argument("--turns", type=int, default=turns, help=f"of each variant ({turns})")
    parser.add_argument("--record", action="store_true", help="add to results/")
    return parser


def pick(names: list[str], known: Collection[str]) -> list[str]:
    """The names that an argument of any number gave, or all.

    Raises: ValueError for one that is not known: argparse cannot have choices where none is named
    """
    for name in names:
        if name not in known:
            raise ValueError(f"{name} is unknown: choose from {', '.join(known)}")
    return names or list(known)


def recorder(name: str, args: argparse.Namespace, **more: object) -> Callable[[dict], None]:
    """A function that prints figures, and adds them to results/NAME.jsonl if --record is given.

    The commit is read now: the first record makes the working tree dirty.

    Raises: ValueError for cuda where torch sees no GPU
    """
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here, choose --device cpu")
    about = {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "device": args.device,
        **provenance(),
        "numpy": np.__version__,
        "commit": os.environ.get("COMMIT") or commit(),
        "bench": name,
        **more,
    }
    print(f"{about['hardware']}, {about['threads']} threads")

    def keep(figures: dict) -> None:
        print(pformat(figures, width=100, compact=True, sort_dicts=False), flush=True)
        if args.record:
            path = RESULTS / f"{'gpu-' * on_gpu}{name}.jsonl"
            with path.open("a") as file:  # closed at once, as the next variant may be killed
                file.write(json.dumps(about | figures) + "\n")
            print(f"recorded in {path}", file=sys.stderr, flush=True)

    return keep


def records(name: str, folder: Path = ROOT / "results") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def quartiles(values: Sequence[float], digits: int = 4) -> list[float]:
    """First quartile, median, third quartile; three times the value if there is only one."""
    values = values if len(values) > 1 else [*values, *values]
    return [significant(q, digits) for q in statistics.quantiles(values, n=4, method="inclusive")]


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [value / other for value, other in zip(values, others, strict=True)]


def significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


# ---- turns


def in_turns(
    variants: dict[str, V], turns: int, measure: Callable[[V], T] = lambda call: call()
) -> dict[str, list[T]]:
    """Measure all variants in each turn; what each gave, without the first turn.

    Args: measure  a variant: by default what a call of it returns
    """
    taken: dict[str, list[T]] = {name: [] for name in variants}
    order = list(variants)
    for turn in range(turns + 1):
        for name in order:
            result = measure(variants[name])
            if turn:
                taken[name].append(result)
        order.reverse()
    return taken


# ---- steps


class Taken(NamedTuple):
    """What one step took, or a command.

    Bytes of a step are torch's on a GPU, without the context; 0 on a CPU. Those of a command are
    resident, with all that it started; on a GPU what the device lost to it.
    """

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

        together = [list(variants)] if device == "cpu" else [[name] for name in variants]
        taken, failed = {}, []
        for names in together:
            try:
                taken |= in_turns({name: name for name in names}, turns, turn)
            except ValueError as error:
                print(f"failed: {error}", file=sys.stderr, flush=True)
                failed.append(str(error))
            else:
                yield names, taken
            for name in names:
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


def product_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a product of square matrices, the best of three."""
    n = 8192 if device == "cuda" else 512
    square = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n**3 / min(timed([lambda: square @ square], device).ms for _ in range(4)) * 1e3
