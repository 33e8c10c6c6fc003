"""Packed attention against a dense mask: forward and backward, documents of real lengths or of 64.

    plain     torch's causal attention without a mask, as if each row were one document
    dense     the same under a mask of each row's documents
    groups    kernels/packed_attention.py on a CPU
    triton    the same on a GPU; beside it torch's varlen_attn and compiled flex_attention

The forms take turns in one process, in an order that is reversed each time; a ratio is the median
of the ratios within a turn. A turn goes over several batches. A form is timed if it agrees with the
dense one; one that does not, or that this torch does not have, is named, and the others go on.
"real" are the batches that `train.py --pack` begins with, on the embedded corpus.

Finding where documents lie is timed by itself, as index_ms: a step does it once, and not once a
layer. "work" is the sum of the squares of the documents' lengths against that of the rows'. "peak"
is the rate of a large matrix product, measured here and now, against the operations of the seven
products of forward and backward, of visible scores alone.

    OMP_NUM_THREADS=2 python bench/attention.py --record         # a line of results/kernels.jsonl
    python bench/attention.py --device cuda --record
"""

import argparse
import inspect
import statistics
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from record import append, quartiles, surroundings
from torch import Tensor
from turns import peak_flops, timed_in_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import config
from kernels.packed_attention import bounds, index_of, packed_attention
from plan import Plan
from prepare import embedded_store
from support.base import runtime
from support.base.clock import Clock
from support.text.store import Store

FORMS = {
    "cpu": ("dense", "plain", "groups"),
    "cuda": ("dense", "plain", "triton", "varlen", "flex"),
}
BATCHES = 4  # in a turn


class Case(NamedTuple):
    """A micro-batch of one size of model."""

    B: int
    T: int
    H: int
    D: int


CASES = {
    "nano": Case(B=8, T=256, H=4, D=32),
    "12x256": Case(B=4, T=512, H=8, D=32),
    "124M": Case(B=2, T=1024, H=12, D=64),
    "1.3B": Case(B=16, T=2048, H=16, D=128),  # on a GPU alone
    "toy": Case(B=2, T=64, H=2, D=16),  # does it work?
}
SIZES = {"cpu": ("nano", "12x256", "124M"), "cuda": ("124M", "1.3B")}
TOKENS_ON_GPU = 32_768  # of a batch: with fewer the host would be measured


def real_documents(case: Case) -> list[Tensor]:
    """doc_ids (B, T) of the first batches of a packed run."""
    flags = f"--pack --seq-len {case.T} --batch-tokens {case.B * case.T} --tokens 1B"
    settings = config.build(config.parse(flags.split()))
    plan = Plan(settings, Store.open(embedded_store("pd4k")), None, runtime.start("cpu", "fp32"))
    clock, found = Clock(), []
    for _ in range(BATCHES):
        step = plan(clock)
        found.append(step.batch.with_documents().doc_ids)
        clock = step.after
    return found


