"""Encode documents into a token store: the folder that training reads (support/store.py).

    files ── Corpus ──> documents, held out or not ── batches ──> threads encode ── StoreWriter

One document is: a file of plain text (or a part of it, with --split-on), a line of JSON lines
(whatever the name of the file), or a row of parquet. All files except parquet may be gzipped. A
file that cannot be read is an error if it is named on the command line; in a folder it is skipped
and reported.

Lines and rows without text may say which of their tokens are targets, for fine-tuning:

    {"prompt": "2 + 2 =", "completion": " 4"}           the completion and end-of-text are
    {"segments": [{"text": "Hi", "loss": false}, ...]}  those with "loss": true are; end-of-text
                                                        if the last segment is

Held-out documents are chosen by hash. Of documents d, a, b and c, --holdout 2 holds out d, whose
crc32 is even, as about one in two is: the store has the tokens of a, b and c, and then those of d,
which training never reads. From a single text, and from a file of tokens, the end is held out.
A text that occurs twice is never on both sides.

Does not shuffle, filter, deduplicate or change text. With --learn-ranks it learns a tokenizer from
the training documents, and makes no store.

    python prepare.py corpus/pd-mix.jsonl.gz --out runs/pd-mix
    python prepare.py my-text --learn-ranks 4096 --out own.tiktoken
    python prepare.py --tokens-from data/openwebtext/train.bin --tokenizer gpt2 --out runs/owt
"""

import base64
import gzip
import io
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, groupby, islice, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from tiktoken import Encoding
from tqdm import tqdm

from support import process, store, tokenizer
from support.numbers import several, whole_number

BLOCK = 1 << 22  # characters of text, or tokens, read at a time
BATCH = 256  # documents that threads encode together
END = tokenizer.SPECIAL_TOKENS[0]  # in text it is encoded as text, and ends no document
NOTES = {  # entries of meta.json that are shown unless they are 0
    "skipped": "documents without text",
    "repeats": "documents with the text of an earlier one",
    "spelled": f"documents with {END} in their text: if it separates some, use --split-on '{END}'",
}

# ---- stores


def embedded_store(name: str) -> Path:
    """Return the store of the embedded corpus in tokenizer `name`; prepare it on first use.

    It is in .cache of the repository, or in the user's cache if the repository is read-only, and is
    named by the tokenizer, the corpus file and what is held out, so others get another store.
    """
    corpus, encoding = process.ROOT / "corpus" / "pd-mix.jsonl.gz", tokenizer.get_encoding(name)
    made_of = f"{tokenizer.fingerprint(encoding)[:12]}-{zlib.crc32(corpus.read_bytes()):08x}"
    folder = process.ROOT / ".cache" / f"pd-mix-{made_of}-{Corpus.holdout}"
    if not folder.exists() and not os.access(process.ROOT, os.W_OK):
        folder = store.user_cache() / folder.name
    if folder.exists():
        try:
            store.Store.open(folder)
        except ValueError:  # damaged: it can be made again
            shutil.rmtree(folder)
    if not folder.exists():
        print(f"preparing the embedded corpus in {folder}", file=sys.stderr)
        try:
            prepare([corpus], folder, encoding)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    return folder


def prepare(inputs: Sequence[str | Path], out: Path, encoding: Encoding, **options: object) -> dict:
    """Encode documents into a store, which appears whole at `out` or not at all.

    Args:    inputs, options passed to Corpus
    Returns: the contents of meta.json
    Raises:  ValueError for bad input, and for a corpus without text
    """
    corpus = Corpus(inputs, **options)
    documents = corpus.documents()
    notes = dict.fromkeys(NOTES, 0)
    with store.atomic_folder(out) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        writer = store.StoreWriter(folder, encoding)
        while batch := list(islice(documents, BATCH)):
            encoded = pool.map(partial(encode, encoding), batch)
            for doc, (ids, prompts) in zip(batch, encoded, strict=True):
                if len(ids) > 1:
                    writer.append(ids, doc.held_out, [len(ids)], prompts)
                notes["skipped"] += len(ids) == 1
                notes["repeats"] += len(ids) > 1 and doc.is_repeat
                notes["spelled"] += END in doc.text
        if corpus.split_on and not corpus.was_split:
            print(f"warning: --split-on {corpus.split_on!r} cuts no file in two", file=sys.stderr)
        if corpus.loss_on and "prompts" not in corpus.forms:
            raise ValueError("--loss-on all has no effect, no line has a completion: leave it out")
        unit = "part of a file" if corpus.was_split else "file"
        about = {"document": " or a ".join(sorted(corpus.kinds)).replace("file", unit)}
        about["held_out_by"] = "hash" if corpus.training_characters is None else "tail"
        about |= {"holdout": corpus.holdout, "split_on": corpus.split_on}
        return writer.finish(inputs, **notes, **about)


