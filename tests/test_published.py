"""A loaded model computes what the published one does; a file that does not fit changes nothing.

Each layout is proven twice: against the paper's equations, written out below over the published
names, and against `transformers` where that is installed. Weights are random and wide, so that
every entry counts: no test here needs a download.

    python -m pytest tests/test_published.py
"""

import json
import math
import os

import pytest
import torch
import torch.nn.functional as F

import pseudo
from model import Transformer, TransformerConfig
from support.run import checkpoint
from support.step.sizes import SIZES
from support.weights import published, safetensors
from support.weights.published import load_published, published_entries, published_names, size_for

LAYERS, HEADS, WIDTH, SEQ_LEN, VOCAB = 2, 4, 16, 12, 50
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def built(kind: str, **changes) -> Transformer:
    shape = dict(layers=LAYERS, heads=HEADS, width=WIDTH, mlp_width=4 * WIDTH)
    shape |= dict(seq_len=SEQ_LEN, vocab_size=VOCAB) | changes
    return Transformer(TransformerConfig(kind, **shape))


def drawn(shapes: dict[str, tuple], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return dict((name, (0.2 * value).to(dtype)) for name, value in draw.items())


def gpt_file(dtype=torch.float32, prefix: str = "transformer.") -> dict[str, torch.Tensor]:
    C = WIDTH
    shapes = {"wte.weight": (VOCAB, C), "wpe.weight": (SEQ_LEN, C)}
    for layer in range(LAYERS):
        for linear, wide, high in (
            ("attn.c_attn", C, 3 * C),
            ("attn.c_proj", C, C),
            ("mlp.c_fc", C, 4 * C),
            ("mlp.c_proj", 4 * C, C),
        ):
            shapes[f"h.{layer}.{linear}.weight"] = (wide, high)
            shapes[f"h.{layer}.{linear}.bias"] = (high,)
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{norm}.weight": (C,), f"h.{layer}.{norm}.bias": (C,)}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    file = dict((prefix + name, value) for name, value in drawn(shapes, dtype).items())
    for layer in range(LAYERS):  # the buffers that older files hold
        mask = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.uint8).tril()
        file[f"{prefix}h.{layer}.attn.bias"] = mask[None, None]
        file[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return file


def bert_file(dtype=torch.float32, prefix: str = "bert.", old: bool = False) -> dict:
    C = WIDTH
    scale, shift = ("gamma", "beta") if old else ("weight", "bias")

    def norm(name: str) -> dict[str, tuple]:
        return {f"{name}.LayerNorm.{scale}": (C,), f"{name}.LayerNorm.{shift}": (C,)}

    def linear(name: str, high: int, wide: int) -> dict[str, tuple]:
        return {f"{name}.weight": (high, wide), f"{name}.bias": (high,)}

    e = f"{prefix}embeddings"
    shapes = {
        f"{e}.word_embeddings.weight": (VOCAB, C),
        f"{e}.position_embeddings.weight": (SEQ_LEN, C),
        f"{e}.token_type_embeddings.weight": (2, C),
    } | norm(e)
    for layer in range(LAYERS):
        at = f"{prefix}encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            shapes |= linear(f"{at}.attention.self.{name}", C, C)
        shapes |= linear(f"{at}.attention.output.dense", C, C) | norm(f"{at}.attention.output")
        shapes |= linear(f"{at}.intermediate.dense", 4 * C, C)
        shapes |= linear(f"{at}.output.dense", C, 4 * C) | norm(f"{at}.output")
    shapes |= linear(f"{prefix}pooler.dense", C, C)
    head = "cls.predictions"
    shapes |= linear(f"{head}.transform.dense", C, C) | norm(f"{head}.transform")
    shapes |= {f"{head}.bias": (VOCAB,)} | linear("cls.seq_relationship", 2, C)
    file = drawn(shapes, dtype)
    file[f"{e}.position_ids"] = torch.arange(SEQ_LEN)[None]
    return file


def written(file: object, tmp_path, **how):
    path = tmp_path / "weights.bin"
    torch.save(file, path, **how)
    return path


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == expected.dtype == dtype
    assert (found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


# The papers' equations over the published names: no line of model.py or published.py runs here


def attend(q, k, v, visible):
    """softmax(q k' / sqrt D) v of (T, C) each, head after head."""
    D = WIDTH // HEADS
    outputs = []
    for head in range(HEADS):
        own = slice(head * D, (head + 1) * D)
        scores = q[:, own] @ k[:, own].T / math.sqrt(D)
        outputs.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, own])
    return torch.cat(outputs, dim=-1)


