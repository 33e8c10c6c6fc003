"""Whole runs: off is absent, neutral is identity, resuming is exact, ranks do not matter."""

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import ALL_ON, SMALL, metrics, read_log, refusal, start_ranks

import train
from evaluate import Evaluation
from model import Transformer
from support import checkpoint
from support.numbers import short
from support.process import ROOT

LINE = "step consumed_tokens real_tokens layer_tokens loss lr max_piece_len kept_tokens"
LINE += " padding_share pieces ms data_ms difficulty_seqlen difficulty_rarity pool"
BY_DOCUMENTS = "--pack-batch documents"
SHORT = "--tokens 1024 --eval-every 0 --checkpoint-every 0"  # four steps, unless --tokens follows
LLAMA = "--block llama --kv-heads 1 --qk-norm --no-tied"


def steps_of(lines):
    return [line for line in lines if line["event"] == "train"]


def losses(lines):
    return [line["loss"] for line in steps_of(lines)]


def flags_for(store_dir, out, flags=""):
    return [*SMALL.split(), "--data", str(store_dir), "--out", str(out), *flags.split()]


def test_a_run_leaves_its_log_config_and_checkpoints(run, tmp_path, capsys):
    shorter = "--tokens 2048 --eval-every 1024 --checkpoint-every 512"
    lines = run(f"{ALL_ON} {shorter} --final-eval-tokens 3000")
    out = capsys.readouterr().out
    assert "step 1: 2" not in out, "a line is printed every minute"
    steps, evals = read_log(tmp_path / "run", "train"), read_log(tmp_path / "run", "eval")
    assert all(line.keys() >= set(LINE.split()) for line in steps)
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["consumed_tokens"] >= 2048 > steps[-2]["consumed_tokens"]
    assert 400 < evals[0]["targets"] < 600 and 2900 < evals[-1]["targets"] < 3100
    assert lines[0]["event"] == "run" and lines[0]["config"]["ltd.on"] is True
    assert f"held-out: {evals[-1]['val_bpb']:.4f} bits per byte" in out
    read, flops = steps[-1]["real_tokens"], short(steps[-1]["flops"], "FLOP")
    assert f", {read:,} tokens of text, {flops}\n" in out
    assert "\nwithout techniques: 8 steps, 2,048 tokens of text, " in out
    assert len(list((tmp_path / "run").glob("step-*.pt"))) == 2  # --keep 2
    best = checkpoint.load(checkpoint.find(tmp_path / "run", "best"))
    assert best["best"] == min(line["val_bpb"] for line in evals)
    assert [line["last"] for line in evals] == [False, True], "after the last step only one"


def test_without_a_terminal_a_run_prints_a_line_when_it_is_due(run, monkeypatch, capsys):
    monkeypatch.setattr("support.run.LINE_SECONDS", 0)
    run("--tokens 512 --layers 1")
    line = r"^step 1: 256 of 512 tokens, loss \d.\d+, about \d+.\d s left$"
    assert re.search(line, capsys.readouterr().out, re.M)


def test_a_run_that_compiles_nothing_does_not_import_the_compiler(store_dir, tmp_path):
    """The import takes one to two seconds."""
    argv = flags_for(store_dir, tmp_path / "run", f"{SHORT} --layers 1")
    code = "import sys, train; train.main(sys.argv[1:])"
    code += "; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, check=True)


def test_a_run_learns(log_of):
    steps = steps_of(log_of())
    assert steps[0]["loss"] > 5.7 and steps[-2]["loss"] < 3.2  # at random: ln 320 = 5.77 nats
    # The rate falls linearly and is that of the middle of a step, here of 256 of 4,096 tokens.
    assert steps[-1]["lr"] / steps[0]["lr"] == pytest.approx(128 / (4096 - 128))


