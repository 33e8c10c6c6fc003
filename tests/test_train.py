"""The run as a whole: off is absent, neutral is identity, resume is exact, ranks do not matter."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ALL_ON, SMALL, metrics, read_log, start_ranks, stop_in_step

import curriculum
import ltd
import model
import packing
import plan
import sample
import train
from evaluate import Evaluation
from model import Transformer, TransformerConfig, run_plain, run_recomputed
from prepare import prepare
from support.base.runtime import exit_cleanly
from support.run import checkpoint
from support.run.folder import Log
from support.text.store import Store
from support.text.tokenizer import get_encoding

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
LINE = {
    "step", "consumed_tokens", "real_tokens", "layer_tokens", "loss", "lr", "max_piece_len",
    "kept_tokens", "padding_share", "pieces", "attention_share", "ms", "data_ms",
}  # fmt: skip

STAGE = {"difficulty_seqlen", "difficulty_rarity", "pool"}


def losses(lines):
    return [line["loss"] for line in lines if line["event"] == "train"]


def test_what_a_run_leaves(run, tmp_path, capsys):
    lines = run(f"{ALL_ON} --final-eval-tokens 1000000")
    out = capsys.readouterr().out
    steps = [line for line in lines if line["event"] == "train"]
    evals = [line for line in lines if line["event"] == "eval"]
    assert all(line.keys() >= LINE | STAGE for line in steps)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["consumed_tokens"] >= 4096 > steps[-2]["consumed_tokens"]
    assert evals and all(line["val_loss"] > 0 and line["val_bpb"] > 0 for line in evals)
    assert evals[-1]["bytes"] > evals[0]["bytes"], "the last evaluation takes every document"
    assert lines[0]["event"] == "run" and lines[0]["config"]["ltd.on"] is True
    assert f"held-out: {evals[-1]['val_bpb']:.4f} bits per byte" in out
    assert "of layer-tokens" in out and "padding:" in out and "a sample:" in out
    assert (tmp_path / "run/config.json").exists()
    assert len(list((tmp_path / "run").glob("step-*.pt"))) == 2  # --keep 2
    best = checkpoint.load(tmp_path / "run/best.pt")
    assert best["best"] == min(line["val_bpb"] for line in evals[:-1])


def test_learns(run):
    first, *_, last = losses(run("--tokens 20000 --lr 0.01"))
    assert first > 5.4 and last < 3.6  # ln 320 = 5.77 nats knows nothing


def test_off_is_absent(run, log_of, monkeypatch):
    """With the flags off no line of a technique runs, and the losses are the same bit for bit."""
    plain = metrics(log_of())

    def poison(*_, **__):
        raise AssertionError("a technique that is off was called")

    for module, names in (
        (ltd, ["kept_tokens", "draw", "run_kept", "token_dropping"]),
        (model, ["checkpoint"]),
        (curriculum, ["pace", "parse_metrics", "Curriculum"]),
        (plan, ["ready", "reshape"]),
        (packing, ["pack_lengths"]),
        (plan, ["balanced"]),  # evaluation packs with its own import
    ):
        for name in names:
            monkeypatch.setattr(module, name, poison)
    assert metrics(run(out="poisoned")) == plain
    for flags in ("--ltd", "--pack", "--curriculum seqlen"):  # and the poison is one
        with pytest.raises(AssertionError, match="was called"):
            run(flags, out=flags.split("-")[2].split()[0])


@pytest.mark.parametrize(
    "neutral",
    [
        "--ltd --ltd-start 32",
        "--curriculum seqlen --curriculum-start 32",
        "--curriculum rarity --curriculum-start 100",
    ],
)
@pytest.mark.parametrize("base", ["", "--pack"])
def test_neutral_is_identity(run, log_of, base, neutral):
    assert metrics(run(f"{base} {neutral}")) == metrics(log_of(base))


@pytest.mark.parametrize(
    "technique",
    ["--ltd --ltd-start 16", "--curriculum seqlen", "--curriculum rarity", "--pack"],
)
def test_a_technique_that_is_on_does_something(log_of, technique):
    assert losses(log_of(technique)) != losses(log_of())


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer adamw",
        "--schedule wsd",
        "--schedule cosine",
        "--pos learned --seq-len 32",
        "--dtype bf16",
        "--dropout 0.1",
        "--micro-batch-size 2",
        "--model bert",
        f"--model bert {ALL_ON}",
        "--ltd --pack",
        "--ltd --ltd-mode bypass --ltd-pace root --ltd-layers 2-3 --lr-clock layer-tokens --pack",
        "--ltd --ltd-pace constant --ltd-steps 4 --ltd-start 6 --ltd-multiple 2 --model bert",
        "--curriculum seqlen --ltd",
        "--curriculum seqlen --pack",
        "--curriculum seqlen-reshape,rarity --curriculum-start 8,1 --ltd --micro-batch-size 2",
        "--curriculum length,rarity-mean --curriculum-by value --curriculum-start 8,4 --pack",
        "--curriculum length-rarity --model bert --dropout 0.1",
        "--model bert --pack --micro-batch-size 3",
        f"--model bert --nsp {ALL_ON} --loss-per document",
        "--model bert --nsp --curriculum length --dropout 0.1 --optimizer adamw",
        f"{ALL_ON} --pack-batch documents --long truncate --loss-per document",
    ],
)
def test_every_combination_runs(run, flags):
    lines = run(f"{flags} --tokens 2048 --eval-every 0 --checkpoint-every 0")
    assert all(0 < loss < 7 for loss in losses(lines))


# At the default learning rate so small a model multiplies a last bit of rounding by 30 in 20 steps.
CURVE = f"{ALL_ON} --tokens 6000 --lr 1e-3 --eval-every 0 --checkpoint-every 0"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulation_does_not_change_the_curve(run, optimizer):
    whole = losses(run(f"{CURVE} --optimizer {optimizer}", out="whole"))
    parts = losses(run(f"{CURVE} --optimizer {optimizer} --micro-batch-size 2", out="parts"))
    assert len(whole) >= 20
    assert max(abs(a - b) for a, b in zip(whole, parts, strict=True)) < 1e-5


@pytest.mark.parametrize(
    "flags", ["--pack", "--model bert --pack", "--model bert --nsp", "--pack-batch documents"]
)
def test_documents_may_count_alike_whatever_their_length(log_of, flags):
    """Another curve than with tokens, and the same one for micro-batches."""
    flags = f"{CURVE} --tokens 3000 {flags} --loss-per"
    by_token, by_document = (losses(log_of(f"{flags} {what}")) for what in ("token", "document"))
    parts = losses(log_of(f"{flags} document --micro-batch-size 2"))
    assert parts == pytest.approx(by_document, rel=1e-5)
    assert by_document != pytest.approx(by_token, rel=1e-3)
    assert by_document[-1] < by_document[0]


# A GPT's documents, one a row or packed, in rows that hold several; twelve steps or so.
DOCUMENTS = (
    "--seq-len 512 --batch-tokens 4096 --tokens 40000 --lr 1e-3 --eval-every 0"
    " --checkpoint-every 0 --pack"
)
ALONE = f"{DOCUMENTS} --pack-max-per-row 1 --pack-batch rows"


@pytest.mark.parametrize("more", ["", " --loss-per document", " --long truncate --optimizer adamw"])
def test_a_step_of_documents_learns_what_the_unpacked_one_does(run, log_of, more):
    """The same curve on the same clock, at the same learning rate, in fewer rows."""
    alone = [line for line in log_of(f"{ALONE}{more}") if line["event"] == "train"]
    packed = run(f"{DOCUMENTS} --pack-batch documents{more}", out="packed")
    packed = [line for line in packed if line["event"] == "train"]
    assert len(alone) >= 10
    for a, b in zip(alone, packed, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
        same = ("step", "consumed_tokens", "real_tokens", "lr", "pieces", "max_piece_len")
        assert [b[name] for name in same] == [a[name] for name in same]
    assert packed[-1]["layer_tokens"] < 0.9 * alone[-1]["layer_tokens"]


def test_negative_control_a_sample_more_a_step_is_another_curve(run, log_of, monkeypatch):
    alone = losses(log_of(ALONE))
    real = plan.Plan.draw_samples
    monkeypatch.setattr(
        plan.Plan, "draw_samples", lambda self, clock, pool, n: real(self, clock, pool, n + 1)
    )
    packed = losses(run(f"{DOCUMENTS} --pack-batch documents", out="packed"))
    assert max(abs(a - b) for a, b in zip(alone, packed, strict=False)) > 1e-2


@pytest.mark.parametrize("more", ["", " --nsp", " --nsp --loss-per document --pos rope"])
def test_a_packed_bert_learns_what_the_unpacked_one_does(run, log_of, more):
    """Its masks and its pairs too: they are drawn by where text lies in the store, not by row."""
    flags = DOCUMENTS.replace("--pack", f"--model bert{more}")
    alone, packed = log_of(flags), run(f"{flags} --pack", out="packed")
    same = ("step", "consumed_tokens", "real_tokens", "lr", "pieces")
    counts = [
        [[line[name] for name in same] for line in lines if line["event"] == "train"]
        for lines in (alone, packed)
    ]
    assert counts[0] == counts[1] and len(counts[0]) >= 10
    assert losses(packed) == pytest.approx(losses(alone), abs=1e-4)


def test_negative_control_masks_drawn_by_row_are_another_curve(run, log_of, monkeypatch):
    flags = DOCUMENTS.replace("--pack", "--model bert")
    alone = losses(log_of(flags))
    monkeypatch.setattr(
        "data.places",
        lambda rows, batch: torch.arange(batch.tokens.numel()).view_as(batch.tokens),
    )
    packed = losses(run(f"{flags} --pack", out="packed"))
    assert max(abs(a - b) for a, b in zip(alone, packed, strict=True)) > 1e-3


def test_answers_begin_as_those_of_a_coin(run, monkeypatch):
    """Their part of the loss alone, each as much as some tokens together."""
    found = []
    real = train.shares_of

    def only_answers(batch, per_document, of_answer):
        shares = real(batch, per_document, of_answer)
        found.append(of_answer)
        return shares * (batch.with_documents().positions == 0)

    monkeypatch.setattr(train, "shares_of", only_answers)
    curve = losses(run("--model bert --nsp --pack --lr 1e-3"))
    assert curve[0] == pytest.approx(math.log(2), abs=0.02) and min(found) > 1


@pytest.mark.slow
def test_a_bert_learns_which_text_follows(tmp_path):
    """Documents of one letter each: a second part of another letter does not follow."""
    random = np.random.default_rng(0)
    texts = [chr(97 + n % 26) * random.integers(12, 29) for n in range(1500)]
    lines = "\n".join(json.dumps({"text": texts[n]}) for n in random.permutation(1500))
    (tmp_path / "letters.jsonl").write_text(lines)
    prepare([tmp_path / "letters.jsonl"], tmp_path / "store", get_encoding("bytes"), "bytes", 10)
    shape = "--layers 2 --heads 2 --width 32 --seq-len 32 --batch-tokens 1024 --device cpu"
    flags = f"--model bert --nsp --pack {shape} --tokens 500K --lr 1e-2"
    argv = [*flags.split(), "--data", str(tmp_path / "store"), "--out", str(tmp_path / "run")]
    assert train.main(argv) == 0
    last = [line for line in read_log(tmp_path / "run") if line["event"] == "eval"][-1]
    assert last["nsp_accuracy"] > 0.8 and last["val_bpb"] < 0.1


@pytest.mark.parametrize("flags", ["", "--pack --pack-batch documents --model bert"])
def test_a_run_that_truncates_says_what_it_leaves_out(run, store_dir, flags, capsys):
    store = Store.open(store_dir)
    bert = "bert" in flags
    truncated = run(f"{flags or '--pack'} --long truncate")
    sizes = np.diff(store.offsets[: store.train_documents + 1]) - bert
    beyond = np.maximum(sizes - (30 if bert else 32), 0)
    said = f"--long truncate: {(beyond > 0).sum():,} of 454 documents are longer than a row"
    assert f"{said}, {beyond.sum():,} of their tokens are left out" in capsys.readouterr().out
    split = run(flags, out="split")
    assert "--long" not in capsys.readouterr().out
    evals = [[line for line in run if line["event"] == "eval"] for run in (truncated, split)]
    assert evals[0][-1]["targets"] == evals[1][-1]["targets"], "held-out text is whole either way"


@pytest.mark.parametrize(
    "flags",
    [
        f"{ALL_ON} --dropout 0.1",
        f"{ALL_ON} --pack-batch documents --long truncate",
        "--model bert --pack",
        "--model bert --pack --pack-batch rows --nsp",
    ],
)
def test_stop_in_the_middle_and_resume_is_exact(run, log_of, tmp_path, monkeypatch, flags):
    """Also with dropout, whose masks come from the clock and not from a generator's past."""
    whole = metrics(log_of(flags))
    with monkeypatch.context() as patch:
        stop_in_step(9, patch)
        with pytest.raises(AssertionError):  # the status is 143, not 0
            run(flags, out="stopped")
    assert read_log(tmp_path / "stopped", "train")[-1]["step"] == 9
    assert train.main(["--resume", "--out", "stopped"]) == 0
    assert metrics(read_log(tmp_path / "stopped")) == whole


