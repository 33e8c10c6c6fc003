"""Where a step's time goes: each part of a plain step, beside the time its FLOPs would need.

A part runs alone, forward and backward, on arrays of the shapes that it has in the step; the parts
take turns with whole steps of train.py in one process. What the parts leave over (residuals, the
embedding, reading the loss back, arrays that have left the cache) is the last row. The floor is the
part's matrix products at the rate of a large product; what else a part does, such as reading
memory, is not in it.

Beside it: the time of --ltd's draws (as the last of 1,024 ranks, for what a rank does must not grow
with their number), and the bytes that autograd keeps for the backward pass by kept tokens.

    OMP_NUM_THREADS=2 python bench/parts.py                        # nano and 124M, as a table
    OMP_NUM_THREADS=2 python bench/parts.py --size nano --record   # and a line of results/
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from record import command_line, quartiles, recorder
from step import CASES, Case, Variant, model_of, steps_of, trainer_of
from torch import Tensor
from turns import in_turns, measured, peak_flops

import ltd
from kernels.cross_entropy import linear_cross_entropy
from kernels.rotary import rotation
from model import TokenMeta, run_plain
from support.base import runtime
from support.step.muon import flops_of_orthogonalising

WHOLE = "whole step"
BESIDES = ("draws", WHOLE)  # what is measured, and no part of a plain step
SHARES = (1, 3 / 4, 1 / 2, 1 / 4, 1 / 16)  # of tokens kept


class Part(NamedTuple):
    run: Callable[[], object]
    flops: int = 0  # of all times together
    times: int = 1  # that a step has it

    def seconds(self) -> float:
        return measured(lambda: [self.run() for _ in range(self.times)]).seconds


def parts_of(case: Case, device: str) -> dict[str, Part]:
    """The parts of one optimizer step with Muon."""
    here = runtime.start(device, "auto")
    settings = Variant().settings(case, device)
    model = model_of(settings, case)
    trainer = trainer_of(settings, model, device)
    (step,) = steps_of(settings, device, 1)
    batch = step.batch.to(here.device)
    (B, T), C, L = batch.tokens.shape, settings.model.width, settings.model.layers
    trainer.step(step)  # so that optimizers have their state
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    positions = torch.arange(T, device=here.device)[None]
    turns = rotation(positions, C // settings.model.heads) if settings.model.pos == "rope" else None
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
        def update() -> None:
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            run()

        return update

    adamw, muon = trainer.optimizers.parts
    linear = 6 * B * T * C
    attention = both_ways(lambda: block.attn(x, meta), above)
    return {
        "attention": Part(attention, L * linear * (4 * C + T), times=L),
        "MLP": Part(both_ways(lambda: block.mlp(x), above), L * linear * 8 * C, times=L),
        "norms": Part(both_ways(lambda: block.ln_1(x), above), times=2 * L + 1),
        "head and loss": Part(both_ways(head), linear * case.vocab_size),
        "clipping": Part(with_gradients(lambda: trainer.optimizers.clip_gradients(1.0))),
        "Muon": Part(with_gradients(muon.step), L * flops_of_orthogonalising(C, 4 * C, device)),
        "AdamW": Part(with_gradients(adamw.step)),
        "draws": Part(draws(case, device)),
        WHOLE: Part(lambda: trainer.step(step)),
    }


def draws(case: Case, device: str) -> Callable[[], object]:
    """A quarter of the tokens for every layer in the middle, drawn by rank 1,023 of 1,024."""
    settings = Variant(kept_share=1 / 4).settings(case, device)
    (step,) = steps_of(settings, device, 1)
    batch = step.batch.to(torch.device(device))
    first_row = 1023 * len(batch.tokens)
    return lambda: ltd.draws(settings, step.context, first_row, batch, settings.ltd.start)


def megabytes_kept(case: Case, kept_share: float) -> float:
    """What autograd holds for the backward pass of one micro-batch besides the weights, in fp32."""
    settings = Variant(kept_share=kept_share).settings(case, "cpu")
    model = model_of(settings, case)
    (step,) = steps_of(settings, "cpu", 1)
    held = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    run_block = run_plain
    if settings.ltd.on:
        run_block = ltd.run_block(settings, step.context, 0, step.batch, run_plain)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(step.batch, run_block=run_block)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del loss
    return sum(size for pointer, size in held.items() if pointer not in weights) / 1e6


def main() -> None:
    parser = command_line(__doc__, turns=7)
    parser.add_argument("--size", choices=CASES, nargs="+", default=["nano", "124M"])
    args = parser.parse_args()
    for size in args.size:
        case = CASES[size]
        about = case._asdict() | {"size": size, "turns": args.turns}
        keep = recorder("parts", args, **about)
        parts, rate = parts_of(case, args.device), peak_flops(args.device)
        taken = in_turns({name: part.seconds for name, part in parts.items()}, args.turns)
        ms = {name: [1e3 * seconds for seconds in values] for name, values in taken.items()}
        whole = statistics.median(ms[WHOLE])
        print(
            f"\n{size}: {case.batch_tokens:,} tokens, V {case.vocab_size:,}; a step of"
            f" {whole:.0f} ms, products at {rate / 1e9:.0f} GFLOP/s\n\n"
            "| part | ms | of the step | floor of its products, ms |\n|---|---|---|---|"
        )
        rows = {}
        for name in [name for name in parts if name not in BESIDES]:
            floor = 1e3 * parts[name].flops / rate
            rows[name] = {"ms": quartiles(ms[name]), "floor_ms": round(floor, 2)}
            median = rows[name]["ms"][1]
            print(f"| {name} | {median:.1f} | {median / whole:.0%} | {floor:.1f} |")
        rest = whole - sum(row["ms"][1] for row in rows.values())
        print(f"| the rest | {rest:.1f} | {rest / whole:.0%} | |\n")
        drawing = quartiles(ms["draws"])
        print(f"draws of --ltd as rank 1,023 of 1,024: {drawing[1]:.2f} ms")
        memory = {f"{share:g}": round(megabytes_kept(case, share), 1) for share in SHARES}
        print(f"MB kept for the backward pass, by the share of tokens kept: {memory}")
        figures = {"gflops": round(rate / 1e9), "step_ms": quartiles(ms[WHOLE]), "parts": rows}
        keep(figures | {"draws_ms": drawing, "megabytes_kept": memory})


if __name__ == "__main__":
    runtime.exit_cleanly(main)
