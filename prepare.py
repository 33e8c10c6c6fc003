"""Encode documents into a token store: the folder that training reads (support/text/store.py).

    files ── Corpus ──> parts, held out or not ── chunks ──> threads encode ── StoreWriter ──> store

Short documents are gathered into chunks and long ones are cut, so that a thread's task is neither
all overhead nor a whole corpus. Does not shuffle, filter, deduplicate or change text. Files are
read in support/text/reading.py, and documents held out in support/text/corpus.py.

    python prepare.py corpus/pd-mix.jsonl.gz --out runs/pd-mix
    python prepare.py --tokens-from data/openwebtext/train.bin --tokenizer gpt2 --out runs/owt
"""

import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken

from support import runtime
from support.base.atomic import atomic_folder
from support.text import tokenizer
from support.text.corpus import Corpus, Part, add_flags
from support.text.reading import input_bar
from support.text.store import FORMAT, Encoded, Store, StoreWriter

CHUNK_CHARACTERS = 1 << 18  # of text, for one task of one thread
CHUNK_TOKENS = 1 << 22  # of a file of tokens, read at once
FEW_BYTES = 1.6  # a token: a tokenizer that was made for other text
# No alternative in the patterns that our tokenizers split by (support/text/tokenizer.py) looks back
# or has a character before a blank, but for Llama 3's punctuation, which newlines may follow. Every
# library agrees that these two are blanks.
CUT = re.compile(r"(?<=\S)(?= )|(?<=[^\W_])(?=\n)")


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    encoding: tiktoken.Encoding,
    name: str,
    holdout: int = 20,
    split_on: str | None = None,
    text_column: str | None = None,
) -> dict:
    """Encode documents into a store, which appears whole at `out` or not at all.

    Held-out documents come last, so training, which reads the tokens before them, cannot meet one.

    Args:    inputs, holdout, split_on, text_column  as Corpus takes them
             name  of the tokenizer, for get_encoding; the store records it
    Returns: the contents of meta.json
    Raises:  ValueError for bad input, for an `out` that exists, for a corpus without text
    Cost:    memory for a few chunks of text or for the longest document; documents per second
             beside tiktoken's, as once measured, are in results/prepare.jsonl
    """
    check_is_new(out)
    corpus = Corpus(inputs, holdout, split_on, text_column)
    threads = os.cpu_count() or 1

    def encoded(dtype: np.dtype) -> Iterator[list[Encoded]]:
        tasks: deque[Future[list[Encoded]]] = deque()  # this thread reads and writes meanwhile
        with input_bar(corpus.files, "encoding") as bar, ThreadPoolExecutor(threads) as pool:
            for chunk in chunks(corpus.parts(bar)):
                tasks.append(pool.submit(encode, chunk, encoding, dtype))
                if len(tasks) > 2 * threads:
                    yield tasks.popleft().result()
            yield from (task.result() for task in tasks)

    def origin() -> dict:
        return {
            "holdout": holdout,
            "held_out_by": "hash" if corpus.training_characters is None else "tail",
            "split_on": split_on,
            "skipped_files": len(corpus.skipped),
            "repeated_ids": corpus.repeated_ids(),
        }

    return write(out, encoding, name, encoded, origin, inputs)


