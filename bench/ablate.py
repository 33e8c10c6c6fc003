"""What each technique does to held-out loss and time: train.py, once for each recipe and seed.

Every recipe gets the same budget on the clock of consumed tokens (--tokens). That axis is held
fixed, seconds and raw tokens are not: a run that drops tokens reads more text for the same budget.
The record keeps all of them. Runs follow each other, recipe by recipe within a seed, so that a slow
spell of the machine does not hit one recipe alone. bench/tables.py makes tables of the records.
With --equal-seconds the first recipe is run once more, with as many tokens as it reads in the
seconds of the last one. A run that is stopped is recorded as far as it came, and no other begins.

    python bench/ablate.py --record                           # every recipe, at the default budget
    python bench/ablate.py --recipes plain all --seeds 1 2 3 -- --tokens 500K
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import ROOT, append, surroundings

from support.base.runtime import exit_cleanly

TECHNIQUES = {
    "plain": "",
    "curriculum": "--curriculum seqlen",
    "ltd": "--ltd",
    "pack": "--pack",
    "all": "--curriculum seqlen --ltd --pack",
}
# Ways to drop tokens, each with the budget whose FLOPs are three quarters of the plain run's;
# bench/cost.py says which share of its seconds that is.
KEEP = "--ltd --ltd-share 0.9 --ltd-pace constant --ltd-start"
LTD = {
    "constant 16": f"{KEEP} 16 --tokens 387072",
    "constant 32": f"{KEEP} 32 --tokens 409600",
    "constant 64": f"{KEEP} 64 --tokens 454656",
    "constant 128": f"{KEEP} 128 --tokens 520192",
    "growing 32": "--ltd --ltd-share 0.7 --ltd-pace linear --ltd-start 32 --tokens 522240",
    "growing 64": "--ltd --ltd-share 0.7 --ltd-pace linear --ltd-start 64 --tokens 536576",
    "growing 128": "--ltd --ltd-share 0.7 --ltd-pace linear --ltd-start 128 --tokens 562176",
    "bypass 64": f"{KEEP} 64 --ltd-mode bypass --tokens 454656",
    "keep 2 at each end": f"{KEEP} 64 --ltd-layers 2-3 --tokens 541696",
    "keep none at the end": f"{KEEP} 64 --ltd-layers 1-5 --tokens 393216",
    "keep none at the start": f"{KEEP} 64 --ltd-layers 0-4 --tokens 393216",
}
# The README's: three quarters of the plain run's time, or half of it.
SHORT = {
    "plain short": "--tokens 600K",
    "plain half": "--tokens 400K",
    "plain long": "--tokens 1M",
    "curriculum short": "--curriculum seqlen --tokens 600K",
    "pack short": "--pack --tokens 600K",
    "all short": "--curriculum seqlen --ltd --pack --tokens 387072",
    "ltd half": "--ltd --tokens 256K",
    "ltd 310K": "--ltd --tokens 310K",
    "all half": "--curriculum seqlen --ltd --pack --tokens 256K",
    "all 300K": "--curriculum seqlen --ltd --pack --tokens 300K",
    "padded": "--pack --pack-max-per-row 1",  # what packing is compared with
}
# Other learning rates than nano's.
RATES = {
    "plain 0.01": "--lr 0.01",
    "plain 0.014": "--lr 0.014",
    "plain 0.028": "--lr 0.028",
    "constant 16 0.014": f"{LTD['constant 16']} --lr 0.014",
    "constant 16 0.028": f"{LTD['constant 16']} --lr 0.028",
}
# Rows cut from the stream, to be compared with plain.
ROWS = {
    "seqlen-128": "--curriculum seqlen --curriculum-start 128",
    "reshape": "--curriculum seqlen-reshape",
    "rarity": "--curriculum rarity",
    "seqlen,rarity": "--curriculum seqlen,rarity",
}
# Pieces of documents, packed, to be compared with pack.
PIECES = {
    "pack seqlen": "--pack --curriculum seqlen",
    "pack seqlen-128": "--pack --curriculum seqlen --curriculum-start 128",
    "pack length": "--pack --curriculum length",
    "pack rarity": "--pack --curriculum rarity",
    "pack rarity-mean": "--pack --curriculum rarity-mean",
    "pack length-rarity": "--pack --curriculum length-rarity",
    "pack seqlen,rarity": "--pack --curriculum seqlen,rarity",
    "pack length value": "--pack --curriculum length --curriculum-by value --curriculum-start 32",
    "pack rarity value": "--pack --curriculum rarity --curriculum-by value --curriculum-start 100",
}
# A BERT's pieces of documents, packed, to be compared with bert.
BERT = {
    "bert": "--model bert --pack --pack-batch rows",
    "bert seqlen": "--model bert --pack --pack-batch rows --curriculum seqlen",
    "bert length": "--model bert --pack --pack-batch rows --curriculum length",
    "bert rarity": "--model bert --pack --pack-batch rows --curriculum rarity",
    "bert seqlen,rarity": "--model bert --pack --pack-batch rows --curriculum seqlen,rarity",
}
# A shadow of the model first, whose layers share weights: by unit, by when it ends, by what the
# optimizers hand over.
SHARE = {
    f"share {group} until {until}": f"--pseudo --pseudo-group {group} --pseudo-until {until}"
    for group in (1, 2, 3)
    for until in (0.05, 0.1, 0.25, 0.5)
}
SHARE |= {
    f"share 3 {state}": f"--pseudo --pseudo-group 3 --pseudo-until 0.1 --pseudo-state {state}"
    for state in ("copy", "reset")
}
SHARE |= {
    f"adamw share 3 {state}": "--optimizer adamw --lr 0.003 --tokens 400K --pseudo"
    f" --pseudo-group 3 --pseudo-until 0.1 --pseudo-state {state}"
    for state in ("rescale", "copy", "reset")
}
SHARE |= {
    "share in steps": "--pseudo --pseudo-group 1 --pseudo-until 0.05,0.1",
    "share adaptively": "--pseudo --pseudo-group 3 --pseudo-until adaptive",
}
# What a shadow is compared with at equal memory: a model that is as small and stays so, or a shadow
# that shares nearly to the end. "3 layers 1.6M" has the plain run's FLOPs in its blocks.
SMALL = {
    "1 layer": "--layers 1",
    "3 layers": "--layers 3",
    "3 layers 1.6M": "--layers 3 --tokens 1.6M",
    "share 1 until 0.99": "--pseudo --pseudo-group 1 --pseudo-until 0.99",
    "share 3 until 0.99": "--pseudo --pseudo-group 3 --pseudo-until 0.99",
}
# Some of the layers first. A budget of consumed tokens buys more text then: 450K with half of the
# layers until 0.75 are as many raw tokens and steps as the plain run's 800K.
GROW = "--pseudo --pseudo-layers 3 --pseudo-until"
GROWN = {
    f"grow {layers} until {until}": f"--pseudo --pseudo-layers {layers} --pseudo-until {until}"
    for layers in (2, 3)
    for until in (0.1, 0.25, 0.5, 0.75)
}
GROWN |= {
    f"grow 3 {what}": f"{GROW} 0.5 {flags}"
    for what, flags in {
        "identity": "--pseudo-new identity",
        "reset": "--pseudo-state reset",
        "wsd": "--schedule wsd",
    }.items()
}
GROWN |= {
    f"grow 3 until {until} {tokens}": f"{GROW} {until} --tokens {tokens}"
    for until in (0.5, 0.75)
    for tokens in ("400K", "450K", "500K", "600K")
}
GROWN |= {
    f"grow {layers} until {until} 400K": f"--pseudo --pseudo-layers {layers} --pseudo-until {until}"
    " --tokens 400K"
    for layers, until in ((2, 0.75), (2, 0.9), (3, 0.9))
}
GROWN |= {
    f"pack grow 3 until {until} {tokens}": f"--pack {GROW} {until} --tokens {tokens}"
    for until in (0.5, 0.75)
    for tokens in ("300K", "400K")
}
GROWN |= {
    f"all grow 3 until {until} {tokens}": f"{TECHNIQUES['all']} {GROW} {until} --tokens {tokens}"
    for until in (0.25, 0.5)
    for tokens in ("256K", "300K")
}
# Their records are of the time when moments were rescaled unless a flag said otherwise.
SHARE, SMALL, GROWN = (
    {
        name: flags + " --pseudo-state rescale" * ("--pseudo" in flags and "-state" not in flags)
        for name, flags in recipes.items()
    }
    for recipes in (SHARE, SMALL, GROWN)
)
RECIPES = TECHNIQUES | LTD | SHORT | RATES | ROWS | PIECES | BERT | SHARE | SMALL | GROWN
# What a run rests on besides its flags: records of one trainer do not compare with another's.
# end: the learning rate was taken at the end of a step; middle: in its middle; split: and Muon
# orthogonalises queries, keys and values apart, at twice nano's learning rate; joint: but together.
TRAINER = "split"


def measure(recipe: str, seed: int, extra: list[str], folder: Path) -> dict:
    """Train in a process of its own, and make a record of what its log says.

    Raises: ValueError if it ends before its first evaluation
    """
    out = folder / f"{recipe}-{seed}-{len(list(folder.iterdir()))}".replace(" ", "-")
    flags = [*RECIPES[recipe].split(), *extra]
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--seed", str(seed)]
    done = subprocess.run([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
    log = out / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    steps, curve, seconds = [], [], 0.0
    for line in lines:
        if line["event"] == "train":
            steps.append(line)
            seconds += line["ms"] / 1e3
        elif line["event"] == "eval":
            curve.append([round(seconds, 1), line["consumed_tokens"], round(line["val_bpb"], 4)])
            final = line
    if not curve:
        raise ValueError(f"{recipe}: status {done.returncode} before its first evaluation")
    last = steps[-1]
    ended = {} if done.returncode == 0 else {"stopped": done.returncode}
    return {
        "bench": "ablate",
        "recipe": recipe,
        "flags": " ".join(flags),
        "seed": seed,
        "trainer": TRAINER,
        "val_bpb": round(final["val_bpb"], 4),
        "held_out_bytes": final["bytes"],
        "steps": last["step"],
        "consumed_tokens": last["consumed_tokens"],
        "real_tokens": last["real_tokens"],
        "layer_tokens": last["layer_tokens"],
        "padding_share": round(sum(step["padding_share"] for step in steps) / len(steps), 4),
        "train_seconds": round(seconds, 1),
        "data_share": round(sum(step["data_ms"] for step in steps) / 1e3 / seconds, 5),
        "mfu": round(statistics.median(step["mfu"] for step in steps), 4),
        "curve": curve,  # seconds, consumed tokens, bits per byte
        **ended,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out loss and time of each recipe.")
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=list(TECHNIQUES), metavar="RECIPE"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1337])
    parser.add_argument("--equal-seconds", action="store_true", help="see above")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/ablate.jsonl")
    parser.add_argument("extra", nargs="*", help="after --: flags for every run")
    args = parser.parse_args()
    machine = surroundings(args.device)  # before the first record makes the working tree dirty
    # a run that is told to stop saves and ends; what it did is still to be recorded
    signal.signal(signal.SIGTERM, lambda *_: None)
    print("recipe                    seed  bits/byte  seconds  consumed M  raw M  layer-tokens M")

    def run(recipe: str, seed: int, extra: list[str]) -> dict:
        found = measure(recipe, seed, ["--device", args.device, *extra], Path(folder))
        print(
            f"{recipe:24} {seed:5} {found['val_bpb']:10.4f} {found['train_seconds']:8.1f}"
            f" {found['consumed_tokens'] / 1e6:11.2f} {found['real_tokens'] / 1e6:6.2f}"
            f" {found['layer_tokens'] / 1e6:15.2f}",
            flush=True,
        )
        if args.record:
            append("ablate", machine | found)
        if "stopped" in found:
            raise ValueError(f"{recipe}: ended with status {found['stopped']}, none comes after it")
        return found

    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            done = [run(recipe, seed, args.extra) for recipe in args.recipes]
            if args.equal_seconds:
                share = done[-1]["train_seconds"] / done[0]["train_seconds"]
                tokens = ["--tokens", str(int(share * done[0]["consumed_tokens"]))]
                run(args.recipes[0], seed, [*args.extra, *tokens])


if __name__ == "__main__":
    exit_cleanly(main)
