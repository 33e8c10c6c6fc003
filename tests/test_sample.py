"""Text from a model: what is drawn, the same with and without a cache, and how it is shown."""

import io
import itertools
import os
import re
import sys

import pytest
import torch
from conftest import widened
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_batches import LLAMA

import sample
from model import Transformer, TransformerConfig
from offload import Offload
from sample import KVCache
from support.base import runtime
from support.step.placement import Away, Placement, parts_of
from support.text.tokenizer import get_encoding

BYTES = get_encoding("bytes")
ROW = 8  # tokens of the longest row


def model(pos="learned"):
    """With weights far from their start, so that positions and every layer matter."""
    more = LLAMA if pos == "llama" else {"pos": pos}
    return widened(Transformer(TransformerConfig("gpt", 3, 2, 16, 32, ROW, 320, **more))).eval()


def draw(count=20, of=None, prompt=(5, 6), **options):
    """The prompt and what is drawn."""
    options = {"allowed": 257, "generator": torch.Generator().manual_seed(3)} | options
    return [*prompt, *sample.generate(of or model(), list(prompt), count, **options)]


# ---- what is drawn


def test_a_seed_is_a_text_that_goes_on_from_the_prompt_beyond_the_context():
    tokens = draw()
    assert tokens[:2] == [5, 6] and len(tokens) == 22  # the context is 8
    assert draw() == tokens != draw(generator=torch.Generator().manual_seed(4))


def test_temperature_0_takes_the_likeliest():
    tokens = draw(temperature=0)
    for at in range(2, len(tokens)):
        start = sample.context_start(at, ROW)
        logits = model().logits(torch.tensor([tokens[start:at]]))[0, -1, :257]
        assert tokens[at] == logits.argmax()
    assert draw(top_k=1) == draw(temperature=1e-320) == tokens
    assert draw(temperature=0, stop=tokens[2]) == [5, 6], "it ends before the stop token"
    assert max(draw(60, allowed=40, top_k=300)) < 40, "none of what pads the vocabulary"


def test_what_the_model_was_doing_it_does_afterwards():
    gpt = model().train()
    text = sample.generate(gpt, [5], 9, allowed=257)
    next(text)
    assert not gpt.training
    text.close()  # interrupted
    assert gpt.training


# ---- the context, and its keys and values


