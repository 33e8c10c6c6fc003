"""Every setting: frozen dataclasses -> grouped command line, defaults by size, refusals.

A technique keeps its own dataclass beside its code; its first field is the switch and takes the
technique's name (`--ltd`), the others take it as prefix (`--ltd-start`). No config files and no
environment variables: a recipe is a shell line.

    python config.py                    # the table of flags, as the README shows it
"""

import argparse
import types
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args, get_type_hints

import curriculum
import difficulty
from curriculum import CurriculumConfig
from ltd import LtdConfig
from model import SIZES, TransformerConfig
from packing import PackConfig
from support.optim import SCHEDULES
from support.runtime import Parser


def flag(default: Any, help: str, choices: tuple | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class RunConfig:
    out: str | None = flag(None, "folder of the run: log, checkpoints, config (default: a new one)")
    resume: str | None = flag(
        None, "go on from a checkpoint of --out", ("last", "previous", "best")
    )
    seed: int = flag(1337, "decides the weights at the start, the order of data and every draw")
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda", "mps"))
    dtype: str = flag("auto", "arithmetic of the model", ("auto", "fp32", "bf16", "fp16"))
    compile: bool = flag(False, "compile each block with torch.compile")
    eval_every: int | None = flag(None, "tokens between evaluations (default: a fifth of --tokens)")
    eval_tokens: int = flag(32_768, "held-out tokens of an evaluation; the last one takes all")
    checkpoint_every: int | None = flag(None, "tokens between checkpoints (default: a tenth)")
    keep: int = flag(2, "newest checkpoints to keep; the best is kept besides")
    tensorboard: bool = flag(False, "write the log for TensorBoard too")


@dataclass(frozen=True)
class DataConfig:
    data: str | None = flag(None, "token store made by prepare.py (default: embedded corpus)")
    tokenizer: str = flag("pd4k", "pd4k, bytes, gpt2 or a .tiktoken file of ranks")
    seq_len: int | None = flag(None, "tokens of a row (default: by --size)")


@dataclass(frozen=True)
class ModelConfig:
    model: str = flag(
        "gpt", "gpt is causal, bert sees both ways and fills in masks", ("gpt", "bert")
    )
    size: str = flag("nano", "dimensions by name", tuple(SIZES))
    pos: str | None = flag(
        None, "positions (default: rope for nano, else learned)", ("learned", "rope")
    )
    layers: int | None = flag(None, "number of blocks (default: by --size)")
    heads: int | None = flag(None, "attention heads (default: by --size)")
    width: int | None = flag(None, "width of the residual stream (default: by --size)")
    mlp_width: int | None = flag(None, "inner width of the MLP (default: 4 x --width)")
    dropout: float = flag(0.0, "share of activations zeroed in training")
    init: str | None = flag(None, "start from weights in GPT-2's or BERT's published layout")


@dataclass(frozen=True)
class OptimConfig:
    tokens: int | None = flag(None, "budget on the clock, in tokens (default: by --size)")
    batch_tokens: int | None = flag(None, "tokens of an optimizer step, all ranks together")
    micro_batch_size: int | None = flag(None, "rows a rank takes at once; the rest is accumulated")
    optimizer: str = flag("muon", "muon moves the blocks' matrices, adamw all", ("adamw", "muon"))
    lr: float | None = flag(None, "peak learning rate (default: by --size)")
    min_lr: float = flag(0.0, "learning rate at the end, as a share of --lr")
    schedule: str = flag("linear", "decay of the learning rate", SCHEDULES)
    warmup_tokens: int | None = flag(None, "tokens of linear warmup (default: 2 % of --tokens)")
    decay_share: float = flag(0.2, "share of --tokens over which wsd decays")
    weight_decay: float = flag(0.1, "decay of matrices and embeddings")
    beta1: float = flag(0.9, "AdamW's first-moment decay")
    beta2: float = flag(0.95, "AdamW's second-moment decay")
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0 for none")


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    ltd: LtdConfig = field(default_factory=LtdConfig)
    pack: PackConfig = field(default_factory=PackConfig)


TECHNIQUES = ("curriculum", "ltd", "pack")

# tokens, batch_tokens, lr. nano: measured here (CHANGELOG). GPT: GPT-3's batch and learning rate
# (arXiv 2005.14165, table 2.1), 20 tokens a parameter (arXiv 2203.15556); BERT: arXiv 1810.04805.
RECIPES = {
    "nano": (800_000, 2_048, 1e-2),
    "124M": (2_500_000_000, 524_288, 6e-4),
    "350M": (7_000_000_000, 524_288, 3e-4),
    "774M": (15_500_000_000, 524_288, 2.5e-4),
    "1.3B": (26_000_000_000, 1_048_576, 2e-4),
    "bert-base": (2_200_000_000, 131_072, 1e-4),
    "bert-large": (6_800_000_000, 131_072, 1e-4),
}


def flag_of(group: str, name: str) -> str:
    """The flag of a field: --seq-len; of a technique's --ltd-start, and --ltd for its switch."""
    if group in TECHNIQUES:
        first = fields(get_type_hints(Config)[group])[0].name
        name = group if name == first else f"{group}_{name}"
    return "--" + name.replace("_", "-")


def count(text: str) -> int:
    """A number of tokens: 2000000, 2e6, 2M, 1.5B."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if unit != 1 else text) * unit
    except ValueError:
        number = -1.0
    if not 0 <= number < 2**63 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number such as 4096, 2e6, 1.5B")
    return int(number)


def parser() -> argparse.ArgumentParser:
    """The command line: a group of flags a dataclass. What is not given is absent, not default."""
    out = Parser(prog="train.py", description="Pretrain a GPT or a BERT.")
    for part in fields(Config):
        cls = get_type_hints(Config)[part.name]
        group = out.add_argument_group(part.name)
        for item in fields(cls):
            kind = get_type_hints(cls)[item.name]
            kind = get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
            shown = "" if item.default is None else f" (default: {item.default})"
            options = {
                "dest": f"{part.name}.{item.name}",
                "default": argparse.SUPPRESS,
                "help": item.metadata["help"].replace("%", "%%") + shown,
            }
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                choices = item.metadata.get("choices")
                options |= {"type": count if kind is int else kind, "choices": choices}
                options["metavar"] = "|".join(choices) if choices else kind.__name__.upper()
            if item.name == "resume":
                options |= {"nargs": "?", "const": "last"}
            group.add_argument(flag_of(part.name, item.name), **options)
    return out


def parse(argv: list[str]) -> dict[str, Any]:
    """The settings given on the command line, {"group.field": value}; ValueError for a bad one."""
    return vars(parser().parse_args(argv))


def build(settings: dict[str, Any]) -> Config:
    """Settings {"group.field": value} -> Config with every default by size filled in, checked."""
    groups = {}
    for part in fields(Config):
        mine = {k.split(".")[1]: v for k, v in settings.items() if k.split(".")[0] == part.name}
        groups[part.name] = get_type_hints(Config)[part.name](**mine)
    given = Config(**groups)
    for name in TECHNIQUES:
        part = getattr(given, name)
        switch, *others = fields(part)
        for item in others:
            value = getattr(part, item.name)
            if getattr(part, switch.name) == switch.default and value != item.default:
                flag = flag_of(name, item.name)
                raise ValueError(f"{flag} {value} has no effect without --{name}: add it")
    config = with_defaults(given)
    check(config)
    return config


def flat(config: Config) -> dict[str, Any]:
    """The inverse of `build`: {"group.field": value}."""
    return {f"{g}.{name}": v for g, part in asdict(config).items() for name, v in part.items()}


def with_defaults(config: Config) -> Config:
    """Fill in what was left to --size, and what follows from other settings."""
    model, data, optim, run = config.model, config.data, config.optim, config.run
    layers, heads, width, seq_len = SIZES[model.size]
    tokens, batch_tokens, lr = RECIPES[model.size]
    width = model.width or width
    model = replace(
        model,
        layers=model.layers or layers,
        heads=model.heads or heads,
        width=width,
        mlp_width=model.mlp_width or 4 * width,
        pos=model.pos or ("rope" if model.size == "nano" and not model.init else "learned"),
    )
    data = replace(data, seq_len=data.seq_len or seq_len)
    tokens = optim.tokens or tokens
    optim = replace(
        optim,
        tokens=tokens,
        batch_tokens=optim.batch_tokens or max(batch_tokens, data.seq_len),
        lr=lr if optim.lr is None else optim.lr,
        warmup_tokens=tokens // 50 if optim.warmup_tokens is None else optim.warmup_tokens,
    )
    run = replace(
        run,
        eval_every=run.eval_every or max(tokens // 5, 1),
        checkpoint_every=run.checkpoint_every or max(tokens // 10, 1),
    )
    ltd = config.ltd
    if ltd.on and ltd.start is None:
        ltd = replace(ltd, start=data.seq_len // 2)
    return Config(run, data, model, optim, config.curriculum, ltd, config.pack)


def samples_kind(config: Config) -> str:
    """What a sample is: a BERT's piece of a document, a piece to pack, or a row of the stream."""
    return "bert" if config.model.model == "bert" else "pieces" if config.pack.on else "rows"


def transformer_config(config: Config, vocab_size: int) -> TransformerConfig:
    """The model's dimensions. Learned positions reach as far as --size says, rotary --seq-len."""
    m = config.model
    longest = config.data.seq_len if m.pos == "rope" else SIZES[m.size][3]
    return TransformerConfig(
        m.model, m.layers, m.heads, m.width, m.mlp_width, longest, vocab_size, m.pos, m.dropout
    )


def check(config: Config) -> None:
    """Raise ValueError with the first refusal that applies, before any memory is taken."""
    for refused, message in refusals(config):
        if refused:
            raise ValueError(message)
    seq_len, metrics = (
        config.data.seq_len,
        curriculum.parse_metrics(config.curriculum, config.data.seq_len),
    )
    difficulty.check_metrics([metric.name for metric in metrics], seq_len, samples_kind(config))
    transformer_config(config, 1)


def refusals(config: Config) -> list[tuple[bool, str]]:
    """Every value and combination that is refused, as (condition, what to tell the user)."""
    run, data, model, optim = config.run, config.data, config.model, config.optim
    ltd = config.ltd
    T, longest = data.seq_len, SIZES[model.size][3]
    first_kept = T if ltd.start is None else ltd.start
    return [
        (not 8 <= T < 2**31, f"--seq-len {T}: rows have at least 8 tokens, and fewer than 2^31"),
        (
            T > longest and model.pos == "learned",
            f"--seq-len {T} is above the {longest} positions of --size {model.size}:"
            " shorten it, or choose --pos rope",
        ),
        (
            model.size.startswith("bert") and model.model != "bert",
            f"--size {model.size} is a BERT: add --model bert, or choose a GPT's size",
        ),
        (
            model.init is not None and run.resume is not None,
            "--init and --resume exclude each other: a resumed run has its weights",
        ),
        (
            model.init is not None and model.pos == "rope",
            "--init and --pos rope exclude each other: published weights have learned positions",
        ),
        (
            optim.batch_tokens % T != 0,
            f"--batch-tokens {optim.batch_tokens} is not a multiple of --seq-len {T}:"
            f" the nearest are {max(optim.batch_tokens // T, 1) * T}"
            f" and {(optim.batch_tokens // T + 1) * T}",
        ),
        (optim.lr <= 0, f"--lr {optim.lr} must be above 0"),
        (not 0 <= optim.min_lr <= 1, f"--min-lr {optim.min_lr} is a share of --lr: 0 to 1"),
        (
            optim.warmup_tokens >= optim.tokens,
            f"--warmup-tokens {optim.warmup_tokens} must be below --tokens {optim.tokens}",
        ),
        (
            not 0 < optim.decay_share <= 1,
            f"--decay-share {optim.decay_share} is a share of --tokens: above 0, at most 1",
        ),
        (
            not (0 <= optim.beta1 < 1 and 0 <= optim.beta2 < 1),
            f"--beta1 {optim.beta1} and --beta2 {optim.beta2} must lie in 0..1, 1 excluded",
        ),
        (optim.weight_decay < 0, f"--weight-decay {optim.weight_decay} must not be negative"),
        (optim.grad_clip < 0, f"--grad-clip {optim.grad_clip} must not be negative"),
        (not 0 <= model.dropout < 1, f"--dropout {model.dropout} must lie in 0..1, 1 excluded"),
        (run.keep < 1, f"--keep {run.keep}: at least one checkpoint has to stay"),
        (
            not 1 <= first_kept <= T,
            f"--ltd-start {first_kept} keeps an impossible number of tokens: 1 to {T}, --seq-len",
        ),
        (
            not 0 < ltd.share <= 1,
            f"--ltd-share {ltd.share} is a share of --tokens: above 0, at most 1",
        ),
        (
            ltd.on and model.layers < 3,
            f"--ltd needs a layer between first and last to drop from: --layers {model.layers}",
        ),
    ]


def micro_batch_size(config: Config, world: int) -> int:
    """Rows a rank takes through the model at once, and their accumulation comes out even.

    Raises: ValueError if the rows of --batch-tokens cannot be shared out so
    """
    rows = config.optim.batch_tokens // config.data.seq_len
    share = rows // world
    most = config.optim.micro_batch_size or max(1, min(share, 32_768 // config.data.seq_len))
    if config.optim.micro_batch_size is None:
        most = next((m for m in range(most, 0, -1) if share and share % m == 0), most)
    if rows % (most * world):
        raise ValueError(
            f"--batch-tokens {config.optim.batch_tokens} makes {rows} rows of {config.data.seq_len}"
            f" that {world} ranks of --micro-batch-size {most} cannot share: choose a multiple of"
            f" {most * world * config.data.seq_len}"
        )
    return most


# What may differ when a run goes on: where and how fast it computes, not what.
FREE = [
    "run.out",
    "run.resume",
    "run.device",
    "run.compile",
    "run.tensorboard",
    "run.eval_every",
    "run.eval_tokens",
    "run.checkpoint_every",
    "run.keep",
    "optim.micro_batch_size",
    "data.data",
    "curriculum.index",
]


def resumed(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that goes on: those it was started with, and what may be changed."""
    for name, value in given.items():
        if name not in FREE and saved.get(name) != value:
            with suppress(ValueError):  # what the same words were made to mean when it was started
                if flat(build({**saved, name: value}))[name] == saved.get(name):
                    continue
            flag = flag_of(*name.split("."))
            raise ValueError(
                f"{flag} {value} differs from the {saved.get(name)} that the run was started with:"
                " leave it out, or start a new run with another --out"
            )
    return {**saved, **{name: value for name, value in given.items() if name in FREE}}


def flags_table() -> str:
    """Every flag as a row of a markdown table, grouped as in --help."""
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for part in fields(Config):
        for item in fields(get_type_hints(Config)[part.name]):
            name = flag_of(part.name, item.name)
            default = {None: "", False: "off", True: "on"}.get(item.default, item.default)
            choices = item.metadata.get("choices")
            allowed = "" if choices is None else f": {', '.join(choices)}"
            rows.append(f"| `{name}` | {default} | {item.metadata['help']}{allowed} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(flags_table())