def encode(encoding: Encoding, doc: "Document") -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the tokens of a document with its end-of-text, and the spans that are no targets."""
    parts = doc.segments or [(doc.text, True)]
    # encode_ordinary would hold the GIL while it builds a list of ints; encode_to_numpy does not
    ids = [encoding.encode_to_numpy(text, disallowed_special=()) for text, _ in parts]
    ids[-1] = np.append(ids[-1], encoding.eot_token)
    spans = pairwise(accumulate(map(len, ids), initial=0))
    pairs = zip(spans, parts, strict=True)
    prompts = [(a, b) for (a, b), (_, is_target) in pairs if a < b and not is_target]
    return np.concatenate(ids), prompts


# ---- documents


Segments = Sequence[tuple[str, bool]]  # parts of a document, and whether they are targets


class Document(NamedTuple):
    """A document, or one part of the document that is cut in two."""

    text: str
    held_out: bool
    is_repeat: bool = False  # has the text of an earlier document
    segments: Segments = ()  # each is encoded by itself; none: the text is, and all is a target


@dataclass
class Corpus:
    """The documents of files and folders, each either for training or held out.

    A line of JSON or a row of parquet has its text under `text_column` (null means empty), or a
    prompt and a completion, or segments; and it may have an "id". A file of plain text has its name
    as the id, unless `split_on` cuts it.

    The hash of a document's id, or of its text if it has none, decides whether it is held out; so
    it stays held out when other documents come or go. A text that was read before is on the side of
    its first document. If training or the held-out side would have no text, the last 1/holdout of
    all text is held out instead.

    Raises: ValueError, naming the flag, or the file and the line
    Cost:   95 bytes of memory per document, for the hash of its text
    """

    paths: Sequence[str | Path]  # files and folders
    holdout: int = 20  # 0 holds nothing out, 1 everything
    split_on: str | None = None  # what separates documents in plain text: blank-line, or a string
    text_column: str = "text"  # the field or column with the text
    loss_on: str | None = None  # all: segments are read as one text

    def __post_init__(self):
        self.files, self.skipped = [], []
        self.was_split = False  # by `split_on`, as far as files have been read
        self.forms: dict[str, str] = {}  # "text" or "prompts" -> where it was read first
        given = [(Path(g), path, name) for g in self.paths for path, name in input_files(g)]
        originals = {os.path.realpath(path) for _, path, _ in given if not path.is_symlink()}
        for named, path, name in given:
            try:
                if path.is_symlink() and path != named and os.path.realpath(path) in originals:
                    raise ValueError(f"{path}: is a link to a file that is given as well")
                kind = kind_of(path)
                if kind != "file":
                    first_only = 1 if path == named else None  # a file in a folder is read whole
                    sum(1 for _ in islice(self._read(path, name, kind), first_only))
                self.files.append((path, name, kind))
            except (ValueError, OSError) as error:
                if path == named:
                    raise
                self.skipped.append(process.one_line(error))
        if self.skipped:
            count = f"skipped {several(len(self.skipped), 'file')}; the first ones:"
            print(count, *self.skipped[:5], sep="\n  ", file=sys.stderr)
        self.kinds = {kind for *_, kind in self.files}
        if self.split_on is not None and (self.split_on == "" or "file" not in self.kinds):
            raise ValueError(f"--split-on {self.split_on!r} has no effect here: leave it out")
        if self.text_column != "text" and self.kinds <= {"file"}:
            raise ValueError(f"--text-column {self.text_column} has no effect on plain text")
        self.training_characters = self._before_the_tail() if self.holdout > 1 else None

    def documents(self) -> Iterator[Document]:
        """Read all documents, from the beginning at each call."""
        documents = tqdm(self._by_hash(), unit=" documents", disable=None, leave=False)
        if self.training_characters is None:
            return iter(documents)
        return hold_out_tail(documents, self.training_characters, self.holdout)

    def _by_hash(self) -> Iterator[Document]:
        """Yield all documents; the hash of each, or of the first one of its text, decides."""
        sides: dict[int, bool] = {}  # by a hash of 64 bits
        for path, name, kind in self.files:
            for id, text, segments in self._read(path, name, kind):
                key = hash("".join(text.split()))  # whatever its blanks and line ends
                is_repeat = key in sides
                crc32 = zlib.crc32((text if id is None else id).encode())
                held_out = self.holdout > 0 and crc32 % self.holdout == 0
                yield Document(text, sides.setdefault(key, held_out), is_repeat, segments)

    def _before_the_tail(self) -> int | None:
        """Count the characters before the last 1/holdout; None if hashes give both sides text."""
        characters = [0, 0]  # for training, held out
        for doc in self._by_hash():
            characters[doc.held_out] += 0 if doc.is_repeat else len(doc.text)
            if all(characters):
                return None
        return sum(characters) * (self.holdout - 1) // self.holdout

    def _read(self, path: Path, name: str, kind: str) -> Iterator[tuple]:
        """Yield the id, or None, the text and the segments, if any, of each document in a file."""
        if kind == "file":
            for number, text in enumerate(split_text(text_blocks(path), self.split_on)):
                self.was_split |= number > 0
                self._note_form("text", str(path))
                yield name if self.split_on is None else None, text, []
            return
        rows = read_parquet(path, self.text_column) if kind == "row" else read_lines(path)
        for number, fields in rows:
            id, text = fields.get("id"), fields.get(self.text_column, 0)
            segments, where = [], f"{path}:{number}"
            if fields.keys() & PARTS:
                self._note_form("prompts", where)
            if fields.keys() & PARTS and text == 0:
                segments = segments_of(fields, where)
                text = "".join(text for text, _ in segments)
            else:
                self._note_form("text", where)
            if not isinstance(text, str | None):
                why = f"has no string under --text-column {self.text_column}"
                raise ValueError(f"{where}: {why}, of its fields {', '.join(fields)}")
            try:
                f"{id}{text}".encode()
            except UnicodeEncodeError:
                raise ValueError(f"{where}: has half of a surrogate pair") from None
            yield None if id is None else str(id), text or "", [] if self.loss_on else segments

    def _note_form(self, form: str, where: str) -> None:
        """Refuse text beside segments, because some answers would then be trained on as text."""
        self.forms.setdefault(form, where)
        if len(self.forms) > 1 and not self.loss_on:
            both = " and ".join(f"{first} has {known}" for known, first in self.forms.items())
            raise ValueError(f"{both}: prepare them separately, or add --loss-on all")


PARTS = {"segments", "prompt", "completion"}  # fields of a document that is not all target


def segments_of(fields: dict[str, object], where: str) -> Segments:
    """Return the segments of a line or row; ValueError, naming it, if none is a target."""
    listed, needs = fields.get("segments"), 'segments, each {"text": "...", "loss": true or false}'
    if "segments" not in fields:
        listed = [dict(text=fields.get("prompt"), loss=False)]
        listed.append(dict(text=fields.get("completion"), loss=True))
        needs = "a prompt, which may be empty, and a completion"
    elif fields.keys() & {"prompt", "completion"}:
        listed, needs = [], "segments, or a prompt and a completion, not both"
    try:
        segments = [(part["text"], part["loss"]) for part in listed]
    except (KeyError, TypeError):
        segments = []
    are_valid = all(isinstance(text, str) and isinstance(loss, bool) for text, loss in segments)
    if not (are_valid and any(text and is_target for text, is_target in segments)):
        raise ValueError(f"{where}: needs {needs}, with some text to learn")
    return segments


# ---- files

# What is no text or JSON lines, and how it begins, in lower case and without blanks
FORMATS = {
    "HTML: extract its text": (b"<!doctypehtml", b"<html"),
    "XML or PDF: extract its text": (b"<?xml", b"<svg", b"%pdf"),
    "a JSON array: write one object per line": (b'[{"',),
    "a Git LFS pointer, not the file itself: run git lfs pull": (b"versionhttps://git-lfs",),
    "UTF-16: convert it to UTF-8": (b"\xff\xfe", b"\xfe\xff"),
    # gz, zip, zstd, xz, bz2 and npy
    "packed: unpack it": (b"\x1f\x8b", b"pk\3\4", b"(\xb5/\xfd", b"\xfd7zxz", b"bzh", b"\x93num"),
}
# Refused, also with .gz, unless the content shows JSON lines or parquet
NOT_TEXT = (".json", ".csv", ".tsv", ".ipynb", ".pkl", ".pickle", ".html", ".htm", ".parquet")


def input_files(given: str | Path) -> Iterator[tuple[Path, str]]:
    """Yield a file and its name, or all files in a folder, at any depth: sorted, none hidden."""
    path = Path(given)
    if given == "" or not path.exists():  # Path("") would be the working folder
        raise ValueError(f"{given or 'the empty string'}: no such file or folder")
    if not path.is_dir():
        yield path, path.name
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        # keep links to folders: they cannot be read, and are reported as skipped
        if "/." not in f"/{name}" and (file.is_symlink() or not file.is_dir()):
            yield file, name


def kind_of(path: Path) -> str:
    """Tell what one document is: "file", "line" (of JSON) or "row"; refuse tables and the like."""
    if not path.is_file():  # such as a pipe, which would be waited for
        raise ValueError(f"{path}: is no file")
    if any("\udc80" <= char <= "\udcff" for char in str(path)):  # how Python shows other bytes
        raise ValueError(f"{path}: has a name that is not UTF-8: rename it")
    with decompressed(path) as file:
        start = file.peek(512)
        first = next(filter(None, map(bytes.strip, file)), b"")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if start.startswith(b"PAR1"):
        return "row"
    if known := format_of(start):
        raise ValueError(f"{path}: is {known}")
    if suffix == ".jsonl" or store.json_object(first) is not None:
        return "line"
    if suffix in NOT_TEXT:
        raise ValueError(f"{path}: is {suffix}, not text or JSON lines: convert it to one of them")
    if any("\0" in block for block in text_blocks(path)):
        raise ValueError(f"{path}: is not text: it has a NUL byte")
    return "file"


def format_of(start: bytes) -> str | None:
    """Name the format of a file that begins with these bytes, and what to do; None if unknown."""
    if start[257:262] == b"ustar":
        return "a tar archive: unpack it"
    compact = b"".join(start.removeprefix(b"\xef\xbb\xbf").lower().split())
    return next((name for name, starts in FORMATS.items() if compact.startswith(starts)), None)


@contextmanager
def decompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and decompress it if it is gz. In the with block a bad file is a ValueError."""
    with path.open("rb") as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            file = io.BufferedReader(gzip.GzipFile(fileobj=file))
        try:
            yield file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: cannot be decompressed: {error}") from None
        except UnicodeDecodeError as error:
            at = file.tell() - len(error.object) + error.start
            raise ValueError(f"{path}: is not UTF-8 at byte {at:,}") from None


