"""All settings of a run: groups of flags, defaults that depend on other flags, and refusals.

A technique's settings are defined in its module, those that every run has in support/settings.py,
which also turns settings into flags. `Config` combines the groups. There are no files of settings
to write and no environment variables: a recipe is a command line. `--layers 4 --ltd`, step by step:

    parse      {"model.layers": 4, "ltd.on": True}        the flags that were given, flat
    build      with_defaults: heads 4, width 128, ...     depend on --size
               ltd.resolved: start 128, share 0.9         depend on --seq-len
    Config     settings.ltd.start == 128                  complete and frozen, for all other code

A technique's settings are completed in `build` and checked there or in `check`, in the lines with
its `.on`; the budget of --offload is checked in train.py, which knows the device's memory. The head
of a technique's file lists where else it acts.
"""

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import tiktoken

import analyze
import curriculum
import ltd
import packing
import pseudo
from bert import BertConfig, BertTask, SpecialIds
from curriculum import LENGTHS, CurriculumConfig
from data import GptTask
from kernels.rotary import Rotary, Scaling
from ltd import LtdConfig
from mixture import entries_of
from model import TransformerConfig
from offload import OffloadConfig
from packing import PackConfig
from pseudo import PseudoConfig
from support import settings as flags
from support.run import Started, check_out, newest_run, started_with
from support.settings import BLOCKS, SIZES, Flat, Settings, check_limits, flattened, settings_of
from support.weights import with_settings_of_init


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run: the groups that every run has, and one for each technique."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    ltd: LtdConfig = field(default_factory=LtdConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    pseudo: PseudoConfig = field(default_factory=PseudoConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)


def parse(argv: list[str]) -> Flat:
    """Read the command line as {"group.field": value}, only what it gives; ValueError if bad."""
    return flags.parse(Config, argv, "train.py", "Pretrain a GPT or a BERT.")


def parse_or_resume(argv: list[str]) -> tuple[Config, Started | None]:
    """Read the settings of a run, and with --resume also what it was started with."""
    given = parse(argv)
    which = given.pop("run.resume", None)
    if which == "auto":
        if "run.out" not in given:
            raise ValueError("--resume auto needs the folder of the run: add --out")
        which = None
        if (Path(given["run.out"]) / "config.json").exists():
            which = "last"
            given.pop("model.init", None)  # it only matters to the command that started the run
    if which is None:
        if not given.get("run.dry_run"):
            check_out(given.get("run.out"))
        return build(with_settings_of_init(given), file=given.get("model.init", "")), None
    started = started_with(Path(given["run.out"]) if "run.out" in given else newest_run())
    given["run.resume"] = which
    budget = started.config["optim.tokens"]
    larger = given.get("optim.tokens", budget)
    if larger < budget:
        raise ValueError(f"--tokens {larger} is less than the {budget} of {started.folder}")
    saved = started.config | {"optim.tokens": larger}
    return build(resumed(saved, given), file=f"{started.folder}/config.json"), started


def resumed(saved: Flat, given: Flat) -> Flat:
    """Return the settings of a resumed run: the saved ones, and the free ones that are given.

    Raises: ValueError if a setting that is not free is given another value
    """
    for name, value in given.items():
        setting = settings_of(Config)[name]
        if not setting.free and saved.get(name) != value:
            before = flags.as_given(setting.flag, saved.get(name))
            now = flags.as_given(setting.flag, value)
            raise ValueError(f"{now} differs from {before}, with which the run was started")
    # when a technique is switched off now, drop its other settings too
    return {n: v for n, v in (saved | given).items() if n in given or not is_off(n, given)}


def build(flat: Flat, will_run: bool = True, file: str = "") -> Config:
    """Turn flat settings {"group.field": value} into a checked Config with every default.

    Args: will_run False to read the settings of a past run: combinations are not checked again
          file     where the settings come from, for messages
    """
    try:
        return built(flat, will_run, file)
    except ValueError as error:
        if not file or file in str(error):
            raise
        raise ValueError(f"{error} (with the settings of {file})") from None


def built(flat: Flat, will_run: bool, file: str) -> Config:
    """Do what `build` says; errors name `file` only where one of its entries is wrong by itself."""
    # An old run also has the settings of techniques that a fork has deleted since then.
    flat = {n: v for n, v in flat.items() if n in settings_of(Config) or not is_off(n, flat)}
    check_limits(Config, flat, file)
    settings = flags.unflattened(Config, flags.with_defaults(flat))
    model, seq_len = settings.model, settings.data.seq_len
    is_bert = model.model == "bert"
    if settings.ltd.on:
        settings = replace(settings, ltd=ltd.resolved(settings.ltd, seq_len, model.layers))
    if settings.pack.on:
        settings = replace(settings, pack=packing.resolved(settings.pack, seq_len, is_bert))
    if settings.pseudo.on:
        shadow = pseudo.resolved(settings.pseudo, model.layers, model.init)
        settings = replace(settings, pseudo=shadow)
    if will_run:
        check(settings)
    return settings


