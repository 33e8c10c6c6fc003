"""Initial weights from runs or published models (--init), and export of a run's weights.

--init names a run of train.py, one of its checkpoints, or published weights of GPT-2, BERT or
Llama: a state dict saved by torch.save or safetensors, a folder with several such files and their
index, or nanoGPT's ckpt.pt. All of these but a bare state dict also describe their model, so --init
needs no other flags. The model then computes the same function as the published one, and an
exported model computes the same function in any library that reads these layouts
(tests/test_weights.py). Nothing is downloaded, guessed, cropped or padded: an entry that does not
fit is an error.

    published (BERT)                                  ours
    encoder.layer.3.attention.self.query.weight       h.3.attn.c_attn.weight, rows 0 to C - 1
    encoder.layer.3.attention.output.LayerNorm.bias   h.3.ln_1.bias
    cls.predictions.bias                              mlm_bias

All names are in the tables GPT2_LAYOUT, BERT_LAYOUT and LLAMA_LAYOUT. Besides names, these differ:

    GPT-2   matrices are (in, out), ours (out, in)
    BERT    token type 0 is added to every position, because our rows are one segment
    Llama   rotary positions rotate a head's halves against each other, ours neighbours: rows
            0 1 2 3 of queries and keys in a head of width 4 become rows 0 2 1 3
    nanoGPT GPT-2's names, our order (out, in), and the exact GELU

The file is long but has one subject: import, export and a run's weights use the same tables of
names. In reading order: --init, a run's weights, published weights, their names, export,
safetensors.

    python -m support.weights export runs/a --out gpt2.safetensors
"""

import json
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import Tensor

from kernels.rotary import Scaling
from model import Transformer, TransformerConfig
from support import checkpoint
from support.clock import seed_of
from support.process import Parser, exit_cleanly
from support.run import ModelSize
from support.settings import (
    SIZES,
    Flat,
    ModelConfig,
    Settings,
    as_flags,
    flattened,
    usual_lr,
    with_defaults,
)
from support.store import atomic_folder, atomic_write, fingerprint, get_encoding, vocab_size

# ---- --init


# The settings that decide which model the weights fit.
OTHERS = ("dropout", "init")
MODEL_SETTINGS = [f"model.{item.name}" for item in fields(ModelConfig) if item.name not in OTHERS]


def with_settings_of_init(given: Flat) -> Flat:
    """Add to the given settings those that follow from the run or config.json that --init names.

    For a run, --init becomes the path of its checkpoint, so that it still means the same one if
    that run continues. For a published model, rows default to its context but at most LONGEST_ROW,
    and the learning rate to a tenth of that for a new model of its width. A run that itself started
    from --init passes its learning rate on.

    Raises: ValueError naming the flags that contradict --init
    """
    init = given.get("model.init")
    source = source_of(init)
    if source:
        saved = source.settings
        settings = {name: saved.get(name) for name in MODEL_SETTINGS}
        if given.get("model.nsp") is False:
            settings["model.nsp"] = False  # the weights for pairs can be left out
    else:
        settings = published_settings(init) if init else {}
    both = [name for name in MODEL_SETTINGS if name in settings and name in given]
    wrong = [name for name in both if given[name] != settings[name]]
    if wrong:
        was, asked = (as_flags({name: of[name] for name in wrong}) for of in (settings, given))
        raise ValueError(f"--init {init} is a model with {was}, not {asked}: leave that out")
    if source is None:
        settings |= given
        if init:
            settings.setdefault("optim.lr", usual_lr(settings) / 10)
        return settings
    settings["data.seq_len"] = saved["data.seq_len"]
    if "model.init" in saved:  # its weights may be published ones, whose size is none of ours
        settings |= {name: saved[name] for name in ("optim.lr", "optim.beta2")}
    if "data.data" not in given:  # a store has its tokenizer
        settings["data.tokenizer"] = saved["data.tokenizer"]
    return {**settings, **given, "model.init": str(source.path)}


