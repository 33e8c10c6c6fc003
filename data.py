"""How text becomes a Batch: store -> samples -> rows -> Batch. No technique, no training loop.

Here is a worked example, which tests/test_data.py checks: three documents, one token per letter, in
rows of 8 tokens, with --pack. A dot is end-of-text. (Without --pack a GPT reads 0..8, 8..16 and
16..18, cut across documents.)

    1  documents    "parsimony" "is" "less"                    prepare.prepare
    2  store        p a r s i m o n y . i s . l e s s .        support/store.py, Store
                    0               8   10    13      17       18 tokens, documents at 0, 10, 13
    3  samples      id      0         1        2        3      Samples
                    span    0..8      8..10    10..13   13..18
                    text    parsimon  y.       is.      less.

Then plan.py decides, at each step, which samples are drawn (4) and which of them share a row (5):

    4  draw         samples 3, 0, 2, 1                         plan.draw_samples
    5  Rows         parsimon    less. is.    y.                packing.pack_lengths
    6  Batch        tokens    .parsimo  .less.is  ny......     GptTask.batch, which calls collate
                    targets   parsimon  less.is.  y.______     _ is IGNORE
                    positions 01234567  01234012  01000000     from 0 in every piece
                    doc_ids   00000000  00000111  00------     - is -1, padding

The input of a GPT is the token before each target: end-of-text where a document begins, and the n
of "parsimony" where its second piece begins. So every token of the store is a target once per pass.
In a store with prompts only the tokens of answers are, and `fitted` keeps each answer whole in its
piece if it can; to see it: prepare.py corpus/qa.jsonl --out qa, then train.py --data qa --dry-run.

In reading order: what a run opens; samples; rows; their Batch. A BERT makes its own batches of the
same rows (bert.py), and several stores are read as one by mixture.py.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kernels.cross_entropy import IGNORE
from mixture import AnyStore, MixedSamples, Mixture, open_store
from model import Batch
from prepare import embedded_store
from support.clock import MULTIPLE, shuffled
from support.runtime import Runtime
from support.settings import DataConfig
from support.store import Store
from support.tokenizer import byte_lengths, get_encoding


class Data(NamedTuple):
    """The store that a run reads, and the meaning of its token ids."""

    encoding: tiktoken.Encoding
    store: AnyStore
    byte_lengths: np.ndarray  # (V,) bytes of text in each token


def open_data(config: DataConfig, runtime: Runtime) -> Data:
    """Open the store that --data names, or the embedded corpus, and its tokenizer."""
    name = config.tokenizer or "pd4k"
    if config.data is None:  # each machine prepares a copy
        runtime.on_each_machine(lambda: embedded_store(name))
    store = open_store(str(embedded_store(name)) if config.data is None else config.data)
    encoding = get_encoding(config.tokenizer or store.meta["tokenizer"])
    store.check_tokenizer(encoding)
    return Data(encoding, store, byte_lengths(encoding))


# ---- samples

KINDS = ("pieces", "rows", "bert", "pairs")
SPLITS = {"train": "training", "val": "held-out"}  # their names in messages
ADDED_TOKENS = {"bert": 2, "pairs": 3}  # [CLS] and [SEP]s around a BERT's piece
CHOICES = 64  # of held-out text that are compared, to evaluate a part of it


def open_samples(store: AnyStore, kind: str, seq_len: int) -> "Samples | MixedSamples":
    """Open the training samples of a store, or of each store of a mixture."""
    if isinstance(store, Mixture):
        return MixedSamples(store, [Samples(part, kind, seq_len) for part in store.parts])
    return Samples(store, kind, seq_len)


class Samples:
    """Sample id -> span of the token store. A sample is a piece of text that fits one row.

    Each document is cut at multiples of `max_piece_len` from its start, so that each of its tokens
    is a target exactly once per pass. For the kind `rows` the whole split is one document, as GPTs
    are commonly trained without packing. A store with prompts has the pieces that `fitted` makes.

    Args:   kind    pieces | rows | bert | pairs: a BERT's pieces leave out end-of-text, and leave
                    room for its special tokens
            seq_len tokens in a row
            split   train | val: the held-out documents are the last ones of the store
    Raises: ValueError for a split without documents
    Cost:   8 bytes of memory per document; 16 per sample of a store with prompts
    """

    def __init__(self, store: Store, kind: str, seq_len: int, split: str = "train"):
        # a row of the stream would begin anywhere in a prompt or an answer
        kind = "pieces" if kind == "rows" and store.has_prompts else kind
        self.store, self.kind, self.seq_len, self.split = store, kind, seq_len, split
        self.without_eot = kind in ADDED_TOKENS
        self.special_tokens = ADDED_TOKENS.get(kind, 0)
        self.max_piece_len = seq_len - self.special_tokens
        n, N = store.meta["train_documents"], len(store.offsets) - 1
        self.documents = {"train": range(n), "val": range(n, N)}[split]
        offsets = store.offsets[self.documents.start : self.documents.stop + 1]
        self.offsets = offsets[[0, -1]] if kind == "rows" else offsets  # (documents + 1,)
        lengths = np.diff(self.offsets) - self.without_eot
        self.tokens = int(lengths.sum())  # without a BERT's special tokens
        pieces = -(-lengths // self.max_piece_len)  # of each document
        self.first_ids = np.concatenate(([0], np.cumsum(pieces)))  # (documents + 1,)
        self.listed: np.ndarray | None = None  # (n, 2) the spans, if they do not follow from these
        self.longest, self.too_long = int(lengths.max(initial=0)), int((pieces > 1).sum())
        if store.has_prompts:
            if self.without_eot:
                advice = "choose --model gpt, or prepare it with --loss-on all"
                raise ValueError(f"{store.path}: has prompts, which a BERT does not know: {advice}")
            documents = np.stack((offsets[:-1], offsets[1:]), axis=1)  # (documents, 2)
            self.listed = fitted(store, documents, self.max_piece_len)
            self.tokens, self.first_ids = int(np.diff(self.listed).sum()), [0, len(self.listed)]
        if len(self) == 0:
            raise ValueError(f"{store.path} has no {SPLITS[split]} document: use another --holdout")

    def __len__(self) -> int:
        return int(self.first_ids[-1])

    def spans(self, ids: np.ndarray) -> np.ndarray:
        """Return the spans (n, 2) of samples (n,): first and one-past-last token in the store.

        Example: documents 0..5 and 5..6, at 2 tokens a piece: (0, 2), (2, 4), (4, 5), (5, 6)
        """
        if self.listed is not None:
            return self.listed[ids]
        document = np.searchsorted(self.first_ids, ids, side="right") - 1
        start = self.offsets[document] + (ids - self.first_ids[document]) * self.max_piece_len
        stop = self.offsets[document + 1] - self.without_eot
        return np.stack((start, np.minimum(start + self.max_piece_len, stop)), axis=1)

    def shuffled(self, draws: np.ndarray, seed: int) -> np.ndarray:
        """Turn numbers of draws (m,) into sample ids (m,), shuffled anew in every pass."""
        return shuffled(draws, len(self), seed)

    def as_hard_as_all(self, tokens: int, byte_lengths: np.ndarray) -> np.ndarray:
        """Choose samples of about `tokens` tokens that are as hard to predict as all together.

        Of CHOICES sets of evenly spaced samples this takes the one that needs as many bits per byte
        as all of them do, when a token's bits only follow from how often it occurs. A trained model
        then finds it as hard as all, within 0.01 bits per byte (docs/method.md).

        Args:    byte_lengths (V,) bytes of text in each token
        Returns: spans (n, 2); of every sample if there are no more tokens
        """
        n, count = len(self), max(round(len(self) * tokens / self.tokens), 1)
        if count >= n:
            return self.spans(np.arange(n))
        starts = np.arange(CHOICES)[:, None] / CHOICES
        choices = ((np.arange(count) + starts) * n / count).astype(np.int64)  # (CHOICES, count)
        counts = np.stack([self.token_counts(ids, len(byte_lengths)) for ids in choices])
        total = counts.sum(0)  # (V,)
        bits = np.log2(total.sum() / np.maximum(total, 1))
        bits_per_byte = counts @ bits / np.maximum(counts @ byte_lengths, 1)
        of_all = total @ bits / max(total @ byte_lengths, 1)
        return self.spans(choices[np.abs(bits_per_byte - of_all).argmin()])

    def token_counts(self, ids: np.ndarray, vocab_size: int) -> np.ndarray:
        """Count how often each token (V,) occurs in these samples."""
        tokens = [self.store.tokens[start:stop] for start, stop in self.spans(ids)]
        return np.bincount(np.concatenate(tokens), minlength=vocab_size)[:vocab_size]


def cut(spans: np.ndarray, max_piece_len: int) -> np.ndarray:
    """Cut each span (N, 2) into pieces (n, 2) of at most this many tokens.

    Example: [[0, 5]] at 2 tokens a piece: [[0, 2], [2, 4], [4, 5]]
    """
    start, stop = spans[:, 0], spans[:, 1]
    counts = -(-(stop - start) // max_piece_len)
    first = np.repeat(start, counts) + max_piece_len * numbered(counts)
    return np.stack((first, np.minimum(first + max_piece_len, np.repeat(stop, counts))), axis=1)


def fitted(store: AnyStore, spans: np.ndarray, max_piece_len: int) -> np.ndarray:
    """Cut spans (N, 2) into pieces (n, 2) as `cut` does, but keep answers whole that fit a piece.

    Of a span that is too long only the end stays, if all its targets are there: the whole answer
    and the end of the prompt. Pieces without a target are left out. Text has targets everywhere, so
    it is only cut.

    Example: a prompt 0..6 and its answer 6..9 are [[4, 9]] at 5 tokens a piece, and at 2 tokens
             [[6, 8], [8, 9]]
    """
    start, stop = spans.T
    late = np.maximum(start, stop - max_piece_len)  # (N,) where the last piece would begin
    start = np.where(store.targets_in(start, late) == 0, late, start)  # drop prompt, never answer
    pieces = cut(np.stack((start, stop), axis=1), max_piece_len)
    return pieces[store.targets_in(*pieces.T) > 0]


def numbered(counts: np.ndarray) -> np.ndarray:
    """Count from 0 within each group, given the groups' sizes: [2, 0, 3] -> [0, 1, 0, 1, 2]"""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


