"""Read files and folders: JSON lines, parquet and plain text in UTF-8; all but parquet also as gz.

The first bytes of a file say what it is. One line or block is in memory at a time, and no character
of it is changed. How these become documents is in support/text/corpus.py.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, AnyStr, NamedTuple

from tqdm import tqdm

BLOCK_BYTES = 1 << 20  # read at once

Objects = Iterator[tuple[str, dict[str, Any]]]  # places, for messages, and what is there


class InputFile(NamedTuple):
    path: Path
    name: str  # relative to the given folder
    in_folder: bool
    bytes: int


# ---- which files, and what they are


def input_files(given: str | Path) -> list[InputFile]:
    """A file, or the files in a folder at any depth: sorted, without hidden ones.

    Raises: ValueError for a path that is neither file nor folder, and for a folder without files
    """
    path = Path(given)
    if given == "":  # an empty variable in a shell; Path("") would be the working folder
        raise ValueError("an input is the empty string: name a file or a folder")
    if path.is_file():
        return [InputFile(path, path.name, False, path.stat().st_size)]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    files = []
    for file in sorted(path.rglob("*")):
        below = file.relative_to(path)
        is_hidden = any(part.startswith(".") for part in below.parts)
        if is_hidden or (file.is_dir() and not file.is_symlink()):
            continue
        if not file.is_file():  # else it would be left out without a word, or waited for
            raise ValueError(f"{file}: is a link to no file, a pipe or a device: remove it")
        files.append(InputFile(file, below.as_posix(), True, file.stat().st_size))
    if not files:
        raise ValueError(f"{path}: a folder without documents (hidden files are not read)")
    return files


def input_bar(files: Iterable[InputFile], title: str) -> tqdm:
    """A progress bar over the bytes of files, shown only on a terminal."""
    total = sum(file.bytes for file in files)
    return tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=None, leave=False)


def kind_of(path: Path) -> str:
    """What a file holds: "parquet", "lines" of JSON objects, or "text".

    Raises: ValueError for a table in text and an array of JSON, whose commas would be trained on
    """
    name = path.name.lower().removesuffix(".gz")
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return "parquet"
    if name.endswith(".jsonl"):
        return "lines"
    first = b""
    for line in cut(blocks(path), b"\n"):
        first = line.removeprefix(codecs.BOM_UTF8).strip()
        if first:
            break
    with suppress(ValueError, RecursionError):
        if first.startswith(b"{") and isinstance(json.loads(first), dict):
            return "lines"
    if name.endswith((".csv", ".tsv")) or first.startswith(b'[{"'):
        raise ValueError(f"{path}: is not read: make it JSON lines, an object a line, or parquet")
    return "text"


# ---- what is in them


def blocks(path: Path, bar: tqdm | None = None) -> Iterator[bytes]:
    """The bytes of a file, decompressed; a bar is told how many were read."""
    at = 0
    with path.open("rb") as file:
        is_gz = file.peek(2)[:2] == b"\x1f\x8b"
        source = gzip.GzipFile(fileobj=file) if is_gz else file
        try:
            while block := source.read(BLOCK_BYTES):
                if bar is not None:
                    bar.update(file.tell() - at)
                at = file.tell()
                yield block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: cannot be decompressed: {error}") from None


def read_parquet(path: Path, columns: Iterable[str], bar: tqdm | None = None) -> Objects:
    """Yield the place (FILE:ROW) and some columns of each row, a thousand rows at a time."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: a parquet file needs `pip install pyarrow`") from None
    table, row = parquet.ParquetFile(path), 0
    wanted = [name for name in columns if name in table.schema_arrow.names]
    for batch in table.iter_batches(batch_size=1000, columns=wanted):
        for fields in batch.to_pylist():
            row += 1
            yield f"{path}:{row}", fields
    if bar is not None:
        bar.update(path.stat().st_size)


def read_lines(path: str | Path, bar: tqdm | None = None) -> Objects:
    """Yield the place (FILE:LINE, for messages) and the object of each line that is not blank.

    Raises: ValueError naming the file and the line that cannot be read
    """
    for row, line in enumerate(cut(blocks(Path(path), bar), b"\n"), 1):
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{row}: is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{row}: is not a JSON object: write one per line")
        yield f"{path}:{row}", value


class NotText(ValueError):
    """A file that is not UTF-8."""


def text_blocks(path: Path, bar: tqdm | None = None) -> Iterator[str]:
    """Decode block by block, so that a large file that is not text is refused at its start."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    try:
        for block in chain(blocks(path, bar), [b""]):
            yield decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise NotText(f"{path}: is not text in UTF-8: {error.reason}") from None


def cut(blocks: Iterable[AnyStr], mark: AnyStr) -> Iterator[AnyStr]:
    """Yield what "".join(blocks).split(mark) gives, with one piece in memory at a time."""
    empty = mark[:0]
    piece = []
    edge = empty  # perhaps the beginning of a mark
    for block in blocks:
        *complete, rest = (edge + block).split(mark)
        for last in complete:
            yield empty.join([*piece, last])
            piece = []
        certain = max(0, len(rest) - len(mark) + 1)
        piece.append(rest[:certain])
        edge = rest[certain:]
    yield empty.join([*piece, edge])