def model_size(
    settings: Settings, encoding: tiktoken.Encoding, say: Callable[[str], None] = lambda line: None
) -> ModelSize:
    """Return the part of a new model's size that settings leave open; check it against --init.

    A published vocabulary fits a tokenizer if it has a row for each id that the model needs, and no
    more rows than pad that to a multiple of 64. Tokenizers of the same size cannot be told apart.

    Args:   say prints what the settings took from a published model
    Raises: ValueError if the tokenizer or --seq-len does not fit what --init names
    """
    init, seq_len = settings.model.init, settings.data.seq_len
    needed = vocab_size(encoding, settings.model.model)
    padded = -(-needed // 64) * 64  # matrix units work in tiles
    if not init:
        return ModelSize(padded)
    source = source_of(init)
    if source:
        size = source.size
        if source.tokenizer != fingerprint(encoding):
            name = source.settings["data.tokenizer"]
            other = f"was trained with tokenizer {name}, but the store has {encoding.name}"
            raise refusal(source.path, f"{other}: prepare a store with {name}")
    else:
        entries = read_published(init)
        embedding = next((entries[name] for name in EMBEDDINGS if name in entries), ())
        size = ModelSize(len(embedding), positions_of(entries))
        if not needed <= size.vocab_size <= padded:
            needs = f"--tokenizer {encoding.name} needs {needed:,} (padded: {padded:,})"
            remedy = "use the tokenizer of these weights (BERT's WordPiece is not supported)"
            raise refusal(init, f"has a vocabulary of {size.vocab_size:,}, but {needs}: {remedy}")
        lr, usual = settings.optim.lr, usual_lr(flattened(settings))
        rows = f"--seq-len {seq_len} (default: its context, at most {LONGEST_ROW})"
        say(f"--init {init}: {rows}; --lr {lr:g} (default: a tenth of {usual:g} for new weights)")
    if size.positions and seq_len > size.positions:
        raise ValueError(f"--seq-len {seq_len}: --init {init} has only {size.positions} positions")
    return size


def initial_model(
    config: TransformerConfig, settings: Settings, say: Callable[[str], None] = lambda line: None
) -> Transformer:
    """Make a model with the initial weights of this seed, or with those that --init names."""
    torch.manual_seed(seed_of(settings.run.seed, "weights"))
    model, init = config.build(), settings.model.init
    left_out: list[str] = []
    if source := source_of(init):
        weights = real_weights(checkpoint.load(source.path))
        left_out = [name for name in weights if PAIRS.fullmatch(name) and not config.nsp]
        model.load_state_dict({n: value for n, value in weights.items() if n not in left_out})
    elif init:
        left_out = load_published(model, init)
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


def source_of(init: str | None) -> CheckpointInfo | None:
    """Describe the run or checkpoint that --init names; None if it names anything else."""
    if not init or any((Path(init) / name).exists() for name in IN_A_FOLDER):
        return None
    return checkpoint_info(init)


def checkpoint_info(path: str | Path) -> CheckpointInfo | None:
    """Describe a checkpoint, or the newest one of a run; return None for any other file.

    Layers that share weights (--pseudo) count separately.

    Raises: ValueError for a folder without a checkpoint
    """
    path = Path(path)
    if path.is_dir():
        path = checkpoint.find(path, "last")
    try:
        state = checkpoint.outline(path)
    except Exception:  # torch.load raises half a dozen kinds
        state = {}
    if "clock" not in state:
        return None
    defaults = {f"model.{item.name}": item.default for item in fields(ModelConfig)}
    settings = with_defaults(defaults | state["config"])  # an old run may lack newer settings
    size = ModelSize(**state["model_size"])
    if settings["model.pos"] == "learned" and not size.positions:
        size = size._replace(positions=SIZES[settings["model.size"]].seq_len)
    settings["model.layers"] = len(running_layers(state))
    return CheckpointInfo(path, settings, size, tokenizer=state["tokenizer_fingerprint"])


def real_weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights in a training state, with names for every layer that runs.

    With --pseudo, layers that share weights get the same tensors, and layers that have not been
    added yet are skipped.

    Example: with owners (0, -1, 0), the state's h.0.* is returned as h.0.* and as h.1.*
    """
    weights = state["model"]
    real = {name: value for name, value in weights.items() if not name.startswith("h.")}
    for layer, owner in enumerate(running_layers(state)):
        for name, value in weights.items():
            if name.startswith(f"h.{owner}."):
                real[f"h.{layer}.{name.removeprefix(f'h.{owner}.')}"] = value
    return real


def running_layers(state: dict[str, Any]) -> list[int]:
    """List, for each layer that runs, the layer whose weights it uses."""
    if "pseudo" not in state:
        return list(range(state["config"]["model.layers"]))
    return [owner for owner in state["pseudo"]["owners"] if owner >= 0]


# ---- published weights


def load_published(model: Transformer, path: str | Path) -> list[str]:
    """Copy the file's weights into the model: all of them or, on any error, none.

    Returns:  the entries that the model does not use, without their prefix
    Raises:   ValueError naming --init and the entry that does not fit
    Cost:     reads the file; some weights are in memory twice until they have been copied
    Deviates: BERT's second token type is dropped; adding the first one to wpe rounds it once
    """
    entries = read_published(path)
    left_out: list[str] = []
    config = model.config
    layout = layout_of(config.kind, config.norm == "rmsnorm")
    hint = "its config.json, or without one the flags, must describe its model"
    views = published_entries(model.state_dict(), layout, config.qkv_heads, config.head_width)
    views = {PREFIX.sub("", entry): view for entry, view in views.items()}
    for entry, view in views.items():
        actual = tuple(entries[entry].shape) if entry in entries else "absent"
        if actual != view.shape:
            raise refusal(path, f"{entry} must be {tuple(view.shape)} but is {actual}: {hint}")
    for entry in sorted(entries.keys() - views.keys()):
        twins = [entries[first] for first in TIED.get(entry, ()) if first in views]
        if PAIRS.fullmatch(entry):
            left_out.append(entry)
        elif not twins or not torch.equal(entries[entry], twins[0]):
            raise refusal(path, f"{entry} has no place in this model: {hint}")
    if POSITIONS in views:
        entries[POSITIONS] = entries[POSITIONS].double() + entries[TOKEN_TYPES][0]
        left_out.append(f"{TOKEN_TYPES}[1]")
    for entry, view in views.items():
        value = entries[entry]
        if entry.endswith(HALVES):
            value = pairs_from_halves(value, config.head_width)
        view.copy_(value)
    return left_out


def published_settings(path: str | Path) -> Flat:
    """Read the settings that published weights imply, from their config.json or nanoGPT's file.

    Returns: {"model.layers": 16, ...}: the settings that decide the model, and as data.seq_len its
             context, at most LONGEST_ROW; for a bare state dict only data.seq_len, and only if its
             positions are learned
    Raises:  ValueError naming --init for a model that we cannot compute
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if args := saved_in(path).get("model_args"):
        like_gpt2 = {"model_type": "gpt2", "activation_function": "gelu"}
        config = like_gpt2 | {"n_positions": args["block_size"], **args}
    else:
        config = saved_in(folder / "config.json") if (folder / "config.json").exists() else {}
    if not config or "model_size" in config:  # no config.json, or that of a run
        positions = positions_of(read_published(path))
        return {"data.seq_len": min(positions, LONGEST_ROW)} if positions else {}
    kind = config.get("model_type")
    layout = next((one for one in LAYOUTS if one.model_type == kind), None)
    if layout is None:
        raise refusal(path, f"config.json has model_type {kind!a}, not gpt2, bert or llama")
    config |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    config = layout.absent | {key: value for key, value in config.items() if value is not None}
    settings = {ours: config[key] for ours, key in layout.keys.items() if key in config}
    head_width = settings["width"] // settings["heads"]
    for key, wanted in [*layout.fixed.items(), ("head_dim", head_width), ("bias", True)]:
        if config.get(key) not in (None, wanted):
            raise refusal(path, f"has {key} {config[key]}, but only {wanted} is supported")
    known = {*HARMLESS.split(), *layout.keys.values(), *layout.fixed}
    if unknown := ", ".join(sorted(config.keys() - known)):
        remedy = "remove those that do not change what the model computes"
        raise refusal(path, f"unknown keys in config.json: {unknown}; {remedy}")
    kind = config.get("rope_type", config.get("type", "default"))
    if kind != "default" and (kind != "llama3" or not config.keys() >= {*Scaling.KEYS}):
        raise refusal(path, f"scales rotary angles as {kind}: only llama3's scaling is supported")
    scaling = ":".join(f"{config[key]:g}" for key in Scaling.KEYS) if kind == "llama3" else None
    rows = min(settings.pop("seq_len"), LONGEST_ROW)
    settings = layout.settings | settings | {"rope_scaling": scaling}
    return {f"model.{name}": value for name, value in settings.items()} | {"data.seq_len": rows}


def positions_of(entries: dict[str, Tensor]) -> int | None:
    """Return the number of learned positions; None if positions are not learned."""
    return len(entries.get("wpe.weight", entries.get(POSITIONS, ()))) or None


def saved_in(path: str | Path) -> dict[str, Any]:
    """Load a file, or the published weights in a folder, without running any code from it."""
    path = Path(path)
    if path.is_dir():
        inside = (path / name for name in IN_A_FOLDER)
        path = next(filter(Path.exists, inside), path)
    with open(path, "rb") as file:
        is_safetensors = file.read(9)[8:] == b"{"
    try:
        if path.suffix == ".json":
            saved = json.loads(path.read_text())
            if files := {*saved.get("weight_map", {}).values()}:
                saved = {n: x for file in files for n, x in saved_in(path.parent / file).items()}
        elif is_safetensors:
            saved = load_file(path)
        else:
            saved = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(saved, dict):
            raise ValueError(f"it holds a {type(saved).__name__}")
    except Exception as error:  # torch.load raises half a dozen kinds
        why = f"cannot be loaded, {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise refusal(path, f"{why}; name a run or a published state dict") from None
    return saved


def read_published(path: str | Path) -> dict[str, Tensor]:
    """Read the published entries by their newer names, without prefix; transpose nanoGPT's."""
    saved = saved_in(path)
    is_nanogpt = "model_args" in saved
    entries = {}
    for key, value in (saved["model"] if is_nanogpt else saved).items():
        name = PREFIX.sub("", str(key)).replace(".gamma", ".weight").replace(".beta", ".bias")
        if BUFFERS.fullmatch(name):
            continue
        if name in entries or not (isinstance(value, Tensor) and value.is_floating_point()):
            raise refusal(path, f"{key} occurs twice or is not a floating-point tensor")
        to_transpose = is_nanogpt and name.startswith("h.") and value.dim() == 2
        entries[name] = value.T if to_transpose else value
    return entries


IN_A_FOLDER = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json")
IN_A_FOLDER += ("pytorch_model.bin", "ckpt.pt")


def refusal(path: str | Path, why: str) -> ValueError:
    return ValueError(f"--init {path}: {why}")


# ---- names in published layouts


class Layout(NamedTuple):
    """A published model: how its settings and its parameters are named, there and here."""

    model_type: str  # in its config.json
    architecture: str  # class name in transformers
    settings: Flat  # our settings that a model of this layout must have
    keys: dict[str, str]  # our setting -> its key in config.json
    absent: Flat  # the published defaults of keys that config.json may lack
    fixed: Flat  # more keys of config.json, each with the only value that we support
    modules: dict[str, list[str]]  # our module -> the published modules stacked in it
    layers: str  # prefix of names in a layer; ours is "h."
    base: str  # prefix of all names except those of heads


SIZE_KEYS = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "width": "hidden_size"}
SIZE_KEYS |= {"mlp_width": "intermediate_size", "seq_len": "max_position_embeddings"}
LLAMA_KEYS = {"kv_heads": "num_key_value_heads", "rope_theta": "rope_theta"}
LLAMA_KEYS |= {"tied": "tie_word_embeddings"}
LLAMA_FIXED = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False}
LLAMA_FIXED |= {"mlp_bias": False, "partial_rotary_factor": 1.0, "rope_interleaved": False}
GPT2_SIZES = ("n_layer", "n_head", "n_embd", "n_inner", "n_positions")
GPT2_KEYS = {"activation": "activation_function", "tied": "tie_word_embeddings"}
GPT2_FIXED = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True}
GPT2_FIXED |= {"scale_attn_by_inverse_layer_idx": False}
BERT_FIXED = {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2}
BERT_FIXED |= {"position_embedding_type": "absolute", "is_decoder": False}
BERT_FIXED |= {"tie_word_embeddings": True}
GPT2_MODULES = "wte wpe ln_f lm_head ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"

