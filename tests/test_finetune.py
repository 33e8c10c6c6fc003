"""Fine-tuning: examples as files and tokens have them, and a classifier that learns what can be."""

import random

import numpy as np
import pytest
import torch
from conftest import refusal, widened, write_lines
from small_stores import ONE

import evaluate
from model import Transformer, TransformerConfig
from support.base.runtime import Runtime
from support.evaluation.finetune import (
    FIELDS,
    Classifier,
    Example,
    Recipe,
    Tuning,
    asked_at,
    encoded,
    lengths_within,
    rate,
    read_examples,
)
from support.rows.batch import Batch
from support.rows.bert import SpecialIds
from support.text.tokenizer import get_encoding

BYTES = get_encoding("bytes")
SPECIAL_IDS = SpecialIds.of(BYTES)
CLS, SEP, END = SPECIAL_IDS.cls, SPECIAL_IDS.sep, BYTES.eot_token
ROW = 32


def tiny(kind, nsp=False, dtype=torch.float32):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(kind, 1, 2, 32, 64, ROW, 320, nsp=nsp)).to(dtype)


def lay(texts, numbers=None):
    """Packed into rows; a BERT's if they have special tokens."""
    return evaluate.lay_texts(texts, ROW, SPECIAL_IDS if texts.special_tokens else None, numbers)


def tokens_of(kind, *texts):
    examples = [Example("f:1", text, str(n % 2)) for n, text in enumerate(texts)]
    return encoded(examples, ["0", "1"], BYTES, ROW, kind == "bert")


def toy(count, says_label=True, pairs=False):
    """Words of letters with an x or a y among them, which is the label or says nothing."""
    draw = random.Random(1)
    lines = []
    for _ in range(count):
        word = draw.choices("abcdefgh", k=draw.randint(3, 9))
        label = draw.randrange(2)
        word.insert(draw.randrange(len(word) + 1), "xy"[label if says_label else draw.randrange(2)])
        texts = {"text_a": "same", "text_b": "".join(word)} if pairs else {"text": "".join(word)}
        lines.append({**texts, "label": label})
    return lines


def tuning(part, runtime=ONE, **recipe) -> Tuning:
    return Tuning(tiny("gpt"), part, 2, Recipe(**recipe), lay, runtime)


def words(count):
    return tokens_of("gpt", *[(line["text"],) for line in toy(count)])


# ---- files


def test_published_names_of_fields(tmp_path):
    for names in FIELDS:
        lines = [dict.fromkeys(names, f"t{n}") | {"label": n % 2, "idx": n} for n in range(9)]
        path = write_lines(tmp_path / "a.jsonl", lines)
        given = read_examples(path, path)
        assert [one.texts for one in given.dev] == [(f"t{n}",) * len(names) for n in range(9)]
        assert given.labels == ["0", "1"] and not given.held_out and given.majority == 5 / 9


def test_a_fifth_is_held_out_by_the_text_alone(tmp_path):
    lines = [{"text": f"number {n}", "label": ["a", "b"][n % 2]} for n in range(500)]
    given = read_examples(write_lines(tmp_path / "a.jsonl", lines))
    assert 0.15 < len(given.dev) / 500 < 0.25 and len(given.train) + len(given.dev) == 500
    fewer = read_examples(write_lines(tmp_path / "b.jsonl", lines[::-3]))
    chosen = {one.texts for one in given.dev} & {(line["text"],) for line in lines[::-3]}
    assert {one.texts for one in fewer.dev} == chosen


GOOD = [{"text": f"t{n}", "label": n % 2} for n in range(40)]
PAIR = {"text_a": "a", "text_b": "b", "label": 1}
REFUSED = [
    (None, None, "No such file"),
    ([], None, "train.jsonl: has no example"),
    ([*GOOD, "x\n"], None, "train.jsonl:41: is not JSON"),
    ([{"txt": "a", "label": 0}], None, "train.jsonl:1: has no text"),
    ([*GOOD, {"text": "a"}], None, "train.jsonl:41: label"),
    ([{"text": "a", "label": [1]}], None, "train.jsonl:1: label"),
    ([*GOOD, {"sentence": "a", "label": 0}], None, "train.jsonl:41: "),
    ([{**one, "label": 1} for one in GOOD], None, "train.jsonl: all examples"),
    (GOOD[:1], None, "train.jsonl: has too few examples"),
    (GOOD, [{"text": "a", "label": 2}], "dev.jsonl:1: label 2 is not"),
    (GOOD, [PAIR], "dev.jsonl:1: pairs and single texts"),
    (GOOD, [], "dev.jsonl: has no example"),
]


def test_bad_files_are_one_line_before_a_run_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for lines, dev, problem in REFUSED:
        argv = ["no-run", "--device", "cpu", "--finetune", "train.jsonl"]
        if lines is not None:
            write_lines(tmp_path / "train.jsonl", lines)
        if dev is not None:
            write_lines(tmp_path / "dev.jsonl", dev)
            argv += ["--dev", "dev.jsonl"]
        assert problem in refusal(evaluate.main, argv)


# ---- tokens


def test_what_a_model_reads_worked_by_hand():
    def reads(kind, *texts):
        laid = lay(tokens_of(kind, *texts).texts)
        batch = laid.read(laid.rows)
        return [
            batch.tokens[0][batch.with_documents().doc_ids[0] == place].tolist()
            for place in np.argsort(laid.item)
        ]

    assert reads("bert", ("ab",), ("c",)) == [[CLS, 97, 98, SEP], [CLS, 99, SEP]]
    assert reads("gpt", ("ab",), ("c",)) == [[END, 97, 98], [END, 99]]
    pairs = [[CLS, 97, 98, SEP, 99, SEP], [CLS, 100, SEP, SEP]]
    assert reads("bert", ("ab", "c"), ("d", "")) == pairs
    assert reads("gpt", ("ab", "c")) == [[END, 97, 98, 10, 99]]


