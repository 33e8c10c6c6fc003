"""The cross-entropy kernel against its definition: time, memory, and how near it is to the peak.

The kernel of token dropping, which only copies, has a bench of its own: gather_scatter.py.

The cross-entropy of a linear head is measured forward and backward, in float32, on a GPU under
autocast to bfloat16. Its forms take turns in one process, in an order that is reversed each time,
so that a noisy machine slows all alike; a ratio is the median of the ratios within a turn. On a GPU
the definition through torch.compile is a form too.
Nothing is timed until every form's loss and gradients agree with the definition's.

"peak" is the rate of a large matrix product of the same dtype, measured here and now, against the
6 N C V operations that both forms need. "GB moved" counts every pass that a form makes over an
array, mostly over its N V logits; where a chunk of them stays in a cache, less goes to memory.
"GB memory" is what a form takes beyond its inputs and gradients; on a CPU in a process of its own.

    OMP_NUM_THREADS=2 python bench/loss.py                    # some minutes
    OMP_NUM_THREADS=2 python bench/loss.py --record           # and a line of results/
    python bench/loss.py --device cuda --record
"""

import argparse
import multiprocessing
import re
import statistics
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from record import append, quartiles, surroundings
from torch import Tensor
from turns import peak_flops, timed_in_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

from kernels.cross_entropy import IGNORE, linear_cross_entropy
from support.base.runtime import exit_cleanly

FORMS = {"cpu": ("reference", "chunked"), "cuda": ("reference", "chunked", "triton", "compiled")}
# Bytes that pass for each of N V logits, counted in the code. On a CPU the reference goes 9 times
# over them in float32, the chunked form 11 times. On a GPU all write them in bfloat16, and two
# products read their gradients so: 6 bytes. The reference makes them float32 (6) and their
# logarithms (8), goes back through these (4 + 12) and to bfloat16 (6); the chunked form reads or
# writes them 10 times in float32 and twice more in bfloat16; the kernel reads them twice and writes
# once.
LOGIT_BYTES = {
    "cpu": {"reference": 36, "chunked": 44},
    "cuda": {"reference": 42, "chunked": 50, "triton": 12},
}


class Case(NamedTuple):
    """A micro-batch of one size of model."""

    N: int  # rows of x: tokens at once
    C: int
    V: int


CASES = {
    "cpu": {"nano": Case(N=4096, C=128, V=4160), "124M": Case(N=4096, C=768, V=50304)},
    "cuda": {
        "124M": Case(N=32768, C=768, V=50304),
        "350M": Case(N=32768, C=1024, V=50304),
        "1.3B": Case(N=16384, C=2048, V=50304),
    },
}
TOY = {"toy": Case(N=64, C=8, V=96)}  # does it work?


def inputs_of(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, C) and weight (V, C), which want gradients, and targets (N,), a tenth ignored."""
    torch.manual_seed(0)
    x = torch.randn(case.N, case.C, device=device)
    weight = torch.randn(case.V, case.C, device=device) / case.C**0.5
    targets = torch.randint(case.V, (case.N,), device=device)
    targets[torch.rand(case.N, device=device) < 0.1] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def forward_and_backward(form: str, x: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        if form == "compiled":
            loss = compiled()(x, weight, None, targets, impl="reference")
        else:
            loss = linear_cross_entropy(x, weight, None, targets, impl=form)
    return [loss, *torch.autograd.grad(loss, (x, weight))]


@cache
def compiled() -> Callable[..., Tensor]:
    """Once for all turns, and only where it is asked for."""
    return torch.compile(linear_cross_entropy, dynamic=False)


def check(form: str, x: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Refuse to time a form that computes something else than the definition in this dtype."""
    expected = forward_and_backward("reference", x, weight, targets)
    eps = torch.finfo(torch.bfloat16 if x.is_cuda else x.dtype).eps
    result = forward_and_backward(form, x, weight, targets)
    for name, one, other in zip(("loss", "dx", "dweight"), result, expected, strict=True):
        error = ((one.double() - other.double()).norm() / other.double().norm()).item()
        if not error < 4 * eps**0.75:
            raise ValueError(f"{form}: {name} differs by {error:.1e} of its norm: nothing is timed")


