"""The weights that a model begins with, and a run's weights for other libraries.

--init names a run of train.py or one of its checkpoints, or published weights of GPT-2, BERT or
Llama: a state dict of torch.save or safetensors, a folder with several files of either and their
index, or nanoGPT's ckpt.pt. All but a bare state dict also say which model they are for, so
that --init needs no other flags; a config.json with a key that is not known here is refused. The
model then computes the published function, and an exported run's model computes its own in any
library that reads these layouts (tests/test_weights.py). Our parameters are on the right (after
h.N. in a layer), the published entries on the left:

    GPT-2  c_attn c_proj c_fc of attn and mlp, (in, out)   same name, turned to (out, in)
           everything else                                 same name
    BERT   embeddings.word_ | position_embeddings          wte | wpe + token type 0
           embeddings.LayerNorm                            ln_f
           attention.self.query, key, value                attn.c_attn, in this order
           attention.output.dense | LayerNorm              attn.c_proj | ln_1
           intermediate.dense, output.dense | LayerNorm    mlp.c_fc, mlp.c_proj | ln_2
           cls.predictions.transform.dense | LayerNorm     mlm | mlm_ln
           cls.predictions.bias                            mlm_bias
           pooler.dense, cls.seq_relationship              pooler, nsp (with --nsp)
    Llama  model.embed_tokens | model.norm                 wte | ln_f
           input_layernorm | post_attention_layernorm      ln_1 | ln_2
           self_attn.q_proj, k_proj, v_proj | o_proj       attn.c_attn, in this order | attn.c_proj
           mlp.gate_proj, up_proj | down_proj              mlp.c_fc, in this order | mlp.c_proj
           lm_head (GPT-2's too)                           lm_head (with --no-tied)

So h.3.ln_1.bias (C,) is BERT's encoder.layer.3.attention.output.LayerNorm.bias, and one head of 4
in a Llama's queries has its rows 0 1 2 3 in the file as 0 2 1 3 here: files turn halves of a head,
the model turns neighbours. nanoGPT has GPT-2's names, our order of (out, in), and the exact GELU.

The default block with --pos rope has no published layout. BERT's token type 0 is added to every
position, because a row here is one segment, and an export has token types of zero. Nothing is
downloaded, guessed, cropped or padded: an entry that does not fit is an error. The file is long,
but one subject: in, out and a run's own weights go through the same tables of names.

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
from support.run import ModelSize, Settings
from support.runtime import ROOT, Parser, exit_cleanly
from support.settings import Flat, as_flags, flattened
from support.sizes import SIZES, ModelConfig, usual_lr, with_defaults
from support.store import atomic_folder, atomic_write, fingerprint, get_encoding, vocab_size

# ---- the layouts


class Layout(NamedTuple):
    """A published model: its settings by our names and by theirs, and the names of its entries."""

    model_type: str  # in its config.json
    architecture: str
    settings: Flat  # of ours: those of another model do not fit
    keys: dict[str, str]  # ours, and theirs in its config.json
    absent: Flat  # what a key means that its config.json lacks, where that is not our default
    fixed: Flat  # what else its config.json has to say
    modules: dict[str, list[str]]  # ours, and theirs that make it up when they are stacked
    layers: str  # before the name of what is in a layer: "h." here
    base: str  # before all names but those of heads


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
# Keys of a config.json, in all versions of transformers, that change nothing of what a model here
# computes, or show in the shapes: names, training, generation, other heads, memory, rotary angles
# (which `published_settings` looks at), and those of nanoGPT.
HARMLESS = {*(ROOT / "support" / "harmless_keys.txt").read_text().split()}
PREFIX = re.compile(r"^((module|_orig_mod)\.)*((transformer|bert|model)\.)?")
HEADS = ("cls.", "lm_head.")  # entries that stand beside the base
# causal masks, angles and positions: saved by older versions, but not learned
BUFFERS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq|embeddings\.position_ids")
PAIRS = re.compile(r"(pooler|nsp|cls\.seq_relationship)\..+")  # nothing uses them without --nsp
HALVES = ("q_proj.weight", "k_proj.weight")  # Llama's: its rotary angles turn halves of a head
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
LONGEST_ROW = max(size.seq_len for size in SIZES.values())  # unless --seq-len asks for more
POSITIONS = "embeddings.position_embeddings.weight"
EMBEDDINGS = ("wte.weight", "embed_tokens.weight", "embeddings.word_embeddings.weight")
TIED = {  # second names of one tensor, and the first, by layout
    "lm_head.weight": ["wte.weight", "embed_tokens.weight"],
    "cls.predictions.decoder.weight": ["embeddings.word_embeddings.weight"],
    "cls.predictions.decoder.bias": ["cls.predictions.bias"],
}


def layout_of(kind: str, is_llama: bool) -> Layout:
    return BERT_LAYOUT if kind == "bert" else LLAMA_LAYOUT if is_llama else GPT2_LAYOUT


def published_names(name: str, layout: Layout) -> list[str]:
    """The published entries that make one parameter of ours, stacked in this order.

    Example:  published_names("h.3.ln_1.bias", BERT_LAYOUT) is
              ["encoder.layer.3.attention.output.LayerNorm.bias"]
    Raises:   ValueError for a parameter that the layout has not
    """
    layer, module, leaf = re.fullmatch(r"(h\.\d+\.)?(.+?)(\.weight|\.bias)?", name).groups("")
    if module not in layout.modules:
        raise ValueError(f"--init: {name} has no place in the layout of {layout.model_type}")
    layer = layer.replace("h.", layout.layers)
    return [f"{layer}{published}{leaf}" for published in layout.modules[module]]


def is_turned(name: str, layout: Layout, parameter: Tensor) -> bool:
    """Whether the file has the transpose of our matrix: GPT-2 multiplies from the right."""
    return layout is GPT2_LAYOUT and name.startswith("h.") and parameter.dim() == 2


def halves_from_pairs(x: Tensor, D: int) -> Tensor:
    """Rows of queries or keys (H D, ...): of each head's D the even ones first, then the odd."""
    return x.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).reshape(x.shape)


