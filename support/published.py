"""Published weights of GPT-2, BERT, Llama and nanoGPT: their files, settings and names.

    published (BERT)                                  ours
    encoder.layer.3.attention.self.query.weight       h.3.attn.c_attn.weight, rows 0 to C - 1
    encoder.layer.3.attention.output.LayerNorm.bias   h.3.ln_1.bias
    cls.predictions.bias                              mlm_bias

All names are in the tables GPT2_LAYOUT, BERT_LAYOUT and LLAMA_LAYOUT. Besides names, these differ:

    GPT-2   matrices are (in, out), ours (out, in)
    BERT    token type 0 is added to every position, because our rows are one segment
    Llama   rotary positions rotate a head's halves against each other, ours neighbours: rows
            0 1 2 3 of queries and keys in a head of width 4 become rows 0 2 1 3
    nanoGPT GPT-2's names, our order (out, in), and the exact GELU; biases that it lacks are zeros

Nothing is downloaded, guessed, cropped or padded: an entry that does not fit is an error. In
reading order: settings, weights, layouts, safetensors. support/weights.py uses them for --init and
export.
"""

import json
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.rotary import Scaling
from model import Transformer
from support.process import one_line
from support.run import ModelSize
from support.settings import SIZES, Flat, Settings, check_limits

LONGEST_ROW = max(size.seq_len for size in SIZES.values())  # unless --seq-len asks for more


# ---- the settings of published weights


def settings_in(path: str | Path) -> Flat:
    """Read the settings that published weights imply, from their config.json or nanoGPT's file.

    Returns: {"model.layers": 16, ...}: the settings that decide the model, and as data.seq_len its
             context, at most LONGEST_ROW; for a bare state dict at most data.seq_len
    Raises:  ValueError naming --init for a model that we cannot compute
    """
    config = config_in(path)
    if not config:
        if "embed_tokens.weight" in entries_in(path):
            raise ValueError(f"--init {path}: a Llama needs its config.json beside the weights")
        positions = size_in(path).positions
        return {"data.seq_len": min(positions, LONGEST_ROW)} if positions else {}
    kind = str(config.get("model_type"))
    if kind not in LAYOUTS:
        raise ValueError(f"--init {path}: has model_type {kind!a}, not gpt2, bert or llama")
    layout = LAYOUTS[kind]
    if layout is LLAMA_LAYOUT:
        config = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False} | config  # its defaults
    settings = layout.settings | layout.absent
    settings |= {ours: config[key] for ours, key in layout.keys.items() if key in config}
    flat = {f"model.{name}": value for name, value in settings.items() if name != "seq_len"}
    check_limits(Settings, flat | {"data.seq_len": settings["seq_len"]}, f"--init {path}")
    if settings["width"] % settings["heads"]:
        raise ValueError(f"--init {path}: {layout.keys['heads']} must divide the width")
    head_width = settings["width"] // settings["heads"]
    size = size_in(path)
    in_weights = {"vocab_size": size.vocab_size, layout.keys["seq_len"]: size.positions}
    fixed = layout.fixed | {key: rows for key, rows in in_weights.items() if rows}
    for key, supported in {**fixed, "head_dim": head_width, "bias": True}.items():
        if config.get(key, supported) != supported:
            raise ValueError(f"--init {path}: {key} must be {supported}, not {config[key]!r}")
    known = {*layout.keys.values(), *layout.fixed, *Scaling.KEYS}
    unknown = [key for key in sorted(config.keys() - known) if not re.fullmatch(HARMLESS, key)]
    if unknown:
        raise ValueError(f"--init {path}: unknown keys in config.json: {', '.join(unknown)}")
    scaling = config.get("rope_type", config.get("type", "default"))
    if scaling == "llama3" and config.keys() >= {*Scaling.KEYS}:
        settings["rope_scaling"] = ":".join(f"{config[key]}" for key in Scaling.KEYS)
    elif scaling != "default":
        raise ValueError(f"--init {path}: rope_type {scaling}: only a complete llama3 is supported")
    rows = min(settings.pop("seq_len"), LONGEST_ROW)
    return {f"model.{name}": value for name, value in settings.items()} | {"data.seq_len": rows}


def config_in(path: str | Path) -> dict[str, Any]:
    """Read config.json, without keys that are null and with the entries for rotary angles on top.

    Returns: for nanoGPT's file what its config.json would say; {} if there is none
    """
    file = (Path(path) if Path(path).is_dir() else Path(path).parent) / "config.json"
    config = saved_in(file) if file.exists() else {}
    if args := saved_in(path).get("model_args"):
        like_gpt2 = {"model_type": "gpt2", "activation_function": "gelu"}
        # `entries_in` adds the biases that are not there
        config = {**like_gpt2, "n_positions": args["block_size"], **args, "bias": True}
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    config |= scaling if isinstance(scaling, dict) else {"rope_type": scaling}
    return {key: value for key, value in config.items() if value is not None}


