"""A model before its first step: how large it is, and which weights it begins with.

--init names published weights (support/weights/published.py), or a run of train.py or one
checkpoint of it, whose weights alone are taken: the recipe and the store may be others. Such a run
says how large its model is, how long its rows are and which tokenizer it has, so none of this needs
to be given again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiktoken
import torch

from model import Transformer, TransformerConfig
from support.base.rng import seed_of
from support.base.settings import as_given
from support.run.folder import ModelSize, started_with
from support.text.tokenizer import fingerprint, get_encoding, vocab_size
from support.weights import published
from support.weights.trained import checkpoint_of, trained, weights_of

OF_THE_MODEL = ("model", "size", "layers", "heads", "width", "mlp_width", "pos", "nsp")
PAIRS = ("pooler.", "nsp.")  # of no use without --nsp


def with_those_of_init(given: dict[str, Any]) -> dict[str, Any]:
    """The settings given, and those that follow from the run that --init names.

    --init then is the checkpoint itself, so that it stays the same if that run goes on.

    Raises: ValueError naming the flags that differ from that run, or --init
    """
    init = given.get("model.init")
    path = of_init(init)
    if path is None:
        if init and given.get("model.pos") == "rope":
            raise ValueError(
                "--init and --pos rope exclude each other: published weights have learned positions"
            )
        return given
    saved = named(lambda: trained(path)).settings
    taken = {f"model.{name}": saved[f"model.{name}"] for name in OF_THE_MODEL}
    if given.get("model.nsp") is False:
        taken["model.nsp"] = False  # what a model of pairs has besides can be left out
    if others := [name for name in taken if given.get(name, taken[name]) != taken[name]]:
        raise ValueError(
            f"--init {path} was trained with {in_words(taken, others)}, not"
            f" {in_words(given, others)}: leave that out, or name another"
        )
    taken["data.seq_len"] = saved["data.seq_len"]
    if "data.data" not in given:  # which has a tokenizer
        taken["data.tokenizer"] = saved["data.tokenizer"]
    return {**taken, **given, "model.init": str(path)}


def in_words(settings: dict[str, Any], names: list[str]) -> str:
    flags = ("--" + name.partition(".")[2].replace("_", "-") for name in names)
    return " ".join(as_given(*pair) for pair in zip(flags, map(settings.get, names), strict=True))


def of_init(init: str | None) -> Path | None:
    """The checkpoint of train.py that --init names, if it names one."""
    return named(lambda: checkpoint_of(init)) if init else None


def named(read: Callable[[], Any]) -> Any:
    """What `read` returns; its errors, which begin with a path, name the flag."""
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"--init {error}") from error


def model_size(settings: Any, encoding: tiktoken.Encoding, folder: Path | None) -> ModelSize:
    """What settings do not say of a model; the folder of a run that goes on knows it."""
    init, needed = settings.model.init, vocab_size(encoding, settings.model.model)
    if folder:
        return ModelSize(**started_with(folder)["model_size"])
    if path := of_init(init):
        return size_of_trained(path, encoding, settings.data.seq_len)
    if init:
        return ModelSize(*published.size_for(init, needed, encoding.name, settings.data.seq_len))
    return ModelSize(-(-needed // 64) * 64)  # matrix units work in tiles


def size_of_trained(path: Path, encoding: tiktoken.Encoding, seq_len: int) -> ModelSize:
    """Its size, if tokenizer and rows suit it."""
    of = named(lambda: trained(path))
    name = of.settings["data.tokenizer"]
    if (of.tokenizer or fingerprint(get_encoding(name))) != fingerprint(encoding):
        raise ValueError(
            f"--init {path} was trained with tokenizer {name}, and the store has"
            f" {encoding.name}: name a store that was prepared with {name}"
        )
    if of.size.positions and seq_len > of.size.positions:
        raise ValueError(
            f"--init {path} has {of.size.positions} positions, --seq-len {seq_len} is more"
        )
    return of.size


def initial_model(
    config: TransformerConfig, settings: Any, say: Callable[[str], None] = lambda line: None
) -> Transformer:
    """A model with the weights that every run with this seed starts from, or those of --init."""
    torch.manual_seed(seed_of(settings.run.seed, "weights"))
    model, init = Transformer(config), settings.model.init
    if path := of_init(init):
        left_out = load_trained(model, path)
        say(f"--init: the weights of {path}")
    else:
        left_out = published.load_published(model, init) if init else []
    for name in left_out:
        say(f"--init left out {name}")
    return model


def load_trained(model: Transformer, path: Path) -> list[str]:
    """Copy a checkpoint's weights into the model.

    Returns: the names of what the model has no use for
    Raises:  ValueError naming --init for a damaged checkpoint
    """
    weights = named(lambda: weights_of(path))
    left_out = [name for name in weights if name.startswith(PAIRS) and not model.config.nsp]
    model.load_state_dict({name: weights[name] for name in weights if name not in left_out})
    return left_out
