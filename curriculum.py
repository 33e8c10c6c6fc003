"""Curriculum learning: how hard a sample may be, as a function of the training clock.

Metric `seqlen`: difficulty is length. Without packing, rows are cut to their first `seq_len` tokens
and grow; with packing, rows keep their length and the pieces laid into them grow, so shapes,
batch size and compiled code stay the same.

Does not read data: it is a pure function from progress to a length, asked once a step.

Paper: Li et al., arXiv 2108.06084 (sequence length warmup); arXiv 2212.03597, section 3.1.

    python curriculum.py pace --start 64 --end 256 --share 0.4      # the length over a run
"""

import argparse
import math
from dataclasses import dataclass, field

METRICS = ("seqlen",)


@dataclass(frozen=True)
class CurriculumConfig:
    metric: str = field(
        default="none",
        metadata={"help": f"order training by difficulty: none, or one of {', '.join(METRICS)}"},
    )
    start: int | None = field(
        default=None, metadata={"help": "length at first, in tokens (default: half of --seq-len)"}
    )
    share: float = field(
        default=0.4, metadata={"help": "share of --tokens after which samples have full length"}
    )


MULTIPLE = 8  # lengths move in steps of 8: few shapes, and matrix units work in eights


def check_metric(metric: str) -> None:
    """Raise ValueError naming the known metrics if `metric` is none of them."""
    if metric not in ("none", *METRICS):
        known = ", ".join(("none", *METRICS))
        raise ValueError(f"--curriculum {metric} is unknown: choose one of {known}")


def pace(progress: float, start: int, end: int, share: float, multiple: int = MULTIPLE) -> int:
    """Difficulty at a point of the run: linear from `start` to `end`, then `end`.

    Paper:    arXiv 2212.03597, section 3.1, linear pacing
    Args:     progress consumed tokens as a share of the budget, 0..1
              share    progress from which on the value is exactly `end`
              multiple values between are rounded down to one of these
    Returns:  a value in start..end
    Deviates: upstream can fall below `start` by rounding, and reach `end` late
    Example:  pace(0.2, 64, 256, 0.4) == 160, half-way
    """
    if progress >= share:
        return end
    value = math.floor(progress / share * (end - start) + start)
    return min(max(value // multiple * multiple, start), end)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="curriculum.py", description="Curriculum schedules.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("pace", help="print the difficulty over a run")
    verb.add_argument("--start", type=int, default=64)
    verb.add_argument("--end", type=int, default=256)
    verb.add_argument("--share", type=float, default=0.4, help="progress at which --end is reached")
    verb.add_argument("--multiple", type=int, default=MULTIPLE)
    args = parser.parse_args(argv)
    if not 1 <= args.start <= args.end:
        raise ValueError(f"--start {args.start} must lie in 1..{args.end}, which is --end")
    for tenth in range(11):
        value = pace(tenth / 10, args.start, args.end, args.share, args.multiple)
        print(f"{tenth / 10:5.0%} {value:6}")


if __name__ == "__main__":
    import runtime

    runtime.exit_cleanly(main)