# Keys of config.json, from all versions of transformers and from nanoGPT, that may have any value:
# they do not change what our model computes (notes, dropout, generation, other heads, memory),
# they show in the entries of the file, or `settings_in` checks them (rotary angles).
HARMLESS = (
    # where a model comes from, and its classes
    r"_\w+|architectures|\w*dtype|(model_)?type|name_or_path|transformers\S+|unsloth_\w+|\w+_class|"
    r"is_(decoder|encoder_decoder|llama_config)|directionality|"
    # training, and how it is computed
    r"\w+_pdrop|\w*dropout(_prob)?|initializer_range|gradient_\w+|chunk_size_\w+|pruned_heads|"
    r"attn_implementation|pretraining_tp|reorder_and_upcast_attn|torchscript|xla_device|"
    r"use_(cache|return_dict|bfloat16)|return_dict\w*|tf_legacy_loss|"
    # generation, other heads and tasks
    r"\w+_token_id|(max|min|max_sequence)_length|\w+_penalty|\w*no_repeat_ngram_size|prefix|"
    r"num_(beams|beam_groups|return_sequences|labels)|do_sample|early_stopping|temperature|"
    r"top_[kp]|typical_p|bad_words_ids|\w*suppress_tokens|remove_invalid_values|id2label|label2id|"
    r"(output|summary|pooler)_\w+|\w*cross_attention\w*|task_specific_params|finetuning_task|"
    r"problem_type|predict_special_tokens|"
    # checked elsewhere
    r"(vocab|block|type_vocab)_size|head_dim|n_ctx|(attention_|mlp_)?bias|"
    r"rope_(type|scaling|parameters)|tie_(encoder_decoder|word_embeddings)"
)


# ---- published weights: entries are tensors by published name, without the layout's prefix

PREFIX = re.compile(r"^((module|_orig_mod)\.)*((transformer|bert|model)\.)?")
# Causal masks, angles and positions, which older versions saved although they are not learned.
BUFFERS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq|embeddings\.position_ids")
PAIRS = re.compile(r"(pooler|nsp|cls\.seq_relationship)\..+")  # unused without --nsp
HALVES = ("q_proj.weight", "k_proj.weight")  # Llama's, where rotary positions pair a head's halves
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
EMBEDDINGS = ("wte.weight", "embed_tokens.weight", "embeddings.word_embeddings.weight")
COPIES = re.compile(r"(lm_head|cls\.predictions\.decoder)\..+")  # of a tied entry, in some files


def size_in(path: str | Path) -> ModelSize:
    """Count the rows of the token embedding, and of the positions if they are learned."""
    entries = entries_in(path)
    tokens = next((entries[name] for name in EMBEDDINGS if name in entries), ())
    positions = entries.get("wpe.weight", entries.get(POSITIONS, ()))
    return ModelSize(len(tokens), len(positions) or None)


def load_into(model: Transformer, path: str | Path) -> list[str]:
    """Copy the file's weights into the model: all of them or, on any error, none.

    Returns:  the entries that the model does not use
    Raises:   ValueError naming --init and the entry that does not fit
    Cost:     reads the file; some weights are in memory twice until they have been copied
    Deviates: BERT's second token type is dropped; adding the first one to wpe rounds it once
    """
    entries, config = entries_in(path), model.config
    layout = layout_of(config.kind, is_llama=config.norm == "rmsnorm")
    views = published_views(model.state_dict(), layout)
    for entry, view in views.items():
        actual = tuple(entries[entry].shape) if entry in entries else "absent"
        if actual != view.shape:
            wrong = f"{entry} must be {tuple(view.shape)} but is {actual}"
            raise ValueError(f"--init {path}: {wrong}: its config.json, or your flags, must fit it")
        if not entries[entry].isfinite().all():
            raise ValueError(f"--init {path}: {entry} is not finite")
    left_out: list[str] = []
    for entry in sorted(entries.keys() - views.keys()):
        twins = views if COPIES.fullmatch(entry) else ()
        if PAIRS.fullmatch(entry):
            left_out.append(entry)
        elif not any(torch.equal(entries[entry], entries[twin]) for twin in twins):
            raise ValueError(f"--init {path}: {entry} has no place in this model")
    if POSITIONS in views:
        entries[POSITIONS] = entries[POSITIONS].double() + entries[TOKEN_TYPES][0]
        left_out.append(f"{TOKEN_TYPES}[1]")
    for entry, view in views.items():
        value = entries[entry]
        view.copy_(pairs_from_halves(value, config.head_width) if entry.endswith(HALVES) else value)
    return left_out


