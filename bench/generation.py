"""What a cache of keys and values saves of the time to write a text, as sample.py writes it.

A model of random weights draws a text again and again, with the cache and without, each in a
process of its own, in turns. Only drawing is timed: the model is loaded, and nothing is printed.
With the cache a small model draws in one thread on a CPU, whatever OMP_NUM_THREADS says, as the
command does. On a CPU nothing is timed unless both draw the same tokens. On a GPU, in bf16, two
scores may be closer than their rounding, so there it is recorded how many tokens are the same.

    OMP_NUM_THREADS=2 python bench/generation.py                        # nano, 400 tokens
    OMP_NUM_THREADS=2 python bench/generation.py --record               # and a line of results/
    python bench/generation.py --size 124M --tokens 1000 --device cuda
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from record import append, quartiles, surroundings
from turns import ratios, take_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import sample
from model import Transformer, TransformerConfig
from support.base import runtime
from support.base.rng import generator
from support.step.sizes import SIZES

SIZE_NAMES = [name for name in SIZES if not name.startswith("bert")]
VARIANTS = {"cached": True, "uncached": False}


def build(size: str, count: int, device: str, cached: bool) -> Callable[[], list[int]]:
    """In a process of its own: what draws the text."""
    here, shape, is_nano = runtime.start(device, "auto"), SIZES[size], size == "nano"
    words = 4097 if is_nano else 50257  # pd4k's or GPT-2's, padded to a multiple of 64
    width, rest = shape.width, (shape.seq_len, -(-words // 64) * 64)
    pos = "rope" if is_nano else "learned"
    torch.manual_seed(0)
    config = TransformerConfig("gpt", shape.layers, shape.heads, width, 4 * width, *rest, pos)
    model = Transformer(config).to(here.device).eval()
    if cached:
        sample.use_few_threads(model)  # as the command does; whole rows are worth sharing

    def draw() -> list[int]:
        how = {"generator": generator(torch.device("cpu"), 1), "cached": cached}
        with torch.inference_mode(), here.autocast():
            return list(sample.generate(model, [words - 1], count, allowed=words, **how))

    return draw


def same_tokens(one: list[int], other: list[int]) -> int:
    """How many are equal before the first that is not.

    Example:  same_tokens([3, 1, 4], [3, 1, 5]) is 2
    """
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(differ, len(one))


def measure(size: str, count: int, device: str, turns: int) -> Iterator[dict]:
    """Figures of both, on a GPU of the first before; ValueError where a CPU's texts differ."""
    threads = torch.get_num_threads()
    texts = [build(size, count, device, cached)() for cached in VARIANTS.values()]
    torch.set_num_threads(threads)
    same = same_tokens(*texts)
    if same < count and device == "cpu":
        raise ValueError(f"with a cache token {same + 1} is another: nothing is timed")
    jobs = {name: (build, size, count, device, cached) for name, cached in VARIANTS.items()}
    for _, taken in take_turns(jobs, turns, device):
        seconds = {name: [one.seconds for one in turn] for name, turn in taken.items()}
        figures = {
            "same_tokens": same,
            "seconds": {name: quartiles(spent) for name, spent in seconds.items()},
            "ms_of_a_token": {
                name: quartiles([1e3 * one / count for one in spent])
                for name, spent in seconds.items()
            },
        }
        if len(taken) == len(VARIANTS):
            figures["cached_to_uncached"] = quartiles(ratios(taken["cached"], taken["uncached"]))
        yield figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=SIZE_NAMES, default="nano")
    parser.add_argument("--tokens", type=int, default=400, help="of the text (400)")
    parser.add_argument("--turns", type=int, default=9, help="of each (9)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--record", action="store_true", help="append to results/generation.jsonl")
    args = parser.parse_args()
    for name, least in (("tokens", 1), ("turns", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)}: choose {least} or more")
    about = surroundings(args.device) | {"bench": "generation", "size": args.size}
    about |= {"tokens": args.tokens, "turns": args.turns}
    print(f"{about['hardware']}, {about['threads']} threads; medians [quartiles]")
    for figures in measure(args.size, args.tokens, args.device, args.turns):
        print(f"{args.size}, {args.tokens} tokens, of which {figures['same_tokens']} are the same")
        for name, (low, median, high) in figures["seconds"].items():
            rate = 1e3 / figures["ms_of_a_token"][name][1]
            print(f"{name:>9} {median:.3f} s [{low:.3f}, {high:.3f}], {rate:.0f} tokens/s")
        if "cached_to_uncached" in figures:
            low, median, high = figures["cached_to_uncached"]
            print(f"    ratio {median:.3f} [{low:.3f}, {high:.3f}]")
        if args.record:
            append("generation", about | figures)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
