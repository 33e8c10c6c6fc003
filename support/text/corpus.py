"""Documents, and what is held out of them: some, chosen by hash, or the end of a single text.

The lines of JSON lines, whatever the file's name, and the rows of parquet hold a document each; any
other file is plain text. One document is in memory at a time. `prepare.py` and
`support.text.tokenizer` both read a `Corpus`, so they hold out the same; bytes are read in
support/text/reading.py.
"""

import argparse
import re
import zlib
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from support.settings import whole_number
from support.text import reading
from support.text.reading import InputFile

BLANK_LINE = "blank-line"
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}


class Document(NamedTuple):
    id: str | None  # None if the input has none: a line's number would change with the file
    text: str


def add_flags(parser: argparse.ArgumentParser, needed: str = "+") -> None:
    """The flags of a command that reads a corpus."""
    inputs = "text or JSON lines, also as gz; parquet; folders"
    parser.add_argument("inputs", nargs=needed, help=inputs)
    holdout = "hold out one document in N, or the last 1/N of a single text; 0: none (20)"
    parser.add_argument("--holdout", type=whole_number, default=20, metavar="N", help=holdout)
    split_on = r"cut plain text into documents at each blank-line, or at a STRING, e.g. '\n---\n'"
    parser.add_argument("--split-on", metavar="STRING", help=split_on)
    text_column = "the field or column that has the text (text)"
    parser.add_argument("--text-column", metavar="NAME", help=text_column)


class Part(NamedTuple):
    """A document, or a part of one."""

    text: str
    held_out: bool
    ends: bool = True  # False if the same document goes on in the next part