def text_blocks(path: Path) -> Iterator[str]:
    """Read UTF-8 text block by block, without changing line ends."""
    with decompressed(path) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="")
        yield from iter(partial(text.read, BLOCK), "")


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the number and the object of each line that is not blank."""
    with decompressed(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                fields = store.json_object(line)
                if fields is None:
                    raise ValueError(f"{path}:{number}: is not a JSON object: write one per line")
                yield number, fields


def read_parquet(path: Path, text_column: str) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the number of each row, with its text and id as far as it has them."""
    try:
        from pyarrow import parquet

        table = parquet.ParquetFile(path)
        # without the text column all columns, which the error will name
        columns = [text_column, "id"] if text_column in table.schema_arrow.names else None
        rows = (batch.to_pylist() for batch in table.iter_batches(1000, columns=columns))
        yield from enumerate(chain.from_iterable(rows), 1)
    except ImportError:
        raise ValueError(f"{path}: needs pyarrow: pip install -e '.[parquet]'") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from None


# ---- plain text


def split_text(blocks: Iterable[str], mark: str | None) -> Iterator[str]:
    """Cut plain text into documents at each mark, and leave out empty ones."""
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
    """Yield the pieces of "".join(blocks).split(mark), with one piece and one block in memory."""
    rest = ""
    for block in blocks:
        *pieces, rest = (rest + block).split(mark)
        yield from pieces
    yield rest


