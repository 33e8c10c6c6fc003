"""The first minutes on a GPU: describe the machine, check that it learns as a CPU does, profile it.

    machine   versions, and measured ceilings: a copy on the device, matrix products, the link to
              the host, the time to launch a kernel and to wait for the device
    losses    train.py for 30 steps on the embedded corpus, once for each way to run that has its
              own code on a GPU, all side by side; each loss is compared with a CPU's in fp32
    profile   the kernels that take the time of a step; on a CPU, torch's operators

results/first-look.jsonl has the losses of a CPU in fp32, in two versions: exact, and with the
inputs, weights, outputs and gradients of each linear layer rounded to bf16. A GPU's losses may be
at most FACTOR times as far from the exact ones as the rounded ones are, both at the worst step and
at the worst of the first EARLY steps. This holds for the run that is killed and resumed, too. TF32
rounds 8 times finer, so it is allowed an eighth of the early distance; within 30 steps any rounding
grows equally large.

    OMP_NUM_THREADS=1 python bench/first_look.py curves --record     # on a CPU, takes some minutes
    python bench/first_look.py machine losses profile --device cuda --record
    OMP_NUM_THREADS=2 python bench/first_look.py profile --size 6x128
"""

import argparse
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from measure import (
    RESULTS,
    ROOT,
    command_line,
    measured,
    product_rate,
    recorder,
    records,
    significant,
    timed,
)
from step import CASES, VARIANTS, build_ours
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import train
from prepare import embedded_store
from support.process import exit_cleanly
from support.run import read_log

# ---- machine


PACKAGES = ("triton", "torchao", "pytest", "pytest-xdist", "hypothesis", "tiktoken")