def exported(weights: dict[str, Tensor], layout: "Layout", head_width: int) -> dict[str, Tensor]:
    """Return our weights as a file of this layout holds them, with the prefix in their names."""
    tensors = {}
    for entry, value in published_views(weights, layout).items():
        name = entry if entry.startswith(("cls.", "lm_head.")) else layout.base + entry
        tensors[name] = halves_from_pairs(value, head_width) if entry.endswith(HALVES) else value
    return tensors


def entries_in(path: str | Path) -> dict[str, Tensor]:
    """Read the entries by their newer names; transpose nanoGPT's matrices to be GPT-2's."""
    saved = saved_in(path)
    is_nanogpt = "model_args" in saved
    lacks_biases = is_nanogpt and not saved["model_args"].get("bias", True)
    entries = {}
    for key, value in (saved["model"] if is_nanogpt else saved).items():
        name = PREFIX.sub("", str(key)).replace(".gamma", ".weight").replace(".beta", ".bias")
        if BUFFERS.fullmatch(name):
            continue
        if name in entries or not (isinstance(value, Tensor) and value.is_floating_point()):
            raise ValueError(f"--init {path}: {key} is no floating-point tensor, or occurs twice")
        to_transpose = is_nanogpt and name.startswith("h.") and value.dim() == 2
        entries[name] = value.T if to_transpose else value
        if lacks_biases and name.startswith(("h.", "ln_f.")):
            entries[name.replace(".weight", ".bias")] = torch.zeros(len(value))
    return entries


FILES = ("model.safetensors", "pytorch_model.bin", "ckpt.pt")
IN_A_FOLDER = [f"{name}{end}" for name in FILES for end in (".index.json", "")]  # the first counts


