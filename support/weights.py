"""Initial weights from runs or published models (--init), and export of a run's weights.

--init names a run of train.py, one of its checkpoints, or published weights of GPT-2, BERT or
Llama: a state dict saved by torch.save or safetensors, a folder with several such files and their
index, or nanoGPT's ckpt.pt (support/published.py). All of these but a bare state dict also describe
their model, so --init needs no other flags. The model then computes the same function as the
published one, and an exported model computes the same function in any library that reads these
layouts (tests/test_weights.py).

    python -m support.weights export runs/a --out exported
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken
import torch
from torch import Tensor

from kernels.rotary import Scaling
from model import Transformer, TransformerConfig
from support import checkpoint, published
from support.clock import seed_of
from support.process import Parser, exit_cleanly
from support.run import ModelSize
from support.settings import SIZES, Flat, Settings, as_flags, flattened, usual_lr, with_defaults
from support.store import atomic_folder
from support.tokenizer import fingerprint, get_encoding, tokenizer_in, vocab_size

# ---- --init

DEFAULTS = flattened(Settings())
# The settings that decide which model the weights fit.
MODEL_SETTINGS = {n for n in DEFAULTS if n.startswith("model.")} - {"model.dropout", "model.init"}


def with_settings_of_init(given: Flat) -> Flat:
    """Add to the given settings those that follow from what --init names.

    From a run: its model, row length and tokenizer; --init becomes the path of its checkpoint, so
    that it still means the same one if that run continues. From a published model: its dimensions,
    its context as the row length (at most LONGEST_ROW), and a tenth of a new model's learning rate.
    """
    init = given.get("model.init")
    if not init:
        return given
    source = source_of(init)
    implied = settings_of_run(source.settings, given) if source else published.settings_in(init)
    wrong = [n for n in given if n in MODEL_SETTINGS and given[n] != implied.get(n, given[n])]
    if wrong:
        actual = as_flags({name: implied[name] for name in wrong})
        asked = as_flags({name: given[name] for name in wrong})
        raise ValueError(f"--init {init} is a model with {actual}, not {asked}: leave that out")
    settings = implied | given
    if source:
        return settings | {"model.init": str(source.path)}
    return {"optim.lr": usual_lr(settings) / 10} | settings


def settings_of_run(saved: Flat, given: Flat) -> Flat:
    """Return the settings that a new run takes from those of the run that --init names."""
    settings = {name: saved.get(name) for name in (*MODEL_SETTINGS, "data.seq_len")}
    if given.get("model.nsp") is False:
        settings["model.nsp"] = False  # the weights for pairs can be left out
    if "model.init" in saved:  # its weights may be published ones, whose size is none of ours
        settings |= {name: saved[name] for name in ("optim.lr", "optim.beta2")}
    if "data.data" not in given:  # a store has its tokenizer
        settings["data.tokenizer"] = saved["data.tokenizer"]
    return settings


def model_size(settings: Settings, encoding: tiktoken.Encoding) -> ModelSize:
    """Return the part of a new model's size that settings leave open; check it against --init.

    A published vocabulary fits a tokenizer if it has a row for each id that the model needs, and no
    more rows than pad that to a multiple of 64. Tokenizers of the same size cannot be told apart.
    """
    init, seq_len = settings.model.init, settings.data.seq_len
    needed = vocab_size(encoding, settings.model.model)
    padded = -(-needed // 64) * 64  # matrix units work in tiles
    if not init:
        return ModelSize(padded)
    source = source_of(init)
    size = source.size if source else published.size_in(init)
    if source and source.tokenizer != fingerprint(encoding):
        trained = f"trained with tokenizer {source.settings['data.tokenizer']}"
        raise ValueError(f"--init {init} was {trained}, but the store has {encoding.name}")
    if not source and not needed <= size.vocab_size <= padded:
        needs = f"--tokenizer {encoding.name} needs {needed:,} (padded: {padded:,})"
        raise ValueError(f"--init {init}: has a vocabulary of {size.vocab_size:,}, but {needs}")
    end, is_gpt2 = encoding.eot_token, settings.model.block == "gpt2"  # a Llama may have several
    if not source and is_gpt2 and published.config_in(init).get("eos_token_id", end) != end:
        raise ValueError(f"--init {init}: its eos_token_id is not that of {encoding.name}")
    if size.positions and seq_len > size.positions:
        raise ValueError(f"--seq-len {seq_len}: --init {init} has only {size.positions} positions")
    return size


def initial_model(
    config: TransformerConfig,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    kept: Collection[int] | None = None,
) -> Transformer:
    """Make a model with the initial weights of this seed, or with those that --init names.

    Args: kept as for `Transformer`
    """
    torch.manual_seed(seed_of(settings.run.seed, "weights"))
    model, init = config.build(kept), settings.model.init
    left_out: list[str] = []
    if source := source_of(init):
        weights = real_weights(checkpoint.load(source.path))
        left_out = [name for name in weights if published.PAIRS.fullmatch(name) and not config.nsp]
        used = {name: value for name, value in weights.items() if name not in left_out}
        checkpoint.check_fit(model, used)
        model.load_state_dict(used)
    elif init:
        left_out = published.load_into(model, init)
    for name in left_out:
        say(f"--init: {name} is not used")
    return model


# ---- the weights of a run


class CheckpointInfo(NamedTuple):
    """A checkpoint's description of its model, without the tensors."""

    path: Path
    settings: Flat  # of the run; model.layers counts the layers that run
    size: ModelSize  # including the positions, if they are learned
    tokenizer: str  # its fingerprint


