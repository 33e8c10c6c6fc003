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
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import BYTES, FEW, metrics, names, read_log, refusal, same, widen

import config
import sample
import train
from bert import BertConfig
from kernels.rotary import Scaling
from model import Transformer, TransformerConfig
from support import checkpoint, published, weights
from support.published import GPT2_LAYOUT, load_into, published_views

LAYERS, HEADS, C, SEQ_LEN, VOCAB = 2, 4, 16, 12, 50
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
pytestmark = pytest.mark.usefixtures("no_sample_or_report")


def build(kind: str, **changes) -> Transformer:
    shape = dict(layers=LAYERS, heads=HEADS, width=C, mlp_width=4 * C)
    shape |= dict(seq_len=SEQ_LEN, vocab_size=VOCAB) | changes
    return (BertConfig if kind == "bert" else TransformerConfig)(**shape).build()


def scores(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model.logits(model(tokens))


def save(file: object, tmp_path, **options):
    path = tmp_path / "weights.bin"
    torch.save(file, path, **options)
    return path


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == expected.dtype == dtype
    assert (result - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


# The papers' equations with the published names; this does not use model.py or weights.py. Here
# `w` is a function: a parameter's name and shape -> its values.


def norm(w, name, x, eps):
    return F.layer_norm(x, (C,), w(f"{name}.weight", C), w(f"{name}.bias", C), eps)


def attend(q, k, v, visible):
    """Compute softmax(q k' / sqrt D) v of (T, C) tensors, head by head."""
    D = C // HEADS
    outputs = []
    for head in range(HEADS):
        own = slice(head * D, (head + 1) * D)
        scores = q[:, own] @ k[:, own].T / math.sqrt(D)
        outputs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, own])
    return torch.cat(outputs, dim=-1)


def plain_gpt(w, tokens: torch.Tensor) -> torch.Tensor:
    """Compute GPT-2's logits (T, V) for tokens (T,). Its matrices are on the right: x @ w + b."""

    def linear(name, x, out):
        return x @ w(f"{name}.weight", x.shape[-1], out) + w(f"{name}.bias", out)

    T, words = len(tokens), w("wte.weight", VOCAB, C)
    x = words[tokens] + w("wpe.weight", SEQ_LEN, C)[:T]
    for at in (f"h.{layer}" for layer in range(LAYERS)):
        qkv = linear(f"{at}.attn.c_attn", norm(w, f"{at}.ln_1", x, 1e-5), 3 * C)
        visible = torch.ones(T, T, dtype=torch.bool).tril()
        x = x + linear(f"{at}.attn.c_proj", attend(*qkv.split(C, dim=-1), visible), C)
        y = linear(f"{at}.mlp.c_fc", norm(w, f"{at}.ln_2", x, 1e-5), 4 * C)
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(f"{at}.mlp.c_proj", y, C)
    return norm(w, "ln_f", x, 1e-5) @ words.T


ALL = torch.tensor(True)


def plain_bert(w, tokens: torch.Tensor, real: torch.Tensor = ALL) -> tuple[torch.Tensor, ...]:
    """Compute BERT's logits (T, V) for tokens (T,) of segment 0, attending to `real` tokens.

    Returns: also the scores (2,) of "it follows" and "it does not", from the first token, [CLS]
    """

    def linear(name, x, out):
        return x @ w(f"{name}.weight", out, x.shape[-1]).T + w(f"{name}.bias", out)

    T, words = len(tokens), w("embeddings.word_embeddings.weight", VOCAB, C)
    x = words[tokens] + w("embeddings.position_embeddings.weight", SEQ_LEN, C)[:T]
    x = x + w("embeddings.token_type_embeddings.weight", 2, C)[0]
    x = norm(w, "embeddings.LayerNorm", x, 1e-12)
    for at in (f"encoder.layer.{layer}" for layer in range(LAYERS)):
        q, k, v = (linear(f"{at}.attention.self.{n}", x, C) for n in ("query", "key", "value"))
        y = linear(f"{at}.attention.output.dense", attend(q, k, v, real.expand(T, T)), C)
        x = norm(w, f"{at}.attention.output.LayerNorm", x + y, 1e-12)
        y = linear(f"{at}.output.dense", F.gelu(linear(f"{at}.intermediate.dense", x, 4 * C)), C)
        x = norm(w, f"{at}.output.LayerNorm", x + y, 1e-12)
    follows = linear("cls.seq_relationship", torch.tanh(linear("pooler.dense", x[0], C)), 2)
    x = F.gelu(linear("cls.predictions.transform.dense", x, C))
    x = norm(w, "cls.predictions.transform.LayerNorm", x, 1e-12)
    return x @ words.T + w("cls.predictions.bias", VOCAB), follows


