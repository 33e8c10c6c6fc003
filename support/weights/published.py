"""Weights in the published layouts of GPT-2, BERT and Llama: --init reads, `export` writes them.

A file is a state dict, of torch.save or safetensors, or several of the latter with their index. The
model computes the published function, and an exported run's model computes its own in any library
that reads these layouts (tests/test_published.py). A folder with a config.json also says what
settings it is for, so that --init needs no others. Our parameters are on the right (after h.N. in a
layer), the published entries on the left:

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

The default block with --pos rope has no published layout. BERT's token type 0 is added to every
position, because a row here is one segment, and an export has token types of zero. Nothing is
downloaded, guessed, cropped or padded: an entry that does not fit is an error. Llama's files turn
halves of a head where the model turns neighbours, so the rows of their queries and keys change
places.

    python -m support.weights.published show gpt2.bin   # what a file holds, and the flags that fit
    python -m support.weights.published export runs/a --out gpt2.safetensors
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
from torch import Tensor

from kernels.rotary import Scaling
from model import Transformer
from support.base.atomic import atomic_folder, atomic_write
from support.run import ModelSize
from support.runtime import Parser, exit_cleanly
from support.settings import as_flags
from support.text.tokenizer import get_encoding
from support.weights import safetensors
from support.weights.trained import Trained, checkpoint_of, trained, weights_of

# ---- layouts


class Layout(NamedTuple):
    """A published model: its settings by our names and by theirs, and the names of its entries."""

    model_type: str  # in its config.json
    architecture: str
    settings: dict[str, Any]  # of ours: those of another model do not fit
    keys: dict[str, str]  # ours, and theirs in its config.json
    fixed: dict[str, Any]  # what else its config.json has to say
    modules: dict[str, list[str]]  # ours, and theirs that make it up when they are stacked
    layers: str  # before the name of what is in a layer: "h." here
    base: str  # before all names but those of heads


PLAIN = {"model": "gpt", "block": "gpt2", "qk_norm": False}
LEARNED = {"pos": "learned", "tied": True}
SIZE_KEYS = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "width": "hidden_size"}
SIZE_KEYS |= {"mlp_width": "intermediate_size"}
LLAMA_KEYS = {"kv_heads": "num_key_value_heads", "rope_theta": "rope_theta"}
GPT2_MODULES = "wte wpe ln_f ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"
HEADS = ("cls.", "lm_head.")  # entries that stand beside the base

GPT2_LAYOUT = Layout(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    settings=PLAIN | LEARNED,
    keys={"layers": "n_layer", "heads": "n_head", "width": "n_embd", "mlp_width": "n_inner"},
    fixed={
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
    modules={name: [name] for name in GPT2_MODULES.split()},
    layers="h.",
    base="transformer.",
)
BERT_LAYOUT = Layout(
    model_type="bert",
    architecture="BertForMaskedLM",
    settings=PLAIN | LEARNED | {"model": "bert"},
    keys=SIZE_KEYS,
    fixed={
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
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
LLAMA_LAYOUT = Layout(
    model_type="llama",
    architecture="LlamaForCausalLM",
    settings=PLAIN | {"block": "llama", "pos": "rope"},
    keys=SIZE_KEYS | LLAMA_KEYS | {"tied": "tie_word_embeddings"},
    fixed={"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
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
PREFIX = re.compile(r"^(transformer|bert|model)\.")
LAYER = re.compile(r"(?:h|encoder\.layer|layers)\.(\d+)\.")
# causal masks and angles: saved by older versions, but not learned
BUFFERS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")
NSP = re.compile(r"(pooler\.dense|cls\.seq_relationship)\..+")  # nothing uses them without --nsp
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
TIED = {  # second names of one tensor, and the first, by layout
    "lm_head.weight": ["wte.weight", "embed_tokens.weight"],
    "cls.predictions.decoder.weight": ["embeddings.word_embeddings.weight"],
    "cls.predictions.decoder.bias": ["cls.predictions.bias"],
}
TOLD = ("model", "block", "layers", "width", "mlp_width", "pos", "tied")  # by entries alone
IN_A_FOLDER = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
RESAVE = "give a run, a .safetensors file, or a state dict that torch.save wrote"


def layout_of(settings: Mapping[str, Any]) -> Layout | None:
    """The layout that a model with these settings fits; None for none."""
    fitting = (one for one in LAYOUTS if one.settings.items() <= settings.items())
    layout = next(fitting, None)
    shares_keys = settings["kv_heads"] != settings["heads"]
    return None if layout and shares_keys and "kv_heads" not in layout.keys else layout


def published_names(name: str, layout: Layout) -> list[str]:
    """The published entries that make one parameter of ours when they are stacked in this order.

    Example:  published_names("h.3.ln_1.bias", BERT_LAYOUT) is
              ["encoder.layer.3.attention.output.LayerNorm.bias"]
    Raises:   ValueError for a parameter that the layout has not
    """
    layer, module, leaf = re.fullmatch(r"(h\.\d+\.)?(.+?)(\.weight|\.bias)?", name).groups("")
    if module not in layout.modules:
        raise ValueError(f"{name} has no place in the published layout of {layout.model_type}")
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


def parts_of(
    name: str, value: Tensor, layout: Layout, heads: Sequence[int], D: int
) -> Sequence[Tensor]:
    """A parameter of ours as the published entries that `published_names` names.

    Args: heads of queries, keys and values, D wide each
    """
    if is_turned(name, layout, value):
        return [value.T]
    if ".c_attn." not in name or layout is GPT2_LAYOUT:
        return value.chunk(len(published_names(name, layout)))
    q, k, v = value.split([number * D for number in heads])
    if layout.settings["pos"] == "rope":
        q = halves_from_pairs(q, D)
        k = halves_from_pairs(k, D)
    return [q, k, v]


def from_parts(name: str, parts: Sequence[Tensor], layout: Layout, D: int) -> Tensor:
    """The inverse of `parts_of`."""
    if is_turned(name, layout, parts[0]):
        return parts[0].T
    if ".c_attn." in name and layout.settings["pos"] == "rope":
        parts = [*(pairs_from_halves(x, D) for x in parts[:2]), parts[2]]
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


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
    layout = file_layout(entries)
    config, named = model.config, dict(model.named_parameters())
    hint = f"the file is for {flags(entries, path)}, and has to be as published, with its head"
    if layout in (GPT2_LAYOUT, BERT_LAYOUT):  # a refusal names the entries of the model's own
        layout = BERT_LAYOUT if config.kind == "bert" else GPT2_LAYOUT
    heads, D = config.qkv_heads, config.head_width
    try:
        empty = {name: parameter.to("meta") for name, parameter in named.items()}
        expected = published_entries(empty, layout, heads, D)
    except ValueError as error:
        raise refusal(path, f"{error}; {hint}") from None
    expected = {PREFIX.sub("", entry): like for entry, like in expected.items()}
    if layout is BERT_LAYOUT and "wpe.weight" in named:
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
            raise refusal(path, f"{entry} must equal {twin} in a model with --tied: {hint}")
    if strangers:
        more = f" and {len(strangers) - 4} more" if len(strangers) > 4 else ""
        raise refusal(path, f"remove these entries: {', '.join(strangers[:4])}{more}; {hint}")
    with torch.no_grad():
        for name, parameter in named.items():
            parts = [entries[entry] for entry in published_names(name, layout)]
            value = from_parts(name, parts, layout, D)
            if layout is BERT_LAYOUT and name == "wpe.weight":
                value = value.double() + entries[TOKEN_TYPES][0]
            parameter.copy_(value)
    return left_out


def settings_of(path: str | Path) -> dict[str, Any]:
    """The settings that the config.json beside weights says they are for; {} without one.

    Returns: {"model.layers": 16, ...}, those that decide what the weights compute
    Raises:  ValueError naming --init for a model that is not computed here
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    try:
        said = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return {}
    if "model_type" not in said:  # as in a run's
        return {}
    layout = next((one for one in LAYOUTS if one.model_type == said["model_type"]), None)
    if layout is None:
        known = ", ".join(one.model_type for one in LAYOUTS)
        raise refusal(path, f"is of type {said['model_type']!a}, and these are read: {known}")
    rope = {**(said.get("rope_scaling") or {}), **(said.get("rope_parameters") or {})}
    said |= rope
    found = {ours: said[key] for ours, key in layout.keys.items() if said.get(key) is not None}
    head_width = found["width"] // found["heads"]
    for key, wanted in [*layout.fixed.items(), ("head_dim", head_width)]:
        if said.get(key) not in (None, wanted):
            raise refusal(path, f"has {key} {said[key]}, and only {wanted} is computed here")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        found["rope_scaling"] = ":".join(f"{said[key]:g}" for key in Scaling.KEYS)
    elif kind == "default":
        found["rope_scaling"] = None
    else:
        raise refusal(path, f"scales rotary angles as {kind}, which is not computed here")
    return {f"model.{name}": value for name, value in (layout.settings | found).items()}


