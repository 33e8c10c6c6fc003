"""Generating text: which tokens are drawn, and how they are printed."""

from pathlib import Path

import pytest
import torch
from conftest import BYTES, SMALL, TINY, refusal, widen

import evaluate
import prepare
import sample
import train
from model import Transformer, TransformerConfig
from offload import Level, Offload, Placement, parts_of
from support.tokenizer import get_encoding

ROW = 8  # positions of the model


def model():
    """Return a model with wide weights, so that positions and every layer matter."""
    return widen(Transformer(TransformerConfig(3, 2, 16, 32, ROW, 320))).eval()


def draw(count=20, of=None, **options):
    """Return the prompt and the generated tokens."""
    options = {"allowed": 257, "generator": torch.Generator().manual_seed(3)} | options
    return [5, 6, *sample.generate(of or model(), [5, 6], count, **options)]


# ---- which tokens are drawn


def test_a_seed_determines_the_text_which_may_exceed_the_context():
    tokens = draw()
    assert tokens[:2] == [5, 6] and len(tokens) == 22  # the context is 8
    assert draw() == tokens != draw(generator=torch.Generator().manual_seed(4))


def test_temperature_0_draws_the_likeliest_token():
    tokens = draw(temperature=0)
    for at in range(2, len(tokens)):
        x = model()(torch.tensor([tokens[max(0, at - ROW) : at]]))[0, -1]  # (C,)
        assert tokens[at] == model().logits(x)[:257].argmax()
    assert draw(top_k=1) == draw(temperature=1e-320) == tokens
    assert draw(temperature=0, stop=tokens[2]) == [5, 6], "the stop token is not part of the text"
    assert max(draw(60, allowed=40, top_k=300)) < 40, "padding of the vocabulary is never drawn"


def test_an_offloaded_model_generates_the_same_text():
    expected, gpt = draw(3 * ROW), model()
    first, *blocks = parts_of(gpt, False, torch.float32)
    streamed = (part._replace(level=Level.STREAMED) for part in blocks)
    Offload(Placement((first, *streamed), budget=0), gpt, torch.device("cpu"))
    assert draw(3 * ROW, gpt) == expected


# ---- the command


def test_text_is_printed_as_it_is_drawn(monkeypatch, run_of, capfd):
    """Every token is printed before the next one is drawn. An interrupt ends the line."""
    run, shown = str(run_of()), []

    def interrupted(model, prompt, most, **options):
        assert prompt == [256, *b"x"] and (options["stop"], options["allowed"]) == (256, 257)
        for token in "é🙂".encode():
            yield token
            shown.append(capfd.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "generate", interrupted)
    capfd.readouterr()
    with pytest.raises(KeyboardInterrupt):
        sample.main([run, "--prompt", "x"])
    assert shown == ["x", "é", "", "", "", "🙂"] and capfd.readouterr() == ("\n", "")


def test_the_command_prints_the_drawn_tokens(run_of, capsys):
    run = str(run_of())
    _, gpt, _ = sample.load_run(run, "last")
    random = sample.rng.generator(torch.device("cpu"), 3, 0)
    expected = "".join(sample.continue_text(gpt, BYTES, "é", 30, generator=random))
    capsys.readouterr()
    sample.main([run, "--prompt", "é", "--tokens", "30", "--seed", "3", "--samples", "2"])
    first, second = capsys.readouterr().out.split("-" * 40 + "\n")
    assert first == expected + "\n" and second.startswith("é") and second != first
    sample.main([run, "--tokens", "3", "--checkpoint", "best", "--dtype", "bf16"])


def test_a_store_and_a_run_hold_copies_of_their_tokenizer(tmp_path, monkeypatch, capsys):
    """So both can be used when they, or the file that they were made with, are somewhere else."""
    monkeypatch.chdir(tmp_path)
    prepare.write_ranks(Path("own.tiktoken"), {bytes([255 - rank]): rank for rank in range(256)})
    prepare.main([str(TINY), "--tokenizer", "own.tiktoken", "--out", "store"])
    Path("own.tiktoken").unlink()
    flags = f"{SMALL.replace('--tokenizer bytes', '')} --tokens 256 --layers 1"
    assert train.main(f"{flags} --data store --out run".split()) == 0
    Path("store").rename("moved")
    Path("run").rename("kept")
    for name in ("moved/tokenizer.json", "kept/tokenizer.copy.tiktoken"):
        Path(name).write_text("somebody else's")
    sample.main(["kept", "--prompt", "Call me", "--tokens", "1"])
    assert "\nCall me" in capsys.readouterr().out
    evaluate.main(["kept", "--checkpoint", "kept/step-00000001.pt", "--data", "moved"])
    assert capsys.readouterr().out.startswith("kept/step-00000001.pt, step 1: held-out ")
    assert train.main(["--resume", "--out", "kept", "--data", "moved"]) == 0
    assert train.main(f"{flags} --init kept --data moved --out next --dry-run".split()) == 0
    ranks = Path("kept/tokenizer.tiktoken")
    prepare.write_ranks(ranks, {bytes([rank]): rank for rank in range(256)})
    assert "trained with other tokens" in refusal(sample.main, ["kept", "--prompt", "Call me"])


def test_what_cannot_be_sampled_is_refused(run_of):
    bert = str(run_of("--model bert"))
    assert "holds a BERT" in refusal(sample.main, [bert])
    assert "--temperature" in refusal(sample.main, [bert, "--temperature", "-1"])
    message = refusal(sample.continue_text, model(), get_encoding(), "", 9)
    assert "tokenizer pd4k has 4097 tokens, the model only 320" in message