def memory_bytes(case: Case, form: str, device: str) -> int:
    """Peak memory of one call, beyond its inputs and gradients."""
    if device == "cuda":
        return peak_of_one_call(case, form, device)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_of_one_call, (case, form, device))


def peak_of_one_call(case: Case, form: str, device: str) -> int:
    """As memory_bytes, in this process; on a CPU by its resident pages, so to a few MB."""
    forward_and_backward(form, *inputs_of(Case(N=8, C=8, V=8), device))  # what torch loads late
    x, weight, targets = inputs_of(case, device)
    gradients = sum(t.numel() * t.element_size() for t in (x, weight))

    def high_water() -> int:
        if device == "cuda":
            return torch.cuda.max_memory_allocated()
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = high_water()
    forward_and_backward(form, x, weight, targets)
    return max(high_water() - before - gradients, 0)


def measure(
    case: Case, device: str, turns: int, peak: float, forms: tuple[str, ...]
) -> dict[str, dict]:
    """Figures of each form."""
    inputs = inputs_of(case, device)
    for form in forms[1:]:
        check(form, *inputs)
    calls = {form: [partial(forward_and_backward, form, *inputs)] for form in forms}
    took = {
        form: [one.ms for one in turn]
        for form, turn in timed_in_turns(calls, turns, device).items()
    }
    figures = {}
    for form in forms:
        ratios = [a / b for a, b in zip(took[form], took["reference"], strict=True)]
        matrices = 3 * (case.N + case.V) * case.C * inputs[0].element_size()
        flops = 6 * case.N * case.C * case.V
        figures[form] = {
            "ms": quartiles(took[form]),
            "ratio": quartiles(ratios),
            "percent_of_peak": round(1e5 * flops / statistics.median(took[form]) / peak, 1),
            "memory_gb": round(memory_bytes(case, form, device) / 1e9, 3),
        }
        if form in LOGIT_BYTES[device]:  # what a compiler fuses is not counted in the code
            logits = LOGIT_BYTES[device][form] * case.N * case.V
            figures[form]["gb_moved"] = round((logits + matrices) / 1e9, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    known = CASES["cpu"] | CASES["cuda"] | TOY
    parser.add_argument("--size", choices=known, nargs="+", help="(default: the device's)")
    parser.add_argument("--turns", type=int, default=7, help="of each form (7)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/kernels.jsonl")
    args = parser.parse_args()
    if args.turns < 2:
        raise ValueError(f"--turns {args.turns}: choose 2 or more")
    record = surroundings(args.device) | {"bench": "kernels", "kernel": "cross_entropy"}
    peak = peak_flops(args.device)
    record |= {"peak_tflops": round(peak / 1e12, 3), "turns": args.turns}
    print(f"{record['hardware']}, {record['threads']} threads, {record['peak_tflops']} TFLOP/s")
    for size in args.size or CASES[args.device]:
        case = (known | CASES[args.device])[size]
        figures = measure(case, args.device, args.turns, peak, FORMS[args.device])
        print(f"\n{size}: N {case.N:,}, C {case.C:,}, V {case.V:,}; medians [quartiles]")
        for form, figure in figures.items():
            low, median, high = figure["ms"]
            print(
                f"{form:>10} {median:9.2f} ms [{low:.2f}, {high:.2f}]"
                f"  {figure['ratio'][1]:.2f} of reference, {figure['percent_of_peak']} % of peak,"
                f" {figure.get('gb_moved', '?')} GB moved, {figure['memory_gb']} GB memory",
                flush=True,
            )
        if args.record:  # a record a size, so that one which is cut off leaves the others'
            append("kernels", record | {"sizes": {size: case._asdict() | {"forms": figures}}})


if __name__ == "__main__":
    exit_cleanly(main)
