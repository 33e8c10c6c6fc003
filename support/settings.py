"""Settings as frozen dataclasses, one field per flag, and the groups that every run has.

    @dataclass(frozen=True)
    class LtdConfig:
        on: bool = flag("--ltd", False, "drop random tokens ...")              --ltd, --no-ltd
        start: int | None = flag("--ltd-start", None, "...", least=1)          --ltd-start 64

A dataclass is a group. `Settings` holds the groups that every run has; `Config` in config.py adds
one for each technique, whose switch is its field or property `on`. Between the command line and the
dataclasses, settings are flat, {"ltd.start": 64}, and hold only what was given:

    parse          --ltd-start 64       ->  {"ltd.start": 64}
    with_defaults  fills in what follows from --size: layers, batch, learning rate ...
    unflattened    {"ltd.start": 64}    ->  Config(ltd=LtdConfig(start=64), ...)
    flattened      the way back, for config.json and checkpoints

In reading order: one setting; named sizes; the groups; the defaults that follow from a size; the
command line; flat settings.
"""

import argparse
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from math import inf, isfinite
from typing import Any, NamedTuple, TypeVar, get_args

from support.numbers import real_number, whole_number
from support.process import Parser

Value = str | int | float | bool | None  # of a setting
Flat = dict[str, Value]  # {"group.field": value}
Choices = tuple[str, ...]
Groups = TypeVar("Groups")  # a dataclass of groups: Config
SCHEDULES = ("cosine", "linear", "wsd")


class Setting(NamedTuple):
    kind: type  # of the value, which may also be None: not decided yet
    default: Value
    flag: str  # "" if the value follows from other settings, with which it is saved
    help: str
    choices: Choices = ()
    least: float = -inf
    above: float = -inf
    most: float = inf
    below: float = inf
    free: bool = False  # --resume may change it: it says where or how fast, not what
    without_value: str | None = None  # what the flag alone stands for

    def allows(self, value: Value) -> bool:
        kinds = (int, float) if self.kind is float else self.kind
        if not isinstance(value, kinds) or isinstance(value, bool) != (self.kind is bool):
            return False
        if self.kind is str:
            return value in self.choices if self.choices else value != ""
        return self.least <= value <= self.most and self.above < value < self.below

    def allowed(self) -> str:
        """Describe the allowed values. Example: at least 0 and below 1"""
        ends = {"at least": self.least, "above": self.above}
        ends |= {"at most": self.most, "below": self.below}
        limits = [f"{words} {limit}" for words, limit in ends.items() if isfinite(limit)]
        kind = f"a {self.kind.__name__}, not empty"
        return " or ".join(self.choices) or " and ".join(limits) or kind

    def default_in_words(self) -> str:
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return "" if self.default is None else str(self.default)


def flag(written: str, default: Value, help: str, choices: Choices = (), **more: object) -> Any:
    """Make a field of a group; `more` are other fields of `Setting`."""
    return field(default=default, metadata=dict(flag=written, help=help, choices=choices, **more))


def free(written: str, default: Value, help: str, choices: Choices = (), **more: object) -> Any:
    """Make a flag that may differ when a run is resumed."""
    return flag(written, default, help, choices, free=True, **more)


def derived(default: Value, help: str, choices: Choices = ()) -> Any:
    """Make a setting that follows from others: it is saved with them, but is no flag."""
    return flag("", default, help, choices)


@cache
def settings_of(config_class: type) -> dict[str, Setting]:
    """List every setting by its name, group.field, in the order of the fields."""
    settings = {}
    for group in fields(config_class):
        for item in fields(group.type):
            kind = next(iter(get_args(item.type)), item.type)  # int, of the annotation int | None
            settings[f"{group.name}.{item.name}"] = Setting(kind, item.default, **item.metadata)
    return settings


# ---- named sizes


class Size(NamedTuple):
    layers: int
    heads: int
    width: int
    seq_len: int  # default tokens per row, and the number of learned positions
    tokens: int  # default budget
    batch_tokens: int
    lr: float