def is_off(name: str, flat: Flat) -> bool:
    """Whether a setting belongs to a technique that these settings switch off."""
    group = name.partition(".")[0]
    return flat.get(f"{group}.on") is False or flat.get(f"{group}.metric") == "none"


def shared_by_ranks(settings: Config) -> Flat:
    """Return the settings that must be the same on all ranks, {flag: value}.

    Paths may differ; what the files hold is compared when they are read.
    """
    known, paths = settings_of(Config), ("data.data", "data.tokenizer", "model.init", "run.out")
    shared = {name: value for name, value in flattened(settings).items() if name not in paths}
    return {known[name].flag or name: value for name, value in shared.items()}


def samples_kind(settings: Config) -> str:
    """Tell what a sample is: a piece of a document (for a BERT, or to pack), or a row of text."""
    if settings.model.model == "bert":
        return "pairs" if settings.model.nsp else "bert"
    return "pieces" if settings.pack.on else "rows"


Task = GptTask | BertTask


def task_of(settings: Config, encoding: tiktoken.Encoding) -> Task:
    """Choose what the model learns: how rows become a Batch, and what their targets are."""
    per_piece = settings.optim.loss_per == "document"
    if settings.model.model == "bert":
        return BertTask(SpecialIds.of(encoding), settings.model.nsp, per_piece)
    return GptTask(per_piece)


def transformer_config(
    settings: Settings, vocab_size: int, positions: int | None = None
) -> TransformerConfig:
    """Return the dimensions of the model, with as many learned positions as --size says.

    Args: positions how many learned positions published weights have; None without such weights
    """
    m, is_bert = settings.model, settings.model.model == "bert"
    longest = SIZES[m.size].seq_len if m.pos == "learned" else settings.data.seq_len
    dimensions = dict(
        layers=m.layers,
        heads=m.heads,
        width=m.width,
        mlp_width=m.mlp_width,
        seq_len=positions or longest,
        vocab_size=vocab_size,
        pos=m.pos,
        dropout=m.dropout,
        **BLOCKS[m.block],
        kv_heads=m.kv_heads,
        qk_norm=m.qk_norm,
        rotary=Rotary(m.rope_theta, Scaling.parsed(m.rope_scaling) if m.rope_scaling else None),
        tied=m.tied,
        activation=m.activation,
    )
    return BertConfig(nsp=m.nsp, **dimensions) if is_bert else TransformerConfig(**dimensions)


def check(settings: Config) -> None:
    """Raise ValueError for a value or combination that cannot work, before allocating memory."""
    model, optim, seq_len = settings.model, settings.optim, settings.data.seq_len
    size, batch_tokens, tokens = SIZES[model.size], optim.batch_tokens, optim.tokens
    if seq_len > size.seq_len and model.pos == "learned" and model.init is None:
        longest = f"the {size.seq_len} positions of --size {model.size}"
        raise ValueError(f"--seq-len {seq_len} is more than {longest}: choose less, or --pos rope")
    if batch_tokens % seq_len:
        raise ValueError(f"--batch-tokens {batch_tokens} is no multiple of --seq-len {seq_len}")
    if batch_tokens > (most := max(tokens, size.batch_tokens)):
        raise ValueError(f"--batch-tokens {batch_tokens} must be at most {most}")
    if optim.warmup_tokens >= tokens:
        raise ValueError(f"--warmup-tokens {optim.warmup_tokens} must be below --tokens {tokens}")
    if model.size.startswith("bert") and model.model != "bert":
        raise ValueError(f"--size {model.size} is a BERT: add --model bert, or choose a GPT's size")
    if settings.run.wandb and find_spec("wandb") is None:
        raise ValueError("--wandb needs the package wandb: pip install -e '.[wandb]'")
    if settings.run.fsdp and settings.offload.on:
        raise ValueError("--fsdp shards what --offload would move: leave out one of them")
    is_mixture = bool(settings.data.data and entries_of(settings.data.data))
    if model.nsp:
        if model.model != "bert":
            raise ValueError("--nsp needs a BERT: add --model bert")
        if is_mixture:
            raise ValueError("--nsp pairs the texts of one store, but --data names several")
        if settings.pack.batch != "rows" and batch_tokens < 2 * seq_len:
            raise ValueError(f"--nsp pairs rows, but --batch-tokens {batch_tokens} is one row")
    if settings.curriculum.on:
        metrics = settings.curriculum.metrics
        if is_mixture and not {*metrics} <= {*LENGTHS}:
            names = ",".join(metrics)
            raise ValueError(f"--curriculum {names} sorts one store, but --data names several")
        curriculum.parse_metrics(settings.curriculum, seq_len, settings.pack.on)
        analyze.check_metrics(metrics, seq_len, samples_kind(settings))
    transformer_config(settings, vocab_size=1)  # raises for heads that do not divide the width
