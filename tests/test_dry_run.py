"""What a run's first lines say is ahead is what it does; --dry-run prints them and makes nothing.

python -m pytest tests/test_dry_run.py
"""

import re
from dataclasses import replace

import pytest
import torch
from conftest import ALL_ON, SMALL, contents

import config
import train
from data import open_data
from plan import Plan
from support.clock import Clock, Cursor
from support.runtime import Runtime

ONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")
FULL = {  # rows are full, so all is known
    "plain": "",
    "ltd": "--ltd --ltd-start 8 --ltd-pace root --ltd-steps 7 --ltd-multiple 1",
    "rows that grow": "--curriculum seqlen --curriculum-start 8",
    "rows cut up": "--curriculum seqlen-reshape --curriculum-start 8 --ltd --ltd-start 16",
    "levels": "--curriculum seqlen --curriculum-pace discrete:32@0.3:8@0.31:16",
    "fewer layers": "--pseudo --pseudo-layers 2 --pseudo-until 0.5",
}
NOT_FULL = {
    "packed": ALL_ON,
    "documents": "--pack --pack-batch documents",
    "bert": "--model bert --nsp --ltd --ltd-start 16",
}


def planned(flags: str, store_dir) -> Plan:
    line = f"{SMALL} --data {store_dir} {flags}"
    settings, data = open_data(config.build(config.parse(line.split())), ONE)
    return Plan(settings, data.store, data.special_ids, ONE)


def dry(flags: str, store_dir, capsys) -> str:
    capsys.readouterr()
    assert train.main(f"{SMALL} --data {store_dir} {flags} --dry-run".split()) == 0
    return capsys.readouterr().out


def ahead(said: str, what: str = "ahead") -> list[float]:
    """Steps, tokens of text, epochs, FLOP."""
    line = re.search(rf"^{what}: (.*)", said, re.MULTILINE)[1]
    unit = {"M": 1e6, "G": 1e9, "T": 1e12}[re.search("(.)FLOP executed", line)[1]]
    found = [float(n.replace(",", "")) for n in re.findall(r"\d[\d,.]*", line)[:4]]
    return [*found[:3], found[3] * unit]


@pytest.mark.parametrize("name", [*FULL, *NOT_FULL])
def test_what_is_ahead_is_what_the_run_does(name, short_ends, log_of, store_dir, capsys):
    flags = (FULL | NOT_FULL)[name]
    ran = log_of(f"{flags} --eval-every 0 --final-eval-tokens 99")
    last = [line for line in ran if line["event"] == "train"][-1]
    said = dry(flags, store_dir, capsys)
    steps, tokens, epochs, flops = ahead(said)
    assert ("if every row is full" in said) == (name in NOT_FULL)
    if name in FULL:
        assert (steps, tokens) == (last["step"], last["real_tokens"])
        assert flops == pytest.approx(last["flops"], rel=0.005), "three digits"
        assert epochs == round(last["real_tokens"] / 682_416, 2)
    else:
        assert tokens == pytest.approx(last["real_tokens"], rel=0.3)
    if flags:
        assert ahead(said, "without techniques")[:2] == [4096 / 256, 4096]


def test_steps_alike_are_taken_together_worked_example(store_dir):
    """Two of four layers keep 16 of 32 tokens until 0.5: a step of 8 rows consumes 8 * 24, then
    8 * 32. 4,096,000 * 0.5 / 192 are 10,667 steps, to 2,048,064; the rest / 256 are 8,000.
    """
    plan = planned("--ltd --ltd-start 16 --ltd-share 0.5 --tokens 4096000", store_dir)
    found = list(plan.ahead(Clock()))
    by_cost = {}
    for count, step in found:
        cost = step.after.consumed_tokens - step.before.consumed_tokens
        by_cost[cost] = by_cost.get(cost, 0) + count
    assert by_cost == {192: 10_667, 256: 8_000} and len(found) < 1100
    assert sum(count for count, _ in planned("", store_dir).ahead(Clock())) == 16
    assert [count for count, _ in planned("", store_dir).ahead(Clock(consumed_tokens=4096))] == []


def test_a_run_that_goes_on_has_the_rest_ahead(store_dir):
    plan, clock = planned("", store_dir), Clock(step=5, consumed_tokens=1280, cursor=Cursor(40))
    counts, steps = zip(*plan.ahead(clock), strict=True)
    assert sum(counts) == 11 and steps[0].before == clock and steps[0].context.step == 6


@pytest.mark.parametrize(
    "flags", [f"{ALL_ON} --out there", "--model bert --offload --offload-budget 400KB"]
)
def test_a_dry_run_makes_nothing(flags, store_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "assemble", pytest.fail)
    out = dry(f"{flags} --tokens 2048", store_dir, capsys)
    assert not list(tmp_path.iterdir())
    parts = r"0\.0[67] M parameters \(.*blocks 0\.05 M.*\) with a vocabulary of 320, cpu"
    assert re.search(parts, out) and "GB free" in out
    assert ("on host" in out) == ("--offload" in flags)


def test_a_dry_run_of_a_run_that_is_there_leaves_it_as_it_is(run, tmp_path, store_dir, capsys):
    run("--tokens 1024 --checkpoint-every 512 --eval-every 512")
    folder = tmp_path / "run"
    sorted(folder.glob("step-*.pt"))[-1].unlink()
    before = contents(folder)
    capsys.readouterr()
    assert train.main(f"--resume --out {folder} --data {store_dir} --dry-run".split()) == 0
    assert contents(folder) == before
    assert ahead(capsys.readouterr().out)[:2] == [2, 512]


def test_a_run_says_it_at_its_start_and_warns_of_text_that_repeats(
    store_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda *_: True)
    monkeypatch.setattr(train, "finish", lambda *_: None)
    for tokens, expected in ((2_000_000, False), (4_000_000, True)):
        line = f"{SMALL} --data {store_dir} --tokens {tokens} --warmup-tokens 0 --out {tokens}"
        assert train.main(line.split()) == 0
        out = capsys.readouterr().out
        assert ("more than 4 times" in out) == expected
        assert out.count("memory, by estimate:") == 1 and ahead(out)[1] // 256 == -(-tokens // 256)
    assert ahead(out)[2] == 5.86


def test_a_run_that_does_not_fit_takes_one_row_at_once(store_dir, monkeypatch, capsys):
    begin = train.start
    monkeypatch.setattr(train, "start", lambda *a: replace(begin(*a), device_free=1_000_000))
    assert "1 at once a rank (8 would take more than the 0.0 GB that" in dry("", store_dir, capsys)