# Dimensions. nano: ours. 1.3B: arXiv 2005.14165, table 2.1, but with 16 heads, as in the Data
# Efficiency paper's GPT-3. The others: as published with GPT-2 and BERT.
# Budget, batch and learning rate. nano: measured here (docs/measured.md). GPT: GPT-3's batch and
# learning rate (arXiv 2005.14165, table 2.1), and 20 tokens per parameter (arXiv 2203.15556). BERT:
# arXiv 1810.04805.
SIZES = {  # layers, heads, width, seq_len; tokens, batch_tokens, lr
    "nano": Size(4, 4, 128, 2048, 1_100_000, 8_192, 2e-2),
    "124M": Size(12, 12, 768, 1024, 2_500_000_000, 524_288, 6e-4),
    "350M": Size(24, 16, 1024, 1024, 7_000_000_000, 524_288, 3e-4),
    "774M": Size(36, 20, 1280, 1024, 15_500_000_000, 524_288, 2.5e-4),
    "1.3B": Size(24, 16, 2048, 2048, 26_000_000_000, 1_048_576, 2e-4),
    "bert-base": Size(12, 12, 768, 512, 2_200_000_000, 131_072, 1e-4),
    "bert-large": Size(24, 16, 1024, 512, 6_800_000_000, 131_072, 1e-4),
}
BLOCKS = {  # --block -> fields of `TransformerConfig`
    "gpt2": {"norm": "layernorm", "mlp": "gelu", "bias": True},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "bias": False},
}


# ---- the groups


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept, where it computes, and how often it evaluates and saves."""

    out: str | None = free("--out", None, "folder for the run's files (default: a new one)")
    resume: str | None = free(
        "--resume",
        None,
        "continue the run in --out, or the newest; auto: start one if --out has none",
        ("last", "best", "auto"),
        without_value="last",
    )
    seed: int = flag("--seed", 1337, "seed of initial weights, data order and every random choice")
    device: str = free("--device", "auto", "device to compute on", ("auto", "cpu", "cuda", "mps"))
    dtype: str = flag("--dtype", "auto", "auto: bf16 since Ampere", ("auto", "fp32", "bf16"))
    compile: str = free(
        "--compile", "auto", "compile; auto: on a GPU", ("auto", "on", "off"), without_value="on"
    )
    checkpoint_activations: bool = free(
        "--checkpoint-activations", False, "recompute blocks in backward to save memory"
    )
    fsdp: bool = free("--fsdp", False, "shard weights, gradients and optimizer state across ranks")
    eval_every: int | None = free(
        "--eval-every", None, "in tokens; 0: only at the end (default: --tokens / 4)"
    )
    eval_tokens: int | None = free(
        "--eval-tokens", None, "held-out tokens on the way (default: 6 % of --tokens)", least=1
    )
    final_eval_tokens: int | None = free(
        "--final-eval-tokens", None, "held-out at the end (default: --tokens, at most 1M)", least=1
    )
    checkpoint_every: int | None = free(
        "--checkpoint-every", None, "in tokens; 0: only at the end (default: --tokens / 10)"
    )
    keep: int = free("--keep", 2, "newest checkpoints to keep, besides the best", least=1)
    wandb: bool = free("--wandb", False, "log to Weights & Biases too (WANDB_MODE=offline works)")
    dry_run: bool = free("--dry-run", False, "print what the run would take, then exit")


@dataclass(frozen=True)
class DataConfig:
    """What a run reads."""

    data: str | None = free(
        "--data", None, "prepared store, or several: a=0.7,b=0.3 (default: the embedded corpus)"
    )
    tokenizer: str | None = free(
        "--tokenizer", None, "pd4k, bytes, gpt2 or a file of ranks (default: the store's, or pd4k)"
    )
    seq_len: int | None = flag(
        "--seq-len", None, "tokens per row (default: by --size)", least=8, below=2**31
    )


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides a model.

    To add an option, pass it on in config.py's `transformer_config` to model.py's
    `TransformerConfig`; its cost follows from the matrices that it adds.
    """

    model: str = flag("--model", "gpt", "predict the next token, or masked ones", ("gpt", "bert"))
    size: str = flag("--size", "nano", "sets dimensions, budget and learning rate", tuple(SIZES))
    block: str = flag("--block", "gpt2", "llama: RMSNorm, SwiGLU, RoPE, no biases", tuple(BLOCKS))
    qk_norm: bool = flag("--qk-norm", False, "RMSNorm on each head's queries and keys")
    kv_heads: int | None = flag("--kv-heads", None, "key/value heads (default: --heads)", least=1)
    pos: str | None = flag(
        "--pos", None, "positions (default: rope for nano and llama)", ("learned", "rope")
    )
    rope_theta: float = flag("", 10000.0, "base of the rotary angles", above=0)
    rope_scaling: str | None = derived(None, "Llama 3.1's, factor:slow:fast:positions")
    tied: bool | None = flag("--tied", None, "tie head and embedding (default: on; nano GPT off)")
    layers: int | None = flag("--layers", None, "blocks (default: by --size)", least=1, most=4096)
    heads: int | None = flag("--heads", None, "attention heads (default: by --size)", least=1)
    width: int | None = flag("--width", None, "channels (default: by --size)", least=1, most=2**17)
    mlp_width: int | None = flag("", None, "of the MLP: 4 x --width, for llama 8/3", least=1)
    # gelu_new is GPT-2's approximation, gelu is exact; None: by --pos
    activation: str | None = derived(None, "GELU", ("gelu_new", "gelu"))
    dropout: float = flag("--dropout", 0.0, "share of activations zeroed", least=0, below=1)
    nsp: bool = flag("--nsp", False, "BERT also learns whether two texts follow each other")
    init: str | None = flag("--init", None, "start from weights of a run, GPT-2, BERT or Llama")


