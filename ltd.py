"""Random layerwise token dropping (random-LTD): middle layers see a random subset of the tokens.

In each step every layer but the first and the last draws, for every row, its own K of T positions.
The kept tokens go through the layer; the dropped ones pass around it unchanged. K grows during
training until nothing is dropped. Evaluation never drops.

Does not touch the model, which calls each of its blocks through a `run_block`: this is one. Kept
tokens keep their original positions and doc_ids (`meta.take`), so rotary angles, causality and
packed documents stay right.

In reading order: configuration, the schedule, the draw, the layer, what a run makes of them, the
commands. docs/ltd.md has the picture and the numbers.

Papers: Yao et al., arXiv 2211.11586; accounting: Li et al., arXiv 2212.03597, section 3.2.

    python ltd.py pace --start 128 --end 2048 --over 200000 --multiple 16 --at 0,2000,20000 --json
    python ltd.py plan --size 350M --seq-len 2048 --start 128 --share 0.7 --tokens 300B
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.token_drop import merge, split
from support.pacing import pace

MODES, PACES = ("random", "bypass"), ("linear", "root", "constant")


def flag(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class LtdConfig:
    on: bool = flag(False, "drop random tokens in every layer but first and last")
    mode: str = flag("random", "draw for each layer, or once for all (TokenBypass)", choices=MODES)
    start: int | None = flag(
        None, "tokens of a row kept at first (default: a sixteenth of --seq-len)", least=1
    )
    pace: str = flag(
        "constant", "how kept tokens grow; constant: not before the end", choices=PACES
    )
    share: float = flag(0.9, "share of --tokens after which all are kept", above=0, most=1)
    steps: int | None = flag(
        None, "optimizer steps after which all are kept, not --ltd-share", least=1
    )
    multiple: int | None = flag(
        None, "kept tokens on the way are multiples of it (default: at most 8 values)", least=1
    )
    layers: str | None = flag(
        None, "layers that drop, from 0: 1-10,12 (default: all in the middle)"
    )


# ---- the schedule


def kept_tokens(
    t: float, over: float, start: int, seq_len: int, kind: str = "linear", multiple: int = 1
) -> int:
    """How many tokens of a full row a dropping layer keeps, never fewer than before.

    Paper:   arXiv 2211.11586, section 3.2 (MSLG); root and constant are its alternatives
    Args:    t, over  steps or tokens, counted from 0; from t = over on all `seq_len` are kept
             kind     linear | root | constant, which stays at `start`
             multiple values on the way are `start` and so many more
    Returns: tokens, start..seq_len
    Example: kept_tokens(0.35, 0.7, 64, 256) == 160, half-way; in multiples of 64 it is 128
    """
    if kind == "constant":
        return seq_len if t >= over else start
    kept = pace(t, over, start, seq_len, degree=2 if kind == "root" else 1)
    return kept if kept == seq_len else kept - (kept - start) % multiple


def kept_now(settings: Any, context: Any) -> int:
    """`kept_tokens` at one step of a run."""
    ltd, T = settings.ltd, settings.data.seq_len
    t, over = (context.step - 1, ltd.steps) if ltd.steps else (context.progress, ltd.share)
    return kept_tokens(t, over, ltd.start, T, ltd.pace, multiple_of(ltd, T))


TILE = 16  # tokens that fill a matrix unit
MOST_SHAPES = 8  # numbers of kept tokens in a run: by default, and for --compile


def multiple_of(config: LtdConfig, seq_len: int) -> int:
    """--ltd-multiple, or the least multiple of 16 that makes 8 numbers of kept tokens at most."""
    way = seq_len - config.start
    return config.multiple or max(-(-way // (MOST_SHAPES - 1) // TILE) * TILE, TILE)


def kept_values(config: LtdConfig, seq_len: int) -> list[int]:
    """Every number of kept tokens that a run may have: each is a shape of its own."""
    step = seq_len if config.pace == "constant" else multiple_of(config, seq_len)
    return [*range(config.start, seq_len, step), seq_len]


def dropping_layers(text: str | None, layers: int) -> tuple[int, ...]:
    """The layers that --ltd-layers names, ascending; without it all but the first and the last.

    Example: dropping_layers("1-3,5", 8) == (1, 2, 3, 5)
    Raises:  ValueError for what is no such list, for a layer that the model does not have, and if
             no layer is left that sees every token
    """
    if text is None:
        return tuple(range(1, layers - 1))
    named: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ValueError(f"--ltd-layers {text}: write layers like 1-10,12")
        named.update(range(int(first), int(last or first) + 1))
    if not named or max(named) >= layers:
        raise ValueError(f"--ltd-layers {text}: the layers are 0 to {layers - 1}")
    if len(named) == layers:
        raise ValueError(f"--ltd-layers {text} names all layers: leave one that sees every token")
    return tuple(sorted(named))


def check_schedule(start: int, seq_len: int, over: float, multiple: int) -> None:
    """Refuse a schedule that a command was asked for; train.py's flags are refused below."""
    if not 1 <= start <= seq_len:
        raise ValueError(f"--start {start}: a row of {seq_len} keeps 1 to {seq_len} tokens")
    if not 0 < over < float("inf"):
        raise ValueError(f"--over or --share {over} must be above 0")
    if multiple < 1 or (start % multiple and start != seq_len):
        raise ValueError(
            f"--start {start} has to be a multiple of --multiple {multiple}, 1 or more"
        )


