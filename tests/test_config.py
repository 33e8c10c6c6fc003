"""The command line: types, refusals, resumed settings, and its limits in number."""

from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

import config
from config import Config
from support.base.settings import (
    flag_of,
    flattened,
    parser_of,
    resumed,
    shown_default,
    shown_fields,
)
from support.base.technique import is_on, techniques_of, techniques_on


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
    settings = build("--ltd --curriculum seqlen --size 124M --tokens 3e6")
    assert config.build(flattened(settings)) == settings


@pytest.mark.parametrize(
    ("text", "number"), [("4096", 4096), ("2e6", 2_000_000), ("1.5B", 1_500_000_000), ("8k", 8000)]
)
def test_counts(text, number):
    assert build(f"--tokens {text} --batch-tokens 256").optim.tokens == number


REFUSED = {
    "--data a=1,b": r"^--data a=1,b: 'b' is not PATH=WEIGHT",
    "--data a=1,b=1 --curriculum length": r"^--curriculum length sorts the samples of one store",
    "--data a=1,b=1 --model bert --nsp": r"^--nsp exchanges texts among the documents of one",
    "--tokens many": r"argument --tokens: many is not a whole number",
    "--tokens 1.5": r"--tokens: 1.5 is not a whole number",
    "--tokens -5": r"--tokens",
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
    "--batch-tokens 1000": r"is not a multiple of --seq-len 256: choose 768 or 1024",
    "--lr 0": r"--lr 0.0 must be above 0",
    "--min-lr 2": r"--min-lr 2.0 must be at least 0 and at most 1",
    "--tokens 1000 --warmup-tokens 1000": r"--warmup-tokens 1000 must be below --tokens 1000",
    "--decay-share 0": r"--decay-share 0.0",
    "--beta2 1": r"--beta2 1.0 must be at least 0 and below 1",
    "--weight-decay -1": r"--weight-decay -1.0",
    "--grad-clip -1": r"--grad-clip -1.0",
    "--dropout 1": r"--dropout 1.0",
    "--keep 0": r"--keep 0",
    "--curriculum seqlen --curriculum-start 300": r"--curriculum-start 300 must lie in 1..256",
    "--curriculum seqlen --curriculum-share 0": r"-share 0 is not a number above 0, at most 1",
    "--curriculum seqlen --curriculum-share x": r"--curriculum-share x is not a number",
    "--curriculum seqlen --curriculum-start 12": r"--curriculum-start 12 is no multiple of 8",
    "--curriculum seqlen --curriculum-start 8.5": r"--curriculum-start 8.5 is not a whole number",
    "--curriculum rarity --curriculum-start 101": r"--curriculum-start 101 must lie in 1..100",
    "--curriculum rarity --curriculum-start 0": r"-start 0 is not a whole number above 0",
    "--curriculum rarity,seqlen --curriculum-start 8": r"8 needs a value for each of",
    "--curriculum rarity,rarity": r"takes one length, and each name once",
    "--curriculum seqlen,seqlen-reshape": r"takes one length, and each name once",
    "--curriculum length": r"cannot tell rows apart that are all 256 tokens.*\(--pack\)",
    "--curriculum length-rarity": r"cannot tell rows apart",
    "--curriculum seqlen-reshape --pack": r"is for full rows.*take seqlen, which cuts pieces",
    "--curriculum seqlen-reshape --model bert": r"take seqlen and --pack, which cuts pieces",
    "--curriculum none.py:hard": r"there is no Python file none.py",
    "--curriculum rarity --curriculum-pace cubic": r"pace cubic is unknown: choose one of linear",
    "--curriculum rarity --curriculum-pace root:0": r"--curriculum-pace 0 is not a number above 0",
    "--curriculum seqlen --curriculum-pace discrete:64@0.1:128@0.2": r"each level but the last",
    "--curriculum seqlen --curriculum-pace discrete:64:128@0.2:256": r"each level but the last",
    "--curriculum seqlen --curriculum-pace discrete:64@5:256": r"5 is not a number above 0",
    "--curriculum seqlen --curriculum-pace discrete:64@nan:256": r"nan is not a number",
    "--curriculum seqlen --curriculum-pace discrete": r"each level but the last",
    "--curriculum rarity --curriculum-by value": r"--curriculum-by value needs --curriculum-start",
    "--curriculum rarity --curriculum-by rank": r"-by rank is unknown: choose percentile",
    "--ltd --ltd-start 0": r"--ltd-start 0 must be at least 1",
    "--ltd --ltd-start 257": r"--ltd-start 257 .* 256 ",
    "--ltd --ltd-share 1.5": r"--ltd-share 1.5",
    "--ltd --layers 2": r"--layers 2: --ltd needs a layer between .*: choose 3 or more",
    "--ltd --layers 2 --ltd-layers 1": r"--layers 2: --ltd needs .* 3 or more, or leave out --ltd",
    "--ltd --ltd-start 60 --ltd-multiple 16": r"--ltd-start 60 .*--ltd-multiple 16: .*48 or 64",
    "--ltd --ltd-start 8 --ltd-multiple 16": r"--ltd-multiple 16: choose 16,",
    "--ltd --ltd-start 250 --ltd-multiple 100": r"choose 200 or 256,",
    "--ltd --ltd-steps 3 --ltd-share 0.9": r"--ltd-steps and --ltd-share both say",
    "--ltd --ltd-layers 1-6": r"--ltd-layers 1-6: write layers from 0 to 5",
    "--ltd --ltd-layers 0-5": r"--ltd-layers 0-5 names all layers",
    "--ltd --ltd-layers 0-999999999": r"--ltd-layers 0-999999999: write layers from 0 to 5",
    "--ltd --ltd-layers 1,4-2": r"--ltd-layers 1,4-2: write layers from 0 to 5",
    "--ltd --ltd-layers middle": r"--ltd-layers middle: write layers",
    "--ltd --ltd-layers -1": r"--ltd-layers",
    "--ltd --ltd-mode first": r"--ltd-mode",
    "--ltd --ltd-pace slow": r"--ltd-pace",
    "--ltd --ltd-pace linear --ltd-multiple 16 --ltd-start 16 --compile": r"makes 16 shapes",
    "--lr-clock steps": r"--lr-clock",
    "--pack-batch rows": r"--pack-batch rows has no effect without --pack",
    "--pack --pack-batch tokens": r"--pack-batch: invalid choice: 'tokens'",
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


def test_every_refusal_has_a_test():
    assert len(REFUSED) >= len(config.refusals(build("")))


def test_a_resumed_run_keeps_its_settings():
    saved = flattened(build("--seed 5 --ltd"))
    assert config.build(resumed(Config, saved, {"run.resume": "last"})).run.seed == 5
    resumed(Config, saved, {"run.seed": 5, "run.keep": 9})
    with pytest.raises(ValueError, match=r"--seed 6 differs from --seed 5, .*another --out"):
        resumed(Config, saved, {"run.seed": 6})


@pytest.mark.parametrize(
    ("given", "says"),
    {
        "--no-ltd": r"^--no-ltd differs from --ltd, with which the run was started: leave it out",
        "--pack": r"^--pack differs from --no-pack, with",
        "--ltd-start 32": r"^--ltd-start 32 differs from --ltd-start 16, with",
        "--ltd-steps 3": r"^--ltd-steps 3 differs from no --ltd-steps, with",
    }.items(),
)
def test_a_changed_setting_is_shown_as_its_flag(given, says):
    saved = flattened(build("--ltd"))
    with pytest.raises(ValueError, match=says):
        resumed(Config, saved, config.parse(given.split()))


def test_the_share_of_token_dropping_gives_way_to_steps():
    assert build("--ltd").ltd.share == 0.9
    by_steps = build("--ltd --ltd-steps 3")
    assert by_steps.ltd.share is None
    assert config.build(flattened(by_steps)) == by_steps


def test_a_run_from_before_a_setting_goes_on_with_its_default():
    saved = flattened(build("--model bert --pack --pack-batch rows"))
    for name in ("data.long", "pack.batch"):
        del saved[name]
    settings = config.build(resumed(Config, saved, {"run.resume": "last"}))
    assert (settings.data.long, settings.pack.batch) == ("split", "documents")
    with pytest.raises(ValueError, match=r"--long truncate differs from no --long, with which"):
        resumed(Config, saved, {"data.long": "truncate"})


def test_what_a_packed_step_keeps_follows_from_the_model():
    assert build("--pack").pack.batch == "rows"
    assert build("--model bert --pack").pack.batch == "documents"
    assert build("--model bert --pack --pack-batch rows").pack.batch == "rows"
    documents = build("--pack --pack-batch documents --long truncate")
    assert (documents.pack.batch, documents.data.long) == ("documents", "truncate")
    assert config.build(flattened(documents)) == documents
    assert build("--model bert").pack.batch is None and build("").pack.batch is None


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


def test_every_flag_is_in_the_table():
    table = config.flags_table()
    for action in parser_of(Config, "train.py", "")._actions:
        assert f"| `{action.option_strings[0]}` |" in table or action.dest == "help"


def test_defaults_are_shown_as_they_are():
    """A clip of 1.0 is not "on", a dropout of 0.0 not "off", though 1.0 == True."""
    assert [shown_default(value) for value in (1.0, 0.0, True, False, None, 20)] == [
        "1.0",
        "0.0",
        "on",
        "off",
        "",
        "20",
    ]
    assert "| `--grad-clip` | 1.0 |" in config.flags_table()
    assert "| `--dropout` | 0.0 |" in config.flags_table()


def test_a_technique_is_registered_by_one_line():
    on = [name for name in techniques_of(Config) if is_on(build("--ltd"), name)]
    assert on == ["ltd"]
    assert techniques_on(build("")) == []


def test_published_weights_have_learned_positions():
    with pytest.raises(ValueError, match="--init and --pos rope exclude each other"):
        config.parse_or_resume(["--init", "w.pt", "--pos", "rope"])


def test_init_is_for_a_start_and_resume_for_a_run_that_has_its_weights():
    with pytest.raises(ValueError, match="--init and --resume exclude each other"):
        config.parse_or_resume(["--init", "w.pt", "--resume"])