def plain_gpt(w: dict, tokens: torch.Tensor) -> torch.Tensor:
    """GPT-2's logits (T, V) for tokens (T,). Its matrices stand on the right: x @ w + b."""

    def norm(name, x):
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    T = len(tokens)
    x = w["wte.weight"][tokens] + w["wpe.weight"][:T]
    for layer in range(LAYERS):
        at = f"h.{layer}"
        q, k, v = linear(f"{at}.attn.c_attn", norm(f"{at}.ln_1", x)).split(WIDTH, dim=-1)
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
        return F.layer_norm(x, (WIDTH,), scale, shift, 1e-12)

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
        q, k, v = (linear(f"{at}.attention.self.{one}", x) for one in ("query", "key", "value"))
        y = linear(f"{at}.attention.output.dense", attend(q, k, v, real.expand(T, T)))
        x = norm(f"{at}.attention.output", x + y)
        y = linear(f"{at}.output.dense", gelu(linear(f"{at}.intermediate.dense", x)))
        x = norm(f"{at}.output", x + y)
    x = norm("cls.predictions.transform", gelu(linear("cls.predictions.transform.dense", x)))
    return x @ words.T + w["cls.predictions.bias"]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prefix, zipped", [("", True), ("transformer.", False)])  # torch < 1.6