def hold_out_tail(documents: Iterable[Document], training: int, holdout: int) -> Iterator[Document]:
    """Hold out all text after the first `training` characters, cutting one document in two.

    A repeated text counts once, and the same part of it is held out each time.
    """
    reach = training // holdout // 2  # about half of the held-out text
    cuts: dict[int, int] = {}  # by the hash of the text: where its held-out part begins
    for text, _, is_repeat, segments in documents:
        cut = cuts.setdefault(hash(text), find_cut(text, training, reach))
        training -= 0 if is_repeat else len(text)
        if segments:  # stay whole
            yield Document(text, cut < len(text), is_repeat, segments)
        elif 0 < cut < len(text):
            yield Document(text[:cut], False, is_repeat)
            yield Document(text[cut:], True, is_repeat)
        else:
            yield Document(text, cut <= 0, is_repeat)


def find_cut(text: str, position: int, reach: int) -> int:
    """Choose where to cut a text: shortly before `position` after a line or blank, else there.

    Example:  find_cut("one\\ntwo\\nthree", 10, 5) is 8, before "three"
    """
    if not 0 < position < len(text):
        return position
    near = text[max(0, position - reach - 1) : position]
    for end in ("\n", " "):
        if end in near:
            return position - len(near) + near.rindex(end) + 1
    return position


