"""Read documents, and other JSON lines, from files and folders.

JSON lines are plain or compressed (.jsonl, .jsonl.gz, .jsonl.zst); any other file is plain text in
UTF-8. One document is in memory at a time, and no character of it is changed. What is held out is
decided in support/text/holdout.py.
"""

import gzip
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any, AnyStr, BinaryIO, NamedTuple

from tqdm import tqdm

BLOCK_BYTES = 1 << 20  # read at once
TICK_S = 1.0  # the longest that a bar stands still
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
BLANK_LINE = "blank-line"
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}


class Document(NamedTuple):
    id: str | None  # None if the input has none: a line's number would change with the file
    text: str
    source: str | None = None  # the collection that it is from, if the input says so


class InputFile(NamedTuple):
    path: Path
    name: str  # relative to the given folder
    in_folder: bool
    bytes: int


# ---- which files, and how far they have been read


def input_files(paths: Iterable[str | Path]) -> list[InputFile]:
    """List files, and the files in folders at any depth: sorted, without hidden ones.

    Raises: ValueError for a path that is neither file nor folder, and for a folder without files
    """
    return [file for path in paths for file in _files(path)]


def _files(given: str | Path) -> list[InputFile]:
    path = Path(given)
    if given == "":  # an empty variable in a shell; Path("") would be the working folder
        raise ValueError("an input is the empty string: name a file or a folder")
    if path.is_file():
        return [InputFile(path, path.name, False, path.stat().st_size)]
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise ValueError(f"{path}: a pipe cannot be read twice: write the text to a file")
    files = []
    for file in tqdm(path.rglob("*"), "files", unit="", disable=None, leave=False):
        below = file.relative_to(path)
        if file.is_file() and not any(part.startswith(".") for part in below.parts):
            files.append(InputFile(file, below.as_posix(), True, file.stat().st_size))
    if not files:
        raise ValueError(f"{path}: a folder without documents (hidden files are not read)")
    return sorted(files)


class InputBar(tqdm):
    """A progress bar over the bytes of input files, shown only on a terminal.

    Reading runs far ahead of the work when a file is one long text, so bytes that were read move
    the bar only when they are `done`. Its clock goes on with every read and every `tick`.
    """

    def __init__(self, files: Iterable[InputFile], title: str):
        total = sum(file.bytes for file in files)
        super().__init__(
            desc=title, total=total, unit="B", unit_scale=True, disable=None, leave=False
        )
        self.bytes_read = 0

    def on_read(self, size: int) -> None:
        self.bytes_read += size
        self.tick()

    def done(self, bytes_read: int, documents: int) -> None:
        """Say that the first `bytes_read` bytes, with so many documents, are done."""
        self.set_postfix_str(f"{documents:,} documents", refresh=False)
        self.update(bytes_read - self.n)

    def tick(self) -> None:
        if not self.disable and time.time() - self.last_print_t > TICK_S:
            self.refresh()
            self.last_print_t = time.time()


class _Counted(io.FileIO):
    """A file that reports how many bytes have been read; once closed, all of them."""

    def __init__(self, path: Path, on_read: Callable[[int], None]):
        super().__init__(path)
        self.on_read = on_read

    def readinto(self, buffer: memoryview) -> int:
        size = super().readinto(buffer)
        self.on_read(size)
        return size

    def close(self) -> None:
        if not self.closed:
            self.on_read(os.fstat(self.fileno()).st_size - self.tell())
        super().close()


def open_input(path: Path, on_read: Callable[[int], None]) -> BinaryIO:
    """Open a file; on_read is called with the size of each block that is read."""
    return io.BufferedReader(_Counted(path, on_read), BLOCK_BYTES)


# ---- JSON lines