def test_gpt_computes_the_published_function(tmp_path, dtype, prefix, zipped):
    path = written(gpt_file(dtype, prefix), tmp_path, _use_new_zipfile_serialization=zipped)
    model = built("gpt").to(dtype)
    assert load_published(model, path) == []
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    plain = gpt_file(dtype, prefix="")
    expected = torch.stack([plain_gpt(plain, row) for row in tokens])
    assert_close(model.logits(tokens), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prefix, old", [("", False), ("bert.", True)])
@pytest.mark.parametrize("nsp", [False, True])
def test_bert_computes_the_published_function(tmp_path, dtype, prefix, old, nsp):
    """And with --nsp scores of "it follows" and "it does not", from the [CLS] of one segment."""
    model = built("bert", nsp=nsp).to(dtype)
    left_out = load_published(model, written(bert_file(dtype, prefix, old), tmp_path))
    heads = ["cls.seq_relationship.bias", "cls.seq_relationship.weight"]
    heads += ["pooler.dense.bias", "pooler.dense.weight"]
    always = ["embeddings.position_ids", "embeddings.token_type_embeddings.weight[1]"]
    assert left_out == always + heads * (not nsp)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    real = torch.ones(2, SEQ_LEN, dtype=torch.bool)
    real[1, 7:] = False
    plain = bert_file(dtype, prefix="")
    expected = torch.stack([plain_bert(plain, *row) for row in zip(tokens, real, strict=True)])
    logits = model.logits(tokens, doc_ids=real.long() - 1)  # 0, or -1 on padding
    assert_close(logits[real], expected[real], dtype)
    assert_close(model.logits(tokens[:1]), expected[:1], dtype)
    if nsp:
        x = model.hidden_states(tokens)
        pooled = torch.tanh(x[:, 0] @ plain["pooler.dense.weight"].T + plain["pooler.dense.bias"])
        expected = pooled @ plain[heads[1]].T + plain[heads[0]]
        assert_close(model.follows(x.flatten(0, 1), torch.tensor([0, SEQ_LEN])), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_token_type_0_is_folded_into_the_positions(tmp_path, dtype):
    """Added in the model's dtype, not in a file's half precision."""
    ours = torch.float64 if dtype == torch.float64 else torch.float32
    file, model = bert_file(dtype), built("bert").to(ours)
    load_published(model, written(file, tmp_path))
    positions, types = (
        file[f"bert.embeddings.{n}_embeddings.weight"] for n in ("position", "token_type")
    )
    assert model.wpe.weight.equal(positions.to(ours) + types[0].to(ours))
    assert {parameter.dtype for parameter in model.parameters()} == {ours}


# Against transformers


def widened(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Random and wide weights, in every entry: as initialised, biases are 0 and norms are 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.2)
    return model.to(dtype).eval()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("which", ["GPT2LMHeadModel", "BertForMaskedLM", "BertForPreTraining"])
def test_logits_equal_those_of_transformers(tmp_path, which, dtype):
    transformers = pytest.importorskip("transformers")
    kind = "gpt" if which.startswith("GPT") else "bert"
    config = (transformers.GPT2Config if kind == "gpt" else transformers.BertConfig)(
        vocab_size=VOCAB,
        max_position_embeddings=SEQ_LEN,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        **({} if kind == "gpt" else {"intermediate_size": 4 * WIDTH}),
    )
    theirs = widened(getattr(transformers, which)(config), dtype)
    path = written(theirs.state_dict(), tmp_path)
    assert any("lm_head" in name or "decoder" in name for name in torch.load(path)), "tied twins"
    ours = built(kind).to(dtype)
    left_out = load_published(ours, path)
    assert ("cls.seq_relationship.weight" in left_out) == (which == "BertForPreTraining")
    tokens = torch.randint(VOCAB, (3, SEQ_LEN))
    real = torch.arange(SEQ_LEN) < torch.tensor([[12], [7], [1]])
    output = theirs(tokens, attention_mask=real.long())
    expected = output.prediction_logits if which == "BertForPreTraining" else output.logits
    assert_close(ours.logits(tokens, doc_ids=real.long() - 1)[real], expected[real], dtype)


# What the file says of itself


@pytest.mark.parametrize("kind, file", [("gpt", gpt_file), ("bert", bert_file)])
def test_the_command_says_what_the_file_holds(tmp_path, capsys, kind, file):
    published.main(["show", str(written(file(), tmp_path))])
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and f"'kind': '{kind}', 'layers': 2" in printed
    assert "'width': 16, 'mlp_width': 64, 'vocab_size': 50, 'seq_len': 12" in printed
    flags = f"--model {kind}, --layers 2 --width 16 and its --heads, --pos learned, 12 positions"
    assert flags in printed


def test_published_names_example():
    names = published_names("h.3.ln_1.bias", "bert")
    assert names == ["encoder.layer.3.attention.output.LayerNorm.bias"]


@pytest.mark.parametrize("name", SIZES)
def test_the_fitting_size_is_named(name):
    layers, _, width, seq_len = SIZES[name]
    shape = dict(kind="gpt", layers=layers, width=width, mlp_width=4 * width)
    shape |= dict(vocab_size=7, seq_len=seq_len)
    expected = f"--model gpt, --size {name}, --pos learned, {seq_len} positions, a vocabulary of 7"
    assert published.flags(shape) == expected
    assert f"--size {name}, --mlp-width 3," in published.flags(shape | dict(mlp_width=3))
    shape["width"] += 64
    assert f"--layers {layers} --width {width + 64} and its --heads" in published.flags(shape)


@pytest.mark.parametrize("needed", [50, 49, 40, 64])
def test_vocabularies_that_fit(tmp_path, needed):
    """A row for each id, and no more than fill them up to 64."""
    file = gpt_file()
    file[WTE] = torch.zeros(64 if needed == 64 else VOCAB, WIDTH)
    size = size_for(written(file, tmp_path), needed, "mine", 12)
    assert size == (len(file[WTE]), SEQ_LEN)


@pytest.mark.parametrize(("held", "needed"), [(50, 51), (65, 64), (128, 64), (50, 128)])
def test_vocabularies_and_rows_that_do_not_fit(tmp_path, held, needed):
    file = gpt_file()
    file[WTE] = torch.zeros(held, WIDTH)
    path = written(file, tmp_path)
    with pytest.raises(ValueError) as refusal:
        size_for(path, needed, "pd4k", 12)
    message = str(refusal.value)
    assert message.startswith(f"--init {path}: ") and "\n" not in message
    assert f"a vocabulary of {held}, and --tokenizer pd4k one of {needed}" in message
    with pytest.raises(ValueError, match="has 12 positions, --seq-len 13 is more"):
        size_for(path, held, "pd4k", 13)


# The way back: a run's weights in the published layout


def own_checkpoint(folder, model: Transformer, step: int = 3, **more) -> None:
    """What train.py saves of a run, as far as an export looks at it."""
    c = model.config
    settings = {"model": c.kind, "size": "nano", "layers": c.layers, "heads": c.heads}
    settings |= {"width": c.width, "mlp_width": c.mlp_width, "pos": c.pos, "nsp": c.nsp}
    state = {
        "model": model.state_dict(),
        "step": step,
        "tokenizer_fingerprint": "any",
        "config": {f"model.{name}": value for name, value in settings.items()},
        "model_size": {"vocab_size": c.vocab_size, "positions": c.seq_len},
        **more,
    }
    checkpoint.save(folder, state, step=step)


def random_model(kind: str, **changes) -> Transformer:
    return widened(built(kind, **changes), torch.float32)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "kind, changes",
    [("gpt", {}), ("bert", {}), ("bert", {"nsp": True}), ("gpt", {"mlp_width": 24})],
)
def test_what_is_exported_loads_as_it_was(tmp_path, capsys, kind, changes, suffix):
    """Bit for bit, and with nothing left out but BERT's token type 1."""
    model, out = random_model(kind, **changes), tmp_path / f"weights{suffix}"
    own_checkpoint(tmp_path / "run", model)
    published.main(["export", str(tmp_path / "run"), "--out", str(out)])
    found = built(kind, **changes)
    left_out = load_published(found, out)
    assert left_out == (["embeddings.token_type_embeddings.weight[1]"] if kind == "bert" else [])
    assert all(value.equal(found.state_dict()[name]) for name, value in model.state_dict().items())
    said = capsys.readouterr().out
    config = json.loads(said.splitlines()[-1].partition("beside it: ")[2])
    assert config["vocab_size"] == VOCAB and SEQ_LEN in config.values()
    assert os.listdir(tmp_path / "run") == ["step-00000003.pt"]


@pytest.mark.parametrize("kind, file", [("gpt", gpt_file), ("bert", bert_file)])
def test_an_export_has_the_published_entries(kind, file):
    """The names and shapes of the files above, which are the published ones."""
    model = random_model(kind, nsp=kind == "bert")
    found = published_entries(model.state_dict(), kind)
    wanted = {name: value for name, value in file().items() if value.dtype == torch.float32}
    wanted = {name: v for name, v in wanted.items() if not name.endswith("attn.masked_bias")}
    assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in wanted.items()}