# ---- files of tokens


def prepare_tokens(
    train: Path, out: Path, encoding: Encoding, holdout: int | None = None, tokens_dtype: str = ""
) -> dict:
    """Make a store from a file of tokens with end-of-text after each document, such as nanoGPT's.

    Args: holdout      passed to `token_sides`
          tokens_dtype of the file; "": the store's
    """
    end = encoding.eot_token
    with store.atomic_folder(out) as folder:
        writer = store.StoreWriter(folder, encoding)
        sides = token_sides(train, end, tokens_dtype or writer.dtype, holdout)
        for side, tokens in enumerate(sides):
            for start in range(0, len(tokens), BLOCK):
                ids = np.array(tokens[start : start + BLOCK])
                if ids.max() > end:
                    largest = f"token {ids.max()}, but --tokenizer {encoding.name} ends at {end}"
                    raise ValueError(f"--tokens-from {tokens.filename}: has {largest}")
                before = np.append(tokens[start - 1] if start else end, ids[:-1])
                ids = ids[(ids != end) | (before != end)]  # drop empty documents
                writer.append(ids, side, np.flatnonzero(ids == end) + 1)
            if len(tokens) and tokens[-1] != end:
                writer.append(np.array([end]), side, [1])
        return writer.finish([train], held_out_by="file", document=f"part up to id {end}")


