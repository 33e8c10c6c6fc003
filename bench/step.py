"""Time of one training step of the plain GPT, of packed rows, and of nanoGPT's model.py beside it.

nanoGPT's model and ours compute the same function (checked first: same weights, same loss, same
gradients, with the exact GELU that nanoGPT has), see the same batch, and step with fused AdamW over
the same two groups. All variants take turns in one process, in an order that is reversed each time,
so that a noisy machine slows all alike. A ratio is the median of the ratios within a turn, not a
ratio of medians.

Does not measure data loading, compilation or more than one device. nanoGPT is not part of this
project: give the folder of a clone of https://github.com/karpathy/nanoGPT, or leave it out.
On a machine shared with others set OMP_WAIT_POLICY=passive as well: threads that spin while another
program holds their core make a step several times slower. The record says which was in force.

    OMP_NUM_THREADS=2 python bench/step.py                                 # the table
    OMP_NUM_THREADS=2 python bench/step.py --nanogpt ../nanoGPT --record   # and a line of results/
"""

import argparse
import contextlib
import importlib.util
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from record import append, quartiles, surroundings
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

from model import SIZES, Transformer, TransformerConfig
from support.optim import split_parameters
from support.runtime import exit_cleanly


class Case(NamedTuple):
    rows: int
    vocab_size: int
    turns: int


CASES = {  # by --size
    "nano": Case(rows=16, vocab_size=4160, turns=15),
    "124M": Case(rows=1, vocab_size=50304, turns=5),
}
BETAS, WEIGHT_DECAY, LR = (0.9, 0.95), 0.1, 1e-4
PREFIX = "transformer."  # of nanoGPT's parameter names
REFERENCE = {  # what each variant's time is divided by
    "plain": "nanoGPT",
    "exact GELU": "nanoGPT",
    "packed": "plain",
    "rope": "plain",
}


def load_nanogpt(folder: Path) -> ModuleType:
    """The folder's model.py under a name of its own, since ours is called the same."""
    path = folder / "model.py"
    if not path.is_file():
        raise ValueError(f"--nanogpt {folder}: has no model.py, give the folder of a nanoGPT clone")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_theirs(nanogpt: ModuleType, size: str, device: str) -> tuple:
    """nanoGPT's model and its own optimizer."""
    layers, heads, width, T = SIZES[size]
    V = CASES[size].vocab_size
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its parameters
        model = nanogpt.GPT(nanogpt.GPTConfig(T, V, layers, heads, width)).to(device)
        # "cuda" on every device: the word only asks for the fused AdamW, which CPUs have by now.
        optimizer = model.configure_optimizers(WEIGHT_DECAY, LR, BETAS, "cuda")
    # As initialised every logit is near 0, and one GELU can hardly be told from another.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() >= 2 else 1)
    return model, optimizer