def test_negative_control_a_matrix_not_turned_is_another_function(tmp_path, monkeypatch):
    """Square matrices fit either way round: only the values tell."""
    model, out = random_model("gpt"), tmp_path / "weights.pt"
    own_checkpoint(tmp_path / "run", model)
    is_turned = published.is_turned

    def not_quite(name: str, kind: str, value: torch.Tensor) -> bool:
        return is_turned(name, kind, value) and "attn.c_proj" not in name

    with monkeypatch.context() as patch:
        patch.setattr(published, "is_turned", not_quite)
        published.main(["export", str(tmp_path / "run"), "--out", str(out)])
    found = built("gpt").eval()
    load_published(found, out)
    tokens = torch.randint(VOCAB, (1, SEQ_LEN))
    assert not torch.allclose(found.logits(tokens), model.logits(tokens), rtol=0.01)


def test_a_shadow_is_exported_as_the_model_that_runs(tmp_path):
    """Layers 0 and 2 share weights, layer 1 is not there yet: a model of two equal layers."""
    owners = (0, -1, 0)
    model = random_model("gpt", layers=3)
    pseudo.share(model, owners)
    shadow = {"owners": owners, "calm": 0}
    own_checkpoint(tmp_path / "run", model, pseudo=shadow)
    out = tmp_path / "weights.safetensors"
    published.main(["export", str(tmp_path / "run" / "step-00000003.pt"), "--out", str(out)])
    found = built("gpt", layers=2).eval()
    load_published(found, out)
    tokens = torch.randint(VOCAB, (2, SEQ_LEN))
    assert found.logits(tokens).equal(model.logits(tokens))


def test_an_export_that_cannot_be_is_one_line_and_no_file(tmp_path):
    for name, pos in (("run", "learned"), ("rope", "rope"), ("broken", "learned")):
        own_checkpoint(tmp_path / name, built("gpt", pos=pos))
    file = tmp_path / "broken" / "step-00000003.pt"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    (tmp_path / "text.txt").write_text("no weights")
    (tmp_path / "empty").mkdir()
    for source, to, problem in (
        ("run", "out.bin", "out.bin: end its name in .pt or .safetensors"),
        ("run", "text.txt", "text.txt: end its name"),
        ("run", "nowhere/out.pt", "there is no folder"),
        ("nowhere", "out.pt", "nowhere is neither the folder of a run nor one of its check"),
        ("text.txt", "out.pt", "text.txt is neither the folder of a run"),
        ("empty", "out.pt", "empty is a folder, and holds no checkpoint of a step: name ano"),
        ("rope", "out.pt", "rope/step-00000003.pt has rotary positions (--pos rope)"),
        ("broken", "out.pt", "step-00000003.pt: is damaged"),
    ):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError) as refusal:
            published.main(["export", str(tmp_path / source), "--out", str(tmp_path / to)])
        assert problem in str(refusal.value) and "\n" not in str(refusal.value)
        assert sorted(tmp_path.iterdir()) == before
    export = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out.pt")]
    published.main(export)
    with pytest.raises(ValueError, match=r"out\.pt exists: name another, or delete it"):
        published.main(export)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind, nsp", [("gpt", False), ("bert", False), ("bert", True)])
