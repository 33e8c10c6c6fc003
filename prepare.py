"""Encode documents into a token store: the folder that training reads (support/store.py).

    files ── Corpus ──> documents, held out or not ── batches ──> threads encode ── StoreWriter

A file of plain text is a document, or several with --split-on; a line of JSON lines, whatever the
file's name, a .json file of one object, and a row of parquet are one each. All but parquet may be
gz. What cannot be read is refused if it is given by name; in a folder it is skipped and named. Of
the documents d, a, b and c, --holdout 2 holds out d, whose crc32 is even as about one in two is:
the store has the tokens of a, b and c, then those of d, which training never reads. Of a single
text, and of a file of tokens, the end is held out.

Does not shuffle, filter, deduplicate or change text. With --learn-ranks it makes a tokenizer of the
documents for training, instead of a store.

    python prepare.py corpus/pd-mix.jsonl.gz --out runs/pd-mix
    python prepare.py my-text --learn-ranks 4096 --out own.tiktoken
    python prepare.py --tokens-from data/openwebtext/train.bin --tokenizer gpt2 --out runs/owt
"""

import gzip
import io
import json
import os
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import tiktoken
from tqdm import tqdm

from support import runtime, store
from support.settings import several, whole_number

BLOCK = 1 << 22  # characters of text, or bytes of tokens, read at once
BATCH = 256  # documents that threads encode together

# Text by its bytes, but not to be trained on. Also as gz.
NOT_TEXT = (".csv", ".tsv", ".ipynb", ".pkl", ".pickle", ".svg")

# How files begin that are no bare numbers: gz, npy, npz
HEADERS = (b"\x1f\x8b\x08", b"\x93NUMPY", b"PK\3\4")

# ---- files


def input_files(given: str | Path) -> Iterator[tuple[Path, str]]:
    """A file and its name, or those in a folder at any depth: sorted, without hidden ones."""
    path = Path(given)
    if given == "" or not path.exists():  # Path("") would be the working folder
        raise ValueError(f"{given or 'the empty string'}: no such file or folder")
    if path.is_file():
        yield path, path.name
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        # a link to a folder cannot be read, and is named among those that are skipped
        if "/." not in f"/{name}" and (file.is_symlink() or not file.is_dir()):
            yield file, name


def kind_of(path: Path, text_column: str, in_folder: bool) -> str:
    """What a document is in a file: all of it, a line or an object of JSON, or a row of parquet.

    A .json file that is neither lines nor an object with text is text in a folder, as code is.

    Cost:   reads plain text to its end
    Raises: ValueError for what is not read, such as a table in text, whose commas would be trained
            on
    """
    with decompressed(path) as file:
        first = next(filter(None, map(bytes.strip, file)), b"")
    name = path.name.lower().removesuffix(".gz")
    if first.startswith(b"PAR1"):
        return "row"
    with suppress(ValueError, RecursionError):
        if name.endswith(".jsonl") or isinstance(json.loads(first), dict):
            return "line"
    is_json = name.endswith(".json")
    with suppress(ValueError):
        if is_json and any(text_column in fields for _, fields in read_lines(path, whole=True)):
            return "JSON object"
    if name.endswith(NOT_TEXT) or first.startswith(b'[{"') or (is_json and not in_folder):
        problem = f"is neither text nor JSON with --text-column {text_column}"
        raise ValueError(f"{path}: {problem}: make it JSON lines, an object a line, or parquet")
    for block in text_blocks(path):
        if "\0" in block:
            raise ValueError(f"{path}: is not text: it has a NUL")
    return "file"


