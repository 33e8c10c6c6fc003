"""The whole idea in one file: a GPT that reads short pieces first, packs them, and drops tokens.

    python lesson.py                       # some minutes on two CPU cores
    python lesson.py --tokens 100000

It learns what this learns, loss by loss; the rest of the repository is speed, scale, safety and
choice:

    python train.py --curriculum seqlen --pack --ltd --optimizer adamw --lr 0.004

Read it from the top: text, the three techniques, the model, the clock, the run. Letters: B rows,
T tokens of a row, K kept tokens, C width, H heads, D head width, L layers, V vocabulary.
"""

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prepare import embedded_store
from support.clock import bits, seed_of, shuffled
from support.store import Store, byte_lengths, get_encoding

SEED = 1337
L, H, C, T = 4, 4, 128, 1024
BUDGET = 2_000_000  # tokens on the clock
ROWS = 4  # of a step
SHORTEST, GROWN_AT = 64, 0.9  # tokens of a piece at first; share of the run after which it is T
K, WHOLE_AT = T // 16, 0.9  # tokens that a middle layer sees; share of the run after which it is T
LR, WARMUP = 4e-3, 0.02  # peak, and the share of the run in which it is reached
WINDOW = 16  # steps whose text is packed together
NONE = -1  # the document of padding

Piece = tuple[int, int]  # first and one-past-last token in the store; never across documents


# ---- text: a store is one long array of tokens, and `offsets` say where its documents begin


def cut(spans: Sequence[Piece], longest: int) -> list[Piece]:
    """Cut every span into pieces of at most `longest` tokens.

    Example: (0, 5) at 2 tokens a piece: (0, 2), (2, 4), (4, 5)
    """
    return [(i, min(i + longest, end)) for start, end in spans for i in range(start, end, longest)]


def samples(store: Store, held_out: bool) -> list[Piece]:
    """The documents for training, or those held out, which come last; cut to fit a row."""
    n = store.meta["train_documents"]
    ends = store.offsets[n:] if held_out else store.offsets[: n + 1]
    return cut(list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)), T)


# ---- technique 1, curriculum: short pieces first


def longest_piece(progress: float) -> int:
    """How long a piece may be, in multiples of 8:  l(p) = 64 + (T - 64) (p / 0.9)^2.

    Short pieces cost less attention, and teach what short contexts can teach.
    """
    if progress >= GROWN_AT:
        return T
    length = int((progress / GROWN_AT) ** 2 * (T - SHORTEST) + SHORTEST)
    return max(length - length % 8, SHORTEST)


# ---- technique 2, packing: rows without padding, and no leak between their pieces


