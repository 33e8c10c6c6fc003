"""Where a step's time goes: each part of a plain step, beside the time its FLOPs would need.

A part runs alone, forward and backward, on arrays of the shapes that it has in the step; the parts
take turns with whole steps of train.py in one process. What the parts leave over (residuals, the
embedding, reading the loss back, arrays that have left the cache) is the last row. The floor is the
part's matrix products at the rate of a large product; what else a part does, such as reading
memory, is not in it.

    OMP_NUM_THREADS=2 python bench/parts.py                        # nano and 124M, as a table
    OMP_NUM_THREADS=2 python bench/parts.py --size nano --record   # and a line of results/
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from measure import command_line, peak_flops, quartiles, recorder, seconds_in_turns, significant
from step import CASES, Case, Variant, model_of, steps_of, trainer_of
from torch import Tensor

from kernels.cross_entropy import linear_cross_entropy
from kernels.rotary import rotation
from model import TokenMeta
from support.base import runtime
from support.step.muon import flops_of_orthogonalising

WHOLE = "whole step"


class Part(NamedTuple):
    run: Callable[[], object]
    flops: int = 0  # of all times together
    times: int = 1  # that a step has it

    def run_all(self) -> None:
        for _ in range(self.times):
            self.run()


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
        WHOLE: Part(lambda: trainer.step(step)),
    }


def main() -> None:
    parser = command_line(__doc__, turns=7)
    parser.add_argument("--size", choices=CASES, nargs="+", default=["nano", "124M"])
    args = parser.parse_args()
    for size in args.size:
        case = CASES[size]
        keep = recorder("parts", args, **case._asdict() | {"size": size, "turns": args.turns})
        parts, rate = parts_of(case, args.device), peak_flops(args.device)
        runs = {name: part.run_all for name, part in parts.items()}
        taken = seconds_in_turns(runs, args.turns)
        ms = {name: quartiles([1e3 * s for s in seconds]) for name, seconds in taken.items()}
        whole = ms[WHOLE][1]
        rows = {}
        for name in [name for name in parts if name != WHOLE]:
            floor_ms = round(1e3 * parts[name].flops / rate, 2)
            share = round(ms[name][1] / whole, 3)
            rows[name] = {"ms": ms[name], "of_the_step": share, "floor_ms": floor_ms}
        rest_ms = whole - sum(row["ms"][1] for row in rows.values())
        keep(
            {
                "gflops": round(rate / 1e9),
                "step_ms": ms[WHOLE],
                "parts": rows,
                "rest_ms": significant(rest_ms, 4),
            }
        )


if __name__ == "__main__":
    runtime.exit_cleanly(main)