# ---- rows

PIECE = np.dtype([("start", np.int64), ("stop", np.int64), ("seen", np.int64)])


def as_pieces(spans: np.ndarray, seen: np.ndarray | int = 0) -> np.ndarray:
    """Make a table (n,) of pieces from their spans (n, 2) in the store.

    Args: seen leading tokens of a piece that are only context: targets of an earlier row
    """
    pieces = np.empty(len(spans), PIECE)
    pieces["start"], pieces["stop"] = spans[:, 0], spans[:, 1]
    pieces["seen"] = seen
    return pieces


@dataclass(frozen=True, eq=False)
class Rows:
    """Which pieces of the store are in which row, from left to right.

    Row r holds pieces offsets[r]:offsets[r + 1]; a row without pieces is all padding.

    Example: in the head of this file the pieces start at 0, 13, 10, 8 and stop at 8, 18, 13, 10,
             and offsets are [0, 1, 3, 4]
    """

    pieces: np.ndarray  # (n,) a table with the fields of PIECE, and perhaps more (bert.py)
    offsets: np.ndarray  # (R + 1,)

    @classmethod
    def join(cls, parts: "list[Rows]") -> "Rows":
        """Concatenate the rows of all parts."""
        sizes = np.concatenate([np.diff(part.offsets) for part in parts])
        pieces = np.concatenate([part.pieces for part in parts])
        return cls(pieces, np.concatenate(([0], np.cumsum(sizes))))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of text in each piece, (n,)."""
        return self.pieces["stop"] - self.pieces["start"]

    def sum_by_row(self, of_piece: np.ndarray) -> np.ndarray:
        """Sum a value of each piece (n,) over the pieces of each row: (R,)."""
        return np.diff(np.concatenate(([0], np.cumsum(of_piece)))[self.offsets])

    def select(self, numbers: np.ndarray) -> "Rows":
        """Select rows by their numbers, in this order."""
        sizes = np.diff(self.offsets)[numbers]
        pieces = np.repeat(self.offsets[numbers], sizes) + numbered(sizes)
        return Rows(self.pieces[pieces], np.concatenate(([0], np.cumsum(sizes))))

    def of_rank(self, rank: int, world_size: int) -> tuple[np.ndarray, "Rows"]:
        """Return the numbers of this rank's rows, and the rows; blank rows make ranks equal.

        Rows are dealt out to the ranks forwards, then backwards, and so on. If the heaviest come
        first, every rank gets nearly equal work, and does so in each micro-batch.

        Example: of 6 rows, rank 0 of 2 gets 0, 3, 4, and rank 1 gets 1, 2, 5
        """
        rounds = -(-len(self) // world_size)
        dealt = np.arange(rounds * world_size).reshape(rounds, world_size)
        dealt[1::2] = dealt[1::2, ::-1]
        with_blanks = np.pad(self.offsets, (0, dealt.size - len(self)), mode="edge")
        numbers = dealt[:, rank]
        return numbers, Rows(self.pieces, with_blanks).select(numbers)


def reshaped_len(seq_len: int, limit: int) -> int:
    """Choose the length, at most `limit`, into which `reshape` cuts rows of `seq_len` tokens.

    Rows are as short as their number allows, in multiples of 8. So while the limit grows smoothly,
    the length grows in steps: rows of 1,024 are cut into rows of 512 at every limit from 512 to
    1,016.
    """
    rows_each = -(-seq_len // limit)
    return min(-(-seq_len // rows_each // MULTIPLE) * MULTIPLE, limit)


def reshape(spans: np.ndarray, seq_len: int, length: int) -> Rows:
    """Cut full rows of `seq_len` tokens into shorter ones without losing any text.

    Every sample gets the same number of rows of `length` tokens. Its last part starts early, inside
    the part before, to be as long as the others. The last sample of the stream may be short; its
    last rows may then be blank.

    Paper:    arXiv 2212.03597 (seqres)
    Args:     spans  (N, 2) first and one-past-last token of samples, at most seq_len tokens each
              length from `reshaped_len`
    Deviates: DeepSpeed (Megatron-DeepSpeed's pretrain_gpt.py, data_post_process) uses rows of
              exactly the limit and drops most of the tails. Keeping the tails of such rows would
              double the work at a limit just below seq_len
    Example:  reshape([[0, 10]], 10, 4) has rows of 4 with the parts 0..4, 4..8 and 6..10; the first
              2 tokens of the last part are only context, because the part before predicts them
    """
    start, stop = spans[:, :1], spans[:, 1:]  # (N, 1)
    begins = start + np.arange(0, seq_len, length)  # (N, rows of a sample)
    ends = np.minimum(begins + length, stop)
    reaching_back = np.maximum(np.minimum(begins, ends - length), start)
    has_text = begins < stop
    spans = np.stack((reaching_back[has_text], ends[has_text]), axis=1)
    pieces = as_pieces(spans, seen=(begins - reaching_back)[has_text])
    return Rows(pieces, offsets=np.concatenate(([0], np.cumsum(has_text))))


# ---- rows -> Batch


@dataclass(frozen=True)
class GptTask:
    """What a GPT learns: to predict every token from those before it (bert.py has another task)."""

    per_piece: bool = False  # --loss-per document: all pieces weigh the same in the loss
    evaluated: ClassVar[str] = "pieces"  # the kind of samples in which it is evaluated
    nsp: ClassVar[bool] = False  # whether it reads pairs

    def pieces(self, spans: np.ndarray, *key: object) -> np.ndarray:
        """Decide how the drawn spans (n, 2) are read, with random numbers by this key."""
        return as_pieces(spans)

    def targets(self, store: AnyStore, rows: Rows) -> np.ndarray:
        """Count the targets of each piece (n,), without reading any text."""
        return store.targets_in(rows.pieces["start"] + rows.pieces["seen"], rows.pieces["stop"])

    def batch(
        self, store: AnyStore, rows: Rows, seq_len: int, all_rows: Rows, *key: object
    ) -> Batch:
        """Read the text of these rows, which are some of a step's `all_rows`."""
        batch = collate(store, rows, seq_len)
        if not self.per_piece:
            return batch
        return replace(batch, weights=equal_pieces(batch.targets != IGNORE, batch.doc_ids))


def loss_divisor(task, store: AnyStore, rows: Rows) -> int:
    """Return what the sum of a step's losses is divided by: its targets, or its pieces.

    Only lengths and counts of targets are needed, so a rank knows it for all ranks without reading
    their rows.
    """
    return len(rows.pieces) if task.per_piece else int(task.targets(store, rows).sum())


def collate(store: AnyStore, rows: Rows, seq_len: int) -> Batch:
    """Read the pieces of each row from the store, one after the other: a Batch of (B, seq_len).

    Raises: ValueError for a store with a token outside its vocabulary
    """
    end_of_text = store.meta["end_of_text"]
    piece, position, at = indices_in_batch(rows, rows.lengths, seq_len)
    place = rows.pieces["start"][piece] + position  # in the store
    text = store.tokens.take(place, mode="clip")
    before = store.tokens.take(place - 1, mode="clip")
    before[place == 0] = end_of_text
    store.check_tokens(text.max(initial=0))
    is_target = (position >= rows.pieces["seen"][piece]) & (store.targets_in(place, place + 1) > 0)
    targets = np.where(is_target, text.astype(np.int64), IGNORE)
    scatter = partial(scattered, at, (len(rows), seq_len))
    doc_ids = scatter(numbered(np.diff(rows.offsets))[piece], fill=-1)
    return Batch(
        tokens=scatter(before, fill=end_of_text),
        targets=scatter(targets, fill=IGNORE),
        positions=scatter(position, fill=0),
        doc_ids=doc_ids,
        # In plain rows there is neither padding, which is -1, nor a second piece.
        is_plain=not doc_ids.any(),
    )


def indices_in_batch(
    rows: Rows, lengths: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find where the m tokens of all pieces go in a batch.

    Args:    lengths (n,) how many positions each piece takes
    Returns: (m,) the piece of each token; its position in the piece; its index in the batch's B T
    Example: rows of 6 with pieces of 2 and 3, and of 1: pieces 0 0 1 1 1 2, positions 0 1 0 1 2 0,
             indices 0 1 2 3 4 6
    """
    piece = np.repeat(np.arange(len(lengths)), lengths)
    in_row = np.cumsum(lengths) - lengths  # where each piece begins, if rows had no padding
    filled = rows.sum_by_row(lengths)
    padding = np.arange(len(rows)) * seq_len - (np.cumsum(filled) - filled)  # in the rows before
    begins = in_row + np.repeat(padding, np.diff(rows.offsets))
    position = numbered(lengths)
    return piece, position, begins[piece] + position


def scattered(at: np.ndarray, shape: tuple[int, int], values: np.ndarray, fill: int) -> Tensor:
    """Return a tensor (B, T) with the values (m,) at the indices `at` (m,), elsewhere `fill`."""
    filled = np.full(shape, fill, np.int64)
    filled.reshape(-1)[at] = values
    return torch.from_numpy(filled)


def equal_pieces(is_target: Tensor, doc_ids: Tensor) -> Tensor:
    """Weigh targets (B, T) so that each piece weighs 1: float32, 0 where there is no target.

    Paper: Krell et al., arXiv 2107.02027, section 3.2.3: without weights, long documents dominate
    """
    piece = doc_ids.clamp(min=0)  # (B, T)
    weights = is_target.float()
    targets = torch.zeros_like(weights).scatter_add(1, piece, weights)
    return weights / targets.gather(1, piece).clamp(min=1)