def pairs_from_halves(x: Tensor, D: int) -> Tensor:
    return x.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).reshape(x.shape)


def published_entries(
    weights: dict[str, Tensor], layout: Layout, heads: Sequence[int], D: int
) -> dict[str, Tensor]:
    """Our parameters under their published names, as views: one copies out of them or into them.

    Args:    heads of queries, keys and values, D wide each
    Example: BERT's h.0.attn.c_attn.bias (3 C,) becomes query, key and value of (C,) each
    """
    entries: dict[str, Tensor] = {}
    for name, value in weights.items():
        names = published_names(name, layout)
        if is_turned(name, layout, value):
            parts = [value.T]
        elif len(names) == 3:
            parts = value.split([number * D for number in heads])
        else:
            parts = value.chunk(len(names))
        entries.update(zip(names, parts, strict=True))
    if layout is BERT_LAYOUT:
        entries[TOKEN_TYPES] = torch.zeros(2, weights["wte.weight"].shape[1], dtype=torch.float32)
    return {e if e.startswith(HEADS) else layout.base + e: x for e, x in entries.items()}


# ---- published weights, in


def load_published(model: Transformer, path: str | Path) -> list[str]:
    """Copy the file's weights into the model: all of them or, on any error, none.

    Returns:  the entries that the model does not use, without their prefix
    Raises:   ValueError naming --init and the entry that does not fit
    Cost:     reads the file; some weights are in memory twice until they are copied
    Deviates: BERT's second token type is dropped; adding the first one rounds wpe once
    """
    entries = read_published(path)
    left_out: list[str] = []
    config = model.config
    layout = layout_of(config.kind, config.norm == "rmsnorm")
    own_head = "a head of its own: tie_word_embeddings false, --no-tied"
    hint = f"config.json, or flags without one, have to be its model's ({own_head})"
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


