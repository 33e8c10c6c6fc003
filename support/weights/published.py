"""Weights in the published layouts of GPT-2, BERT and Llama: --init reads, `export` writes them.

A file is a state dict, of torch.save or safetensors, or several of the latter with their index. The
model computes the published function, and an exported run's model computes its own in any library
that reads these layouts (tests/test_published.py). These are the entries, with prefix
`transformer.`, `bert.` or none, and our parameters (with h.N. before what is in a layer):

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
           lm_head                                         lm_head (with --no-tied)

BERT's token type 0 is added to every position, because a row here is one segment, and an export has
token types of zero. Nothing is downloaded, guessed, cropped or padded: an entry that does not fit
is an error. A state dict does not tell the number of heads, so the settings decide it; where a
config.json lies beside a Llama, they have to agree. Llama's files turn halves of a head where the
model turns neighbours, so the rows of its queries and keys change places.

    python -m support.weights.published show gpt2.bin   # what a file holds, and the flags that fit
    python -m support.weights.published export runs/a --out gpt2.safetensors
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from torch import Tensor

from model import Transformer, TransformerConfig
from support.base.atomic import atomic_folder, atomic_write
from support.base.runtime import Parser, exit_cleanly
from support.base.typed_json import Each, read_json
from support.run.folder import ModelSize
from support.step.sizes import SIZES
from support.text.tokenizer import as_transformers_has_it, get_encoding
from support.weights import safetensors
from support.weights.trained import Trained, checkpoint_of, has_trailer, trained, weights_of

# ---- names

PREFIX = re.compile(r"^(transformer|bert)\.")
LAYER = re.compile(r"(?:h|encoder\.layer|model\.layers)\.(\d+)\.")
MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # GPT-2's causal mask, saved but not learned
NSP = re.compile(r"(pooler\.dense|cls\.seq_relationship)\..+")  # nothing uses them without --nsp
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
TIED = {  # second names of one tensor, and the first, by layout
    "lm_head.weight": ["wte.weight", "model.embed_tokens.weight"],
    "cls.predictions.decoder.weight": ["embeddings.word_embeddings.weight"],
    "cls.predictions.decoder.bias": ["cls.predictions.bias"],
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
LLAMA_MODULES = {
    "wte": ["model.embed_tokens"],
    "ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
    "ln_1": ["input_layernorm"],
    "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj": ["self_attn.o_proj"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.c_proj": ["mlp.down_proj"],
}
HALVED = re.compile(r".*\.self_attn\.[qk]_proj\.weight")
INDEX = "model.safetensors.index.json"
RESAVE = "give a run, a .safetensors file, or a state dict that torch.save wrote"


class Layout(NamedTuple):
    """Where weights of a model have their names from."""

    name: str  # gpt | bert | llama
    width: int = 0
    head_width: int = 0


def model_settings(run: Trained) -> dict[str, Any]:
    """A run's settings of its model, the newer ones too if it is from before these."""
    s = {
        "block": "gpt2",
        "norm": "layernorm",
        "mlp": "gelu",
        "kv_heads": run.settings["model.heads"],
    }
    s |= {"qk_norm": False, "tied": True}
    return s | {name.removeprefix("model."): value for name, value in run.settings.items()}


def layout_of(s: Mapping[str, Any]) -> Layout | None:
    """The layout that a model with these settings fits; None for none."""
    block = s["block"], s["norm"], s["mlp"], s["pos"], s["qk_norm"]
    sizes = s["width"], s["width"] // s["heads"]
    if block == ("llama", "rmsnorm", "swiglu", "rope", False) and s["model"] == "gpt":
        return Layout("llama", *sizes)
    is_plain = s["tied"] and s["kv_heads"] == s["heads"]
    if block == ("gpt2", "layernorm", "gelu", "learned", False) and is_plain:
        return Layout(s["model"], *sizes)
    return None


def published_names(name: str, kind: str) -> list[str]:
    """The published entries that make one parameter of ours when they are stacked in this order.

    Example:  published_names("h.3.ln_1.bias", "bert") is
              ["encoder.layer.3.attention.output.LayerNorm.bias"]
    Raises:   ValueError for a parameter that the layout has not
    """
    modules = LLAMA_MODULES if kind == "llama" else BERT_MODULES
    layer, module, leaf = re.fullmatch(r"(h\.\d+\.)?(.+?)(\.weight|\.bias)?", name).groups("")
    if module not in modules:
        raise ValueError(f"{name} has no place in the published layout of {kind}")
    if kind == "gpt":
        return [name]
    layer = layer.replace("h.", "model.layers." if kind == "llama" else "encoder.layer.")
    return [f"{layer}{published}{leaf}" for published in modules[module]]


