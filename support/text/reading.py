"""Read files, folders and standard input: JSON, tables and plain text in UTF-8, also compressed.

The first bytes of a file say what it is, except that .csv and .tsv are known by their names and
other tables by --text-column. One line, object or block is in memory at a time, and no character
of it is changed. How these become documents is in support/text/corpus.py.
"""

import codecs
import csv
import gzip
import json
import lzma
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain, count, dropwhile, islice
from pathlib import Path
from threading import Thread
from typing import Any, AnyStr, BinaryIO, NamedTuple

from tqdm import tqdm

from support.base.typed_json import parsed

BLOCK_BYTES = 1 << 20  # read at once
SMALL_BYTES = 1 << 12  # of JSON lines at once: a hostile file can make 2^15 times as much of them
MOST_LINE_BYTES = 64 << 20  # of a line of JSON; a compressed file can promise more than memory
TABLES = {".csv": ",", ".tsv": "\t"}  # by what stands between two fields
COMPRESSED = {
    ".gz": b"\x1f\x8b",
    ".xz": b"\xfd7zXZ\0",
    ".zst": b"\x28\xb5\x2f\xfd",
}  # their first bytes
PARQUET = "import pyarrow as pa, pyarrow.parquet as pq"
REFUSED = {  # by their first bytes: what they are, and Python that makes a file for us of them
    b"ARROW1": (
        "an Arrow file;",
        f'{PARQUET}; pq.write_table(pa.ipc.open_file(FILE).read_all(), "text.parquet")',
    ),
    b"\xff\xff\xff\xff": (
        "an Arrow stream, as Hugging Face's datasets keep them;",
        f'{PARQUET}; pq.write_table(pa.ipc.open_stream(FILE).read_all(), "text.parquet")',
    ),
    **dict.fromkeys(
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        (
            "a pickle, which can run code when it is opened; if you trust it,",
            'import pandas; pandas.DataFrame(pandas.read_pickle(FILE)).to_json("text.jsonl",'
            ' orient="records", lines=True)',
        ),
    ),
}
STRINGS = r"(large_)?string|string_view|dictionary<values=string"  # as pyarrow shows their type
TICK_S = 1.0  # the longest that a bar stands still


class InputFile(NamedTuple):
    path: Path
    name: str  # relative to the given folder
    in_folder: bool
    bytes: int


# ---- which files, and how far they have been read


def input_files(given: str | Path) -> list[InputFile]:
    """A file, or the files in a folder at any depth: sorted, without hidden ones; "-" is stdin.

    Raises: ValueError for a path that is neither file nor folder, and for a folder without files
    """
    path = Path(stdin_file().name if given == "-" else given)
    if given == "":  # an empty variable in a shell; Path("") would be the working folder
        raise ValueError("an input is the empty string: name a file or a folder")
    if path.is_file():
        name = "stdin" if given == "-" else path.name
        return [InputFile(path, name, False, path.stat().st_size)]
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_dir():
        raise ValueError(f"{path}: a pipe cannot be read twice: write the text to a file")
    files = []
    for file in tqdm(_walk(path), "files", unit="", disable=None, leave=False):
        if not file.is_file():  # else it would be left out without a word, or waited for
            kind = "a link, but not to a file" if file.is_symlink() else "a pipe or a device"
            raise ValueError(f"{file}: is {kind}: remove it, or name the files one by one")
        below = file.relative_to(path)
        files.append(InputFile(file, below.as_posix(), True, file.stat().st_size))
    if not files:
        raise ValueError(f"{path}: a folder without documents (hidden files are not read)")
    return sorted(files)


@cache
def stdin_file() -> tempfile._TemporaryFileWrapper:
    """All of standard input in a temporary file, because a corpus is read twice."""
    copy = tempfile.NamedTemporaryFile(prefix="stdin-")  # noqa: SIM115, it goes when we end
    shutil.copyfileobj(sys.stdin.buffer, copy)
    copy.flush()
    return copy