def published_settings(path: str | Path, ignored: str | None = None) -> Flat:
    """What follows from the config.json beside weights, or from nanoGPT's file.

    Args:    ignored keys of config.json, with commas between them, that need not be known
    Returns: {"model.layers": 16, ...}, what decides the model, and as data.seq_len its context, at
             most LONGEST_ROW; of a bare state dict the latter alone, if its positions are learned
    Raises:  ValueError naming --init for a model that is not computed here
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if args := saved_in(path).get("model_args"):
        like_gpt2 = {"model_type": "gpt2", "activation_function": "gelu"}
        said = like_gpt2 | {"n_positions": args["block_size"], **args}
    else:
        said = saved_in(folder / "config.json") if (folder / "config.json").exists() else {}
    if not said or "model_size" in said:  # as in a run's
        positions = positions_of(read_published(path))
        return {"data.seq_len": min(positions, LONGEST_ROW)} if positions else {}
    kind = said.get("model_type")
    layout = next((one for one in LAYOUTS if one.model_type == kind), None)
    if layout is None:
        raise refusal(path, f"is of type {kind!a}, not gpt2, bert or llama (its config.json)")
    said |= said.get("rope_scaling") or said.get("rope_parameters") or {}
    said = layout.absent | {key: value for key, value in said.items() if value is not None}
    settings = {ours: said[key] for ours, key in layout.keys.items() if key in said}
    head_width = settings["width"] // settings["heads"]
    for key, wanted in [*layout.fixed.items(), ("head_dim", head_width), ("bias", True)]:
        if said.get(key) not in (None, wanted):
            raise refusal(path, f"has {key} {said[key]}, and only {wanted} is computed here")
    known = HARMLESS | {*layout.keys.values(), *layout.fixed, *(ignored or "").split(",")}
    if unknown := ",".join(sorted(said.keys() - known)):
        remedy = f"if that changes nothing of what the model computes, add --init-ignore {unknown}"
        raise refusal(path, f"its config has {unknown}, not known here: {remedy}")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind != "default" and (kind != "llama3" or not said.keys() >= {*Scaling.KEYS}):
        computed = f"only llama3 with {', '.join(Scaling.KEYS)} is computed here"
        raise refusal(path, f"scales rotary angles as {kind}, and {computed}")
    scaling = ":".join(f"{said[key]:g}" for key in Scaling.KEYS) if kind == "llama3" else None
    rows = min(settings.pop("seq_len"), LONGEST_ROW)
    settings = layout.settings | settings | {"rope_scaling": scaling}
    return {f"model.{name}": value for name, value in settings.items()} | {"data.seq_len": rows}


def positions_of(entries: dict[str, Tensor]) -> int | None:
    """How many positions are learned."""
    return len(entries.get("wpe.weight", entries.get(POSITIONS, ()))) or None


def saved_in(path: str | Path) -> dict[str, Any]:
    """What a file holds, or the files of published weights in a folder. No code in it runs."""
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
        raise refusal(path, f"{why}; give a run, or a state dict as it was published") from None
    return saved


def read_published(path: str | Path) -> dict[str, Tensor]:
    """The entries under their newer names, without prefix, and nanoGPT's turned as GPT-2's are."""
    saved = saved_in(path)
    is_nanogpt = "model_args" in saved
    entries = {}
    for key, value in (saved["model"] if is_nanogpt else saved).items():
        name = PREFIX.sub("", str(key)).replace(".gamma", ".weight").replace(".beta", ".bias")
        if BUFFERS.fullmatch(name):
            continue
        if name in entries or not (isinstance(value, Tensor) and value.is_floating_point()):
            raise refusal(path, f"{key} is there twice, or no tensor of floating-point numbers")
        to_turn = is_nanogpt and name.startswith("h.") and value.dim() == 2
        entries[name] = value.T if to_turn else value
    return entries


IN_A_FOLDER = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json")
IN_A_FOLDER += ("pytorch_model.bin", "ckpt.pt")


def refusal(path: str | Path, why: str) -> ValueError:
    return ValueError(f"--init {path}: {why}")


# ---- safetensors: named tensors, and nothing in the file that could run
#
#    byte 0       8                        8 + N                              end
#    +------------+------------------------+----------------------------------+
#    | N, u64     | N bytes of JSON, UTF-8 | the tensors' bytes, each after   |
#    | little-end | (spaces at its end)    | the other, without gaps          |
#    +------------+------------------------+----------------------------------+
#
# The JSON is {"wte.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}:
# offsets count from byte 8 + N, tensors are row after row. "__metadata__" is a dict of strings.
# Format: github.com/huggingface/safetensors, README.md. Floats of 8 and 4 bits are not read.

DTYPES = {  # widest first, in the order in which the format's own library writes them
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
    """Map the tensors of a file: they are read from the disk where they are used.

    A file that is cut short, or a dtype that is not read, ends in an error of Python or torch.
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
    """Write a file's bytes, in the order of the format's own library: by dtype, then by name."""
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