def ceilings(args: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """Measure rates and latencies that nothing on this machine can beat."""
    device = args.device
    here, there = torch.ones(2, 2**16 if args.toy else 2**28, device=device)
    host = torch.ones(len(here), pin_memory=device == "cuda")
    copies = {"copy": (there, here), "to the device": (here, host), "to the host": (host, here)}
    for name, (to, origin) in copies.items():
        moved = host.nbytes * (2 if name == "copy" else 1)  # read and written
        copy = partial(to.copy_, origin, non_blocking=True)
        ms = statistics.median([timed([copy], device).ms for _ in range(6)][1:])
        yield name, {"gb_per_s": significant(moved / 1e6 / ms, 4), "mb": host.nbytes / 1e6}
    del here, there, host, copies, copy, to, origin
    for dtype in (torch.bfloat16, torch.float32):
        rate = product_rate(device, dtype)
        name = f"product, {str(dtype).removeprefix('torch.')}"
        yield name, {"tflops": significant(rate / 1e12, 4)}
    one = torch.zeros(1, device=device)
    for name, call, calls in (("launch", partial(one.add_, 1), 2000), ("wait", one.item, 200)):
        one.item()  # wait until the device is idle
        yield name, {"us": significant(1e3 * timed(calls * [call], "cpu").ms, 3)}


def look_at_machine(args: argparse.Namespace) -> None:
    if command := shutil.which("nvidia-smi"):
        print(subprocess.run([command], capture_output=True, text=True).stdout)
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    versions = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    versions |= {"C compiler": compiler or "missing", "system": platform.platform()}
    versions |= dict.fromkeys(PACKAGES, "missing")
    versions |= {each.name: each.version for each in distributions() if each.name in PACKAGES}
    about = {"part": "machine", "versions": versions, "cores": os.cpu_count()}
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")  # as train.py does
        properties = torch.cuda.get_device_properties(0)
        about["capability"] = f"{properties.major}.{properties.minor}"
        about["processors"] = properties.multi_processor_count
        about["memory_gb"] = round(properties.total_memory / 1e9, 1)
    args.keep(about)
    for name, figure in ceilings(args):
        args.keep({"part": "ceiling", "what": name, **figure})


# ---- losses

COMMON = "--layers 6 --tied --batch-tokens 2048 --tokens 61440 --final-eval-tokens 2048"
# explicit, because defaults change
COMMON += " --seq-len 256 --eval-every 0 --checkpoint-every 0 --beta2 0.95"
TOY = "--layers 2 --heads 2 --width 16 --seq-len 32 --batch-tokens 2048"
CURVES = {  # runs whose losses on a CPU are recorded
    "plain": "",
    "AdamW": "--optimizer adamw --lr 0.003",
    "ltd": "--ltd",
    "pack": "--pack",
    "all on": "--curriculum seqlen --ltd --pack",
    "bert": "--model bert --nsp --pack --lr 0.002",
}
FACTOR = 5  # 2 would do, but only a GPU computes the head and Muon's products in bf16
EARLY = 8  # steps in which rounding has not grown yet


class Way(NamedTuple):
    """A way to run train.py. `like` names the curve that it should follow."""

    flags: str
    like: str = "plain"
    finer: int = 1  # 8 for TF32, which has three bits more than bf16


WAYS = {name: Way(flags, name) for name, flags in CURVES.items()} | {
    "AdamW, fp32": Way(f"{CURVES['AdamW']} --dtype fp32", "AdamW", finer=8),
    "compile": Way("--compile"),
    "compile, all on": Way(f"{CURVES['all on']} --compile", "all on"),
    "offload": Way("--offload --offload-budget 10MB"),
    "fsdp": Way("--fsdp"),
    "killed and resumed": Way("--checkpoint-every 6144"),
}


def losses_of(name: str, flags: str) -> list[float] | str:
    """Train in a separate process; returns the loss of each step or, if it fails, an error."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        program = [__file__, "rounded"] if "rounded" in name else [ROOT / "train.py"]
        command = [sys.executable, *map(str, program), "--out", str(out)]
        start = [*command, *COMMON.split(), *flags.split()]
        if "killed" in name:
            status = kill_after_a_checkpoint(start, out)
            if status >= 0:
                return f"ended with status {status} before it could be killed"
            start = [*command, "--resume"]
        done = subprocess.run(start, capture_output=True, text=True)
        if done.returncode:
            said = " / ".join(done.stderr.strip().splitlines()[-3:])
            return f"ended with status {done.returncode}: {said}"
        return [line["loss"] for line in read_log(out) if line["event"] == "train"]


def kill_after_a_checkpoint(command: list[str], out: Path) -> int:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and not list(out.glob("step-*.pt")):
            time.sleep(0.002)
        run.kill()
    return run.returncode


def compare(way: Way, losses: list[float], curves: dict[str, list[float]]) -> dict:
    """Compare a run's losses, step by step, with the curve that it should follow."""
    exact = curves[way.like]
    rounded = [abs(a - b) for a, b in zip(curves[f"{way.like}, rounded"], exact, strict=True)]
    pairs = zip(losses, exact, strict=True) if len(losses) == len(exact) else [(math.inf, 0)]
    differences = [abs(a - b) for a, b in pairs]  # infinite if the run has another length
    tolerance, early = FACTOR * max(rounded), FACTOR / way.finer * max(rounded[:EARLY])
    return {
        "like": way.like,
        "worst_difference": significant(max(differences), 3),
        "at_step": 1 + differences.index(max(differences)),
        "tolerance": significant(tolerance, 3),
        "tolerance_early": significant(early, 3),
        "follows": max(differences) <= tolerance and max(differences[:EARLY]) <= early,
        "losses": [round(loss, 5) for loss in losses],
        "differences": [round(difference, 5) for difference in differences],
    }


def train_rounded(argv: list[str]) -> int:
    """Run train.py in fp32, but round inputs, weights, outputs and their gradients to bf16."""
    exact = F.linear

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.bfloat16().to(x.dtype)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return cut(exact(cut(x), cut(weight), cut(bias)))

    with patch.object(F, "linear", linear):
        return train.main(argv)


def runs(jobs: dict[str, str], at_once: int) -> Iterator[tuple[str, list[float] | str]]:
    """Train `at_once` jobs side by side; yield the losses of each, or its error, when it ends.

    Args: jobs name -> flags
    """
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(losses_of, name, flags): name for name, flags in jobs.items()}
        for ended in as_completed(running):
            yield running[ended], ended.result()


def flags_for(args: argparse.Namespace, flags: str) -> str:
    eager = "" if "--compile" in flags else " --compile off"
    return f"{flags}{eager} --device {args.device}" + f" {TOY}" * args.toy


