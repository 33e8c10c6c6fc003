"""Models larger than memory: what sharing, growth, offload and shards save, and cost a step.

    adamw    torch's fused AdamW on the host against its loop over tensors, on 124M's parameters
    shared   bytes of a model whose layers share one block, and when each has its own; both steps
    growth   a step of some of the layers against one of all, beside the ratio of their FLOPs
    offload  a step with state, gradients or weights away against one without; on a GPU torchao's
             CPUOffloadOptimizer too, where it is installed, on the same batch
    peaks    the peak of memory of the same on a GPU, beside the planned one
    fsdp     a step under --fsdp in one process against a plain one
    capped   1.3B trains in 16 GiB of a GPU, with --offload and --checkpoint-activations

Steps are those of train.py as bench/step.py makes them, with AdamW in all: it is torchao's, and has
the larger state. Each variant is in a process of its own, and on a GPU recorded as soon as it is
done. On a CPU device and host are the same memory, and a copy is a copy: what
offload costs there is copies and arithmetic, and nothing goes on meanwhile. GFLOPs of a record are
those of the step without offload: blocks whose weights are away run forward once more.

Peak of memory: the placement counts weights, gradients, state and what copies pass through, not
activations. So it is held against the peak of a step that has next to none, of 2 x 64 tokens, one
row after the other, so that gradients are added up. What torch takes for a moment is in that peak.

torchao copies a gradient to the host in every micro-batch, and cannot clip: its step has no
clipping, ours has.

    python bench/scale.py                                    # all parts that a CPU can do
    python bench/scale.py adamw shared offload --record      # and a line of results/ for each
    python bench/scale.py capped --device cuda --record      # 40 GB of the host's memory
"""

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from typing import NamedTuple
from unittest.mock import patch

import torch
from record import append, quartiles, significant, surroundings
from step import (
    CASES,
    Case,
    Variant,
    batch_of,
    compare,
    model_of,
    on_device,
    settings_of,
    show,
    step_of,
)
from torch import nn
from turns import Taken, alternated, measured, ratios, take_turns, turn_of

import config
import offload
import pseudo
from support.base import runtime
from support.base.runtime import host_free
from support.base.sharded import join
from support.step.memory import micro_batch
from support.step.optim import split_parameters
from support.step.placement import Away, Placement, parts_of, shown
from support.step.sizes import SIZES, empty_model
from train import Trainer, assemble

TOKENS_ON_GPU = 65_536  # of a step
NEEDS_GPU = ("capped", "peaks")


class Setup(NamedTuple):
    """What the command line says of all parts."""

    device: str
    size: str | None = None
    turns: int | None = None
    keep: Callable[[dict], None] = lambda figures: None  # a record, as soon as it is there

    def case(self, on_cpu: str, on_gpu: str = "124M") -> tuple[str, Case]:
        """The model and its batch: a part's own, unless --size names another."""
        size = self.size or (on_gpu if self.device == "cuda" else on_cpu)
        case = on_device(size, self.device, TOKENS_ON_GPU)
        return size, case._replace(turns=self.turns or case.turns)


def build(case: Case, variant: Variant, device: str, mode: str | None = None) -> Callable:
    """In a process of its own: everything as train.py assembles it.

    Args: mode of MODES, where something is away
    """
    here = runtime.start(device, "auto")
    settings = settings_of(case, variant, device, compiled=False)
    if settings.run.fsdp:
        join(here)
    model, at_once = model_of(settings, case, gelu=None), micro_batch(settings, here).count
    # a placement that no budget leads to: by the order of leaving, embeddings come last
    with patch.object(offload, "plan", partial(planned, mode)) if mode else nullcontext():
        trainer = assemble(settings, model, here, at_once)
    return step_of(trainer, batch_of(case, packed=False))


def measure_steps(
    setup: Setup, part: str, size: str, case: Case, variants: dict[str, Variant], jobs: dict
) -> dict[str, dict]:
    """Each variant against the one that it names; printed, and kept as they come."""
    print(
        f"\n{part}, {size}: {case.rows} x {case.shape.seq_len} tokens, V {case.vocab_size:,};"
        f" medians of {case.turns} [quartiles]"
    )

    def keep(steps: dict) -> None:
        setup.keep({"size": size, **case._asdict(), "steps": steps})

    return compare(jobs, case, setup.device, variants, keep)


def jobs_of(variants: dict[str, Variant], case: Case, device: str) -> dict[str, tuple]:
    return {name: (build, case, variant, device) for name, variant in variants.items()}


# ---- adamw


