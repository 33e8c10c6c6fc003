"""Encode text on all cores: this thread reads and writes while others encode.

Short documents are gathered into chunks and long ones are cut into parts, so that a task is neither
all overhead nor a whole corpus. A document is cut only where the tokenizer splits anyway, so its
parts have the tokens of the whole.
"""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import tiktoken

from support.text.holdout import Part
from support.text.reading import TICK_S, InputBar
from support.text.store import Encoded

CHUNK_CHARACTERS = 1 << 18  # of text, for one task of one thread
# No alternative in the pattern that all our tokenizers split by (support/text/tokenizer.py) has a
# character before a blank, and none looks back. Every library agrees that these two are blanks.
CUT = re.compile(r"(?<=\S)(?=[ \n])")


class Chunk(NamedTuple):
    """What a thread encodes at once."""

    parts: list[Part]
    documents: int  # read so far, up to the end of the chunk
    bytes_read: int  # of the input, likewise


def encoded(
    parts: Iterable[Part], encoding: tiktoken.Encoding, dtype: np.dtype, bar: InputBar
) -> Iterator[list[Encoded]]:
    """Encode parts in their order; the bar shows how far encoding is.

    Cost: memory for a few chunks, and for the longest document
    """
    threads = os.cpu_count() or 1
    tasks: deque[tuple[Chunk, Future]] = deque()

    def oldest() -> list[Encoded]:
        chunk, task = tasks.popleft()
        while not wait([task], TICK_S).done:
            bar.tick()
        bar.done(chunk.bytes_read, chunk.documents)
        return task.result()

    with ThreadPoolExecutor(threads) as pool:
        for chunk in chunks(parts, bar):
            tasks.append((chunk, pool.submit(encode, chunk.parts, encoding, dtype)))
            if len(tasks) > 2 * threads:
                yield oldest()
        while tasks:
            yield oldest()


def chunks(parts: Iterable[Part], bar: InputBar) -> Iterator[Chunk]:
    gathered: list[Part] = []
    characters = documents = read_before = 0
    for part in parts:
        done = 0
        length = len(part.text)
        for text in pieces_of(part.text):
            done += len(text)
            ends = done == length
            gathered.append(part._replace(text=text, ends=ends))
            documents += ends
            characters += len(text) + 1  # + 1, so that empty documents fill a chunk too
            if characters >= CHUNK_CHARACTERS:
                of_part = (bar.bytes_read - read_before) * done // max(length, 1)
                yield Chunk(gathered, documents, read_before + of_part)
                gathered = []
                characters = 0
        read_before = bar.bytes_read
    yield Chunk(gathered, documents, read_before)


def pieces_of(text: str) -> Iterator[str]:
    """Cut a long text into pieces whose tokens are those of the whole.

    Example: with pieces of 5 characters or more, "one two\\n\\nend" is "one two" and "\\n\\nend"
    """
    begin = 0
    while len(text) - begin > CHUNK_CHARACTERS:
        place = CUT.search(text, begin + CHUNK_CHARACTERS)
        if not place:
            break
        yield text[begin : place.start()]
        begin = place.start()
    yield text[begin:] if begin else text


def encode(parts: list[Part], encoding: tiktoken.Encoding, dtype: np.dtype) -> list[Encoded]:
    end = np.array([encoding.eot_token], dtype)
    done = []
    for part in parts:
        # encode_ordinary would hold the GIL while it makes a list of ints; this does not.
        ids = encoding.encode_to_numpy(part.text, disallowed_special=())
        if part.ends and part.text:
            ids = np.concatenate((ids, end))
        done.append(Encoded(ids.astype(dtype), part.held_out, part.source, part.ends))
    return done
