"""The tables in docs/, made from the records in results/.

    python docs/tables.py                  # writes every table anew

In a page, a comment names a function below with its arguments; the table stands between this
comment and the next. Losses are held-out bits per byte.
"""

import re
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "bench"))

from frontier import (
    arms_in,
    flags_in,
    markdown_table,
    points_in,
    runs_table,
    spread,
    written,
)
from measure import records

MARKED = re.compile(r"(<!-- table ([^\n]*) -->\n).*?(<!-- /table -->)", re.DOTALL)

ALL = "--layers {} --batch-tokens {} --tokens {} --ltd --pack --curriculum seqlen"
GROWING = "--layers 2 --batch-tokens 8192 --tokens {} --pack --curriculum seqlen"
SHADOW = "--layers 6 --tokens {} --pseudo --pseudo-state rescale --pseudo"
LEVELS = "--curriculum-pace discrete:128@0.5:512@0.85:2048"
HEADLINES = {  # what the table calls a run: section of bench/frontier.ini, flags
    "four layers, all three (README's command)": ("books", ALL.format(4, 8192, "1.1M")),
    "the same, `--tokens 2.2M`": ("books", ALL.format(4, 8192, "2.2M")),
    "two layers, `--tokens 4.6M --pack --curriculum seqlen`": ("books", GROWING.format("4.6M")),
    "the same, `--tokens 13.7M`, three levels of length": (
        "books",
        f"{GROWING.format('13.7M')} {LEVELS}",
    ),
    "`--pack` on short documents; plain is padded": (
        "gpt",
        "--layers 2 --batch-tokens 2048 --tokens 1M --pack",
    ),
    "the same for a BERT": ("bert", "--layers 2 --batch-tokens 8192 --tokens 1M --pack"),
    "eight layers, `--ltd`": ("given", "--layers 8 --tokens 1.07M --ltd"),
    "three layers, all three": ("nano", ALL.format(3, 4096, "2M")),
}


def headline(name: str, machine: str = "") -> list[str]:
    """Return seeds, seconds, loss, shares of the same and the best plain model's time."""
    section, flags = HEADLINES[name]
    points = points_in(section, "cpu", machine=machine)
    point = next((p for p in points if p.flags == flags), None)
    if point is None:
        return 5 * ["-"]
    cells = runs_table([point], points).splitlines()[-1].strip("| ").split(" | ")
    return [cells[1], cells[2], f"{point.loss:.3f}", *cells[-2:]]


def headlines() -> str:
    rows = []
    for name, (section, _) in HEADLINES.items():
        row_length = re.search(r"--seq-len (\d+)", arms_in([section])[0].shared)[1]
        rows.append([row_length, name, *headline(name), *headline(name, "AVX2")[3:]])
    names = ["rows of", "run", "seeds", "seconds", "bits per byte", "same model", "best plain"]
    return markdown_table([*names, "same model, AVX2", "best plain, AVX2"], rows)


RUNS = {  # section of bench/frontier.ini, flags of all runs in the table, further ones of each
    "long rows": (
        "books",
        "--layers 1 --batch-tokens 4096 --tokens 1.8M --beta2 0.95",
        "",
        "--curriculum seqlen --dtype bf16",
        "--pack --dtype bf16",
        "--curriculum seqlen-reshape --dtype bf16",
        "--pack --curriculum seqlen",
    ),
    "one stream": (
        "english",
        "--batch-tokens 4096",
        "--layers 3 --tokens 5.8M",
        "--layers 3 --tokens 5.8M --pack",
        "--layers 2 --tokens 8.1M",
        "--layers 2 --tokens 8.1M --pack",
    ),
    "shadows": (
        "tied",
        "--batch-tokens 2048",
        "--layers 3 --tokens 800K",
        "--layers 6 --tokens 800K",
        f"{SHADOW.format('800K')}-group 1 --pseudo-until 0.05",
        f"{SHADOW.format('800K')}-group 3 --pseudo-until 0.05",
        f"{SHADOW.format('450K')}-layers 3 --pseudo-until 0.75",
    ),
}


def runs(name: str) -> str:
    """Compare runs of a section with its plain runs. The flags that all have stand above."""
    section, start, *more = RUNS[name]
    points = points_in(section, "cpu")
    found = {frozenset(flags_in(p.flags)): p for p in points}
    chosen = [found[frozenset(flags_in(f"{start} {rest}"))] for rest in more]
    shared = f"{arms_in([section])[0].shared} {start}"
    return f"All have `{shared}`.\n\n{runs_table(chosen, points, unsaid=flags_in(start))}"


KEPT = {  # tokens per weight of the blocks: section, flags, budgets with all, 1/2, 1/4, 1/16 kept
    "0.5, width 128": ("given", "--layers 8 --tokens", "750K", "710K", "635K", "535K"),
    "1, width 128": ("given", "--layers 8 --tokens", "1.5M", "1.42M", "1.27M", "1.07M"),
    "2, width 128": ("given", "--layers 8 --tokens", "3M", "-", "2.54M", "2.14M"),
    "10, width 64": ("given-small", "--tokens", "4M", "3.7M", "3.2M", "2.6M"),
}
KEEPING = {
    "all": "",
    "1/2": " --ltd --ltd-start 256",
    "1/4": " --ltd --ltd-start 128",
    "1/16": " --ltd",
}


