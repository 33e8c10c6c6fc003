"""Encode documents into a token store: the folder that training reads.

    tokens.bin       the tokens of each document, then end-of-text; held-out documents come last
    documents.idx    int64, where each document begins, and where the last one ends
    sources.idx      uint16, the source of each document; only where some document names one
    meta.json        tokenizer, data type, counts, names of sources, and the sha256 of the files

Does not shuffle, filter, deduplicate or change text.

    python prepare.py corpus/pd-mix.jsonl.gz --out runs/pd-mix
"""

import json
import pickle
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

from support.base import runtime
from support.base.atomic import atomic_folder
from support.text import tokenizer
from support.text.encoding import encoded
from support.text.holdout import HOLDOUT_HELP, Corpus
from support.text.reading import INPUTS_HELP, SOURCE_FIELD_HELP, SPLIT_ON_HELP, InputBar
from support.text.store import FORMAT, Store, StoreWriter

SOURCES_SHOWN = 20  # in the summary, those with the most tokens


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    encoding: tiktoken.Encoding,
    name: str,
    holdout: int = 20,
    split_on: str | None = None,
    source_field: str = "source",
) -> dict:
    """Encode documents into a store, which appears whole at `out` or not at all.

    What is held out comes last: training reads the tokens before it and cannot meet it.

    Args:     inputs    files and folders, as read_documents takes them
              name      what get_encoding calls the tokenizer; the store records it
              holdout   one document in so many is held out, see Corpus; 0 holds nothing out
              split_on  what separates the documents of plain text, as --split-on takes it
              source_field  what a JSON line has the name of its source under
    Returns:  the contents of meta.json
    Raises:   ValueError for bad input, for an `out` that exists, for a corpus without text
    Cost:     memory for a few batches of text or for the longest document; documents per second are
              in results/prepare.jsonl
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"--out {out}: exists already: remove it or name another folder")
    corpus = Corpus(inputs, holdout, split_on, source_field)
    with atomic_folder(out) as unfinished:
        meta = {"format": FORMAT, "tokenizer": name, "holdout": holdout, "split_on": split_on}
        meta["held_out_by"] = "hash" if corpus.training_characters is None else "tail"
        meta |= _write_arrays(corpus, unfinished, encoding)
        meta["skipped_files"] = len(corpus.skipped)
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def _write_arrays(corpus: Corpus, folder: Path, encoding: tiktoken.Encoding) -> dict:
    """Write the training documents as they are encoded, then those that are held out."""
    writer = StoreWriter(folder, encoding)
    batches = documents_read = 0
    # Held-out documents wait in a file of their own until all training documents are written.
    with InputBar(corpus.files, "encoding") as bar, tempfile.TemporaryFile(dir=folder) as waiting:
        for batch in encoded(corpus.parts(bar.on_read), encoding, writer.dtype, bar):
            writer.append(batch.training)
            pickle.dump(batch.held_out, waiting)
            batches += 1
            documents_read += batch.documents_read
        train_counts = {f"train_{key}": count for key, count in writer.counts.items()}
        waiting.seek(0)
        for _ in range(batches):
            writer.append(pickle.load(waiting))
            bar.tick()
    if not writer.counts["documents"]:
        skipped = f"; files that are not text: {len(corpus.skipped)}" if corpus.skipped else ""
        raise ValueError(f"{', '.join(map(str, corpus.paths))}: no document has any text{skipped}")
    return {
        **writer.counts,
        **train_counts,
        "skipped": documents_read - writer.counts["documents"],
        "dtype": writer.dtype.name,
        "vocab_size": encoding.n_vocab,
        "end_of_text": encoding.eot_token,
        "tokenizer_fingerprint": tokenizer.fingerprint(encoding),
        **writer.close(),
    }


def embedded_store(name: str) -> Path:
    """The embedded corpus as a store in tokenizer `name`, prepared on first use and then kept."""
    encoding = tokenizer.get_encoding(name)
    here = Path(__file__).resolve().parent
    store = here / ".cache" / f"pd-mix-{tokenizer.fingerprint(encoding)[:12]}"
    if not (store / "meta.json").exists():
        try:
            prepare([here / "corpus" / "pd-mix.jsonl.gz"], store, encoding, name)
        except (ValueError, OSError):
            if not (store / "meta.json").exists():  # else another process has just made it
                raise
    return store


def _print_summary(store: Store) -> None:
    meta = store.meta
    n_bytes, n_text_tokens = meta["bytes"], meta["tokens"] - meta["documents"]
    held_out, held_out_tokens = (meta[n] - meta[f"train_{n}"] for n in ("documents", "tokens"))
    print(f"documents {meta['documents']:>14,}   {meta['skipped']:,} more are empty and skipped")
    print(f"tokens    {meta['tokens']:>14,}   {n_bytes / n_text_tokens:.3f} bytes of text each")
    print(f"held out  {held_out:>14,}   documents, {held_out_tokens:,} tokens", end="")
    print(f", the last 1/{meta['holdout']} of the text" * (meta["held_out_by"] == "tail"))
    if store.sources is not None:
        _print_sources(store)
    if meta["skipped_files"]:
        print(f"skipped   {meta['skipped_files']:>14,}   files that are not text in UTF-8")
    histogram = np.bincount(np.frexp(np.diff(store.offsets))[1])
    for bits in range(2, len(histogram)):
        bar = "#" * round(40 * histogram[bits] / histogram.max())
        print(f"below {2**bits:>10,} tokens {histogram[bits]:>11,} {bar}")


def _print_sources(store: Store) -> None:
    print(f"sources   {len(store.source_names):>14,}   documents and tokens of each:")
    documents = np.bincount(store.sources, minlength=len(store.source_names))
    tokens = np.bincount(store.sources, np.diff(store.offsets), len(documents)).astype(int)
    for number in np.argsort(-tokens, kind="stable")[:SOURCES_SHOWN]:
        print(f"{documents[number]:>24,} {tokens[number]:>15,}   {store.source_names[number]}")
    if len(documents) > SOURCES_SHOWN:
        print(f"{len(documents) - SOURCES_SHOWN:>24,} more")


def main(argv: list[str] | None = None) -> None:
    parser = runtime.Parser(
        prog="prepare.py", description="Encode documents into a token store, which training reads."
    )
    parser.add_argument("inputs", nargs="+", help=INPUTS_HELP)
    parser.add_argument("--out", required=True, help="the store, a folder to make")
    parser.add_argument("--tokenizer", default="pd4k", help=tokenizer.NAMES_HELP)
    parser.add_argument("--holdout", type=int, default=20, help=HOLDOUT_HELP)
    parser.add_argument("--split-on", metavar="STRING", help=SPLIT_ON_HELP)
    parser.add_argument("--source-field", default="source", metavar="NAME", help=SOURCE_FIELD_HELP)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that atomic_folder tidies up
    encoding = tokenizer.get_encoding(args.tokenizer)
    name = args.tokenizer
    if name.endswith(".tiktoken"):
        name = str(Path(name).resolve())  # found again from any folder
    how = (args.holdout, args.split_on, args.source_field)
    prepare(args.inputs, args.out, encoding, name, *how)
    _print_summary(Store.open(args.out))


if __name__ == "__main__":
    runtime.exit_cleanly(main)
