"""Which text is held out: some documents, chosen by hash, or the end of a single text.

`prepare.py` and `support.text.tokenizer learn` both read a `Corpus`, so they hold out the same.
"""

import argparse
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from support.base.numbers import whole_number
from support.text.reading import Document, InputBar, input_files, read_documents, separator


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a command that reads a corpus."""
    inputs = "plain text, .jsonl, .jsonl.gz, .jsonl.zst, or folders of these"
    parser.add_argument("inputs", nargs="+", help=inputs)
    holdout = "hold out one document in N, or the last 1/N of a single text; 0: none (20)"
    parser.add_argument("--holdout", type=whole_number, default=20, metavar="N", help=holdout)
    split_on = r"cut plain text into documents at each blank-line, or at a STRING, e.g. '\n---\n'"
    parser.add_argument("--split-on", metavar="STRING", help=split_on)


class Part(NamedTuple):
    """A document, or a part of one."""

    text: str
    held_out: bool
    source: str | None = None
    ends: bool = True  # False if the same document goes on in the next part


class Corpus:
    """The text of files and folders, each part of it either for training or held out.

    One document in `holdout` is held out, chosen by the hash of its id (of its text if it has no
    id), so it stays held out when other documents are added or removed. If that leaves training or
    the held-out side without text, because there are few documents, the last 1/holdout of all text
    is held out instead. To find out, the constructor reads some of the files, and all of a single
    text, behind a progress bar.

    Args:   holdout      0 holds nothing out, 1 everything
            split_on     what separates documents in plain text, as --split-on takes it
            source_field the field of a JSON line that names its source
    Raises: ValueError naming the flag, or the file and the line
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        holdout: int = 20,
        split_on: str | None = None,
        source_field: str = "source",
    ):
        self.paths = list(paths)
        self.holdout = holdout
        self.source_field = source_field
        self.separator = None if split_on is None else separator(split_on)
        self.files = input_files(self.paths)
        self.skipped: list[Path] = []  # files in folders that are not text
        self.training_characters = self._before_the_tail() if holdout > 1 else None

    def __iter__(self) -> Iterator[Part]:
        return self.parts(lambda size: None)

    def parts(self, on_read: Callable[[int], None]) -> Iterator[Part]:
        """Read all parts; `on_read` is called with the size of each block that is read."""
        self.skipped = []
        documents = self._documents(on_read)
        if self.training_characters is not None:
            return hold_out_tail(documents, self.training_characters, self.holdout)
        return (Part(d.text, is_held_out(d, self.holdout), d.source) for d in documents)

    def _documents(self, on_read: Callable[[int], None]) -> Iterator[Document]:
        return read_documents(
            self.files,
            split_on=self.separator,
            source_field=self.source_field,
            on_read=on_read,
            on_skip=self.skipped.append,
        )

    def _before_the_tail(self) -> int | None:
        """Count the characters before the last 1/holdout; None if hashes choose.

        Stops at the first document that gives the second side text.
        """
        characters = 0
        sides = set()
        with InputBar(self.files, "what to hold out") as bar:
            for number, document in enumerate(self._documents(bar.on_read), 1):
                characters += len(document.text)
                if document.text:
                    sides.add(is_held_out(document, self.holdout))
                bar.done(bar.bytes_read, number)
                if len(sides) == 2:
                    return None
        if characters == 1:
            raise ValueError(
                f"--holdout {self.holdout}: needs two characters of text; 0 holds nothing out"
            )
        return characters - -(-characters // self.holdout)


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
            yield Part(text[:cut], False, document.source)
            yield Part(text[cut:], True, document.source)
        else:
            yield Part(text, training <= 0, document.source)
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
