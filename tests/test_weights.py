"""Loaded models compute what published ones do, and files that do not fit change nothing.

Each layout is tested twice: against the paper's equations, written out below with the published
names, and against `transformers` if that is installed. Weights are random, and so wide that every
entry counts; nothing is downloaded. Also: --init from a run of train.py takes its weights,
dimensions and tokenizer, and nothing else.

    python -m pytest tests/test_weights.py
"""

import io
import json
import math
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import FEW, TINY, metrics, names, read_log, refusal, widen

import config
import prepare
import sample
import train
from bert import BertConfig
from kernels.rotary import Scaling
from model import Transformer, TransformerConfig
from prepare import write_ranks
from support import checkpoint, published, weights
from support.published import GPT2_LAYOUT, load_into, published_views
from support.tokenizer import PD4K, get_encoding, read_ranks

LAYERS, HEADS, C, SEQ_LEN, VOCAB = 2, 4, 16, 12, 50
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
BYTES = get_encoding("bytes")
pytestmark = pytest.mark.usefixtures("no_sample_or_report")


def build(kind: str, **changes) -> Transformer:
    shape = dict(layers=LAYERS, heads=HEADS, width=C, mlp_width=4 * C)
    shape |= dict(seq_len=SEQ_LEN, vocab_size=VOCAB) | changes
    return (BertConfig if kind == "bert" else TransformerConfig)(**shape).build()


def scores(model: Transformer, *inputs: torch.Tensor | None) -> torch.Tensor:
    return model.logits(model(*inputs))


def draw(modules: dict[str, tuple], out: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Draw weights of these shapes, and biases as long as dimension `out`; not for embeddings."""
    generator, entries = torch.Generator().manual_seed(0), {}
    for name, shape in modules.items():
        has_bias = not name.endswith(("wte", "wpe", "embeddings"))
        for leaf, size in {"weight": shape, "bias": (shape[out],)}.items():
            if leaf == "weight" or has_bias:
                value = 0.2 * torch.randn(size, generator=generator)
                entries[f"{name}.{leaf}"] = value.to(dtype)
    return entries


def gpt_file(dtype=torch.float32, prefix: str = "transformer.") -> dict[str, torch.Tensor]:
    """Make a file of GPT-2's, whose matrices are (in, out)."""
    modules = {"wte": (VOCAB, C), "wpe": (SEQ_LEN, C)}
    for at in (f"h.{layer}" for layer in range(LAYERS)):
        modules |= {f"{at}.attn.c_attn": (C, 3 * C), f"{at}.attn.c_proj": (C, C)}
        modules |= {f"{at}.mlp.c_fc": (C, 4 * C), f"{at}.mlp.c_proj": (4 * C, C)}
        modules |= {f"{at}.ln_1": (C,), f"{at}.ln_2": (C,)}
    entries = draw({**modules, "ln_f": (C,)}, -1, dtype)
    for layer in range(LAYERS):  # buffers of older files
        mask = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.uint8).tril()
        entries[f"h.{layer}.attn.bias"] = mask[None, None]
        entries[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return {prefix + name: value for name, value in entries.items()}


def bert_file(dtype=torch.float32, prefix: str = "bert.", old: bool = False) -> dict:
    """Make a file of BERT's, whose matrices are (out, in). Old files name norms differently."""
    rows = {"word": VOCAB, "position": SEQ_LEN, "token_type": 2}
    modules = {f"embeddings.{name}_embeddings": (n, C) for name, n in rows.items()}
    for at in (f"encoder.layer.{layer}" for layer in range(LAYERS)):
        modules |= {f"{at}.attention.self.{name}": (C, C) for name in ("query", "key", "value")}
        modules |= {f"{at}.attention.output.dense": (C, C), f"{at}.output.dense": (C, 4 * C)}
        modules |= {f"{at}.intermediate.dense": (4 * C, C)}
        modules |= {f"{at}.{norm}.LayerNorm": (C,) for norm in ("attention.output", "output")}
    modules |= {"embeddings.LayerNorm": (C,), "pooler.dense": (C, C)}
    transform = "cls.predictions.transform"
    modules |= {f"{transform}.dense": (C, C), f"{transform}.LayerNorm": (C,)}
    entries = draw({**modules, "cls.seq_relationship": (2, C)}, 0, dtype)
    entries["cls.predictions.bias"] = torch.linspace(-1, 1, VOCAB).to(dtype)
    entries["embeddings.position_ids"] = torch.arange(SEQ_LEN)[None]
    file = {}
    for name, value in entries.items():
        if old:
            name = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        file[name if name.startswith("cls.") else prefix + name] = value
    return file


def save(file: object, tmp_path, **options):
    path = tmp_path / "weights.bin"
    torch.save(file, path, **options)
    return path


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == expected.dtype == dtype
    assert (result - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name].dtype == value.dtype and result[name].equal(value), name


# The papers' equations with the published names; this does not use model.py or weights.py


def attend(q, k, v, visible):
    """Compute softmax(q k' / sqrt D) v of (T, C) tensors, head by head."""
    D = C // HEADS
    outputs = []
    for head in range(HEADS):
        own = slice(head * D, (head + 1) * D)
        scores = q[:, own] @ k[:, own].T / math.sqrt(D)
        outputs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, own])
    return torch.cat(outputs, dim=-1)


