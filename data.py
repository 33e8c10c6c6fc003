"""How text becomes a Batch: store -> samples -> rows -> Batch. No technique, no training loop.

A walk with one example, which tests/test_data.py checks. Three documents of letters, in rows of 8
tokens, with --pack; a dot is end-of-text. (A GPT without it reads 0..8, 8..16 and 16..18, cut
across documents.)

    1  documents    "parsimony" "is" "less"                    prepare.prepare
    2  store        p a r s i m o n y . i s . l e s s .        support/text/store.py, Store
                    0               8   10    13      17       18 tokens, documents at 0, 10, 13
    3  samples      id      0         1        2        3      support/rows/samples.py, Samples
                    span    0..8      8..10    10..13   13..18
                    text    parsimon  y.       is.      less.

Then plan.py takes over for each step: `Plan.__call__` says which samples are drawn (4) and which
share a row (5), and hands those rows back to this file:

    4  draw         samples 3, 0, 2, 1                         plan.draw
    5  Rows         parsimon    less. is.    y.                packing.pack_lengths
    6  Batch        tokens    .parsimo  .less.is  ny......     batch_of, which calls collate
                    targets   parsimon  less.is.  y.______     _ is IGNORE
                    positions 01234567  01234012  01000000     from 0 in every piece
                    doc_ids   00000000  00000111  00------     - is -1, padding

A GPT's inputs are the token before each target: end-of-text where a document begins, the n of
"parsimony" where its second piece begins. So every token of the store is a target once a pass. A
BERT reads pieces between [CLS] and [SEP], and guesses those that support/rows/bert.py hides.

train.main opens the store with `open_data`. The head of plan.py goes on with two ranks and several
steps.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kernels.cross_entropy import IGNORE
from prepare import embedded_store
from support.base.rng import bits
from support.base.runtime import Runtime
from support.base.settings import flag
from support.rows.batch import Batch
from support.rows.bert import Pairs, SpecialIds, mask_tokens, masked_tokens
from support.rows.mixture import AnyStore, open_store
from support.rows.packs import Packs
from support.rows.samples import MULTIPLE, SPECIAL_TOKENS, numbered
from support.text.tokenizer import NAMES, byte_lengths, get_encoding, store_encoding

if TYPE_CHECKING:
    from config import Config


@dataclass(frozen=True)
class DataConfig:
    data: str | None = flag(
        None,
        "token store made by prepare.py, or several: a=0.7,b=0.3 (default: embedded corpus)",
        free=True,
    )
    tokenizer: str | None = flag(None, f"{NAMES} (default: the store's, else pd4k)")
    seq_len: int | None = flag(None, "tokens of a row (default: by --size)", least=8, below=2**31)


class Data(NamedTuple):
    """What a run reads, and what its token ids mean."""

    encoding: tiktoken.Encoding
    store: AnyStore
    special_ids: SpecialIds | None  # a BERT's
    byte_lengths: np.ndarray  # (V,) of the text that each token stands for


def open_data(settings: "Config", runtime: Runtime) -> tuple["Config", Data]:
    """The store and its tokenizer, and the settings with the tokenizer's name in them."""
    d = settings.data
    name = d.tokenizer or "pd4k"
    if d.data is None:  # each machine has its own
        runtime.on_each_machine(lambda: embedded_store(name))
    path = d.data or str(embedded_store(name))
    store = open_store(path)
    encoding = get_encoding(d.tokenizer) if d.tokenizer else store_encoding(path, store.meta)
    store.check_tokenizer(encoding)
    settings = replace(settings, data=replace(d, tokenizer=encoding.name))
    special_ids = SpecialIds.of(encoding) if settings.model.model == "bert" else None
    return settings, Data(encoding, store, special_ids, byte_lengths(encoding))


# ---- rows