def measure_adamw(setup: Setup) -> dict:
    size = setup.size or "124M"
    case = CASES[size]._replace(turns=setup.turns or CASES[size].turns)
    settings = settings_of(case, Variant(None, "adamw"), "cpu", compiled=False)
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(p.shape)) for p in like(settings, case).parameters()]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizers = {
        "fused": torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        "for-loop": torch.optim.AdamW(parameters, lr=1e-4, foreach=False, fused=False),
    }
    turns = {name: partial(turn_of, optimizer.step) for name, optimizer in optimizers.items()}
    taken = alternated(turns, case.turns)
    numel = sum(p.numel() for p in parameters)
    figures = {
        name: {"ms": quartiles([1e3 * one.seconds for one in steps])}
        for name, steps in taken.items()
    }
    for figure in figures.values():  # reads weight, gradient, two moments; writes all but one
        figure["gb_s"] = significant(28 * numel / figure["ms"][1] / 1e6, 3)
    faster = quartiles(ratios(taken["for-loop"], taken["fused"]))
    print(f"\nadamw, {size}: {numel:,} parameters, {torch.get_num_threads()} threads")
    for name, figure in figures.items():
        print(f"{show(name, figure)}   {figure['gb_s']} GB/s")
    spread = f"{faster[1]:.2f} [{faster[0]:.2f}, {faster[2]:.2f}]"
    print(f"the fused form is {spread} times as fast; the goal is 3.5")
    found = {"size": size, "parameters": numel, "turns": case.turns, **figures, "faster": faster}
    setup.keep(found)
    return found


def like(settings: config.Config, case: Case) -> nn.Module:
    """A case's model, without memory."""
    shape = config.transformer_config(settings, case.vocab_size, case.shape.seq_len)
    return empty_model(shape)


# ---- shared


def measure_shared(setup: Setup) -> dict:
    size, case = setup.case("124M")
    variants = {
        "own weights": Variant(None, "adamw"),
        "shared": Variant(
            "own weights", "adamw", flags="--pseudo --pseudo-group 1 --pseudo-until 0.5"
        ),
    }
    stages = stages_of(case._replace(rows=1), variants["shared"])
    for name in variants:
        found = stages[name]
        weights, moments = shown(found["weights"]), shown(found["optimizer"])
        print(
            f"{name:>18} {found['parameters'] / 1e6:9.1f} M parameters; weights {weights},"
            f" gradients {shown(found['gradients'])}, optimizer {moments}"
        )
    setup.keep({"size": size, "bytes": stages})
    jobs = jobs_of(variants, case, setup.device)
    steps = measure_steps(setup, "shared", size, case, variants, jobs)
    return {"steps": steps, "bytes": stages}


def stages_of(case: Case, variant: Variant) -> dict:
    """Parameters and bytes before layers get weights of their own and after, in a run on the CPU.

    `moments_held` is counted tensor by tensor, after a step of each.
    """
    here = runtime.start("cpu", "auto")
    settings = settings_of(case, variant, "cpu", compiled=False)
    trainer = assemble(settings, model_of(settings, case, gelu=None), here, case.rows)
    step_of(trainer, batch_of(case, packed=False))()
    stages, began = {"shared": bytes_of(trainer)}, time.perf_counter()
    owners = tuple(range(case.shape.layers))
    state = pseudo.handed_over(trainer.state(), owners, settings.pseudo.state)
    trainer = assemble(settings, empty_model(trainer.model.config), here, case.rows, state)
    stages["switch_seconds"] = significant(time.perf_counter() - began, 3)
    step_of(trainer, batch_of(case, packed=False))()
    stages["own weights"] = bytes_of(trainer)
    return stages


def bytes_of(trainer: Trainer) -> dict[str, int]:
    states = [kept for part in trainer.optimizers.parts for kept in part.state.values()]
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        **trainer.optimizers.memory(),
        "moments_held": sum(t.nbytes for kept in states for t in kept.values() if t.ndim),
    }


# ---- growth