def send(number):
    os.kill(os.getpid(), number)


def interrupted(run, patch, place, at, flags, number=signal.SIGTERM):
    """Train until a function has been called so often, and send the signal before that call."""
    owner, name = place
    original, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            send(number)
        return original(*args, **kwargs)

    with patch.context() as context:
        context.setattr(owner, name, counted)
        with pytest.raises(AssertionError):  # the status is 128 and the signal's number, not 0
            run(flags, out="stopped")


@pytest.mark.parametrize(
    ("place", "at", "evaluations"),
    [
        ((Evaluation, "batch"), 2, 0),  # in an evaluation on the way
        ((Evaluation, "batch"), 24, 2),  # in the last one
        ((train, "run_block_of"), 14, 0),  # in the second of a step's four micro-batches
    ],
    ids=["evaluation", "last evaluation", "micro-batch"],
)
def test_stopped_in_the_middle_of_something_long_and_resumed_is_the_same_run(
    run, log_of, tmp_path, monkeypatch, place, at, evaluations
):
    flags = f"{ALL_ON} --micro-batch-size 2"
    whole = metrics(log_of(flags))
    interrupted(run, monkeypatch, place, at, flags)
    assert len(read_log(tmp_path / "stopped", "eval")) == evaluations
    stopped = metrics(read_log(tmp_path / "stopped"))
    assert stopped == whole[: len(stopped)] and len(stopped) < len(whole)
    assert train.main(["--resume", "--out", "stopped"]) == 0
    assert metrics(read_log(tmp_path / "stopped")) == whole