def build_ours(size: str, device: str, weights: dict, pos: str = "learned") -> tuple:
    """Our model with those weights that are given, and AdamW over the groups that nanoGPT makes."""
    config = TransformerConfig(
        kind="gpt",
        **SIZES[size]._asdict(),
        mlp_width=4 * SIZES[size].width,
        vocab_size=CASES[size].vocab_size,
        pos=pos,
    )
    model = Transformer(config).to(device)
    if weights:
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
    _, decayed, plain = split_parameters(model, muon=False)
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}]
    groups += [{"params": plain, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)


def draw_documents(B: int, T: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions and doc_ids (B, T) of full rows of about five documents each, of random lengths."""
    starts = torch.rand(B, T, generator=generator) < 4 / T
    starts[:, 0] = True
    index = torch.arange(T).expand(B, T)
    positions = index - torch.where(starts, index, 0).cummax(dim=1).values
    return positions, starts.cumsum(dim=1) - 1


def step_of(
    loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer, device: str
) -> Callable:
    """A function that makes one step and returns its seconds; under bf16 autocast on a GPU."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def step() -> float:
        wait()
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        return time.perf_counter() - start

    return step


def check_same_function(ours: Callable, our_model: nn.Module, theirs: Callable, model: nn.Module):
    """Refuse to time two different functions: their losses and all gradients agree."""
    loss, expected_loss = ours(), theirs()
    errors = {"the loss": (loss - expected_loss).norm() / expected_loss.norm()}
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))
    names = [name.removeprefix(PREFIX) for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(loss, [our_model.get_parameter(name) for name in names])
    for name, one, other in zip(names, gradients, expected, strict=True):
        errors[f"the gradient of {name}"] = (one - other).norm() / other.norm()
    worst = max(errors, key=errors.get)
    if not errors[worst] < 1e-4:  # fp32; tanh GELU in place of the exact one errs by 7e-4
        raise ValueError(f"--nanogpt: {worst} differs by {errors[worst]:.1e} of its norm from ours")


def steps_of(nanogpt: ModuleType | None, size: str, device: str) -> dict[str, Callable[[], float]]:
    """A step function for each variant, all on one batch."""
    B, V, T = CASES[size].rows, CASES[size].vocab_size, SIZES[size].seq_len
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(V, (2, B, T), generator=generator).to(device)  # (B, T) each
    rows = (tokens, targets, None, None)
    packed = (tokens, targets, *(field.to(device) for field in draw_documents(B, T, generator)))

    def ours(our_model: Transformer, batch: tuple) -> Callable[[], Tensor]:
        return lambda: our_model(batch) / targets.numel()

    steps, weights = {}, {}
    if nanogpt:
        model, optimizer = build_theirs(nanogpt, size, device)
        weights = {name.removeprefix(PREFIX): value for name, value in model.named_parameters()}

        def theirs() -> Tensor:
            return model(tokens, targets)[1]

        steps["nanoGPT"] = step_of(theirs, optimizer, device)
    for variant in REFERENCE if nanogpt else ("plain", "packed", "rope"):
        pos = "rope" if variant == "rope" else "learned"
        our_model, our_optimizer = build_ours(size, device, weights, pos)
        if variant == "exact GELU":
            for block in our_model.h:
                block.mlp.gelu = nn.GELU()
            check_same_function(ours(our_model, rows), our_model, theirs, model)
        batch = packed if variant == "packed" else rows
        steps[variant] = step_of(ours(our_model, batch), our_optimizer, device)
    return steps


def take_turns(steps: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Seconds of each variant's steps, after one step of each that does not count."""
    seconds = {name: [] for name in steps}
    order = list(steps)
    for name in order:
        steps[name]()
    for _ in range(turns):
        for name in order:
            seconds[name].append(steps[name]())
        order.reverse()
    return seconds


def summarise(seconds: dict[str, list[float]]) -> dict[str, dict]:
    """Quartiles of milliseconds and of the ratio, within a turn, to the variant's reference."""
    figures = {}
    for name, values in seconds.items():
        figures[name] = {"ms": quartiles([1e3 * value for value in values])}
        reference = REFERENCE.get(name)
        if reference in seconds:
            pairs = zip(values, seconds[reference], strict=True)
            figures[name]["ratio"] = quartiles([one / other for one, other in pairs])
            figures[name]["to"] = reference
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, help="folder of a nanoGPT clone (default: none)")
    parser.add_argument("--size", choices=CASES, action="append", help="(default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/step.jsonl")
    flags = parser.parse_args()
    record = surroundings(flags.device) | {
        "bench": "step",
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "dtype": "bf16 autocast" if flags.device == "cuda" else "fp32",
        "sizes": {},
    }
    nanogpt = load_nanogpt(flags.nanogpt) if flags.nanogpt else None
    print(f"{record['hardware']}, {record['threads']} threads, {record['dtype']}")
    for size in flags.size or CASES:
        case, seq_len = CASES[size], SIZES[size].seq_len
        seconds = take_turns(steps_of(nanogpt, size, flags.device), case.turns)
        figures = summarise(seconds)
        record["sizes"][size] = case._asdict() | {"steps": figures}
        print(
            f"\n{size}: {case.rows} x {seq_len} tokens, V {case.vocab_size:,};"
            f" medians of {case.turns} [quartiles]"
        )
        for name, figure in figures.items():
            low, median, high = figure["ms"]
            line = f"{name:>12} {median:9.1f} ms [{low:.1f}, {high:.1f}]"
            if "ratio" in figure:
                low, median, high = figure["ratio"]
                line += f"   {median:.3f} [{low:.3f}, {high:.3f}] of {figure['to']}"
            print(line)
    if flags.record:
        append("step", record)


if __name__ == "__main__":
    exit_cleanly(main)