def measure_growth(setup: Setup) -> dict:
    size, case = setup.case("12x256")
    layers = case.shape.layers
    variants = {"all layers": Variant(None, "adamw")}
    for few in (layers // 2, layers // 4):
        flags = f"--pseudo --pseudo-layers {few} --pseudo-until 0.5"
        variants[f"{few} of {layers}"] = Variant("all layers", "adamw", flags=flags)
    jobs = jobs_of(variants, case, setup.device)
    return {"steps": measure_steps(setup, "growth", size, case, variants, jobs)}


# ---- offload

MODES = {  # what is away of the blocks, and of what is outside them
    "blocks' state": (Away.STATE, Away.NOTHING),
    "state": (Away.STATE, Away.STATE),
    "gradients": (Away.GRADIENTS, Away.GRADIENTS),
    "weights": (Away.WEIGHTS, Away.GRADIENTS),
}
HERE = "no offload"


def planned(
    mode: str, model: nn.Module, budget: str, muon: bool, dtype: torch.dtype, **free: object
) -> Placement:
    """In place of offload.plan."""
    parts = parts_of(model, muon)
    inside, outside = MODES.get(mode, (Away.NOTHING, Away.NOTHING))
    away = tuple(inside if part.layers else outside for part in parts)
    return Placement(parts, away, offload.DTYPES[dtype], budget=0)


def offloaded(device: str, case: Case) -> tuple[dict[str, Variant], dict[str, tuple]]:
    """The variants by name, and how each is built."""
    variants = {HERE: Variant(None, "adamw")}
    variants |= {mode: Variant(HERE, "adamw", flags="--offload") for mode in MODES}
    jobs: dict[str, tuple] = {HERE: (build, case, variants[HERE], device)}
    jobs |= {name: (build, case, variants[name], device, name) for name in MODES}
    if device == "cpu" or find_spec("torchao") is None:
        why = "it needs --device cuda" if device == "cpu" else "it is not installed"
        print(f"torchao: skipped, {why}")
    else:
        variants["torchao"] = Variant(HERE, "adamw")
        jobs["torchao"] = (build_torchao, case, variants["torchao"], device)
    return variants, jobs


def measure_offload(setup: Setup) -> dict:
    size, case = setup.case("12x256")
    variants, jobs = offloaded(setup.device, case)
    steps = measure_steps(setup, "offload", size, case, variants, jobs)
    if "torchao" in steps:
        ratio = steps["state"]["ms"][1] / steps["torchao"]["ms"][1]
        print(f"state away: {ratio:.3f} of torchao's step; the goal is 1")
    return {"steps": steps}


def measure_peaks(setup: Setup) -> dict:
    """The peak in GB of a step on a GPU with next to no activations, beside the planned bytes."""
    size, case = setup.case("12x256")
    lean = case._replace(rows=2, shape=case.shape._replace(seq_len=64), turns=1)
    variants, jobs = offloaded(setup.device, lean)
    leaner = {}
    for name, (builder, _, variant, device, *mode) in jobs.items():
        one_by_one = variant._replace(flags=f"{variant.flags} --micro-batch-size 1")
        leaner[name] = (builder, lean, one_by_one, device, *mode)
    peaks: dict[str, dict] = {}
    dtype = runtime.start(setup.device, "auto").dtype
    print(f"\npeaks, {size}: the goal is the planned one within 5 %")
    for new, taken in take_turns(leaner, 1, setup.device):
        for name in new:
            found = peaks[name] = {"lean_peak_gb": significant(taken[name][0].peak_bytes / 1e9, 4)}
            if name != "torchao":
                settings = settings_of(lean, variants[name], setup.device, compiled=False)
                placement = planned(name, like(settings, lean), "", muon=False, dtype=dtype)
                found["planned_gb"] = significant(placement.device_bytes / 1e9, 4)
            print(f"{name:>18} {found}", flush=True)
            setup.keep({"size": size, "variant": name, **found})
    return peaks


def build_torchao(case: Case, variant: Variant, device: str) -> Callable:
    """The same model, batch and micro-batches with torchao's optimizer, whose state is away."""
    from torchao.optim import CPUOffloadOptimizer

    here = runtime.start(device, "auto")
    settings = settings_of(case, variant, device, compiled=False)
    model = model_of(settings, case, gelu=None).to(here.device)
    parts, o = split_parameters(dict(model.named_parameters()), muon=False), settings.optim
    groups = [
        {"params": parts.decayed, "weight_decay": o.weight_decay},
        {"params": parts.plain, "weight_decay": 0.0},
    ]
    betas = (o.beta1, o.beta2)
    optimizer = CPUOffloadOptimizer(groups, torch.optim.AdamW, lr=o.lr, betas=betas)
    batch, at_once = batch_of(case, packed=False), micro_batch(settings, here).count
    targets = batch.targets.numel()

    def step() -> float:
        total = torch.zeros((), device=here.device)
        for first in range(0, case.rows, at_once):
            rows = batch.rows(slice(first, first + at_once)).to(here.device)
            with here.autocast():
                loss = model(rows)
            (loss / targets).backward()
            total += loss.detach()
        mean = total.item() / targets
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


# ---- fsdp


def measure_fsdp(setup: Setup) -> dict:
    size, case = setup.case("nano")
    variants = {
        "plain": Variant(None, "adamw"),
        "--fsdp": Variant("plain", "adamw", flags="--fsdp"),
    }
    jobs = jobs_of(variants, case, setup.device)
    return {"steps": measure_steps(setup, "fsdp", size, case, variants, jobs)}


# ---- capped

CAPPED = Case(SIZES["1.3B"], rows=8, vocab_size=50304, turns=6)
CAP_BYTES = 16 * 2**30
TIGHT = "--offload --offload-budget 8GiB --checkpoint-activations --micro-batch-size 4"


def measure_capped(setup: Setup) -> dict:
    case = CAPPED._replace(turns=setup.turns or CAPPED.turns)
    print(f"\ncapped, 1.3B: {case.rows} x {case.shape.seq_len} tokens, {TIGHT}")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        found = alone.submit(train_capped, case, TIGHT, setup.device, CAP_BYTES).result()
    losses = ", ".join(f"{loss:.3f}" for loss in found["losses"])
    print(
        f"loss {losses}; {found['ms'][1]:.0f} ms a step; peak {found['peak_gb']:.2f} GB of"
        f" {CAP_BYTES / 1e9:.2f}, planned without activations {found['planned_gb']:.2f}"
    )
    setup.keep({"size": "1.3B", "flags": TIGHT, "cap_bytes": CAP_BYTES, **case._asdict(), **found})
    return found


def train_capped(case: Case, flags: str, device: str, cap_bytes: int) -> dict:
    """A few steps on one batch, within so many bytes of a GPU; in a process of its own.

    Raises: ValueError if the machine is too small, or if the loss does not fall
    """
    here = runtime.start(device, "auto")
    settings = settings_of(case, Variant(None, "adamw", flags=flags), device, compiled=False)
    small, budget = like(settings, case), settings.offload.budget
    placement = offload.plan(small, budget, False, here.dtype, device_free=None, host_free=None)
    # the weights that it begins with are on the host as well, until they are where they belong
    needed, free = placement.host_bytes + sum(p.nbytes for p in small.parameters()), host_free()
    if free is not None and needed > free:
        raise ValueError(
            f"capped needs {shown(needed)} of host memory and {shown(free)} are free: leave it out"
        )
    if device == "cuda":
        total = torch.cuda.get_device_properties(here.device).total_memory
        if total < cap_bytes:
            raise ValueError(
                f"capped needs {shown(cap_bytes)} of a GPU, and this has {shown(total)}"
            )
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
    model, at_once = model_of(settings, case, gelu=None), micro_batch(settings, here).count
    trainer = assemble(settings, model, here, at_once)
    step = step_of(trainer, batch_of(case, packed=False))
    losses: list[float] = []
    taken: list[Taken] = [measured(lambda: losses.append(step().loss)) for _ in range(case.turns)]
    if not losses[-1] < losses[0]:
        raise ValueError(f"capped: the loss does not fall, {losses}")
    return {
        "losses": [significant(loss, 5) for loss in losses],
        "ms": quartiles([1e3 * one.seconds for one in taken[1:]]),  # the first takes memory
        "peak_gb": significant(max(one.peak_bytes for one in taken) / 1e9, 4),
        "planned_gb": significant(trainer.held.placement.device_bytes / 1e9, 4),
        "host_gb": significant(trainer.held.placement.host_bytes / 1e9, 4),
    }


PARTS = {
    "adamw": measure_adamw,
    "shared": measure_shared,
    "growth": measure_growth,
    "offload": measure_offload,
    "peaks": measure_peaks,
    "fsdp": measure_fsdp,
    "capped": measure_capped,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--size", choices=CASES, help="of all parts but capped (default: by part)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, help="(default: by size)")
    parser.add_argument("--record", action="store_true", help="append to results/scale.jsonl")
    flags = parser.parse_args()
    for name in flags.parts:
        if name not in PARTS:
            raise ValueError(f"there is no part {name}: choose from {', '.join(PARTS)}")
    if flags.turns is not None and flags.turns < 3:
        raise ValueError(f"--turns {flags.turns} are too few for a spread: choose 3 or more")
    for name in flags.parts or PARTS:
        if name in NEEDS_GPU and flags.device == "cpu":
            print(f"{name}: skipped, it needs --device cuda", file=sys.stderr)
            continue
        device = "cpu" if name == "adamw" else flags.device  # the host's, wherever the rest is
        about = surroundings(device) | {"bench": "scale", "part": name}
        about["dtype"] = "bf16 autocast" if device == "cuda" else "fp32"

        def keep(figures: dict, about: dict = about) -> None:
            if flags.record:
                append("scale", about | figures)

        PARTS[name](Setup(flags.device, flags.size, flags.turns, keep))


if __name__ == "__main__":
    runtime.exit_cleanly(main)
