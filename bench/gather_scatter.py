"""Token dropping's copies against torch.gather and torch.scatter: time, bytes, percent of the peak.

Three operations on a batch of hidden states: `gather` and `scatter`, forward alone, and `layer`,
both of them around a layer that does nothing, forward and backward. Their forms:

    reference   torch.gather and torch.scatter, under autograd
    torch       kernels/token_drop.py on a CPU; a layer is its split and merge
    triton      the same on a GPU
    compiled    index_select and index_copy of whole rows through torch.compile, on a GPU; each of
                the two by itself, as a layer stands between them

The forms take turns in one process, in an order that is reversed each time; a ratio is the median
of the ratios within a turn. The peak is a form as well, `copy`: a plain copy that moves as many
bytes as the operation must, which is each kept or written state once in and once out. Nothing is
timed until every form agrees bitwise with the reference.

On a GPU a call gets its inputs cold, out of sets that exceed the cache together, and `ms` is the
GPU's own time; `host_ms` is the time the host takes to call. On a CPU the inputs are warm.

    OMP_NUM_THREADS=2 python bench/gather_scatter.py             # under a minute
    OMP_NUM_THREADS=2 python bench/gather_scatter.py --record    # and a line of results/
    python bench/gather_scatter.py --device cuda --record        # some minutes, most to compile
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from record import append, quartiles, significant, surroundings
from torch import Tensor
from turns import timed_in_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

from kernels import token_drop
from kernels.token_drop import gather, merge, reference_gather, reference_scatter, scatter, split
from support.base.runtime import exit_cleanly

COLD_BYTES = 256 << 20  # of the sets together: five times the 50 MB of cache that an H100 has
MOST_SETS = 32


class Shape(NamedTuple):
    """A batch of hidden states."""

    B: int
    T: int
    C: int


SHAPES = {
    "cpu": {"nano": Shape(B=8, T=256, C=128), "wider": Shape(B=8, T=512, C=256)},
    "cuda": {
        "124M": Shape(B=32, T=1024, C=768),
        "350M": Shape(B=32, T=1024, C=1024),
        "1.3B": Shape(B=16, T=2048, C=2048),
    },
}
TOY = {"toy": Shape(B=2, T=16, C=8)}  # does it work?


class Inputs(NamedTuple):
    x: Tensor  # (B, T, C), wants a gradient
    kept: Tensor  # (B, K)
    y: Tensor  # (B, K, C)
    d: Tensor  # (B, T, C), the gradient from above


def inputs_of(shape: Shape, K: int, device: str) -> Inputs:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    B, T, C = shape
    x, y, d = (torch.randn(B, n, C, device=device, dtype=dtype) for n in (T, K, T))
    kept = torch.rand(B, T, device=device).topk(K, dim=1).indices.sort(dim=1).values
    return Inputs(x.requires_grad_(), kept, y, d)


def row_moves(operation: str, shape: Shape, K: int) -> int:
    """How many states an operation must read and write: what it takes in, and what it gives out.

    Example:  of 4 positions 1 is kept: gather 2, scatter 8, layer (2 + 8) forward and as many back
    """
    moves = {"gather": 2 * K, "scatter": 2 * shape.T, "layer": 4 * (K + shape.T)}
    return shape.B * moves[operation]


def forward_and_backward(layer: Callable[[Tensor, Tensor], Tensor], one: Inputs) -> Tensor:
    return torch.autograd.grad(layer(one.x, one.kept), one.x, one.d)[0]


def take_rows(x: Tensor, kept: Tensor) -> Tensor:
    return x.flatten(0, 1).index_select(0, numbers_of_rows(x, kept)).view(*kept.shape, -1)


def put_rows(x: Tensor, kept: Tensor, y: Tensor) -> Tensor:
    rows = x.flatten(0, 1).index_copy(0, numbers_of_rows(x, kept), y.flatten(0, 1))
    return rows.view(x.shape)


def numbers_of_rows(x: Tensor, kept: Tensor) -> Tensor:
    """Of kept positions (B, K) among all B T."""
    B, T, _ = x.shape
    return (kept + T * torch.arange(B, device=x.device)[:, None]).flatten()


def calls_of(form: str, operation: str) -> Callable[[Inputs], Tensor]:
    """What is timed, a function of one set of inputs."""
    if form in ("reference", "compiled"):
        take, put = reference_gather, reference_scatter
        if form == "compiled":
            take, put = (torch.compile(f, dynamic=False) for f in (take_rows, put_rows))

        def layer(x: Tensor, kept: Tensor) -> Tensor:
            return put(x, kept, take(x, kept))
    else:

        def take(x: Tensor, kept: Tensor) -> Tensor:
            return gather(x, kept, form)

        def put(x: Tensor, kept: Tensor, y: Tensor) -> Tensor:
            return scatter(x, kept, y, form)

        def layer(x: Tensor, kept: Tensor) -> Tensor:
            kept_states, rest = split(x, kept, form)
            return merge(rest, kept, kept_states, form)

    if operation == "layer":
        return lambda one: forward_and_backward(layer, one)
    if operation == "gather":
        return lambda one: take(one.x.detach(), one.kept)
    return lambda one: put(one.x.detach(), one.kept, one.y)


def copy_of(moved: int, sets: int, device: str) -> list[Callable[[], object]]:
    """Plain copies that read half of the bytes and write the other half, one for each set."""
    target = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    sources = [torch.ones_like(target) for _ in range(sets)]
    return [lambda source=source: target.copy_(source) for source in sources]


def forms_on(device: str) -> list[str]:
    if device == "cpu":
        return ["reference", "torch"]
    triton = ["triton", "compiled"] if token_drop.triton is not None else []  # both need it
    return ["reference", "torch", *triton]


def measure(operation: str, shape: Shape, K: int, device: str, turns: int) -> dict:
    """Figures of the copy and of each form."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.compiler.reset()  # else the ninth shape would run as it is, uncompiled
    one = inputs_of(shape, K, device)
    moved = row_moves(operation, shape, K) * shape.C * one.x.element_size()
    sets = min(MOST_SETS, 1 + COLD_BYTES // moved) if device == "cuda" else 1
    inputs = [one, *(inputs_of(shape, K, device) for _ in range(sets - 1))]

    functions = {form: calls_of(form, operation) for form in forms_on(device)}
    expected = functions["reference"](one)
    for form, function in functions.items():
        if not function(one).equal(expected):
            raise ValueError(f"{operation}, {form}: differs from the reference: nothing is timed")
    rounds = {"copy": copy_of(moved, sets, device)}
    for form, function in functions.items():
        rounds[form] = [lambda f=function, one=one: f(one) for one in inputs]

    took = timed_in_turns(rounds, turns, device)
    peak = statistics.median(one.ms for one in took["copy"])
    forms = {}
    for form, calls in took.items():
        ms = [one.ms for one in calls]
        pairs = zip(calls, took["reference"], strict=True)
        forms[form] = {
            "ms": quartiles(ms),
            "host_ms": quartiles([one.host_ms for one in calls]),
            "ratio": quartiles([one.ms / other.ms for one, other in pairs]),
            "percent_of_peak": round(100 * peak / statistics.median(ms), 1),
        }
    gb_per_s = significant(moved / peak / 1e6, 4)
    return {"bytes_moved": moved, "peak_gb_per_s": gb_per_s, "forms": forms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    known = SHAPES["cpu"] | SHAPES["cuda"] | TOY
    parser.add_argument("--size", choices=known, nargs="+", help="(default: the device's)")
    parser.add_argument("--turns", type=int, default=21, help="of each form (21)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/kernels.jsonl")
    args = parser.parse_args()
    if args.turns < 2:
        raise ValueError(f"--turns {args.turns}: choose 2 or more")
    about = surroundings(args.device) | {"bench": "kernels", "kernel": "token_drop"}
    about |= {"turns": args.turns, "triton": getattr(token_drop.triton, "__version__", None)}
    print(f"{about['hardware']}, {about['threads']} threads; medians [quartiles]")
    for name in args.size or SHAPES[args.device]:
        shape = known[name]
        for K in (shape.T // 4, shape.T // 2, 3 * shape.T // 4):
            for operation in ("gather", "scatter", "layer"):
                figures = measure(operation, shape, K, args.device, args.turns)
                case = shape._asdict() | {"size": name, "K": K, "operation": operation}
                print_case(case, figures)
                if args.record:
                    append("kernels", about | {"cases": [case | figures]})


def print_case(case: dict, figures: dict) -> None:
    B, T, C, K = (case[letter] for letter in "BTCK")
    mb = figures["bytes_moved"] / 1e6
    print(
        f"\n{case['operation']} of ({B}, {T}, {C}), K {K}: {mb:.2f} MB moved,"
        f" which a plain copy does at {figures['peak_gb_per_s']:g} GB/s"
    )
    for form, figure in figures["forms"].items():
        low, median, high = figure["ms"]
        print(
            f"{form:>10} {median:9.4f} ms [{low:.4f}, {high:.4f}]"
            f"  {figure['ratio'][1]:.2f} of reference, {figure['percent_of_peak']} % of peak,"
            f" host {figure['host_ms'][1]:.4f} ms",
            flush=True,
        )


if __name__ == "__main__":
    exit_cleanly(main)
