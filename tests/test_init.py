"""--init from a run of train.py: its weights, its dimensions, its tokenizer, and nothing else."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import FEW, metrics, read_log, refusal, start_ranks

import config
import sample
import train
from model import Transformer, TransformerConfig
from prepare import prepare
from support import checkpoint
from support.text.tokenizer import fingerprint, get_encoding
from support.weights import initial
from support.weights.trained import real_weights

BYTES = get_encoding("bytes")
pytestmark = pytest.mark.usefixtures("short_ends")


class Begun(Exception):
    """A run stands before its first step."""


@pytest.fixture
def begin(store_dir, tmp_path, monkeypatch):
    """The weights before the first step of a run with few flags of its own, which ends there."""
    monkeypatch.chdir(tmp_path)

    def start(init, flags: str = "", out: str = "next", data=store_dir) -> dict:
        first = {}

        def noted(self, of):
            first.update(self.model.state_dict())
            raise Begun

        argv = f"--init {init} --data {data} --out {out} {FEW} {flags}"
        with monkeypatch.context() as patch, suppress(Begun):
            patch.setattr(train.Trainer, "train_step", noted)
            train.main(argv.split())
        return first

    return start


def newest(folder) -> Path:
    return checkpoint.find(folder, "last")


def made_of(folder) -> tuple[dict, dict]:
    """The settings of a run, and the size of its model."""
    about = json.loads((folder / "config.json").read_text())
    return about["config"], about["model_size"]


def assert_same(weights, wanted):
    assert weights.keys() == wanted.keys()
    assert all(value.equal(wanted[name]) for name, value in weights.items())


def test_a_run_begins_with_the_weights_of_another(begin, run_of, tmp_path, monkeypatch):
    """Kind, size, layers, heads, widths, positions and the length of rows follow from it."""
    best, last = (checkpoint.find(run_of(), name) for name in ("best", "last"))
    assert_same(begin(best), checkpoint.load(best)["model"])
    weights = checkpoint.load(last)["model"]
    assert_same(begin(run_of(), out="newest"), weights)
    (ours, our_size), (theirs, their_size) = map(made_of, (tmp_path / "newest", run_of()))
    names = [*initial.OF_THE_MODEL, "data.seq_len", "data.tokenizer"]
    assert our_size == their_size and all(ours[name] == theirs[name] for name in names)
    # Control: without the weights of --init they are those of the seed.
    monkeypatch.setattr(train, "initial_model", lambda shape, *_: Transformer(shape))
    with pytest.raises(AssertionError):
        assert_same(begin(run_of(), out="control"), weights)


def test_a_bert_of_pairs_and_learned_positions(begin, run_of, tmp_path, capsys):
    source = run_of("--model bert --nsp --pos learned")
    weights = checkpoint.load(newest(source))["model"]
    assert_same(begin(source), weights)
    kept = {n: v for n, v in weights.items() if not n.startswith(("pooler", "nsp"))}
    assert_same(begin(source, "--no-nsp", out="alone"), kept)
    assert "--init left out pooler.weight" in capsys.readouterr().out
    assert made_of(tmp_path / "alone")[1] == {"vocab_size": 320, "positions": 256}
    with pytest.raises(ValueError, match=r"--seq-len 512 is above the 256 positions of --init"):
        begin(source, "--seq-len 512 --batch-tokens 1024", out="long")


def test_positions_of_a_published_start_are_handed_on(begin, tmp_path):
    state = Transformer(TransformerConfig("gpt", 1, 2, 32, 128, 48, 257)).state_dict()
    turned = {n: v.T if n.startswith("h.") and v.dim() == 2 else v for n, v in state.items()}
    torch.save(turned, tmp_path / "gpt.pt")
    first = begin(tmp_path / "gpt.pt", "--layers 1 --heads 2 --width 32 --seq-len 32", out="first")
    assert_same(first, state)
    with pytest.raises(ValueError, match=r"--seq-len 64 is above the 48 positions of --init"):
        begin(tmp_path / "gpt.pt", "--layers 1 --heads 2 --width 32 --seq-len 64", out="long")
    path = tmp_path / "step-00000001.pt"
    settings, size = made_of(tmp_path / "first")
    state = {"model": first, "step": 1, "config": settings, "model_size": size}
    state |= {"tokenizer_fingerprint": fingerprint(BYTES), "clock": {}, "best_step": 0}
    checkpoint.save(path, state)
    begin(path, out="second")
    assert made_of(tmp_path / "second")[1] == {"vocab_size": 257, "positions": 48}


def test_the_source_is_needed_until_there_is_a_checkpoint(begin, run_of, store_dir, tmp_path):
    source = shutil.copytree(run_of(), tmp_path / "source")
    assert train.main(f"--init {source} --data {store_dir} --out next {FEW}".split()) == 0
    whole = metrics(read_log(tmp_path / "next"))
    begin(source, out="new")
    shutil.copytree(tmp_path / "new", tmp_path / "late")
    assert train.main(["--resume", "--out", "new"]) == 0
    assert metrics(read_log(tmp_path / "new")) == whole
    shutil.rmtree(source)
    checkpoint.find(tmp_path / "next", "last").unlink()
    assert train.main(["--resume", "--out", "next"]) == 0
    assert metrics(read_log(tmp_path / "next")) == whole
    sample.main(["next", "--prompt", "", "--tokens", "3"])
    with pytest.raises(ValueError, match=r"source/step-\d+\.pt: cannot be read, No such file"):
        train.main(["--resume", "--out", "late"])


def test_the_tokenizer_is_compared_by_its_content(begin, run_of, tmp_path):
    """A name says little: a file of ranks may hold others now."""
    text = tmp_path / "text.txt"
    text.write_text("another text\n" * 500)
    prepare([text], tmp_path / "other", BYTES, "bytes")
    begin(run_of(), data=tmp_path / "other")
    state = checkpoint.load(newest(run_of())) | {"tokenizer_fingerprint": "another"}
    checkpoint.save(tmp_path / "changed/step-00000004.pt", state)
    with pytest.raises(ValueError, match="with tokenizer bytes, and the store has bytes"):
        begin(tmp_path / "changed", out="second")


def test_a_shadow_begins_as_the_model_that_runs(begin, run_of):
    """Shared weights are there for each layer; layers that are not there yet are left out."""
    group, layers = "--pseudo-group 2 --pseudo-until 0.99", "--pseudo-layers 2 --pseudo-until 0.9"
    for flags, owners in (group, (0, 1, 0, 1)), (layers, (0, -1, -1, 3)):
        path = newest(run_of(f"--pseudo {flags}"))
        state = checkpoint.load(path)
        assert tuple(state["pseudo"]["owners"]) == owners
        assert_same(begin(path, out=f"next{owners[1]}"), real_weights(state))


def test_a_folder_of_shards_is_a_checkpoint_too(begin, run_of, tmp_path):
    state = checkpoint.load(newest(run_of()))
    folder = tmp_path / "step-00000004"
    checkpoint.save(folder, state, sharded=True)
    assert_same(begin(folder), state["model"])
    (folder / "__0_0.distcp").write_text("{}")
    with pytest.raises(ValueError, match=r"--init .*step-00000004 is damaged"):
        begin(folder, out="other")


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_begin_as_one_does(run_of, store_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = f"--init {run_of()} --data {store_dir} {FEW} --out".split()
    train.main([*flags, "alone"])
    start_ranks(2, [*flags, "two", "--fsdp"])
    alone, two = (read_log(tmp_path / name, "train") for name in ("alone", "two"))
    assert alone
    for a, b in zip(alone, two, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5


def test_settings_follow_from_it_and_without_it_nothing_looks_for_one(run_of, monkeypatch):
    """Without a store the embedded one of its tokenizer is taken."""
    init = ["--init", str(run_of())]
    settings, folder = config.parse_or_resume(init)
    assert settings.data.tokenizer == "bytes" and settings.data.seq_len == 32 and folder is None
    assert config.parse_or_resume([*init, "--data", "store"])[0].data.tokenizer is None
    monkeypatch.setattr("support.weights.initial.checkpoint_of", None)
    assert config.parse_or_resume(["--layers", "3"])[0] == config.build({"model.layers": 3})
    with pytest.raises(TypeError):  # the control
        config.parse_or_resume(init)


def test_what_does_not_fit_is_one_line(begin, run_of, tmp_path):
    source = run_of()
    (tmp_path / "empty").mkdir()
    content = bytearray(newest(source).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    for init, flags, problem in (
        (source, "--layers 3 --width 64", "of --layers 4 --width 32, not --layers 3 --width 64"),
        (source, "--nsp", "is a model of --no-nsp, not --nsp"),
        (source, "--pseudo", "--init and --pseudo exclude"),
        ("empty", "", "empty is a folder"),
        ("gone", "", "gone: cannot be read, No such file"),
        ("damaged.pt", "", "damaged.pt is damaged"),
        ("cut.pt", "", "cut.pt: cannot be loaded"),
    ):
        message = refusal(begin, tmp_path / init, flags)
        assert problem in message, message
        assert message.startswith("--init ") and not (tmp_path / "next").exists()
