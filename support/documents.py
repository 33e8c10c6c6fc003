"""Read documents from files and folders, and decide which of them are held out.

Knows JSON lines (plain, .gz, .zst) and plain text in UTF-8. Keeps one document in memory at a time
and changes no character of it. `prepare.py` and `support.tokenizer learn` read through this file,
so that both hold out the same documents.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

INPUTS_HELP = "plain text, .jsonl, .jsonl.gz, .jsonl.zst, or folders of these"
HOLDOUT_HELP = "hold out one document in so many; 0: none (20)"


def is_held_out(document_id: str, holdout: int) -> bool:
    """Decide by the id alone: a document stays where it is when the corpus grows."""
    return holdout > 0 and zlib.crc32(document_id.encode()) % holdout == 0


def read_documents(paths: Iterable[str | Path]) -> Iterator[tuple[str, str]]:
    """Stream (id, text) from files and folders of JSON lines or plain text.

    A line of .jsonl, .jsonl.gz or .jsonl.zst is an object with "text", and with "id" if it has one
    (its id is FILE:LINE otherwise). Any other file is one document, and its name is the id. A
    folder is read at every depth, in sorted order and without its hidden files; the names of its
    files are relative to it.

    Raises:   ValueError naming the file, and the line if there is one
    """
    files = []
    for path in map(Path, paths):
        base, inside = path.parent, [path]
        if path.is_dir():
            base, inside = path, sorted(path.rglob("[!.]*"))
        inside = [file for file in inside if file.exists() and not file.is_dir()]
        if not inside:
            raise ValueError(f"{path}: no such file, or a folder without documents")
        files += [(file, file.relative_to(base).as_posix()) for file in inside]
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
            (document_id + document["text"]).encode()  # raises for half a surrogate pair
            yield document_id, document["text"]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{row}: is not JSON ({error.msg}, column {error.colno})") from None
    except Exception as error:  # each decompressor raises errors of its own
        raise ValueError(f"{path}:{row}: {error}") from None


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _zstd_lines(path)
    else:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file


def _zstd_lines(path: Path) -> Iterator[bytes]:
    """Decompress frame by frame: zstandard's own reader does not notice a file that was cut."""
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
        raise EOFError("the file ends inside a zstd frame")
    yield rest
