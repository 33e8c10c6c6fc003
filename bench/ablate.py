"""What each technique does to held-out loss and time: train.py, once for each recipe and seed.

Recipes stand in bench/recipes.ini; another one is given as "name = flags". Every recipe gets the
same budget on the clock of consumed tokens (--tokens). That axis is held fixed, seconds and raw
tokens are not: a run that drops tokens reads more text for the same budget. The record keeps all of
them. Runs follow each other, recipe by recipe within a seed, so that a slow spell of the machine
does not hit one recipe alone. bench/tables.py makes tables of the records.

With --equal-seconds the first recipe is run once more, with as many tokens as it reads in the
seconds of the last one. A run that is stopped is recorded as far as it came, and no other begins.

    python bench/ablate.py --record                           # every technique, default budget
    python bench/ablate.py --recipes plain all "mine = --ltd --pack" --seeds 1 2 3 -- --tokens 500K
"""

import signal
import statistics
import subprocess
import sys
import tempfile
from configparser import ConfigParser
from pathlib import Path

from measure import ROOT, command_line, recorder

from support.base.runtime import exit_cleanly
from support.run.folder import read_log


def recipes() -> dict[str, dict[str, str]]:
    """Section -> name -> flags."""
    parser = ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # names as they are written
    parser.read(Path(__file__).with_name("recipes.ini"))
    return {section: dict(parser[section]) for section in parser.sections()}


GROUPS = recipes()
RECIPES = {name: flags for group in GROUPS.values() for name, flags in group.items()}
# What a run rests on besides its flags: records of one trainer do not compare with another's.
# end: the learning rate was taken at the end of a step; middle: in its middle; split: and Muon
# orthogonalises queries, keys and values apart, at twice nano's learning rate; joint: but together.
TRAINER = "split"


def chosen(text: str) -> tuple[str, str]:
    """A recipe by name, or a new one as "name = flags": its name and flags."""
    name, is_new, flags = text.partition(" = ")
    if not is_new and name not in RECIPES:
        raise ValueError(f"--recipes {name}: not in bench/recipes.ini; give it as 'name = flags'")
    return name, flags if is_new else RECIPES[name]


def measure(recipe: str, flags: list[str], seed: int, folder: Path) -> dict:
    """Train in a process of its own, and make a record of what its log says.

    Raises: ValueError if it ends before its first evaluation
    """
    out = folder / f"{recipe}-{seed}-{len(list(folder.iterdir()))}".replace(" ", "-")
    command = [sys.executable, str(ROOT / "train.py"), *flags, "--seed", str(seed)]
    done = subprocess.run([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
    steps, curve, seconds = [], [], 0.0
    for line in read_log(out):
        if line["event"] == "train":
            steps.append(line)
            seconds += line["ms"] / 1e3
        elif line["event"] == "eval":
            curve.append([round(seconds, 1), line["consumed_tokens"], round(line["val_bpb"], 4)])
            final = line
    if not curve:
        raise ValueError(f"{recipe}: status {done.returncode} before its first evaluation")
    last = steps[-1]
    return {
        "recipe": recipe,
        "flags": " ".join(flags),
        "seed": seed,
        "trainer": TRAINER,
        "val_bpb": round(final["val_bpb"], 4),
        "held_out_bytes": final["bytes"],
        "steps": last["step"],
        **{f"{kind}_tokens": last[f"{kind}_tokens"] for kind in ("consumed", "real", "layer")},
        "padding_share": round(statistics.mean(step["padding_share"] for step in steps), 4),
        "train_seconds": round(seconds, 1),
        "data_share": round(sum(step["data_ms"] for step in steps) / 1e3 / seconds, 5),
        "mfu": round(statistics.median(step["mfu"] for step in steps), 4),
        "curve": curve,  # seconds, consumed tokens, bits per byte
        **({"stopped": done.returncode} if done.returncode else {}),
    }


def main() -> None:
    parser = command_line(__doc__)
    default = list(GROUPS["techniques"])
    parser.add_argument("--recipes", nargs="+", default=default, metavar="RECIPE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1337])
    parser.add_argument("--equal-seconds", action="store_true", help="see above")
    parser.add_argument("extra", nargs="*", help="after --: flags for every run")
    args = parser.parse_args()
    runs = [chosen(text) for text in args.recipes]
    keep = recorder("ablate", args)
    # a run that is told to stop saves and ends; what it did is still to be recorded
    signal.signal(signal.SIGTERM, lambda *_: None)

    def run(recipe: str, flags: str, seed: int, *more: str) -> dict:
        every = ["--device", args.device, *args.extra, *more]
        figures = measure(recipe, [*flags.split(), *every], seed, Path(folder))
        keep(figures)
        if "stopped" in figures:
            raise ValueError(f"{recipe}: ended with status {figures['stopped']}, so none follows")
        return figures

    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            done = [run(recipe, flags, seed) for recipe, flags in runs]
            if args.equal_seconds:
                share = done[-1]["train_seconds"] / done[0]["train_seconds"]
                run(*runs[0], seed, "--tokens", str(int(share * done[0]["consumed_tokens"])))


if __name__ == "__main__":
    exit_cleanly(main)