# ---- the weights of a run


class Trained(NamedTuple):
    """What a checkpoint says of its model, without the tensors."""

    path: Path
    settings: Flat  # of the run; model.layers are those that run
    size: ModelSize  # with the positions, where they are learned
    tokenizer: str  # its fingerprint


def trained(path: str | Path) -> Trained | None:
    """Read the outline of a checkpoint, or of the newest one of a run; None for any other file.

    Layers that share weights (--pseudo) count one by one.

    Raises: ValueError for a folder without a checkpoint
    """
    path = Path(path)
    if path.is_dir() and not (path / checkpoint.REST).exists():
        path = checkpoint.find(path, "last")
    try:
        state = checkpoint.outline(path)
    except Exception:  # torch.load raises half a dozen kinds
        state = {}
    if "clock" not in state:
        return None
    defaults = {f"model.{item.name}": item.default for item in fields(ModelConfig)}
    settings = with_defaults(defaults | state["config"])  # a run may be from before a setting
    size = ModelSize(**state["model_size"])
    if settings["model.pos"] == "learned" and not size.positions:
        size = size._replace(positions=SIZES[settings["model.size"]].seq_len)
    settings["model.layers"] = len(running_layers(state))
    return Trained(path, settings, size, tokenizer=state["tokenizer_fingerprint"])


def real_weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """The weights in a training state, under a name for every layer that runs.

    With --pseudo, layers that share weights get the same tensors, and layers that are not there yet
    are left out.

    Example: owners (0, -1, 0): h.0.* of the state under h.0.* and h.1.*
    """
    weights = state["model"]
    real = {name: value for name, value in weights.items() if not name.startswith("h.")}
    for layer, owner in enumerate(running_layers(state)):
        for name, value in weights.items():
            if name.startswith(f"h.{owner}."):
                real[f"h.{layer}.{name.removeprefix(f'h.{owner}.')}"] = value
    return real


def running_layers(state: dict[str, Any]) -> list[int]:
    """For each layer that runs, the layer whose weights it uses."""
    if "pseudo" not in state:
        return list(range(state["config"]["model.layers"]))
    return [owner for owner in state["pseudo"]["owners"] if owner >= 0]


# ---- --init


def source_of(init: str | None) -> Trained | None:
    """What --init names, if it is a run or a checkpoint of train.py."""
    if not init or any((Path(init) / name).exists() for name in IN_A_FOLDER):
        return None
    return trained(init)


# Settings of the model that its weights are for
OTHERS = ("dropout", "init", "init_ignore")
MODEL_SETTINGS = [f"model.{item.name}" for item in fields(ModelConfig) if item.name not in OTHERS]


def with_settings_of_init(given: Flat) -> Flat:
    """The settings given, and those that follow from the run or the config.json that --init names.

    Of a run, --init becomes the checkpoint itself, so that it stays the same if that run goes on.
    Rows of a published model have its context, but at most LONGEST_ROW; its learning rate is a
    tenth of what a new model of its width has. A run that began with --init hands it on.

    Raises: ValueError naming the flags that differ from that run, or --init
    """
    init, ignored = given.get("model.init"), given.get("model.init_ignore")
    source = source_of(init)
    if source:
        saved = source.settings
        settings = {name: saved.get(name) for name in MODEL_SETTINGS}
        if given.get("model.nsp") is False:
            settings["model.nsp"] = False  # the weights for pairs can be left out
    else:
        settings = published_settings(init, ignored) if init else {}
    both = [name for name in MODEL_SETTINGS if name in settings and name in given]
    wrong = [name for name in both if given[name] != settings[name]]
    if wrong:
        was, asked = (as_flags({name: of[name] for name in wrong}) for of in (settings, given))
        raise ValueError(f"--init {init} is a model of {was}, not {asked}: leave that out")
    if source is None:
        settings |= given
        if init:
            settings.setdefault("optim.lr", usual_lr(settings) / 10)
        return settings
    settings["data.seq_len"] = saved["data.seq_len"]
    if "model.init" in saved:  # its weights may be published ones, of none of our sizes
        settings |= {name: saved[name] for name in ("optim.lr", "optim.beta2")}
    if "data.data" not in given:  # a store has its tokenizer
        settings["data.tokenizer"] = saved["data.tokenizer"]
    return {**settings, **given, "model.init": str(source.path)}