def shown(path: str | Path) -> str:
    """A path as messages name it: the copy of standard input is "stdin"."""
    is_stdin = stdin_file.cache_info().currsize and str(path) == stdin_file().name
    return "stdin" if is_stdin else str(path)


def _walk(folder: Path) -> Iterator[Path]:
    """All that a folder and its folders hold, without what is hidden.

    Raises: OSError for a folder that cannot be read
    """

    def refuse(error: OSError) -> None:
        raise error

    for below, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if Path(below, name).is_symlink()]  # to folders
        yield from (Path(below, name) for name in names + links if not name.startswith("."))


def open_input(path: Path) -> BinaryIO:
    return path.open("rb", BLOCK_BYTES)


OpenFile = Callable[[Path], BinaryIO]  # open_input, or the `open` of a bar
Objects = Iterator[tuple[str, dict[str, Any]]]  # places, for messages, and what is there


class InputBar(tqdm):
    """A progress bar over the bytes of input files, shown only on a terminal.

    Reading runs far ahead of the work when a file is one long text, so bytes that were read move
    the bar only when they are `done`. A thread keeps its clock going in between.
    """

    def __init__(self, files: Iterable[InputFile], title: str):
        self.file: BinaryIO | None = None
        self.begins = self.ends = 0  # the bytes before and up to the end of this file
        total = sum(file.bytes for file in files)
        super().__init__(
            desc=title, total=total, unit="B", unit_scale=True, disable=None, leave=False
        )
        Thread(target=self._keep_going, daemon=True).start()

    def open(self, path: Path) -> BinaryIO:
        """Open the next of the files, to be read to its end."""
        self.file = open_input(path)
        self.begins = self.ends
        self.ends += path.stat().st_size
        return self.file

    @property
    def bytes_read(self) -> int:
        if self.file is None or self.file.closed:
            return self.ends
        return self.begins + self.file.raw.tell()

    def done(self, bytes_read: int, documents: int) -> None:
        """Show that the work on the first `bytes_read` bytes, with their documents, is done."""
        self.set_postfix_str(f"{documents:,} documents", refresh=False)
        self.update(bytes_read - self.n)

    def _keep_going(self) -> None:
        while not self.disable:  # as where there is no terminal, and once it is closed
            self.refresh()
            time.sleep(TICK_S)


# ---- JSON lines and tables


def objects_reader(
    path: Path, columns: tuple[str, ...], text_is_table: bool = False
) -> "Callable[[Path, OpenFile], Objects] | None":
    """How to read a file of objects, or of a table's rows; None for plain text.

    Args:   columns that are looked at; of a parquet file no others are read; tables need the first
            text_is_table  --text-column is given: read what would be plain text as a table
    Raises: ValueError for what has to be converted first, with the line that does it
    """
    with open_input(path) as file:
        begins = file.read(8)
    for mark, (kind, line) in REFUSED.items():
        if begins.startswith(mark):
            line = line.replace("FILE", json.dumps(shown(path), ensure_ascii=False))
            raise ValueError(f"{shown(path)}: is {kind} convert it: python -c {shlex.quote(line)}")
    if begins.startswith(b"PAR1"):
        return partial(read_parquet, columns=columns)
    name = Path(path).name.lower().removesuffix(compression_of(path))
    if suffix := next(filter(name.endswith, TABLES), None):
        return partial(read_table, delimiter=TABLES[suffix], column=columns[0])
    if name.endswith(".jsonl"):
        return read_objects
    with open_input(path) as file, suppress(Exception):  # of decompressors: the reader meets it too
        blocks = _blocks(file, path)
        start = b"".join(islice(dropwhile(lambda block: not block.strip(), blocks), 4))
        start = start.removeprefix(codecs.BOM_UTF8).lstrip()
        if re.match(rb'\[\s*\{\s*"', start):
            return read_array
        with suppress(ValueError):
            first = next(cut(chain((start,), blocks), b"\n", MOST_LINE_BYTES))
            if start.startswith(b"{") and isinstance(parsed(first), dict):
                return read_objects
        if text_is_table:
            codecs.getincrementaldecoder("utf-8")().decode(start)  # or else it is not even text
            delimiter = "\t" if b"\t" in start.partition(b"\n")[0] else ","
            return partial(read_table, delimiter=delimiter, column=columns[0])
    return None