def pack(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Best fit, longest first: each piece goes into the row with the least space that has room.

        row(i) = argmin {space(r) : space(r) >= length(i)},  or a new row

    Returns: rows, each with the numbers of its pieces
    Example: at T = 8 the lengths 3, 6, 5, 2 make the rows (1, 3) and (2, 0)
    """
    rows_with: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the space that is left
    for length in sorted(lengths, reverse=True):
        space = min((s for s, rows in rows_with.items() if s >= length and rows), default=T)
        row = rows_with[space].pop() if rows_with[space] else ()
        rows_with[space - length].append((*row, length))
    numbers = defaultdict(list)  # of the pieces of each length, the first one last
    for number in reversed(range(len(lengths))):
        numbers[lengths[number]].append(number)
    alike = Counter(row for rows in rows_with.values() for row in rows)
    filled: list[tuple[int, ...]] = []
    for row in sorted(alike, reverse=True):
        filled += zip(*([numbers[n].pop() for _ in range(alike[row])] for n in row), strict=True)
    return filled


def window(every: Sequence[Piece], draw: int, longest: int) -> list[list[Piece]]:
    """Rows of the next WINDOW steps: draw samples, cut them, pack them, and shuffle the rows."""
    drawn = shuffled(np.arange(draw, draw + WINDOW * ROWS), len(every), SEED)
    pieces = cut([every[number] for number in drawn], longest)
    rows = pack([end - start for start, end in pieces])
    return [[pieces[number] for number in row] for row in sorted(rows)]  # by their first draw


def batch(store: Store, rows: Sequence[Sequence[Piece]]) -> tuple[Tensor, ...]:
    """Lay the pieces of each row side by side; four times (B, T) int64.

    tokens     the token before each target: end-of-text where a document begins
    targets    the text; -100 on padding
    positions  from 0 in every piece
    documents  the number of a piece in its row; -1 on padding
    """
    end_of_text = store.meta["end_of_text"]
    text, positions, documents = np.zeros((3, len(rows), T), np.int64)
    tokens, targets = np.full_like(text, end_of_text), np.full_like(text, -100)
    documents[:] = NONE
    for r, row in enumerate(rows):
        i = 0
        for number, (start, end) in enumerate(row):
            at = slice(i, i := i + end - start)
            targets[r, at] = store.tokens[start:end]
            tokens[r, at] = [
                store.tokens[start - 1] if start else end_of_text,
                *targets[r, at][:-1],
            ]
            positions[r, at], documents[r, at] = np.arange(end - start), number
    return tuple(map(torch.from_numpy, (tokens, targets, positions, documents)))


def mask(documents: Tensor) -> Tensor:
    """Which tokens see which, (B, 1, T, T):  j <= i and document(j) = document(i)."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


# ---- technique 3, token dropping: middle layers see K of the T tokens of each row


def kept_tokens(progress: float) -> int:
    return T if progress >= WHOLE_AT else K


def keep(k: int, step: int, layer: int, documents: Tensor) -> Tensor:
    """Draw the tokens that a layer sees, anew for each step, layer and row: (B, k).

        kept = sort(top k of random numbers)

    Sorted, so that `mask` among them is still a triangle. Padding is dropped first.
    """
    rows = torch.arange(len(documents))
    seed = torch.tensor([seed_of(SEED, "ltd", step, layer)])
    drawn = bits(seed, rows, T)[0]  # (B, T) from 0 on, a function of its arguments alone
    drawn = torch.where(documents == NONE, ~drawn, drawn)  # below 0
    return drawn.topk(k).indices.sort().values


def run_kept(block: "Block", x: Tensor, kept: Tensor, positions: Tensor, documents: Tensor):
    """y[kept] = block(x[kept]);  y[others] = x[others].

    A kept token keeps its position and its document.
    """
    index = kept[:, :, None].expand(-1, -1, C)
    y = block(x.gather(1, index), positions.gather(1, kept), mask(documents.gather(1, kept)))
    return x.scatter(1, index, y)


# ---- the model


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.qkv, self.out = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.ln_2, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """(B, T, C) hidden states, (B, T) positions, (B, 1, T, T) who sees whom -> (B, T, C)."""
        B, n, _ = x.shape
        qkv = self.qkv(self.ln_1(x)).view(B, n, 3, H, C // H).permute(2, 0, 3, 1, 4)
        q, k, v = qkv  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, mask)
        x = x + self.out(y.transpose(1, 2).reshape(B, n, C))
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

    def forward(self, tokens, targets, positions, documents, step: int = 0, k: int = T) -> Tensor:
        """The loss of each target in nats, (B T,); middle layers see k tokens of each row."""
        x, whole = self.embedding(tokens), mask(documents)
        for layer, block in enumerate(self.blocks):
            if 0 < layer < L - 1 and k < T:
                x = run_kept(block, x, keep(k, step, layer, documents), positions, documents)
            else:
                x = block(x, positions, whole)
        logits = self.head(self.ln(x)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="none")


# ---- the clock: a step consumes its tokens, scaled by the share of layers that they ran through


def consumed_by(documents: Tensor, k: int) -> int:
    """sum over rows of floor((1 / L) sum over layers of min(n, tokens that the layer sees)).

    n are the tokens of a row without padding. Example: 1024 in layers that see 1024, 64, 64 and
    1024 consume 544
    """
    seen = torch.tensor([T, *[k] * (L - 2), T])
    n = (documents != NONE).sum(1, keepdim=True)  # (B, 1)
    return int((n.minimum(seen).sum(1) // L).sum())


def learning_rate(consumed: float, budget: int) -> float:
    """A straight line up to LR, and one down to 0."""
    warmup = WARMUP * budget
    return LR * min(consumed / warmup, (budget - consumed) / (budget - warmup))


# ---- the run


def train(budget: int = BUDGET, most_steps: int | None = None) -> tuple[GPT, Store, list[float]]:
    """Train until the budget is consumed; the model, the store and the loss of each step."""
    store = Store.open(embedded_store("pd4k"))
    every, draw, waiting = samples(store, held_out=False), 0, []
    model = GPT(-(-(store.meta["end_of_text"] + 1) // 64) * 64)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)
    consumed, losses = 0, []
    while consumed < budget and len(losses) != most_steps:
        # 1. Every choice of a step follows from the clock and the seed.
        progress, step = consumed / budget, len(losses) + 1
        while len(waiting) < ROWS:
            waiting += window(every, draw, longest_piece(progress))
            draw += WINDOW * ROWS
        rows, waiting = waiting[:ROWS], waiting[ROWS:]
        rows.sort(key=lambda row: -sum((end - start) ** 2 for start, end in row))  # of attention
        tokens, targets, positions, documents = batch(store, rows)
        k = kept_tokens(progress)
        after = consumed + consumed_by(documents, k)
        # 2. The mean loss of all targets, and its gradient.
        loss = model(tokens, targets, positions, documents, step, k).sum() / (targets >= 0).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # 3. The rate of the middle of the step, so that neither the first nor the last is wasted.
        for group in groups:
            group["lr"] = learning_rate((consumed + min(after, budget)) / 2, budget)
        optimizer.step()
        optimizer.zero_grad()
        consumed = after
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: {consumed:,} of {budget:,} tokens, loss {losses[-1]:.4f}")
    return model, store, losses


@torch.no_grad()
def bits_per_byte(model: GPT, store: Store) -> float:
    """Held-out loss, on whole documents with nothing dropped:  nats / (ln 2 * bytes)."""
    pieces, nats, size = samples(store, held_out=True), 0.0, 0
    rows = [[pieces[n] for n in row] for row in pack([end - start for start, end in pieces])]
    bytes_of = torch.from_numpy(byte_lengths(get_encoding("pd4k")))
    for first in range(0, len(rows), ROWS):
        tokens, targets, positions, documents = batch(store, rows[first : first + ROWS])
        nats += model(tokens, targets, positions, documents).sum().item()
        size += int(bytes_of[targets[targets >= 0]].sum())
    return nats / math.log(2) / size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=BUDGET, help="on the clock")
    model, store, _ = train(parser.parse_args().tokens)
    print(f"held-out: {bits_per_byte(model, store):.4f} bits per byte")
