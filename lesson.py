"""The whole idea in one file: a GPT that reads short pieces first, packs them, and drops tokens.

    python lesson.py                       # some minutes on two CPU cores
    python lesson.py --tokens 100000

Its losses are, step by step, those of this command. The rest of the repository makes it faster,
distributed, resumable and configurable:

    python train.py --curriculum seqlen --pack --ltd --optimizer adamw --lr 0.004

A document is cut into samples of at most T tokens, a sample into pieces of at most l(p), and pieces
fill rows. A run has a clock, which measures work, not text: each step adds its tokens times the
share of layers they went through. It ends at a budget, so a run that drops tokens reads more text
for the same budget. How long pieces may be, how many tokens a middle layer sees and the learning
rate are functions of `progress`, clock / budget.

This file computes attention scores for whole rows and masks most of them out, so short pieces save
no time here; train.py computes each piece by itself, where they do. Dropping saves time here too.

Papers (arXiv): curriculum 2108.06084, packing 2107.02027, dropping 2211.11586, clock 2212.03597.

In reading order: text, the three techniques, the model, the clock, the run. Shapes: B rows, T
tokens in a row, K of them kept, C width, H heads, D = C / H, L layers.
"""

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prepare import embedded_store
from support.clock import bits, seed_of, shuffled
from support.store import Store
from support.tokenizer import byte_lengths, get_encoding

SEED = 1337
L, H, C, T = 4, 4, 128, 2048
BUDGET = 1_100_000  # where the clock ends
ROWS = 4  # rows in a step
SHORTEST, GROWN_AT = 64, 0.9  # tokens in the longest piece at first; progress at which it is T
K, WHOLE_AT = T // 16, 0.9  # tokens that a middle layer sees; progress at which it sees all T
LR, WARMUP = 4e-3, 0.02  # peak learning rate, and the progress at which it is reached
WINDOW = 16  # samples are packed WINDOW * ROWS at a time, all cut to the same length
PADDING = -1  # piece id of padding
# SHORTEST = K = T trains without curriculum and dropping

Span = tuple[int, int]  # first and one-past-last token in the store


# ---- text: a store is one long array of tokens; N documents lie between its N + 1 `offsets`


def cut(spans: Sequence[Span], longest: int) -> list[Span]:
    """Cut every span into pieces of at most `longest` tokens.

    Example: (0, 5) at 2 tokens a piece: (0, 2), (2, 4), (4, 5)
    """
    return [(i, min(i + longest, end)) for start, end in spans for i in range(start, end, longest)]


def samples(store: Store, held_out: bool) -> list[Span]:
    """Documents, cut to fit a row: the last ones are held out, the others are for training."""
    first_held_out = store.meta["train_documents"]
    bounds = store.offsets[first_held_out:] if held_out else store.offsets[: first_held_out + 1]
    return cut(list(pairwise(bounds.tolist())), T)


# ---- technique 1, curriculum: short pieces first


def longest_piece(progress: float) -> int:
    """How long a piece may be:  l(p) = SHORTEST + (T - SHORTEST) (p / GROWN_AT)^2, then T.

    Attention costs the square of a piece's length, and short pieces teach the frequent patterns,
    without which long ones teach little. The square keeps pieces short for most of the run;
    multiples of 8 suit a GPU's tensor cores.
    """
    if progress >= GROWN_AT:
        return T
    length = int((progress / GROWN_AT) ** 2 * (T - SHORTEST) + SHORTEST)
    return length - length % 8


# ---- technique 2, packing: several pieces in a row, because padding costs as much as text does