def saved_in(path: str | Path) -> dict[str, Any]:
    """Load a file, or the published weights in a folder, without running any code from it."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"--init {path}: not found; name weights on disk: nothing is downloaded")
    if path.is_dir():
        path = next((path / name for name in IN_A_FOLDER if (path / name).exists()), path)
    with open(path, "rb") as file:
        is_safetensors = path.suffix == ".safetensors" or file.read(9)[8:] == b"{"
    try:
        if path.suffix == ".json":
            saved = json.loads(path.read_text())
            if path.name.endswith(".index.json"):  # of several files
                parts = [saved_in(path.parent / name) for name in {*saved["weight_map"].values()}]
                saved = {name: tensor for part in parts for name, tensor in part.items()}
        elif is_safetensors:
            saved = load_file(path)
        else:
            saved = torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(saved, dict):
            raise ValueError(f"it holds a {type(saved).__name__}")
    except Exception as error:  # torch.load raises half a dozen kinds
        cause = one_line(error).rpartition("WeightsUnpickler error: ")[2][:200]
        why = f"{type(error).__name__}: {cause}"
        raise ValueError(f"--init {path}: cannot be loaded, {why}") from None
    return saved


# ---- published layouts


def published_views(weights: dict[str, Tensor], layout: "Layout") -> dict[str, Tensor]:
    """Return the entries as views of our parameters, to copy values into or out of.

    Example: BERT's h.0.attn.c_attn.bias (3 C,) becomes encoder.layer.0.attention.self.query.bias,
             .key.bias and .value.bias of (C,) each
    Raises:  ValueError for a parameter that the layout lacks
    """
    views: dict[str, Tensor] = {}
    C = weights["wte.weight"].shape[1]
    for name, value in weights.items():
        layer, module, leaf = re.fullmatch(r"(h\.\d+\.)?(.+?)(\.weight|\.bias)?", name).groups("")
        if module not in layout.modules:
            raise ValueError(f"--init: {name} has no place in the layout of {layout.model_type}")
        layer = layer.replace("h.", layout.layers)
        names = [f"{layer}{published}{leaf}" for published in layout.modules[module]]
        if layout is GPT2_LAYOUT and layer and value.dim() == 2:
            value = value.T  # GPT-2 multiplies from the right
        # keys and values may have fewer rows than the C of queries
        parts = [C, (C + len(value)) // 2] if len(names) == 3 else len(names)
        views.update(zip(names, value.tensor_split(parts), strict=True))
    if layout is BERT_LAYOUT:
        views[TOKEN_TYPES] = torch.zeros(2, C)
    return views


def halves_from_pairs(x: Tensor, D: int) -> Tensor:
    """Reorder rows of queries or keys (H D, ...): the even rows of each head, then the odd ones."""
    return x.unflatten(0, (-1, D // 2, 2)).transpose(1, 2).reshape(x.shape)


def pairs_from_halves(x: Tensor, D: int) -> Tensor:
    """Undo `halves_from_pairs`."""
    return x.unflatten(0, (-1, 2, D // 2)).transpose(1, 2).reshape(x.shape)


class Layout(NamedTuple):
    """A published model: how its settings and its parameters are named, there and here."""

    model_type: str  # in its config.json
    architecture: str  # class name in transformers
    settings: Flat  # our settings that a model of this layout must have
    keys: dict[str, str]  # our setting -> its key in config.json
    absent: Flat  # our settings -> the published default if the key is missing
    fixed: Flat  # more keys of config.json, each with the only value that we support
    modules: dict[str, list[str]]  # our module -> the published modules stacked in it
    layers: str  # prefix of names in a layer; ours is "h."
    base: str  # prefix of all names except those of heads


GPT2_KEYS = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "mlp_width": "n_inner"}
GPT2_KEYS |= {"seq_len": "n_positions", "activation": "activation_function"}
GPT2_KEYS |= {"tied": "tie_word_embeddings"}
GPT2_MODULES = "wte wpe ln_f lm_head ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"
GPT2_LAYOUT = Layout(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    settings={"model": "gpt", "block": "gpt2", "pos": "learned", "qk_norm": False},
    keys=GPT2_KEYS,
    absent={"layers": 12, "heads": 12, "width": 768, "seq_len": 1024},
    fixed={
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    modules={name: [name] for name in GPT2_MODULES.split()},
    layers="h.",
    base="transformer.",
)
BERT_KEYS = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "width": "hidden_size"}
BERT_KEYS |= {"mlp_width": "intermediate_size", "seq_len": "max_position_embeddings"}
BERT_LAYOUT = Layout(
    model_type="bert",
    architecture="BertForMaskedLM",
    settings=GPT2_LAYOUT.settings | {"model": "bert", "tied": True},
    keys=BERT_KEYS,
    absent={"layers": 12, "heads": 12, "width": 768, "mlp_width": 3072, "seq_len": 512},
    fixed={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "is_decoder": False,
    },
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
LLAMA_KEYS = BERT_KEYS | {"kv_heads": "num_key_value_heads", "rope_theta": "rope_theta"}
LLAMA_KEYS |= {"tied": "tie_word_embeddings"}
LLAMA_LAYOUT = Layout(
    model_type="llama",
    architecture="LlamaForCausalLM",
    settings={"model": "gpt", "block": "llama", "pos": "rope", "qk_norm": False},
    keys=LLAMA_KEYS,
    absent={"layers": 32, "heads": 32, "width": 4096, "mlp_width": 11008, "seq_len": 2048},
    fixed={"hidden_act": "silu", "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
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
LAYOUTS = {layout.model_type: layout for layout in (GPT2_LAYOUT, BERT_LAYOUT, LLAMA_LAYOUT)}


def layout_of(kind: str, is_llama: bool) -> Layout:
    return BERT_LAYOUT if kind == "bert" else LLAMA_LAYOUT if is_llama else GPT2_LAYOUT


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
# Format: github.com/huggingface/safetensors, README.md. Other dtypes are not supported.

# In the order in which the safetensors library writes them, wide ones first.
DTYPES = {"I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
DTYPES |= {"F16": torch.float16, "U8": torch.uint8, "BOOL": torch.bool}


def load_file(path: str | Path) -> dict[str, Tensor]:
    """Memory-map the tensors of a file: they are read from disk when they are used."""
    data = np.memmap(path, np.uint8, "c")  # writing to a tensor changes memory, never the file
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    offsets = sorted(entry["data_offsets"] for entry in header.values())
    edges = [0, *(edge for pair in offsets for edge in pair), len(data) - start]
    shapes = [size for entry in header.values() for size in entry["shape"]]
    if edges[::2] != edges[1::2] or min(shapes, default=0) < 0:
        raise ValueError("its tensors do not fill it, one after the other")
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = torch.from_numpy(data[start + begin : start + end])
        tensors[name] = raw.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


def save_file(out: BinaryIO, tensors: dict[str, Tensor]) -> None:
    """Write tensors in the order of the safetensors library: by dtype, then by name."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    in_order = sorted(tensors.items(), key=lambda item: ([*names].index(item[1].dtype), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in in_order:
        begin, end = end, end + tensor.nbytes
        about = {"dtype": names[tensor.dtype], "shape": [*tensor.shape]}
        header[name] = {**about, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in in_order:
        out.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
