"""What --dry-run says of a run against what the run takes: seconds, and the peak of its memory.

Each case is forecast and then made, in processes of their own. The run's seconds are those from its
first step to its end, taken from the log, with those between its lines; the memory is the highest
resident set of the process, as the kernel has it, and on a GPU the most that the device lost to it
(CUDA's context too, some 0.5 GB). A run may be cut short by --tokens: the forecast
is then of the shorter run.

    OMP_NUM_THREADS=2 python bench/forecast.py                    # all cases
    OMP_NUM_THREADS=2 python bench/forecast.py --cases nano --record
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from record import ROOT, append, surroundings

CASES = {
    "nano": "--tokens 200000 --eval-tokens 8192 --final-eval-tokens 32768",
    "12 x 256": "--layers 12 --width 256 --tokens 100000 --eval-tokens 8192"
    " --final-eval-tokens 16384",
    "124M": "--size 124M --batch-tokens 8192 --tokens 40960 --eval-every 0 --checkpoint-every 0"
    " --final-eval-tokens 4096",
    "nano, all techniques": "--tokens 100000 --eval-tokens 8192 --final-eval-tokens 32768"
    " --curriculum seqlen --ltd --pack",
    "124M on a GPU": "--size 124M --batch-tokens 65536 --tokens 3276800 --eval-every 0"
    " --checkpoint-every 0 --final-eval-tokens 65536",
    "toy": "--layers 1 --width 16 --heads 1 --tokens 8192 --eval-every 0 --checkpoint-every 0"
    " --final-eval-tokens 2048",
}
ON = {
    "cpu": ("nano", "12 x 256", "124M", "nano, all techniques"),
    "cuda": ("nano", "124M on a GPU"),
}


class Found(NamedTuple):
    seconds: float
    bytes: int


def forecast(flags: list[str], folder: Path) -> Found:
    """What the dry run says."""
    command = [sys.executable, ROOT / "train.py", *flags, "--out", folder, "--dry-run"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    seconds = re.search(r"time: about ([\d,.]+) s", out)[1]
    peak = re.search(r"at most ([\d,.]+) GB", out)[1]
    return Found(float(seconds.replace(",", "")), round(float(peak.replace(",", "")) * 1e9))


def made(flags: list[str], folder: Path, device: str) -> Found:
    """What the run takes, from its log's first line on."""
    before = device_bytes() if device == "cuda" else 0
    most = 0
    command = [sys.executable, ROOT / "train.py", *flags, "--out", folder]
    began = None
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.returncode is None:
            done, status, usage = os.wait4(child.pid, os.WNOHANG)
            if done:
                child.returncode = os.waitstatus_to_exitcode(status)
            elif began is None and (folder / "log.jsonl").exists():
                began = time.perf_counter()
            if device == "cuda":
                most = max(most, device_bytes() - before)
            time.sleep(0.01)
        ended = time.perf_counter()
    if child.returncode:
        raise ValueError(f"{' '.join(map(str, command))} ended with status {child.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return Found(ended - began, most or usage.ru_maxrss * unit)


def device_bytes() -> int:
    """In use on the GPU, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/forecast.jsonl")
    args = parser.parse_args()
    about = surroundings(args.device)
    print(f"{'':22} {'seconds: said':>14} {'made':>8} {'ratio':>6}   {'GB: said':>9} made   ratio")
    for name in args.cases or ON[args.device]:
        flags = [*CASES[name].split(), "--device", args.device]
        with tempfile.TemporaryDirectory() as place:
            said = forecast(flags, Path(place) / "run")
            run = made(flags, Path(place) / "run", args.device)
            lines = (Path(place) / "run/log.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if line["event"] == "train"]
        seconds, size = said.seconds / run.seconds, said.bytes / run.bytes
        print(
            f"{name:22} {said.seconds:14.1f} {run.seconds:8.1f} {seconds:6.2f}"
            f"   {said.bytes / 1e9:9.2f} {run.bytes / 1e9:5.2f} {size:6.2f}",
            flush=True,
        )
        if args.record:
            record = {
                "bench": "forecast",
                "case": name,
                "flags": CASES[name],
                "steps": len(steps),
                "seconds_said": said.seconds,
                "seconds": round(run.seconds, 1),
                "bytes_said": said.bytes,
                "bytes": run.bytes,
            }
            append("forecast", about | record)


if __name__ == "__main__":
    main()
