"""Weights in the published layouts of GPT-2 and BERT: --init reads them, `export` writes them.

A file is a state dict, of torch.save or safetensors. The model computes the published function, and
an exported run's model computes its own in any library that reads these layouts
(tests/test_published.py). These are the entries, with prefix `transformer.`, `bert.` or none, and
our parameters (with h.N. before what is in a layer):

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

BERT's token type 0 is added to every position, because a row here is one segment, and an export has
token types of zero. Nothing is downloaded, guessed, cropped or padded: an entry that does not fit
is an error. A state dict does not tell the number of heads, so the settings decide it. A model with
rotary positions has no published layout.

    python -m support.weights.published show gpt2.bin   # what a file holds, and the flags that fit
    python -m support.weights.published export runs/a --out gpt2.safetensors
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from model import Transformer
from support.base.atomic import atomic_write
from support.base.runtime import Parser, exit_cleanly
from support.run.folder import ModelSize
from support.step.sizes import SIZES
from support.weights import safetensors
from support.weights.trained import Trained, checkpoint_of, has_trailer, trained, weights_of

# ---- names

PREFIX = re.compile(r"^(transformer|bert)\.")
LAYER = re.compile(r"(?:h|encoder\.layer)\.(\d+)\.")
MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # GPT-2's causal mask, saved but not learned
NSP = re.compile(r"(pooler\.dense|cls\.seq_relationship)\..+")  # nothing uses them without --nsp
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
TIED = {  # second names of one tensor
    "lm_head.weight": "wte.weight",
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
BERT_MODULES = {
    "wte": ["embeddings.word_embeddings"],
    "wpe": ["embeddings.position_embeddings"],
    "ln_f": ["embeddings.LayerNorm"],
    "attn.c_attn": ["attention.self.query", "attention.self.key", "attention.self.value"],
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
}
RESAVE = "give a run, a .safetensors file, or a state dict that torch.save wrote"


def published_names(name: str, kind: str) -> list[str]:
    """The published entries that make one parameter of ours when they are stacked in this order.

    Example:  published_names("h.3.ln_1.bias", "bert") is
              ["encoder.layer.3.attention.output.LayerNorm.bias"]
    Raises:   ValueError for a parameter that neither layout has
    """
    layer, module, leaf = re.fullmatch(r"(h\.\d+\.)?(.+?)(\.weight|\.bias)?", name).groups("")
    if module not in BERT_MODULES:
        raise ValueError(f"{name} has no place in the published layouts of GPT-2 and BERT")
    if kind == "gpt":
        return [name]
    layer = layer.replace("h.", "encoder.layer.")
    return [f"{layer}{published}{leaf}" for published in BERT_MODULES[module]]


def is_turned(name: str, kind: str, parameter: Tensor) -> bool:
    """Whether the file has the transpose of our matrix: GPT-2 multiplies from the right."""
    return kind == "gpt" and name.startswith("h.") and parameter.dim() == 2


# ---- in


def load_published(model: Transformer, path: str | Path) -> list[str]:
    """Copy the file's weights into the model: all of them or, on any error, none.

    Returns:  the entries that the model does not use, without their prefix
    Raises:   ValueError naming --init, the first entry that does not fit, and the flags that the
              file needs
    Cost:     reads the file; some weights are in memory twice until they are copied
    Deviates: BERT's second token type is dropped; adding the first one rounds wpe once
    """
    entries, left_out = read(path)
    shape = shape_of(entries, path)
    hint = f"the file is for {flags(shape)}, and has to be as published, with its head, tied"
    kind = model.config.kind
    outline = {name: parameter.to("meta") for name, parameter in model.named_parameters()}
    expected = {PREFIX.sub("", e): like for e, like in published_entries(outline, kind).items()}
    for entry, like in expected.items():
        actual = tuple(entries[entry].shape) if entry in entries else "absent"
        if actual == "absent" and NSP.fullmatch(entry):
            raise refusal(path, f"has no {entry}, which --nsp needs: leave --nsp out")
        if actual != like.shape:
            raise refusal(path, f"{entry} must be {tuple(like.shape)} but is {actual}: {hint}")
    values = {}
    for name in outline:
        parts = [entries[entry] for entry in published_names(name, kind)]
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        values[name] = value.T if is_turned(name, kind, value) else value
    if kind == "bert" and "wpe.weight" in values:
        values["wpe.weight"] = values["wpe.weight"].double() + entries[TOKEN_TYPES][0]
        left_out.append(f"{TOKEN_TYPES}[1]")
    strangers = []
    for entry in sorted(entries.keys() - expected.keys()):
        twin = TIED.get(entry)
        if NSP.fullmatch(entry):
            left_out.append(entry)
        elif twin not in expected:
            strangers.append(entry)
        elif not torch.equal(entries[entry], entries[twin]):
            raise refusal(path, f"{entry} must equal {twin}: {hint}")
    if strangers:
        more = f" and {len(strangers) - 4} more" if len(strangers) > 4 else ""
        raise refusal(path, f"remove these entries: {', '.join(strangers[:4])}{more}; {hint}")
    model.load_state_dict(values)
    return left_out


def size_for(path: str | Path, needed: int, tokenizer: str) -> ModelSize:
    """Rows of the file's embedding, if they suit a tokenizer, and how far its positions reach.

    A vocabulary suits where the file has a row for each id that the model needs, and no more than
    fill it up to a multiple of 64, as embeddings are padded. Two vocabularies of one size cannot be
    told apart.

    Args:     needed ids of the tokenizer that the model uses
    Raises:   ValueError naming --init and --tokenizer
    """
    shape = shape_of(read(path)[0], path)
    size, padded = ModelSize(shape["vocab_size"], shape["seq_len"]), -(-needed // 64) * 64
    if not needed <= size.vocab_size <= padded:
        needs = f"--tokenizer {tokenizer} one of {needed:,} (padded: {padded:,})"
        remedy = "name that of these weights, such as gpt2; BERT's WordPiece is not supported"
        raise refusal(path, f"has a vocabulary of {size.vocab_size:,}, and {needs}: {remedy}")
    return size


def shape_of(entries: dict[str, Tensor], path: str | Path) -> dict[str, str | int]:
    """What a file tells of its model, by the names of TransformerConfig."""
    kind = "gpt" if "wte.weight" in entries else "bert"
    (wte,), (wpe,) = published_names("wte.weight", kind), published_names("wpe.weight", kind)
    for entry in (wte, wpe):
        if entry not in entries or entries[entry].dim() != 2:
            raise refusal(path, f"has no matrix {entry}, as GPT-2 and BERT have: {RESAVE}")
    (V, width), (T, _) = entries[wte].shape, entries[wpe].shape
    (inner,) = published_names("h.0.mlp.c_fc.bias", kind)
    return {
        "kind": kind,
        "layers": len({match[1] for match in map(LAYER.match, entries) if match}),
        "width": width,
        "mlp_width": len(entries[inner]) if inner in entries else 4 * width,
        "vocab_size": V,
        "seq_len": T,
    }


def flags(shape: dict[str, str | int]) -> str:
    """The flags that build a file's model, except the number of heads."""
    layers, width, T = shape["layers"], shape["width"], shape["seq_len"]
    named = {(s.layers, s.width, s.seq_len): name for name, s in SIZES.items()}
    size = f"--layers {layers} --width {width} and its --heads"
    if (layers, width, T) in named:
        size = f"--size {named[layers, width, T]}"
    if shape["mlp_width"] != 4 * width:
        size += f", --mlp-width {shape['mlp_width']}"
    vocabulary = f"{T} positions, a vocabulary of {shape['vocab_size']}"
    return f"--model {shape['kind']}, {size}, --pos learned, {vocabulary}"


