"""Read documents from files and folders: JSON lines (plain, .gz, .zst) and plain text in UTF-8.

Keeps one document in memory at a time and changes no character of it. Which documents are held out
is decided in support/text/holdout.py.
"""

import codecs
import gzip
import io
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

# ---- input files
#
# The files that text is read from: which ones, lines of compressed ones, and how far one is.
#
# What a line or a text means is the business of support/text/reading.py.


BLOCK_BYTES = 1 << 20  # read at once
TICK_S = 1.0  # a bar is drawn again after so long at most


class InputFile(NamedTuple):
    path: Path
    name: str  # below the folder that was given
    in_folder: bool
    bytes: int


def input_files(paths: Iterable[str | Path]) -> list[InputFile]:
    """Find files and those of folders, at every depth, in sorted order and without hidden ones.

    Raises: ValueError for what is neither a file nor a folder, and for a folder without files
    """
    return [file for path in paths for file in _files(path)]


def _files(given: str | Path) -> list[InputFile]:
    path = Path(given)
    if given == "":  # of an empty variable in a shell; as a path it is the working folder
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


class _Counted(io.FileIO):
    """A file that says how many bytes have been read of it; all of them once it is closed."""

    def __init__(self, path: Path, on_read: Callable[[int], None]):
        super().__init__(path)
        self.on_read, self.unread = on_read, path.stat().st_size

    def readinto(self, buffer: memoryview) -> int:
        size = super().readinto(buffer)
        self._count(size)
        return size

    def _count(self, size: int) -> None:
        self.unread -= size
        self.on_read(size)

    def close(self) -> None:
        if not self.closed:
            self._count(self.unread)
        super().close()


def open_counted(path: Path, on_read: Callable[[int], None]) -> BinaryIO:
    """Open a file; on_read is called with the number of bytes of each block."""
    return io.BufferedReader(_Counted(path, on_read), BLOCK_BYTES)


def lines_of(path: Path, on_read: Callable[[int], None]) -> Iterator[bytes]:
    """The lines of a file, which may be compressed (.gz, .zst)."""
    with open_counted(path, on_read) as file:
        if path.suffix == ".zst":
            yield from _zstd_lines(file)
        else:
            yield from gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file


def _zstd_lines(file: BinaryIO) -> Iterator[bytes]:
    """Decompress frame by frame: zstandard's own reader does not notice a file that was cut."""
    try:
        import zstandard
    except ImportError:
        raise ValueError("needs `pip install zstandard`") from None
    decoder, rest = None, b""
    while block := file.read(1 << 16):
        while block:
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            *lines, rest = (rest + decoder.decompress(block)).split(b"\n")
            yield from lines
            block = decoder.unused_data
            decoder = None if decoder.eof else decoder
    if decoder:
        raise EOFError("the file ends inside a zstd frame")
    yield rest


class InputBar:
    """A bar over the bytes of input files, shown where there is a terminal.

    What was read moves it only when it is `done`, for reading is far ahead where one file is one
    long text. While anything is read, or `tick` is called, the bar's clock goes on.
    """

    def __init__(self, files: Iterable[InputFile], what: str):
        total = sum(file.bytes for file in files)
        self.bar = tqdm(
            desc=what, total=total, unit="B", unit_scale=True, disable=None, leave=False
        )
        self.bytes_read = 0

    def on_read(self, size: int) -> None:
        self.bytes_read += size
        self.tick()

    def done(self, bytes_read: int, documents: int) -> None:
        """All that had been read by then is done, which was so many documents."""
        self.bar.set_postfix_str(f"{documents:,} documents", refresh=False)
        self.bar.update(bytes_read - self.bar.n)

    def tick(self) -> None:
        if not self.bar.disable and time.time() - self.bar.last_print_t > TICK_S:
            self.bar.refresh()
            self.bar.last_print_t = time.time()

    def __enter__(self) -> "InputBar":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()


INPUTS_HELP = "plain text, .jsonl, .jsonl.gz, .jsonl.zst, or folders of these"
SOURCE_FIELD_HELP = "the field of a JSON line that names its source, '' for none (source)"
SPLIT_ON_HELP = r"cut plain text into documents at each blank-line, or at a STRING, e.g. '\n---\n'"
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
BLANK_LINE = "blank-line"
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "\\": "\\"}


class Document(NamedTuple):
    id: str | None  # None where the input has none; a line's number would not last
    text: str
    source: str | None = None  # which of several collections of text it is of, where it says so


def separator(split_on: str) -> str:
    """Read the value of --split-on: the word blank-line, or a string with \\n, \\r, \\t, \\f, \\\\.

    Raises:   ValueError for an empty string or another escape
    """

    def character(escape: re.Match) -> str:
        if escape[1] not in ESCAPES:
            raise ValueError(rf"--split-on {split_on!r}: after \ needs one of n, r, t, f, \ ")
        return ESCAPES[escape[1]]

    if not split_on:
        raise ValueError("--split-on '': needs blank-line or a string that is not empty")
    return re.sub(r"\\(.?)", character, split_on, flags=re.DOTALL)