def test_transformers_reads_what_is_exported(tmp_path, capsys, kind, nsp, suffix):
    transformers = pytest.importorskip("transformers")
    model = random_model(kind, nsp=nsp)
    own_checkpoint(tmp_path / "run", model)
    name = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.pt"
    folder = tmp_path / "theirs"
    folder.mkdir()
    published.main(["export", str(tmp_path / "run"), "--out", str(folder / name)])
    config = json.loads(capsys.readouterr().out.splitlines()[-1].partition("beside it: ")[2])
    (folder / "config.json").write_text(json.dumps(config))
    theirs = getattr(transformers, config["architectures"][0])
    if suffix == ".pt":  # as any state dict
        read = theirs(transformers.AutoConfig.from_pretrained(folder)).eval()
        missing, strangers = read.load_state_dict(torch.load(folder / name), strict=False)
        assert not strangers and all("pooler" in name for name in missing), (missing, strangers)
    else:
        read, notes = theirs.from_pretrained(folder, output_loading_info=True)
        assert not notes["missing_keys"] and not notes["unexpected_keys"], notes
    tokens = torch.randint(VOCAB, (3, SEQ_LEN))
    with torch.no_grad():
        output = read.eval()(tokens)
    scores = output.prediction_logits if nsp else output.logits
    assert_close(model.logits(tokens).detach(), scores, torch.float32)
    if nsp:
        cls = SEQ_LEN * torch.arange(3)
        follows = model.follows(model.hidden_states(tokens).flatten(0, 1), cls).detach()
        assert_close(follows, output.seq_relationship_logits, torch.float32)


def test_safetensors_are_read_like_any_other_file(tmp_path):
    """bf16 on the disk is fp32 in the model."""
    plain = {
        name: value.bfloat16() for name, value in gpt_file().items() if value.is_floating_point()
    }
    path = tmp_path / "model.safetensors"
    with path.open("wb") as out:
        list(safetensors.save(out, plain, {"format": "pt"}))
    found, wanted = built("gpt"), built("gpt")
    load_published(found, path)
    load_published(wanted, written(plain, tmp_path))
    assert all(value.equal(wanted.state_dict()[n]) for n, value in found.state_dict().items())
    assert found.wte.weight.dtype == torch.float32
    assert found.wte.weight.equal(plain[WTE].float())


# Files that do not fit: one line that says what, and a model as it was

WTE, C_ATTN = "transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"
QUERY = "encoder.layer.1.attention.self.query.weight"
WORDS, TYPES = "bert.embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
TWIN = "cls.predictions.decoder.bias"
MISFITS = [  # kind of file, entries changed or deleted (None), changes to the model, problem
    ("gpt", {}, dict(seq_len=8), "wpe.weight must be (8, 16) but is (12, 16)"),
    ("bert", {}, dict(seq_len=20), "must be (20, 16) but is (12, 16)"),
    ("gpt", {}, dict(pos="rope"), "remove these entries: wpe.weight"),
    ("bert", {}, dict(pos="rope"), "position_embeddings.weight"),
    ("gpt", {}, dict(vocab_size=64), "wte.weight must be (64, 16) but is (50, 16)"),
    ("gpt", {}, dict(layers=1), "h.1.attn.c_attn.bias, h.1.attn.c_attn.weight, "),
    ("bert", {}, dict(layers=3), "encoder.layer.2.attention.output.LayerNorm.weight must"),
    ("gpt", {}, dict(width=32), "wte.weight must be (50, 32) but is (50, 16)"),
    ("gpt", {}, dict(mlp_width=32), "mlp.c_fc.weight must be (16, 32) but is (16, 64)"),
    ("gpt", {C_ATTN: None}, {}, "h.1.attn.c_attn.weight must be (16, 48) but is absent"),
    ("gpt", {C_ATTN: torch.ones(48, 16)}, {}, "must be (16, 48) but is (48, 16)"),
    ("bert", {f"bert.{QUERY}": None}, {}, f"{QUERY} must be (16, 16) but is absent"),
    ("bert", {f"bert.{QUERY}": torch.ones(8, 16)}, {}, f"{QUERY} must be (16, 16)"),
    ("bert", {"cls.predictions.bias": None}, {}, "cls.predictions.bias must be (50,)"),
    ("bert", {"bert.pooler.dense.weight": None}, dict(nsp=True), "which --nsp needs"),
    ("bert", {f"bert.{TYPES}": torch.ones(1, 16)}, {}, f"{TYPES} must be (2, 16) but is (1, 16)"),
    ("bert", {"qa.weight": torch.ones(2), "qa.bias": torch.ones(2)}, {}, "qa.bias, qa.weight"),
    ("gpt", {"lm_head.weight": torch.ones(50, 16)}, {}, "lm_head.weight must equal wte.weight"),
    ("bert", {TWIN: torch.ones(50)}, {}, f"{TWIN} must equal cls.predictions.bias"),
    ("gpt", {TWIN: torch.ones(50)}, {}, f"remove these entries: {TWIN}"),
    ("gpt", {"wte.weight": torch.ones(50, 16)}, {}, "wte.weight is there under another name"),
    ("gpt", {C_ATTN: torch.ones(16, 48).char()}, {}, "is not a tensor of floating-point"),
    ("gpt", {WTE: None}, {}, "has no matrix embeddings.word_embeddings.weight"),
    ("gpt", {WTE: torch.ones(50)}, {}, "has no matrix wte.weight"),
    ("bert", {WORDS: torch.ones(50)}, {}, "has no matrix embeddings.word_embeddings.weight"),
]