# ---- the draw


def draw(keep: int, bits: Tensor, padding: Tensor | None = None) -> Tensor:
    """Choose which `keep` of its T positions go through a layer, for every row by itself.

    Args:    keep    tokens, 1 <= keep <= T
             bits    (..., B, T) int64 from 0, uniform: the `keep` highest of a row are kept
             padding (B, T) bool or None; padding is dropped before any real token
    Returns: (..., B, K) int64, ascending, so that a causal mask among kept tokens is still a
             triangle
    Raises:  ValueError if keep is outside 1..T
    Deviates: in DeepSpeed (data_routing/basic_layer.py) padding competes with real tokens for the
             K positions
    Example: draw(2, tensor([[1, 9, 5, 7]])) == [[1, 3]]
    """
    T = bits.shape[-1]
    if not 1 <= keep <= T:
        raise ValueError(f"cannot keep {keep} of {T} tokens: --ltd-start allows 1 to {T}")
    if padding is not None:
        bits = torch.where(padding, ~bits, bits)  # below 0
    return bits.topk(keep, sorted=False).indices.sort().values  # (..., B, K)


def draws(settings: Any, context: Any, first_row: int, batch: Any, keep: int) -> dict[int, Tensor]:
    """The draws of all dropping layers at once: layer -> (B, K) int64.

    Functions of (seed, step, layer, row among the rows of all ranks, position): who runs a row, and
    with which others, does not change what it drops.
    """
    B, T = batch.tokens.shape
    layers = dropping_layers(settings.ltd.layers, settings.model.layers)
    rows = torch.arange(first_row, first_row + B, device=batch.tokens.device)
    padding = None if batch.doc_ids is None else batch.doc_ids < 0
    drawn = layers if settings.ltd.mode == "random" else layers[:1]
    kept = draw(keep, context.bits("ltd", drawn, rows, T), padding)  # (layers or 1, B, K)
    return dict(zip(layers, kept.expand(len(layers), -1, -1), strict=True))


# ---- the layer


def run_kept(block: Callable, x: Tensor, meta: Any, kept: Tensor) -> Tensor:
    """Run one block on the kept tokens; the others leave it as they came, bit for bit.

    Replacing rows, not adding to them, gives each token the right gradient: a dropped one the
    gradient from above unchanged, a kept one that through the block (which has its own residual).

    Args:    x    (B, T, C) hidden states
             meta per-token metadata with `take`
             kept (B, K) int64, ascending
    Returns: (B, T, C)
    """
    states, rest = split(x, kept)  # (B, K, C) and (B, T, C)
    return merge(rest, kept, block(states, meta.take(kept)))


def token_dropping(kept_in: dict[int, Tensor], inner: Callable) -> Callable:
    """A `run_block`: the layers of `kept_in` see the tokens it names, the others see every token.

    Args: inner the run_block that runs a block on the tokens it is given
    """

    def run_layer(layer: int, block: Callable, x: Tensor, meta: Any) -> Tensor:
        def run(x: Tensor, meta: Any) -> Tensor:
            return inner(layer, block, x, meta)

        return run_kept(run, x, meta, kept_in[layer]) if layer in kept_in else run(x, meta)

    return run_layer


# ---- what a run makes of them


def run_block(settings: Any, context: Any, first_row: int, batch: Any, inner: Callable) -> Callable:
    """The run_block of one micro-batch; where all tokens are kept, it is `inner` itself.

    Args:    context   of the step: progress, and its random numbers
             first_row number of the micro-batch's first row among the rows of all ranks
             batch     the micro-batch
             inner     the run_block that this one wraps
    """
    keep = kept_now(settings, context)
    if keep >= batch.tokens.shape[1]:
        return inner
    return token_dropping(draws(settings, context, first_row, batch, keep), inner)