def model_size(
    settings: Settings, encoding: tiktoken.Encoding, say: Callable[[str], None] = lambda line: None
) -> ModelSize:
    """What settings do not say of a model that begins; of a published one, what they took from it.

    A published vocabulary suits a tokenizer if it has a row for each id that the model needs, and
    no more than fill it up to a multiple of 64. Two of one size cannot be told apart.

    Raises: ValueError if the tokenizer or the rows do not suit what --init names
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
            other = f"was trained with tokenizer {name}, and the store has {encoding.name}"
            raise refusal(source.path, f"{other}: prepare one with {name}")
    else:
        entries = read_published(init)
        embedding = next((entries[name] for name in EMBEDDINGS if name in entries), ())
        size = ModelSize(len(embedding), positions_of(entries))
        if not needed <= size.vocab_size <= padded:
            needs = f"--tokenizer {encoding.name} needs {needed:,} (padded: {padded:,})"
            remedy = "prepare the text with that of these weights (never BERT's WordPiece)"
            raise refusal(init, f"has a vocabulary of {size.vocab_size:,}, and {needs}: {remedy}")
        lr, usual = settings.optim.lr, usual_lr(flattened(settings))
        rows = f"--seq-len {seq_len}, by default its context but at most {LONGEST_ROW}"
        say(f"--init {init}: {rows}; --lr {lr:g}, by default a tenth of {usual:g} for new weights")
    if size.positions and seq_len > size.positions:
        raise ValueError(f"--seq-len {seq_len}: --init {init} has {size.positions} positions")
    return size


def initial_model(
    config: TransformerConfig, settings: Settings, say: Callable[[str], None] = lambda line: None
) -> Transformer:
    """A model with the weights that every run with this seed starts from, or those of --init."""
    torch.manual_seed(seed_of(settings.run.seed, "weights"))
    model, init = Transformer(config), settings.model.init
    left_out: list[str] = []
    if source := source_of(init):
        weights = real_weights(checkpoint.load(source.path))
        left_out = [name for name in weights if PAIRS.fullmatch(name) and not config.nsp]
        model.load_state_dict({n: value for n, value in weights.items() if n not in left_out})
    elif init:
        left_out = load_published(model, init)
    for name in left_out:
        say(f"--init left out {name}")
    return model


# ---- export


def export(source: str | Path, out: Path) -> dict[str, object]:
    """Write the weights of a run, or of one checkpoint: as a .pt or .safetensors file, or as a
    folder with config.json, from which transformers loads the model; texts need the tokenizer that
    the run's store was made with.

    Values are those of the checkpoint, including the rows that fill up the embedding.

    Returns: what config.json has to hold for transformers
    Raises:  ValueError for what cannot be read, has no published layout, or is there already;
             nothing is written then
    """
    if out.suffix not in ("", ".safetensors", ".pt"):
        raise ValueError(f"--out {out}: end its name in .pt or .safetensors, or name a folder")
    if out.exists() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out} exists, or its folder does not: name another")
    run = trained(source)
    if run is None:
        raise ValueError(f"{source} is neither the folder of a run nor one of its checkpoints")
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
        turned = halves_from_pairs(view, D) if entry.endswith(HALVES) else view
        entries[entry] = turned.contiguous()
    if not out.suffix:
        end = get_encoding(s["data.tokenizer"]).eot_token
        config |= {"bos_token_id": end, "eos_token_id": end}
        with atomic_folder(out) as folder, (folder / "model.safetensors").open("wb") as file:
            (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
            save_file(file, entries)
        return config
    with atomic_write(out) as file:  # neither has tied tensors twice: readers tie by name
        if out.suffix == ".safetensors":
            save_file(file, entries)
        else:
            torch.save(entries, file)
    return config


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="python -m support.weights", description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=["export"], help="write a run's weights as published ones")
    parser.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="new folder, or .pt, .safetensors")
    args = parser.parse_args(argv)
    config = export(args.run, args.out)
    if args.out.suffix:
        print(f"transformers reads it with this config.json beside it: {json.dumps(config)}")


if __name__ == "__main__":
    exit_cleanly(main)