def assert_refused(model: Transformer, path, *fragments: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError) as refusal:
        load_published(model, path)
    message = str(refusal.value)
    assert message.startswith(f"--init {path}: ") and "\n" not in message
    for fragment in fragments:
        assert fragment in message, message
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("kind", "edits", "changes", "problem"), MISFITS)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, kind, edits, changes, problem):
    file = (gpt_file() if kind == "gpt" else bert_file()) | edits
    file = {name: value for name, value in file.items() if value is not None}
    assert_refused(built(kind, **changes), written(file, tmp_path), problem)


@pytest.mark.parametrize("kind, file", [("gpt", bert_file), ("bert", gpt_file)])
def test_a_misfit_names_the_flags_that_the_file_needs(tmp_path, kind, file):
    other = {"gpt": "bert", "bert": "gpt"}[kind]
    flags = f"the file is for --model {other}, --layers 2 --width 16 and its --heads, --pos learned"
    assert_refused(built(kind), written(file(), tmp_path), "but is absent", flags)


def test_tied_twins_that_are_equal_are_accepted(tmp_path):
    file = bert_file()
    file["cls.predictions.decoder.weight"] = file[WORDS].clone()
    file["cls.predictions.decoder.bias"] = file["cls.predictions.bias"].clone()
    load_published(built("bert"), written(file, tmp_path))
    file = gpt_file()
    file["lm_head.weight"] = file[WTE].clone()
    load_published(built("gpt"), written(file, tmp_path))


class Stranger:
    """What weights_only=True will not build."""


def test_a_file_that_is_no_state_dict_changes_nothing(tmp_path):
    model = built("gpt")
    save = "give a run, a .safetensors file, or a state dict that torch.save wrote"
    assert_refused(model, tmp_path / "nowhere.bin", "cannot be read, No such file", save)
    assert_refused(model, tmp_path, "cannot be read, Is a directory", save)
    for saved, problem in (
        ({"model": gpt_file(), "step": 3}, "model is not a tensor of floating-point numbers"),
        ([torch.ones(2)], "holds a list, not a dict"),
        ({}, "has no matrix embeddings.word_embeddings.weight"),
        ({"module": Stranger()}, "cannot be loaded, UnpicklingError"),
    ):
        assert_refused(model, written(saved, tmp_path), problem, save)


def test_a_file_that_is_broken_or_of_another_format_changes_nothing(tmp_path):
    model, path = built("gpt"), written(gpt_file(), tmp_path)
    whole = path.read_bytes()
    for content in (b"", b"text, not weights", whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert_refused(model, path, "cannot be loaded")
    header = b'{"wte.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert_refused(model, path, "has no matrix wte.weight")
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    assert_refused(model, path, "is a broken safetensors file: it has 3 bytes of data")
    path.write_bytes(whole + b"\nsha256:" + b"0" * 64)  # checkpoint.py's layout
    assert_refused(model, path, "is a checkpoint of train.py, which has a layout of its own")
    path.write_bytes(whole)
    load_published(model, path)  # the same bytes, whole, are good