def read_documents(
    paths: Iterable[str | Path],
    split_on: str | None = None,
    skipped: list[Path] | None = None,
    source_field: str = "source",
) -> Iterator[Document]:
    """Stream documents from files and folders; see read_files."""
    files = input_files(paths)
    yield from read_files(files, split_on, skipped, source_field)


def read_files(
    files: Sequence[InputFile],
    split_on: str | None = None,
    skipped: list[Path] | None = None,
    source_field: str = "source",
    on_read: Callable[[int], None] = lambda size: None,
) -> Iterator[Document]:
    """Stream documents from files of JSON lines or plain text.

    A line of .jsonl, .jsonl.gz or .jsonl.zst is an object with "text", and with "id" and, under
    `source_field`, the name of a source if it has them. Any other file is one document, and its
    name is the id; with `split_on` it is as many documents as that cuts it into, without ids. The
    names of files in a folder are relative to it; one that is not text is left out and added to
    `skipped`.

    Args:     on_read is called with the number of bytes of each block that is read
    Raises:   ValueError naming the file, and the line if there is one
    """
    if split_on is not None and all(file.name.endswith(JSON_LINES) for file in files):
        raise ValueError("--split-on: cuts plain text, and there are only JSON lines to read")
    for file in files:
        if file.name.endswith(JSON_LINES):
            yield from _read_json_lines(file.path, source_field, on_read)
            continue
        try:
            if file.in_folder and split_on is not None:
                # all of it, before a document of it is given out
                for _ in _decode(file.path, lambda size: on_read(0)):
                    pass
            yield from _read_plain(file, split_on, on_read)
        except _NotText as error:
            if not file.in_folder:
                raise ValueError(str(error)) from None
            if skipped is not None:
                skipped.append(file.path)


class _NotText(Exception):
    """A file that is not UTF-8."""


def _read_plain(
    file: InputFile, split_on: str | None, on_read: Callable[[int], None]
) -> Iterator[Document]:
    blocks = _decode(file.path, on_read)
    if split_on is None:
        yield Document(file.name, "".join(blocks))
        return
    texts = _cut_at_blank_lines(blocks) if split_on == BLANK_LINE else _cut(blocks, split_on)
    for text in texts:
        yield Document(None, text)


def _decode(path: Path, on_read: Callable[[int], None]) -> Iterator[str]:
    """Decode block by block, so that a large file that is not text is refused at its start."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_counted(path, on_read) as file:
        try:
            while block := file.read(BLOCK_BYTES):
                yield decoder.decode(block)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            byte = file.tell() - len(error.object) + error.start
            raise _NotText(f"{path}: is not text in UTF-8: {error.reason} at byte {byte}") from None


def _cut(blocks: Iterable[str], separator: str) -> Iterator[str]:
    """The same as "".join(blocks).split(separator), with one piece in memory at a time."""
    piece, edge = [], ""  # edge: what may be the beginning of a separator
    for block in blocks:
        *complete, rest = (edge + block).split(separator)
        for last in complete:
            yield "".join([*piece, last])
            piece = []
        certain = max(0, len(rest) - len(separator) + 1)
        piece.append(rest[:certain])
        edge = rest[certain:]
    yield "".join([*piece, edge])


def _cut_at_blank_lines(blocks: Iterable[str]) -> Iterator[str]:
    lines: list[str] = []
    for line in _cut(blocks, "\n"):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _read_json_lines(
    path: Path, source_field: str, on_read: Callable[[int], None]
) -> Iterator[Document]:
    row = 0
    try:
        for line in lines_of(path, on_read):
            row += 1
            if not line.strip():
                continue
            document = json.loads(line.decode())
            if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                raise ValueError('needs an object with a string under "text"')
            given_id, source = document.get("id"), document.get(source_field)
            if isinstance(source, dict | list):
                raise ValueError(
                    f"{source_field} is not the name of a source: name another --source-field,"
                    " or '' for none"
                )
            given_id, source = (None if x is None else str(x) for x in (given_id, source))
            document = Document(given_id, document["text"], source or None)
            "".join(map(str, document)).encode()  # raises for half a surrogate pair
            yield document
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{row}: is not JSON ({error.msg}, column {error.colno})") from None
    except Exception as error:  # each decompressor raises errors of its own
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ValueError(f"{path}:{row}: {error}") from None


# ---- json lines
#
# Files of JSON objects, one a line, each with where it stands for messages.
#
# What their fields mean is the business of who reads them. Documents to train on are read by
# support/text/reading.py.


def read_objects(file: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's place, as FILE:LINE, and its object; a file may be compressed (.gz, .zst).

    Blank lines are passed over.

    Raises: ValueError naming the file and the line that cannot be read
    """
    path, row = Path(file), 0
    lines = lines_of(path, lambda size: None)
    while True:
        try:
            line = next(lines, None)
        except Exception as error:  # each decompressor raises errors of its own
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise ValueError(f"{path}:{row + 1}: cannot be read: {error}") from None
        if line is None:
            return
        row += 1
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode())
        except json.JSONDecodeError as error:
            message = f"is not JSON ({error.msg}, column {error.colno})"
            raise ValueError(f"{path}:{row}: {message}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{row}: is not text in UTF-8: {error.reason}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{row}: is no JSON object: write one a line")
        yield f"{path}:{row}", value