def test_a_context_stands_still_until_it_is_full_and_then_keeps_half():
    assert [sample.context_start(n, 4) for n in range(1, 12)] == [0, 0, 0, 0, 2, 2, 4, 4, 6, 6, 8]
    assert [sample.context_start(n, 5) for n in range(1, 12)] == [0, 0, 0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert [sample.context_start(n, 1) for n in range(1, 5)] == [0, 1, 2, 3]
    for seq_len, count in itertools.product(range(1, 9), range(1, 50)):
        context = count - sample.context_start(count, seq_len)
        assert min(count, seq_len // 2 + 1) <= context <= seq_len


@pytest.mark.parametrize("length", [1, ROW, 3 * ROW + 1])
@pytest.mark.parametrize("pos", ["learned", "rope", "llama"])
def test_with_a_cache_the_same_tokens_are_drawn(pos, length):
    prompt = [(7 * i + 5) % 257 for i in range(length)]
    cached, plain = (
        draw(3 * ROW, model(pos), prompt, cached=cached, temperature=2.0, top_k=257)
        for cached in (True, False)
    )
    assert cached == plain and len(cached) == length + 3 * ROW


def largest_difference(gpt, rows=1, parts=(3, 1, 1, 2, 1)):
    """Between the logits of a cache that is given a text in parts, and those of the whole row."""
    tokens = torch.randint(0, 257, (rows, sum(parts)), generator=torch.Generator().manual_seed(1))
    cache, stop, differences = KVCache(gpt), 0, []
    with torch.no_grad():
        whole = Transformer.logits(gpt, tokens)  # (B, T, V)
        for part in tokens.split(parts, dim=1):
            stop += part.shape[1]
            differences.append((cache.logits(part) - whole[:, stop - 1]).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("pos", ["learned", "rope", "llama"])
def test_logits_of_a_cache_are_those_of_the_whole_row(pos):
    gpt = model(pos)
    assert largest_difference(gpt) < 1e-5 and largest_difference(gpt, rows=3) < 1e-5

    def logits_at_0(tokens, positions, run_block):
        return Transformer.logits(gpt, tokens, 0 * positions, run_block=run_block)

    gpt.logits = logits_at_0  # the control: wrong positions are found out
    assert largest_difference(gpt) > 0.02


def test_keys_of_a_context_that_was_left_are_found_out(monkeypatch):
    """Control: kept instead of computed again, they have seen what is dropped."""
    wanted = draw(3 * ROW, model("rope"), cached=False)

    def slid(gpt, tokens, cache):
        if cache.length == ROW:
            cache.length = ROW // 2
            for kept in itertools.chain(*cache.kept.values()):
                kept[:, :, : ROW // 2] = kept[:, :, ROW // 2 :].clone()
        return cache.logits(torch.tensor([tokens[-1:] if cache.length else tokens]))[0]

    monkeypatch.setattr(sample, "next_logits", slid)
    got = draw(3 * ROW, model("rope"))
    assert got[: ROW + 1] == wanted[: ROW + 1] and got != wanted


def test_with_a_cache_a_token_costs_one_tokens_work():
    gpt, widths = model(), []
    gpt.h[0].register_forward_hook(lambda block, inputs, x: widths.append(x.shape[1]))
    draw(ROW, gpt, [1, 2, 3])
    assert widths == [3, 1, 1, 1, 1, 1, ROW // 2 + 1, 1]


@pytest.mark.parametrize("away", [Away.STATE, Away.WEIGHTS])
def test_an_offloaded_model_writes_the_same(away):
    wanted, gpt = draw(3 * ROW), model()
    first, *others = parts_of(gpt, False)
    placement = Placement((first, *(p._replace(away=away) for p in others)), "fp32", budget=0)
    Offload(placement).move(gpt, torch.device("cpu"))
    assert draw(3 * ROW, gpt) == wanted


def test_layers_that_share_a_block_have_keys_of_their_own():
    gpt = model()
    gpt.h[2] = gpt.h[0]
    assert draw(3 * ROW, gpt) == draw(3 * ROW, gpt, cached=False)


def test_under_autocast_too():
    gpt = model()
    with torch.autocast("cpu", torch.bfloat16):
        assert largest_difference(gpt) < 0.5  # where logits are up to 40
        cache = KVCache(gpt)
        cache.logits(torch.tensor([[1, 2]]))
    assert cache.kept[0][0].dtype == torch.bfloat16


def test_compiled_blocks_run_as_they_are_written():
    """As at the end of a run with --compile: a text that grows compiles nothing."""

    def refuse(graph, inputs):
        raise RuntimeError("nothing should compile")

    wanted, gpt = draw(ROW), model()
    for block in gpt.h:
        block.compile(backend=refuse)
    with torch.compiler.set_stance("force_eager"):
        assert draw(ROW, gpt) == wanted
    with pytest.raises(RuntimeError, match="nothing should compile"):
        draw(ROW, gpt)


# ---- how it is shown


@settings(max_examples=10, deadline=None)
@given(st.binary(max_size=12) | st.text(max_size=6).map(str.encode))
@example("é".encode()[:1])  # it ends within a character
def test_pieces_make_up_the_text(text):
    assert "".join(sample.characters(BYTES, text)) == BYTES.decode(list(text))


def test_a_character_is_shown_once_it_is_whole():
    assert list(sample.characters(BYTES, "aé🙂b".encode())) == ["a", "é", "🙂", "b"]


def test_shown_as_it_is_drawn(monkeypatch, run_of, capfd):
    """Every token is on the terminal before the next one is drawn; an interrupt ends the line."""
    shown = []
    monkeypatch.setattr(sys, "argv", ["sample.py", str(run_of()), "--prompt", "x"])

    def interrupted(model, prompt, most, **options):
        assert prompt == [BYTES.eot_token, *b"x"] and options["stop"] == BYTES.eot_token
        for token in "é🙂".encode():
            yield token
            shown.append(capfd.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "generate", interrupted)
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        runtime.exit_cleanly(sample.main)
    assert end.value.code == 130
    assert shown == ["x", "é", "", "", "", "🙂"] and capfd.readouterr() == ("\n", "")


def test_the_command_prints_what_is_drawn(run_of, capsys):
    run = str(run_of())
    _, gpt, _ = sample.load_run(run, "last")
    random = sample.rng.generator(torch.device("cpu"), 3, 0)
    prompt = [BYTES.eot_token, *"é".encode()]
    tokens = sample.generate(gpt, prompt, 30, allowed=257, stop=256, generator=random)
    expected = BYTES.decode([*"é".encode(), *tokens])
    capsys.readouterr()
    sample.main([run, "--prompt", "é", "--tokens", "30", "--seed", "3", "--samples", "2"])
    first, second = capsys.readouterr().out.split("-" * 40 + "\n")
    assert first == expected + "\n" and second.startswith("é") and second != first
    sample.main([run, "--prompt", "", "--tokens", "3", "--checkpoint", "best", "--dtype", "bf16"])


@pytest.mark.parametrize(
    ("typed", "prompts"), [("one\ntwo\n\nthree\n", ["one", "two"]), ("one\n\4", ["one"])]
)
def test_a_terminal_is_asked_until_an_empty_line_or_its_end(
    typed, prompts, run_of, monkeypatch, capfd
):
    run, loaded, load = str(run_of()), [], sample.load_run
    monkeypatch.setattr(sample, "load_run", lambda *names: loaded.append(names) or load(*names))
    here, terminal = os.openpty()
    os.write(here, typed.encode())
    capfd.readouterr()
    with open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        sample.main([run, "--tokens", "1", "--device", "cpu"])
    os.close(here)
    asked, *texts = capfd.readouterr().out.split("prompt: ")
    assert [text[: len(prompt)] for prompt, text in zip(prompts, texts, strict=False)] == prompts
    assert (asked, len(texts), len(loaded)) == ("", len(prompts) + 1, 1) and not texts[-1]


@pytest.mark.parametrize(("piped", "flags"), [("a b\nc\n", []), ("unread", ["--prompt", "a b\nc"])])
def test_a_pipe_is_the_prompt_unless_one_is_given(piped, flags, run_of, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    run = str(run_of())
    capsys.readouterr()
    sample.main([run, "--tokens", "1", *flags])
    assert re.fullmatch(r"a b\nc.?\n", capsys.readouterr().out, re.DOTALL)


def test_refusals(run_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, problem in {
        "bert": "holds a BERT",
        "nowhere": "nowhere",
        "bert --tokens 0": "--tokens",
        "bert --samples -2": "--samples",
        "bert --top-k 0": "--top-k",
        "bert --temperature -1": "--temperature",
        "bert --temperature inf": "--temperature",
        "bert --device cuda": "--device cuda",
        "bert --dtype int3": "--dtype",
    }.items():
        with pytest.raises(ValueError, match=problem):
            sample.main(flags.replace("bert", str(run_of("--model bert"))).split())


def test_a_prompt_of_no_or_unknown_tokens_and_a_tokenizer_that_has_grown_are_refused():
    for prompt in ([], [257], [-1]):
        with pytest.raises(ValueError, match="a prompt needs at least one token, all of 0 to 256"):
            draw(prompt=prompt)
    with pytest.raises(ValueError, match="tokenizer pd4k has 4097 tokens, the model 320"):
        sample.write(model(), get_encoding(), "", 9)