def pack(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Best fit, longest first: each piece goes into the fullest row that still has room.

        row(i) = argmin {space(r) : space(r) >= length(i)},  or a new row

    Pieces of one length are interchangeable, so it first plans rows of lengths, and then gives the
    places of each length to its pieces, the earliest first.

    Returns: for each row the indices of its pieces
    Example: at T = 8 the lengths 3, 6, 5, 2 make the rows (1, 3) and (2, 0)
    """
    rows_with: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # lengths, by the space left
    for length in sorted(lengths, reverse=True):
        space = min((s for s, rows in rows_with.items() if s >= length and rows), default=T)
        row = rows_with[space].pop() if rows_with[space] else ()
        rows_with[space - length].append((*row, length))
    waiting = defaultdict(list)  # the pieces of each length, so that pop() gives the earliest
    for index in reversed(range(len(lengths))):
        waiting[lengths[index]].append(index)
    planned = Counter(row for rows in rows_with.values() for row in rows)
    filled: list[tuple[int, ...]] = []
    for row, times in sorted(planned.items(), reverse=True):
        by_place = [[waiting[length].pop() for _ in range(times)] for length in row]
        filled += zip(*by_place, strict=True)  # `times` rows with the same lengths
    return filled


def next_rows(every: Sequence[Span], first_draw: int, longest: int) -> list[list[Span]]:
    """Draw samples from all there are, cut them into pieces, and pack these into rows."""
    draws = np.arange(first_draw, first_draw + WINDOW * ROWS)
    drawn = shuffled(draws, len(every), SEED)  # entries of an endless series of reshuffles
    pieces = cut([every[index] for index in drawn], longest)
    rows = pack([end - start for start, end in pieces])
    # Packing put the longest first. A piece's index follows its random draw, so sorting rows by
    # their first piece makes their order random again.
    return [[pieces[index] for index in row] for row in sorted(rows)]


def batch(store: Store, rows: Sequence[Sequence[Span]]) -> tuple[Tensor, ...]:
    """Lay the pieces of each row side by side: four int64 tensors (B, T).

    tokens     the token before each target. Documents end with end-of-text, so the first token
               of a document is predicted from that
    targets    the text; -100 on padding
    positions  from 0 in every piece
    piece_ids  the number of a piece in its row; PADDING after the last one
    """
    shape, end_of_text = (len(rows), T), store.meta["end_of_text"]
    tokens, targets = np.full(shape, end_of_text), np.full(shape, -100)
    positions, piece_ids = np.zeros(shape, np.int64), np.full(shape, PADDING)
    for r, row in enumerate(rows):
        offset = 0
        for number, (start, end) in enumerate(row):
            at = slice(offset, offset + end - start)
            targets[r, at] = store.tokens[start:end]
            before = store.tokens[start - 1] if start else end_of_text
            tokens[r, at] = [before, *targets[r, at][:-1]]
            positions[r, at], piece_ids[r, at] = np.arange(end - start), number
            offset = at.stop
    return tuple(map(torch.from_numpy, (tokens, targets, positions, piece_ids)))


def mask(piece_ids: Tensor) -> Tensor:
    """Which token i may see which j, (B, 1, T, T) bool:  j <= i and piece(j) = piece(i).

    Without it a piece would attend to unrelated text. Resetting positions does not keep pieces
    apart: rotary attention depends only on differences of positions, so with this mask the reset
    changes nothing here (learned positions would need it).
    """
    same = piece_ids[:, :, None] == piece_ids[:, None, :]
    return same.tril()[:, None]


# ---- technique 3, random layerwise token dropping: middle layers see K of the T tokens of a row
#
# The first layer sees all tokens, so that each has attended to its neighbours once; so does the
# last, because every token is predicted. Evaluation never drops, so from WHOLE_AT on training does
# not either, and the middle layers adapt to whole rows.


def kept_tokens(progress: float) -> int:
    return T if progress >= WHOLE_AT else K


def draw_kept(k: int, step: int, layer: int, piece_ids: Tensor) -> Tensor:
    """Draw the tokens that a layer sees, anew for each step, layer and row: (B, k) ascending.

        kept = sort(top k of random numbers)

    Sorted, so that their order is that of the text and `mask` stays causal. Padding is dropped
    before any token.
    """
    rows = torch.arange(len(piece_ids))
    seed = torch.tensor([seed_of(SEED, "ltd", step, layer)])
    (drawn,) = bits(seed, rows, T)  # (B, T), 63 bits each: a hash of seed, row and column
    drawn = torch.where(piece_ids == PADDING, ~drawn, drawn)  # ~x is -x - 1: below all others
    return drawn.topk(k).indices.sort().values


def run_kept(block: "Block", x: Tensor, kept: Tensor, positions: Tensor, piece_ids: Tensor):
    """y[kept] = block(x[kept]), with the block's residual;  y[others] = x[others].

    A kept token keeps its position and its piece.
    """
    index = kept[:, :, None].expand(-1, -1, C)
    y = block(x.gather(1, index), positions.gather(1, kept), mask(piece_ids.gather(1, kept)))
    return x.scatter(1, index, y)


# ---- the model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.qkv, self.out = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.ln_2, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor, positions: Tensor, may_see: Tensor) -> Tensor:
        """(B, T, C) hidden states, (B, T) positions, (B, 1, T, T) mask -> (B, T, C).

        T is the whole row, or the kept part of it.
        """
        qkv = self.qkv(self.ln_1(x)).unflatten(2, (3, H, C // H))  # (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, may_see)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: turn pair i of a head (B, H, T, D) by position * 10000^(-2 i / D)."""
    D = x.shape[-1]
    angle = positions[:, None, :, None] * 10_000.0 ** (-torch.arange(0, D, 2) / D)  # (B, 1, T, D/2)
    (even, odd), cos, sin = x.unflatten(-1, (-1, 2)).unbind(-1), angle.cos(), angle.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class GPT(nn.Module):
    def __init__(self, vocab_size: int):
        super().__init__()
        torch.manual_seed(seed_of(SEED, "weights"))
        self.embedding = nn.Embedding(vocab_size, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.ln = nn.LayerNorm(C)
        self.head = nn.Linear(C, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:  # the residual stream adds up 2 L outputs
            nn.init.normal_(block.out.weight, std=0.02 / math.sqrt(2 * L))
            nn.init.normal_(block.down.weight, std=0.02 / math.sqrt(2 * L))

    def forward(self, tokens, targets, positions, piece_ids, step: int = 0, k: int = T) -> Tensor:
        """The loss of each target in nats, (B * T,); middle layers see k tokens of each row."""
        x, may_see = self.embedding(tokens), mask(piece_ids)
        for layer, block in enumerate(self.blocks):
            if 0 < layer < L - 1 and k < T:  # `consumed_by` counts on this choice of layers
                kept = draw_kept(k, step, layer, piece_ids)
                x = run_kept(block, x, kept, positions, piece_ids)
            else:
                x = block(x, positions, may_see)
        logits = self.head(self.ln(x)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="none")


# ---- the clock


def consumed_by(piece_ids: Tensor, k: int) -> int:
    """What a step adds to the clock: the tokens that each layer sees, added up, divided by L.

    As in the paper, which counts neither the head nor that attention costs the square of the tokens
    it sees.

    Example: a row of 2,048 tokens, through layers that see 2048, 128, 128 and 2048, consumes 1088
    """
    seen = torch.tensor([T, *[k] * (L - 2), T])
    real = (piece_ids != PADDING).sum(1, keepdim=True)  # (B, 1)
    return int(real.minimum(seen).sum()) // L


def learning_rate(clock: float, budget: int) -> float:
    """A straight line up to LR, and one down to 0."""
    warmup = WARMUP * budget
    return LR * min(clock / warmup, (budget - clock) / (budget - warmup))


# ---- the run


def train(budget: int = BUDGET, most_steps: int | None = None) -> tuple[GPT, Store, list[float]]:
    """Train until the clock has reached the budget; return model, store and each step's loss."""
    store = Store.open(embedded_store("pd4k"))  # 4,096 byte-pair tokens, mostly books
    every, draws_made, rows = samples(store, held_out=False), 0, []
    model = GPT(-(-(store.meta["end_of_text"] + 1) // 64) * 64)  # ids, rounded up to 64
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)
    clock, losses = 0, []
    while clock < budget and len(losses) != most_steps:
        # 1. Choose the rows. All that is random is a function of SEED.
        progress, step = clock / budget, len(losses) + 1
        while len(rows) < ROWS:
            rows += next_rows(every, draws_made, longest_piece(progress))
            draws_made += WINDOW * ROWS
        chosen, rows = rows[:ROWS], rows[ROWS:]
        # The costliest attention first: train.py deals rows to its ranks in this order.
        chosen.sort(key=lambda row: -sum((end - start) ** 2 for start, end in row))
        tokens, targets, positions, piece_ids = batch(store, chosen)
        k = kept_tokens(progress)
        # 2. The mean loss of all targets, and its gradient.
        loss = model(tokens, targets, positions, piece_ids, step, k).sum() / (targets >= 0).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # 3. Move the weights, at the rate of the step's midpoint: at its start, step 1 has rate 0.
        after = clock + consumed_by(piece_ids, k)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate((clock + min(after, budget)) / 2, budget)
        optimizer.step()
        optimizer.zero_grad()
        clock = after
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: clock {clock:,} of {budget:,}, loss {losses[-1]:.4f}")
    return model, store, losses


@torch.no_grad()
def bits_per_byte(model: GPT, store: Store) -> float:
    """Held-out loss:  nats / (ln 2 * bytes of text), whatever the tokenizer.

    Documents are cut only where they are longer than a row, and every layer sees every token.
    """
    pieces, nats, size = samples(store, held_out=True), 0.0, 0
    rows = [[pieces[i] for i in row] for row in pack([end - start for start, end in pieces])]
    bytes_of = torch.from_numpy(byte_lengths(get_encoding("pd4k")))  # end-of-text has none
    for first in range(0, len(rows), ROWS):
        tokens, targets, positions, piece_ids = batch(store, rows[first : first + ROWS])
        nats += model(tokens, targets, positions, piece_ids).sum().item()
        size += int(bytes_of[targets[targets >= 0]].sum())
    return nats / math.log(2) / size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=BUDGET, help="on the clock, at the end")
    model, store, _ = train(parser.parse_args().tokens)
    print(f"held-out: {bits_per_byte(model, store):.4f} bits per byte")