def token_sides(
    train: Path, end: int, dtype: np.dtype | str, holdout: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Map the tokens for training, and the held-out ones: val.bin beside train.bin, or the end.

    The end is the last 1/holdout of the file (default: 20). It starts after an end-of-text if there
    is one shortly before: of nine times 72 105 256, 24 of the 27 tokens are for training.
    """
    if train.with_name("meta.pkl").exists():
        advice = "prepare its input.txt instead, for example with --tokenizer bytes"
        raise ValueError(f"--tokens-from {train}: has ids of characters (meta.pkl): {advice}")
    tokens = map_tokens(train, dtype)
    test = train.with_name(train.name.replace("train", "val"))
    if test != train and test.exists():
        if holdout is not None:
            raise ValueError(f"--holdout {holdout} has no effect, {test} is held out: leave it out")
        return tokens, map_tokens(test, dtype)
    one_in = 20 if holdout is None else holdout
    tail = -(-len(tokens) // one_in) if one_in else 0
    cut = len(tokens) - tail
    near = np.flatnonzero(tokens[max(0, cut - tail // 2 - 1) : cut][::-1] == end)
    cut -= near[0] if len(near) else 0
    return tokens[:cut], tokens[cut:]


def map_tokens(file: Path, dtype: np.dtype | str) -> np.ndarray:
    """Map a file of bare numbers into memory; refuse one that holds something else."""
    if known := format_of(np.fromfile(file, np.uint8, 512).tobytes()):
        raise ValueError(f"--tokens-from {file}: is {known}")
    if file.stat().st_size % np.dtype(dtype).itemsize or not file.stat().st_size:
        raise ValueError(f"--tokens-from {file}: is empty or not bare {np.dtype(dtype)}")
    tokens = np.memmap(file, dtype, "r")
    zeros = np.mean(tokens[:BLOCK] == 0)  # of 32-bit numbers read as 16 bits, half are 0
    if zeros > 1 / 3:
        problem = f"is not bare {tokens.dtype}, {zeros:.0%} are 0: convert it"
        may_be_32 = ", or add --tokens-dtype uint32" if zeros < 0.7 and tokens.itemsize == 2 else ""
        raise ValueError(f"--tokens-from {file}: {problem}{may_be_32}")
    return tokens


# ---- the command


def print_summary(meta: dict) -> None:
    held_out = meta["documents"] - meta["train_documents"]
    held_out_tokens = meta["tokens"] - meta["train_tokens"]
    bytes_each = meta["bytes"] / (meta["tokens"] - meta["documents"])
    tail = ""
    if meta["held_out_by"] == "tail":
        tail = f", the last 1/{meta['holdout']} of the text: one document may be cut in two"
    print(f"documents {meta['documents']:>14,}   each a {meta['document']}")
    print(f"tokens    {meta['tokens']:>14,}   {bytes_each:.3f} bytes per token")
    print(f"held out  {held_out:>14,}   documents, {held_out_tokens:,} tokens{tail}")
    if "targets" in meta:
        print(f"targets   {meta['targets']:>14,}   tokens to learn; the others are only read")
    for name in NOTES:
        if meta.get(name):
            print(f"{name:<9} {meta[name]:>14,}   {NOTES[name]}")
    if meta["overlap"] is not None:
        where = "of held-out text (windows of 32 tokens) also stands in training"
        print(f"overlap   {100 * meta['overlap']:>12.1f} %   {where}")
    share = held_out_tokens / meta["tokens"]
    holdout = meta.get("holdout")  # a store of tokens has none
    if holdout and share > max(2 / holdout, 0.1):
        advice = "cut long texts with --split-on, or choose another --holdout"
        print(f"warning: {share:.0%} of the tokens are held out: {advice}", file=sys.stderr)


def write_ranks(path: Path, ranks: dict[bytes, int]) -> None:
    """Write a .tiktoken file, whole or not at all."""
    with store.atomic_write(path) as out:
        for token, rank in ranks.items():
            out.write(b"%s %d\n" % (base64.b64encode(token), rank))


def main(argv: list[str] | None = None) -> None:
    parser = process.Parser(prog="prepare.py", description=__doc__.split(":")[0])
    flag = parser.add_argument
    flag("inputs", nargs="*", help="text or JSON lines, also gzipped; parquet; folders")
    flag("--tokens-from", type=Path, help="tokens instead: nanoGPT's train.bin, val.bin beside it")
    flag("--tokens-dtype", choices=["uint32"], help="of that file (16 bits, unless ids need 32)")
    flag("--out", type=Path, required=True, help="folder of the new store")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--tokenizer", help=f"{tokenizer.NAMES} (pd4k)")
    either("--learn-ranks", type=whole_number, help="learn a tokenizer of this size, make no store")
    flag("--holdout", type=whole_number, metavar="N", help="hold out 1 document in N; 0: none (20)")
    flag("--split-on", help=r"cut plain text at each blank-line, or each string such as '\n---\n'")
    flag("--text-column", help="the field or column with the text (text)")
    flag("--loss-on", choices=["all"], help="read prompts and completions as plain text")
    given = {name: v for name, v in vars(parser.parse_args(argv)).items() if v is not None}
    inputs, out = given.pop("inputs"), given.pop("out")
    if bool(inputs) == ("tokens_from" in given):
        raise ValueError("name either files and folders to read, or --tokens-from TRAIN.BIN")
    if os.path.lexists(out):
        raise ValueError(f"--out {out}: exists already: remove it or name another folder")
    unused = {"tokens_dtype"} if inputs else {"learn_ranks", "split_on", "text_column", "loss_on"}
    if wrong := sorted(unused & given.keys()):
        raise ValueError(f"--{wrong[0].replace('_', '-')} has no effect here: leave it out")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("prepare.py runs as one process: start it with python, not torchrun")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that atomic_folder tidies up
    if "learn_ranks" in given:
        if out.suffix != ".tiktoken" or not out.absolute().parent.is_dir():
            raise ValueError(f"--out {out}: end the name in .tiktoken, in a folder that exists")
        n_ranks = given.pop("learn_ranks")
        texts = (d.text for d in Corpus(inputs, **given).documents() if not d.held_out)
        write_ranks(out, tokenizer.learn_ranks(texts, n_ranks))
        print(f"wrote {out}: {n_ranks:,} tokens")
        return
    encoding = tokenizer.get_encoding(given.pop("tokenizer", "pd4k"))
    if inputs:
        print_summary(prepare(inputs, out, encoding, **given))
    else:
        print_summary(prepare_tokens(given.pop("tokens_from"), out, encoding, **given))


if __name__ == "__main__":
    process.exit_cleanly(main)