def compression_of(path: str | Path) -> str:
    """.gz, .xz or .zst, by the first bytes of a file or else by its name; "" for a plain file."""
    with open_input(Path(path)) as file:
        begins = file.read(6)
    by_bytes = next((suffix for suffix, b in COMPRESSED.items() if begins.startswith(b)), "")
    suffix = Path(path).suffix.lower()
    return by_bytes or (suffix if suffix in COMPRESSED else "")


def read_table(
    path: str | Path, open_file: OpenFile = open_input, delimiter: str = ",", column: str = "text"
) -> Objects:
    """Yield the place (FILE:LINE) and the fields of each row, by the names in the first one.

    Raises: ValueError naming the file and the line; also for a first row without `column`
    """
    csv.field_size_limit(MOST_LINE_BYTES)
    with open_file(Path(path)) as file:
        lines = cut(_blocks(file, path), b"\n", MOST_LINE_BYTES)
        decoded = codecs.iterdecode((line + b"\n" for line in lines), "utf-8-sig")
        rows = csv.reader(decoded, delimiter=delimiter, strict=True)
        try:
            header = next(filter(None, rows), [])
            if header and column not in header:
                raise csv.Error(no_strings(column, header))
            for row in filter(None, rows):
                if len(row) != len(header):
                    raise csv.Error(f"has {len(row)} fields, and the first line has {len(header)}")
                yield f"{shown(path)}:{rows.line_num}", dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise ValueError(f"{shown(path)}:{rows.line_num}: {error}") from None
        except Exception as error:  # of decompressors or UTF-8, before csv has counted the line
            line = rows.line_num + 1
            raise ValueError(f"{shown(path)}:{line}: cannot be read: {error}") from None


def no_strings(column: str, there: list[str]) -> str:
    """The message for a name without text; it lists the names that have some."""
    if not there:
        return f'has no string under "{column}" or any other name'
    return f"strings are under {', '.join(there)[:1000]}, not {column}: choose with --text-column"