@contextmanager
def decompressed(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed if they are gz.

    Raises: ValueError naming the file, also if the block finds that it is not UTF-8
    """
    with path.open("rb") as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            file = io.BufferedReader(gzip.GzipFile(fileobj=file))
        try:
            yield file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: cannot be decompressed: {error}") from None
        except UnicodeDecodeError as error:
            at = file.tell() - len(error.object) + error.start
            raise ValueError(f"{path}: is not UTF-8 at byte {at:,}: convert it") from None


def text_blocks(path: Path) -> Iterator[str]:
    """A text in UTF-8 block by block, with its line ends as they are."""
    with decompressed(path) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="")
        yield from iter(partial(text.read, BLOCK), "")


def read_lines(path: str | Path, whole: bool = False) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the place (FILE:LINE, for messages) and the object of each line that is not blank.

    Args:   whole take the file as one line
    Raises: ValueError naming the file and the line that cannot be read
    """
    with decompressed(Path(path)) as file:
        for row, line in enumerate([file.read()] if whole else file, 1):
            if not line.strip():
                continue
            fields = None
            with suppress(ValueError, RecursionError):
                fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError(f"{path}:{row}: is not a JSON object: write one per line")
            yield f"{path}:{row}", fields


def read_parquet(path: Path, text_column: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the place (FILE:ROW) of each row, with its text and its id, where there are such."""
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
        columns = [name for name in table.schema_arrow.names if name in (text_column, "id")]
        rows = (batch.to_pylist() for batch in table.iter_batches(1000, columns=columns))
        for row, fields in enumerate(chain.from_iterable(rows), 1):
            yield f"{path}:{row}", fields
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from None


# ---- documents


class Document(NamedTuple):
    """A document, or one side of the one that is cut in two."""

    text: str
    held_out: bool


@dataclass
class Corpus:
    """The documents of files and folders, each either for training or held out.

    A line of JSON or a row has the document under `text_column`, where null is an empty text, and
    may have "id". Any other file is one document with its name as the id, unless `split_on` cuts it
    into documents without ids. Of a folder, files that cannot be read to their end are skipped as a
    whole; stderr has the reasons for the first five, `skipped` all.

    One document in `holdout` is held out, chosen by the hash of its id (of its text if it has no
    id), so it stays held out when other documents are added or removed. If that leaves training or
    the held-out side without text, because there are few documents, the last 1/holdout of all text
    is held out instead. To find out, some of the documents are read at once, and all of a single
    text.

    paths
    holdout      0 holds nothing out, 1 everything
    split_on     what separates documents in plain text: blank-line, or a string
    text_column

    Raises: ValueError naming the flag, or the file and the line
    """

    paths: Sequence[str | Path]
    holdout: int = 20
    split_on: str | None = None
    text_column: str = "text"

    def __post_init__(self):
        files = [file for path in self.paths for file in input_files(path)]
        given = set(map(Path, self.paths))
        self.files = []
        self.skipped = []
        for path, name in files:
            try:
                kind = kind_of(path, self.text_column, path not in given)
                if kind != "file" and path not in given:
                    for _ in self._read(path, name, kind):  # to its end
                        pass
                self.files.append((path, name, kind))
            except (ValueError, OSError) as error:
                if path in given:
                    raise
                self.skipped.append(runtime.one_line(error))
        if self.skipped and not self.files:
            raise ValueError(f"no file can be read, the first of them: {self.skipped[0]}")
        if self.skipped:
            count = f"left out: {several(len(self.skipped), 'file')}, the first of them"
            print(count, *self.skipped[:5], sep="\n  ", file=sys.stderr)
        self.training_characters = self._before_the_tail() if self.holdout > 1 else None

    def documents(self) -> Iterator[Document]:
        """Read all documents, from the beginning each time."""
        documents = tqdm(self._by_hash(), unit=" documents", disable=None, leave=False)
        if self.training_characters is None:
            return iter(documents)
        return hold_out_tail(documents, self.training_characters, self.holdout)

    def _by_hash(self) -> Iterator[Document]:
        """All documents, each held out by its hash."""
        for path, name, kind in self.files:
            for id, text in self._read(path, name, kind):
                hash = zlib.crc32((text if id is None else id).encode())
                yield Document(text, self.holdout > 0 and hash % self.holdout == 0)

    def _read(self, path: Path, name: str, kind: str) -> Iterator[tuple[str | None, str]]:
        """The id, if there is one, and the text of each document in a file."""
        if kind == "file":
            for text in split_text(text_blocks(path), self.split_on):
                yield name if self.split_on is None else None, text
            return
        if kind == "row":
            rows = read_parquet(path, self.text_column)
        else:
            rows = read_lines(path, whole=kind == "JSON object")
        for place, fields in rows:
            id = None if fields.get("id") is None else str(fields["id"])
            text = fields.get(self.text_column, 0)
            if not isinstance(text, str | None):
                problem = f"no string under {self.text_column} of {', '.join(fields)[:1000]}"
                raise ValueError(f"{place}: {problem}: choose with --text-column")
            try:
                f"{id}{text}".encode()
            except UnicodeEncodeError:
                raise ValueError(f"{place}: has half of a surrogate pair, not text") from None
            yield id, text or ""

    def _before_the_tail(self) -> int | None:
        """Count the characters before the last 1/holdout; None if hashes choose.

        Stops at the first document that gives the second side text.
        """
        characters = 0
        sides = set()
        for text, held_out in self._by_hash():
            characters += len(text)
            if text:
                sides.add(held_out)
            if len(sides) == 2:
                return None
        return characters - -(-characters // self.holdout)


def split_text(blocks: Iterable[str], mark: str | None) -> Iterator[str]:
    """Cut plain text into documents; nothing between two marks is none."""
    if mark is None:
        yield "".join(blocks)
    elif mark == "blank-line":
        for is_blank, lines in groupby(split_blocks(blocks, "\n"), lambda line: not line.strip()):
            if not is_blank:
                yield "\n".join(lines)
    else:
        mark = mark.replace(r"\n", "\n").replace(r"\r", "\r").replace(r"\t", "\t")
        yield from filter(None, split_blocks(blocks, mark))


def split_blocks(blocks: Iterable[str], mark: str) -> Iterator[str]:
    """Yield what "".join(blocks).split(mark) gives, with a piece and a block in memory."""
    rest = ""
    for block in blocks:
        *pieces, rest = (rest + block).split(mark)
        yield from pieces
    yield rest


def hold_out_tail(documents: Iterable[Document], training: int, holdout: int) -> Iterator[Document]:
    """Hold out all text after the first `training` characters, cutting one document in two."""
    reach = training // holdout // 2  # half of the text that is held out
    for text, _ in documents:
        if 0 < training < len(text):
            end = find_cut(text, training, reach)
            yield Document(text[:end], False)
            yield Document(text[end:], True)
        else:
            yield Document(text, training <= 0)
        training -= len(text)


def find_cut(text: str, position: int, reach: int) -> int:
    """Choose where to cut a text: after a line or else a blank within `reach`, else at `position`.

    A cut before the position is preferred, so that at least the share asked for is held out.

    Example:  find_cut("one\\ntwo\\nthree", 10, 5) is 8, before "three"
    """
    for end in ("\n", " "):
        before = text.rfind(end, max(0, position - reach - 1), position) + 1
        after = text.find(end, position, position + reach) + 1
        if before or 0 < after < len(text):
            return before or after
    return position


# ---- tokens


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    encoding: tiktoken.Encoding,
    name: str,
    **options: object,
) -> dict:
    """Encode documents into a store, which appears whole at `out` or not at all.

    Args:    inputs, options  as Corpus takes them
             name  of the tokenizer, for get_encoding; the store records it
    Returns: the contents of meta.json
    Raises:  ValueError for bad input, and for a corpus without text
    Cost:    memory for a batch of documents and their tokens; documents per second beside
             tiktoken's, as once measured, are in results/prepare.jsonl
    """
    corpus = Corpus(inputs, **options)
    documents = corpus.documents()
    skipped = 0
    # encode_ordinary would hold the GIL while it makes a list of ints; this does not
    encode = partial(encoding.encode_to_numpy, disallowed_special=())
    with store.atomic_folder(Path(out)) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        writer = store.StoreWriter(folder, encoding)
        while batch := list(islice(documents, BATCH)):
            encoded = pool.map(encode, [document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                skipped += not len(ids)
                if len(ids):
                    ids = np.append(ids, encoding.eot_token)
                    writer.append(ids, document.held_out, [len(ids)])
        return writer.finish(
            name,
            inputs,
            skipped=skipped,
            skipped_files=len(corpus.skipped),
            document=" or a ".join(sorted({kind for *_, kind in corpus.files})),
            holdout=corpus.holdout,
            held_out_by="hash" if corpus.training_characters is None else "tail",
            split_on=corpus.split_on,
        )


def prepare_tokens(
    train: Path,
    out: str | Path,
    encoding: tiktoken.Encoding,
    name: str,
    holdout: int | None = None,
    tokens_dtype: str | None = None,
) -> dict:
    """Make a store of a file of tokens with end-of-text after each document, as nanoGPT writes it.

    Args:    holdout      as `token_sides` takes it
             tokens_dtype of the file, if not that of the store
    Returns, Raises: as of `prepare`; ValueError too for numbers that are no tokens of `encoding`
    """
    end = encoding.eot_token
    with store.atomic_folder(Path(out)) as folder:
        writer = store.StoreWriter(folder, encoding)
        sides = token_sides(train, end, tokens_dtype or writer.dtype, holdout)
        for side, tokens in enumerate(sides):
            for start in range(0, len(tokens), BLOCK):
                ids = np.array(tokens[start : start + BLOCK])
                if ids.max() > end:
                    problem = f"has token {ids.max()}, and those of --tokenizer {name} end at"
                    raise ValueError(f"--tokens-from {tokens.filename}: {problem} {end}")
                before = np.append(tokens[start - 1] if start else end, ids[:-1])
                ids = ids[(ids != end) | (before != end)]  # no document without text
                writer.append(ids, side, np.flatnonzero(ids == end) + 1)
            if len(tokens) and tokens[-1] != end:
                writer.append(np.array([end]), side, [1])
        return writer.finish(name, [train], held_out_by="file", document=f"part up to id {end}")


def token_sides(
    train: Path, end: int, dtype: np.dtype | str, holdout: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Map the tokens for training and those held out: val.bin beside train.bin, or the file's end.

    The end is the last 1/holdout (20), and begins after an end-of-text, if one is near.

    Raises:  ValueError for `holdout` beside val.bin
    Example: of 72 105 256 nine times, 24 of 27 tokens are for training
    """
    tokens = map_tokens(train, dtype)
    test = train.with_name(train.name.replace("train", "val"))
    if test != train and test.exists():
        if holdout is not None:
            raise ValueError(f"--holdout {holdout} has no effect: {test} is held out: leave it out")
        return tokens, map_tokens(test, dtype)
    share = 20 if holdout is None else holdout
    tail = -(-len(tokens) // share) if share else 0
    cut = len(tokens) - tail
    near = np.flatnonzero(tokens[max(0, cut - tail // 2 - 1) : cut][::-1] == end)
    cut -= near[0] if len(near) else 0
    return tokens[:cut], tokens[cut:]


def map_tokens(file: Path, dtype: np.dtype | str) -> np.ndarray:
    """Map a file of bare numbers.

    Raises: ValueError for other files, as far as their size, first bytes and zeros show it: every
            second number is 0 where 32 bits are read as 16
    """
    try:
        tokens = np.memmap(file, dtype, "r")
    except ValueError as error:
        raise ValueError(f"--tokens-from {file}: {error}") from None
    zeros = np.mean(tokens[:BLOCK] == 0)
    if zeros > 1 / 3 or tokens[:3].tobytes().startswith(HEADERS):
        problem = f"is not bare {tokens.dtype}, {zeros:.0%} are 0: add --tokens-dtype uint32"
        convert = "numpy.fromfile(FILE, 'int64').astype('uint32').tofile(NEW)"
        raise ValueError(f"--tokens-from {file}: {problem}, or unpack or convert it: {convert}")
    return tokens


def embedded_store(name: str) -> Path:
    """The embedded corpus as a store in tokenizer `name`, prepared on first use and then kept.

    It lies in the clone or, if that cannot be written, in the user's cache folder.
    """
    encoding = store.get_encoding(name)
    folder = runtime.ROOT / ".cache" / f"pd-mix-{store.fingerprint(encoding)[:12]}"
    if not folder.exists() and not os.access(runtime.ROOT, os.W_OK):
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = home / "parsimony" / folder.name
    if not folder.exists():
        print(f"preparing the embedded corpus in {folder}", file=sys.stderr)
        try:
            prepare([runtime.ROOT / "corpus" / "pd-mix.jsonl.gz"], folder, encoding, name)
        except OSError:
            if not folder.exists():  # else another process has been faster
                raise
    return folder


def print_summary(made: store.Store) -> None:
    meta = made.meta
    held_out, held_out_tokens = (meta[n] - meta[f"train_{n}"] for n in ("documents", "tokens"))
    bytes_each = meta["bytes"] / (meta["tokens"] - meta["documents"])
    tail = f", the last 1/{meta['holdout']} of the text" if meta["held_out_by"] == "tail" else ""
    cut = ", cut by --split-on" if meta.get("split_on") else ""
    print(f"documents {meta['documents']:>14,}   each a {meta['document']}{cut}")
    print(f"tokens    {meta['tokens']:>14,}   {bytes_each:.3f} bytes per token")
    print(f"held out  {held_out:>14,}   documents, {held_out_tokens:,} tokens{tail}")
    if meta.get("skipped"):
        print(f"{meta['skipped']:>24,}   documents without text are left out")
    if meta["document"] == "file" and not cut and meta["bytes"] > 1e6 * meta["documents"]:
        print("such large documents may be several: --split-on blank-line cuts them, or a STRING")
    if bytes_each < 1.6 and meta["tokenizer"] != "bytes":
        command = "python prepare.py YOUR_TEXT --learn-ranks 4096 --out own.tiktoken"
        print(f"so few bytes a token make long rows: try a tokenizer of this text\n  {command}")


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(prog="prepare.py", description=__doc__.split(":")[0])
    flag = parser.add_argument
    flag("inputs", nargs="*", help="text or JSON lines, also as gz; parquet; folders")
    flag("--tokens-from", type=Path, help="tokens instead: nanoGPT's train.bin, val.bin beside it")
    flag("--tokens-dtype", choices=["uint32"], help="of that file (16 bits, unless ids need 32)")
    flag("--out", type=Path, required=True, help="the store, a folder to make")
    flag("--tokenizer", help=f"{store.NAMES} (pd4k)")
    flag("--learn-ranks", type=whole_number, help="make a tokenizer of so many tokens, no store")
    holdout = "hold out one document in N, or the last 1/N of a single text; 0: none (20)"
    flag("--holdout", type=whole_number, metavar="N", help=holdout)
    split_on = r"cut plain text into documents at each blank-line, or at a STRING, e.g. '\n---\n'"
    flag("--split-on", metavar="STRING", help=split_on)
    flag("--text-column", help="the field or column that has the text (text)")
    args = parser.parse_args(argv)
    out = args.out
    if bool(args.inputs) == bool(args.tokens_from):
        raise ValueError("no inputs, or two kinds: name files, folders or --tokens-from TRAIN.BIN")
    if out.exists():
        raise ValueError(f"--out {out}: exists already: remove it or name another folder")
    unused = ["learn_ranks", "split_on", "text_column"] if args.tokens_from else ["tokens_dtype"]
    unused += ["tokenizer"] if args.learn_ranks is not None else []
    for name in unused:
        if vars(args)[name] is not None:
            raise ValueError(f"--{name.replace('_', '-')} has no effect here: leave it out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that atomic_folder tidies up
    options = ("holdout", "split_on", "text_column", "tokens_dtype")
    how = {name: vars(args)[name] for name in options if vars(args)[name] is not None}
    if args.learn_ranks is not None:
        if out.suffix != ".tiktoken" or not out.absolute().parent.is_dir():
            raise ValueError(f"--out {out}: end its name in .tiktoken, and its folder has to exist")
        documents = Corpus(args.inputs, **how).documents()
        texts = (document.text for document in documents if not document.held_out)
        store.write_ranks(out, store.learn_ranks(texts, args.learn_ranks))
        return
    name = args.tokenizer or "pd4k"
    encoding = store.get_encoding(name)
    if name.endswith((".tiktoken", ".model")):
        name = str(Path(name).resolve())  # so that it is found from any folder
    if args.tokens_from:
        prepare_tokens(args.tokens_from, out, encoding, name, **how)
    else:
        prepare(args.inputs, out, encoding, name, **how)
    print_summary(store.Store.open(out))


if __name__ == "__main__":
    runtime.exit_cleanly(main)