def pieces_of_64(case: Case) -> list[Tensor]:
    return BATCHES * [(torch.arange(case.T) // 64).repeat(case.B, 1)]


DOCUMENTS = {"real": real_documents, "pieces of 64": pieces_of_64}


@cache
def compiled(function: Callable) -> Callable:
    """Once for all batches."""
    return torch.compile(function, dynamic=False)


def form_of(form: str, doc_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of q, k and v (B, T, H, D) each, for these documents; causal."""
    if form in ("dense", "groups", "triton"):
        documents = index_of(doc_ids, True, form)
        return lambda q, k, v: packed_attention(q, k, v, documents)
    start, end = bounds(doc_ids)
    if form == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.10 has a flag, later ones have a window
        has_window = "window_size" in inspect.signature(varlen_attn).parameters
        causal = {"window_size": (-1, 0)} if has_window else {"is_causal": True}
        B, T = doc_ids.shape
        first = (start == torch.arange(T, device=start.device)).flatten().nonzero()[:, 0]
        ends = F.pad(first, (0, 1), value=B * T).int()
        longest = int((end - start).max())

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = (x.flatten(0, 1) for x in (q, k, v))
            y = varlen_attn(*flat, ends, ends, longest, longest, **causal)
            return y.view(q.shape)

        return varlen
    options = {"is_causal": True}
    attention = F.scaled_dot_product_attention
    if form == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (start[b, q] <= k) & (k <= q)

        B, T = doc_ids.shape
        mask = create_block_mask(visible, B, None, T, T, device=doc_ids.device)
        attention, options = compiled(flex_attention), {"block_mask": mask}

    def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    return heads_first


def measure(case: Case, documents: list[Tensor], device: str, turns: int, peak: float) -> dict:
    torch.manual_seed(0)
    if device == "cuda":
        torch.compiler.reset()  # else what is compiled for the ninth shape is not compiled
    B, T, H, D = case
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = torch.randn(B, T, 3, H, D, device=device, dtype=dtype)
    q, k, v = (x.requires_grad_() for x in qkv.unbind(2))
    d = torch.randn(B, T, H, D, device=device, dtype=dtype)
    documents = [doc_ids.to(device) for doc_ids in documents]
    real = (documents[-1] >= 0)[:, :, None, None]
    d = d * real  # what nobody reads has no gradient

    def run(function: Callable) -> list[Tensor]:
        out = function(q, k, v)
        return [out, *torch.autograd.grad(out, (q, k, v), d)]

    expected = run(form_of("dense", documents[-1]))
    rounds: dict[str, list[Callable]] = {}
    figures: dict = {"forms": {}}
    for form in FORMS[device]:
        try:
            functions = [form_of(form, doc_ids) for doc_ids in documents]
            for one, other in zip(run(functions[-1]), expected, strict=True):
                error = (((one - other) * real).float().norm() / other.float().norm()).item()
                if form != "plain" and not error < 4 * torch.finfo(dtype).eps ** 0.75:
                    raise ValueError(f"it differs by {error:.1e} of the norm")
        except Exception as error:  # whatever a torch of another version says
            figures["forms"][form] = {"error": str(error).splitlines()[0]}
        else:
            rounds[form] = [partial(run, function) for function in functions]
    took = {
        form: [one.ms for one in calls]
        for form, calls in timed_in_turns(rounds, turns, device).items()
    }
    squares = [(end - start).clamp(min=0).sum().item() for start, end in map(bounds, documents)]
    work = statistics.mean(squares) / (B * T * T)
    figures["work"] = round(work, 4)
    for form, values in took.items():
        flops = 3.5 * 2 * B * H * D * T * T * (1 if form == "plain" else work)
        figure = {"ms": quartiles(values)}
        for to in ("dense", "plain"):
            pairs = zip(values, took[to], strict=True)
            figure[f"of_{to}"] = quartiles([one / other for one, other in pairs])
        figure["percent_of_peak"] = round(1e5 * flops / statistics.median(values) / peak, 1)
        if form in ("dense", "groups", "triton"):
            index = {form: [partial(index_of, documents[0], True, form)]}
            (calls,) = timed_in_turns(index, turns, device).values()
            figure["index_ms"] = quartiles([max(one) for one in calls])  # some of it on the host
        figures["forms"][form] = figure
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=CASES, nargs="+", help="(default: the device's)")
    parser.add_argument("--turns", type=int, default=11, help="of each form (11)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/kernels.jsonl")
    args = parser.parse_args()
    if args.turns < 2:
        raise ValueError(f"--turns {args.turns}: choose 2 or more")
    record = surroundings(args.device) | {"bench": "attention", "kernel": "packed_attention"}
    peak = peak_flops(args.device)
    record |= {"peak_tflops": round(peak / 1e12, 3), "turns": args.turns}
    print(f"{record['hardware']}, {record['threads']} threads, {record['peak_tflops']} TFLOP/s")
    wrong = []
    for size in args.size or SIZES[args.device]:
        case = CASES[size]
        if args.device == "cuda":
            case = case._replace(B=TOKENS_ON_GPU // case.T)
        for name, documents in DOCUMENTS.items():
            figures = measure(case, documents(case), args.device, args.turns, peak)
            print(f"\n{size}, {name}, work {figures['work']:.2f}; medians [quartiles]")
            for form, figure in figures["forms"].items():
                if "error" in figure:
                    wrong.append(f"{form}: {figure['error']}")
                    print(f"{form:>8} not timed: {figure['error']}", flush=True)
                    continue
                low, median, high = figure["of_dense"]
                print(
                    f"{form:>8} {figure['ms'][1]:9.2f} ms  {median:.3f} [{low:.3f}, {high:.3f}] of"
                    f" dense, {figure['of_plain'][1]:.3f} of plain,"
                    f" {figure['percent_of_peak']} % of peak",
                    flush=True,
                )
            if args.record:
                append("kernels", record | {"sizes": {size: case._asdict() | {name: figures}}})
    if wrong:
        raise ValueError(f"not all forms were timed: {wrong[0]}")


if __name__ == "__main__":
    runtime.exit_cleanly(main)
