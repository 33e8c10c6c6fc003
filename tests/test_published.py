"""A loaded model computes what the published one does; a file that does not fit changes nothing.

Each layout is proven twice: against the paper's equations, written out below over the published
names, and against `transformers` where that is installed. Weights are random and wide, so that
every entry counts: no test here needs a download.

    python -m pytest tests/test_published.py
"""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, refusal, widened

import config
import prepare
import pseudo
import sample
import train
from kernels.rotary import Scaling
from model import Transformer, TransformerConfig
from support import checkpoint
from support.text.tokenizer import PD4K, read_ranks, write_ranks
from support.weights import published
from support.weights.initial import initial_model
from support.weights.published import (
    BERT_LAYOUT,
    GPT2_LAYOUT,
    load_published,
    published_entries,
    published_names,
    size_for,
)

LAYERS, HEADS, C, SEQ_LEN, VOCAB = 2, 4, 16, 12, 50
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def built(kind: str, **changes) -> Transformer:
    shape = dict(layers=LAYERS, heads=HEADS, width=C, mlp_width=4 * C)
    shape |= dict(seq_len=SEQ_LEN, vocab_size=VOCAB) | changes
    return Transformer(TransformerConfig(kind, **shape))


def drawn(modules: dict[str, tuple], out: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights of these shapes, and a bias as long as dimension `out` for all but embeddings."""
    generator, entries = torch.Generator().manual_seed(0), {}
    for name, shape in modules.items():
        has_bias = not name.endswith(("wte", "wpe", "embeddings"))
        for leaf, size in {"weight": shape, "bias": (shape[out],)}.items():
            if leaf == "weight" or has_bias:
                value = 0.2 * torch.randn(size, generator=generator)
                entries[f"{name}.{leaf}"] = value.to(dtype)
    return entries


def gpt_file(dtype=torch.float32, prefix: str = "transformer.") -> dict[str, torch.Tensor]:
    """Matrices are (in, out)."""
    modules = {"wte": (VOCAB, C), "wpe": (SEQ_LEN, C)}
    for at in (f"h.{layer}" for layer in range(LAYERS)):
        modules |= {f"{at}.attn.c_attn": (C, 3 * C), f"{at}.attn.c_proj": (C, C)}
        modules |= {f"{at}.mlp.c_fc": (C, 4 * C), f"{at}.mlp.c_proj": (4 * C, C)}
        modules |= {f"{at}.ln_1": (C,), f"{at}.ln_2": (C,)}
    entries = drawn({**modules, "ln_f": (C,)}, -1, dtype)
    for layer in range(LAYERS):  # the buffers that older files hold
        mask = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.uint8).tril()
        entries[f"h.{layer}.attn.bias"] = mask[None, None]
        entries[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return {prefix + name: value for name, value in entries.items()}


def bert_file(dtype=torch.float32, prefix: str = "bert.", old: bool = False) -> dict:
    """Matrices are (out, in); old files have other names for what a norm holds."""
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
    entries = drawn({**modules, "cls.seq_relationship": (2, C)}, 0, dtype)
    entries["cls.predictions.bias"] = torch.linspace(-1, 1, VOCAB).to(dtype)
    entries["embeddings.position_ids"] = torch.arange(SEQ_LEN)[None]
    file = {}
    for name, value in entries.items():
        if old:
            name = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        file[name if name.startswith("cls.") else prefix + name] = value
    return file


def written(file: object, tmp_path, **options):
    path = tmp_path / "weights.bin"
    torch.save(file, path, **options)
    return path


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == expected.dtype == dtype
    assert (found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


# The papers' equations over the published names: no line of model.py or published.py runs here


def attend(q, k, v, visible):
    """softmax(q k' / sqrt D) v of (T, C) each, head after head."""
    D = C // HEADS
    outputs = []
    for head in range(HEADS):
        own = slice(head * D, (head + 1) * D)
        scores = q[:, own] @ k[:, own].T / math.sqrt(D)
        outputs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, own])
    return torch.cat(outputs, dim=-1)


