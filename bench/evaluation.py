"""What packing saves of an evaluation: rows that are full, against one item a row.

Two workloads on the embedded corpus, each a whole pass by evaluate.py's own functions: the held-out
documents in bits per byte, and a last-word task made of the held-out paragraphs, cut before their
last word. Three ways each, in one process and in turns, the order reversed after each turn:

    packed   items side by side in rows of the model's length, isolated
    alone    one item a row, padded to the model's length
    padded   one item a row, padded to the longest of the batch, batches in the order of length:
             what an evaluation without packing does if it is careful

All three find the same, which is checked before anything is timed. The model is not trained, for
time does not depend on its weights. Setting up rows and packing them are part of what is timed.

    OMP_NUM_THREADS=2 python bench/evaluation.py --record
    python bench/evaluation.py --size nano --tokens 20K --turns 1       # does it work?
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
from record import append, quartiles, surroundings
from turns import Taken, alternated, ratios, turn_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what is measured

import config
import evaluate
from data import Rows, collate
from model import Transformer
from prepare import embedded_store
from support.base import runtime
from support.base.numbers import count
from support.evaluation.scoring import evaluating, own_rows, sums_of_pieces
from support.evaluation.tasks import Items, Laid, Question, Task, answers_of, items_of
from support.rows.batch import Batch
from support.rows.samples import Samples
from support.text.store import Store
from support.text.tokenizer import byte_lengths, get_encoding, vocab_size

SEQ_LEN = 512
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-3}  # of the nats in all: fp32, and bf16 on a GPU


class Bench(NamedTuple):
    model: Transformer
    here: runtime.Runtime
    store: Store
    lengths: np.ndarray
    rows: int  # at once
    tokens: int | None


def last_words(
    store: Store, samples: Samples, encoding: tiktoken.Encoding, tokens: int | None
) -> Task:
    """The held-out paragraphs of two words and more, of so many tokens in all, as questions."""
    questions, read = [], 0
    for number in samples.documents:
        text = encoding.decode(
            store.tokens[slice(*store.offsets[number : number + 2])][:-1].tolist()
        )
        for paragraph in text.split("\n\n"):
            cut = re.fullmatch(r"(.*\S)(\s\S+)\s*", paragraph, re.DOTALL)
            if cut and (tokens is None or read < tokens):
                read += len(encoding.encode_ordinary(paragraph))
                questions.append(Question("held-out", [cut[1]], [cut[2]], 0))
    return Task("last words", "last word", questions, 0)


class Short(NamedTuple):
    """Rows of one item each in the order of length, and how a batch of them is read."""

    rows: Rows
    read: Callable[[range], Batch]


def by_length(store: Store, rows: Rows) -> Short:
    """Rows of one item each, so that a batch is as wide as its longest one."""
    order = np.argsort(rows.stop - rows.start, kind="stable")
    ordered = rows.take(order)

    def read(own: range) -> Batch:
        some = ordered.take(np.array(own))
        return collate(store, some, int((some.stop - some.start).max()))

    return Short(ordered, read)


def text_variants(bench: Bench) -> dict[str, Callable[[], float]]:
    """Bits per byte: each function makes a pass and returns its nats."""
    model, here, store, lengths, rows_at_once, tokens = bench

    def spans() -> np.ndarray:
        return Samples(store, "pieces", SEQ_LEN, "val").some(tokens)

    def nats_of(count: int, read: Callable[[range], Batch]) -> float:
        found = 0.0
        with evaluating(model):
            for own in own_rows(model, count, rows_at_once, here, lambda done: None):
                batch = read(own)
                offsets = np.arange(len(own) + 1)
                found += sums_of_pieces(model, batch, offsets, lengths, here)[:, 0].sum()
        return found

    def packed() -> float:
        made = evaluate.Evaluation(store, SEQ_LEN, lengths, tokens=tokens)
        return made.documents(model, here, rows_at_once).nats.sum()

    def alone() -> float:
        rows = Rows.of(spans())
        return nats_of(len(rows), lambda own: collate(store, rows.take(np.array(own)), SEQ_LEN))

    def padded() -> float:
        short = by_length(store, Rows.of(spans()))
        return nats_of(len(short.rows), short.read)

    return {"packed": packed, "alone": alone, "padded": padded}


def task_variants(bench: Bench, items: Items) -> dict[str, Callable[[], float]]:
    """A last-word task: each function asks all items and returns their nats."""
    model, here, _, _, rows_at_once, _ = bench

    def ask(laid: Laid) -> float:
        return answers_of(laid, model, here, rows_at_once).nats.sum()

    def padded() -> float:
        short = by_length(items.store, Rows.of(items.spans, seen=items.seen))
        item = evaluate.documents_of(short.rows, items.store)
        return ask(Laid(short.rows.offsets, item, short.read))

    return {
        "packed": lambda: ask(evaluate.lay(items, SEQ_LEN)),
        "alone": lambda: ask(evaluate.lay(items, SEQ_LEN, pack=False)),
        "padded": padded,
    }


def check(variants: dict[str, Callable[[], float]], tolerance: float) -> None:
    """Nothing is timed before all find the same."""
    nats = {name: find() for name, find in variants.items()}
    for name, found in nats.items():
        if not abs(found / nats["packed"] - 1) < tolerance:
            raise ValueError(f"{name} finds {found} nats, packed finds {nats['packed']}")


def timed(variants: dict[str, Callable[[], float]], turns: int) -> dict[str, list[Taken]]:
    return alternated({n: lambda find=find: turn_of(find) for n, find in variants.items()}, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="nano", help="of the model, as train.py's (nano)")
    parser.add_argument("--tokens", type=count, help="of either workload, about (default: all)")
    parser.add_argument("--rows", type=count, default=16, help="at once (16)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=count, default=9)
    parser.add_argument("--record", action="store_true", help="append to results/evaluation.jsonl")
    args = parser.parse_args()
    about = surroundings(args.device)  # refuses a GPU that is not there
    flags = f"--device {args.device} --size {args.size} --seq-len {SEQ_LEN} --pos rope"
    settings = config.build(config.parse(flags.split()))
    encoding, here = get_encoding("pd4k"), runtime.start(args.device, "auto")
    vocabulary = -(-vocab_size(encoding, "gpt") // 64) * 64
    torch.manual_seed(0)
    model = Transformer(config.transformer_config(settings, vocabulary)).to(here.device)
    store = Store.open(embedded_store("pd4k"))
    bench = Bench(model, here, store, byte_lengths(encoding), args.rows, args.tokens)
    samples = Samples(store, "pieces", SEQ_LEN, "val")
    items = items_of(
        last_words(store, samples, encoding, args.tokens), encoding, SEQ_LEN, show=True
    )
    spans = samples.some(args.tokens)
    workloads = {
        "text": (text_variants(bench), spans),
        "last words": (task_variants(bench, items), items.spans),
    }
    for name, (variants, spans) in workloads.items():
        check(variants, TOLERANCE[args.device])
        taken = timed(variants, args.turns)
        length = spans[:, 1] - spans[:, 0]
        seconds = {variant: [one.seconds for one in turns] for variant, turns in taken.items()}
        figures = {
            "items": len(length),
            "tokens": int(length.sum()),
            "seconds": {variant: spread(turns) for variant, turns in seconds.items()},
            "items_per_s": {
                variant: spread([len(length) / s for s in turns])
                for variant, turns in seconds.items()
            },
            "times_as_fast": {
                f"packed, against {variant}": spread(ratios(taken[variant], taken["packed"]))
                for variant in ("alone", "padded")
            },
            "padding_share_alone": round(1 - length.sum() / (len(length) * SEQ_LEN), 4),
        }
        print(f"{name}: {args.size}, rows of {SEQ_LEN}, {args.rows} at once")
        for figure, value in figures.items():
            print(f"  {figure:20} {value}")
        if args.record:
            made_of = {"size": args.size, "seq_len": SEQ_LEN, "rows": args.rows}
            made_of |= {"tokens_asked": args.tokens, "turns": args.turns}
            record = about | {"bench": "evaluation", "workload": name} | made_of | figures
            append("evaluation", record)


def spread(values: list[float]) -> list[float]:
    """First quartile, median and third quartile; of one value that value."""
    return quartiles(values if len(values) > 1 else values * 2)


if __name__ == "__main__":
    runtime.exit_cleanly(main)
