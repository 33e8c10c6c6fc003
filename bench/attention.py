"""Packed attention against a dense mask: forward and backward, documents of real lengths or of 64.

    plain     torch's causal attention without a mask, as if each row were one document
    dense     the same under a mask of each row's documents
    groups    kernels/packed_attention.py on a CPU
    triton    the same on a GPU; beside it torch's varlen_attn and compiled flex_attention

The forms take turns in one process, in an order that is reversed each time; a ratio is the median
of the ratios within a turn. A turn goes over several batches. Nothing is timed until every form
agrees with the dense one. "real" are the batches that `train.py --pack` begins with, on the
embedded corpus.

Finding where documents lie is timed by itself, as index_ms: a step does it once, and not once a
layer. "work" is the sum of the squares of the documents' lengths against that of the rows'. "peak"
is the rate of a large matrix product, measured here and now, against the operations of the seven
products of forward and backward, of visible scores alone.

    OMP_NUM_THREADS=2 python bench/attention.py --record         # a line of results/kernels.jsonl
    python bench/attention.py --device cuda --record
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peak import peak_flops, seconds
from record import append, quartiles, surroundings
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import config
from kernels.packed_attention import bounds, index_of, packed_attention
from plan import Plan
from prepare import embedded_store
from support import runtime
from support.clock import Clock
from support.token_store import Store

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
    "1.3B": Case(B=8, T=2048, H=16, D=128),  # on a GPU alone
}


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


def form_of(form: str, doc_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of q, k and v (B, T, H, D) each, for these documents; causal."""
    if form in ("dense", "groups", "triton"):
        documents = index_of(doc_ids, True, form)
        return lambda q, k, v: packed_attention(q, k, v, documents)
    start, end = bounds(doc_ids)
    if form == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        B, T = doc_ids.shape
        first = (start == torch.arange(T, device=start.device)).flatten().nonzero()[:, 0]
        ends = F.pad(first, (0, 1), value=B * T).int()
        longest = int((end - start).max())

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = (x.flatten(0, 1) for x in (q, k, v))
            y = varlen_attn(*flat, ends, ends, longest, longest, window_size=(-1, 0))
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
        attention, options = torch.compile(flex_attention), {"block_mask": mask}

    def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)

    return heads_first


def measure(case: Case, documents: list[Tensor], device: str, turns: int, peak: float) -> dict:
    torch.manual_seed(0)
    B, T, H, D = case
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = torch.randn(B, T, 3, H, D, device=device, dtype=dtype)
    q, k, v = (x.requires_grad_() for x in qkv.unbind(2))
    d = torch.randn(B, T, H, D, device=device, dtype=dtype)
    documents = [doc_ids.to(device) for doc_ids in documents]
    forms = {form: [form_of(form, doc_ids) for doc_ids in documents] for form in FORMS[device]}

    def run(functions: list[Callable]) -> list[Tensor]:
        for function in functions:
            out = function(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), d)
        return [out, *gradients]

    real = (documents[-1] >= 0)[:, :, None, None]
    d = d * real  # what nobody reads has no gradient
    expected = run(forms["dense"])
    for form, functions in forms.items():
        for one, other in zip(run(functions), expected, strict=True):
            error = (((one - other) * real).double().norm() / other.double().norm()).item()
            if form != "plain" and not error < 4 * torch.finfo(dtype).eps ** 0.75:
                raise ValueError(f"{form} differs by {error:.1e} of the norm: nothing is timed")
    took: dict[str, list[float]] = {form: [] for form in forms}
    order = list(forms)
    for _ in range(turns):
        for form in order:
            took[form].append(seconds(partial(run, forms[form]), device) / BATCHES)
        order.reverse()
    squares = [(end - start).clamp(min=0).sum().item() for start, end in map(bounds, documents)]
    work = statistics.mean(squares) / (B * T * T)
    figures: dict = {"work": round(work, 4), "forms": {}}
    for form, values in took.items():
        flops = 3.5 * 2 * B * H * D * T * T * (1 if form == "plain" else work)
        figure = {"ms": quartiles([1e3 * value for value in values])}
        for to in ("dense", "plain"):
            pairs = zip(values, took[to], strict=True)
            figure[f"of_{to}"] = quartiles([one / other for one, other in pairs])
        figure["percent_of_peak"] = round(100 * flops / statistics.median(values) / peak, 1)
        if form in ("dense", "groups", "triton"):
            index = partial(index_of, documents[0], True, form)
            figure["index_ms"] = quartiles([1e3 * seconds(index, device) for _ in range(turns)])
        figures["forms"][form] = figure
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=CASES, action="append", help="(default: those that fit)")
    parser.add_argument("--turns", type=int, default=11, help="of each form (11)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/kernels.jsonl")
    args = parser.parse_args()
    if args.turns < 2:
        raise ValueError(f"--turns {args.turns}: choose 2 or more")
    record = surroundings(args.device) | {"bench": "attention", "kernel": "packed_attention"}
    peak = peak_flops(args.device)
    record |= {"peak_tflops": round(peak / 1e12, 3), "turns": args.turns, "sizes": {}}
    print(f"{record['hardware']}, {record['threads']} threads, {record['peak_tflops']} TFLOP/s")
    for size in args.size or (CASES if args.device == "cuda" else list(CASES)[:3]):
        case = CASES[size]
        record["sizes"][size] = case._asdict()
        for name, documents in DOCUMENTS.items():
            figures = measure(case, documents(case), args.device, args.turns, peak)
            record["sizes"][size][name] = figures
            print(f"\n{size}, {name}, work {figures['work']:.2f}; medians [quartiles]")
            for form, figure in figures["forms"].items():
                low, median, high = figure["of_dense"]
                print(
                    f"{form:>8} {figure['ms'][1]:9.2f} ms  {median:.3f} [{low:.3f}, {high:.3f}] of"
                    f" dense, {figure['of_plain'][1]:.3f} of plain,"
                    f" {figure['percent_of_peak']} % of peak",
                    flush=True,
                )
    if args.record:
        append("kernels", record)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