@dataclass(frozen=True, eq=False)
class Rows:
    """Which pieces of the store lie in which row, from left to right.

    Piece i is the tokens start[i] to stop[i] of the store, and row r has the pieces
    offsets[r] to offsets[r + 1]; a row without any is all padding. With `pairs` only the first part
    of a piece is read there, and the second part where `pairs` says.

    Example: in the head of this file start is [0, 13, 10, 8], stop [8, 18, 13, 10], offsets
             [0, 1, 3, 4]
    """

    start: np.ndarray  # (n,) int64
    stop: np.ndarray  # (n,)
    offsets: np.ndarray  # (R + 1,)
    seen: np.ndarray  # (n,) how many tokens of a piece are context, targets in an earlier row
    pairs: Pairs | None = None  # --nsp

    @classmethod
    def of(
        cls,
        spans: np.ndarray,
        offsets: np.ndarray | None = None,
        seen: np.ndarray | int = 0,
        pairs: Pairs | None = None,
    ) -> "Rows":
        """Rows of the pieces `spans` (n, 2), in their order; one piece a row without `offsets`."""
        offsets = np.arange(len(spans) + 1) if offsets is None else offsets
        return cls(spans[:, 0], spans[:, 1], offsets, np.broadcast_to(seen, len(spans)), pairs)

    @classmethod
    def join(cls, parts: "list[Rows]") -> "Rows":
        """The rows of all parts, one part after the other."""
        pieces = np.concatenate([np.diff(part.offsets) for part in parts])
        pairs = [part.pairs for part in parts if part.pairs is not None]
        return cls(
            start=np.concatenate([part.start for part in parts]),
            stop=np.concatenate([part.stop for part in parts]),
            offsets=np.concatenate(([0], np.cumsum(pieces))),
            seen=np.concatenate([part.seen for part in parts]),
            pairs=Pairs(*map(np.concatenate, zip(*pairs, strict=True))) if pairs else None,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, numbers: np.ndarray) -> "Rows":
        """The rows of these numbers, in this order."""
        pieces, offsets = Packs(np.arange(len(self.start)), self.offsets).take(numbers)
        pairs = self.pairs and self.pairs.take(pieces)
        return Rows(self.start[pieces], self.stop[pieces], offsets, self.seen[pieces], pairs)

    def of_rank(self, rank: int, ranks: int) -> "Rows":
        """One of the equal shares of these rows; blank rows fill up those of the last ranks."""
        share = -(-len(self) // ranks)
        filled = np.pad(self.offsets, (0, share * ranks - len(self)), mode="edge")
        own = np.arange(rank * share, (rank + 1) * share)
        return replace(self, offsets=filled).take(own)

    def packed(self, packs: Packs) -> "Rows":
        """Rows of one piece each, laid together as a packer says."""
        return replace(self.take(packs.items), offsets=packs.offsets)

    def sums(self, of_piece: np.ndarray) -> np.ndarray:
        """(R,) the sum over the pieces of each row."""
        return np.diff(np.concatenate(([0], np.cumsum(of_piece)))[self.offsets])


def reshaped_len(seq_len: int, limit: int) -> int:
    """The length of the rows that `reshape` cuts rows of `seq_len` into, at most `limit`.

    As short as their number allows, in multiples of 8: the limit grows smoothly, and row length in
    stairs. Rows of 1,024 are cut to 512 at every limit from 512 to 1,016.
    """
    rows_each = -(-seq_len // limit)
    return min(-(-seq_len // rows_each // MULTIPLE) * MULTIPLE, limit)


def reshape(spans: np.ndarray, seq_len: int, length: int) -> Rows:
    """Cut full rows of `seq_len` tokens into shorter ones without losing any text.

    Every sample gets the same number of rows, of `length` tokens. Its last part reaches back into
    the part before to be as long as the others. The last sample of the stream may be short: it then
    ends in rows without a part.

    Paper:    arXiv 2212.03597 (seqres)
    Args:     spans  (N, 2) first and one-past-last token of samples, at most seq_len tokens each
              length from `reshaped_len`
    Deviates: DeepSpeed (Megatron-DeepSpeed's pretrain_gpt.py, data_post_process) drops most of the
              tails. Keeping them at a length just below seq_len would double the work
    Example:  reshape([[0, 10]], 10, 4) has rows of 4 with the parts 0..4, 4..8 and 6..10; the last
              part has 2 tokens that the one before predicted
    """
    start, stop = spans[:, :1], spans[:, 1:]  # (N, 1)
    begins = start + np.arange(0, seq_len, length)  # (N, rows of a sample)
    ends = np.minimum(begins + length, stop)
    reaching_back = np.maximum(np.minimum(begins, ends - length), start)
    has_text = begins < stop
    return Rows.of(
        np.stack((reaching_back[has_text], ends[has_text]), axis=1),
        offsets=np.concatenate(([0], np.cumsum(has_text))),
        seen=(begins - reaching_back)[has_text],
    )


# ---- rows -> Batch


def batch_of(
    store: AnyStore, rows: Rows, seq_len: int, special_ids: SpecialIds | None, seeds: Tensor
) -> Batch:
    """These rows as the model takes them; a BERT's with masks, and with the answers of pairs.

    Args:    seeds (2,) int64 of the masks: which tokens are chosen, and what becomes of each
    Returns: Batch of (B, seq_len)
    """
    batch = collate(store, rows, seq_len, special_ids)
    if special_ids is None:
        return batch
    drawn = bits(seeds, places(rows, batch).flatten(), 1).view(2, *batch.tokens.shape)
    batch = mask_tokens(batch, drawn, special_ids)
    if rows.pairs is None:
        return batch
    _, _, positions, doc_ids = batch.with_documents()
    targets = batch.targets.clone()
    answers = rows.pairs.answers(rows.start, rows.stop)
    targets[(positions == 0) & (doc_ids >= 0)] = torch.from_numpy(answers)  # at each [CLS]
    return batch._replace(targets=targets)


def collate(
    store: AnyStore, rows: Rows, seq_len: int, special_ids: SpecialIds | None = None
) -> Batch:
    """Read the pieces of each row from the store and lay them side by side.

    GPT (special_ids None): every token of a piece is a target. Its inputs are the token before the
        piece, which is end-of-text where a document begins, and all its tokens but the last.
    BERT: a piece stands between [CLS] and [SEP], with one more [SEP] between the parts of a pair;
        its tokens are inputs and targets. Which of them count is decided by `mask_tokens`.

    Returns: Batch of (B, seq_len)
    Raises:  ValueError for a store with a token outside its vocabulary
    Cost:    a few passes over B T numbers, however many pieces there are
    """
    B, T = len(rows), seq_len
    special_tokens = SPECIAL_TOKENS["pairs" if rows.pairs else "bert"] if special_ids else 0
    length = rows.stop - rows.start + special_tokens  # (n,)
    # What is left of each row counts as one more piece, so that pieces lie without a gap.
    ends = rows.offsets[1:]
    lengths = np.insert(length, ends, T - rows.sums(length))  # (n + B,)
    begins = np.cumsum(lengths) - lengths
    is_piece = np.insert(np.ones(len(length), bool), ends, False)
    heads = begins[is_piece]  # (n,)

    def of_tokens(of_piece: np.ndarray, of_rest: int = 0) -> np.ndarray:
        """(n,) values of pieces -> (B T,) of their tokens."""
        return np.repeat(np.insert(of_piece, ends, of_rest), lengths)

    positions = np.arange(B * T) - np.repeat(begins, lengths)
    doc_ids = of_tokens(numbered(np.diff(rows.offsets)), of_rest=-1)
    place = positions + of_tokens(rows.start - (special_tokens > 0))  # in the store
    if rows.pairs:
        first = of_tokens(rows.pairs.first)
        second = of_tokens(rows.pairs.second - rows.start) - first - 1  # how far ahead it is
        place += np.where(positions > first + 1, second, 0)  # after the [SEP] in the middle
    text = store.tokens.take(place, mode="clip").astype(np.int64)  # (B T,)

    end_of_text = store.meta["end_of_text"]
    if special_ids:
        tokens, targets = text, text.copy()
        seps = heads + length - 1
        if rows.pairs:
            seps = np.concatenate((seps, heads + rows.pairs.first + 1))
        tokens[heads], tokens[seps] = special_ids.cls, special_ids.sep
        targets[heads] = targets[seps] = IGNORE
    else:
        tokens, targets = np.empty_like(text), text
        tokens[1:] = text[:-1]
        before = store.tokens.take(rows.start - 1, mode="clip")
        tokens[heads] = np.where(rows.start > 0, before, end_of_text)
    padding = doc_ids < 0
    is_full = not padding.any()
    if not is_full:
        tokens[padding], targets[padding], positions[padding] = end_of_text, IGNORE, 0
    if rows.seen.any():
        targets[positions < of_tokens(rows.seen)] = IGNORE
    store.check_tokens(max(tokens.max(), targets.max()))
    fields = [torch.from_numpy(f.reshape(B, T)) for f in (tokens, targets, positions, doc_ids)]
    if len(rows.start) == B and is_full:
        fields[2:] = None, None
    return Batch(*fields)


def places(rows: Rows, batch: Batch) -> Tensor:
    """(B, T) int64: where in the store each token of these rows lies, to draw random numbers by.

    So a token has the same numbers wherever its piece is packed. Special tokens count as text, the
    second part of a pair as if it followed the first, and padding has any number.
    """
    _, _, positions, doc_ids = batch.with_documents()
    piece = torch.from_numpy(rows.offsets[:-1])[:, None] + doc_ids  # (B, T)
    start = torch.from_numpy(np.append(rows.start, 0))
    return start[piece.clamp(0, len(rows.start))] + positions


def counts(rows: Rows, masked: bool, per_document: bool) -> tuple[int, float | None]:
    """What the sum of losses of these rows is divided by, and how answers weigh in it.

    From lengths alone, so that a rank knows the count of all ranks' rows without reading them. All
    answers together count as much as all targets: the loss is the mean over these and over those.

    Args:    masked       whether a BERT predicts some tokens, or a GPT all of them
             per_document whether documents are counted in place of targets
    Returns: targets, or documents; what the answer of a pair counts beside them, None without pairs
    """
    length = rows.stop - rows.start
    targets = masked_tokens(length) if masked else length - rows.seen
    total = len(targets) if per_document else int(targets.sum())
    if rows.pairs is None:
        return total, None
    answers = rows.pairs.answers(rows.start, rows.stop) != IGNORE
    return total, total / max(int(answers.sum()), 1)
