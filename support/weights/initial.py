"""A model before its first step: how large it is, and which weights it begins with.

--init names published weights (support/weights/published.py), or a run of train.py or one of its
checkpoints. Such a run's weights alone are taken: the recipe and the store may be others. It also
tells how large the model is, how long rows are and which tokenizer it has, so none of this has to
be given again.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import tiktoken
import torch

from model import Transformer, TransformerConfig
from support import checkpoint
from support.clock import seed_of
from support.run import ModelSize, Settings
from support.settings import Flat, as_flags
from support.step.sizes import ModelConfig
from support.text.tokenizer import fingerprint, vocab_size
from support.weights import published
from support.weights.trained import Trained, checkpoint_of, trained, weights_of

# Settings of the model that its weights are for
OF_THE_MODEL = [
    f"model.{item.name}" for item in fields(ModelConfig) if item.name not in ("dropout", "init")
]
PAIRS = ("pooler.", "nsp.")  # weights that nothing uses without --nsp


def with_those_of_init(given: Flat) -> Flat:
    """The settings given, and those that follow from the run or the config.json that --init names.

    --init becomes the checkpoint itself, so that it stays the same if that run goes on.

    Raises: ValueError naming the flags that differ from that run, or --init
    """
    init = given.get("model.init")
    source = source_of(init)
    if source is None:
        taken = published.settings_of(init) if init else {}
        check_against(taken, given, init)
        return taken | given
    saved, path = source.settings, source.path
    taken = {name: saved.get(name) for name in OF_THE_MODEL}
    if given.get("model.nsp") is False:
        taken["model.nsp"] = False  # the weights for pairs can be left out
    check_against(taken, given, path)
    taken["data.seq_len"] = saved["data.seq_len"]
    if "data.data" not in given:  # a store has its tokenizer
        taken["data.tokenizer"] = saved["data.tokenizer"]
    return {**taken, **given, "model.init": str(path)}


def check_against(taken: Flat, given: Flat, path: str | Path | None) -> None:
    """Refuse flags that differ from what the weights of --init are for."""
    others = [name for name in taken if given.get(name, taken[name]) != taken[name]]
    if others:
        was, asked = (as_flags({name: of[name] for name in others}) for of in (taken, given))
        raise ValueError(f"--init {path} is a model of {was}, not {asked}: leave that out")


def source_of(init: str | None) -> Trained | None:
    """What --init names, if it is a run or a checkpoint of train.py."""
    is_theirs = init and any((Path(init) / name).exists() for name in published.IN_A_FOLDER)
    path = naming_init(checkpoint_of, init) if init and not is_theirs else None
    return naming_init(trained, path) if path else None


def naming_init(read: Callable, path: str | Path) -> Any:
    """Read; errors, which begin with the path, name the flag as well."""
    try:
        return read(path)
    except ValueError as error:
        raise ValueError(f"--init {error}") from error


def model_size(settings: Settings, encoding: tiktoken.Encoding) -> ModelSize:
    """What settings do not say of a model that begins.

    Raises: ValueError if the tokenizer or the rows do not suit what --init names
    """
    init, seq_len = settings.model.init, settings.data.seq_len
    needed = vocab_size(encoding, settings.model.model)
    if not init:
        return ModelSize(-(-needed // 64) * 64)  # matrix units work in tiles
    source = source_of(init)
    size = source.size if source else published.size_for(init, needed, encoding.name)
    if source and source.tokenizer != fingerprint(encoding):
        name = source.settings["data.tokenizer"]
        raise ValueError(
            f"--init {source.path} was trained with tokenizer {name}, and the store has"
            f" {encoding.name}: prepare one with {name}"
        )
    if size.positions and seq_len > size.positions:
        positions = f"the {size.positions} positions of --init {init}"
        raise ValueError(f"--seq-len {seq_len} is above {positions}")
    return size


def initial_model(
    config: TransformerConfig, settings: Settings, say: Callable[[str], None] = lambda line: None
) -> Transformer:
    """A model with the weights that every run with this seed starts from, or those of --init."""
    torch.manual_seed(seed_of(settings.run.seed, "weights"))
    model, init = Transformer(config), settings.model.init
    left_out: list[str] = []
    if source := source_of(init):
        weights = naming_init(weights_of, source.path)
        left_out = [name for name in weights if name.startswith(PAIRS) and not config.nsp]
        model.load_state_dict({n: value for n, value in weights.items() if n not in left_out})
        say(f"--init: the weights of {source.path}")
    elif init:
        left_out = published.load_published(model, init)
    if init:
        try:
            checkpoint.check_finite(model.state_dict())
        except ValueError as error:
            raise ValueError(f"--init {init}: {error}") from None
    for name in left_out:
        say(f"--init left out {name}")
    return model