def plain_gpt(w: dict, tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2's logits (T, V) for tokens (T,). Its matrices stand on the right: x @ w + b."""

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
    """BERT's masked-token logits (T, V) for tokens (T,) of segment 0, looking at `real` ones."""

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
    prefix = "transformer." if dtype == torch.float32 else ""  # the other file is of torch < 1.6
    path = written(gpt_file(dtype, prefix), tmp_path, _use_new_zipfile_serialization=bool(prefix))
    model = built("gpt").to(dtype)
    assert load_published(model, path) == []
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    plain = gpt_file(dtype, prefix="")
    expected = torch.stack([plain_gpt(plain, row) for row in tokens])
    assert_close(model.logits(tokens), expected, dtype)


@pytest.mark.parametrize(
    "dtype, file_dtype, prefix, nsp",
    [(torch.float32, torch.float16, "bert.", False), (torch.float64, torch.float64, "", True)],
)
def test_bert_computes_the_published_function(tmp_path, dtype, file_dtype, prefix, nsp):
    """Also from an old file of half precision: token type 0 is added in the model's own.

    And with --nsp scores of "it follows" and "it does not", from the [CLS] of one segment.
    """
    file = bert_file(file_dtype, prefix, old=not nsp)
    model = built("bert", nsp=nsp).to(dtype)
    left_out = load_published(model, written(file, tmp_path))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    heads = ["cls.seq_relationship.bias", "cls.seq_relationship.weight"]
    heads += ["pooler.dense.bias", "pooler.dense.weight"]
    always = ["embeddings.position_ids", "embeddings.token_type_embeddings.weight[1]"]
    assert left_out == always + heads * (not nsp)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    real = torch.ones(2, SEQ_LEN, dtype=torch.bool)
    real[1, 7:] = False
    plain = {name: value.to(dtype) for name, value in bert_file(file_dtype, prefix="").items()}
    wpe = plain["embeddings.position_embeddings.weight"]
    assert model.wpe.weight.equal(wpe + plain["embeddings.token_type_embeddings.weight"][0])
    expected = torch.stack([plain_bert(plain, *row) for row in zip(tokens, real, strict=True)])
    logits = model.logits(tokens, doc_ids=real.long() - 1)  # 0, or -1 on padding
    assert_close(logits[real], expected[real], dtype)
    if nsp:
        x = model.hidden_states(tokens)
        pooled = torch.tanh(x[:, 0] @ plain["pooler.dense.weight"].T + plain["pooler.dense.bias"])
        expected = pooled @ plain[heads[1]].T + plain[heads[0]]
        assert_close(model.follows(x.flatten(0, 1), torch.tensor([0, SEQ_LEN])), expected, dtype)


# What the file says of itself


def test_a_vocabulary_has_a_row_for_each_id_and_at_most_those_that_fill_it_up(tmp_path):
    def size(rows: int, needed: int):
        path = written(gpt_file() | {WTE: torch.zeros(rows, C)}, tmp_path)
        return size_for(path, needed, "pd4k")

    for rows, needed in ((50, 50), (50, 49), (50, 40), (64, 64)):
        assert size(rows, needed) == (rows, SEQ_LEN)
    for refused in (50, 51), (65, 64):
        with pytest.raises(ValueError, match=r"--init .*: .*--tokenizer pd4k"):
            size(*refused)


# The way back: a run's weights in the published layout


def own_checkpoint(folder, model: Transformer, **more) -> None:
    """What train.py saves of a run, as far as an export looks at it."""
    c = model.config
    names = ("layers", "heads", "width", "mlp_width", "pos", "nsp", "qk_norm", "tied")
    settings = {f"model.{name}": getattr(c, name) for name in names}
    state = {"model": model.state_dict(), "step": 3, "tokenizer_fingerprint": "any"}
    state["config"] = settings | {"model.model": c.kind, "model.size": "nano"}
    state["model_size"] = {"vocab_size": c.vocab_size, "positions": c.seq_len}
    state |= {"clock": {}, "best_step": 0}
    checkpoint.save(folder / "step-00000003.pt", state | more)


def exported(model: Transformer, tmp_path, name: str = "weights.pt", **more):
    """The file that `export` writes of a run that has this model."""
    own_checkpoint(tmp_path / "run", model, **more)
    published.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / name)])
    return tmp_path / name


EXPORTS = [("gpt", {"mlp_width": 24}, ".pt"), ("gpt", {}, ".safetensors"), ("bert", {}, ".pt")]


