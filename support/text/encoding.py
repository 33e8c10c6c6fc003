"""Text into tokens, on all cores: this thread reads and writes while others encode.

Short documents are gathered into batches, long ones are cut into pieces, so that a task is neither
all overhead nor all of a corpus that is one text. A piece ends where a tokenizer would cut anyway:
its tokens are those that it has in the whole text.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import numpy as np
import tiktoken

from support.text.holdout import Part
from support.text.reading import TICK_S, InputBar
from support.text.store import Encoded

BATCH_CHARACTERS = 1 << 18  # of text, for one task of one thread
# No alternative of the pattern that all our tokenizers split by (support/text/tokenizer.py) has a
# character before a blank, and none looks back. A blank is one that every library calls so.
CUT = re.compile(r"(?<=\S)(?=[ \n])")


class Piece(NamedTuple):
    """A document, or a piece of a long one."""

    text: str
    ends: bool  # whether its document ends with it
    held_out: bool
    source: str | None


class Batch(NamedTuple):
    """What a thread encodes at once."""

    pieces: list[Piece]
    bytes_read: int  # of the input, until its last piece


class EncodedBatch(NamedTuple):
    training: list[Encoded]
    held_out: list[Encoded]
    documents_read: int  # the empty ones too, which are in neither list


def encoded(
    parts: Iterable[Part], encoding: tiktoken.Encoding, dtype: np.dtype, bar: InputBar
) -> Iterator[EncodedBatch]:
    """Encode documents in their order; the bar moves with what is encoded.

    Cost: memory for a few batches, and for the longest document
    """
    threads, documents = os.cpu_count() or 1, 0
    with ThreadPoolExecutor(threads) as pool:
        encode = partial(encode_batch, encoding=encoding, dtype=dtype)
        for batch, result in map_ahead(pool, encode, batches(parts, bar), 2 * threads, bar.tick):
            documents += result.documents_read
            bar.done(batch.bytes_read, documents)
            yield result


def batches(parts: Iterable[Part], bar: InputBar) -> Iterator[Batch]:
    gathered, characters, read_before = [], 0, 0
    for part in parts:
        at, length = 0, len(part.text)
        for text in pieces_of(part.text):
            at += len(text)
            gathered.append(Piece(text, at == length, part.held_out, part.source))
            characters += len(text) + 1  # + 1, so that empty documents fill a batch too
            if characters >= BATCH_CHARACTERS:
                of_part = (bar.bytes_read - read_before) * at // max(length, 1)
                yield Batch(gathered, read_before + of_part)
                gathered, characters = [], 0
        read_before = bar.bytes_read
    yield Batch(gathered, read_before)


def pieces_of(text: str) -> Iterator[str]:
    """Cut a text into pieces that have the tokens of the whole, where it has a place to be cut.

    Example: with pieces of 5 characters or more, "one two\\n\\nend" is "one two" and "\\n\\nend"
    """
    begin = 0
    while len(text) - begin > BATCH_CHARACTERS:
        place = CUT.search(text, begin + BATCH_CHARACTERS)
        if not place:
            break
        yield text[begin : place.start()]
        begin = place.start()
    yield text[begin:] if begin else text


def encode_batch(batch: Batch, encoding: tiktoken.Encoding, dtype: np.dtype) -> EncodedBatch:
    end = np.array([encoding.eot_token], dtype)
    training, held_out = [], []
    for piece in batch.pieces:
        if piece.text:
            # encode_ordinary would hold the GIL while it makes a list of ints; this does not.
            ids = encoding.encode_to_numpy(piece.text, disallowed_special=())
            ids = np.concatenate((ids, end[: piece.ends]), dtype=dtype, casting="unsafe")
            side = held_out if piece.held_out else training
            side.append(Encoded(ids, piece.source, piece.ends))
    documents_read = sum(piece.ends for piece in batch.pieces)
    return EncodedBatch(training, held_out, documents_read)


def map_ahead(
    pool: ThreadPoolExecutor,
    function: Callable,
    items: Iterable,
    ahead: int,
    tick: Callable[[], None],
) -> Iterator[tuple]:
    """(item, result) in order, as pool.map gives results, with at most `ahead` items in memory.

    Args: tick is called once in a while as long as a result is waited for
    """
    tasks: deque = deque()

    def first() -> tuple:
        item, task = tasks.popleft()
        while not finished(task):
            tick()
        return item, task.result()

    for item in items:
        tasks.append((item, pool.submit(function, item)))
        if len(tasks) > ahead:
            yield first()
    while tasks:
        yield first()


def finished(task: Future) -> bool:
    """Wait for a task, but not longer than until the next tick."""
    return bool(wait([task], TICK_S).done)
