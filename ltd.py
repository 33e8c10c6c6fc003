"""Random layerwise token dropping (random-LTD): middle layers see a random subset of the tokens.

In each step every layer but the first and the last draws, for every row, its own K of T positions.
The kept tokens go through the layer; the dropped ones pass around it unchanged. K grows during
training until nothing is dropped. Evaluation never drops.

Does not touch the model, which calls each of its blocks through a `run_block`: this is one. Kept
tokens keep their original positions and doc_ids (`meta.take`), so rotary angles, causality and
packed documents stay right.

Paper: Yao et al., arXiv 2211.11586; accounting: Li et al., arXiv 2212.03597, section 3.2.

    python ltd.py --start 64 --seq-len 256 --layers 6           # kept tokens and cost over a run
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class LtdConfig:
    on: bool = field(
        default=False, metadata={"help": "drop random tokens in every layer but first and last"}
    )
    start: int | None = field(
        default=None,
        metadata={"help": "tokens of a row kept at first (default: half of --seq-len)", "least": 1},
    )
    share: float = field(
        default=0.7,
        metadata={
            "help": "share of --tokens after which all tokens are kept",
            "above": 0,
            "most": 1,
        },
    )


MULTIPLE = 16  # kept tokens move in steps of 16, as in the paper's recipes: few shapes, full tiles


def kept_tokens(progress: float, start: int, share: float, seq_len: int) -> int:
    """How many tokens of a full row a dropped layer keeps, growing linearly with the clock.

    Args:    progress consumed tokens as a share of the budget, 0..1
             start    tokens kept at progress 0, 1 <= start <= seq_len
             share    progress from which on all `seq_len` are kept
    Returns: tokens, a multiple of 16 except that it is never below start nor above seq_len
    Deviates: DeepSpeed's scheduler (data_routing/scheduler.py) rounds below its minimum, and
             reaches seq_len late when 16 does not divide it
    Example: kept_tokens(0.35, 64, 0.7, 256) == 160, half-way from 64 to 256
    """
    if progress >= share:
        return seq_len
    kept = int(start + (seq_len - start) * progress / share)
    return min(max(kept // MULTIPLE * MULTIPLE, start), seq_len)


def draw(keep: int, score: Tensor, padding: Tensor | None = None) -> Tensor:
    """Choose, for every row by itself, which `keep` of its T positions go through a layer.

    Args:    keep    tokens, 1 <= keep <= T
             score   (B, T) float, uniform in [0, 1): the `keep` highest of a row are kept
             padding (B, T) bool or None; padding is dropped before any real token
    Returns: (B, K) int64, ascending, so that a causal mask among kept tokens is still a triangle
    Raises:  ValueError if keep is outside 1..T
    Deviates: in DeepSpeed (data_routing/basic_layer.py) padding competes with real tokens for the
             K positions
    Example: draw(2, tensor([[0.1, 0.9, 0.5, 0.7]])) == [[1, 3]]
    """
    T = score.shape[1]
    if not 1 <= keep <= T:
        raise ValueError(f"cannot keep {keep} of {T} tokens: --ltd-start allows 1 to {T}")
    if padding is not None:
        score = score - padding.to(score.dtype)
    return score.topk(keep, dim=1).indices.sort(dim=1).values  # (B, K)


def run_kept(block: Callable, x: Tensor, meta, kept: Tensor) -> Tensor:
    """Run one block on the kept tokens; the others leave it as they came, bit for bit.

    Replacing rows, not adding to them, gives each token the right gradient: a dropped one the
    gradient from above unchanged, a kept one that through the block (which has its own residual).

    Args:    x    (B, T, C) hidden states
             meta per-token metadata with `take`
             kept (B, K) int64, ascending
    Returns: (B, T, C)
    """
    index = kept[:, :, None].expand(-1, -1, x.shape[2])  # (B, K, C)
    y = block(x.gather(1, index), meta.take(kept))  # (B, K, C)
    return x.scatter(1, index, y)


def token_dropping(keep: int, layers: int, choose: Callable[..., Tensor], inner: Callable):
    """A `run_block`: the first and the last of `layers` see every token, the others `keep` of them.

    Rows of at most `keep` tokens run whole, and nothing is drawn for them.

    Args:    choose (layer, x, meta) -> (B, K) int64, the draw
             inner  the run_block that runs a block on the tokens it is given
    """

    def run_layer(layer: int, block: Callable, x: Tensor, meta) -> Tensor:
        if layer in (0, layers - 1) or keep >= x.shape[1]:
            return inner(layer, block, x, meta)

        def run_on_kept(y: Tensor, meta_of_kept) -> Tensor:
            return inner(layer, block, y, meta_of_kept)

        return run_kept(run_on_kept, x, meta, choose(layer, x, meta))

    return run_layer


def run_block(settings, context, first_row: int, inner: Callable) -> Callable:
    """The run_block of one micro-batch.

    Args:    settings  of the run
             context   of the step: progress, the rows of all ranks, and its random generators
             first_row number of this micro-batch's first row among the rows of all ranks
             inner     the run_block that this one wraps
    """
    keep = kept_tokens(
        context.progress, settings.ltd.start, settings.ltd.share, settings.data.seq_len
    )

    def choose(layer: int, x: Tensor, meta) -> Tensor:
        # drawn for the rows of all ranks: who runs a row does not change what it drops
        B, T, _ = x.shape
        generator = context.generator(x.device, "ltd", layer)
        score = torch.rand(context.rows, T, generator=generator, device=x.device)
        padding = None if meta.doc_ids is None else meta.doc_ids < 0
        return draw(keep, score[first_row : first_row + B], padding)

    return token_dropping(keep, settings.model.layers, choose, inner)


def tokens_by_layer(settings, context, tokens: list[int]) -> list[int]:
    """How many tokens of a row each layer sees, given how many it would see without this technique.

    Example: rows of 256 in 6 layers that keep 128: [256, 128, 128, 128, 128, 256]
    """
    keep = kept_tokens(
        context.progress, settings.ltd.start, settings.ltd.share, settings.data.seq_len
    )
    first, *middle, last = tokens
    return [first, *(min(keep, count) for count in middle), last]


def with_defaults(settings) -> LtdConfig:
    if settings.ltd.start is not None:
        return settings.ltd
    return replace(settings.ltd, start=settings.data.seq_len // 2)


def refusals(settings) -> list[tuple[bool, str]]:
    start, seq_len, layers = settings.ltd.start, settings.data.seq_len, settings.model.layers
    return [
        (
            start > seq_len,
            f"--ltd-start {start} is more than a row holds: choose 1 to {seq_len}",
        ),
        (
            layers < 3,
            f"--ltd drops from the layers between first and last: --layers {layers} has none,"
            " choose 3 or more",
        ),
    ]


def main(argv: list[str] | None = None) -> None:
    from support import runtime

    parser = runtime.Parser(prog="ltd.py", description="Token dropping over a run.")
    parser.add_argument("--start", type=int, default=128, help="tokens of a row kept at first")
    parser.add_argument("--share", type=float, default=0.7, help="progress at which all are kept")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    args = parser.parse_args(argv)
    if args.seq_len < 1:
        raise ValueError(f"--seq-len {args.seq_len}: a row has 1 token or more")
    if not 1 <= args.start <= args.seq_len:
        raise ValueError(f"--start {args.start}: a row keeps 1 to {args.seq_len} tokens")
    if not 0 < args.share <= 1:
        raise ValueError(f"--share {args.share} must be above 0 and at most 1")
    if args.layers < 3:
        raise ValueError(f"--layers {args.layers}: the first and the last layer drop nothing")
    print("progress   kept   layer-tokens of a row   share of the full row")
    full = args.layers * args.seq_len
    for tenth in range(11):
        keep = kept_tokens(tenth / 10, args.start, args.share, args.seq_len)
        cost = 2 * args.seq_len + (args.layers - 2) * keep
        print(f"{tenth / 10:8.0%} {keep:6} {cost:23} {cost / full:23.1%}")


if __name__ == "__main__":
    from support import runtime

    runtime.exit_cleanly(main)