def source_of(init: str | Path | None) -> CheckpointInfo | None:
    """Describe a checkpoint, or the newest one of a run; None for anything else.

    Layers that share weights (--pseudo) count separately.
    """
    if not init or any((Path(init) / name).exists() for name in published.IN_A_FOLDER):
        return None
    if Path(init).is_dir() and not checkpoint.steps_in(Path(init)):
        raise ValueError(f"{init} holds neither a checkpoint nor published weights")
    path = checkpoint.find(init, "last") if Path(init).is_dir() else Path(init)
    try:
        state = checkpoint.outline(path)
    except (ValueError, OSError):
        if Path(init).is_dir():
            raise
        return None
    settings = with_defaults(DEFAULTS | state["config"])  # an old run may lack newer settings
    size = ModelSize(**state["model_size"])
    if settings["model.pos"] == "learned" and not size.positions:
        size = size._replace(positions=SIZES[settings["model.size"]].seq_len)
    settings["model.layers"] = len(running_layers(state))
    settings["data.tokenizer"] = tokenizer_in(path.parent, settings["data.tokenizer"])
    return CheckpointInfo(path, settings, size, tokenizer=state["tokenizer_fingerprint"])


def real_weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights in a training state, with names for every layer that runs.

    Example: with --pseudo and owners (0, -1, 0), h.0.* is returned as h.0.* and as h.1.*
    """
    weights = state["model"]
    real = {name: value for name, value in weights.items() if not name.startswith("h.")}
    for layer, owner in enumerate(running_layers(state)):
        for name, value in weights.items():
            if name.startswith(f"h.{owner}."):
                real[name.replace(f"h.{owner}.", f"h.{layer}.", 1)] = value
    return real


def running_layers(state: dict[str, Any]) -> list[int]:
    """List, for each layer that runs, the layer whose weights it uses."""
    if "pseudo" not in state:
        return list(range(state["config"]["model.layers"]))
    return [owner for owner in state["pseudo"]["owners"] if owner >= 0]


# ---- export


def export(run: Path, out: Path) -> None:
    """Write the weights of a run or checkpoint in a published layout, into a new folder.

    transformers loads the model from it, and --init does. To use it on text, you need the tokenizer
    of the run's store. Values are copied unchanged, including the rows that pad the embedding.
    """
    if out.exists():
        raise ValueError(f"--out {out}: exists already: name a new folder")
    source = source_of(run)
    if source is None:
        raise ValueError(f"{run} is neither the folder of a run nor a checkpoint")
    s = {name.removeprefix("model."): value for name, value in source.settings.items()}
    layout = published.layout_of(s["model"], is_llama=s["block"] == "llama")
    if lacks := missing_for_export(source.settings):
        raise ValueError(f"{source.path}: a {layout.model_type} export needs {as_flags(lacks)}")
    weights = real_weights(checkpoint.load(source.path))
    tensors = published.exported(weights, layout, s["width"] // s["heads"])
    with atomic_folder(out) as folder, (folder / "model.safetensors").open("wb") as file:
        config = exported_config(source, s, layout)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        published.save_file(file, tensors)  # tied tensors are written once: readers tie them


def missing_for_export(settings: Flat) -> Flat:
    """Return the settings with which a run like this could be exported, as far as it has others."""
    s = {name.removeprefix("model."): value for name, value in settings.items()}
    layout = published.layout_of(s["model"], is_llama=s["block"] == "llama")
    needed = {"kv_heads": s["heads"]} | layout.settings
    return {f"model.{n}": x for n, x in needed.items() if n not in layout.keys and s[n] != x}


def exported_config(source: CheckpointInfo, s: Flat, layout: published.Layout) -> dict[str, object]:
    """Return the config.json that describes a run's model; `s` are its settings by short names."""
    end = get_encoding(s["data.tokenizer"]).eot_token
    positions = source.size.positions or s["data.seq_len"]
    config = {
        **layout.fixed,
        **{key: s[ours] for ours, key in layout.keys.items() if ours in s},
        "model_type": layout.model_type,
        "architectures": ["BertForPreTraining" if s["nsp"] else layout.architecture],
        "vocab_size": source.size.vocab_size,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    if s.get("rope_scaling"):
        scaling = Scaling.parsed(s["rope_scaling"])
        config["rope_scaling"] = scaling.as_published()
        positions = max(positions, int(scaling.factor * scaling.original))
    return config | {layout.keys["seq_len"]: positions}


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="python -m support.weights", description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=["export"], help="write weights in a published layout")
    parser.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    args = parser.parse_args(argv)
    export(args.run, args.out)
    print(f"wrote {args.out}: config.json and model.safetensors")


if __name__ == "__main__":
    exit_cleanly(main)