def prepare_tokens(train: Path, out: str | Path, encoding: tiktoken.Encoding, name: str) -> dict:
    """Make a store of the tokens in nanoGPT's train.bin; val.bin beside it is held out.

    Such a file has tokens of 16 bits, and end-of-text after each document.

    Returns, Raises: as of `prepare`; ValueError too for tokens that the tokenizer does not have
    """
    check_is_new(out)
    files = {train: False, train.with_name(train.name.replace("train", "val")): True}
    files = {file: held_out for file, held_out in files.items() if file == train or file.exists()}
    end = encoding.eot_token

    def encoded(dtype: np.dtype) -> Iterator[list[Encoded]]:
        for file, held_out in files.items():
            if file.stat().st_size % 2:
                raise ValueError(f"--tokens-from {file}: is not made of tokens of 16 bits")
            tokens = np.memmap(file, np.uint16, "r") if file.stat().st_size else []
            begins = True
            for start in range(0, len(tokens), CHUNK_TOKENS):
                ids = tokens[start : start + CHUNK_TOKENS].astype(np.int64)
                if ids.max() > end:
                    raise ValueError(
                        f"--tokens-from {file}: has token {ids.max()}, and those of --tokenizer"
                        f" {name} end at {end}: name the tokenizer that made it"
                    )
                if start + len(ids) == len(tokens) and ids[-1] != end:
                    ids = np.append(ids, end)
                parts = []
                for part in filter(len, np.split(ids, np.flatnonzero(ids == end) + 1)):
                    ends = bool(part[-1] == end)
                    if not (begins and ends and len(part) == 1):  # a document without text
                        parts.append(Encoded(part.astype(dtype), held_out, ends))
                    begins = ends
                yield parts

    origin = {"holdout": 0, "held_out_by": "file", "skipped_files": 0, "repeated_ids": 0}
    return write(out, encoding, name, encoded, lambda: origin, [train])


def check_is_new(out: str | Path) -> None:
    if Path(out).exists():
        raise ValueError(f"--out {out}: exists already: remove it or name another folder")


