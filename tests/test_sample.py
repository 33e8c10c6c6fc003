"""Text from a model: shapes, determinism, what must never be drawn, and the command."""

import pytest
import torch

import sample
from model import Transformer, TransformerConfig


def model():
    torch.manual_seed(0)
    return Transformer(TransformerConfig("gpt", 2, 2, 16, 32, 8, 320)).eval()


def draw(count=20, **how):
    how = {"allowed": 257, "generator": torch.Generator().manual_seed(3)} | how
    return sample.generate(model(), torch.tensor([5, 6]), count, **how)


def test_goes_on_from_the_prompt_beyond_the_context():
    tokens = draw()
    assert tokens[:2].tolist() == [5, 6] and len(tokens) == 22  # the context is 8


def test_a_seed_is_a_text():
    assert torch.equal(draw(), draw())
    assert not torch.equal(draw(), draw(generator=torch.Generator().manual_seed(4)))


def test_temperature_0_takes_the_likeliest():
    tokens = draw(temperature=0)
    for at in range(2, 10):
        logits = model().logits(tokens[None, max(0, at - 8) : at])[0, -1, :257]
        assert tokens[at] == logits.argmax()


def test_top_1_is_temperature_0():
    assert torch.equal(draw(top_k=1), draw(temperature=0))


def test_what_pads_the_vocabulary_is_never_drawn():
    assert draw(300, allowed=40, top_k=300).max() < 40


def test_stops_before_the_stop_token():
    first = draw(temperature=0)[2].item()
    assert draw(temperature=0, stop=first).tolist() == [5, 6]


def test_command(run, capsys):
    run()
    capsys.readouterr()
    for extra in ([], ["--checkpoint", "best", "--samples", "2"]):
        sample.main(["run", "--prompt", "Call me", "--tokens", "9", *extra])
    out = capsys.readouterr().out
    assert out.count("Call me") == 3 and out.count("-" * 40) == 1


def test_refusals(run):
    run("--model bert", out="bert")
    for argv, message in (
        (["bert"], "bert holds a BERT"),
        (["nowhere"], "nowhere"),
        (["bert", "--tokens", "0"], "--tokens 0: choose 1 or more"),
        (["bert", "--samples", "-2"], "--samples -2: choose 1 or more"),
        (["bert", "--top-k", "0"], "--top-k 0: choose 1 or more"),
        (["bert", "--temperature", "-1"], "--temperature -1.0: choose 0 or a positive number"),
        (["bert", "--temperature", "nan"], "--temperature nan: choose 0 or a positive number"),
        (["bert", "--temperature", "inf"], "--temperature inf: choose 0 or a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            sample.main(argv)