def drawn(equations, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Draw each parameter that the equations ask for."""
    generator, entries = torch.Generator().manual_seed(0), {}

    def draw(name, *shape):
        entries[name] = 0.2 * torch.randn(shape, generator=generator)
        return entries[name]

    equations(draw, torch.tensor([0]))
    return {name: value.to(dtype) for name, value in entries.items()}


def gpt_file(dtype=torch.float32, prefix: str = "transformer.") -> dict[str, torch.Tensor]:
    entries = drawn(plain_gpt, dtype)
    mask = torch.ones(1, 1, SEQ_LEN, SEQ_LEN, dtype=torch.uint8).tril()
    for at in (f"h.{layer}.attn" for layer in range(LAYERS)):  # buffers of older files
        entries |= {f"{at}.bias": mask, f"{at}.masked_bias": torch.tensor(-1e4)}
    return {prefix + name: value for name, value in entries.items()}


def bert_file(dtype=torch.float32, prefix: str = "bert.", old: bool = False) -> dict:
    """Make a file of BERT's. Old files name norms differently."""
    entries = drawn(plain_bert, dtype)
    entries["embeddings.position_ids"] = torch.arange(SEQ_LEN)[None]
    names = {name: name if name.startswith("cls.") else prefix + name for name in entries}
    if old:
        names = {n: x.replace("Norm.weight", "Norm.gamma") for n, x in names.items()}
        names = {n: x.replace("Norm.bias", "Norm.beta") for n, x in names.items()}
    return {names[name]: value for name, value in entries.items()}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gpt_computes_the_published_function(tmp_path, dtype):
    # torch.compile and DDP add these prefixes; the file without is in the format of torch < 1.6
    prefix = "module._orig_mod.transformer." if dtype == torch.float32 else ""
    path = save(gpt_file(dtype, prefix), tmp_path, _use_new_zipfile_serialization=bool(prefix))
    model, plain = build("gpt").to(dtype), gpt_file(dtype, prefix="")
    assert load_into(model, path) == []
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    expected = torch.stack([plain_gpt(lambda name, *_: plain[name], row) for row in tokens])
    assert_close(scores(model, tokens), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bert_computes_the_published_function(tmp_path, dtype):
    """Also from an old file and in half precision: token type 0 is added in the model's."""
    nsp = old = dtype == torch.float64
    file_dtype, prefix = (dtype, "") if old else (torch.float16, "bert.")
    model = build("bert", nsp=nsp).to(dtype)
    left_out = load_into(model, save(bert_file(file_dtype, prefix, old), tmp_path))
    heads = ["cls.seq_relationship.bias", "cls.seq_relationship.weight"]
    heads += ["pooler.dense.bias", "pooler.dense.weight"]
    assert left_out == heads * (not nsp) + ["embeddings.token_type_embeddings.weight[1]"]
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    real = torch.arange(SEQ_LEN) < torch.tensor([[SEQ_LEN], [7]])
    plain = {name: value.to(dtype) for name, value in bert_file(file_dtype, prefix="").items()}
    x = model(tokens, None, real.long() - 1)  # 0, and -1 for padding
    for row, logits in enumerate(model.logits(x)):
        expected, follows = plain_bert(lambda name, *_: plain[name], tokens[row], real[row])
        assert_close(logits[real[row]], expected[real[row]], dtype)
        if nsp:
            assert_close(model.follows(x[row], torch.tensor([0]))[0], follows, dtype)


# Exporting a run's weights in the published layout


def test_an_impossible_export_is_one_line_and_writes_no_file(run_of, tmp_path):
    out = tmp_path / "out"
    for to, problem in (tmp_path, "exists already"), (out, "a gpt2 export needs --pos learned"):
        assert problem in refusal(weights.main, ["export", str(run_of()), "--out", str(to)])
    assert not names(tmp_path)


@pytest.mark.parametrize("flags", ["--tied", "--no-tied", "--model bert", "--model bert --nsp"])
def test_an_export_loads_bit_for_bit_and_transformers_computes_the_same(
    flags, run_of, tmp_path, capsys
):
    """We load the state dict of its model, too."""
    _, ran, state = sample.load_run(run_of(f"{flags} --pos learned"), "last")
    shape = replace(ran.config, mlp_width=24)
    model, again = widen(shape.build()).eval(), shape.build()
    state["model"], state["config"]["model.mlp_width"] = model.state_dict(), 24
    checkpoint.save(checkpoint.step_path(tmp_path / "run", state["step"]), state)
    folder = tmp_path / "out"
    weights.main(["export", str(tmp_path / "run"), "--out", str(folder)])
    assert f"wrote {folder}: config.json and model.safetensors\n" in capsys.readouterr().out
    assert names(folder) == ["config.json", "model.safetensors"]
    load_into(again, folder)
    assert same(again.state_dict(), model.state_dict())
    about = json.loads((folder / "config.json").read_text())
    assert about["vocab_size"] == 320 and 2048 in about.values()

    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, about["architectures"][0])
    read, notes = theirs.from_pretrained(folder, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"], notes
    tokens = torch.randint(257, (3, SEQ_LEN))
    real = torch.arange(SEQ_LEN) < torch.tensor([[12], [7], [1]])
    with torch.no_grad():
        output = read.eval()(tokens, attention_mask=real.long())
        x = model(tokens, None, real.long() - 1)
        logits = model.logits(x)
        if "nsp" in flags:
            follows = model.follows(x.flatten(0, 1), SEQ_LEN * torch.arange(3))
            assert_close(follows, output.seq_relationship_logits, torch.float32)
    theirs = output.prediction_logits if "nsp" in flags else output.logits
    assert_close(logits[real], theirs[real], torch.float32)
    path = save(read.state_dict(), folder)
    copies_of_tied_weights = {"lm_head.weight", "cls.predictions.decoder.bias"}
    assert torch.load(path).keys() & copies_of_tied_weights
    again = shape.build()
    load_into(again, path)
    assert published.settings_in(path)["model.mlp_width"] == 24
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_in_several_files_is_trained_and_loads_in_transformers(
    tied, store_dir, tmp_path, monkeypatch
):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    shape = dict(hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=5e5, vocab_size=320)
    shape |= dict(tie_word_embeddings=tied)
    shape["rope_scaling"] = Scaling.parsed("8:1:4:200").as_published() if tied else None
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 else 0.0, std=0.1)
    theirs.save_pretrained("llama", max_shard_size="60KB")
    assert Path("llama/model.safetensors.index.json").exists()

    def logits(model):
        return model.eval()(tokens).logits

    tokens = torch.randint(320, (2, 32))
    line = f"--init llama --data {store_dir} --seq-len 32 --device cpu --lr 1e-3 --out run"
    line += " --batch-tokens 128 --tokens 2048 --ltd --ltd-start 16 --pack"
    started, _ = config.parse_or_resume(line.split())
    ours = weights.initial_model(config.transformer_config(started, 320), started)
    assert (scores(ours, tokens) - logits(theirs)).abs().max() < 1e-4
    assert train.main(line.split()) == 0
    weights.main(["export", "run", "--out", "given"])
    back = transformers.AutoModelForCausalLM.from_pretrained("given")
    trained = sample.load_run("run", "last")[1]
    assert (scores(trained, tokens) - logits(back)).abs().max() < 1e-4
    assert (logits(back) - logits(theirs)).abs().max() > 0.01, "it has learned"
    assert back.config.eos_token_id == BYTES.eot_token


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_several_files_and_their_index_load_as_one_model(name, tmp_path):
    one, two = {"wte.weight": torch.rand(3, 2)}, {"wpe.weight": torch.rand(4, 2)}
    torch.save(one, tmp_path / "1")
    (tmp_path / "2").write_bytes(as_safetensors(two))
    listed = dict.fromkeys(one, "1") | dict.fromkeys(two, "2")
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": listed}))
    assert same(published.entries_in(tmp_path), one | two)
    assert published.settings_in(tmp_path) == {"data.seq_len": 4}
    assert weights.source_of(str(tmp_path)) is None


# Files that do not fit: one line says why, and the model does not change

WTE, C_ATTN = "transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"
QUERY = "encoder.layer.1.attention.self.query.weight"
MISFITS = [  # kind of file, entries changed or deleted (None), changes to the model, problem
    ("gpt", {}, dict(seq_len=8), "wpe.weight must be (8, 16) but is (12, 16)"),
    ("gpt", {}, dict(norm="rmsnorm", bias=False, pos="rope"), "embed_tokens.weight must be"),
    ("bert", {f"bert.{QUERY}": None}, {}, f"{QUERY} must be (16, 16) but is absent"),
    ("bert", {"qa.weight": torch.ones(2)}, {}, "qa.weight has no place in this model"),
    ("gpt", {"lm_head.weight": torch.ones(50, 16)}, {}, "lm_head.weight has no place"),
    (
        "gpt",
        {"wte.weight": torch.ones(50, 16)},
        {},
        "wte.weight is no floating-point tensor, or occurs twice",
    ),
    ("gpt", {WTE: torch.full((50, 16), math.inf)}, {}, "wte.weight is not finite"),
    ("gpt", {"model": {}}, {}, "model is no floating-point tensor"),
    ("gpt", {C_ATTN: torch.ones(16, 48).char()}, {}, "is no floating-point tensor"),
]


def assert_refused(model: Transformer, path, problem: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = refusal(load_into, model, path)
    assert message.startswith(f"--init {path}: ") and problem in message, message
    assert same(model.state_dict(), before)


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
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert "its eos_token_id is not that of bytes" in refusal(size, 257)


def test_a_broken_file_or_one_without_a_state_dict_changes_nothing(tmp_path):
    model, path = build("gpt"), save(gpt_file(), tmp_path)
    whole = path.read_bytes()
    torn = [EXAMPLE[:size] for size in range(0, len(EXAMPLE), 5)]
    path = path.rename(tmp_path / "model.safetensors")
    changes = [(b'"U8"', b'"F8"'), (b"[8,11]", b"[7,10]"), (b"[3,1]", b"[-1]  ")]
    edited = [EXAMPLE.replace(*change) for change in changes]
    for content in [*torn, *edited, EXAMPLE + b"junk", whole[: len(whole) // 2]]:
        path.write_bytes(content)
        assert_refused(model, path, "cannot be loaded")


LLAMA = dict(model_type="llama", hidden_size=32, num_attention_heads=4, num_hidden_layers=3)
LLAMA["rms_norm_eps"] = 1e-5
OTHER_ROPE = {"rope_parameters": {"rope_type": "default"}}  # rope_scaling has precedence
GPT2 = dict(model_type="gpt2", n_embd=32, n_head=4, n_layer=3)


UNSUPPORTED = [
    (LLAMA | {"model_type": "mamba"}, "has model_type 'mamba', not gpt2, bert or llama"),
    (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps must be 1e-05, not 1e-06"),
    (LLAMA | {"head_dim": 16}, "head_dim must be 8, not 16"),
    (LLAMA | {"rope_parameters": {"type": "llama3"}}, "only a complete llama3"),
    (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "factor must be 1.0, not 0.5"),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights must be True"),
    (GPT2 | {"moe": 1, "alibi": 1}, "unknown keys in config.json: alibi, moe"),
    (GPT2 | {"activation_function": "relu"}, "activation must be gelu_new or gelu, got 'relu'"),
    (GPT2 | {"bias": False}, "bias must be True, not False"),
    (GPT2 | {"n_head": True}, "model.heads must be at least 1, got True"),
    (LLAMA | {"max_position_embeddings": "64"}, "data.seq_len must be at least 8"),
    (LLAMA | {"intermediate_size": -1}, "model.mlp_width must be at least 1"),
    (LLAMA | {"num_key_value_heads": 3}, "divide --heads 4 (with the settings of /"),
    (GPT2 | {"n_head": 3}, "n_head must divide the width"),
    (GPT2 | {"n_head": 0}, "model.heads must be at least 1, got 0"),
    (LLAMA | {"rope_scaling": "yarn"}, "rope_type yarn"),
    (LLAMA | {"rope_scaling": {"type": "yarn"}} | OTHER_ROPE, "rope_type yarn"),
    (LLAMA | {"rope_scaling": Scaling(8, 1, 4, 0).as_published()}, "'8:1:4:0' is not factor:slow"),
    (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx must be False"),
]


@pytest.mark.parametrize(("about", "problem"), UNSUPPORTED)
def test_an_unsupported_config_is_refused_in_one_line(about, problem, tmp_path):
    argv = ["--init", folder_of(about, tmp_path)]
    assert problem in refusal(config.parse_or_resume, argv)


def test_a_config_that_contradicts_its_weights_is_refused(tmp_path):
    folder = folder_of(GPT2 | {"vocab_size": 9, "n_positions": 12}, tmp_path)
    for rows in (9, 8), (10, 12):
        tensors = zip(("wte.weight", "wpe.weight"), (torch.zeros(n, 32) for n in rows), strict=True)
        torch.save(dict(tensors), tmp_path / "pytorch_model.bin")
        assert "must be" in (message := refusal(published.settings_in, folder))
        assert ("n_positions must be 8, not 12" in message) == (rows == (9, 8))


def folder_of(about: dict, tmp_path) -> str:
    """Make a folder of published weights, of which only config.json will be read."""
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(about))
    return str(tmp_path)


def test_missing_keys_have_published_defaults(tmp_path):
    def settings(about: dict) -> config.Config:
        return config.parse_or_resume(["--init", folder_of(about, tmp_path)])[0]

    llama = settings(LLAMA)
    assert (llama.model.rope_theta, llama.model.tied, llama.model.kv_heads) == (1e4, False, 4)
    assert (llama.data.seq_len, llama.model.mlp_width) == (2048, 11008)
    assert settings(LLAMA | {"max_position_embeddings": 131072}).data.seq_len == 2048
    assert settings({"model_type": "gpt2"}).model.layers == 12
    gpt2 = settings(GPT2 | {"alibi": None, "n_positions": 48})
    assert (gpt2.data.seq_len, gpt2.optim.batch_tokens, gpt2.model.tied) == (48, 8160, True)
    argv = ["--init", folder_of(LLAMA, tmp_path), "--tied"]
    assert "is a model with --no-tied, not --tied" in refusal(config.parse_or_resume, argv)


@pytest.mark.parametrize("name", ["GPT2Config", "BertConfig", "LlamaConfig"])
def test_every_key_that_transformers_writes_is_known(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    about = getattr(transformers, name)().to_dict()
    about |= {"rms_norm_eps": 1e-5} if name == "LlamaConfig" else {}
    assert published.settings_in(folder_of(about, tmp_path))["data.seq_len"] > 500


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_file_loads_with_its_exact_gelu(bias, tmp_path):
    """Its matrices are (out, in), and the tied head is repeated; without biases they are zeros."""
    entries = gpt_file(prefix="")
    if not bias:
        entries |= {n: torch.zeros_like(x) for n, x in entries.items() if n.endswith(".bias")}
    held = {n: x for n, x in entries.items() if bias or not n.endswith(".bias")}
    turned = {n: x.T if n[:2] == "h." and x.dim() == 2 else x for n, x in held.items()}
    saved = {f"_orig_mod.transformer.{name}": value for name, value in turned.items()}
    saved["_orig_mod.lm_head.weight"] = entries["wte.weight"]
    args = dict(n_layer=LAYERS, n_head=HEADS, n_embd=C, block_size=SEQ_LEN, vocab_size=VOCAB)
    args |= dict(bias=bias, dropout=0.0)
    path = save({"model": saved, "model_args": args, "iter_num": 3, "config": {}}, tmp_path)
    settings = config.parse_or_resume(["--init", str(path)])[0]
    shape = config.transformer_config(settings, VOCAB, SEQ_LEN)
    assert (shape.gelu, shape.layers, settings.data.seq_len) == ("none", LAYERS, SEQ_LEN)
    model, like = Transformer(shape), build("gpt")
    load_into(model, path)
    load_into(like, save(entries, tmp_path))
    assert same(model.state_dict(), like.state_dict())


# The safetensors format. The example has two tensors: a with bytes 1 2 3, and b with 1.0 and -2.0
# in fp32, which comes first because its dtype is wider.

HEADER = (
    b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"U8","shape":[3,1],"data_offsets":[8,11]}}    '
)
EXAMPLE = b"\x90" + bytes(7) + HEADER + b"\x00\x00\x80\x3f\x00\x00\x00\xc0\x01\x02\x03"
TENSORS = {"a": torch.tensor([[1], [2], [3]], dtype=torch.uint8), "b": torch.tensor([1.0, -2.0])}


def as_safetensors(tensors) -> bytes:
    out = io.BytesIO()
    published.save_file(out, tensors)
    return out.getvalue()


def of_every_dtype() -> dict[str, torch.Tensor]:
    tensors = {"none": torch.empty(0, 4), "one": torch.tensor(3.5), '"é"': torch.tensor([1.0])}
    values = (torch.arange(15.0) / 7).view(3, 5)
    return tensors | {f"of {name}": values.to(dtype) for name, dtype in published.DTYPES.items()}


def test_the_worked_example_loads_and_its_file_is_never_changed(tmp_path):
    assert len(HEADER) == 0x90 and as_safetensors(TENSORS) == EXAMPLE
    path = tmp_path / "example.safetensors"
    path.write_bytes(EXAMPLE)
    result = published.load_file(path)
    assert same(result, TENSORS)
    result["b"].fill_(5)
    assert path.read_bytes() == EXAMPLE and result["b"].tolist() == [5, 5]
    expected = of_every_dtype() | {"turned": torch.randn(4, 3).T}
    path.write_bytes(as_safetensors(expected))
    assert same(published.load_file(path), expected)


def test_the_safetensors_library_writes_and_reads_the_same_bytes(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    library.save_file(of_every_dtype(), theirs, metadata={"format": "pt"})
    ours.write_bytes(as_safetensors(of_every_dtype()))
    assert ours.read_bytes() == theirs.read_bytes()
    assert same(published.load_file(theirs), of_every_dtype())
    assert same(library.load_file(ours), of_every_dtype())


# --init from a run of train.py


@pytest.fixture
def begin(store_dir, tmp_path, monkeypatch):
    """Start a run with --init, stop it before its first step, and return the weights."""
    monkeypatch.chdir(tmp_path)

    def start(init, flags: str = "", out: str = "next") -> dict:
        first = {}

        def noted(run, data, plan, trainer):
            first.update(trainer.model.state_dict())
            return 0

        with monkeypatch.context() as patch:
            patch.setattr(train, "train", noted)
            train.main(f"--init {init} --data {store_dir} --out {out} {FEW} {flags}".split())
        return first

    return start


def newest(folder) -> Path:
    return checkpoint.find(folder, "last")


def made_of(folder) -> tuple[dict, dict]:
    """Return the settings of a run and the size of its model."""
    about = json.loads((folder / "config.json").read_text())
    return about["config"], about["model_size"]


def test_a_run_starts_with_the_weights_of_another(begin, run_of, tmp_path):
    """Kind, size, layers, heads, widths, positions and the row length follow from that run."""
    saved = checkpoint.load(newest(run_of()))["model"]
    assert same(begin(run_of()), saved)
    (ours, our_size), (theirs, their_size) = map(made_of, (tmp_path / "next", run_of()))
    names = [*weights.MODEL_SETTINGS, "data.seq_len", "data.tokenizer", "optim.beta2"]
    assert our_size == their_size and all(ours[name] == theirs[name] for name in names)
    assert ours["model.init"] == str(newest(run_of())), "fixed, even if the other run continues"


def test_init_works_with_a_bert_with_pairs_and_with_learned_positions(begin, run_of, tmp_path):
    source = run_of("--model bert --nsp --pos learned")
    saved = checkpoint.load(newest(source))["model"]
    assert same(begin(source), saved)
    kept = {n: v for n, v in saved.items() if not n.startswith(("pooler", "nsp"))}
    assert same(begin(source, "--no-nsp", out="alone"), kept)
    assert made_of(tmp_path / "alone")[1] == {"vocab_size": 320, "positions": 2048}


def test_init_is_read_until_there_is_a_checkpoint(begin, store_dir, tmp_path, capsys):
    """The published weights have 48 positions, which no --size has."""
    model = Transformer(TransformerConfig(4, 2, 32, 128, 48, vocab_size=257))
    source = save(published_views(model.state_dict(), GPT2_LAYOUT), tmp_path)
    flags = "--pos learned --tied --layers 4 --heads 2 --width 32 --seq-len 32 --ltd --ltd-start 8"
    assert same(begin(source, flags, out="new"), model.state_dict())
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
    with pytest.raises(ValueError, match=source.name):
        train.main(["--resume", "--out", "late"])


def test_init_from_a_shadow_gives_every_present_layer_its_own_weights(begin, run_of):
    """Shared weights are copied to each layer; absent layers are left out."""
    group, layers = "--pseudo-group 2 --pseudo-until 0.99", "--pseudo-layers 2 --pseudo-until 0.9"
    for flags, owners in (group, (0, 1, 0, 1)), (layers, (0, -1, -1, 3)):
        path = newest(run_of(f"--pseudo {flags}"))
        state = checkpoint.load(path)
        assert tuple(state["pseudo"]["owners"]) == owners
        assert same(begin(path, out=f"next{owners[1]}"), weights.real_weights(state))


def test_init_refuses_another_tokenizer_and_damaged_weights(begin, run_of, tmp_path):
    """tests/test_mistakes.py has more refusals."""
    source = newest(run_of())
    state = checkpoint.load(source) | {"tokenizer_fingerprint": "another"}
    checkpoint.save(tmp_path / "changed" / source.name, state)
    assert "with tokenizer bytes, but the store has" in refusal(begin, tmp_path / "changed")
    content = bytearray(source.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    assert "damaged.pt is damaged" in refusal(begin, tmp_path / "damaged.pt")
    assert not (tmp_path / "next").exists()
