"""What all benches share: how to measure time, describe the machine, parse flags, write records.

A machine may be noisy, so variants take turns, in an order that is reversed after each turn. Then
noise slows all of them alike, and ratios are computed within a turn. A warm-up turn comes first and
is not counted.

Whole training steps run in one process per variant, because a program's memory and threads are part
of the comparison. Only one process works at a time. The first step of a turn is not timed, because
it finds the caches full of another variant's arrays. Then steps are timed back to back for half a
second, but at least one, and their median is the time of the turn.

A GPU's clock is steady, but its memory may be too small for the steps of all variants together. So
on a GPU each variant makes all its turns and exits before the next one begins. Calls of kernels
take turns within one process. On a GPU they are timed between two events, after the GPU has slept
for a moment, so that the host can queue calls ahead.

A record is one JSON line in results/ that says what was measured, and on what. Records are added,
never edited. GPU records have their own files, results/gpu-NAME.jsonl. bench/gpu.sh sets two
environment variables: OUT sends records to another folder, COMMIT names the commit where there is
no git.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that benches find the project

from support.process import ROOT
from support.run import commit, provenance

T = TypeVar("T")
V = TypeVar("V")

WAIT_SECONDS = 0.02  # in this time the threads of the previous program stop spinning
TIMED_SECONDS = 0.5  # in each turn
ASLEEP = 30_000_000  # cycles, about 17 ms: longer than the host takes to queue a round of calls
RESULTS = Path(os.environ.get("OUT") or ROOT / "results")


# ---- records


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*: (.*)", text, re.M)
    name = model[1] if model else platform.processor() or platform.machine()
    vectors = torch.backends.cpu.get_cpu_capability()  # such as AVX2
    return f"{name}, {vectors}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def command_line(docstring: str, *, turns: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benches have.

    Args: turns  the default of --turns; None: the bench has no such flag
    """
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    if turns:
        parser.add_argument("--turns", type=int, default=turns, help=f"turns to measure ({turns})")
    parser.add_argument("--record", action="store_true", help="add to results/")
    return parser


def pick(names: list[str], known: Collection[str]) -> list[str]:
    """Return the given names, or all known names if none is given.

    Raises: ValueError for an unknown name; argparse has no `choices` for a list that may be empty
    """
    for name in names:
        if name not in known:
            raise ValueError(f"{name} is unknown: choose from {', '.join(known)}")
    return names or list(known)


def recorder(name: str, args: argparse.Namespace, **more: object) -> Callable[[dict], None]:
    """Return a function that prints figures and, with --record, adds them to results/NAME.jsonl.

    The commit is read now, because the first record makes the working tree dirty.

    Raises: ValueError for --device cuda if torch sees no GPU
    """
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here, choose --device cpu")
    about = {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "device": args.device,
        **provenance(),
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
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
            with path.open("a") as file:  # close it now, because the next variant may be killed
                file.write(json.dumps(about | figures) + "\n")
            print(f"recorded in {path}", file=sys.stderr, flush=True)

    return keep


def records(name: str, folder: Path = ROOT / "results") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def quartiles(values: Sequence[float], digits: int = 4) -> list[float]:
    """Return first quartile, median and third quartile; a single value is returned three times."""
    values = values if len(values) > 1 else [*values, *values]
    return [significant(q, digits) for q in statistics.quantiles(values, n=4, method="inclusive")]


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Divide turn by turn."""
    return [value / other for value, other in zip(values, others, strict=True)]


def significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


# ---- turns


def in_turns(
    variants: dict[str, V], turns: int, measure: Callable[[V], T] = lambda call: call()
) -> dict[str, list[T]]:
    """Measure all variants in each turn; returns their results, without the warm-up turn.

    Args: measure  measures a variant; by default calls it and takes what it returns
    """
    results: dict[str, list[T]] = {name: [] for name in variants}
    order = list(variants)
    for turn in range(turns + 1):
        for name in order:
            result = measure(variants[name])
            if turn:
                results[name].append(result)
        order.reverse()
    return results


# ---- steps


class Measurement(NamedTuple):
    """The time and memory that a step took.

    Bytes are what torch allocated on a GPU, without the CUDA context; 0 on a CPU.
    """

    seconds: float
    peak_bytes: int = 0
    resident_bytes: int = 0  # before the step: weights and optimizer state


def measured(step: Callable[[], object]) -> Measurement:
    on_gpu = torch.cuda.is_initialized()
    resident = 0
    if on_gpu:  # wait for the GPU to finish, here and after the step
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
    began = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return Measurement(seconds, torch.cuda.max_memory_allocated() if on_gpu else 0, resident)


def turn_of(step: Callable[[], object]) -> Measurement:
    """Make one step untimed, then time steps for half a second and return their median."""
    time.sleep(WAIT_SECONDS)
    step()
    results = [measured(step)]
    while sum(each.seconds for each in results) < TIMED_SECONDS:
        results.append(measured(step))
    return results[-1]._replace(seconds=statistics.median(each.seconds for each in results))


def take_turns(
    variants: dict[str, tuple], turns: int, device: str
) -> Iterator[tuple[list[str], dict[str, list[Measurement]]]]:
    """Yield the names of the variants that have just finished, and the results of all so far.

    On a GPU, the others continue if one variant fails.

    Args:   variants name -> (build, *arguments): a fresh process calls build(*arguments) to get the
                     function that makes a step
    Raises: ValueError naming the variants that failed, with the reason
    """
    with ExitStack() as stack:
        programs, building = {}, {}
        for name, job in variants.items():
            alone = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            programs[name] = stack.enter_context(alone)
            building[name] = alone.submit(build_step, *job)
        wait(building.values())  # building would disturb the first turn

        def turn(name: str) -> Measurement:
            try:
                building[name].result()
                return programs[name].submit(turn_of_built).result()
            except Exception as error:  # for example, GPU memory is full or a kernel won't compile
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                raise ValueError(f"{name}: {kind}{str(error).splitlines()[0]}") from error

        together = [list(variants)] if device == "cpu" else [[name] for name in variants]
        results, failed = {}, []
        for names in together:
            try:
                results |= in_turns({name: name for name in names}, turns, turn)
            except ValueError as error:
                print(f"failed: {error}", file=sys.stderr, flush=True)
                failed.append(str(error))
            else:
                yield names, results
            for name in names:
                programs[name].shutdown()
        if failed:
            raise ValueError("; ".join(failed))


def build_step(build: Callable[..., Callable], *arguments: object) -> None:
    """In a variant's process: build the step and keep it for later calls."""
    global built
    built = build(*arguments)


def turn_of_built() -> Measurement:
    return turn_of(built)


# ---- calls of kernels


class Call(NamedTuple):
    """Milliseconds that a call takes on the device, and on the host, which does not wait for it."""

    ms: float
    host_ms: float


def timed(calls: list[Callable[[], object]], device: str) -> Call:
    """Return the mean time of one round of calls."""
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
    """Return the FLOP/s of a product of square matrices, the best of four."""
    n = 8192 if device == "cuda" else 512
    square = torch.ones(n, n, dtype=dtype, device=device)
    return 2 * n**3 / min(timed([lambda: square @ square], device).ms for _ in range(4)) * 1e3