def size_for(path: str | Path, needed: int, tokenizer: str) -> ModelSize:
    """Rows of the file's embedding, if they suit a tokenizer, and how far its positions reach.

    A vocabulary suits where the file has a row for each id that the model needs, and no more than
    fill it up to a multiple of 64, as embeddings are padded. Two vocabularies of one size cannot be
    told apart.

    Args:     needed ids of the tokenizer that the model uses
    Raises:   ValueError naming --init and --tokenizer
    """
    entries, _ = read(path)
    V = matrix(entries, "wte.weight", path).shape[0]
    padded = -(-needed // 64) * 64
    if not needed <= V <= padded:
        needs = f"--tokenizer {tokenizer} one of {needed:,} (padded: {padded:,})"
        remedy = "prepare the text with that of these weights; BERT's WordPiece is not supported"
        raise refusal(path, f"has a vocabulary of {V:,}, and {needs}: {remedy}")
    is_learned = file_layout(entries).settings["pos"] == "learned"
    return ModelSize(V, matrix(entries, "wpe.weight", path).shape[0] if is_learned else None)


def file_layout(entries: dict[str, Tensor]) -> Layout:
    """The layout that these entries are in, by the name of the embedding; BERT's by default."""
    fitting = (one for one in LAYOUTS if f"{one.modules['wte'][0]}.weight" in entries)
    return next(fitting, BERT_LAYOUT)


def matrix(entries: dict[str, Tensor], name: str, path: str | Path) -> Tensor:
    """The last of the entries that make up a matrix of ours."""
    entry = published_names(name, file_layout(entries))[-1]
    if entry not in entries or entries[entry].dim() != 2:
        raise refusal(path, f"has no matrix {entry}, as GPT-2, BERT and Llama have: {RESAVE}")
    return entries[entry]


def flags(entries: dict[str, Tensor], path: str | Path) -> str:
    """The flags that build a file's model, except the number of heads, which it does not tell."""
    layout, (V, width) = file_layout(entries), matrix(entries, "wte.weight", path).shape
    told = layout.settings | {
        "layers": len({match[1] for match in map(LAYER.match, entries) if match}),
        "width": width,
        "mlp_width": matrix(entries, "h.0.mlp.c_fc.weight", path).shape[layout is GPT2_LAYOUT],
        "tied": "lm_head.weight" not in entries,
    }
    words = as_flags({f"model.{name}": told[name] for name in TOLD})
    heads = "--heads and --kv-heads" if layout is LLAMA_LAYOUT else "--heads"
    return f"{words} and its {heads}, with a vocabulary of {V}"


def read(path: str | Path) -> tuple[dict[str, Tensor], list[str]]:
    """The entries under their newer names, without prefix, and the names of those left out.

    No code in the file runs.
    """
    path, is_safetensors = Path(path), False
    if path.is_dir():
        inside = (path / name for name in IN_A_FOLDER)
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
    if not isinstance(saved, dict):
        raise refusal(path, f"holds a {type(saved).__name__}, not a dict: {RESAVE}")
    entries, left_out = {}, []
    for key, value in saved.items():
        name = PREFIX.sub("", str(key)).replace(".gamma", ".weight").replace(".beta", ".bias")
        if name == "embeddings.position_ids":
            left_out.append(name)
        elif not BUFFERS.fullmatch(name):
            if not (isinstance(value, Tensor) and value.is_floating_point()):
                raise refusal(path, f"{key} is not a tensor of floating-point numbers: {RESAVE}")
            if name in entries:
                raise refusal(path, f"{key} is there under another name too: {RESAVE}")
            entries[name] = value
    return entries, left_out


def load_shards(index: Path) -> dict[str, Tensor]:
    """Map the tensors of several safetensors files, as their index names them."""
    places = json.loads(index.read_text())["weight_map"]
    saved: dict[str, Tensor] = {}
    for name in sorted({*places.values()}):
        shard = index.parent / name
        if not shard.exists():
            raise refusal(index, f"names {name!a}, which is not beside it")
        try:
            saved |= safetensors.load(shard)
        except ValueError as error:
            raise refusal(shard, f"is a broken safetensors file: it {error}") from error
    if missing := places.keys() - saved.keys():
        raise refusal(index, f"names {min(missing)}, which is in none of its files")
    return saved


def refusal(path: str | Path, why: str) -> ValueError:
    return ValueError(f"--init {path}: {why}")


# ---- out


def export(source: str | Path, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
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
    if out.exists() or not out.parent.is_dir():
        raise ValueError(f"--out {out} exists, or its folder does not: name another")
    path = checkpoint_of(source)
    if path is None:
        raise ValueError(f"{source} is neither the folder of a run nor one of its checkpoints")
    run = trained(path)
    s = {name.removeprefix("model."): value for name, value in run.settings.items()}
    layout = layout_of(s)
    if layout is None:
        lacks = [{k: v for k, v in one.settings.items() if s[k] != v} for one in LAYOUTS]
        number = min(range(len(LAYOUTS)), key=lambda number: len(lacks[number]))
        asked = as_flags({f"model.{name}": value for name, value in lacks[number].items()})
        needs = asked or "as many --kv-heads as --heads"
        closest = LAYOUTS[number].model_type
        raise ValueError(f"{path} fits no published layout: the closest, {closest}, needs {needs}")
    say(f"reading {path}, step {run.step}")
    heads = (s["heads"], s["kv_heads"], s["kv_heads"])
    entries = published_entries(weights_of(path), layout, heads, s["width"] // s["heads"])
    config = transformers_config(run, s, layout)
    say(f"writing {out}, {sum(tensor.nbytes for tensor in entries.values()):,} bytes")
    if not out.suffix:
        encoding = get_encoding(run.settings["data.tokenizer"])
        config |= {"bos_token_id": encoding.eot_token, "eos_token_id": encoding.eot_token}
        with atomic_folder(out) as folder:
            (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
            with (folder / "model.safetensors").open("wb") as file:
                safetensors.save(file, entries, {"format": "pt"})
        return config
    with atomic_write(out) as file:
        # safetensors has no tensors that share bytes: its readers tie by name
        if out.suffix == ".safetensors":
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


def published_entries(
    weights: dict[str, Tensor], layout: Layout, heads: Sequence[int], D: int
) -> dict[str, Tensor]:
    """Our parameters under their published names; the inverse of `load_published`.

    Args:    heads of queries, keys and values, D wide each
    Example: BERT's h.0.attn.c_attn.bias (3 C,) becomes query, key and value of (C,) each
    """
    entries = {}
    for name, value in weights.items():
        parts = parts_of(name, value, layout, heads, D)
        for entry, part in zip(published_names(name, layout), parts, strict=True):
            entries[entry] = part.contiguous()
    if layout is BERT_LAYOUT:
        entries[TOKEN_TYPES] = torch.zeros(2, weights["wte.weight"].shape[1], dtype=torch.float32)
    return {e if e.startswith(HEADS) else layout.base + e: x for e, x in entries.items()}


def transformers_config(run: Trained, s: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """A run's settings by the names that transformers has for them, and what it computes."""
    head = "BertForPreTraining" if s["nsp"] else layout.architecture
    positions = "n_positions" if layout is GPT2_LAYOUT else "max_position_embeddings"
    config = {"model_type": layout.model_type, "architectures": [head], **layout.fixed}
    config |= {theirs: s[ours] for ours, theirs in layout.keys.items()}
    config[positions] = run.size.positions or run.settings["data.seq_len"]
    if scaling := s.get("rope_scaling") and Scaling.parsed(s["rope_scaling"]):
        config["rope_scaling"] = scaling.as_published()
        config[positions] = max(config[positions], int(scaling.factor * scaling.original))
    return config | {"vocab_size": run.size.vocab_size}


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
        print(f"{args.path}: as flags: {flags(read(args.path)[0], args.path)}")
        if said := settings_of(args.path):
            known = {name: value for name, value in said.items() if value is not None}
            print(f"--init takes these from its config.json: {as_flags(known)}")
        return
    config = export(args.path, args.out, print)
    print(f"{args.out}: {flags(read(args.out)[0], args.out)}")
    if args.out.suffix:
        print(f"transformers reads it with this config.json beside it: {json.dumps(config)}")


if __name__ == "__main__":
    exit_cleanly(main)