def is_turned(name: str, kind: str, parameter: Tensor) -> bool:
    """Whether the file has the transpose of our matrix: GPT-2 multiplies from the right."""
    return kind == "gpt" and name.startswith("h.") and parameter.dim() == 2


def halves_from_pairs(x: Tensor, D: int) -> Tensor:
    """Rows of queries or keys (H D, C): of each head's D the even ones first, then the odd ones."""
    return x.view(-1, D // 2, 2, x.shape[1]).transpose(1, 2).reshape(x.shape)


def pairs_from_halves(x: Tensor, D: int) -> Tensor:
    return x.view(-1, 2, D // 2, x.shape[1]).transpose(1, 2).reshape(x.shape)


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
    hint = f"the file is for {flags(shape)}, and has to be as published, with its head"
    config, named = model.config, dict(model.named_parameters())
    kind = "llama" if shape["kind"] == "llama" else config.kind
    layout = Layout(kind, config.width, config.head_width)
    try:
        expected = published_entries({name: p.to("meta") for name, p in named.items()}, layout)
    except ValueError as error:
        raise refusal(path, f"{error}; {hint}") from None
    expected = {PREFIX.sub("", entry): like for entry, like in expected.items()}
    if kind == "llama":
        check_llama(path, config)
    if kind == "bert" and "wpe.weight" in named:
        left_out.append(f"{TOKEN_TYPES}[1]")
    for entry, like in expected.items():
        actual = tuple(entries[entry].shape) if entry in entries else "absent"
        if actual == "absent" and NSP.fullmatch(entry):
            raise refusal(path, f"has no {entry}, which --nsp needs: leave --nsp out")
        if actual != like.shape:
            raise refusal(path, f"{entry} must be {tuple(like.shape)} but is {actual}: {hint}")
    strangers = []
    for entry in sorted(entries.keys() - expected.keys()):
        twin = next((first for first in TIED.get(entry, ()) if first in expected), None)
        if NSP.fullmatch(entry):
            left_out.append(entry)
        elif twin is None:
            strangers.append(entry)
        elif not torch.equal(entries[entry], entries[twin]):
            raise refusal(path, f"{entry} must equal {twin}: {hint}")
    if strangers:
        more = f" and {len(strangers) - 4} more" if len(strangers) > 4 else ""
        raise refusal(path, f"remove these entries: {', '.join(strangers[:4])}{more}; {hint}")
    with torch.no_grad():
        for name, parameter in named.items():
            parts = [entries[entry] for entry in published_names(name, kind)]
            if kind == "llama" and name.endswith("c_attn.weight"):
                parts[:2] = (pairs_from_halves(part, layout.head_width) for part in parts[:2])
            value = torch.cat(parts) if len(parts) > 1 else parts[0]
            value = value.T if is_turned(name, kind, value) else value
            if kind == "bert" and name == "wpe.weight":
                value = value.double() + entries[TOKEN_TYPES][0]
            parameter.copy_(value)
    return left_out


def check_llama(path: str | Path, config: TransformerConfig) -> None:
    """Refuse settings that the config.json beside a file, if there is one, contradicts."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    try:
        said = read_json(folder / "config.json", {}, "take it from where the weights are from")
    except FileNotFoundError:
        return
    rope = said.get("rope_parameters") or {"rope_theta": said.get("rope_theta", 10_000.0)}
    rope |= said.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise refusal(
            path, f"scales rotary angles as {rope['rope_type']}, which is not computed here"
        )
    heads, kv_heads, _ = config.qkv_heads
    for flag, key, ours, theirs in (
        ("--heads", "num_attention_heads", heads, said.get("num_attention_heads")),
        ("--kv-heads", "num_key_value_heads", kv_heads, said.get("num_key_value_heads")),
        ("--rope-theta", "rope_theta", config.rope_theta, rope.get("rope_theta")),
        ("", "rms_norm_eps", config.norm_eps, said.get("rms_norm_eps")),
        ("", "head_dim", config.head_width, said.get("head_dim")),
    ):
        if theirs not in (None, ours):
            remedy = f"give {flag} {theirs}" if flag else "it is not computed here"
            raise refusal(
                path, f"its config.json has {key} {theirs}, and here it is {ours}: {remedy}"
            )


def size_for(path: str | Path, needed: int, tokenizer: str) -> ModelSize:
    """Rows of the file's embedding, if they suit a tokenizer, and how far its positions reach.

    A vocabulary suits where the file has a row for each id that the model needs, and no more than
    fill it up to a multiple of 64, as embeddings are padded. Two vocabularies of one size cannot be
    told apart.

    Args:     needed ids of the tokenizer that the model uses
    Raises:   ValueError naming --init and --tokenizer
    """
    shape = shape_of(read(path)[0], path)
    size, padded = ModelSize(shape["vocab_size"], shape.get("seq_len")), -(-needed // 64) * 64
    if not needed <= size.vocab_size <= padded:
        needs = f"--tokenizer {tokenizer} one of {needed:,} (padded: {padded:,})"
        remedy = "name that of these weights, such as gpt2; BERT's WordPiece is not supported"
        raise refusal(path, f"has a vocabulary of {size.vocab_size:,}, and {needs}: {remedy}")
    return size


def shape_of(entries: dict[str, Tensor], path: str | Path) -> dict[str, str | int]:
    """What a file tells of its model, by the names of TransformerConfig."""
    firsts = {"wte.weight": "gpt", "model.embed_tokens.weight": "llama"}
    kind = next((kind for entry, kind in firsts.items() if entry in entries), "bert")

    def size_of(name: str) -> torch.Size:
        entry = published_names(name, kind)[-1]
        if entry not in entries or entries[entry].dim() != 2:
            raise refusal(path, f"has no matrix {entry}, as GPT-2, BERT and Llama have: {RESAVE}")
        return entries[entry].shape

    V, width = size_of("wte.weight")
    shape = {
        "kind": kind,
        "layers": len({match[1] for match in map(LAYER.match, entries) if match}),
        "width": width,
        "vocab_size": V,
    }
    if kind == "llama":
        sizes = {"mlp_width": "h.0.mlp.c_fc.weight", "kv_width": "h.0.attn.c_attn.weight"}
        shape |= {name: size_of(of)[0] for name, of in sizes.items()}
        return shape | {"tied": "lm_head.weight" not in entries}
    (inner,) = published_names("h.0.mlp.c_fc.bias", kind)
    shape["mlp_width"] = len(entries[inner]) if inner in entries else 4 * width
    return shape | {"seq_len": size_of("wpe.weight")[0]}


def flags(shape: dict[str, str | int]) -> str:
    """The flags that build a file's model, except the number of heads."""
    layers, width = shape["layers"], shape["width"]
    if shape["kind"] == "llama":
        sizes = f"--layers {layers} --width {width} --mlp-width {shape['mlp_width']}"
        head = "" if shape["tied"] else " --no-tied"
        heads = f"its --heads, and --kv-heads that are {shape['kv_width']} wide together"
        return f"--block llama {sizes}{head}, {heads}; a vocabulary of {shape['vocab_size']}"
    T = shape["seq_len"]
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
    path, is_safetensors = Path(path), False
    if path.is_dir():
        inside = (path / name for name in (INDEX, "model.safetensors"))
        path = next(filter(Path.exists, inside), path)
    try:
        with open(path, "rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"
        if path.name.endswith(".index.json"):
            saved = load_shards(path)
        elif is_safetensors:
            saved = safetensors.load(path)
        else:
            saved = torch.load(path, "cpu", weights_only=True, mmap=is_zipfile(path))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise refusal(path, f"cannot be read, {error.strerror}: {RESAVE}") from error
    except Exception as error:  # torch.load raises half a dozen kinds
        if isinstance(error, ValueError) and path.name.endswith(".index.json"):
            raise
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


def load_shards(index: Path) -> dict[str, Tensor]:
    """Map the tensors of several safetensors files, as their index names them."""
    places = read_json(index, {"weight_map": Each(str)}, "take it from where the weights are from")
    saved: dict[str, Tensor] = {}
    for name in sorted({*places["weight_map"].values()}):
        shard = index.parent / name
        if Path(name).name != name or not shard.exists():
            raise refusal(index, f"names {name!a}, which is not beside it")
        try:
            saved |= safetensors.load(shard)
        except ValueError as error:
            raise refusal(shard, f"is a broken safetensors file: it {error}") from error
    if missing := places["weight_map"].keys() - saved.keys():
        raise refusal(index, f"names {min(missing)}, which is in none of its files")
    return saved


def refusal(path: str | Path, why: str) -> ValueError:
    return ValueError(f"--init {path}: {why}")


# ---- out


def export(source: str | Path, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the weights of a run, or of one checkpoint: as a .pt or .safetensors file, or as a
    folder with config.json and tokenizer.json, from which transformers loads both.

    Values are those of the checkpoint, including the rows that fill up the embedding.

    Returns: what config.json has to hold for transformers
    Raises:  ValueError for what cannot be read, has no published layout, or is there already;
             nothing is written then
    """
    if out.suffix not in ("", ".safetensors", ".pt"):
        raise ValueError(f"--out {out}: end its name in .pt or .safetensors, or name a folder")
    if out.exists() or not out.parent.is_dir():
        raise ValueError(f"--out {out} exists, or its folder does not: name another")
    path = checkpoint_of(source)
    if path is None:
        raise ValueError(f"{source} is neither the folder of a run nor one of its checkpoints")
    run = trained(path)
    layout = layout_of(model_settings(run))
    if layout is None:
        raise ValueError(
            f"{path} fits no published layout: GPT-2's and BERT's are for the default block without"
            " --pos rope, Llama's for --block llama without --qk-norm"
        )
    say(f"reading {path}, step {run.step}")
    entries = published_entries(weights_of(path), layout)
    config = transformers_config(run)
    say(f"writing {out}, {sum(tensor.nbytes for tensor in entries.values()):,} bytes")
    if not out.suffix:
        encoding = get_encoding(run.settings["data.tokenizer"])
        config |= {"bos_token_id": encoding.eot_token, "eos_token_id": encoding.eot_token}
        end = {"eos_token": encoding.decode([encoding.eot_token])}
        texts = {
            "config": config,
            "tokenizer": as_transformers_has_it(encoding),
            "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **end},
        }
        with atomic_folder(out) as folder:
            for name, content in texts.items():
                (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
            with (folder / "model.safetensors").open("wb") as file:
                safetensors.save(file, entries, {"format": "pt"})
        return config
    with atomic_write(out) as file:
        if (
            out.suffix == ".safetensors"
        ):  # which has no tensors that share bytes: its readers tie by name
            safetensors.save(file, entries, {"format": "pt"})
        else:  # with the second names of tied tensors, which take no bytes
            plain = {PREFIX.sub("", name): tensor for name, tensor in entries.items()}
            tied = {
                twin: plain[first]
                for twin, firsts in TIED.items()
                for first in firsts
                if first in plain and twin not in plain
            }
            torch.save({**entries, **tied}, file)
    return config


def published_entries(weights: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Our parameters under their published names; the inverse of `load_published`.

    Example: BERT's h.0.attn.c_attn.bias (3 C,) becomes query, key and value of (C,) each
    """
    kind, entries = layout.name, {}
    for name, value in weights.items():
        names = published_names(name, kind)
        turned = value.T if is_turned(name, kind, value) else value
        first = layout.width if len(names) == 3 else len(turned) // len(names)  # rows, or all
        others = (len(turned) - first) // max(len(names) - 1, 1)
        sizes = [first, *[others] * (len(names) - 1)]
        for entry, part in zip(names, turned.split(sizes), strict=True):
            is_halved = HALVED.fullmatch(entry)
            part = halves_from_pairs(part, layout.head_width) if is_halved else part
            entries[entry] = part.contiguous()
    if kind == "bert":
        entries[TOKEN_TYPES] = torch.zeros(2, weights["wte.weight"].shape[1], dtype=torch.float32)
    base = {"gpt": "transformer.", "bert": "bert.", "llama": ""}[kind]  # heads stand beside it
    return {e if e.startswith("cls.") else base + e: tensor for e, tensor in entries.items()}


def transformers_config(run: Trained) -> dict[str, Any]:
    """Dimensions, activation and epsilon by the names that transformers has for them."""
    s = model_settings(run)
    if s["block"] == "llama":
        names = ("max_position_embeddings", "hidden_size", "num_hidden_layers")
        names += ("num_attention_heads", "intermediate_size")
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": s["rope_theta"]}
        config |= {"num_key_value_heads": s["kv_heads"], "tie_word_embeddings": s["tied"]}
    elif s["model"] == "gpt":
        names = ("n_positions", "n_embd", "n_layer", "n_head", "n_inner")
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        config |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    else:
        names = ("max_position_embeddings", "hidden_size", "num_hidden_layers")
        names += ("num_attention_heads", "intermediate_size")
        head = "BertForPreTraining" if s["nsp"] else "BertForMaskedLM"
        config = {"model_type": "bert", "architectures": [head], "type_vocab_size": 2}
        config |= {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    sizes = [
        run.size.positions or run.settings["data.seq_len"],
        *(s[name] for name in ("width", "layers", "heads", "mlp_width")),
    ]
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
    export_.add_argument(
        "--out", type=Path, required=True, help="new folder, or .pt or .safetensors file"
    )
    args = parser.parse_args(argv)
    if args.verb == "show":
        shape = shape_of(read(args.path)[0], args.path)
        print(f"{args.path}: {shape}; as flags: {flags(shape)}")
        return
    config = export(args.path, args.out, print)
    print(f"{args.out}: {shape_of(read(args.out)[0], args.out)}")
    print("rows of its vocabulary beyond the tokenizer's ids fill it up to a multiple of 64")
    which = (
        f"this config.json beside it: {json.dumps(config)}" if args.out.suffix else "its tokenizer"
    )
    print(f"transformers reads it with {which}")


if __name__ == "__main__":
    exit_cleanly(main)