@pytest.mark.parametrize(
    "kind, changes, suffix", [*EXPORTS, ("bert", {"nsp": True}, ".safetensors")]
)
def test_what_is_exported_loads_as_it_was(tmp_path, capsys, kind, changes, suffix):
    """Bit for bit, with nothing left out but BERT's token type 1, under the published names."""
    model, found = widened(built(kind, **changes)).eval(), built(kind, **changes)
    left_out = load_published(found, exported(model, tmp_path, f"weights{suffix}"))
    assert left_out == (["embeddings.token_type_embeddings.weight[1]"] if kind == "bert" else [])
    assert all(value.equal(found.state_dict()[name]) for name, value in model.state_dict().items())
    config = json.loads(capsys.readouterr().out.splitlines()[-1].partition("beside it: ")[2])
    assert config["vocab_size"] == VOCAB and SEQ_LEN in config.values()
    assert os.listdir(tmp_path / "run") == ["step-00000003.pt"]
    if suffix == ".safetensors":
        file = gpt_file() if kind == "gpt" else bert_file()
        wanted = {n: v.shape for n, v in file.items() if v.dim() and v.dtype == torch.float32}
        layout = GPT2_LAYOUT if kind == "gpt" else BERT_LAYOUT
        entries = published_entries(model.state_dict(), layout, (HEADS,) * 3, C // HEADS)
        assert {name: value.shape for name, value in entries.items()} == wanted


def test_negative_control_a_matrix_not_turned_is_another_function(tmp_path, monkeypatch):
    """Square matrices fit either way round: only the values tell."""
    model, found, is_turned = widened(built("gpt")), built("gpt").eval(), published.is_turned

    def not_quite(name: str, layout: published.Layout, value: torch.Tensor) -> bool:
        return is_turned(name, layout, value) and "attn.c_proj" not in name

    with monkeypatch.context() as patch:
        patch.setattr(published, "is_turned", not_quite)
        path = exported(model, tmp_path)
    load_published(found, path)
    tokens = torch.randint(VOCAB, (1, SEQ_LEN))
    assert not torch.allclose(found.logits(tokens), model.logits(tokens), rtol=0.01)


def test_a_shadow_is_exported_as_the_model_that_runs(tmp_path):
    """Layers 0 and 2 share weights, layer 1 is not there yet: a model of two equal layers."""
    model, found = widened(built("gpt", layers=3)), built("gpt", layers=2).eval()
    owners = (0, -1, 0)
    pseudo.share(model, owners)
    load_published(found, exported(model, tmp_path, pseudo={"owners": owners}))
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    assert found.logits(tokens).equal(model.logits(tokens))


def test_an_export_that_cannot_be_is_one_line_and_no_file(tmp_path):
    for name, qk_norm in (("run", False), ("normed", True), ("broken", False)):
        own_checkpoint(tmp_path / name, built("gpt", qk_norm=qk_norm))
    own_checkpoint(tmp_path / "nano", built("gpt", pos="rope", tied=False))
    file = tmp_path / "broken" / "step-00000003.pt"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    (tmp_path / "text.txt").write_text("no weights")
    (tmp_path / "there.pt").write_text("of somebody")
    for source, to, problem in (
        ("run", "out.bin", "--out .*out.bin: "),
        ("run", "there.pt", "--out .*there.pt exists"),
        ("run", "nowhere/out.pt", "--out .*its folder does not"),
        ("nowhere", "out.pt", "nowhere is neither"),
        ("text.txt", "out.pt", "text.txt is neither"),
        ("normed", "out.pt", "closest, gpt2, needs --no-qk-norm"),
        ("nano", "out.pt", "fits no published layout: the closest, llama, needs --block llama"),
        ("broken", "out.pt", "is damaged"),
    ):
        before = sorted(tmp_path.iterdir())
        argv = ["export", str(tmp_path / source), "--out", str(tmp_path / to)]
        assert re.search(problem, refusal(published.main, argv))
        assert sorted(tmp_path.iterdir()) == before


# Against transformers, both ways


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("gpt", {}),
        ("bert", {}),
        ("bert", {"nsp": True}),
    ],
)
def test_transformers_computes_what_we_do_and_its_weights_come_back(
    tmp_path, capsys, kind, changes
):
    """It reads both kinds of file that are exported; a state dict of its model is one of ours."""
    transformers = pytest.importorskip("transformers")
    model, again = widened(built(kind, **changes)), built(kind, **changes)
    nsp = "nsp" in changes
    exported(model, tmp_path, "model.safetensors")
    config = json.loads(capsys.readouterr().out.splitlines()[-1].partition("beside it: ")[2])
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = getattr(transformers, config["architectures"][0])
    read, notes = theirs.from_pretrained(tmp_path, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"], notes
    state = torch.load(exported(model, tmp_path))
    missing, strangers = read.load_state_dict(state, strict=False)
    assert not strangers and all("pooler" in name for name in missing), (missing, strangers)
    tokens = torch.randint(VOCAB, (3, SEQ_LEN))
    real = torch.arange(SEQ_LEN) < torch.tensor([[12], [7], [1]])
    with torch.no_grad():
        output = read.eval()(tokens, attention_mask=real.long())
        x = model.hidden_states(tokens, doc_ids=real.long() - 1)
        logits = model.logits(tokens, doc_ids=real.long() - 1)
        if nsp:
            follows = model.follows(x.flatten(0, 1), SEQ_LEN * torch.arange(3))
            assert_close(follows, output.seq_relationship_logits, torch.float32)
    assert_close(logits[real], (output.prediction_logits if nsp else output.logits)[real], x.dtype)
    if kind == "gpt":
        whole = {"attention_mask": torch.ones(1, 4).long(), "pad_token_id": 0}
        drawn = read.generate(tokens[:1, :4], max_new_tokens=6, do_sample=False, **whole)
        ours = sample.generate(model, tokens[0, :4].tolist(), 6, allowed=VOCAB, temperature=0)
        assert drawn[0, 4:].tolist() == list(ours)
    path = written(read.state_dict(), tmp_path)
    assert torch.load(path).keys() & {"lm_head.weight", TWIN}, "tied twins"
    load_published(again, path)
    said = published.settings_of(path)
    assert said["model.heads"] == HEADS and said["model.pos"] == model.config.pos
    assert said["model.mlp_width"] == 4 * C and said["model.tied"]
    assert all(value.equal(again.state_dict()[name]) for name, value in model.state_dict().items())


# Files that do not fit: one line that says what, and a model as it was

WTE, C_ATTN = "transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"
QUERY = "encoder.layer.1.attention.self.query.weight"
TYPES, TWIN = "embeddings.token_type_embeddings.weight", "cls.predictions.decoder.bias"
MISFITS = [  # kind of file, entries changed or deleted (None), changes to the model, problem
    ("gpt", {}, dict(seq_len=8), "wpe.weight must be (8, 16) but is (12, 16)"),
    ("bert", {}, dict(pos="rope"), "position_embeddings.weight"),
    ("gpt", {}, dict(layers=1), "h.1.attn.c_attn.bias, h.1.attn.c_attn.weight, "),
    ("bert", {}, dict(layers=3), "encoder.layer.2.attention.output.LayerNorm.weight must"),
    ("gpt", {}, dict(mlp_width=32), "mlp.c_fc.weight must be (16, 32) but is (16, 64)"),
    ("gpt", {C_ATTN: torch.ones(48, 16)}, {}, "must be (16, 48) but is (48, 16)"),
    ("bert", {f"bert.{QUERY}": None}, {}, f"{QUERY} must be (16, 16) but is absent"),
    ("bert", {"bert.pooler.dense.weight": None}, dict(nsp=True), "--nsp"),
    ("bert", {f"bert.{TYPES}": torch.ones(1, 16)}, {}, f"{TYPES} must be (2, 16) but is (1, 16)"),
    ("bert", {"qa.weight": torch.ones(2), "qa.bias": torch.ones(2)}, {}, "qa.bias, qa.weight"),
    ("gpt", {"lm_head.weight": torch.ones(50, 16)}, {}, "lm_head.weight must equal wte.weight"),
    ("gpt", {TWIN: torch.ones(50)}, {}, TWIN),
    ("gpt", {"wte.weight": torch.ones(50, 16)}, {}, "wte.weight is there under another name"),
    ("gpt", {C_ATTN: torch.ones(16, 48).char()}, {}, "is not a tensor of floating-point"),
    ("gpt", {WTE: torch.ones(50)}, {}, "has no matrix wte.weight"),
    ("gpt", {WTE: None}, {}, "has no matrix embeddings.word_embeddings.weight"),
]


def assert_refused(model: Transformer, path, *fragments: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = refusal(load_published, model, path)
    assert message.startswith(f"--init {path}: ")
    assert all(fragment in message for fragment in fragments), message
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("kind", "edits", "changes", "problem"), MISFITS)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, kind, edits, changes, problem):
    file = (gpt_file() if kind == "gpt" else bert_file()) | edits
    file = {name: value for name, value in file.items() if value is not None}
    assert_refused(built(kind, **changes), written(file, tmp_path), problem)