def write(
    out: str | Path,
    encoding: tiktoken.Encoding,
    name: str,
    encoded: Callable[[np.dtype], Iterator[list[Encoded]]],
    origin: Callable[[], dict],
    inputs: Sequence[str | Path],
) -> dict:
    """Write a store, whole or not at all, of what `encoded` gives in the store's dtype.

    Args: origin what meta.json says of where it is from, once all is encoded
    """
    with atomic_folder(Path(out)) as unfinished:
        writer = StoreWriter(unfinished, encoding)
        for parts in encoded(writer.dtype):
            writer.append(parts)
        meta = writer.finish() | origin()
        if not meta["documents"]:
            skipped = meta["skipped_files"]
            also = f"; files that are not text: {skipped}" if skipped else ""
            raise ValueError(f"{', '.join(map(str, inputs))}: no document has any text{also}")
        meta |= {
            "format": FORMAT,
            "tokenizer": name,
            "tokenizer_fingerprint": tokenizer.fingerprint(encoding),
            "vocab_size": encoding.n_vocab,
            "end_of_text": encoding.eot_token,
        }
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def chunks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Gather short parts and cut long ones."""
    chunk: list[Part] = []
    characters = 0
    for part in parts:
        done = 0
        for text in pieces_of(part.text):
            done += len(text)
            chunk.append(part._replace(text=text, ends=done == len(part.text)))
            characters += len(text) + 1  # + 1, so that empty documents fill a chunk too
            if characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk = []
                characters = 0
    yield chunk


def pieces_of(text: str) -> Iterator[str]:
    """Cut a long text into pieces whose tokens are those of the whole.

    Example: with pieces of 5 characters or more, "one two\\n\\nend" is "one two" and "\\n\\nend"
    """
    begin = 0
    while len(text) - begin > CHUNK_CHARACTERS:
        cut = CUT.search(text, begin + CHUNK_CHARACTERS)
        if not cut:
            break
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]


def encode(parts: list[Part], encoding: tiktoken.Encoding, dtype: np.dtype) -> list[Encoded]:
    end = np.array([encoding.eot_token], dtype)
    done = []
    for part in parts:
        # encode_ordinary would hold the GIL while it makes a list of ints; this does not.
        ids = encoding.encode_to_numpy(part.text, disallowed_special=())
        if part.ends and part.text:
            ids = np.concatenate((ids, end))
        done.append(Encoded(ids.astype(dtype), part.held_out, part.ends))
    return done


def embedded_store(name: str) -> Path:
    """The embedded corpus as a store in tokenizer `name`, prepared on first use and then kept.

    It lies in the clone or, if that cannot be written, in the user's cache folder.
    """
    encoding = tokenizer.get_encoding(name)
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    caches = (runtime.ROOT / ".cache", home / "parsimony")
    stores = [cache / f"pd-mix-{tokenizer.fingerprint(encoding)[:12]}" for cache in caches]
    for store in stores:
        if (store / "meta.json").exists():
            return store
    why = ""
    for store in stores:
        print(f"preparing the embedded corpus in {store}{why}", file=sys.stderr)
        try:
            prepare([runtime.ROOT / "corpus" / "pd-mix.jsonl.gz"], store, encoding, name)
        except (ValueError, OSError) as error:
            why = f": {runtime.one_line(error)}"
        if (store / "meta.json").exists():  # by whichever process was faster
            return store
    raise ValueError(f"the embedded corpus cannot be prepared{why}")


def _print_summary(store: Store) -> None:
    meta = store.meta
    n_text_tokens = meta["tokens"] - meta["documents"]
    held_out, held_out_tokens = (meta[n] - meta[f"train_{n}"] for n in ("documents", "tokens"))
    tail = f", the last 1/{meta['holdout']} of the text" if meta["held_out_by"] == "tail" else ""
    skipped = f"   {meta['skipped']:,} empty ones skipped" if meta["skipped"] else ""
    print(f"documents {meta['documents']:>14,}{skipped}")
    print(f"tokens    {meta['tokens']:>14,}   {meta['bytes'] / n_text_tokens:.3f} bytes per token")
    print(f"held out  {held_out:>14,}   documents, {held_out_tokens:,} tokens{tail}")
    if meta["bytes"] / n_text_tokens < FEW_BYTES and meta["tokenizer"] != "bytes":
        learn = "python -m support.text.tokenizer YOUR_TEXT --out own.tiktoken"
        print(
            f"so few bytes a token make long rows: try a tokenizer of this text, made by\n  {learn}"
        )
    lengths = np.diff(store.offsets[:])
    if meta["repeated_ids"]:
        print(f"repeated  {meta['repeated_ids']:>14,}   documents with the id of an earlier one")
    if meta["skipped_files"]:
        print(f"skipped   {meta['skipped_files']:>14,}   files that are not text in UTF-8")
    histogram = np.bincount(np.frexp(lengths)[1])
    for bits in range(2, len(histogram)):
        bar = "#" * round(40 * histogram[bits] / histogram.max())
        print(f"below {2**bits:>10,} tokens {histogram[bits]:>11,} {bar}")


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(
        prog="prepare.py",
        description="Encode documents into a token store, which training reads.",
    )
    add_flags(parser, needed="*")
    tokens_from = "nanoGPT's train.bin (and the val.bin beside it) instead of inputs"
    parser.add_argument("--tokens-from", type=Path, metavar="TRAIN.BIN", help=tokens_from)
    parser.add_argument("--out", required=True, help="the store, a folder to make")
    parser.add_argument("--tokenizer", default="pd4k", help=f"{tokenizer.NAMES} (pd4k)")
    args = parser.parse_args(argv)
    if bool(args.inputs) == bool(args.tokens_from):
        raise ValueError(
            "no inputs, or two kinds: name text files or folders, or --tokens-from TRAIN.BIN"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that atomic_folder tidies up
    encoding = tokenizer.get_encoding(args.tokenizer)
    name = args.tokenizer
    if name.endswith((".tiktoken", ".model")):
        name = str(Path(name).resolve())  # so that it is found from any folder
    if args.tokens_from:
        prepare_tokens(args.tokens_from, args.out, encoding, name)
    else:
        prepare(
            args.inputs,
            args.out,
            encoding,
            name,
            holdout=args.holdout,
            split_on=args.split_on,
            text_column=args.text_column,
        )
    _print_summary(Store.open(args.out))


if __name__ == "__main__":
    runtime.exit_cleanly(main)