def test_off_is_absent(run, log_of, monkeypatch):
    """With its flag off, no line of a technique runs, and losses are the same bit for bit."""
    plain = metrics(log_of(SHORT))

    poison = Mock(side_effect=AssertionError("a technique that is off was called"))
    absent = "ltd.kept_tokens ltd.draw_kept ltd.run_kept ltd.drop_tokens model.checkpoint"
    absent += " curriculum.pace curriculum.parse_metrics curriculum.Curriculum plan.rankings_of"
    absent += " plan.reshape plan.packing.pack_lengths"  # evaluation packs with its own import
    absent += " pseudo.owners_at pseudo.parse_until pseudo.share_weights pseudo.average"
    for name in absent.split():
        monkeypatch.setattr(name, poison)
    assert metrics(run(SHORT)) == plain
    for technique in ("ltd", "pack", "curriculum seqlen", "pseudo"):  # control: the poison works
        with pytest.raises(AssertionError, match="was called"):
            run(f"--{technique}", out="control")


# All tokens kept, all lengths and samples allowed, and no layer that shares weights or is absent.
NEUTRAL = "--ltd --ltd-start 32 --curriculum seqlen,rarity --curriculum-start 32,100 --pseudo"


@pytest.mark.parametrize("base, unit", [("", "--pseudo-group 4"), (" --pack", "--pseudo-layers 4")])
def test_neutral_is_identity(run, log_of, base, unit):
    assert metrics(run(f"{SHORT}{base} {NEUTRAL} {unit}")) == metrics(log_of(f"{SHORT}{base}"))


COMBINATIONS = [
    "--ltd --ltd-mode bypass --ltd-pace root --ltd-layers 2-3 --lr-clock layer-tokens --pack",
    "--ltd --ltd-pace constant --ltd-steps 4 --ltd-start 6 --ltd-multiple 2 --model bert",
    "--curriculum seqlen-reshape,rarity --curriculum-start 8,1 --ltd --micro-batch-size 2",
    "--curriculum length,rarity-mean --curriculum-by value --curriculum-start 8,4 --pack"
    " --optimizer adamw --schedule wsd --pos learned --dtype bf16 --dropout 0.1",
    f"--model bert --nsp {ALL_ON} --loss-per document --micro-batch-size 3 --block llama",
    f"{LLAMA} {ALL_ON} {BY_DOCUMENTS} --schedule cosine --pseudo --pseudo-layers 2 --offload"
    " --offload-budget 1GB",
]


@pytest.mark.parametrize("flags", COMBINATIONS)
def test_combinations_of_techniques_run(run, tmp_path, flags):
    lines = run(f"{flags} {SHORT} --tokens 512")
    assert all(0 < loss < 7 for loss in losses(lines))
    assert [line["last"] for line in lines if line["event"] == "eval"] == [True], "0 means never"
    assert len(list((tmp_path / "run").glob("*.pt"))) == 1, "only the last checkpoint"


# At the default learning rate, so small a model amplifies rounding errors by 30 in 20 steps.
CURVE = f"{ALL_ON} {SHORT} --tokens 1500 --lr 1e-3"
# Two samples a step, whose pieces often fit in one row; then the second rank has no row.
BLANK = "--pack-batch documents --model bert --seq-len 1024 --batch-tokens 2048 --tokens 3000"
SHARED = "--pseudo --pseudo-group 2 --pseudo-until 0.5"