def kept() -> str:
    """Show the losses of eight layers at equal FLOPs, with the number of seeds."""
    rows = []
    for name, (section, start, *budgets) in KEPT.items():
        losses = {p.flags: p.losses for p in points_in(section, "cpu", "raw tokens")}
        arms = [f"{start} {b}{more}" for b, more in zip(budgets, KEEPING.values(), strict=True)]
        rows.append([name, *(mean_of(losses.get(flags, [])) for flags in arms)])
    return markdown_table(["tokens per weight", *KEEPING], rows)


def mean_of(losses: list[float]) -> str:
    """Example: "1.646 (3)" for three seeds"""
    return f"{statistics.mean(losses):.3f} ({len(losses)})" if losses else "-"


def losses(file: str, section: str) -> str:
    """List the runs of a section that are compared with each other, and with no frontier."""
    made = [record for record in records(file) if record["section"] == section]
    rows = []
    for flags in {record["flags"] for record in made}:
        seeds = [record for record in made if record["flags"] == flags]
        read = written("raw tokens", seeds[0]["real_tokens"])
        loss = spread([record["val_bpb"] for record in seeds])
        rows.append([f"`{flags}`", str(len(seeds)), read, loss])
    rows.sort(key=lambda row: row[-1])
    table = markdown_table(["flags", "seeds", "raw tokens", "bits per byte"], rows)
    return f"All have `{made[0]['shared']}`.\n\n{table}"


def across(section: str, flag: str, *unsaid: str) -> str:
    """Show losses of results/arms.jsonl: a column for each value of `flag`, a line for the others.

    A wide table has means only.

    Args: unsaid flags that make no line of their own
    """
    made = [record for record in records("arms") if record["section"] == section]
    found: dict[str, dict[str, list[float]]] = {}
    for record in made:
        flags = [f for f in flags_in(record["flags"]) if f.split()[0] not in unsaid]
        column = next((f"`{f}`" for f in flags if f.split()[0] == flag), "default")
        others = " ".join(f for f in flags if f.split()[0] != flag)
        found.setdefault(others, {}).setdefault(column, []).append(record["val_bpb"])
    columns = sorted({column for losses in found.values() for column in losses})
    cell = spread if len(columns) < 3 else lambda losses: f"{statistics.mean(losses):.3f}"
    rows = [
        [f"`{others or 'plain'}`", *(cell(of[c]) for c in columns)] for others, of in found.items()
    ]
    table = markdown_table(["flags", *columns], rows)
    return f"All have `{made[0]['shared']}`.\n\n{table}"


STEPS = [  # what changes, in a step of; then file of records, what identifies one, name in it
    ("packed rows", "6x128", "step", "6x128 adamw", "packed"),
    ("1/2 of the tokens kept in 4 layers", "6x128", "step", "6x128 adamw", "keep 1/2"),
    ("32 answers packed, not padded, Muon", "4x128", "step", "qa muon", "same documents"),
    ("optimizer state offloaded", "12x256", "scale", "12x256 offload", "state"),
    ("gradients and weights too", "12x256", "scale", "12x256 offload", "weights"),
    ("`--fsdp`, one process", "6x128", "scale", "nano fsdp", "--fsdp"),
    ("packed rows, compiled", "124M, H200", "gpu-step", "124M adamw", "packed"),
    ("1/2 kept in 10 layers, compiled", "124M, H200", "gpu-step", "124M adamw", "keep 1/2"),
]


def steps() -> str:
    """Show a step's time as a share of the step without the change: median and quartiles."""
    rows = []
    for change, step, file, identity, name in STEPS:
        for record in records(file):  # the last one counts
            about = f"{record.get('size')} {record.get('part') or record.get('optimizer')}"
            if about == identity and name in record["steps"]:
                timed = record["steps"][name]
        low, median, high = (f"{ratio:.2f}" for ratio in timed["ratio"])
        flops = f"{timed['predicted']:.2f}" if "predicted" in timed else "-"
        rows.append([change, step, f"{median} ({low} to {high})", flops])
    return markdown_table(["what changes", "in a step of", "time", "FLOPs"], rows)


FUNCTIONS = {f.__name__: f for f in (headlines, runs, kept, losses, across, steps)}


def with_tables(page: str) -> str:
    """Return a page with its tables made anew."""

    def filled(mark: re.Match) -> str:
        name, *arguments = shlex.split(mark[2])
        return f"{mark[1]}{FUNCTIONS[name](*arguments)}\n{mark[3]}"

    return MARKED.sub(filled, page)


if __name__ == "__main__":
    for path in Path(__file__).resolve().parent.glob("*.md"):
        path.write_text(with_tables(path.read_text()))