def test_neither_the_first_nor_the_last_step_is_wasted(run):
    """Linear, no warmup: the rate of a step is that of its middle, so the mean is half the peak."""

    def rates(flags, out):
        lines = run(f"{flags} --lr 0.01", out=out)
        return [line["lr"] for line in lines if line["event"] == "train"]

    expected = pytest.approx([0.01 * share for share in (7 / 8, 5 / 8, 3 / 8, 1 / 8)])
    assert rates("--tokens 1024 --warmup-tokens 0", "four") == expected
    assert rates("--tokens 512 --warmup-tokens 256", "two") == pytest.approx([0.005, 0.005])
    # three steps of 256 for 520 tokens: the last one's middle is taken within the budget
    assert rates("--tokens 520 --warmup-tokens 0", "over")[-1] == pytest.approx(0.01 * 4 / 520)


def test_the_learning_rate_may_follow_layer_tokens(run):
    """With padding they run ahead of consumed tokens: the rate falls sooner."""
    flags = (
        "--ltd --ltd-start 8 --pack --curriculum seqlen --lr 0.01 --warmup-tokens 0 --model bert"
    )
    rates = {}
    for clock in ("consumed-tokens", "layer-tokens"):
        steps = [line for line in run(f"{flags} --lr-clock {clock}", out=clock) if "lr" in line]
        rates[clock] = [step["lr"] for step in steps]
        at = [0, *(s["layer_tokens"] / 4 for s in steps)] if clock == "layer-tokens" else []
        for before, after, rate in zip(at, at[1:], rates[clock], strict=False):
            middle = (before + min(after, 4096)) / 2
            assert rate == pytest.approx(max(0.01 * (1 - middle / 4096), 0.0), abs=1e-9)
    assert rates["layer-tokens"] != rates["consumed-tokens"]