def take_curves(args: argparse.Namespace) -> None:
    """Record a CPU's losses, with which the runs of a GPU are compared."""
    if args.device != "cpu":
        raise ValueError("curves are recorded on a CPU: leave out --device")
    curves = {"plain": CURVES["plain"]} if args.toy else CURVES
    jobs = {name: flags_for(args, flags) for name, flags in curves.items()}
    jobs |= {f"{name}, rounded": flags for name, flags in jobs.items()}
    for name, losses in runs(jobs, at_once=2):
        if isinstance(losses, str):
            raise ValueError(f"{name}: {losses}")
        args.keep({"part": "curve", "run": name, "losses": [round(loss, 6) for loss in losses]})


def recorded_curves(folder: Path) -> dict[str, list[float]]:
    found = [record for record in records("first-look", folder) if record["part"] == "curve"]
    return {record["run"]: record["losses"] for record in found}


def look_at_losses(args: argparse.Namespace) -> None:
    """Compare every way to run with its curve.

    Raises: ValueError naming the ways that fail, or that do not follow their curve
    """
    on_cpu, wrong = args.device == "cpu", []
    names = ["plain", "killed and resumed"] if args.toy else list(WAYS)
    curves = recorded_curves(RESULTS if args.toy else ROOT / "results")
    embedded_store("pd4k")  # make it now, because all runs need it at the same time
    jobs = {name: flags_for(args, WAYS[name].flags) for name in names}
    for name, losses in runs(jobs, at_once=2 if on_cpu else len(jobs)):
        way = WAYS[name]
        failed = isinstance(losses, str)
        found = {"error": losses, "follows": False} if failed else compare(way, losses, curves)
        if not found["follows"]:
            wrong.append(name)
        args.keep({"part": "way", "run": name, "flags": way.flags, **found})
    if wrong:
        raise ValueError(f"losses of {', '.join(wrong)} differ from a CPU's: see above")


# ---- profile

PROFILED = 3  # steps profiled
MOST_KERNELS = 25


def look_at_profile(args: argparse.Namespace) -> None:
    """List the kernels by their time in a step, in milliseconds and as a share of the step."""
    size, device = "toy" if args.toy else args.size, args.device
    side = "CUDA" if device == "cuda" else "CPU"
    flags = "--compile on" if args.compile else ""
    step = build_ours(CASES[size].on(device), VARIANTS["plain"], device, flags)
    for _ in range(3):
        step()
    with profile(activities=[getattr(ProfilerActivity, side)]) as profiled:
        seconds = [measured(step).seconds for _ in range(PROFILED)]
    step_ms = 1e3 * sum(seconds) / PROFILED
    kernels = []
    for event in profiled.key_averages():
        if event.device_type == getattr(DeviceType, side):
            us = event.self_device_time_total if side == "CUDA" else event.self_cpu_time_total
            ms = us / 1e3 / PROFILED
            about = {"name": event.key[:120], "calls": significant(event.count / PROFILED, 4)}
            kernels.append(about | {"ms": significant(ms, 4), "share": round(ms / step_ms, 4)})
    kernels.sort(key=lambda kernel: -kernel["ms"])
    busy_ms = sum(kernel["ms"] for kernel in kernels)
    figures = {"step_ms": significant(step_ms, 4), "busy_ms": significant(busy_ms, 4)}
    figures["kernels"] = kernels[:MOST_KERNELS]
    args.keep({"part": "profile", "size": size, "compile": args.compile, **figures})


PARTS = {
    "curves": take_curves,
    "machine": look_at_machine,
    "losses": look_at_losses,
    "profile": look_at_profile,
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--size", choices=CASES, default="124M", help="for profile (124M)")
    parser.add_argument("--compile", action="store_true", help="for profile, like train.py's")
    parser.add_argument("--toy", action="store_true", help="tiny models, to test this script")
    args = parser.parse_args()
    args.keep = recorder("first-look", args)
    for part in args.parts:
        PARTS[part](args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rounded"]:
        exit_cleanly(lambda: train_rounded(sys.argv[2:]))
    exit_cleanly(main)
