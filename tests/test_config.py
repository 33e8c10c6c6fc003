"""The command line: types, refusals, resumed settings, and its limits in number."""

from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

import config
from config import Config
from support.base.settings import (
    flag_of,
    flattened,
    resumed,
    shown_default,
    shown_fields,
)
from support.base.technique import is_on, techniques_of


def build(line: str) -> config.Config:
    return config.build(config.parse(line.split()))


def test_defaults_follow_the_size():
    small, big = build(""), build("--size 1.3B")
    assert (small.model.layers, small.model.width, small.data.seq_len) == (6, 128, 256)
    assert (big.model.layers, big.model.heads, big.model.width) == (24, 16, 2048)
    assert big.data.seq_len == 2048 and big.model.mlp_width == 8192
    assert small.model.pos == "rope" and big.model.pos == "learned"
    assert build("--init gpt2.pt").model.pos == "learned"
    assert build("--size 124M --layers 3 --width 96 --heads 3").model.mlp_width == 384


def test_flat_and_build_are_inverse():
    for line in ("--ltd --curriculum seqlen --size 124M --tokens 3e6", "--ltd --ltd-steps 3"):
        assert config.build(flattened(build(line))) == build(line)
    assert build("--ltd").ltd.share == 0.9 and build("--ltd --ltd-steps 3").ltd.share is None


def test_counts():
    for text, number in {"4096": 4096, "2e6": 2e6, "1.5B": 1.5e9, "8k": 8000}.items():
        assert build(f"--tokens {text} --batch-tokens 256").optim.tokens == number


REFUSED = {
    "--data a=1,b": r"^--data a=1,b: 'b' is not PATH=WEIGHT",
    "--tokens many": r"argument --tokens: many is not a whole number",
    "--tokens 1.5": r"--tokens: 1.5 is not a whole number",
    "--token 5": r"unrecognized arguments: --token",  # no abbreviations
    "--size huge": r"--size: invalid choice: 'huge'.*nano",
    "--curriculum hard": r"--curriculum hard is unknown: choose from seqlen, seqlen-resh",
    "--seq-len 4": r"--seq-len 4 must be at least 8",
    "--seq-len 9e18 --batch-tokens 9e18": r"--seq-len 9000000000000000000 must be .* below",
    "--pos learned --seq-len 512": r"--seq-len 512 is above the 256 positions of --size nano.*rope",
    "--size bert-base": r"--size bert-base is a BERT: add --model bert",
    "--nsp": r"^--nsp asks a BERT whether one text follows another: add --model bert$",
    "--nsp --model bert --batch-tokens 256": r"--batch-tokens 256 is one row: choose 512 or",
    "--long truncate": r"^--long truncate needs documents, .*: add --pack, or leave out --long$",
    "--long cut --pack": r"--long: invalid choice: 'cut'",
    "--batch-tokens 100": r"--batch-tokens 100 is not a multiple of --seq-len 256: choose 256$",
    "--min-lr 2": r"--min-lr 2.0 must be at least 0 and at most 1",
    "--tokens 1000 --warmup-tokens 1000": r"--warmup-tokens 1000 must be below --tokens 1000",
    "--beta2 1": r"--beta2 1.0 must be at least 0 and below 1",
    "--curriculum rarity --curriculum-start 101": r"--curriculum-start 101 must lie in 1..100",
    "--curriculum rarity,rarity": r"takes one length, and each name once",
    "--curriculum seqlen,seqlen-reshape": r"takes one length, and each name once",
    "--curriculum length": r"length: rows all have 256 tokens.*\(--pack\)",
    "--curriculum seqlen-reshape --pack": r"is for full rows.*take seqlen",
    "--curriculum seqlen-reshape --model bert": r"take seqlen and --pack",
    "--curriculum none.py:hard": r"there is no Python file none.py",
    "--ltd --ltd-start 0": r"--ltd-start 0 must be at least 1",
    "--ltd --ltd-start 257": r"--ltd-start 257 .* 256 ",
    "--ltd --layers 2": r"--layers 2: --ltd needs a layer between .*: choose 3 or more",
    "--ltd --ltd-start 60 --ltd-multiple 16": r"--ltd-start 60 .*--ltd-multiple 16: .*48 or 64",
    "--ltd --ltd-start 8 --ltd-multiple 16": r"--ltd-multiple 16: choose 16,",
    "--ltd --ltd-start 250 --ltd-multiple 100": r"choose 200 or 256,",
    "--ltd --ltd-steps 3 --ltd-share 0.9": r"--ltd-steps and --ltd-share both say",
    "--ltd --ltd-layers 1-6": r"--ltd-layers 1-6: write layers from 0 to 5",
    "--ltd --ltd-layers 0-5": r"--ltd-layers 0-5 names all layers",
    "--ltd --ltd-layers middle": r"--ltd-layers middle: write layers",
    "--ltd --ltd-pace slow": r"--ltd-pace",
    "--ltd --ltd-pace linear --ltd-multiple 16 --ltd-start 16 --compile": r"makes 16 shapes",
    "--pack-batch rows": r"--pack-batch rows has no effect without --pack",
    "--ltd-start 64": r"--ltd-start 64 has no effect without --ltd",
    "--curriculum-share 0.9": r"--curriculum-share 0.9 has no effect without --curriculum",
    "--heads 3": r"--heads 3 does not divide --width 128",
    "--pos rope --width 12 --heads 4": r"--pos rope rotates pairs",
}