def test_zero_means_never(run, tmp_path):
    lines = run("--eval-every 0 --checkpoint-every 0")
    assert [line["last"] for line in lines if line["event"] == "eval"] == [True]
    assert len(list((tmp_path / "run").glob("*.pt"))) == 1, "the last, and no best"


def test_the_last_evaluation_has_a_cap_and_says_what_it_was_on(run, capsys):
    lines = run("--final-eval-tokens 3000")
    on_the_way, last = ([e for e in lines if e["event"] == "eval"][i] for i in (0, -1))
    assert 500 <= on_the_way["targets"] < 600 and 3000 <= last["targets"] < 3100
    out = capsys.readouterr().out
    said = [line for line in out.splitlines() if line.startswith("held-out")]
    assert said[0].endswith(" held-out tokens, full length, nothing dropped")
    assert f"on {last['targets']:,} of " in said[0]


def test_the_tokenizer_comes_from_the_store(store_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = SMALL.replace("--tokenizer bytes", "").replace("--tokens 4096", "--tokens 600")
    assert train.main(f"{flags} --data {store_dir} --out run".split()) == 0
    assert read_log(tmp_path / "run")[0]["config"]["data.tokenizer"] == "bytes"


def test_an_interrupt_before_the_first_step_ends_at_once(run, tmp_path, monkeypatch):
    """An analysis may take long; there is nothing yet that would have to be saved."""
    monkeypatch.setattr(train, "Plan", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run()
    signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_says_so(run, tmp_path, capsys):
    run()
    before = (tmp_path / "run/log.jsonl").read_bytes()
    assert train.main(["--resume", "--out", "run"]) == 0
    assert "run is finished" in capsys.readouterr().out
    assert (tmp_path / "run/log.jsonl").read_bytes() == before


def test_resume_finds_the_newest_run(run, tmp_path, capsys):
    run(out="runs/a")
    run(out="runs/b")
    assert train.main(["--resume"]) == 0
    assert "runs/b is finished" in capsys.readouterr().out


def test_new_runs_are_numbered(store_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train.main(f"{SMALL} --data {store_dir} --tokens 600".split())
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["gpt-nano-1", "gpt-nano-2"]


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_taken_on_request(run, tmp_path):
    whole = metrics(run())
    newest = checkpoint.find(tmp_path / "run", "last")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{newest.name}.*use previous"):
        train.main(["--resume", "--out", "run"])
    assert train.main(["--resume", "previous", "--out", "run"]) == 0
    assert metrics(read_log(tmp_path / "run")) == whole


def test_a_full_disk_loses_nothing(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    real_save = torch.save
    saves = []

    def save(*args, **kwargs):
        saves.append(1)
        return (full if len(saves) == 2 else real_save)(*args, **kwargs)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(ValueError, match="No space left"):
        run()
    monkeypatch.undo()
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert len([name for name in files if name.startswith("step-")]) == 1
    assert not [name for name in files if "tmp" in name]
    monkeypatch.chdir(tmp_path)
    assert train.main(["--resume", "--out", "run"]) == 0


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_non_finite_step_stops_before_the_weights_move(run, tmp_path, monkeypatch, what):
    real_forward, calls = Transformer.forward, []

    def forward(self, batch, **kwargs):
        loss = real_forward(self, batch, **kwargs)
        if self.training:
            calls.append([p.detach().clone() for p in self.parameters()])
        if len(calls) == 7:
            wte = self.wte.weight
            loss = loss * float("nan") if what == "loss" else loss + (wte * 0).sum().sqrt()
        return loss

    monkeypatch.setattr(Transformer, "forward", forward)
    with pytest.raises(ValueError, match=rf"the {what} is not finite at step 7 on rank 0"):
        run()
    log = read_log(tmp_path / "run", "train")
    assert log[-1]["step"] == 6
    state = checkpoint.load(checkpoint.find(tmp_path / "run", "last"))
    assert all(torch.isfinite(value).all() for value in state["model"].values())


def published_file(path, rows, positions=48):
    """Weights in GPT-2's layout: 4 layers of width 32, so many rows of the embedding."""
    shape = TransformerConfig("gpt", 4, 2, 32, 128, positions, rows)
    state = Transformer(shape).state_dict()
    for name, value in state.items():
        if name.startswith("h.") and value.dim() == 2:
            state[name] = value.T.contiguous()
    torch.save(state, path)
    return path


@pytest.mark.parametrize("flags", ["", "--ltd --ltd-start 8 --pack"])
def test_published_weights_of_a_size_of_their_own_start_a_run_that_resumes(
    run, log_of, tmp_path, flags
):
    """48 positions are in no --size; the file is not needed any more when the run goes on."""
    file = published_file(tmp_path / "gpt.pt", rows=257)
    whole = metrics(run(f"--init {file} {flags}", out="whole"))
    assert metrics(log_of(flags))[0]["loss"] != whole[0]["loss"]
    file.unlink()
    for checkpoint_file in sorted((tmp_path / "whole").glob("step-*.pt"))[-1:]:
        checkpoint_file.unlink()
    assert train.main(["--resume", "--out", "whole"]) == 0
    assert metrics(read_log(tmp_path / "whole")) == whole
    sample.main([str(tmp_path / "whole"), "--tokens", "3"])
    with pytest.raises(ValueError, match="has 48 positions, --seq-len 64 is more"):
        run(f"--init {published_file(file, 257)} --seq-len 64", out="long")


@pytest.mark.parametrize("rows", [256, 321, 50_257])
def test_published_weights_of_another_vocabulary_are_refused(run, tmp_path, rows):
    file = published_file(tmp_path / "gpt.pt", rows)
    said = rf"has a vocabulary of {rows:,}, and --tokenizer bytes one of 257 \(padded: 320\)"
    with pytest.raises(ValueError, match=said):
        run(f"--init {file}")
    assert not (tmp_path / "run").exists()


BAD = {
    "--data nowhere": r"nowhere: no token store",
    "--tokenizer pd4k": r"made with tokenizer bytes .* not pd4k",
    "--tokenizer klingon": r"tokenizer 'klingon': choose pd4k, bytes, gpt2",
    "--micro-batch-size 3": r"8 rows of 32, which 1 process.* --micro-batch-size 3 at once",
    "--device cuda": r"--device cuda: torch .* finds none here",
    "--dtype fp16": r"--dtype fp16 needs --device cuda",
    "--init nowhere.pt --pos learned --tokenizer bytes": r"nowhere.pt",
    "--resume": r"--resume: run holds no run",
    "--resume sideways": r"--resume: invalid choice",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input(run, tmp_path, flags):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises((ValueError, OSError), match=BAD[flags]):
        run(flags)
    assert not (tmp_path / "run").exists(), "nothing half-written"


def test_a_folder_that_holds_a_run_is_refused(run, tmp_path):
    run()
    before = (tmp_path / "run/log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"--out run holds a run already: name another"):
        run()
    assert (tmp_path / "run/log.jsonl").read_bytes() == before


# ---- as processes of their own


@pytest.mark.parametrize("flags", ["", ALL_ON, "--dropout 0.2", "--model bert --ltd --dropout 0.2"])
def test_recomputing_activations_changes_no_bit(run, log_of, flags):
    assert metrics(run(f"{flags} --checkpoint-activations")) == metrics(log_of(flags))


def test_recomputing_activations_holds_less_memory():
    """What autograd keeps for the backward pass: of each block its input, and no more."""
    torch.manual_seed(0)
    transformer = Transformer(TransformerConfig("gpt", 6, 2, 32, 128, 64, 40))
    batch = (*torch.randint(40, (2, 4, 64)), None, None)

    def bytes_kept(run_block) -> int:
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            transformer(batch, run_block=run_block)
        return sum(kept.values())

    assert bytes_kept(run_recomputed) < 0.35 * bytes_kept(run_plain)


# Two samples a step, whose pieces often fit into one row: then the second rank has none.
BLANK = "--pack-batch documents --model bert --seq-len 1024 --batch-tokens 2048 --tokens 30000"


def command(store_dir, out, flags="", ranks=0):
    launch = [PYTHON]
    if ranks:
        launch += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    return [*launch, str(ROOT / "train.py"), *flags_for(store_dir, out, flags)]


def flags_for(store_dir, out, flags=""):
    return [*SMALL.split(), "--data", str(store_dir), "--out", str(out), *flags.split()]


@pytest.mark.dist
def test_two_processes_draw_the_curve_of_one(store_dir, tmp_path, log_of):
    all_flags = [f"{CURVE} {more}" for more in ("--optimizer adamw", "--optimizer muon", BLANK)]
    folders = [tmp_path / f"two-{number}" for number in range(3)]
    start_ranks(2, *(flags_for(store_dir, *each) for each in zip(folders, all_flags, strict=True)))
    for flags, folder in zip(all_flags, folders, strict=True):
        one, two = log_of(flags), read_log(folder)
        assert len(losses(one)) >= 20
        assert losses(two) == pytest.approx(losses(one), rel=0, abs=1e-5), flags
        scores = [[e["val_bpb"] for e in lines if e["event"] == "eval"] for lines in (one, two)]
        assert scores[1] == pytest.approx(scores[0], abs=1e-5), flags


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_of_one_process_goes_on_with_two(store_dir, tmp_path, run):
    flags = f"{CURVE} --checkpoint-every 1024"
    whole = losses(run(flags, out="whole"))
    subprocess.run(command(store_dir, tmp_path / "moved", flags), check=True)
    checkpoints = sorted((tmp_path / "moved").glob("step-*.pt"))
    assert len(checkpoints) == 2
    checkpoints[-1].unlink()  # as if it had been killed after the one before
    launch = command(store_dir, tmp_path / "moved", ranks=2)[:6]
    subprocess.run([*launch, "--resume", "--out", str(tmp_path / "moved")], check=True)
    moved = read_log(tmp_path / "moved")
    resumed_at = [line["resumed_at"] for line in moved if line["event"] == "run"]
    assert resumed_at == [0, int(checkpoints[0].stem.removeprefix("step-"))]
    assert max(abs(a - b) for a, b in zip(whole, losses(moved), strict=True)) < 1e-5


@pytest.mark.dist
def test_a_mistake_is_one_line_and_status_2(store_dir, tmp_path, monkeypatch, capsys):
    """The first as a command, the others as the command's last line runs them."""
    for flags in ("--curriculum hard", "--data nowhere", "--dtype fp16", "--long truncate"):
        launch = command(store_dir, tmp_path / "run", flags)
        if flags == "--curriculum hard":
            done = subprocess.run(launch, capture_output=True, text=True)
            status, said = done.returncode, done.stderr
        else:
            monkeypatch.setattr(sys, "argv", launch[1:])
            with pytest.raises(SystemExit) as ended:
                exit_cleanly(train.main)
            status, said = ended.value.code, capsys.readouterr().err
        assert status == 2
        assert said.startswith("error: ") and said.count("\n") == 1
        assert not (tmp_path / "run").exists()


@pytest.mark.dist
def test_a_mistake_on_two_ranks_is_said_once_and_quoted_last(store_dir, tmp_path):
    done = subprocess.run(
        command(store_dir, tmp_path / "run", "--micro-batch-size 3", ranks=2),
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    (said,) = [line for line in lines if line.startswith("error: ")]
    assert lines[-2] == f"  traceback : {said}", "of torchrun's summary, which ends with a ruler"
    assert "exitcode  : 2" in done.stderr, "torchrun says with what status its ranks left"


def train_until_killed(lines: int, flags: list[str]) -> None:
    """In a process of its own: train, and be killed soon after so many lines of the log."""
    after = random.uniform(0, 0.005)
    kill = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
    write = Log.write

    def count(log, *args, **values):
        write(log, *args, **values)
        if Path(log.file.name).read_bytes().count(b"\n") > lines and not kill.is_alive():
            kill.start()

    Log.write = count
    train.main(flags)


@pytest.mark.dist
def test_killed_at_any_moment_and_resumed_is_the_same_run(store_dir, tmp_path, run):
    """SIGKILL some time after so many lines of the log, three times over, then to the end."""
    flags = f"{ALL_ON} --tokens 8000 --checkpoint-every 700"
    whole = metrics(run(flags, out="whole"))
    launch = flags_for(store_dir, tmp_path / "killed", flags)
    resume = ["--resume", "--out", str(tmp_path / "killed")]
    for lines in (3, 14, 26):  # the first before there is a checkpoint
        context = get_context("forkserver")
        process = context.Process(target=train_until_killed, args=(lines, launch))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        launch = resume
    assert train.main(resume) == 0
    assert metrics(read_log(tmp_path / "killed")) == whole
    assert not list((tmp_path / "killed").glob(".tmp*"))


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(store_dir, tmp_path, number):
    flags = "--tokens 1e8 --eval-every 1e8 --checkpoint-every 1e8 --warmup-tokens 1000"
    process = subprocess.Popen(
        command(store_dir, tmp_path / "run", flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    log = tmp_path / "run/log.jsonl"
    while not (log.exists() and log.read_bytes().count(b"\n") > 5):
        time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"go on with: python train.py --resume --out {tmp_path / 'run'}" in out
    step = json.loads(log.read_text().splitlines()[-1])["step"]
    assert checkpoint.load(checkpoint.find(tmp_path / "run", "last"))["clock"]["step"] == step


@pytest.mark.slow
def test_compiled_blocks_draw_the_same_curve(run):
    flags = f"{ALL_ON} --tokens 3000 --lr 1e-3"
    plain, compiled = losses(run(flags, out="a")), losses(run(f"{flags} --compile", out="b"))
    assert max(abs(a - b) for a, b in zip(plain, compiled, strict=True)) < 1e-4


def test_tensorboard_gets_the_same_numbers(run, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = [line for line in run("--tensorboard") if line["event"] == "train"]
    board = events.EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    found = board.Scalars("train/loss")
    assert [point.step for point in found] == [line["consumed_tokens"] for line in lines]
    assert [point.value for point in found] == pytest.approx([line["loss"] for line in lines])