def read(path: str | Path) -> tuple[dict[str, Tensor], list[str]]:
    """The entries under their newer names, without prefix, and the names of those left out.

    No code in the file runs.
    """
    is_safetensors = False
    try:
        with open(path, "rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"
        if is_safetensors:
            saved = safetensors.load(path)
        else:
            saved = torch.load(path, "cpu", weights_only=True, mmap=is_zipfile(path))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise refusal(path, f"cannot be read, {error.strerror}: {RESAVE}") from error
    except Exception as error:  # torch.load raises half a dozen kinds
        if is_safetensors:
            raise refusal(path, f"is a broken safetensors file: it {error}") from error
        raise refusal(path, f"cannot be loaded, {type(error).__name__}: {RESAVE}") from error
    if has_trailer(Path(path)):
        raise refusal(path, "is a checkpoint of train.py, which has a layout of its own")
    if not isinstance(saved, dict):
        raise refusal(path, f"holds a {type(saved).__name__}, not a dict: {RESAVE}")
    entries, left_out = {}, []
    for key, value in saved.items():
        name = PREFIX.sub("", str(key)).replace(".gamma", ".weight").replace(".beta", ".bias")
        if name == "embeddings.position_ids":
            left_out.append(name)
        elif not MASKS.fullmatch(name):
            if not (isinstance(value, Tensor) and value.is_floating_point()):
                raise refusal(path, f"{key} is not a tensor of floating-point numbers: {RESAVE}")
            if name in entries:
                raise refusal(path, f"{key} is there under another name too: {RESAVE}")
            entries[name] = value
    return entries, left_out


def refusal(path: str | Path, why: str) -> ValueError:
    return ValueError(f"--init {path}: {why}")


# ---- out


def export(source: str | Path, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the weights of a run, or of one checkpoint, as a .pt or .safetensors file.

    Values are those of the checkpoint, including the rows that fill up the embedding.

    Returns: what config.json has to hold for transformers
    Raises:  ValueError for what cannot be read, has no published layout, or is there already;
             nothing is written then
    """
    is_safetensors = out.suffix == ".safetensors"
    if not is_safetensors and out.suffix != ".pt":
        raise ValueError(f"--out {out}: end its name in .pt or .safetensors")
    if out.exists() or not out.parent.is_dir():
        raise ValueError(f"--out {out} exists, or its folder does not: name another")
    path = checkpoint_of(source)
    if path is None:
        raise ValueError(f"{source} is neither the folder of a run nor one of its checkpoints")
    run = trained(path)
    if run.settings["model.pos"] == "rope":
        raise ValueError(f"{path} has --pos rope: published layouts only have learned positions")
    say(f"reading {path}, step {run.step}")
    entries = published_entries(weights_of(path), run.settings["model.model"])
    say(f"writing {out}, {sum(tensor.nbytes for tensor in entries.values()):,} bytes")
    with atomic_write(out) as file:
        if is_safetensors:  # which has no tensors that share bytes: its readers tie by name
            safetensors.save(file, entries, {"format": "pt"})
        else:  # with the second names of tied tensors, which take no bytes
            plain = {PREFIX.sub("", name): tensor for name, tensor in entries.items()}
            tied = {twin: plain[name] for twin, name in TIED.items() if name in plain}
            torch.save({**entries, **tied}, file)
    return transformers_config(run)


def published_entries(weights: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Our parameters under their published names; the inverse of `load_published`.

    Example: BERT's h.0.attn.c_attn.bias (3 C,) becomes query, key and value of (C,) each
    """
    entries = {}
    for name, value in weights.items():
        names = published_names(name, kind)
        turned = value.T if is_turned(name, kind, value) else value
        for entry, part in zip(names, turned.chunk(len(names)), strict=True):
            entries[entry] = part.contiguous()
    if kind == "bert":
        entries[TOKEN_TYPES] = torch.zeros(2, weights["wte.weight"].shape[1], dtype=torch.float32)
    base = {"gpt": "transformer.", "bert": "bert."}[kind]  # heads stand beside it
    return {e if e.startswith("cls.") else base + e: tensor for e, tensor in entries.items()}


def transformers_config(run: Trained) -> dict[str, Any]:
    """Dimensions, activation and epsilon by the names that transformers has for them."""
    s = {name.removeprefix("model."): value for name, value in run.settings.items()}
    if s["model"] == "gpt":
        names = ("n_positions", "n_embd", "n_layer", "n_head", "n_inner")
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        config |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    else:
        names = ("max_position_embeddings", "hidden_size", "num_hidden_layers")
        names += ("num_attention_heads", "intermediate_size")
        head = "BertForPreTraining" if s["nsp"] else "BertForMaskedLM"
        config = {"model_type": "bert", "architectures": [head], "type_vocab_size": 2}
        config |= {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    sizes = [run.size.positions, *(s[name] for name in ("width", "layers", "heads", "mlp_width"))]
    return config | dict(zip(names, sizes, strict=True)) | {"vocab_size": run.size.vocab_size}


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        prog="python -m support.weights.published",
        description="Published weights: what a file of them holds, and how to write one.",
    )
    verbs = parser.add_subparsers(required=True, dest="verb")
    show = verbs.add_parser("show", help="what a file holds, and which flags fit it")
    show.add_argument("path", type=Path, help="a state dict, of torch.save or safetensors")
    export_ = verbs.add_parser("export", help="write a run's weights in the published layout")
    export_.add_argument("path", type=Path, metavar="run", help="folder of a run, or a checkpoint")
    export_.add_argument("--out", type=Path, required=True, help="new .pt or .safetensors file")
    args = parser.parse_args(argv)
    if args.verb == "show":
        shape = shape_of(read(args.path)[0], args.path)
        print(f"{args.path}: {shape}; as flags: {flags(shape)}")
        return
    config = export(args.path, args.out, print)
    print(f"{args.out}: {shape_of(read(args.out)[0], args.out)}")
    print("rows of its vocabulary beyond the tokenizer's ids fill it up to a multiple of 64")
    print(f"transformers reads it with this config.json beside it: {json.dumps(config)}")


if __name__ == "__main__":
    exit_cleanly(main)
