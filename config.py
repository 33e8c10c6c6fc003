"""All settings of a run: groups of flags, defaults by size, refusals, and which techniques exist.

Settings stand beside the code that obeys them: a technique's in its module, the data's in data.py,
the model's in support/step/sizes.py, the optimizer's in support/step/optim.py, the run's in
support/base/settings.py. `Config` puts them together. A technique's first setting is its switch and
takes its name (`--ltd`), the others take it as prefix (`--ltd-start`). support/base/settings.py
makes flags of settings. No config files and no environment variables: a recipe is a shell line.

    python config.py                    # the table of flags, as the README shows it
"""

import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import curriculum
import difficulty
import ltd
import offload
import packing
import pseudo
from curriculum import CurriculumConfig
from data import DataConfig
from kernels.rotary import Rotary, Scaling
from ltd import LtdConfig
from model import TransformerConfig
from offload import OffloadConfig
from packing import PackConfig
from pseudo import PseudoConfig
from support.base.settings import (
    Flat,
    RunConfig,
    check_settings,
    flattened,
    parser_of,
    resumed,
    settings_of,
    table_of,
    unflattened,
)
from support.base.technique import is_on, refuse, technique, techniques_of, techniques_on
from support.rows.mixture import entries_of
from support.rows.ranking import LENGTHS
from support.run.folder import Started, newest_run, started_with
from support.step.optim import OptimConfig
from support.step.sizes import SIZES, ModelConfig, of_block, refusals_of_rows, with_defaults
from support.weights.initial import with_those_of_init


@dataclass(frozen=True)
class Config:
    """All settings of a run, and the registry of techniques: one exists because it has a line here.

    Its flags, --help, the README's table, refusals and resume follow from that line. Techniques
    that choose data (curriculum, pack) meet in plan.py. Those that act on blocks wrap each other's
    run_block in the order of their lines, the first one innermost.
    """

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    curriculum: CurriculumConfig = technique(
        CurriculumConfig,
        refusals=curriculum.refusals,
        metrics=curriculum.metrics,
        stages=curriculum.stages,
    )
    ltd: LtdConfig = technique(
        LtdConfig,
        with_defaults=ltd.with_defaults,
        refusals=ltd.refusals,
        run_block=ltd.run_block,
        tokens_by_layer=ltd.tokens_by_layer,
    )
    pack: PackConfig = technique(
        PackConfig,
        with_defaults=packing.with_defaults,
        refusals=packing.refusals,
    )
    pseudo: PseudoConfig = technique(
        PseudoConfig,
        with_defaults=pseudo.with_defaults,
        refusals=pseudo.refusals,
        run_block=pseudo.run_block,
        tokens_by_layer=pseudo.tokens_by_layer,
        blocks=pseudo.blocks,
        edit=pseudo.Sharing,
    )
    offload: OffloadConfig = technique(
        OffloadConfig,
        refusals=offload.refusals,
        edit=offload.edit,
        placement=offload.placement_for,
    )


def parse(argv: list[str]) -> Flat:
    """The settings given on the command line, {"group.field": value}; ValueError for a bad one."""
    given = vars(parser_of(Config, "train.py", "Pretrain a GPT or a BERT.").parse_args(argv))
    check_settings(Config, given)
    return given


def parse_or_resume(argv: list[str]) -> tuple[Config, Started | None]:
    """The settings of the run; if it exists already and is to go on, what it was started with."""
    given = parse(argv)
    which = given.pop("run.resume", None)
    if which == "auto" and "run.out" not in given:
        raise ValueError("--resume auto needs the folder of the run: add --out")
    folder = Path(given["run.out"]) if "run.out" in given else newest_run() if which else None
    if not which or (which == "auto" and not (folder / "config.json").exists()):
        return build(with_those_of_init(given), file=given.get("model.init", "")), None
    started = started_with(folder)
    if which == "auto":
        given.pop("model.init", None)  # of the command that began the run
    given["run.resume"] = "last" if which == "auto" else which
    check_settings(Config, started.config, f"{folder}/config.json")
    budget = started.config["optim.tokens"]
    larger = given.get("optim.tokens", budget)
    if larger < budget:
        raise ValueError(
            f"--tokens {larger} is less than the {budget} tokens of the run in {folder}: a run that"
            " goes on can be given more, not less"
        )
    saved = started.config | {"optim.tokens": larger}
    return build(resumed(Config, saved, given)), started