class Corpus:
    """The text of files and folders, each part of it either for training or held out.

    A line of JSON or a row has the document under `text_column`, where null is an empty text, and
    may have "id". Any other file is one document with its name as the id, unless `split_on` cuts it
    into documents without ids. In a folder, files that are not text are skipped.

    One document in `holdout` is held out, chosen by the hash of its id (of its text if it has no
    id), so it stays held out when other documents are added or removed. If that leaves training or
    the held-out side without text, because there are few documents, the last 1/holdout of all text
    is held out instead. To find out, the constructor reads some of the files, and all of a single
    text, behind a progress bar.

    Args:   holdout      0 holds nothing out, 1 everything
            split_on     what separates documents in plain text, as --split-on takes it
            text_column  None is "text"; plain text has none
    Raises: ValueError naming the flag, or the file and the line
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        holdout: int = 20,
        split_on: str | None = None,
        text_column: str | None = None,
    ):
        self.holdout = holdout
        self.text_column = text_column or "text"
        self.separator = None if split_on is None else separator(split_on)
        self.files = [file for path in paths for file in reading.input_files(path)]
        self.kinds = {file.path: reading.kind_of(file.path) for file in self.files}
        if self.separator and "text" not in self.kinds.values():
            raise ValueError("--split-on: cuts plain text, and these inputs are JSON or parquet")
        if text_column and {*self.kinds.values()} == {"text"}:
            raise ValueError(f"--text-column {text_column}: these inputs are plain text")
        self.training_characters = self._before_the_tail() if holdout > 1 else None

    def parts(self, bar: tqdm | None = None) -> Iterator[Part]:
        """Read all parts, from the beginning each time; a bar is told how many bytes were read."""
        documents = self.documents(bar)
        if self.training_characters is not None:
            return hold_out_tail(documents, self.training_characters, self.holdout)
        return (Part(d.text, is_held_out(d, self.holdout)) for d in documents)

    def documents(self, bar: tqdm | None = None) -> Iterator[Document]:
        """Read all documents, whichever side they are on."""
        self.skipped: list[Path] = []  # files in folders that are not text
        self.hashes = bytearray()  # of the ids that JSON lines give
        for file in self.files:
            kind = self.kinds[file.path]
            if kind == "parquet":
                rows = reading.read_parquet(file.path, (self.text_column, "id"), bar)
                yield from self._of_objects(rows)
            elif kind == "lines":
                yield from self._of_objects(reading.read_lines(file.path, bar))
            else:
                yield from self._of_text(file, bar)

    def _of_objects(self, objects: reading.Objects) -> Iterator[Document]:
        for place, fields in objects:
            document = _document(place, fields, self.text_column)
            if document.id is not None:
                self.hashes += blake2b(document.id.encode(), digest_size=8).digest()
            yield document

    def _of_text(self, file: InputFile, bar: tqdm | None) -> Iterator[Document]:
        try:
            if file.in_folder and self.separator:
                # Read it through once, so that no document is used of a file that is not text.
                for _ in reading.text_blocks(file.path):
                    pass
            blocks = reading.text_blocks(file.path, bar)
            if self.separator is None:
                yield Document(file.name, "".join(blocks))
            else:
                yield from (Document(None, text) for text in _split(blocks, self.separator))
        except reading.NotText:
            if not file.in_folder:
                raise
            self.skipped.append(file.path)

    def repeated_ids(self) -> int:
        """How many documents that were read have the id of an earlier one."""
        return len(self.hashes) // 8 - len(np.unique(np.frombuffer(self.hashes, np.uint64)))

    def _before_the_tail(self) -> int | None:
        """Count the characters before the last 1/holdout; None if hashes choose.

        Stops at the first document that gives the second side text.
        """
        characters = 0
        sides = set()
        with reading.input_bar(self.files, "what to hold out") as bar:
            for document in self.documents(bar):
                characters += len(document.text)
                if document.text:
                    sides.add(is_held_out(document, self.holdout))
                if len(sides) == 2:
                    return None
        if characters == 1:
            raise ValueError(f"--holdout {self.holdout}: one character is too short: choose 0")
        return characters - -(-characters // self.holdout)


# ---- documents


def separator(split_on: str) -> str:
    """Read the value of --split-on: the word blank-line, or a string with \\n, \\r, \\t, \\f, \\\\.

    Raises: ValueError for an empty string or another escape
    """

    def character(escape: re.Match) -> str:
        if escape[1] not in ESCAPES:
            raise ValueError(rf"--split-on {split_on!r}: after \ needs one of n, r, t, f, \ ")
        return ESCAPES[escape[1]]

    if not split_on:
        raise ValueError("--split-on '': needs blank-line or a string that is not empty")
    return re.sub(r"\\(.?)", character, split_on, flags=re.DOTALL)


def _document(place: str, fields: dict[str, object], text_column: str) -> Document:
    text = fields.get(text_column)
    if text is None and text_column in fields:  # null
        text = ""
    given_id = fields.get("id")
    if not isinstance(text, str):
        there = [name for name, value in fields.items() if isinstance(value, str)]
        which = f"strings are under {', '.join(there)[:1000]}: choose" if there else "name it"
        raise ValueError(f"{place}: no string under {text_column}: {which} with --text-column")
    document = Document(None if given_id is None else str(given_id), text)
    try:
        "".join(map(str, document)).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: has half of a surrogate pair, which is not text") from None
    return document


def _split(blocks: Iterable[str], mark: str) -> Iterator[str]:
    """Cut text at a mark or, with BLANK_LINE, at blank lines; between two marks may be nothing."""
    if mark != BLANK_LINE:
        yield from filter(None, reading.cut(blocks, mark))
        return
    for is_blank, lines in groupby(reading.cut(blocks, "\n"), lambda line: not line.strip()):
        if not is_blank:
            yield "\n".join(lines)


# ---- what is held out


def is_held_out(document: Document, holdout: int) -> bool:
    """Decide by the hash of this document alone."""
    key = document.text if document.id is None else document.id
    return holdout > 0 and zlib.crc32(key.encode()) % holdout == 0


def hold_out_tail(documents: Iterable[Document], training: int, holdout: int) -> Iterator[Part]:
    """Hold out all text after the first `training` characters, cutting one document in two."""
    reach = training // holdout // 2  # half of the text that is held out
    for document in documents:
        text = document.text
        if 0 < training < len(text):
            cut = find_cut(text, training, reach)
            yield Part(text[:cut], False)
            yield Part(text[cut:], True)
        else:
            yield Part(text, training <= 0)
        training -= len(text)


def find_cut(text: str, position: int, reach: int) -> int:
    """Choose where to cut a text: after a line or else a blank within `reach`, else at `position`.

    A cut before the position is preferred, so that at least the share asked for is held out.

    Example:  find_cut("one\\ntwo\\nthree", 10, 5) is 8, before "three"
    """
    for end in ("\n", " "):
        before = text.rfind(end, max(0, position - reach - 1), position) + 1
        if before:
            return before
        after = text.find(end, position, position + reach) + 1
        if 0 < after < len(text):
            return after
    return position
