"""lesson.py trains what train.py trains."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from conftest import build

import config
import lesson
import train
from data import GptTask, open_data
from evaluate import Evaluation
from packing import pack_lengths
from plan import Plan, read_ahead
from support import runtime
from support.clock import Clock
from support.store import Store
from support.weights import initial_model, model_size
from tests.test_budget import code_lines

FLAGS = "--curriculum seqlen --pack --ltd --optimizer adamw"
TECHNIQUES = (lesson.longest_piece, lesson.pack, lesson.mask, lesson.draw_kept, lesson.run_kept)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(lesson, "C", 32)
    monkeypatch.setattr(lesson, "H", 2)


def trained(tokens: int, steps: int) -> tuple[list[float], Callable[[Store], float]]:
    """The losses of train.py's first steps, and a function that measures held-out bits per byte."""
    sizes = f"--layers {lesson.L} --seq-len {lesson.T} --batch-tokens {lesson.T * lesson.ROWS}"
    sizes += f" --width {lesson.C} --heads {lesson.H} --lr {lesson.LR} --tokens {tokens}"
    settings, here = build(f"{FLAGS} {sizes}"), runtime.start("cpu", "fp32")
    data, task = open_data(settings.data, here), GptTask()
    shape = config.transformer_config(settings, *model_size(settings, data.encoding))
    model = initial_model(shape, settings)
    trainer = train.assemble(settings, model=model, runtime=here, micro_batch=lesson.ROWS)
    ahead = read_ahead(Plan(settings, data.store, task, here, shape), Clock())
    losses = [trainer.train_step(step).loss for step, _ in islice(ahead, steps)]

    def bits_per_byte(store: Store) -> float:
        evaluation = Evaluation(data._replace(store=store), task, lesson.T)
        return evaluation.run(model, here, lesson.ROWS).val_bpb

    return losses, bits_per_byte


def test_the_command_in_its_head_has_its_settings():
    flags = re.search(r"python train.py (.*)", lesson.__doc__)[1]
    s = build(flags)
    assert s.optim.batch_tokens == lesson.ROWS * lesson.T and s.optim.lr == lesson.LR
    assert (s.model.layers, s.data.seq_len, s.optim.tokens) == (lesson.L, lesson.T, lesson.BUDGET)
    assert (s.ltd.start, s.ltd.share, s.optim.optimizer) == (lesson.K, lesson.WHOLE_AT, "adamw")


def test_its_losses_are_those_of_train_py():
    _, _, losses = lesson.train(most_steps=2)
    assert losses == pytest.approx(trained(lesson.BUDGET, 2)[0], abs=1e-5)


def test_so_is_the_end_of_a_run(monkeypatch):
    """Where all tokens are kept, pieces are as long as rows, and the rate has fallen to 0."""
    for name, value in {"T": 256, "K": 16, "ROWS": 4, "LR": 1e-4}.items():
        monkeypatch.setattr(lesson, name, value)
    model, store, losses = lesson.train(16_000)
    of_train, bits_per_byte = trained(16_000, 100)
    assert losses == pytest.approx(of_train, abs=1e-4)
    few = replace(store, offsets=store.offsets[: store.meta["train_documents"] + 20])
    assert lesson.bits_per_byte(model, few) == pytest.approx(bits_per_byte(few), abs=1e-4)


@pytest.mark.parametrize("T", [24, 2048])
def test_its_packer_is_packing_py_s(T, monkeypatch):
    """With many documents of the same lengths, and with few."""
    monkeypatch.setattr(lesson, "T", T)
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, T + 1, 300)
        packs = pack_lengths(lengths, T)
        rows = np.split(packs.items, packs.offsets[1:-1])
        assert lesson.pack(lengths.tolist()) == [tuple(row) for row in rows]


def test_each_technique_is_twenty_lines_at_most_with_its_equation():
    for function in TECHNIQUES:
        assert code_lines(inspect.getsource(function)) <= 20
        assert re.search(r" = |argmin|top", function.__doc__)
