"""Where a step's time goes: each part of a plain step, beside the time its FLOPs would need.

A part runs alone, forward and backward, on arrays of the shapes that it has in the step; the parts
take turns with whole steps of train.py in one process. What the parts leave over (residuals, the
embedding, reading the loss back, arrays that have left the cache) is the last row. The floor is the
part's matrix products at the rate of a large product, measured in the same turns: what else a part
does, reading memory for one, is not in it.

Beside it, what --ltd's draws take (as the last of 1,024 ranks, for what a rank does must not grow
with their number), and the bytes that autograd keeps for the backward pass by kept tokens.

    OMP_NUM_THREADS=2 python bench/parts.py                        # nano and 124M, as a table
    OMP_NUM_THREADS=2 python bench/parts.py --size nano --record   # and a line of results/
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from record import append, quartiles, surroundings
from step import CASES, Case, Variant, batch_of, model_of, settings_of, step_of
from torch import Tensor
from turns import measured

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import ltd
from kernels.cross_entropy import linear_cross_entropy
from kernels.rotary import rotation
from model import TokenMeta, run_plain
from support.base import runtime
from support.base.clock import StepContext
from support.step.muon import flops_of_orthogonalising
from train import assemble

BESIDES = ("draws", "whole step")  # what is measured, and no part of a plain step
SHARES = (1, 3 / 4, 1 / 2, 1 / 4, 1 / 16)  # of tokens kept


class Part(NamedTuple):
    run: Callable[[], object]
    flops: int  # of all times together
    times: int = 1  # that a step has it

    def all_times(self) -> None:
        for _ in range(self.times):
            self.run()


def parts_of(case: Case, device: str) -> dict[str, Part]:
    """The parts of one optimizer step with Muon."""
    here = runtime.start(device, "auto")
    settings = settings_of(case, Variant(None), device, compiled=False)
    model = model_of(settings, case, gelu=None)
    trainer = assemble(settings, model, here, case.rows)
    (B, T), C, L = (case.rows, case.shape.seq_len), case.shape.width, case.shape.layers
    batch = batch_of(case, packed=False).to(here.device)
    whole = step_of(trainer, batch_of(case, packed=False))
    whole()
    gradients = [parameter.clone() for parameter in model.parameters()]
    positions = torch.arange(T, device=here.device)[None]
    turns = rotation(positions, C // case.shape.heads) if settings.model.pos == "rope" else None
    meta, block = TokenMeta(positions, None, True, turns), model.h[0]
    x = torch.randn(B, T, C, device=here.device, requires_grad=True)
    above = torch.randn_like(x)

    def both_ways(forward: Callable[[], Tensor], d: Tensor | None = None) -> Callable[[], None]:
        def run() -> None:
            with here.autocast():
                y = forward()
            y.backward(d)
            block.zero_grad(set_to_none=True)
            model.wte.zero_grad(set_to_none=True)
            x.grad = None

        return run

    def head() -> Tensor:
        return linear_cross_entropy(
            x.view(B * T, C), model.wte.weight, None, batch.targets.view(-1)
        )

    def with_gradients(run: Callable[[], object]) -> Callable[[], None]:
        def step() -> None:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            run()

        return step

    adamw, muon = trainer.optimizers.parts
    linear = 6 * B * T * C
    orthogonalising = L * flops_of_orthogonalising(C, 4 * C, device)
    return {
        "attention": Part(
            both_ways(lambda: block.attn(x, meta), above), L * linear * (4 * C + T), times=L
        ),
        "MLP": Part(both_ways(lambda: block.mlp(x), above), L * linear * 8 * C, times=L),
        "norms": Part(both_ways(lambda: block.ln_1(x), above), 0, times=2 * L + 1),
        "head and loss": Part(both_ways(head), linear * case.vocab_size),
        "clipping": Part(with_gradients(lambda: trainer.optimizers.clip_gradients(1.0)), 0),
        "Muon": Part(with_gradients(muon.step), orthogonalising),
        "AdamW": Part(with_gradients(adamw.step), 0),
        "draws": Part(draws(case, device), 0),
        "whole step": Part(whole, 0),
    }


def draws(case: Case, device: str) -> Callable[[], object]:
    """A quarter of the tokens for every layer in the middle, drawn by rank 1,023 of 1,024."""
    settings = settings_of(case, Variant(None, kept_share=1 / 4), device, compiled=False)
    batch = batch_of(case, packed=False).to(torch.device(device))
    context, keep = StepContext(seed=0, step=1, progress=0.0), settings.ltd.start
    return lambda: ltd.draws(settings, context, 1023 * case.rows, batch, keep)


def megabytes_kept(case: Case, kept_share: float) -> float:
    """What autograd holds for the backward pass of one micro-batch besides the weights, in fp32."""
    settings = settings_of(case, Variant(None, kept_share=kept_share), "cpu", compiled=False)
    model, batch = model_of(settings, case, gelu=None), batch_of(case, packed=False)
    held = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    run_block = run_plain
    if settings.ltd.on:
        context = StepContext(seed=0, step=1, progress=0.0)
        run_block = ltd.run_block(settings, context, 0, batch, run_plain)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(batch, run_block=run_block)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del loss
    return sum(size for pointer, size in held.items() if pointer not in weights) / 1e6


def measure(parts: dict[str, Part], turns: int, device: str) -> tuple[dict[str, list], float]:
    """Milliseconds a step of each part in each turn, and the FLOP/s of a large product."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (1536, torch.float32)
    left, right = torch.randn(2, n, n, device=device).to(dtype)
    ms: dict[str, list[float]] = {name: [] for name in parts}
    rates = []
    for turn in range(turns + 1):  # the first warms up
        rate = 2 * n**3 / measured(lambda: left @ right).seconds
        for name, part in parts.items():
            took = measured(part.all_times).seconds
            if turn:
                ms[name].append(1e3 * took)
        rates += [rate] * (turn > 0)
    return ms, statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=CASES, nargs="+", default=["nano", "124M"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="append to results/parts.jsonl")
    flags = parser.parse_args()
    for size in flags.size:
        case = CASES[size]
        record = surroundings(flags.device) | {"bench": "parts", "size": size, "rows": case.rows}
        parts = parts_of(case, flags.device)
        ms, rate = measure(parts, flags.turns, flags.device)
        whole = statistics.median(ms["whole step"])
        print(
            f"{size}: {case.rows} x {case.shape.seq_len} tokens, V {case.vocab_size:,}; a step of"
            f" {whole:.0f} ms, products at {rate / 1e9:.0f} GFLOP/s\n\n"
            "| part | ms | of the step | floor of its products, ms |\n|---|---|---|---|"
        )
        rows = {}
        for name, values in ms.items():
            if name in BESIDES:
                continue
            floor = 1e3 * parts[name].flops / rate
            rows[name] = {"ms": quartiles(values), "floor_ms": round(floor, 2)}
            median = rows[name]["ms"][1]
            print(f"| {name} | {median:.1f} | {median / whole:.0%} | {floor:.1f} |")
        rest = whole - sum(row["ms"][1] for row in rows.values())
        print(f"| the rest | {rest:.1f} | {rest / whole:.0%} | |\n")
        drawing = statistics.median(ms["draws"])
        print(f"draws of --ltd as rank 1,023 of 1,024: {drawing:.2f} ms, {drawing / whole:.2%}")
        memory = {f"{share:g}": round(megabytes_kept(case, share), 1) for share in SHARES}
        print(f"MB kept for the backward pass, by the share of tokens kept: {memory}\n")
        if flags.record:
            record |= {"gflops": round(rate / 1e9), "step_ms": quartiles(ms["whole step"])}
            record |= {"turns": flags.turns, "parts": rows, "draws_ms": quartiles(ms["draws"])}
            append("parts", record | {"megabytes_kept": memory})


if __name__ == "__main__":
    runtime.exit_cleanly(main)