@pytest.mark.parametrize("more", ["", " --model bert --loss-per document"])
def test_accumulation_does_not_change_the_curve(log_of, more):
    flags = f"{CURVE}{more}"
    whole, parts = steps_of(log_of(flags)), steps_of(log_of(f"{flags} --micro-batch-size 2"))
    assert len(whole) > 5
    for a, b in zip(whole, parts, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


@pytest.mark.dist
def test_two_ranks_have_the_losses_of_one_process(run, store_dir, tmp_path, log_of):
    """Also if they resume a run that one process began."""
    run(f"{CURVE} --checkpoint-every 1024", out="moved")
    before, last = sorted((tmp_path / "moved").glob("step-*.pt"))
    last.unlink()  # as if the run had been killed before it
    runs = {tmp_path / "all": CURVE, tmp_path / "blank": f"{CURVE} {BLANK}"}
    runs[tmp_path / "shared"] = f"{CURVE} --optimizer adamw {SHARED}"
    runs[tmp_path / "sharded"] = f"{CURVE} {BLANK} --fsdp"  # without blank rows ranks would hang
    lines = [flags_for(store_dir, folder, flags) for folder, flags in runs.items()]
    start_ranks(2, *lines, ["--resume", "--out", str(tmp_path / "moved")])
    for folder, flags in [*runs.items(), (tmp_path / "moved", CURVE)]:
        one, two = log_of(flags.replace(" --fsdp", "")), read_log(folder)
        assert losses(two) == pytest.approx(losses(one), rel=0, abs=1e-5), flags
        scores = [[e["val_bpb"] for e in lines if e["event"] == "eval"] for lines in (one, two)]
        assert scores[1] == pytest.approx(scores[0], abs=1e-5), flags
    assert len(read_log(tmp_path / "shared", "stage")) == 1, "the switch should be in mid-run"
    starts = [line["resumed_at"] for line in read_log(tmp_path / "moved", "run")]
    assert starts == [0, int(before.stem.removeprefix("step-"))]


# Documents one per row, or packed, in about six steps.
DOCUMENTS = f"{SHORT} --seq-len 512 --batch-tokens 2048 --tokens 10000 --lr 1e-3"
GPT = f"{DOCUMENTS} --loss-per document --pack"
BERT = f"{DOCUMENTS} --model bert --nsp --pos rope"
ALONE_AND_PACKED = [
    (f"{GPT} --pack-max-per-row 1 --pack-batch rows", f"{GPT} --pack-batch documents"),
    (BERT, f"{BERT} --pack"),
]


@pytest.mark.parametrize(("alone", "packed"), ALONE_AND_PACKED)
def test_a_packed_run_has_the_losses_of_the_unpacked_one(run, log_of, alone, packed):
    """The clock is the same too, in fewer rows. BERT's masks and pairs are the same because they
    depend on where the text is in the store, not on the row.
    """
    alone, packed = steps_of(log_of(alone)), steps_of(run(packed))
    assert len(alone) >= 5
    for a, b in zip(alone, packed, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
        for name in ("step", "consumed_tokens", "real_tokens", "lr", "pieces", "max_piece_len"):
            assert b[name] == a[name]
    assert packed[-1]["layer_tokens"] < 0.96 * alone[-1]["layer_tokens"]


def test_a_bert_starts_with_the_loss_of_guesses(log_of):
    """Of one token out of 320, and, with as much weight, of whether a second part follows."""
    assert losses(log_of(BERT))[0] == pytest.approx(math.log(320) + math.log(2), abs=0.1)


# ---- stopped and resumed

PARTS = f"--pack {BY_DOCUMENTS} --micro-batch-size 2 --eval-every 256"
PAIRS = "--model bert --pack --pack-batch rows --nsp --eval-every 512"
SIGNALS = {
    "step": (f"{ALL_ON} --dropout 0.1 {LLAMA}", (train.Trainer, "train_step"), 9, signal.SIGTERM),
    # the second of a step after which an evaluation is due; the resumed run begins with it
    "micro-batch": (PARTS, (train, "block_runner"), 6, signal.SIGINT),
    # not the last one; the run saves after the next step
    "in the last evaluation on the way": (PARTS, (Evaluation, "run"), 5, signal.SIGTERM),
    "in an evaluation": (PAIRS, (Evaluation, "score_targets"), 2, signal.SIGHUP),
}


@pytest.mark.parametrize(("flags", "place", "at", "number"), SIGNALS.values(), ids=SIGNALS)
def test_a_signal_saves_and_the_resumed_run_equals_an_undisturbed_one(
    log_of, store_dir, tmp_path, monkeypatch, capsys, flags, place, at, number
):
    """Also with dropout, whose masks depend on the clock and not on a generator's state."""
    flags, folder, calls = f"{flags} --tokens 1536", tmp_path / "run", []
    whole, real = metrics(log_of(flags)), getattr(*place)

    def signalled(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(*place, signalled)
        assert train.main(flags_for(store_dir, folder, flags)) == 128 + number
    assert f"continue with --resume --out {folder}" in capsys.readouterr().out
    stopped, steps = metrics(read_log(folder)), read_log(folder, "train")
    assert stopped == whole[: len(stopped)] and len(stopped) < len(whole)
    saved = checkpoint.load(checkpoint.find(folder, "last"))["clock"]["step"]
    assert saved == steps[-1]["step"]
    assert train.main(["--resume", "--out", str(folder)]) == 0
    assert metrics(read_log(folder)) == whole


def test_an_interrupt_before_the_first_step_ends_the_run_immediately(run, tmp_path, monkeypatch):
    """An analysis may take long, and there is nothing to save yet."""
    monkeypatch.setattr(train, "Plan", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run()
    signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "run").exists()


def test_runs_are_numbered_and_resume_finds_the_newest(store_dir, tmp_path, monkeypatch, capsys):
    """--tokenizer defaults to the store's. A finished run does not change."""
    monkeypatch.chdir(tmp_path)
    flags = SMALL.replace("--tokenizer bytes", "").replace("--tokens 4096", "--tokens 600")
    for _ in range(2):
        assert train.main(f"{flags} --data {store_dir}".split()) == 0
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == ["gpt-nano-1", "gpt-nano-2"]
    assert read_log(folders[0])[0]["config"]["data.tokenizer"] == "bytes"
    before = (folders[1] / "log.jsonl").read_bytes()
    (tmp_path / "runs/exported").mkdir()
    (tmp_path / "runs/exported/config.json").write_text("{}")  # newer, but not of a run
    assert train.main(["--resume"]) == 0
    assert "runs/gpt-nano-2 is finished" in capsys.readouterr().out
    assert (folders[1] / "log.jsonl").read_bytes() == before
    (tmp_path / "runs").rename("other")
    (tmp_path / "runs").symlink_to("nowhere")
    assert "--out runs is not an empty folder" in refusal(train.main, [*flags.split()])


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_nonfinite_step_stops_the_run_before_weights_change(run, tmp_path, monkeypatch, what):
    real, calls = Transformer.loss, []

    def loss_of(self, x, batch):
        loss = real(self, x, batch)
        calls.append(1)
        if len(calls) == 5:
            wte = self.wte.weight
            loss = loss * float("nan") if what == "loss" else loss + (wte * 0).sum().sqrt()
        return loss

    monkeypatch.setattr(Transformer, "loss", loss_of)
    assert f"the {what} is not finite at step 5 on rank 0" in refusal(run, "--eval-every 0")
    assert read_log(tmp_path / "run", "train")[-1]["step"] == 4
    state = checkpoint.load(checkpoint.find(tmp_path / "run", "last"))
    assert all(torch.isfinite(value).all() for value in state["model"].values())


# ---- recomputation; Weights & Biases


@pytest.mark.parametrize("flags", [f"{ALL_ON} {LLAMA}", "--model bert --ltd --dropout 0.2"])
def test_recomputing_activations_changes_no_bit(run, log_of, flags):
    flags = f"{flags} {SHORT}"
    assert metrics(run(f"{flags} --checkpoint-activations")) == metrics(log_of(flags))


def test_wandb_gets_the_logs_numbers_and_resumes_its_run(run, tmp_path, monkeypatch):
    fake = Mock(__spec__=Mock())  # an installed package has a __spec__
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(f"{SHORT} --min-lr 1 --wandb")
    assert train.main(["--resume", "--out", "run", "--tokens", "2048", "--wandb"]) == 0
    points = [call.args[0] for call in fake.init().log.call_args_list]
    points = [(p["consumed_tokens"], p["train/loss"]) for p in points if "train/loss" in p]
    lines = read_log(tmp_path / "run", "train")
    assert points == [(line["consumed_tokens"], line["loss"]) for line in lines]
    first, second = (call.kwargs for call in fake.init.call_args_list[:2])
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert Path(first["dir"]) == Path("run") and first["config"]["optim.tokens"] == 1024
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    assert "--wandb needs the package wandb" in refusal(run, "--wandb", out="new")
    assert not Path("new").exists()
