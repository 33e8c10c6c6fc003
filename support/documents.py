"""Documents out of files and folders, and which of them are held out."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path


def is_held_out(document_id: str, holdout: int) -> bool:
    """Decide by the id alone, so that a document keeps its side when the corpus grows."""
    return holdout > 0 and zlib.crc32(document_id.encode()) % holdout == 0


def read_documents(paths: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    """Stream (id, text) from files and folders of JSON lines or plain text.

    .jsonl, .jsonl.gz and .jsonl.zst hold one object a line with "text", and "id" if it has one
    (else file name:line). Any other file is one document, its name the id. A folder stands for its
    files at any depth, in sorted order and named from the folder on, hidden files left out.

    Raises:   ValueError naming the file, and the line where there is one
    """
    files = []
    for path in map(Path, paths):
        base, found = path.parent, [path]
        if path.is_dir():
            base, found = path, sorted(path.rglob("[!.]*"))
        found = [file for file in found if file.exists() and not file.is_dir()]
        if not found:
            raise ValueError(f"{path}: no such file, or a folder without documents")
        files += [(file, file.relative_to(base).as_posix()) for file in found]
    for file, name in files:
        yield from _read_file(file, name)


def _read_file(path: Path, name: str) -> Iterator[tuple[str, str]]:
    if not name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        try:
            yield name, path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not text in UTF-8 ({error})") from None
        return
    row = 0
    try:
        for row, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            document = json.loads(line.decode())
            if not isinstance(document, dict) or not isinstance(document.get("text"), str):
                raise ValueError('needs an object with a string under "text"')
            given_id = document.get("id")
            document_id = f"{name}:{row}" if given_id is None else str(given_id)
            (document_id + document["text"]).encode()  # raises for half of a surrogate pair
            yield document_id, document["text"]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{row}: is not JSON ({error.msg}, column {error.colno})") from None
    except Exception as error:  # each decompressor has its own kinds
        raise ValueError(f"{path}:{row}: {error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _zstd_lines(path)
    else:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file


def _zstd_lines(path: Path) -> Iterator[bytes]:
    """Decode frame by frame: the package's own reader takes a file cut short for a whole one."""
    try:
        import zstandard
    except ImportError:
        raise ValueError("needs `pip install zstandard`") from None
    decoder, rest = None, b""
    with path.open("rb") as file:
        while block := file.read(1 << 16):
            while block:
                decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
                *lines, rest = (rest + decoder.decompress(block)).split(b"\n")
                yield from lines
                block = decoder.unused_data
                decoder = None if decoder.eof else decoder
    if decoder:
        raise EOFError("the file ends inside a special_ids of zstd")
    yield rest