def tokens_by_layer(settings: Any, context: Any, tokens: list[int]) -> list[int]:
    """How many tokens of a row each layer sees, given how many it would see without this technique.

    Example: rows of 256 in 6 layers that keep 128: [256, 128, 128, 128, 128, 256]
    """
    keep = kept_now(settings, context)
    dropping = dropping_layers(settings.ltd.layers, settings.model.layers)
    return [min(keep, n) if layer in dropping else n for layer, n in enumerate(tokens)]


def shapes(settings: Any) -> list[Any]:
    """For each number of kept tokens that a run may have, settings that begin with it."""
    ltd = settings.ltd
    return [
        replace(settings, ltd=replace(ltd, start=kept, pace="constant", share=1.0, steps=None))
        for kept in kept_values(ltd, settings.data.seq_len)
    ]


def with_defaults(settings: Any) -> LtdConfig:
    if settings.ltd.start is not None:
        return settings.ltd
    return replace(settings.ltd, start=max(settings.data.seq_len // 16, 1))


def refusals(settings: Any) -> list[tuple[bool, str]]:
    ltd, T, layers = settings.ltd, settings.data.seq_len, settings.model.layers
    if ltd.layers is not None:
        dropping_layers(ltd.layers, layers)  # raises for what it cannot be
    shapes, multiple = len(kept_values(ltd, T)), ltd.multiple or 1
    below = ltd.start // multiple * multiple
    return [
        (ltd.start > T, f"--ltd-start {ltd.start} is more than a row holds: choose 1 to {T}"),
        (
            ltd.start % multiple != 0 and ltd.start != T,
            f"--ltd-start {ltd.start} is no multiple of --ltd-multiple {multiple}: choose"
            f" {f'{below} or ' if below else ''}{below + multiple}",
        ),
        (
            ltd.steps is not None and ltd.share != LtdConfig.share,
            "--ltd-steps and --ltd-share both say when all tokens are kept: give one of them",
        ),
        (
            layers < 3,
            f"--ltd drops from the layers between first and last: --layers {layers} has none,"
            " choose 3 or more",
        ),
        (
            settings.run.compile and shapes > MOST_SHAPES,
            f"--ltd-multiple {multiple} makes {shapes} shapes to compile: leave it out, which makes"
            f" {MOST_SHAPES} at most, or leave out --compile",
        ),
    ]


# ---- the commands


def main(argv: list[str] | None = None) -> None:
    from support import costs, figures, runtime

    parser = runtime.Parser(prog="ltd.py", description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(required=True, dest="verb")
    pacing = verbs.add_parser("pace", help="kept tokens over a run")
    pacing.add_argument("--end", type=int, default=256, help="tokens of a row")
    pacing.add_argument("--over", type=float, default=100, help="t from which on all are kept")
    figures.add_curve_flags(pacing)
    plan = verbs.add_parser("plan", help="what a run costs with and without dropping")
    costs.add_flags(plan)
    plan.add_argument("--share", type=float, default=0.7, help="of --tokens until all are kept")
    plan.add_argument("--steps", type=int, help="until all are kept, in place of --share")
    plan.add_argument("--layers", help="layers that drop, from 0: 1-10,12")
    for verb in (pacing, plan):
        verb.add_argument("--start", type=int, default=64, help="tokens of a row kept at first")
        kind = "how they grow (linear, as in the papers; train.py's default is constant)"
        verb.add_argument("--kind", choices=PACES, default="linear", help=kind)
        verb.add_argument("--multiple", type=int, default=16, help="they grow by so many at once")
    args = parser.parse_args(argv)
    if args.verb == "plan":
        costs.with_defaults(args)
        over = args.steps or args.share
        if args.share > 1:
            raise ValueError(f"--share {args.share} of the budget is more than all of it")
        check_schedule(args.start, args.seq_len, over, args.multiple)
        layers = costs.SIZES[args.size].layers
        dropping = dropping_layers(args.layers, layers)

        @cache
        def tokens_by_layer(keep: int) -> tuple[int, ...]:
            return tuple(keep if i in dropping else args.seq_len for i in range(layers))

        def tokens_at(steps: int, progress: float) -> tuple[int, ...]:
            t = steps if args.steps else progress
            schedule = (over, args.start, args.seq_len, args.kind, args.multiple)
            return tokens_by_layer(kept_tokens(t, *schedule))

        costs.show_plan(args, tokens_at)
        return
    check_schedule(args.start, args.end, args.over, args.multiple)

    def kept_at(t: float) -> int:
        return kept_tokens(t, args.over, args.start, args.end, args.kind, args.multiple)

    figures.show_curve(args, kept_at, "kept tokens", args.over, tenths=10)


if __name__ == "__main__":
    from support import runtime

    runtime.exit_cleanly(main)