@dataclass(frozen=True)
class OptimConfig:
    average: float = flag("--average", 0.0, "last share of a run whose weights' mean is evaluated")
    tokens: int | None = flag(
        "--tokens", None, "budget; --resume may raise it (default: by --size)", least=1, most=10**15
    )
    schedule_tokens: int | None = derived(None, "first budget, which schedules follow")
    batch_tokens: int | None = flag(
        "--batch-tokens", None, "tokens per step, in total (default: by --size)", least=1
    )
    micro_batch_size: int | None = free(
        "--micro-batch-size", None, "rows in a rank's forward pass (default: by device)", least=1
    )
    optimizer: str = flag("--optimizer", "muon", "muon: the blocks' matrices", ("adamw", "muon"))
    lr: float | None = flag("--lr", None, "peak rate (default: by --size)", above=0, most=1000)
    min_lr: float = flag("--min-lr", 0.0, "final rate, as a share of --lr", least=0, most=1)
    schedule: str = flag("--schedule", "linear", "how the learning rate decays", SCHEDULES)
    lr_clock: str = flag(
        "--lr-clock", "consumed-tokens", "what --lr follows", ("consumed-tokens", "layer-tokens")
    )
    warmup_tokens: int | None = flag("--warmup-tokens", None, "linear (default: 2 % of --tokens)")
    weight_decay: float = flag("--weight-decay", 0.1, "of matrices only", least=0, most=10)
    beta2: float | None = flag(
        "--beta2", None, "of AdamW (default: 0.95, nano GPT 0.99, BERT 0.999)", least=0, below=1
    )
    loss_per: str = flag("--loss-per", "token", "each weighs the same", ("token", "document"))
    grad_clip: float = flag("--grad-clip", 1.0, "maximum gradient norm; 0: no clipping", least=0)


