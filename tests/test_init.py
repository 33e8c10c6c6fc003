"""--init from a run of train.py: its weights, its dimensions, its tokenizer, and nothing else."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import SMALL, metrics, read_log, start_ranks

import config
import pseudo
import sample
import train
from model import Transformer, TransformerConfig
from prepare import prepare
from support.run import checkpoint, sharded_checkpoint
from support.text.tokenizer import get_encoding
from support.weights.trained import real_layers

FEW = (
    "--tokens 1024 --batch-tokens 256 --device cpu --eval-every 512 --eval-tokens 500"
    " --final-eval-tokens 500 --checkpoint-every 512"
)


@pytest.fixture(scope="module")
def run_of(store_dir, tmp_path_factory):
    """The folder of a run of four steps that others begin with: run_of("--pos learned")"""
    made = {}

    def source(flags: str = "") -> Path:
        if flags not in made:
            made[flags] = tmp_path_factory.mktemp("source") / "run"
            argv = f"{SMALL} --data {store_dir} --out {made[flags]} --tokens 1024 {flags}"
            assert train.main(argv.split()) == 0
        return made[flags]

    return source


@pytest.fixture
def begin(store_dir, tmp_path, monkeypatch):
    """Train from a run with few flags of its own; returns the weights before the first step."""
    monkeypatch.chdir(tmp_path)

    def start(init, flags: str = "", out: str = "next", data=store_dir) -> dict:
        found = {}
        step = train.Trainer.step

        def noted(self, of):
            for name, parameter in {} if found else self.model.state_dict().items():
                found[name] = parameter.clone()
            return step(self, of)

        argv = f"--init {init} --data {data} --out {out} {FEW} {flags}"
        with monkeypatch.context() as patch:
            patch.setattr(train.Trainer, "step", noted)
            assert train.main(argv.split()) == 0
        return found

    return start


def weights(path) -> dict:
    return sharded_checkpoint.load(path)["model"]


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(value.equal(wanted[name]) for name, value in found.items())


@pytest.mark.parametrize("which", ["run", "last", "best"])
def test_a_run_begins_with_the_weights_of_another(begin, run_of, tmp_path, which):
    """Kind, size, layers, heads, widths, positions and the length of rows follow from it."""
    source = run_of()
    path = source if which == "run" else checkpoint.find(source, which)
    found = begin(path)
    assert_same(found, weights(checkpoint.find(source, "last") if which == "run" else path))
    ours, theirs = (
        checkpoint.load(checkpoint.find(f, "last")) for f in (tmp_path / "next", source)
    )
    assert ours["model_size"] == theirs["model_size"]
    for name in ("layers", "heads", "width", "mlp_width", "pos", "model", "size"):
        assert ours["config"][f"model.{name}"] == theirs["config"][f"model.{name}"]
    assert ours["config"]["data.seq_len"] == theirs["config"]["data.seq_len"] == 32
    assert ours["clock"]["step"] == 4, "the clock is its own"


def test_negative_control_another_seed_begins_elsewhere(begin, run_of, monkeypatch):
    """Without the weights of --init they are those of the seed."""
    monkeypatch.setattr(train, "initial_model", lambda shape, *_: Transformer(shape))
    with pytest.raises(AssertionError):
        assert_same(begin(run_of()), weights(checkpoint.find(run_of(), "last")))


def test_a_bert_of_pairs_and_learned_positions(begin, run_of, tmp_path, capsys):
    source = run_of("--model bert --nsp --pos learned")
    newest = checkpoint.find(source, "last")
    assert_same(begin(source), weights(newest))
    found = begin(source, "--no-nsp", out="alone")
    kept = {n: v for n, v in weights(newest).items() if not n.startswith(("pooler", "nsp"))}
    assert_same(found, kept)
    assert "--init left out pooler.weight" in capsys.readouterr().out
    size = checkpoint.load(checkpoint.find(tmp_path / "alone", "last"))["model_size"]
    assert size == {"vocab_size": 320, "positions": 256}
    sentence = r"--init .* has 256 positions, --seq-len 512 is more"
    with pytest.raises(ValueError, match=sentence):
        begin(source, "--seq-len 512 --batch-tokens 1024", out="long")


def test_positions_of_a_published_start_are_handed_on(begin, run_of, store_dir, tmp_path):
    shape = TransformerConfig("gpt", 4, 2, 32, 128, 48, 257)
    state = Transformer(shape).state_dict()
    turned = {n: v.T if n.startswith("h.") and v.dim() == 2 else v for n, v in state.items()}
    torch.save(turned, tmp_path / "gpt.pt")
    begin(tmp_path / "gpt.pt", "--layers 4 --heads 2 --width 32 --seq-len 32", out="first")
    begin(tmp_path / "first", out="second")
    newest = checkpoint.find(tmp_path / "second", "last")
    assert checkpoint.load(newest)["model_size"] == {"vocab_size": 257, "positions": 48}


def test_the_source_is_not_needed_once_there_is_a_checkpoint(begin, run_of, tmp_path):
    source = shutil.copytree(run_of(), tmp_path / "source")
    begin(source)
    whole = metrics(read_log(tmp_path / "next"))
    shutil.rmtree(source)
    assert train.main(["--resume", "previous", "--out", "next"]) == 0
    assert metrics(read_log(tmp_path / "next")) == whole
    sample.main(["next", "--tokens", "3"])
    for file in (tmp_path / "next").glob("step-*"):
        file.unlink()
    for file in (tmp_path / "next").glob("best.pt"):
        file.unlink()
    log = tmp_path / "next" / "log.jsonl"
    log.write_text("".join(x for x in log.read_text().splitlines(True) if "checkpoint" not in x))
    with pytest.raises(ValueError, match=r"source/step-00000004\.pt: cannot be read, No such file"):
        train.main(["--resume", "--out", "next"])


def test_a_run_stopped_before_its_first_checkpoint_begins_with_them_again(
    begin, run_of, tmp_path, monkeypatch
):
    begin(run_of(), out="whole")
    step = train.Trainer.step

    def killed(self, of):
        if of.context.step == 2:
            raise KeyboardInterrupt
        return step(self, of)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            begin(run_of())
    assert train.main(["--resume", "--out", "next"]) == 0
    assert metrics(read_log(tmp_path / "next")) == metrics(read_log(tmp_path / "whole"))


def test_another_store_of_the_same_tokenizer(begin, run_of, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("another text\n" * 500)
    prepare([text], tmp_path / "other", get_encoding("bytes"), "bytes")
    assert_same(begin(run_of(), data=tmp_path / "other"), weights(run_of() / "step-00000004.pt"))


def test_without_a_store_the_embedded_one_of_its_tokenizer_is_taken(run_of):
    settings, folder = config.parse_or_resume(["--init", str(run_of())])
    assert settings.data.tokenizer == "bytes" and settings.data.seq_len == 32 and folder is None
    given = ["--init", str(run_of()), "--data", "store"]
    assert config.parse_or_resume(given)[0].data.tokenizer is None


@pytest.mark.parametrize("stage", ["--pseudo-group 2", "--pseudo-layers 2 --pseudo-until 0.9"])
def test_a_shadow_begins_as_the_model_that_runs(begin, run_of, stage):
    """Shared weights are there for each layer; layers that are not there yet are left out."""
    source = run_of(f"--pseudo {stage}" + " --pseudo-until 0.99" * ("until" not in stage))
    state = checkpoint.load(checkpoint.find(source, "last"))
    owners = state["pseudo"]["owners"]
    assert owners == ((0, 1, 0, 1) if "group" in stage else (0, -1, -1, 3))
    found = begin(checkpoint.find(source, "last"))
    real = 4 if "group" in stage else 2
    assert {name.split(".")[1] for name in found if name.startswith("h.")} == set(
        map(str, range(real))
    )
    for layer, owner in enumerate(owner for owner in owners if owner >= 0):
        assert found[f"h.{layer}.mlp.c_fc.weight"].equal(
            state["model"][f"h.{owner}.mlp.c_fc.weight"]
        )


@pytest.mark.parametrize("owners", [(0, 1, 0, 1), (0, -1, 0, 3), (0, 0, 0, 0)])
def test_real_layers_compute_the_same_function(owners):
    torch.manual_seed(1)
    shape = dict(heads=2, width=16, mlp_width=32, seq_len=8, vocab_size=40)
    shadow = pseudo.share(Transformer(TransformerConfig("gpt", layers=4, **shape)), owners)
    running = sum(owner >= 0 for owner in owners)
    real = Transformer(TransformerConfig("gpt", layers=running, **shape))
    real.load_state_dict(real_layers(shadow.state_dict(), owners))
    tokens = torch.randint(40, (2, 8))
    assert real.logits(tokens).equal(shadow.logits(tokens))
    assert len({p.data_ptr() for p in real.parameters()}) == len(list(real.parameters()))


def test_a_folder_of_shards_is_a_checkpoint_too(begin, run_of, tmp_path):
    state = checkpoint.load(checkpoint.find(run_of(), "last"))
    folder = tmp_path / "step-00000004.sharded"
    sharded_checkpoint.write(folder, state, sharded_checkpoint.ALONE)
    assert_same(begin(folder), state["model"])
    (folder / "rank-0-of-1.pt").write_text("{}")
    with pytest.raises(ValueError, match=r"--init .*sharded"):
        begin(folder, out="other")


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_begin_as_one_does(begin, run_of, store_dir, tmp_path):
    begin(run_of())
    argv = f"--init {run_of()} --data {store_dir} --out two --fsdp {FEW}".split()
    start_ranks(2, argv)
    one, two = (read_log(tmp_path / name, "train") for name in ("next", "two"))
    for a, b in zip(one, two, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5


def test_off_is_absent(run_of, monkeypatch):
    """Without --init nothing looks for one."""
    monkeypatch.setattr("support.weights.initial.checkpoint_of", None)
    assert config.parse_or_resume(["--layers", "3"])[0] == config.build({"model.layers": 3})
    with pytest.raises(TypeError):  # the control
        config.parse_or_resume(["--init", str(run_of())])


def test_what_does_not_fit_is_one_line(begin, run_of, tmp_path):
    source = run_of()
    newest = checkpoint.find(source, "last")
    (tmp_path / "empty").mkdir()
    (tmp_path / "alone").mkdir()
    shutil.copy(newest, tmp_path / "alone" / "best.pt")
    damaged = tmp_path / "damaged.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(content[: len(content) // 2])
    for init, flags, said in (
        (source, "--layers 3 --width 64", "with --layers 4 --width 32, not --layers 3 --width 64"),
        (source, "--model bert", "was trained with --model gpt, not --model bert: leave that out"),
        (source, "--pos learned", "was trained with --pos rope, not --pos learned"),
        (source, "--size 124M", "was trained with --size nano, not --size 124M"),
        (source, "--nsp", "was trained with --no-nsp, not --nsp"),
        (source, "--pseudo", "--init and --pseudo exclude each other"),
        (tmp_path / "empty", "", "empty is a folder, and holds no checkpoint of a step: name anot"),
        (
            tmp_path / "alone",
            "",
            "alone is a folder, and holds no checkpoint of a step but best.pt",
        ),
        (tmp_path / "gone", "", "gone: cannot be read, No such file"),
        (tmp_path / "x.sharded", "", "x.sharded: cannot be read, No such file"),
        (damaged, "", "damaged.pt: is damaged: sha256"),
        (cut, "", "cut.pt: cannot be loaded"),
    ):
        with pytest.raises(ValueError) as refusal:
            begin(init, flags)
        message = str(refusal.value)
        assert said in message and "\n" not in message, message
        assert message.startswith("--init ")
        assert not (tmp_path / "next").exists()


def test_another_tokenizer_is_refused_by_its_content(begin, run_of, tmp_path):
    """A name says little: a file of ranks may hold others now."""
    with pytest.raises(
        ValueError, match="was trained with tokenizer bytes, and the store has pd4k"
    ):
        train.main(["--init", str(run_of()), "--tokenizer", "pd4k", "--out", "next"])
    state = checkpoint.load(checkpoint.find(run_of(), "last"))
    del state["tokenizer_fingerprint"]  # of a run from before it was saved: the name decides
    checkpoint.save(tmp_path / "older", state, step=4)
    begin(tmp_path / "older")
    state["tokenizer_fingerprint"] = "another"
    checkpoint.save(tmp_path / "other", state, step=4)
    with pytest.raises(
        ValueError, match="was trained with tokenizer bytes, and the store has byte"
    ):
        begin(tmp_path / "other", out="second")
