"""Time of one training step of the plain GPT against nanoGPT's model.py, and what packing costs it.

Both models compute the same function (checked first: same weights, same loss, same gradient norm,
with the GELU nanoGPT has), see the same batch, and step with fused AdamW over the same two groups.
They take turns in one process, in an order that is turned round each time, so that a noisy machine
troubles all alike. A ratio is the median of the ratios within a turn, not a ratio of medians.

Does not measure data loading, compilation or more than one device. nanoGPT is not part of this
project: give the folder of a clone of https://github.com/karpathy/nanoGPT.
On a machine shared with others set OMP_WAIT_POLICY=passive as well: threads that spin while another
program holds their core make a step several times slower. The record says which was in force.

    OMP_NUM_THREADS=2 python bench/step.py --nanogpt ../nanoGPT            # the table
    OMP_NUM_THREADS=2 python bench/step.py --nanogpt ../nanoGPT --record   # and a line of results/
"""

import argparse
import contextlib
import datetime
import importlib.util
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # what is measured

from model import SIZES, Transformer, TransformerConfig

ROOT = Path(__file__).resolve().parent.parent
CASES = {"nano": (16, 4160, 15), "124M": (1, 50304, 5)}  # --size: rows, V, turns
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


def build_theirs(nanogpt: ModuleType, size: str, V: int, device: str) -> tuple:
    """nanoGPT's model and its own optimizer."""
    layers, heads, width, T = SIZES[size]
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its parameters
        model = nanogpt.GPT(nanogpt.GPTConfig(T, V, layers, heads, width)).to(device)
        # "cuda" on every device: the word only asks for the fused AdamW, which CPUs have by now.
        optimizer = model.configure_optimizers(WEIGHT_DECAY, LR, BETAS, "cuda")
    # As initialised every logit is near 0, and one GELU can hardly be told from another.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() >= 2 else 1)
    return model, optimizer


def build_ours(size: str, V: int, device: str, weights: dict, pos: str = "learned") -> tuple:
    """Our model with the given weights, and AdamW over the groups that nanoGPT makes."""
    layers, heads, width, T = SIZES[size]
    model = Transformer(TransformerConfig("gpt", layers, heads, width, 4 * width, T, V, pos)).to(
        device
    )
    names = model.state_dict().keys()
    model.load_state_dict({name: weights[name] for name in names})
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.dim() < 2]
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
    """A function that makes one step and returns its seconds. bf16 autocast on a GPU."""

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
    found = torch.autograd.grad(loss, [our_model.get_parameter(name) for name in names])
    for name, one, other in zip(names, found, expected, strict=True):
        errors[f"the gradient of {name}"] = (one - other).norm() / other.norm()
    worst = max(errors, key=errors.get)
    if not errors[worst] < 1e-4:  # fp32; tanh GELU in place of the exact one errs by 7e-4
        raise ValueError(f"--nanogpt: {worst} differs by {errors[worst]:.1e} of its norm from ours")


def steps_of(nanogpt: ModuleType, size: str, device: str) -> dict[str, Callable[[], float]]:
    """One step function a variant, all on one batch."""
    B, V, _ = CASES[size]
    T = SIZES[size][3]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(V, (2, B, T), generator=generator).to(device)  # (B, T) each
    positions, doc_ids = (field.to(device) for field in draw_documents(B, T, generator))

    model, optimizer = build_theirs(nanogpt, size, V, device)
    weights = {name.removeprefix(PREFIX): value for name, value in model.named_parameters()}

    def theirs() -> Tensor:
        return model(tokens, targets)[1]

    def ours(our_model: Transformer, *documents: Tensor) -> Callable[[], Tensor]:
        batch = (tokens, targets, *(documents or (None, None)))
        return lambda: our_model(batch) / targets.numel()

    steps = {"nanoGPT": step_of(theirs, optimizer, device)}
    for variant in REFERENCE:
        pos = "rope" if variant == "rope" else "learned"
        our_model, our_optimizer = build_ours(size, V, device, weights, pos)
        if variant == "exact GELU":
            for block in our_model.h:
                block.mlp.gelu = nn.GELU()
            check_same_function(ours(our_model), our_model, theirs, model)
        documents = (positions, doc_ids) if variant == "packed" else ()
        steps[variant] = step_of(ours(our_model, *documents), our_optimizer, device)
    return steps


def take_turns(steps: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Seconds of each variant's steps; one step of each before the clock counts."""
    seconds = {name: [] for name in steps}
    order = list(steps)
    for name in order:
        steps[name]()
    for _ in range(turns):
        for name in order:
            seconds[name].append(steps[name]())
        order.reverse()
    return seconds


def spread(values: list[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def summarise(seconds: dict[str, list[float]]) -> dict[str, dict]:
    """Quartiles of milliseconds and, for ours, of the ratio within a turn to the reference."""
    figures = {}
    for name, values in seconds.items():
        figures[name] = {"ms": [round(1e3 * value, 1) for value in spread(values)]}
        if name in REFERENCE:
            pairs = zip(values, seconds[REFERENCE[name]], strict=True)
            ratios = spread([one / other for one, other in pairs])
            figures[name]["ratio"] = [round(ratio, 3) for ratio in ratios]
            figures[name]["to"] = REFERENCE[name]
    return figures


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time against nanoGPT.", allow_abbrev=False)
    parser.add_argument("--nanogpt", type=Path, required=True, help="folder of a nanoGPT clone")
    parser.add_argument("--size", choices=CASES, action="append", help="(default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/step.jsonl")
    flags = parser.parse_args()
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here, choose --device cpu")
    nanogpt = load_nanogpt(flags.nanogpt)
    record = {
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(flags.device),
        "threads": torch.get_num_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "torch": torch.__version__,
        "commit": commit(),
        "dtype": "bf16 autocast" if flags.device == "cuda" else "fp32",
        "sizes": {},
    }
    print(f"{record['hardware']}, {record['threads']} threads, {record['dtype']}")
    for size in flags.size or CASES:
        rows, V, turns = CASES[size]
        seconds = take_turns(steps_of(nanogpt, size, flags.device), turns)
        figures = summarise(seconds)
        record["sizes"][size] = {"rows": rows, "V": V, "turns": turns, "steps": figures}
        print(
            f"\n{size}: {rows} x {SIZES[size][3]} tokens, V {V:,}; medians of {turns} [quartiles]"
        )
        for name, figure in figures.items():
            low, middle, high = figure["ms"]
            line = f"{name:>12} {middle:9.1f} ms [{low:.1f}, {high:.1f}]"
            if "ratio" in figure:
                low, middle, high = figure["ratio"]
                line += f"   {middle:.3f} [{low:.3f}, {high:.3f}] of {figure['to']}"
            print(line)
    if flags.record:
        path = ROOT / "results" / "step.jsonl"
        path.parent.mkdir(exist_ok=True)
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    from support import runtime

    runtime.exit_cleanly(main)
