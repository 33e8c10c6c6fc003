"""The command line: types, refusals, settings of resumed runs, and how many flags there are."""

import os
import re
from collections import Counter

import pytest
from conftest import build, refusal

import config
from config import Config, resumed
from support.numbers import whole_number
from support.settings import flattened, settings_of

FLAGS = {n: s for n, s in settings_of(Config).items() if s.flag}


def test_defaults_follow_the_size():
    small, big = build(""), build("--size 1.3B")
    assert (small.model.layers, small.model.width, small.data.seq_len) == (4, 128, 2048)
    assert build("--model bert").data.seq_len == 512
    assert (big.model.layers, big.model.heads, big.model.width) == (24, 16, 2048)
    assert big.data.seq_len == 2048 and big.model.mlp_width == 8192
    assert small.model.pos == "rope" and big.model.pos == "learned"
    assert build("--init gpt2.pt").model.pos == "learned"
    assert build("--size 124M --layers 3 --width 96 --heads 3").model.mlp_width == 384


def test_counts_accept_suffixes_and_zero_where_it_means_never():
    assert whole_number("9007199254740993") == 2**53 + 1, "a float would be one less"
    numbers = {"4096": 4096, "2e6": 2e6, "8k": 8000, "1.5B": 1.5e9, "2.05M": 2.05e6}
    for text, number in numbers.items():
        assert build(f"--tokens {text} --batch-tokens 2048").optim.tokens == number
    never = build("--eval-every 0 --checkpoint-every 0 --warmup-tokens 0 --grad-clip 0 --seed 0")
    assert (never.run.eval_every, never.run.checkpoint_every, never.run.seed) == (0, 0, 0)
    assert (never.optim.warmup_tokens, never.optim.grad_clip) == (0, 0)


# Flags -> values that are refused for the last flag, which the message must name.
REFUSED = {
    "--data a=1,b=1 --curriculum": "length",
    "--data a=1,b=1 --model bert --nsp": "",
    "--tokens": "1.5 -5 0",
    "--lr": "0 -inf",
    "--batch-tokens 9e18 --seq-len": "9e18",
    "--nsp --model bert --batch-tokens": "512",
    "--min-lr": "2",
    "--beta2": "1",
    "--dropout": "1",
    "--heads": "0 3 5000",
    "--kv-heads": "0 3 5000",
    "--width 12 --heads 4 --pos": "rope",
    "--curriculum": "hard rarity,rarity seqlen,seqlen-reshape length length-rarity",
    "--pack --curriculum": "seqlen-reshape",
    "--model bert --curriculum": "seqlen-reshape",
    "--pack-batch": "rows",
    "--ltd --ltd-start": "0 2049",
    "--ltd --ltd-share": "1.5",
    "--ltd --layers": "2",
    "--ltd --ltd-multiple 16 --ltd-start": "8 60",
    "--ltd --ltd-start 250 --ltd-multiple": "100 100000",
    "--ltd --ltd-steps 10 --ltd-share": "0.5 0.9",
    "--ltd --ltd-layers": "1-6 0-5 0-999999999 4-2 1,4-2 middle -1",
}
NOT_0 = "--micro-batch-size --layers --width --keep --eval-tokens"
REFUSED |= dict.fromkeys([*NOT_0.split(), "--final-eval-tokens"], "0")


def test_refusals_name_the_flag_in_one_line():
    for flags, values in REFUSED.items():
        for value in values.split() or [""]:
            assert re.search(rf"{flags.split()[-1]}\b", refusal(build, f"{flags} {value}"))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_every_number_must_be_finite(value):
    flags = [setting.flag for setting in FLAGS.values() if setting.kind in (int, float)]
    assert len(flags) > 20
    for flag in flags:
        assert re.search(rf"{flag}\b.*{value}", refusal(build, f"{flag} {value}"))


def test_two_layers_may_drop_if_one_is_named():
    """By default neither the first nor the last drops, which leaves none of two."""
    assert build("--layers 2 --ltd --ltd-layers 1").ltd.layers == "1"


def test_ltd_steps_replaces_the_default_of_ltd_share():
    assert build("--ltd").ltd.share == 0.9
    by_steps = build("--ltd --ltd-steps 3")
    assert by_steps.ltd.share is None and config.build(flattened(by_steps)) == by_steps


def test_the_default_of_pack_batch_follows_from_the_model():
    batches = {"--pack": "rows", "--model bert --pack": "documents", "--model bert": None}
    batches |= {f"--pack --pack-batch {batch}": batch for batch in ("rows", "documents")}
    assert {flags: build(flags).pack.batch for flags in batches} == batches


def test_a_run_resumes_only_with_the_flags_it_was_started_with():
    line = "--curriculum seqlen,rarity --curriculum-share 0.3 --curriculum-pace linear"
    words = config.parse(line.split())
    saved = flattened(config.build(words))
    assert resumed(saved, words) == saved
    for other, began in {
        "--curriculum-share 0.2": "--curriculum-share 0.3",
        "--seed 6": "--seed 1337",
        "--pack": "--no-pack",
        "--ltd-steps 3": "no --ltd-steps",
    }.items():
        message = refusal(resumed, saved, config.parse(other.split()))
        assert re.match(f"{other} differs from {began}, with which", message)
    moved = {"run.out": "elsewhere", "data.data": "moved"}
    assert resumed(saved, moved) == saved | moved, "paths may change"


def test_old_settings_of_a_deleted_technique_are_ignored_if_it_was_off():
    began = build("--layers 3")
    saved = flattened(began)
    for off in ({"gone.on": False}, {"gone.metric": "none"}):
        assert config.build(saved | off | {"gone.start": 5}, file="config.json") == began
    for on in ({"gone.on": True}, {"gone.share": 0.5}):
        message = refusal(config.build, saved | on, file="config.json")
        assert f"config.json: {next(iter(on))} is not" in message


def test_a_folder_for_a_new_run_is_refused_before_anything_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for flags in ("--out .", "--out file"):
        assert "is not an empty folder" in refusal(config.parse_or_resume, flags.split())
    config.parse_or_resume(["--out", ".", "--dry-run"])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for flags in ("", "--out a/b"):
        assert f"--out: {tmp_path} is read-only" in refusal(config.parse_or_resume, flags.split())


@pytest.mark.structure
def test_there_are_at_most_70_flags_and_8_of_a_technique():
    flags = Counter(name.partition(".")[0] for name in FLAGS)
    assert flags.total() <= 70
    techniques = ("curriculum", "ltd", "pack", "pseudo", "offload")
    assert max(flags[technique] for technique in techniques) <= 8