@dataclass(frozen=True)
class Settings:
    """The groups of settings that every run has; config.py adds one for each technique."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


# ---- the defaults that follow from a size


def with_defaults(settings: Flat) -> Flat:
    """Fill in the settings that follow from --size or from other settings."""
    s = {name: value for name, value in settings.items() if value is not None}
    has_size, has_init = "model.size" in s, "model.init" in s
    size_name = s.setdefault("model.size", "nano")
    size, is_new_nano = SIZES[size_name], size_name == "nano" and not has_init
    # With --init the size is known if it names a run, and may be missing for published weights.
    is_nano = is_new_nano or (size_name == "nano" and has_size)
    s.setdefault("model.layers", size.layers)
    s.setdefault("model.heads", size.heads)
    s.setdefault("model.width", size.width)
    is_llama, width = s.get("model.block") == "llama", s["model.width"]
    s.setdefault("model.kv_heads", s["model.heads"])
    s.setdefault("model.mlp_width", swiglu_width(width) if is_llama else 4 * width)
    s.setdefault("model.pos", "rope" if is_llama or is_new_nano else "learned")
    is_bert = s.get("model.model") == "bert"
    s.setdefault("model.tied", not is_new_nano or is_bert)
    # A BERT's documents are padded unless packed: its rows are as long as the published ones.
    T = s.setdefault("data.seq_len", min(size.seq_len, 512) if is_bert else size.seq_len)
    s.setdefault("optim.tokens", size.tokens)
    s.setdefault("optim.schedule_tokens", s["optim.tokens"])
    s.setdefault("optim.batch_tokens", max(size.batch_tokens // T, 1) * T)
    s.setdefault("optim.lr", size.lr)
    # Published values for BERT and for GPT (GPT-3, appendix B); measured here for a nano GPT.
    s.setdefault("optim.beta2", 0.999 if is_bert else 0.99 if is_nano else 0.95)
    s.setdefault("optim.warmup_tokens", s["optim.tokens"] // 50)
    s.setdefault("run.eval_every", max(s["optim.tokens"] // 4, 1))
    s.setdefault("run.final_eval_tokens", min(s["optim.tokens"], 1_000_000))
    few = max(6 * s["optim.tokens"] // 100, 1)  # three evaluations take some 6 % of a run's time
    s.setdefault("run.eval_tokens", min(few, s["run.final_eval_tokens"]))
    s.setdefault("run.checkpoint_every", max(s["optim.tokens"] // 10, 1))
    return s


def usual_lr(settings: Flat) -> float:
    """Return the learning rate of the --size that is nearest in width, among GPTs or BERTs."""
    width, is_bert = with_defaults(settings)["model.width"], settings.get("model.model") == "bert"
    alike = [name for name in SIZES if name == "nano" or name.startswith("bert") == is_bert]
    return SIZES[min(alike, key=lambda name: abs(SIZES[name].width - width))].lr


def swiglu_width(width: int) -> int:
    """Return 2/3 of 4 C, rounded up as Llama does: then the gate adds no weights."""
    multiple = 64 if width <= 1024 else 256
    return -(-8 * width // (3 * multiple)) * multiple


# ---- the command line

OTHER_NAMES = {  # our flag -> what other trainers call it
    "--tokens, which counts tokens": "--epochs --num-train-epochs --max-steps --max-iters",
    "--batch-tokens, which counts tokens": "--batch-size --gradient-accumulation-steps",
    "--seq-len": "--seq-length --block-size --context-length --max-length",
    "--layers": "--n-layer --n-layers --num-layers --num-hidden-layers --depth",
    "--width": "--n-embd --hidden-size --d-model",
    "--lr": "--learning-rate",
}


def parse(config_class: type, argv: list[str], prog: str, description: str) -> Flat:
    """Parse and check a command line; return only the settings it gives.

    Raises: ValueError for an unknown flag or a value that is not allowed
    """
    other_names = {name: ours for ours, names in OTHER_NAMES.items() for name in names.split()}
    parser = Parser(other_names, prog=prog, description=description)
    groups = {group.name: parser.add_argument_group(group.name) for group in fields(config_class)}
    for name, setting in settings_of(config_class).items():
        if not setting.flag:
            continue
        default = setting.default_in_words()
        text = f"{setting.help} (default: {default})" if default else setting.help
        options = {"dest": name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if setting.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = {int: whole_number, float: real_number, str: str}[setting.kind]
            options["choices"] = setting.choices or None
            options["metavar"] = "|".join(setting.choices) or setting.kind.__name__.upper()
        if setting.without_value:
            options |= {"nargs": "?", "const": setting.without_value}
        groups[name.partition(".")[0]].add_argument(setting.flag, **options)
    given = vars(parser.parse_args(argv))
    check_limits(config_class, given)
    return given


def check_limits(config_class: type, flat: Flat, file: str = "") -> None:
    """Refuse a setting that does not exist or is outside its limits.

    Raises: ValueError naming the flag, or the file that the settings come from and its entry
    """
    for name, value in flat.items():
        setting = settings_of(config_class).get(name)
        if setting is None:
            where = f"{file}: " if file else ""
            raise ValueError(f"{where}{name} is not a setting of this version of train.py")
        if value is not None and not setting.allows(value):
            written = f"{file}: {name}" if file else setting.flag
            allowed = setting.allowed()
            raise ValueError(f"{written} must be {allowed}, got {value!r}: {setting.help}")


# ---- flat settings


def unflattened(config_class: type[Groups], flat: Flat) -> Groups:
    """{"group.field": value} -> a configuration; settings that are not given keep their defaults.

    Raises: ValueError for a setting of a technique that is off
    """
    given: dict[str, Flat] = {group.name: {} for group in fields(config_class)}
    for name, value in flat.items():
        group, _, item = name.partition(".")
        given[group][item] = value
    groups = {group.name: group.type(**given[group.name]) for group in fields(config_class)}
    for name, value in flat.items():
        group, setting = name.partition(".")[0], settings_of(config_class)[name]
        if not getattr(groups[group], "on", True) and value != setting.default:
            given_as = as_given(setting.flag, value)
            raise ValueError(f"{given_as} has no effect without --{group}: add it")
    return config_class(**groups)


def flattened(config: object) -> Flat:
    """A configuration -> {"group.field": value}."""
    return {f"{g}.{name}": v for g, group in asdict(config).items() for name, v in group.items()}


def as_given(written: str, value: Value) -> str:
    """Write a setting as on a command line: --seed 5, --ltd, --no-ltd; for None "no --kv-heads"."""
    if value is None:
        return f"no {written}"
    if isinstance(value, bool):
        return written if value else f"--no-{written.removeprefix('--')}"
    return f"{written} {value}"


def as_flags(flat: Flat) -> str:
    """Example: {"model.layers": 3, "model.tied": False} -> --layers 3 --no-tied"""
    known = settings_of(Settings)
    return " ".join(as_given(known[name].flag or name, value) for name, value in flat.items())