def test_the_longer_part_is_cut_first():
    assert lengths_within(8, 3, 5) == (3, 5)
    assert lengths_within(8, 3, 9) == (3, 5) and lengths_within(8, 9, 3) == (5, 3)
    assert lengths_within(7, 9, 9) == (4, 3) and lengths_within(8, 20, 0) == (8, 0)
    part = tokens_of("bert", ("a" * 40, "b" * 5), ("a", "b"))
    assert part.cut == 1 and part.texts.spans[0, 1] - part.texts.spans[0, 0] == ROW - 3
    part = tokens_of("gpt", ("a" * 40,), ("a" * 31,))
    assert part.cut == 1 and np.diff(part.texts.spans).ravel().tolist() == [ROW, ROW]


def test_where_a_document_is_asked_worked_by_hand():
    doc_ids = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    batch = Batch(doc_ids, doc_ids, positions, doc_ids)
    assert asked_at(batch, "bert").nonzero().tolist() == [[0, 0], [0, 2], [1, 0]]
    assert asked_at(batch, "gpt").nonzero().tolist() == [[0, 1], [0, 4], [1, 5]]
    full = Batch(doc_ids[:1], doc_ids[:1], None, None)  # a row that is one document
    assert asked_at(full, "gpt").nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("kind, pairs", [("gpt", False), ("bert", True)])
def test_packed_examples_score_as_they_do_alone(kind, pairs):
    draw = random.Random(0)

    def text():
        return "".join(draw.choices("abcdef", k=draw.randint(1, 12)))

    def scores(numbers):
        laid = lay(part.texts, numbers)
        return classifier(laid.read(laid.rows)), laid

    part = tokens_of(kind, *[(text(), text())[: 1 + pairs] for _ in range(9)])
    model = widened(tiny(kind, nsp=kind == "bert", dtype=torch.float64))
    classifier = Classifier(model, 3).double().eval()
    numbers = np.array([4, 0, 8, 1, 7])
    together, laid = scores(numbers)
    assert len(laid.rows) < 5 and sorted(laid.item) == sorted(numbers)
    alone = torch.cat([scores(laid.item[n : n + 1])[0] for n in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-11, atol=1e-13)
    # The comparison sees examples that attend to their neighbours.
    right = classifier.model.hidden_states
    classifier.model.hidden_states = lambda x, positions, doc_ids: right(x, positions, doc_ids * 0)
    assert (scores(numbers)[0] - alone).abs().max() > 1e-3


# ---- learning


def test_the_learning_rate_goes_up_over_a_tenth_and_down_to_nothing():
    rates = [rate(step, 20, 1.0) for step in range(20)]
    assert rates[:3] == pytest.approx([0.25, 0.75, 1 - 0.5 / 18])
    assert rates[-1] == pytest.approx(0.5 / 18) and rates[2:] == sorted(rates[2:], reverse=True)
    assert rate(0, 1, 1.0) == 0.5, "of a single step"


@pytest.mark.parametrize("kind, says_label", [("bert", True), ("gpt", False)])
def test_what_can_be_learned_is_and_chance_is_not(tmp_path, kind, says_label):
    """From pairs by a BERT that was trained with them."""
    lines = toy(100, says_label, pairs=kind == "bert")
    train, dev = tmp_path / "train.jsonl", tmp_path / "dev.jsonl"
    given = read_examples(write_lines(train, lines[:70]), write_lines(dev, lines[70:]))
    learned, dev = (
        encoded(part, given.labels, BYTES, ROW, kind == "bert") for part in (given.train, given.dev)
    )
    model = tiny(kind, nsp=kind == "bert")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    recipe = Recipe(seeds=1, epochs=12, lr=1e-2, batch=16)
    (share,) = Tuning(model, learned, 2, recipe, lay, ONE).accuracies(dev, at_once=4)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert share > 0.9 if says_label else 0.25 < share < 0.75


def test_a_seed_decides_all():
    part, recipe = words(20), Recipe(epochs=1, lr=1e-2, batch=10)

    def weights(seed, state):
        model = tiny("gpt")
        model.drop.p = 0.1
        torch.manual_seed(state)  # the caller's, which counts for nothing and stays as it is
        classifier = Tuning(model, part, 2, recipe, lay, ONE).classifier(seed)
        assert torch.initial_seed() == state
        return torch.cat([weight.flatten() for weight in classifier.parameters()])

    assert torch.equal(weights(1, 5), weights(1, 6))
    assert not torch.equal(weights(1, 5), weights(2, 5))


def test_ranks_take_turns_at_seeds():
    class Ranks(Runtime):
        def gather(self, value):
            return [{1: 0.0, 2: 0.0, 3: 0.0} | value]

    part = words(20)
    ranks = [Ranks(rank, 2, torch.device("cpu"), torch.float32, "") for rank in range(2)]
    whole, even, odd = (
        tuning(part, runtime, epochs=1, lr=1e-2, batch=10).accuracies(part, at_once=4)
        for runtime in (ONE, *ranks)
    )
    assert even == [whole[0], 0.0, whole[2]] and odd == [0.0, whole[1], 0.0]


def test_a_loss_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match=r"--finetune: the loss is nan at step .* --lr"):
        tuning(words(20), seeds=1, epochs=20, lr=1e30).classifier(1)