GPT2_LAYOUT = Layout(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    settings={"model": "gpt", "block": "gpt2", "pos": "learned", "qk_norm": False},
    keys=GPT2_KEYS | dict(zip(SIZE_KEYS, GPT2_SIZES, strict=True)),
    absent={"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024},
    fixed=GPT2_FIXED,
    modules={name: [name] for name in GPT2_MODULES.split()},
    layers="h.",
    base="transformer.",
)
BERT_LAYOUT = Layout(
    model_type="bert",
    architecture="BertForMaskedLM",
    settings=GPT2_LAYOUT.settings | {"model": "bert", "tied": True},
    keys=SIZE_KEYS,
    absent=dict(zip(SIZE_KEYS.values(), (12, 12, 768, 3072, 512), strict=True)),
    fixed=BERT_FIXED,
    modules={
        "wte": ["embeddings.word_embeddings"],
        "wpe": ["embeddings.position_embeddings"],
        "ln_f": ["embeddings.LayerNorm"],
        "attn.c_attn": [f"attention.self.{name}" for name in ("query", "key", "value")],
        "attn.c_proj": ["attention.output.dense"],
        "ln_1": ["attention.output.LayerNorm"],
        "mlp.c_fc": ["intermediate.dense"],
        "mlp.c_proj": ["output.dense"],
        "ln_2": ["output.LayerNorm"],
        "mlm": ["cls.predictions.transform.dense"],
        "mlm_ln": ["cls.predictions.transform.LayerNorm"],
        "mlm_bias": ["cls.predictions.bias"],
        "pooler": ["pooler.dense"],
        "nsp": ["cls.seq_relationship"],
    },
    layers="encoder.layer.",
    base="bert.",
)
LLAMA_LAYOUT = Layout(
    model_type="llama",
    architecture="LlamaForCausalLM",
    settings={"model": "gpt", "block": "llama", "pos": "rope", "qk_norm": False},
    keys=SIZE_KEYS | LLAMA_KEYS,
    absent=dict(zip(SIZE_KEYS.values(), (32, 32, 4096, 11008, 2048), strict=True))
    | {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    fixed=LLAMA_FIXED,
    modules={
        "wte": ["embed_tokens"],
        "ln_f": ["norm"],
        "lm_head": ["lm_head"],
        "ln_1": ["input_layernorm"],
        "ln_2": ["post_attention_layernorm"],
        "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attn.c_proj": ["self_attn.o_proj"],
        "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.c_proj": ["mlp.down_proj"],
    },
    layers="layers.",
    base="model.",
)
LAYOUTS = (GPT2_LAYOUT, BERT_LAYOUT, LLAMA_LAYOUT)
# Keys of config.json, from all versions of transformers and from nanoGPT, that may have any value:
# they do not change what our model computes (names, training, generation, other heads, memory),
# they show in the shapes, or `published_settings` checks them itself (rotary angles).
HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
_name_or_path _num_labels add_cross_attention architectures attention_dropout
attention_probs_dropout_prob attn_implementation attn_pdrop bad_words_ids begin_suppress_tokens
bias block_size bos_token_id chunk_size_feed_forward classifier_dropout
cross_attention_hidden_size decoder_start_token_id directionality diversity_penalty do_sample
dropout dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty factor finetuning_task forced_bos_token_id forced_eos_token_id
gradient_checkpointing head_dim hidden_dropout_prob high_freq_factor id2label initializer_range
is_decoder is_encoder_decoder is_llama_config label2id length_penalty low_freq_factor max_length
max_sequence_length min_length model_type n_ctx name_or_path no_repeat_ngram_size
num_beam_groups num_beams num_labels num_return_sequences original_max_position_embeddings
output_attentions output_hidden_states output_past output_scores pad_token_id pooler_fc_size
pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
predict_special_tokens prefix pretraining_tp problem_type pruned_heads remove_invalid_values
reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict return_dict_in_generate
rope_parameters rope_scaling rope_type sep_token_id summary_activation summary_first_dropout
summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
torchscript transformers.js_config transformers_version type typical_p unsloth_fixed
unsloth_version use_bfloat16 use_cache use_return_dict vocab_size xla_device
"""
PREFIX = re.compile(r"^((module|_orig_mod)\.)*((transformer|bert|model)\.)?")
HEADS = ("cls.", "lm_head.")  # entries without the prefix `base`
# Causal masks, angles and positions, which older versions saved although they are not learned.
BUFFERS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq|embeddings\.position_ids")
PAIRS = re.compile(r"(pooler|nsp|cls\.seq_relationship)\..+")  # unused without --nsp
HALVES = ("q_proj.weight", "k_proj.weight")  # Llama's, where rotary positions pair a head's halves
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
LONGEST_ROW = max(size.seq_len for size in SIZES.values())  # unless --seq-len asks for more
POSITIONS = "embeddings.position_embeddings.weight"
EMBEDDINGS = ("wte.weight", "embed_tokens.weight", "embeddings.word_embeddings.weight")
TIED = {  # second name of a tied tensor -> its first name, which depends on the layout
    "lm_head.weight": ["wte.weight", "embed_tokens.weight"],
    "cls.predictions.decoder.weight": ["embeddings.word_embeddings.weight"],
    "cls.predictions.decoder.bias": ["cls.predictions.bias"],
}


def layout_of(kind: str, is_llama: bool) -> Layout:
    return BERT_LAYOUT if kind == "bert" else LLAMA_LAYOUT if is_llama else GPT2_LAYOUT


def published_names(name: str, layout: Layout) -> list[str]:
    """List the published entries that are stacked, in this order, in one of our parameters.

    Example:  published_names("h.3.ln_1.bias", BERT_LAYOUT) is
              ["encoder.layer.3.attention.output.LayerNorm.bias"]
    Raises:   ValueError for a parameter that the layout lacks
    """
    layer, module, leaf = re.fullmatch(r"(h\.\d+\.)?(.+?)(\.weight|\.bias)?", name).groups("")
    if module not in layout.modules:
        raise ValueError(f"--init: {name} has no place in the layout of {layout.model_type}")
    layer = layer.replace("h.", layout.layers)
    return [f"{layer}{published}{leaf}" for published in layout.modules[module]]


def is_transposed(name: str, layout: Layout, parameter: Tensor) -> bool:
    """Whether the file holds the transpose of our matrix: GPT-2 multiplies from the right."""
    return layout is GPT2_LAYOUT and name.startswith("h.") and parameter.dim() == 2


def halves_from_pairs(x: Tensor, D: int) -> Tensor:
    """Reorder rows of queries or keys (H D, ...): the even rows of each head, then the odd ones."""
    return x.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).reshape(x.shape)


def pairs_from_halves(x: Tensor, D: int) -> Tensor:
    """Undo `halves_from_pairs`."""
    return x.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).reshape(x.shape)


def published_entries(
    weights: dict[str, Tensor], layout: Layout, heads: Sequence[int], D: int
) -> dict[str, Tensor]:
    """Map published names to views of our parameters, to copy values into or out of.

    Args:    heads the number of heads of queries, keys and values; each is D wide
    Example: BERT's h.0.attn.c_attn.bias (3 C,) becomes query, key and value of (C,) each
    """
    entries: dict[str, Tensor] = {}
    for name, value in weights.items():
        names = published_names(name, layout)
        if is_transposed(name, layout, value):
            parts = [value.T]
        elif len(names) == 3:
            parts = value.split([number * D for number in heads])
        else:
            parts = value.chunk(len(names))
        entries.update(zip(names, parts, strict=True))
    if layout is BERT_LAYOUT:
        entries[TOKEN_TYPES] = torch.zeros(2, weights["wte.weight"].shape[1], dtype=torch.float32)
    return {e if e.startswith(HEADS) else layout.base + e: x for e, x in entries.items()}


# ---- export


def export(source: str | Path, out: Path) -> dict[str, object]:
    """Write the weights of a run or checkpoint in a published layout.

    `out` is a .pt or .safetensors file, or a folder with config.json, from which transformers loads
    the model. To use it on text, you need the tokenizer of the run's store. Values are copied
    unchanged, including the rows that pad the embedding.

    Returns: the config.json that transformers needs
    Raises:  ValueError, before anything is written, if the source cannot be read or has no
             published layout, or if `out` exists
    """
    if out.suffix not in ("", ".safetensors", ".pt"):
        raise ValueError(f"--out {out}: end its name in .pt or .safetensors, or name a folder")
    if out.exists() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out} exists, or its folder does not: name another")
    run = checkpoint_info(source)
    if run is None:
        raise ValueError(f"{source} is neither the folder of a run nor a checkpoint")
    s = {name.removeprefix("model."): value for name, value in run.settings.items()}
    layout = layout_of(s["model"], s["block"] == "llama")
    needs = layout.settings | ({} if layout is LLAMA_LAYOUT else {"kv_heads": s["heads"]})
    lacks = {f"model.{name}": value for name, value in needs.items() if s[name] != value}
    if lacks:
        closest = f"{layout.model_type}'s needs {as_flags(lacks)}"
        raise ValueError(f"{run.path} fits no published layout: {closest}")
    positions = layout.keys["seq_len"]
    head = "BertForPreTraining" if s["nsp"] else layout.architecture
    config = {"model_type": layout.model_type, "architectures": [head], **layout.fixed}
    config |= {theirs: s[ours] for ours, theirs in layout.keys.items() if ours in s}
    config["vocab_size"] = run.size.vocab_size
    config[positions] = run.size.positions or s["data.seq_len"]
    if scaling := s.get("rope_scaling") and Scaling.parsed(s["rope_scaling"]):
        config["rope_scaling"] = scaling.as_published()
        config[positions] = max(config[positions], int(scaling.factor * scaling.original))
    heads = (s["heads"], s["kv_heads"], s["kv_heads"])
    weights = real_weights(checkpoint.load(run.path))
    D = s["width"] // s["heads"]
    entries = published_entries(weights, layout, heads, D)
    for entry, view in entries.items():
        ordered = halves_from_pairs(view, D) if entry.endswith(HALVES) else view
        entries[entry] = ordered.contiguous()
    if not out.suffix:
        end = get_encoding(s["data.tokenizer"]).eot_token
        config |= {"bos_token_id": end, "eos_token_id": end}
        with atomic_folder(out) as folder, (folder / "model.safetensors").open("wb") as file:
            (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
            save_file(file, entries)
        return config
    with atomic_write(out) as file:  # tied tensors are written once: readers tie them by name
        if out.suffix == ".safetensors":
            save_file(file, entries)
        else:
            torch.save(entries, file)
    return config


# ---- safetensors: named tensors, and no code that could run
#
#    byte 0       8                        8 + N                              end
#    +------------+------------------------+----------------------------------+
#    | N, u64     | N bytes of JSON, UTF-8 | the tensors' bytes, one after    |
#    | little-end | (padded with spaces)   | the other, without gaps          |
#    +------------+------------------------+----------------------------------+
#
# The JSON is {"wte.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}.
# Offsets count from byte 8 + N; tensors are stored row by row. "__metadata__" is a dict of strings.
# Format: github.com/huggingface/safetensors, README.md. Floats of 8 and 4 bits are not supported.

DTYPES = {  # in the order in which the safetensors library writes them, wide ones first
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_file(path: str | Path) -> dict[str, Tensor]:
    """Memory-map the tensors of a file: they are read from disk when they are used.

    A truncated file or an unsupported dtype raises an error of Python or torch.
    """
    data = np.memmap(path, np.uint8, "c")  # writing to a tensor changes memory, never the file
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = torch.from_numpy(data[start + begin : start + end])
        tensors[name] = raw.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def save_file(out: BinaryIO, tensors: dict[str, Tensor]) -> None:
    """Write tensors in the order of the safetensors library: by dtype, then by name."""
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: ([*dtypes].index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = dtypes[tensors[name].dtype], list(tensors[name].shape)
        begin, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().flatten()
        out.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="python -m support.weights", description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=["export"], help="write weights in a published layout")
    parser.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help=".pt, .safetensors or new folder")
    args = parser.parse_args(argv)
    config = export(args.run, args.out)
    if args.out.suffix:
        print(f"transformers reads it with this config.json beside it: {json.dumps(config)}")


if __name__ == "__main__":
    exit_cleanly(main)