NUMBERS = [
    (part.name, item.name)
    for part in fields(Config)
    for item in shown_fields(get_type_hints(Config)[part.name])
    if {int, float} & {*get_args(kind := get_type_hints(part.default_factory)[item.name]), kind}
]


@pytest.mark.parametrize(("group", "name"), NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_number_may_be_infinite_or_none(group, name, value):
    flag = flag_of(Config, group, name)
    with pytest.raises(ValueError, match=rf"argument {flag}: {value} is not a .*number"):
        build(f"{flag}={value}")


AT_LEAST_ONE = (
    "tokens batch-tokens micro-batch-size layers heads width mlp-width seq-len eval-tokens"
    " final-eval-tokens keep lr"
)


@pytest.mark.parametrize("flag", AT_LEAST_ONE.split())
def test_zero_is_refused_where_it_cannot_be_meant(flag):
    with pytest.raises(ValueError, match=rf"--{flag} 0(.0)? must be"):
        build(f"--{flag} 0")


def test_zero_is_zero_elsewhere():
    never = build("--eval-every 0 --checkpoint-every 0 --warmup-tokens 0 --grad-clip 0 --seed 0")
    assert (never.run.eval_every, never.run.checkpoint_every, never.run.seed) == (0, 0, 0)
    assert (never.optim.warmup_tokens, never.optim.grad_clip) == (0, 0)


@pytest.mark.parametrize("line", REFUSED)
def test_refusals(line):
    with pytest.raises(ValueError, match=REFUSED[line]) as error:
        build(line)
    assert "\n" not in str(error.value)


def test_a_resumed_run_keeps_its_settings():
    saved = flattened(build("--seed 5 --ltd"))
    assert config.build(resumed(Config, saved, {"run.resume": "last"})).run.seed == 5
    resumed(Config, saved, {"run.seed": 5, "run.keep": 9})
    with pytest.raises(ValueError, match=r"--seed 6 differs from --seed 5, .*another --out"):
        resumed(Config, saved, {"run.seed": 6})


CHANGED = {"--no-ltd": "--ltd", "--pack": "--no-pack", "--ltd-steps 3": "no --ltd-steps"}


@pytest.mark.parametrize("given", CHANGED)
def test_a_changed_setting_is_shown_as_its_flag(given):
    saved = flattened(build("--ltd"))
    with pytest.raises(ValueError, match=rf"^{given} differs from {CHANGED[given]}, with"):
        resumed(Config, saved, config.parse(given.split()))


def test_a_run_from_before_a_setting_goes_on_with_its_default():
    saved = flattened(build("--model bert --pack --pack-batch rows"))
    for name in ("data.long", "pack.batch"):
        del saved[name]
    settings = config.build(resumed(Config, saved, {"run.resume": "last"}))
    assert (settings.data.long, settings.pack.batch) == ("split", "documents")
    with pytest.raises(ValueError, match=r"--long truncate differs from no --long, with which"):
        resumed(Config, saved, {"data.long": "truncate"})


def test_what_a_packed_step_keeps_follows_from_the_model():
    kept = {"--pack": "rows", "--model bert --pack": "documents", "--model bert": None}
    kept["--model bert --pack --pack-batch rows"] = "rows"
    assert {line: build(line).pack.batch for line in kept} == kept


def test_a_run_is_resumed_with_the_words_it_was_started_with():
    line = "--curriculum seqlen,rarity --curriculum-share 0.3 --curriculum-pace linear"
    words = config.parse(line.split())
    saved = flattened(config.build(words))
    assert resumed(Config, saved, words) == saved
    with pytest.raises(
        ValueError, match=r"--curriculum-share 0.2 differs from --curriculum-share 0.3"
    ):
        resumed(Config, saved, words | {"curriculum.share": "0.2"})
    moved = {"curriculum.index": "elsewhere", "data.data": "moved"}
    assert resumed(Config, saved, moved) == saved | moved, "where it lies may change"


def test_no_more_flags_than_a_reader_can_hold():
    groups = {
        part.name: shown_fields(get_type_hints(config.Config)[part.name])
        for part in fields(config.Config)
    }
    assert sum(map(len, groups.values())) <= 72  # five techniques, and what any trainer has
    assert all(len(groups[technique]) <= 8 for technique in techniques_of(Config))


def test_defaults_are_shown_as_they_are():
    """A clip of 1.0 is not "on", a dropout of 0.0 not "off", though 1.0 == True."""
    shown = [shown_default(value) for value in (1.0, 0.0, True, False, None, 20)]
    assert shown == ["1.0", "0.0", "on", "off", "", "20"]


def test_a_technique_is_registered_by_one_line():
    assert [name for name in techniques_of(Config) if is_on(build("--ltd"), name)] == ["ltd"]


@pytest.mark.parametrize("other", ["--pos rope", "--resume"])
def test_init_is_refused_beside(other):
    with pytest.raises(ValueError, match=f"--init and {other} exclude each other"):
        config.parse_or_resume(["--init", "w.pt", *other.split()])
