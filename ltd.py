"""Random layerwise token dropping (random-LTD): middle layers see a random subset of the tokens.

In each step every layer but the first and the last draws, for every row, its own K of T positions.
The kept tokens go through the layer; the dropped ones pass around it unchanged. K grows during
training until nothing is dropped. Evaluation never drops.

Does not touch the model: it is a `run_block`. Kept tokens keep their original positions and
doc_ids (`meta.take`), so rotary angles, causality and packed documents stay right.

Paper: Yao et al., arXiv 2211.11586; accounting: Li et al., arXiv 2212.03597, section 3.2.

    python ltd.py --start 64 --seq-len 256 --layers 6           # kept tokens and cost over a run
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LtdConfig:
    on: bool = field(
        default=False, metadata={"help": "drop random tokens in every layer but first and last"}
    )
    start: int | None = field(
        default=None,
        metadata={"help": "tokens of a row kept at first (default: half of --seq-len)"},
    )
    share: float = field(
        default=0.7, metadata={"help": "share of --tokens after which all tokens are kept"}
    )


MULTIPLE = 16  # kept tokens move in steps of 16, as in the paper's recipes: few shapes, full tiles


def kept_tokens(progress: float, start: int, share: float, seq_len: int) -> int:
    """How many tokens of a full row a dropped layer keeps, growing linearly with the clock.

    Args:    progress consumed tokens as a share of the budget, 0..1
             start    tokens kept at progress 0, 1 <= start <= seq_len
             share    progress from which on all `seq_len` are kept
    Returns: tokens, a multiple of 16 except that it is never below start nor above seq_len
    Deviates: upstream rounds below its minimum, and reaches seq_len late when 16 does not divide it
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
    Deviates: upstream lets padding compete with real tokens for the K places
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


def token_dropping(keep: int, layers: int, choose: Callable[..., Tensor]) -> Callable:
    """The `run_block` of a step: the first and the last of `layers` see every token, others `keep`.

    Args:    choose (layer, x, meta) -> (B, K) int64: the draw, handed in so that its randomness
             is the caller's. Rows of at most `keep` tokens run whole and draw nothing.
    """

    def run_block(layer: int, block: Callable, x: Tensor, meta) -> Tensor:
        if layer in (0, layers - 1) or keep >= x.shape[1]:
            return block(x, meta)
        return run_kept(block, x, meta, choose(layer, x, meta))

    return run_block


def layer_tokens(layers: int, keep: int, seq_len: int) -> int:
    """Token-layers that a row of `seq_len` costs: T for the first and last layer, K for the others.

    Example: layer_tokens(6, 128, 256) == 2 * 256 + 4 * 128 == 1024
    """
    dropped = max(layers - 2, 0)
    return (layers - dropped) * seq_len + dropped * min(keep, seq_len)


def effective_tokens(real_tokens: int, layers: int, keep: int, seq_len: int) -> int:
    """What a step adds to the clock: its real tokens, scaled by the share of layers they ran.

    Paper:   arXiv 2212.03597, section 3.3: a = floor((T (L - l) + r l) / L) for l dropped layers
    Returns: floor(real_tokens a / T), which is rows times a when rows are full
    Example: effective_tokens(512, 6, 128, 256) == 512 * 170 // 256 == 340
    """
    return real_tokens * (layer_tokens(layers, keep, seq_len) // layers) // seq_len


def main(argv: list[str] | None = None) -> None:
    from support import runtime

    parser = runtime.Parser(prog="ltd.py", description="Token dropping over a run.")
    parser.add_argument("--start", type=int, default=128, help="tokens of a row kept at first")
    parser.add_argument("--share", type=float, default=0.7, help="progress at which all are kept")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a row")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    args = parser.parse_args(argv)
    if not 1 <= args.start <= args.seq_len:
        raise ValueError(f"--start {args.start}: a row keeps 1 to {args.seq_len} tokens")
    print("progress   kept   layer-tokens of a row   share of the full row")
    full = args.layers * args.seq_len
    for tenth in range(11):
        keep = kept_tokens(tenth / 10, args.start, args.share, args.seq_len)
        cost = layer_tokens(args.layers, keep, args.seq_len)
        print(f"{tenth / 10:8.0%} {keep:6} {cost:23} {cost / full:23.1%}")


if __name__ == "__main__":
    from support import runtime

    runtime.exit_cleanly(main)