def build(settings: Flat, will_run: bool = True, file: str = "") -> Config:
    """Settings {"group.field": value} -> Config with every default filled in, checked.

    Args: will_run False to read the settings of a run that was made: combinations are not checked
                   again, and no function that they name is loaded
          file     that the settings are from, for messages
    """
    check_settings(Config, settings, file)
    config = unflattened(Config, with_defaults(settings))
    for name, entry in techniques_of(config).items():
        if entry.with_defaults and is_on(config, name):
            config = replace(config, **{name: entry.with_defaults(config)})
    if will_run:
        check(config)
    return config


def shared_by_ranks(config: Config) -> Flat:
    """The settings that all ranks must have alike, by their flags; paths may differ."""
    shared = flattened(config)
    for path in ("data.data", "data.tokenizer", "run.out"):
        del shared[path]
    return {settings_of(Config)[name].flag: value for name, value in shared.items()}


def samples_kind(config: Config) -> str:
    """What a sample is: a BERT's piece of a document, a piece to pack, or a row of the stream."""
    if config.model.model == "bert":
        return "pairs" if config.model.nsp else "bert"
    return "pieces" if config.pack.on else "rows"


def transformer_config(
    config: Config, vocab_size: int, positions: int | None = None
) -> TransformerConfig:
    """The model's dimensions. Learned positions reach as far as --size says, rotary --seq-len.

    Args: positions where published weights say how far theirs reach
    """
    m = config.model
    longest = config.data.seq_len if m.pos == "rope" else SIZES[m.size].seq_len
    return TransformerConfig(
        kind=m.model,
        layers=m.layers,
        heads=m.heads,
        width=m.width,
        mlp_width=m.mlp_width,
        seq_len=positions or longest,
        vocab_size=vocab_size,
        pos=m.pos,
        dropout=m.dropout,
        nsp=m.nsp,
        **of_block(m.block),
        kv_heads=m.kv_heads,
        qk_norm=m.qk_norm,
        rotary=Rotary(m.rope_theta, Scaling.parsed(m.rope_scaling) if m.rope_scaling else None),
        tied=m.tied,
    )


def check(config: Config) -> None:
    """Raise ValueError for a value or combination that cannot work, before any memory is taken."""
    model = config.model
    seq_len = config.data.seq_len
    optim = config.optim
    batch_tokens = optim.batch_tokens
    learned = model.pos == "learned" and model.init is None
    kind = samples_kind(config)
    metrics = [name for e in techniques_on(config) if e.metrics for name in e.metrics(config)]
    ranked = ",".join(name for name in metrics if name not in LENGTHS)
    mixes = bool(config.data.data and entries_of(config.data.data))
    instead = "and --data names a mixture: prepare its texts as one store, or"
    pairs = refusals_of_rows(model.size, seq_len, batch_tokens, learned)
    pairs += [
        (
            config.run.wandb and not can_import("wandb"),
            "--wandb needs its package: pip install -e '.[wandb]'",
        ),
        (
            mixes and bool(ranked),
            f"--curriculum {ranked} sorts one store's samples, {instead} use --curriculum seqlen",
        ),
        (
            model.pos == "learned" and (model.rope_theta != 10_000 or bool(model.rope_scaling)),
            "--rope-theta and --rope-scaling are for rotary positions: add --pos rope",
        ),
        (mixes and model.nsp, f"--nsp pairs the texts of one store, {instead} leave out --nsp"),
        (model.nsp and model.model != "bert", "--nsp is for a BERT: add --model bert"),
        (
            model.nsp and config.pack.batch != "rows" and batch_tokens < 2 * seq_len,
            f"--nsp pairs texts of a step's rows, and --batch-tokens {batch_tokens} is one row:"
            f" choose {2 * seq_len} or more",
        ),
        (
            model.size.startswith("bert") and model.model != "bert",
            f"--size {model.size} is a BERT: add --model bert, or choose a GPT's size",
        ),
        (
            batch_tokens > max(optim.tokens, SIZES[model.size].batch_tokens),
            f"--batch-tokens {batch_tokens} is more than the whole run: choose at most --tokens"
            f" {optim.tokens}",
        ),
        (
            optim.warmup_tokens >= optim.tokens,
            f"--warmup-tokens {optim.warmup_tokens} must be below --tokens {optim.tokens}",
        ),
    ]
    for entry in techniques_on(config):
        if entry.refusals:
            pairs += entry.refusals(config)
    refuse(pairs)
    if metrics:
        difficulty.check_metrics(metrics, seq_len, kind)
    transformer_config(config, vocab_size=1)  # raises for heads that do not divide the width


def can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    print(table_of(Config))
