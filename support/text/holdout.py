"""Which text is held out: a function of each document alone, or the end of a text that is all one.

`prepare.py` and `support.tokenizer learn` read through `Corpus`, so that both hold out the same.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from support.text.reading import Document, InputBar, input_files, read_files, separator

HOLDOUT_HELP = "hold out one document in so many, or that part of a single text; 0: none (20)"


class Part(NamedTuple):
    """A document, or what a cut left of one."""

    text: str
    held_out: bool
    source: str | None = None


class Corpus:
    """The text of files and folders, every part of it for training or held out.

    One document in `holdout` is held out, by the hash of its id, or of its text where it has no id:
    it stays on its side when other documents come and go. Where the hashes leave one of the sides
    without text, because documents are few, the last 1/holdout of all text is held out instead.

    Iterating reads the files, and may be repeated. Looking for the rule reads some of them too, and
    all of a text that is all one, with a bar of its own.

    Args:     holdout   0 holds nothing out, 1 everything
              split_on  what separates the documents of plain text, as --split-on takes it
              source_field  what a JSON line has the name of its source under
    Raises:   ValueError naming the flag, or the file and the line
    """

    def __init__(
        self,
        paths: Iterable[str | Path],
        holdout: int = 20,
        split_on: str | None = None,
        source_field: str = "source",
    ):
        if holdout < 0:
            raise ValueError(f"--holdout {holdout}: needs 0 (hold nothing out) or more")
        self.paths, self.holdout, self.source_field = list(paths), holdout, source_field
        self.separator = None if split_on is None else separator(split_on)
        self.files = input_files(self.paths)
        self.skipped: list[Path] = []  # files of folders that are not text
        self.training_characters = self._before_the_tail() if holdout > 1 else None

    def __iter__(self) -> Iterator[Part]:
        return self.parts(lambda size: None)

    def parts(self, on_read: Callable[[int], None]) -> Iterator[Part]:
        """All parts; `on_read` is called with the number of bytes of each block that is read."""
        self.skipped = []
        documents = self._documents(self.skipped, on_read)
        if self.training_characters is not None:
            return hold_out_tail(documents, self.training_characters, self.holdout)
        return (Part(one.text, is_held_out(one, self.holdout), one.source) for one in documents)

    def _documents(
        self, skipped: list[Path] | None, on_read: Callable[[int], None]
    ) -> Iterator[Document]:
        return read_files(self.files, self.separator, skipped, self.source_field, on_read)

    def _before_the_tail(self) -> int | None:
        """How many characters come before the last 1/holdout; None where the hashes decide.

        Reads as far as the first text of the second side: of many documents only some.
        """
        characters, sides = 0, set()
        with InputBar(self.files, "what to hold out") as bar:
            for number, document in enumerate(self._documents(None, bar.on_read), 1):
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
    """Hold out all text after the first `training` characters; cut the document in between."""
    reach = training // holdout // 2  # half of what is held out
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
    """Where to cut a text, at most `reach` from `position`: after a line, else a blank, else there.

    A cut before the position is preferred, so that no less is held out than was asked for.

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