def read_parquet(
    path: str | Path, open_file: OpenFile = open_input, columns: tuple[str, ...] = ()
) -> Objects:
    """Yield the place (FILE:ROW) and some columns of each row, a thousand rows at a time."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{shown(path)}: a parquet file needs `pip install pyarrow`") from None
    with open_file(Path(path)) as file:
        row = 0
        try:
            table = parquet.ParquetFile(file)
            names = [field.name for field in table.schema_arrow]
            strings = [f.name for f in table.schema_arrow if re.match(STRINGS, str(f.type))]
            if columns[0] not in strings:
                raise ValueError(no_strings(columns[0], strings))
            wanted = [name for name in columns if name in names]
            for batch in table.iter_batches(batch_size=1000, columns=wanted):
                for fields in batch.to_pylist():
                    row += 1
                    yield f"{shown(path)}:{row}", fields
        except Exception as error:  # pyarrow has a dozen kinds
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{shown(path)}:{row + 1}: {reason}") from None


def read_array(path: str | Path, open_file: OpenFile = open_input) -> Objects:
    """Yield the place (FILE:NUMBER) and each object of one JSON array, one of them in memory."""
    decode = json.JSONDecoder().raw_decode
    number, text = 0, ""
    with open_file(Path(path)) as file:
        try:
            for block in codecs.iterdecode(_blocks(file, path), "utf-8-sig"):
                text += block
                while start := re.match(r"[\[,\s]*(?=\{)", text):
                    try:
                        value, end = decode(text, start.end())
                    except json.JSONDecodeError:  # its rest is still to come
                        break
                    number += 1
                    yield f"{shown(path)}:{number}", value
                    text = text[end:]
                if len(text) > MOST_LINE_BYTES:
                    raise ValueError(f"is longer than {MOST_LINE_BYTES:,} characters")
            if text.strip() != "]":
                raise ValueError(f"is no JSON object: {text[:40]!a}")
        except Exception as error:
            raise ValueError(f"{shown(path)}:{number + 1}: cannot be read: {error}") from None


def read_objects(path: str | Path, open_file: OpenFile = open_input) -> Objects:
    """Yield the place (FILE:LINE, for messages) and the object of each line that is not blank.

    Raises: ValueError naming the file and the line that cannot be read
    """
    with open_file(Path(path)) as file:
        lines = cut(_blocks(file, path), b"\n", MOST_LINE_BYTES)
        for row in count(1):
            try:
                line = next(lines, None)
                if line is None:
                    return
                line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                value = parsed(line.decode())
            except json.JSONDecodeError as error:
                message = f"is not JSON ({error.msg}, column {error.colno})"
                raise ValueError(f"{shown(path)}:{row}: {message}") from None
            except Exception as error:  # each decompressor raises errors of its own
                raise ValueError(f"{shown(path)}:{row}: cannot be read: {error}") from None
            if not isinstance(value, dict):
                raise ValueError(f"{shown(path)}:{row}: is not a JSON object: write one per line")
            yield f"{shown(path)}:{row}", value


def _blocks(file: BinaryIO, path: str | Path, most: int = SMALL_BYTES) -> Iterator[bytes]:
    """Decompressed lines, or their parts of at most so many bytes."""
    kind = compression_of(path)
    if kind == ".gz":
        file = gzip.GzipFile(fileobj=file)
    elif kind == ".xz":
        file = lzma.LZMAFile(file)  # noqa: SIM115, whoever opened the file closes it
    if kind == ".zst":
        return _zstd_blocks(iter(partial(file.read, SMALL_BYTES), b""))
    return iter(partial(file.readline, most), b"")


def _zstd_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress frame by frame: zstandard's own reader does not notice a truncated file."""
    try:
        import zstandard
    except ImportError:
        raise ValueError("needs `pip install zstandard`") from None
    decoder = None
    for block in blocks:
        while block:
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            yield decoder.decompress(block)
            block = decoder.unused_data
            decoder = None if decoder.eof else decoder
    if decoder:
        raise EOFError("the file ends inside a zstd frame")


# ---- plain text


class NotText(ValueError):
    """A file that is not UTF-8."""


def text_blocks(path: Path, open_file: OpenFile = open_input) -> Iterator[str]:
    """Decode block by block, so that a large file that is not text is refused at its start."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    read = 0  # bytes
    with open_file(path) as file:
        try:
            for block in chain(_blocks(file, path, BLOCK_BYTES), [b""]):
                read += len(block)
                yield decode(block, final=not block)
        except UnicodeDecodeError as error:
            byte = read - len(error.object) + error.start
            message = f"is not text in UTF-8: {error.reason} at byte {byte}"
            raise NotText(f"{shown(path)}: {message}") from None
        except Exception as error:  # each decompressor raises errors of its own
            raise ValueError(f"{shown(path)}: cannot be read: {error}") from None


def cut(blocks: Iterable[AnyStr], mark: AnyStr, most: int = sys.maxsize) -> Iterator[AnyStr]:
    """Yield what "".join(blocks).split(mark) gives, with one piece in memory at a time.

    Raises: ValueError for a piece of more than about `most` characters or bytes
    """
    empty = mark[:0]
    piece = []
    length = 0  # of the piece until now
    edge = empty  # edge: perhaps the beginning of a mark
    for block in blocks:
        *complete, rest = (edge + block).split(mark)
        for last in complete:
            yield empty.join([*piece, last])
            piece = []
            length = 0
        certain = max(0, len(rest) - len(mark) + 1)
        piece.append(rest[:certain])
        length += certain
        if length > most:
            raise ValueError(f"is longer than {most:,} bytes, which is the most for a line")
        edge = rest[certain:]
    yield empty.join([*piece, edge])
