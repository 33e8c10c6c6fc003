"""Models larger than memory: what sharing, growth, offload and shards save, and cost a step.

    shared   bytes of a model whose layers share one block, and when each has its own; both steps
    growth   a step of some of the layers against one of all, beside the ratio of their FLOPs
    offload  a step with state, gradients or weights on the host against one without; on a GPU
             torchao's CPUOffloadOptimizer too, where it is installed, on the same batch
    peaks    the peak of memory of the same on a GPU, beside the planned one
    fsdp     a step under --fsdp in one process against a plain one
    capped   1.3B trains in 16 GiB of a GPU, with --offload and --checkpoint-activations

Steps are those of bench/step.py, all with AdamW: it is torchao's, and has the larger state. On a
CPU device and host are the same memory, so offload costs copies and arithmetic there, and nothing
overlaps them. GFLOPs of a record are those of the step without offload: blocks whose weights are on
the host run forward once more.

Peak of memory: the placement counts weights, gradients, state and what copies pass through, not
activations. So it is compared with the peak of a step that has next to none, of 2 x 64 tokens, one
row after the other, so that gradients are added up. What torch takes for a moment is in that peak.

torchao copies a gradient to the host in every micro-batch, and cannot clip: its step has no
clipping, ours has.

    OMP_NUM_THREADS=2 python bench/scale.py                  # all parts that a CPU can do
    OMP_NUM_THREADS=2 python bench/scale.py shared offload --record
    python bench/scale.py capped --device cuda --record      # 40 GB of the host's memory
"""

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
from measure import command_line, measured, pick, quartiles, recorder, significant, take_turns
from step import CASES, Case, Variant, build_ours, compare, model_of, steps_of, trainer_of
from torch import nn

import config
import offload
import pseudo
from support import runtime
from support.runtime import host_free, join
from support.step.optim import split_parameters
from support.step.placement import Away, Placement, parts_of, place, shown
from support.step.sizes import empty_model
from train import Trainer

TOKENS_ON_GPU = 65_536  # of a step
NEEDS_GPU = ("capped", "peaks")
ADAMW = Variant("--optimizer adamw")


def beside(reference: str, flags: str) -> Variant:
    return Variant(f"--optimizer adamw {flags}", to=reference)


class Setup(NamedTuple):
    """What the command line says of all parts."""

    device: str
    size: str | None = None
    turns: int | None = None
    keep: Callable[[dict], None] = print  # figures, as soon as they are there

    def case(self, on_cpu: str) -> tuple[str, Case]:
        """The model and its batch: a part's own, unless --size names another."""
        size = self.size or ("124M" if self.device == "cuda" else on_cpu)
        case = CASES[size].on(self.device, TOKENS_ON_GPU)
        return size, case._replace(turns=self.turns or case.turns)

    def compare(self, on_cpu: str, variants: dict[str, Variant], jobs: dict | None = None) -> None:
        """Steps of each variant against the one that it names, kept as they come."""
        size, case = self.case(on_cpu)
        if jobs is None:
            jobs = {name: (build, case, variants[name], self.device) for name in variants}
        compare(jobs, size, case, self.device, variants, self.keep)


def build(case: Case, variant: Variant, device: str, mode: str | None = None) -> Callable:
    """In a process of its own: as step.build_ours, under a placement of MODES if one is named.

    No budget leads to these placements: by the order of leaving, embeddings come last.
    """
    if "--fsdp" in variant.flags:
        join(runtime.start(device, "auto"))
    with patch.object(offload, "placement_for", partial(planned, mode)) if mode else nullcontext():
        return build_ours(case, variant, device)


def like(settings: config.Config, case: Case) -> nn.Module:
    """A case's model, without memory."""
    return empty_model(config.transformer_config(settings, case.vocab_size))


# ---- shared


def measure_shared(setup: Setup) -> None:
    size, case = setup.case("124M")
    shared = beside("own weights", "--pseudo --pseudo-group 1 --pseudo-until 0.5")
    setup.keep({"size": size, "bytes": stages_of(case, shared)})
    setup.compare("124M", {"own weights": ADAMW, "shared": shared})