def plain_gpt(w: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Compute GPT-2's logits (T, V) for tokens (T,). Its matrices are on the right: x @ w + b."""

    def norm(name, x):
        return F.layer_norm(x, (C,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    T = len(tokens)
    x = w["wte.weight"][tokens] + w["wpe.weight"][:T]
    for layer in range(LAYERS):
        at = f"h.{layer}"
        q, k, v = linear(f"{at}.attn.c_attn", norm(f"{at}.ln_1", x)).split(C, dim=-1)
        visible = torch.ones(T, T, dtype=torch.bool).tril()
        x = x + linear(f"{at}.attn.c_proj", attend(q, k, v, visible))
        y = linear(f"{at}.mlp.c_fc", norm(f"{at}.ln_2", x))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(f"{at}.mlp.c_proj", y)
    return norm("ln_f", x) @ w["wte.weight"].T


def plain_bert(w: dict, tokens: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Compute BERT's logits (T, V) for tokens (T,) of segment 0, attending to `real` tokens."""

    def norm(name, x):
        scale, shift = w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"]
        return F.layer_norm(x, (C,), scale, shift, 1e-12)

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def gelu(x):
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    T = len(tokens)
    words = w["embeddings.word_embeddings.weight"]
    x = words[tokens] + w["embeddings.position_embeddings.weight"][:T]
    x = norm("embeddings", x + w["embeddings.token_type_embeddings.weight"][0])
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        q, k, v = (linear(f"{at}.attention.self.{name}", x) for name in ("query", "key", "value"))
        y = linear(f"{at}.attention.output.dense", attend(q, k, v, real.expand(T, T)))
        x = norm(f"{at}.attention.output", x + y)
        y = linear(f"{at}.output.dense", gelu(linear(f"{at}.intermediate.dense", x)))
        x = norm(f"{at}.output", x + y)
    x = norm("cls.predictions.transform", gelu(linear("cls.predictions.transform.dense", x)))
    return x @ words.T + w["cls.predictions.bias"]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gpt_computes_the_published_function(tmp_path, dtype):
    # torch.compile and DDP add these prefixes; the file without is in the format of torch < 1.6
    prefix = "module._orig_mod.transformer." if dtype == torch.float32 else ""
    path = save(gpt_file(dtype, prefix), tmp_path, _use_new_zipfile_serialization=bool(prefix))
    model = build("gpt").to(dtype)
    assert load_into(model, path) == []
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    plain = gpt_file(dtype, prefix="")
    expected = torch.stack([plain_gpt(plain, row) for row in tokens])
    assert_close(scores(model, tokens), expected, dtype)


BERT_FILES = [
    (torch.float32, torch.float16, "bert.", False),
    (torch.float64, torch.float64, "", True),
]


@pytest.mark.parametrize("dtype, file_dtype, prefix, nsp", BERT_FILES)
def test_bert_computes_the_published_function(tmp_path, dtype, file_dtype, prefix, nsp):
    """Also from an old file in half precision: token type 0 is added in the model's precision.

    With --nsp, also the scores of "it follows" and "it does not", from the [CLS] of one segment.
    """
    model = build("bert", nsp=nsp).to(dtype)
    left_out = load_into(model, save(bert_file(file_dtype, prefix, not nsp), tmp_path))
    heads = ["cls.seq_relationship.bias", "cls.seq_relationship.weight"]
    heads += ["pooler.dense.bias", "pooler.dense.weight"]
    assert left_out == heads * (not nsp) + ["embeddings.token_type_embeddings.weight[1]"]
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    real = torch.ones(2, SEQ_LEN, dtype=torch.bool)
    real[1, 7:] = False
    plain = {name: value.to(dtype) for name, value in bert_file(file_dtype, prefix="").items()}
    expected = torch.stack([plain_bert(plain, *row) for row in zip(tokens, real, strict=True)])
    logits = scores(model, tokens, None, real.long() - 1)  # 0, and -1 for padding
    assert_close(logits[real], expected[real], dtype)
    if nsp:
        x = model(tokens)
        pooled = torch.tanh(x[:, 0] @ plain["pooler.dense.weight"].T + plain["pooler.dense.bias"])
        expected = pooled @ plain[heads[1]].T + plain[heads[0]]
        assert_close(model.follows(x.flatten(0, 1), torch.tensor([0, SEQ_LEN])), expected, dtype)


# Exporting a run's weights in the published layout


def own_checkpoint(folder, model: Transformer) -> None:
    """Save what an export reads of a run's checkpoint."""
    c = model.config
    names = ("layers", "heads", "width", "mlp_width", "pos", "qk_norm", "tied")
    settings = {f"model.{name}": getattr(c, name) for name in names}
    state = {"model": model.state_dict(), "step": 3, "tokenizer_fingerprint": "any"}
    state["config"] = settings | {"model.model": c.kind, "model.size": "nano"}
    if c.kind == "bert":
        state["config"]["model.nsp"] = c.nsp
    state["model_size"] = {"vocab_size": c.vocab_size, "positions": c.seq_len}
    state["config"]["data.tokenizer"] = "bytes"
    state |= {"clock": {}, "best_step": 0}
    checkpoint.save(folder / "step-00000003.pt", state)


def export(model: Transformer, tmp_path, name: str = "out") -> tuple[Path, dict]:
    """Export a run with this model; return the folder, and its config.json."""
    own_checkpoint(tmp_path / "run", model)
    out = tmp_path / name
    weights.main(["export", str(tmp_path / "run"), "--out", str(out)])
    return out, json.loads((out / "config.json").read_text())


EXPORTED = [("gpt", {"mlp_width": 24}), ("gpt", {"tied": False}), ("bert", {"nsp": True})]


@pytest.mark.parametrize("kind, changes", EXPORTED)
def test_exported_weights_load_unchanged(tmp_path, kind, changes):
    """Bit for bit, under the published names."""
    model, result = widen(build(kind, **changes)).eval(), build(kind, **changes)
    path, config = export(model, tmp_path)
    load_into(result, path)
    assert_same(result.state_dict(), model.state_dict())
    assert config["vocab_size"] == VOCAB and SEQ_LEN in config.values()
    assert names(path) == ["config.json", "model.safetensors"]


def test_an_impossible_export_is_one_line_and_writes_no_file(tmp_path):
    own_checkpoint(tmp_path / "run", build("gpt"))
    own_checkpoint(tmp_path / "normed", build("gpt", qk_norm=True))
    before = names(tmp_path)
    for source, to, problem in (
        ("run", "normed", "normed: exists"),
        ("normed", "out", "a gpt2 export needs --no-qk-norm"),
    ):
        argv = ["export", str(tmp_path / source), "--out", str(tmp_path / to)]
        assert problem in refusal(weights.main, argv)
        assert names(tmp_path) == before


# Comparison with transformers, in both directions


@pytest.mark.parametrize("kind, more", [("gpt", {}), ("bert", {}), ("bert", {"nsp": True})])
def test_transformers_computes_the_same_and_its_weights_load(tmp_path, kind, more):
    """It loads what we export, and we load the state dict of its model."""
    transformers = pytest.importorskip("transformers")
    model, again = widen(build(kind, **more)), build(kind, **more)
    folder, config = export(model, tmp_path)
    theirs = getattr(transformers, config["architectures"][0])
    read, notes = theirs.from_pretrained(folder, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"], notes
    tokens = torch.randint(VOCAB, (3, SEQ_LEN))
    real = torch.arange(SEQ_LEN) < torch.tensor([[12], [7], [1]])
    with torch.no_grad():
        output = read.eval()(tokens, attention_mask=real.long())
        x = model(tokens, None, real.long() - 1)
        logits = model.logits(x)
        if more:
            follows = model.follows(x.flatten(0, 1), SEQ_LEN * torch.arange(3))
            assert_close(follows, output.seq_relationship_logits, torch.float32)
    assert_close(logits[real], (output.prediction_logits if more else output.logits)[real], x.dtype)
    path = save(read.state_dict(), folder)
    assert torch.load(path).keys() & {"lm_head.weight", TWIN}, "has copies of tied weights"
    load_into(again, path)
    assert published.settings_in(path)["model.mlp_width"] == 4 * C
    assert_same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_in_several_files_is_trained_and_loads_in_transformers(tied, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    shape = dict(hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=5e5, vocab_size=4416)
    shape["rope_scaling"] = Scaling.parsed("8:1:4:200").as_published() if tied else None
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, tie_word_embeddings=tied)
    )
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 else 0.0, std=0.1)
    theirs.save_pretrained("llama", max_shard_size="60KB")
    write_ranks(Path("tokenizer.model"), {**read_ranks(PD4K), b".\n": 4096})
    prepare.main([str(TINY), "--out", "store", "--tokenizer", "tokenizer.model"])
    fitting = "--init llama --data store --seq-len 32 --device cpu --lr 1e-3"
    for wrong in ("--kv-heads 4", "--no-tied" if tied else "--tied"):
        with pytest.raises(ValueError, match=f"is a model with .* not {wrong}"):
            train.main(f"{fitting} {wrong} --out no".split())

    def logits(model, tokens):
        return model.eval()(tokens).logits

    tokens = torch.randint(4416, (2, 32))
    budget = "--batch-tokens 128 --tokens 2048 --ltd --ltd-start 16 --pack --out run"
    started, _ = config.parse_or_resume(f"{fitting} {budget}".split())
    ours = weights.initial_model(config.transformer_config(started, 4416), started)
    assert (scores(ours, tokens) - logits(theirs, tokens)).abs().max() < 1e-4
    assert train.main(f"{fitting} {budget}".split()) == 0
    weights.main(["export", "run", "--out", "given"])
    back = transformers.AutoModelForCausalLM.from_pretrained("given")
    trained = sample.load_run("run", "last")[1]
    assert (scores(trained, tokens) - logits(back, tokens)).abs().max() < 1e-4
    assert (logits(back, tokens) - logits(theirs, tokens)).abs().max() > 0.01, "it has learned"
    assert back.config.eos_token_id == 4098


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_several_files_and_their_index_load_as_one_model(name, tmp_path):
    parts = {"1": {"wte.weight": torch.rand(3, 2)}, "2": {"wpe.weight": torch.rand(4, 2)}}
    for number, part in parts.items():
        with (tmp_path / number).open("wb") as out:
            if name.endswith("bin"):
                torch.save(part, out)
            else:
                published.save_file(out, part)
    listed = {key: number for number, part in parts.items() for key in part}
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": listed}))
    assert_same(published.entries_in(tmp_path), parts["1"] | parts["2"])
    assert published.settings_in(tmp_path) == {"data.seq_len": 4}
    assert weights.source_of(str(tmp_path)) is None


# Files that do not fit: one line says why, and the model does not change

WTE, C_ATTN = "transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"
QUERY = "encoder.layer.1.attention.self.query.weight"
TYPES, TWIN = "embeddings.token_type_embeddings.weight", "cls.predictions.decoder.bias"
MISFITS = [  # kind of file, entries changed or deleted (None), changes to the model, problem
    ("gpt", {}, dict(seq_len=8), "wpe.weight must be (8, 16) but is (12, 16)"),
    ("gpt", {}, dict(norm="rmsnorm", bias=False, pos="rope"), "embed_tokens.weight must be"),
    ("bert", {f"bert.{QUERY}": None}, {}, f"{QUERY} must be (16, 16) but is absent"),
    ("bert", {"qa.weight": torch.ones(2)}, {}, "qa.weight has no place in this model"),
    ("gpt", {"lm_head.weight": torch.ones(50, 16)}, {}, "lm_head.weight has no place"),
    ("gpt", {"wte.weight": torch.ones(50, 16)}, {}, "wte.weight occurs twice"),
    ("gpt", {C_ATTN: torch.ones(16, 48).char()}, {}, "is not a floating-point tensor"),
]


def assert_refused(model: Transformer, path, problem: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = refusal(load_into, model, path)
    assert message.startswith(f"--init {path}: ") and problem in message, message
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize(("kind", "edits", "changes", "problem"), MISFITS)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, kind, edits, changes, problem):
    file = (gpt_file() if kind == "gpt" else bert_file()) | edits
    file = {name: value for name, value in file.items() if value is not None}
    assert_refused(build(kind, **changes), save(file, tmp_path), problem)


def test_a_vocabulary_has_a_row_for_each_id_and_at_most_the_usual_padding(tmp_path):
    def size(rows: int, seq_len: int = SEQ_LEN):
        path = save(gpt_file() | {WTE: torch.zeros(rows, C)}, tmp_path)
        flat = {"model.init": str(path), "data.seq_len": seq_len}
        return weights.model_size(config.build(flat, will_run=False), BYTES)  # which needs 257

    assert size(257) == (257, SEQ_LEN) and size(320) == (320, SEQ_LEN)
    for rows in 256, 321:
        assert re.search("--init .*: .*--tokenizer bytes needs 257", refusal(size, rows))
    assert refusal(size, 257, 13).endswith("has only 12 positions")


def test_a_broken_file_or_one_without_a_state_dict_changes_nothing(tmp_path):
    model, path = build("gpt"), save(gpt_file(), tmp_path)
    whole = path.read_bytes()
    torn = [EXAMPLE[:size] for size in range(0, len(EXAMPLE), 5)]
    for content in [*torn, EXAMPLE.replace(b'"U8"', b'"F8"'), whole[: len(whole) // 2]]:
        path.write_bytes(content)
        assert_refused(model, path, "cannot be loaded")
    nested = save({"model": gpt_file()}, tmp_path)
    assert_refused(model, nested, "model occurs twice or is not a")


LLAMA = dict(model_type="llama", hidden_size=32, num_attention_heads=4, num_hidden_layers=3)
LLAMA["rms_norm_eps"] = 1e-5
OTHER_ROPE = {"rope_parameters": {"rope_type": "default"}}  # rope_scaling has precedence
GPT2 = dict(model_type="gpt2", n_embd=32, n_head=4, n_layer=3)


UNSUPPORTED = [
    (LLAMA | {"model_type": "mamba"}, "has model_type 'mamba', not gpt2, bert or llama"),
    (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps must be 1e-05, not 1e-06"),
    (LLAMA | {"head_dim": 16}, "head_dim must be 8, not 16"),
    (LLAMA | {"rope_parameters": {"type": "llama3"}}, "only a complete llama3"),
    (
        LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor must be 1.0",
    ),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights must be True"),
    (GPT2 | {"moe": 1, "alibi": 1}, "unknown keys in config.json: alibi, moe"),
    (GPT2 | {"activation_function": "relu"}, r"activation must be gelu_new or gelu, got relu"),
    (LLAMA | {"rope_scaling": {"type": "yarn"}} | OTHER_ROPE, "rope_type yarn"),
    (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx must be False"),
]


@pytest.mark.parametrize(("said", "problem"), UNSUPPORTED)
def test_an_unsupported_config_is_refused_in_one_line(said, problem, tmp_path):
    argv = ["--init", folder_of(said, tmp_path)]
    assert re.search(problem, refusal(config.parse_or_resume, argv))


def folder_of(said: dict, tmp_path) -> str:
    """Make a folder of published weights, of which only config.json will be read."""
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(said))
    return str(tmp_path)


def test_missing_keys_have_published_defaults(tmp_path):
    def settings(said: dict) -> config.Config:
        return config.parse_or_resume(["--init", folder_of(said, tmp_path)])[0]

    llama = settings(LLAMA)
    assert (llama.model.rope_theta, llama.model.tied, llama.model.kv_heads) == (1e4, False, 4)
    assert (llama.data.seq_len, llama.model.mlp_width) == (2048, 11008)
    assert settings(LLAMA | {"max_position_embeddings": 131072}).data.seq_len == 2048
    assert settings({"model_type": "gpt2"}).model.layers == 12
    gpt2 = settings(GPT2 | {"alibi": None, "n_positions": 48})
    assert (gpt2.data.seq_len, gpt2.optim.batch_tokens, gpt2.model.tied) == (48, 8160, True)
    problem = "scale_attn_weights must be True"
    assert problem in refusal(settings, GPT2 | {"scale_attn_weights": False})


@pytest.mark.parametrize("name", ["GPT2Config", "BertConfig", "LlamaConfig"])
def test_every_key_that_transformers_writes_is_known(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    said = getattr(transformers, name)().to_dict()
    said |= {"rms_norm_eps": 1e-5} if name == "LlamaConfig" else {}
    assert published.settings_in(folder_of(said, tmp_path))["data.seq_len"] > 500


def nanogpt_file(bias: bool = True) -> dict:
    """Make what nanoGPT's train.py saves: matrices are (out, in), and the tied head is repeated."""
    entries = gpt_file(prefix="")
    turned = {n: x.T if n[:2] == "h." and x.dim() == 2 else x for n, x in entries.items()}
    saved = {f"_orig_mod.transformer.{name}": value for name, value in turned.items()}
    saved["_orig_mod.lm_head.weight"] = entries["wte.weight"]
    shape = dict(n_layer=LAYERS, n_head=HEADS, n_embd=C, block_size=SEQ_LEN, vocab_size=VOCAB)
    args = shape | dict(bias=bias, dropout=0.0)
    return {"model": saved, "model_args": args, "iter_num": 3, "config": {"out_dir": "out"}}


def test_nanogpts_file_loads_with_its_exact_gelu(tmp_path):
    path = save(nanogpt_file(), tmp_path)
    settings = config.parse_or_resume(["--init", str(path)])[0]
    shape = config.transformer_config(settings, VOCAB, SEQ_LEN)
    assert (shape.gelu, shape.layers, settings.data.seq_len) == ("none", LAYERS, SEQ_LEN)
    model, like = Transformer(shape), build("gpt")
    load_into(model, path)
    load_into(like, save(gpt_file(), tmp_path))
    assert_same(model.state_dict(), like.state_dict())
    path = save(nanogpt_file(bias=False), tmp_path)
    problem = "bias must be True, not False"
    assert problem in refusal(config.parse_or_resume, ["--init", str(path)])


def test_a_stored_head_may_be_the_embedding_or_a_separate_matrix(tmp_path):
    file, tokens = gpt_file(), torch.arange(SEQ_LEN)[None]
    model, own = build("gpt"), build("gpt", tied=False)
    load_into(model, save(file | {"lm_head.weight": file[WTE]}, tmp_path))
    path = save(file | {"lm_head.weight": 2 * file[WTE]}, tmp_path)
    load_into(own, path)
    assert torch.allclose(scores(own, tokens), 2 * scores(model, tokens))


# The safetensors format. The example has two tensors: a with bytes 1 2 3, and b with 1.0 and -2.0
# in fp32, which comes first because its dtype is wider.

HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"U8","shape":[3,1],"data_offsets":[8,11]}}'
)
EXAMPLE = (
    b"\x90\x00\x00\x00\x00\x00\x00\x00"  # 144 bytes of header
    + HEADER
    + b" " * (144 - len(HEADER))
    + b"\x00\x00\x80\x3f\x00\x00\x00\xc0"  # 1.0, -2.0
    + b"\x01\x02\x03"
)
TENSORS = {"a": torch.tensor([[1], [2], [3]], dtype=torch.uint8), "b": torch.tensor([1.0, -2.0])}


def as_safetensors(tensors) -> bytes:
    out = io.BytesIO()
    published.save_file(out, tensors)
    return out.getvalue()


def of_every_dtype() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    tensors = {"none": torch.empty(0, 4), "one": torch.tensor(3.5), '"é"': torch.tensor([1.0])}
    for name, dtype in published.DTYPES.items():
        small = torch.randint(0, 2, (3, 5), generator=random)
        wide = torch.randn(3, 5, generator=random)
        tensors[f"of {name}"] = (wide if dtype.is_floating_point else small).to(dtype)
    return tensors


def test_the_worked_example_loads_and_its_file_is_never_changed(tmp_path):
    assert len(HEADER) == 140 and as_safetensors(TENSORS) == EXAMPLE
    path = tmp_path / "example.safetensors"
    path.write_bytes(EXAMPLE)
    result = published.load_file(path)
    assert_same(result, TENSORS)
    result["b"].fill_(5)
    assert path.read_bytes() == EXAMPLE and result["b"].tolist() == [5, 5]
    expected = of_every_dtype() | {"turned": torch.randn(4, 3).T}
    path.write_bytes(as_safetensors(expected))
    assert_same(published.load_file(path), expected)


def test_the_safetensors_library_writes_and_reads_the_same_bytes(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    library.save_file(of_every_dtype(), theirs, metadata={"format": "pt"})
    ours.write_bytes(as_safetensors(of_every_dtype()))
    assert ours.read_bytes() == theirs.read_bytes()
    assert_same(published.load_file(theirs), of_every_dtype())
    assert_same(library.load_file(ours), of_every_dtype())


# --init from a run of train.py


@pytest.fixture
def begin(store_dir, tmp_path, monkeypatch):
    """Start a run with --init, stop it before its first step, and return the weights."""
    monkeypatch.chdir(tmp_path)

    def start(init, flags: str = "", out: str = "next", data=store_dir) -> dict:
        first = {}

        def noted(self, of):
            first.update(self.model.state_dict())
            raise KeyboardInterrupt

        argv = f"--init {init} --data {data} --out {out} {FEW} {flags}"
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(train.Trainer, "train_step", noted)
            train.main(argv.split())
        return first

    return start


def newest(folder) -> Path:
    return checkpoint.find(folder, "last")


def made_of(folder) -> tuple[dict, dict]:
    """Return the settings of a run and the size of its model."""
    about = json.loads((folder / "config.json").read_text())
    return about["config"], about["model_size"]


def test_a_run_starts_with_the_weights_of_another(begin, run_of, tmp_path, monkeypatch):
    """Kind, size, layers, heads, widths, positions and the row length follow from that run."""
    saved = checkpoint.load(newest(run_of()))["model"]
    assert_same(begin(run_of()), saved)
    (ours, our_size), (theirs, their_size) = map(made_of, (tmp_path / "next", run_of()))
    names = [*weights.MODEL_SETTINGS, "data.seq_len", "data.tokenizer"]
    names.append("optim.beta2")  # follows from the size nano
    assert our_size == their_size and all(ours[name] == theirs[name] for name in names)
    assert ours["model.init"] == str(newest(run_of())), "fixed, even if the other run continues"
    # Control: without --init, weights depend on the seed.
    monkeypatch.setattr(train, "initial_model", lambda shape, *_: Transformer(shape))
    with pytest.raises(AssertionError):
        assert_same(begin(run_of(), out="control"), saved)


def test_init_works_with_a_bert_with_pairs_and_with_learned_positions(begin, run_of, tmp_path):
    source = run_of("--model bert --nsp --pos learned")
    saved = checkpoint.load(newest(source))["model"]
    assert_same(begin(source), saved)
    kept = {n: v for n, v in saved.items() if not n.startswith(("pooler", "nsp"))}
    assert_same(begin(source, "--no-nsp", out="alone"), kept)
    assert made_of(tmp_path / "alone")[1] == {"vocab_size": 320, "positions": 2048}
    message = refusal(begin, source, "--seq-len 4096 --batch-tokens 8192", out="long")
    assert re.search(r"--seq-len 4096: --init .* has only 2048 positions", message)


def test_init_is_read_until_there_is_a_checkpoint(begin, store_dir, tmp_path, capsys):
    """The published weights have 48 positions, which no --size has."""
    model = Transformer(TransformerConfig(4, 2, 32, 128, 48, vocab_size=257))
    source = save(published_views(model.state_dict(), GPT2_LAYOUT), tmp_path)
    flags = "--pos learned --tied --layers 4 --heads 2 --width 32 --seq-len 32 --ltd --ltd-start 8"
    assert_same(begin(source, flags, out="new"), model.state_dict())
    output = capsys.readouterr().out
    assert f"gpt from {source}: " in output
    shutil.copytree(tmp_path / "new", tmp_path / "late")
    assert train.main(["--resume", "--out", "new"]) == 0, "starts over"
    whole = metrics(read_log(tmp_path / "new"))
    begin("new")
    assert made_of(tmp_path / "next")[0]["optim.lr"] == 0.002, "that of the run before"
    source.unlink()
    newest(tmp_path / "new").unlink()
    assert train.main(["--resume", "--out", "new"]) == 0
    assert metrics(read_log(tmp_path / "new")) == whole
    with pytest.raises(FileNotFoundError, match=source.name):
        train.main(["--resume", "--out", "late"])


def test_init_from_a_shadow_gives_every_present_layer_its_own_weights(begin, run_of):
    """Shared weights are copied to each layer; absent layers are left out."""
    group, layers = "--pseudo-group 2 --pseudo-until 0.99", "--pseudo-layers 2 --pseudo-until 0.9"
    for flags, owners in (group, (0, 1, 0, 1)), (layers, (0, -1, -1, 3)):
        path = newest(run_of(f"--pseudo {flags}"))
        state = checkpoint.load(path)
        assert tuple(state["pseudo"]["owners"]) == owners
        assert_same(begin(path, out=f"next{owners[1]}"), weights.real_weights(state))


def test_init_refuses_another_tokenizer_and_damaged_weights(begin, run_of, tmp_path):
    """tests/test_mistakes.py has more refusals."""
    source = newest(run_of())
    state = checkpoint.load(source) | {"tokenizer_fingerprint": "another"}
    checkpoint.save(tmp_path / "changed/step-00000004.pt", state)
    assert "with tokenizer bytes, but the store has" in refusal(begin, tmp_path / "changed")
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    assert "damaged.pt is damaged" in refusal(begin, tmp_path / "damaged.pt")
    assert not (tmp_path / "next").exists()