def test_a_misfit_and_the_command_name_the_flags_of_a_file_and_equal_twins_fit(tmp_path, capsys):
    path, flags = written(bert_file(), tmp_path), "--block gpt2 --layers 2 --width 16"
    assert_refused(built("gpt"), path, f"--model bert {flags}")
    published.main(["show", str(written(gpt_file(), tmp_path))])
    assert f"--model gpt {flags} --mlp-width 64 --pos learned" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"h\.0\.attn\.q_norm\.weight has no place"):
        published_names("h.0.attn.q_norm.weight", GPT2_LAYOUT)
    for kind, file in (("gpt", gpt_file()), ("bert", bert_file())):
        for twin, (name, *_) in published.TIED.items():
            for whole in (name, f"bert.{name}", f"transformer.{name}"):
                if whole in file:
                    file[twin] = file[whole].clone()
        load_published(built(kind), written(file, tmp_path))


class Stranger:
    """What weights_only=True will not build."""


def test_a_file_that_is_no_state_dict_or_is_broken_changes_nothing(tmp_path):
    model = built("gpt")
    assert_refused(model, tmp_path / "nowhere.bin", "cannot be read, No such file", "torch.save")
    assert_refused(model, tmp_path, "cannot be read, Is a directory")
    path = written(gpt_file(), tmp_path)
    whole = path.read_bytes()
    header = b'{"wte.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    header = len(header).to_bytes(8, "little") + header
    for content, problem in (
        ({"model": gpt_file(), "step": 3}, "model is not a tensor"),
        ([torch.ones(2)], "holds a list, not a dict"),
        ({}, "has no matrix"),
        ({"module": Stranger()}, "cannot be loaded, UnpicklingError"),
        (b"", "cannot be loaded"),
        (b"text, not weights", "cannot be loaded"),
        (whole[: len(whole) // 2], "cannot be loaded"),
        (header + bytes(4), "has no matrix wte.weight"),
        (header + bytes(3), "is a broken safetensors file: it has "),
    ):
        path.write_bytes(content) if isinstance(content, bytes) else written(content, tmp_path)
        assert_refused(model, path, problem)
    path.write_bytes(whole)
    load_published(model, path)  # the same bytes, whole, are good


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_in_several_files_is_continued_and_loads_back_in_transformers(
    tied, store_dir, tmp_path, monkeypatch
):
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
    for wrong, said in (
        ("--kv-heads 4", "is a model of --kv-heads 2, not --kv-heads 4"),
        ("--rope-theta 1e4", "is a model of --rope-theta 500000"),
        ("--no-tied" if tied else "--tied", "not --no-tied" if tied else "not --tied"),
        ("--qk-norm", "of --no-qk-norm, not --qk-norm"),
        ("--rope-scaling 8:1:4:64", "not --rope-scaling 8:1:4:64"),
        ("--tokenizer bytes", "tokenizer"),
    ):
        with pytest.raises(ValueError, match=said):
            train.main(f"{fitting} {wrong} --out no".split())

    def logits(model, tokens):
        return model.eval()(tokens).logits

    tokens = torch.randint(4416, (2, 32))
    budget = "--batch-tokens 128 --tokens 2048 --ltd --ltd-start 16 --pack --out run"
    started, _ = config.parse_or_resume(f"{fitting} {budget}".split())
    ours = initial_model(config.transformer_config(started, 4416), started)
    assert (ours.logits(tokens) - logits(theirs, tokens)).abs().max() < 1e-4
    assert train.main(f"{fitting} {budget}".split()) == 0
    published.main(["export", "run", "--out", "given"])
    back = transformers.AutoModelForCausalLM.from_pretrained("given")
    trained = sample.load_run("run", "last")[1]
    assert (trained.logits(tokens) - logits(back, tokens)).abs().max() < 1e-4
    assert (logits(back, tokens) - logits(theirs, tokens)).abs().max() > 0.01, "it has learned"
    assert back.config.eos_token_id == 4098
    drawn = back.generate(tokens[:1, :5], max_new_tokens=20, do_sample=False, pad_token_id=0)
    ours = sample.generate(trained, tokens[0, :5].tolist(), 20, allowed=4416, temperature=0)
    assert drawn[0, 5:].tolist()[:10] == list(ours)[:10]
    next(Path("llama").glob("model-00001*")).unlink()
    with pytest.raises(ValueError, match=r"model-00001.* which is not beside it"):
        train.main(f"{fitting} --out no".split())
    assert not Path("no").exists()


GOOD = dict(model_type="llama", hidden_size=32, num_attention_heads=4, num_hidden_layers=3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "is of type 'mamba', and these are read: gpt2, bert, llama"),
        ({"model_type": 5}, "is of type 5"),
        ({"hidden_act": "gelu"}, "has hidden_act gelu, and only silu is computed here"),
        ({"head_dim": 16}, "has head_dim 16, and only 8 is computed here"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "scales rotary angles as yarn"),
        ({"num_key_value_heads": 3}, "--kv-heads 3 does not divide"),
        ({"rope_theta": -1}, "model.rope_theta is -1"),
    ],
)
def test_a_config_that_cannot_be_computed_is_one_line(changes, said, tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "config.json").write_text(json.dumps(GOOD | changes))
    assert said in refusal(config.parse_or_resume, ["--init", str(tmp_path)])