def stages_of(case: Case, variant: Variant) -> dict:
    """Parameters and bytes before layers get weights of their own and after, in a run on the CPU.

    `moments_held` is counted tensor by tensor, after a step of each.
    """
    settings = variant.settings(case, "cpu", "--micro-batch-size 1")
    trainer = trainer_of(settings, model_of(settings, case.vocab_size), "cpu")
    (step,) = steps_of(settings, "cpu", 1)
    trainer.step(step)
    stages: dict = {"shared": bytes_of(trainer)}
    began = time.perf_counter()
    owners = tuple(range(settings.model.layers))
    state = pseudo.handed_over(trainer.state(), owners, settings.pseudo.state)
    trainer = trainer_of(settings, empty_model(trainer.model.config), "cpu", state)
    stages["switch_seconds"] = significant(time.perf_counter() - began, 3)
    trainer.step(step)
    stages["own weights"] = bytes_of(trainer)
    return stages


def bytes_of(trainer: Trainer) -> dict[str, int]:
    states = [state for part in trainer.optimizers.parts for state in part.state.values()]
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        **trainer.optimizers.memory(),
        "moments_held": sum(t.nbytes for state in states for t in state.values() if t.ndim),
    }


# ---- growth


def measure_growth(setup: Setup) -> None:
    _, case = setup.case("12x256")
    layers = case.settings("cpu").model.layers
    variants = {"all layers": ADAMW}
    for few in (layers // 2, layers // 4):
        flags = f"--pseudo --pseudo-layers {few} --pseudo-until 0.5"
        variants[f"{few} of {layers}"] = beside("all layers", flags)
    setup.compare("12x256", variants)


# ---- offload

MODES = {  # what leaves of the blocks, and of what is outside them
    "blocks' state": (Away.STATE, Away.NOTHING),
    "state": (Away.STATE, Away.STATE),
    "gradients": (Away.GRADIENTS, Away.GRADIENTS),
    "weights": (Away.WEIGHTS, Away.GRADIENTS),
}
HERE = "no offload"
TORCHAO = "torchao"


def planned(
    mode: str, settings: config.Config, model: nn.Module, here: runtime.Runtime
) -> Placement:
    """In place of offload.placement_for."""
    parts = parts_of(model, settings.optim.optimizer == "muon")
    inside, outside = MODES.get(mode, (Away.NOTHING, Away.NOTHING))
    parts = tuple(part._replace(away=inside if part.layers else outside) for part in parts)
    return Placement(parts, offload.DTYPES[here.dtype], budget=0)


def offloaded(device: str, case: Case, more: str = "") -> tuple[dict[str, Variant], dict]:
    """The variants by name, and how each is built."""
    variants = {HERE: Variant(f"--optimizer adamw {more}")}
    variants |= {mode: beside(HERE, f"--offload {more}") for mode in MODES}
    jobs: dict[str, tuple] = {
        name: (build, case, variant, device, name if name in MODES else None)
        for name, variant in variants.items()
    }
    if device == "cuda" and find_spec("torchao"):
        variants[TORCHAO] = beside(HERE, more)
        jobs[TORCHAO] = (build_torchao, case, variants[TORCHAO], device)
    else:
        print("torchao: skipped, it needs --device cuda and to be installed")
    return variants, jobs


def measure_offload(setup: Setup) -> None:
    """The goal is that a step with the state on the host takes as long as torchao's."""
    _, case = setup.case("12x256")
    setup.compare("12x256", *offloaded(setup.device, case))


def measure_peaks(setup: Setup) -> None:
    """The peak of a step on a GPU with next to no activations, in GB, beside the planned one.

    The goal is the planned one within 5 %.
    """
    size, case = setup.case("12x256")
    lean = case._replace(flags=f"{case.flags} --seq-len 64", batch_tokens=128)
    variants, jobs = offloaded(setup.device, lean, "--micro-batch-size 1")
    ranks = runtime.start(setup.device, "auto")
    for new, taken in take_turns(jobs, 1, setup.device):
        for name in new:
            figures = {"lean_peak_gb": significant(taken[name][0].peak_bytes / 1e9, 4)}
            if name != TORCHAO:
                settings = variants[name].settings(lean, setup.device)
                placement = planned(name, settings, like(settings, lean), ranks)
                figures["planned_gb"] = significant(placement.device_bytes / 1e9, 4)
            setup.keep({"size": size, "variant": name, **figures})


def build_torchao(case: Case, variant: Variant, device: str) -> Callable:
    """The same model, batch and micro-batches with torchao's optimizer, whose state is away."""
    from torchao.optim import CPUOffloadOptimizer

    here = runtime.start(device, "auto")
    settings = variant.settings(case, device)
    model = model_of(settings, case.vocab_size).to(here.device)
    parts, o = split_parameters(dict(model.named_parameters()), muon=False), settings.optim
    groups = [
        {"params": parts.decayed, "weight_decay": o.weight_decay},
        {"params": parts.plain, "weight_decay": 0.0},
    ]
    betas = (o.beta1, o.beta2)
    optimizer = CPUOffloadOptimizer(groups, torch.optim.AdamW, lr=o.lr, betas=betas)
    (step,) = steps_of(settings, device, 1)
    rows = len(step.batch.tokens)
    at_once = o.micro_batch_size or rows

    def make() -> float:
        total = torch.zeros((), device=here.device)
        for first in range(0, rows, at_once):
            part = step.batch.rows(slice(first, first + at_once)).to(here.device)
            with here.autocast():
                loss = model(part)
            (loss / step.targets).backward()
            total += loss.detach()
        mean = total.item() / step.targets
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return make


# ---- fsdp


def measure_fsdp(setup: Setup) -> None:
    setup.compare("nano", {"plain": ADAMW, "--fsdp": beside("plain", "--fsdp")})


# ---- capped

CAP_BYTES = 16 * 2**30
TIGHT = "--offload --offload-budget 8GiB --checkpoint-activations --micro-batch-size 4"


def measure_capped(setup: Setup) -> None:
    case = CASES["1.3B"]._replace(turns=setup.turns or CASES["1.3B"].turns)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        figures = alone.submit(train_capped, case, TIGHT, setup.device, CAP_BYTES).result()
    about = {"size": "1.3B", "flags": TIGHT, "cap_bytes": CAP_BYTES}
    setup.keep(case._asdict() | about | figures)


def train_capped(case: Case, flags: str, device: str, cap_bytes: int) -> dict:
    """A few steps on one batch, within so many bytes of a GPU; in a process of its own.

    Raises: ValueError if the machine is too small, or if the loss does not fall
    """
    here = runtime.start(device, "auto")
    settings = ADAMW.settings(case, device, flags)
    small, budget = like(settings, case), offload.budget_bytes(settings.offload.budget)
    placement = place(parts_of(small, muon=False), budget, offload.DTYPES[here.dtype])
    # the initial weights are on the host as well, until they are where they belong
    needed, free = placement.host_bytes + sum(p.nbytes for p in small.parameters()), host_free()
    if free is not None and needed > free:
        raise ValueError(f"capped: needs {shown(needed)} of the host, {shown(free)} are free")
    if device == "cuda":
        total = torch.cuda.get_device_properties(here.device).total_memory
        if total < cap_bytes:
            raise ValueError(f"capped: needs {shown(cap_bytes)} of a GPU, this has {shown(total)}")
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
    make = build_ours(case, ADAMW, device, flags)
    losses: list[float] = []
    taken = [measured(lambda: losses.append(make())) for _ in range(case.turns)]
    if not losses[-1] < losses[0]:
        raise ValueError(f"capped: the loss does not fall, {losses}")
    return {
        "losses": [significant(loss, 5) for loss in losses],
        "ms": quartiles([1e3 * each.seconds for each in taken[1:]]),  # the first takes memory
        "peak_gb": significant(max(each.peak_bytes for each in taken) / 1e9, 4),
        "planned_gb": significant(placement.device_bytes / 1e9, 4),
        "host_gb": significant(placement.host_bytes / 1e9, 4),
    }


PARTS = {
    "shared": measure_shared,
    "growth": measure_growth,
    "offload": measure_offload,
    "peaks": measure_peaks,
    "fsdp": measure_fsdp,
    "capped": measure_capped,
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--size", choices=CASES, help="of all parts but capped (default: by part)")
    parser.add_argument("--turns", type=int, help="(default: by size)")
    args = parser.parse_args()
    for name in pick(args.parts, PARTS):
        if name in NEEDS_GPU and args.device == "cpu":
            print(f"{name}: skipped, it needs --device cuda", file=sys.stderr)
            continue
        dtype = "bf16 autocast" if args.device == "cuda" else "fp32"
        keep = recorder("scale", args, part=name, dtype=dtype)
        PARTS[name](Setup(args.device, args.size, args.turns, keep))


if __name__ == "__main__":
    runtime.exit_cleanly(main)