def read_objects(
    path: str | Path, on_read: Callable[[int], None] = lambda size: None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place (FILE:LINE, for messages) and the object of each line that is not blank.

    Raises: ValueError naming the file and the line that cannot be read
    """
    lines = _lines(Path(path), on_read)
    for row in count(1):
        try:
            line = next(lines, None)
            if line is None:
                return
            if not line.strip():
                continue
            value = json.loads(line.decode())
        except json.JSONDecodeError as error:
            message = f"is not JSON ({error.msg}, column {error.colno})"
            raise ValueError(f"{path}:{row}: {message}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{row}: is not text in UTF-8: {error.reason}") from None
        except Exception as error:  # each decompressor raises errors of its own
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise ValueError(f"{path}:{row}: cannot be read: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{row}: is not a JSON object: write one per line")
        yield f"{path}:{row}", value


def _lines(path: Path, on_read: Callable[[int], None]) -> Iterator[bytes]:
    with open_input(path, on_read) as file:
        if path.suffix == ".zst":
            yield from _cut(_zstd_blocks(file), b"\n")
        else:
            yield from gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress frame by frame: zstandard's own reader does not notice a truncated file."""
    try:
        import zstandard
    except ImportError:
        raise ValueError("needs `pip install zstandard`") from None
    decoder = None
    block = b""
    while block := block or file.read(1 << 16):
        decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
        yield decoder.decompress(block)
        block = decoder.unused_data
        decoder = None if decoder.eof else decoder
    if decoder:
        raise EOFError("the file ends inside a zstd frame")


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


def read_documents(
    files: Sequence[InputFile],
    split_on: str | None = None,
    source_field: str = "source",
    on_read: Callable[[int], None] = lambda size: None,
    on_skip: Callable[[Path], None] = lambda path: None,
) -> Iterator[Document]:
    """Stream documents from files.

    A JSON line has the document under "text", and may have "id" and, under `source_field`, the name
    of its source. Any other file is one document with its name as the id, unless `split_on` cuts it
    into documents without ids. In a folder, files that are not text are skipped.

    Args:   split_on blank-line or a string, as `separator` returns it
            on_read  called with the size of each block that is read
            on_skip  called with the path of each file that is skipped
    Raises: ValueError naming the file, and the line if there is one
    """
    if split_on is not None and all(file.name.endswith(JSON_LINES) for file in files):
        raise ValueError("--split-on: cuts plain text, and there are only JSON lines to read")
    for file in files:
        if file.name.endswith(JSON_LINES):
            for place, fields in read_objects(file.path, on_read):
                yield _document(place, fields, source_field)
            continue
        try:
            if file.in_folder and split_on is not None:
                # Read it through once, so that no document is used of a file that is not text.
                for _ in _text_blocks(file.path, lambda size: on_read(0)):
                    pass
            yield from _read_plain(file, split_on, on_read)
        except _NotText:
            if not file.in_folder:
                raise
            on_skip(file.path)


def _document(place: str, fields: dict[str, object], source_field: str) -> Document:
    text = fields.get("text")
    source = fields.get(source_field)
    given_id = fields.get("id")
    if not isinstance(text, str):
        raise ValueError(f'{place}: needs a string under "text"')
    if isinstance(source, dict | list):
        raise ValueError(
            f"{place}: {source_field} is not the name of a source: name another --source-field,"
            " or '' for none"
        )
    given_id, source = (None if x is None else str(x) for x in (given_id, source))
    document = Document(given_id, text, source or None)
    try:
        "".join(map(str, document)).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place}: has half of a surrogate pair, which is not text") from None
    return document


class _NotText(ValueError):
    """A file that is not UTF-8."""


def _text_blocks(path: Path, on_read: Callable[[int], None]) -> Iterator[str]:
    """Decode block by block, so that a large file that is not text is refused at its start."""
    with open_input(path, on_read) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        try:
            while block := text.read(BLOCK_BYTES):
                yield block
        except UnicodeDecodeError as error:
            byte = file.tell() - len(error.object) + error.start
            raise _NotText(f"{path}: is not text in UTF-8: {error.reason} at byte {byte}") from None


def _read_plain(
    file: InputFile, split_on: str | None, on_read: Callable[[int], None]
) -> Iterator[Document]:
    blocks = _text_blocks(file.path, on_read)
    if split_on is None:
        yield Document(file.name, "".join(blocks))
    elif split_on == BLANK_LINE:
        for is_blank, lines in groupby(_cut(blocks, "\n"), lambda line: not line.strip()):
            if not is_blank:
                yield Document(None, "\n".join(lines))
    else:
        for text in _cut(blocks, split_on):
            yield Document(None, text)


def _cut(blocks: Iterable[AnyStr], mark: AnyStr) -> Iterator[AnyStr]:
    """Yield what "".join(blocks).split(mark) gives, with one piece in memory at a time."""
    empty = mark[:0]
    piece = []
    edge = empty  # edge: perhaps the beginning of a mark
    for block in blocks:
        *complete, rest = (edge + block).split(mark)
        for last in complete:
            yield empty.join([*piece, last])
            piece = []
        certain = max(0, len(rest) - len(mark) + 1)
        piece.append(rest[:certain])
        edge = rest[certain:]
    yield empty.join([*piece, edge])
