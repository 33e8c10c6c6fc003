"""Fine-tuning: examples as files and tokens have them, and a classifier that learns what can be."""

import gzip
import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import evaluate_into_file, refusal_of, start_ranks
from small_stores import ONE

import evaluate
from model import Transformer, TransformerConfig
from support.base.runtime import Runtime
from support.evaluation.finetune import (
    Classifier,
    Example,
    Recipe,
    accuracies,
    asked_at,
    encoded,
    finetuned,
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
    return Transformer(TransformerConfig(kind, 2, 2, 32, 64, ROW, 320, nsp=nsp)).to(dtype)


def pack(kind):
    special_ids = SPECIAL_IDS if kind == "bert" else None
    return lambda part, numbers: evaluate.packed_examples(part, numbers, ROW, special_ids)


def tokens_of(kind, *texts, labels=("0", "1"), seq_len=ROW):
    examples = [Example("f:1", text, str(n % 2)) for n, text in enumerate(texts)]
    return encoded(examples, list(labels), BYTES, seq_len, kind == "bert")


def toy(count, says_label=True, pairs=False):
    """Words of eight letters with an x or a y in them, which is the label or says nothing."""
    draw = random.Random(1)
    lines = []
    for _ in range(count):
        word = draw.choices("abcdefgh", k=draw.randint(3, 9))
        label = draw.randrange(2)
        word.insert(draw.randrange(len(word) + 1), "xy"[label if says_label else draw.randrange(2)])
        texts = {"text_a": "same", "text_b": "".join(word)} if pairs else {"text": "".join(word)}
        lines.append({**texts, "label": label})
    return lines


def write(path, lines):
    text = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(text))
    return path


# Files


@pytest.mark.parametrize(
    "names",
    [
        ("text",),
        ("sentence",),
        ("text_a", "text_b"),
        ("sentence1", "sentence2"),
        ("premise", "hypothesis"),
        ("question", "sentence"),
        ("question1", "question2"),
        ("question", "passage"),
    ],
)
def test_published_names_of_fields(tmp_path, names):
    lines = [dict.fromkeys(names, f"t{n}") | {"label": n % 2, "idx": n} for n in range(20)]
    given = read_examples(write(tmp_path / "a.jsonl", lines), write(tmp_path / "b.jsonl", lines))
    assert [one.texts for one in given.dev] == [(f"t{n}",) * len(names) for n in range(20)]
    assert given.labels == ["0", "1"] and not given.held_out and given.majority == 0.5


def test_a_fifth_is_held_out_by_the_text_alone(tmp_path):
    lines = [{"text": f"number {n}", "label": ["a", "b"][n % 2]} for n in range(500)]
    given = read_examples(write(tmp_path / "a.jsonl", lines))
    assert 0.15 < len(given.dev) / 500 < 0.25 and len(given.train) + len(given.dev) == 500
    out = {one.texts for one in given.dev}
    fewer = read_examples(write(tmp_path / "b.jsonl", lines[::-3]))
    assert {one.texts for one in fewer.dev} == out & {(line["text"],) for line in lines[::-3]}
    in_training = sorted(one.label for one in given.train)
    commonest = in_training[len(in_training) // 2]  # of two labels the one in the middle
    assert given.majority == sum(one.label == commonest for one in given.dev) / len(given.dev)


GOOD = [{"text": f"t{n}", "label": n % 2} for n in range(40)]
REFUSED = {
    "no file": (None, None, "No such file"),
    "empty": ([], None, "train.jsonl: has no example: write one a line"),
    "not JSON": ([*GOOD, "x\n"], None, "train.jsonl:41: is not JSON"),
    "no text": ([{"txt": "a", "label": 0}], None, "train.jsonl:1: has no text: it needs one of"),
    "no label": ([*GOOD, {"text": "a"}], None, "train.jsonl:41: label is missing, or no text"),
    "a label that is a list": ([{"text": "a", "label": [1]}], None, "train.jsonl:1: label is"),
    "fields that change": (
        [*GOOD, {"sentence": "a", "label": 0}],
        None,
        "train.jsonl:41: text is missing, as the lines before it have it",
    ),
    "a text that is none": ([*GOOD, {"text": 3, "label": 0}], None, ":41: text is no text in"),
    "one label": ([{**one, "label": 1} for one in GOOD], None, "all examples to train on have"),
    "none held out": (GOOD[:1], None, "train.jsonl: has no example to"),
    "another label in dev": (
        GOOD,
        [{"text": "a", "label": 2}],
        "dev.jsonl:1: label 2 is not among training's: 0, 1",
    ),
    "pairs in dev": (
        GOOD,
        [{"text_a": "a", "text_b": "b", "label": 1}],
        "dev.jsonl:1: pairs and single texts do not mix",
    ),
    "an empty dev": (GOOD, [], "dev.jsonl: has no example: write one a line"),
}


@pytest.mark.parametrize(("train", "dev", "said"), list(REFUSED.values()), ids=list(REFUSED))
def test_bad_files_are_one_line_before_a_run_is_opened(
    tmp_path, monkeypatch, capsys, train, dev, said
):
    monkeypatch.chdir(tmp_path)
    argv = ["evaluate.py", "no-run", "--device", "cpu", "--finetune", "train.jsonl"]
    if train is not None:
        write(tmp_path / "train.jsonl", train)
    if dev is not None:
        write(tmp_path / "dev.jsonl", dev)
        argv += ["--dev", "dev.jsonl"]
    assert said in refusal_of(evaluate.main, argv, monkeypatch, capsys)


# Tokens


def test_what_a_model_reads_worked_by_hand():
    def reads(kind, *texts):
        part = tokens_of(kind, *texts)
        batch, order = pack(kind)(part, np.arange(len(texts)))
        return [
            batch.tokens[0][batch.with_documents().doc_ids[0] == place].tolist()
            for place in np.argsort(order)
        ]

    assert reads("bert", ("ab",), ("c",)) == [[CLS, 97, 98, SEP], [CLS, 99, SEP]]
    assert reads("gpt", ("ab",), ("c",)) == [[END, 97, 98], [END, 99]]
    assert reads("bert", ("ab", "c"), ("d", "")) == [
        [CLS, 97, 98, SEP, 99, SEP],
        [CLS, 100, SEP, SEP],
    ]
    assert reads("gpt", ("ab", "c")) == [[END, 97, 98, 10, 99]]


def test_the_longer_part_is_cut_first():
    assert lengths_within(8, 3, 5) == (3, 5)
    assert lengths_within(8, 3, 9) == (3, 5) and lengths_within(8, 9, 3) == (5, 3)
    assert lengths_within(7, 9, 9) == (4, 3) and lengths_within(8, 20, 0) == (8, 0)
    part = tokens_of("bert", ("a" * 40, "b" * 5), ("a", "b"))
    assert part.cut == 1 and part.spans[0, 1] - part.spans[0, 0] == ROW - 3
    part = tokens_of("gpt", ("a" * 40,), ("a" * 31,))
    assert part.cut == 1 and np.diff(part.spans).ravel().tolist() == [ROW, ROW]


def test_where_a_document_is_asked_worked_by_hand():
    doc_ids = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    batch = Batch(doc_ids, doc_ids, positions, doc_ids)
    assert asked_at(batch, "bert").nonzero().tolist() == [[0, 0], [0, 2], [1, 0]]
    assert asked_at(batch, "gpt").nonzero().tolist() == [[0, 1], [0, 4], [1, 5]]
    full = Batch(doc_ids[:1], doc_ids[:1], None, None)  # a row that is one document
    assert asked_at(full, "gpt").nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("kind", ["gpt", "bert"])
@pytest.mark.parametrize("pairs", [False, True])
def test_packed_examples_score_as_they_do_alone(kind, pairs):
    draw = random.Random(0)

    def text():
        return "".join(draw.choices("abcdef", k=draw.randint(1, 12)))

    part = tokens_of(kind, *[(text(), text())[: 1 + pairs] for _ in range(9)])
    model = tiny(kind, nsp=kind == "bert", dtype=torch.float64)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    classifier = Classifier(model, 3).double().eval()
    numbers = np.array([4, 0, 8, 1, 7])
    batch, order = pack(kind)(part, numbers)
    assert len(batch.tokens) < 5 and sorted(order) == sorted(numbers)
    alone = torch.cat([classifier(pack(kind)(part, order[n : n + 1]).batch) for n in range(5)])
    torch.testing.assert_close(classifier(batch), alone, rtol=1e-11, atol=1e-13)
    # The comparison sees examples that attend to their neighbours.
    joined = classifier.model.hidden_states
    classifier.model.hidden_states = lambda tokens, positions, doc_ids: joined(
        tokens, positions, doc_ids * 0
    )
    assert (classifier(batch) - alone).abs().max() > 1e-3


# Learning


def test_the_learning_rate_goes_up_over_a_tenth_and_down_to_nothing():
    rates = [rate(step, 20, 1.0) for step in range(20)]
    assert rates[:3] == pytest.approx([0.25, 0.75, 1 - 0.5 / 18])
    assert rates[-1] == pytest.approx(0.5 / 18) and rates[2:] == sorted(rates[2:], reverse=True)
    assert rate(0, 1, 1.0) == 0.5, "of a single step"


@pytest.mark.parametrize(
    ("kind", "nsp", "pairs"),
    [("gpt", False, False), ("bert", False, False), ("bert", True, True), ("gpt", False, True)],
)
def test_what_can_be_learned_is_and_chance_is_not(tmp_path, kind, nsp, pairs):
    found = []
    for says_label in (True, False):
        lines = toy(160, says_label, pairs)
        given = read_examples(
            write(tmp_path / "train.jsonl", lines[:120]), write(tmp_path / "dev.jsonl", lines[120:])
        )
        how = (given.labels, BYTES, ROW, kind == "bert")
        parts = (encoded(given.train, *how), encoded(given.dev, *how))
        model = tiny(kind, nsp)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        recipe = Recipe(seeds=2, epochs=15, lr=1e-2, batch=16)
        shares = accuracies(model, *parts, 2, recipe, pack(kind), ONE)
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
        found.append(shares)
    assert found[0] == [1.0, 1.0]
    assert all(0.25 < share < 0.75 for share in found[1])


def test_a_seed_decides_all(tmp_path):
    part = tokens_of("gpt", *[(line["text"],) for line in toy(40)])
    bar = type("Bar", (), {"update": lambda self: None})()

    def weights(seed, state):
        torch.manual_seed(state)  # the caller's, which counts for nothing and stays as it is
        model = tiny("gpt")
        model.drop.p = 0.1
        torch.manual_seed(state)
        recipe = Recipe(epochs=1, lr=1e-2, batch=16)
        tuned = finetuned(model, part, 2, recipe, pack("gpt"), ONE, seed, bar)
        assert torch.initial_seed() == state
        return torch.cat([weight.flatten() for weight in tuned.parameters()])

    assert torch.equal(weights(1, 5), weights(1, 6))
    assert not torch.equal(weights(1, 5), weights(2, 5))


def test_ranks_take_turns_at_seeds():
    class Ranks(Runtime):
        def gather(self, value):
            return [value, {1: 0.0, 2: 0.0, 3: 0.0} | value]

    part = tokens_of("gpt", *[(line["text"],) for line in toy(40)])
    recipe = Recipe(seeds=3, epochs=1, lr=1e-2, batch=16)
    whole = accuracies(tiny("gpt"), part, part, 2, recipe, pack("gpt"), ONE)
    ranks = [Ranks(rank, 2, torch.device("cpu"), torch.float32, "") for rank in range(2)]
    found = [accuracies(tiny("gpt"), part, part, 2, recipe, pack("gpt"), rank) for rank in ranks]
    assert found == [[whole[0], 0.0, whole[2]], [0.0, whole[1], 0.0]]


def test_a_loss_that_is_not_finite_is_refused():
    part = tokens_of("gpt", *[(line["text"],) for line in toy(40)])
    recipe = Recipe(seeds=1, epochs=20, lr=1e30)
    with pytest.raises(ValueError, match=r"--finetune: the loss is nan at step .* --lr below 1e"):
        accuracies(tiny("gpt"), part, part, 2, recipe, pack("gpt"), ONE)


# The command


def files_of(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_command(run, tmp_path, capsys):
    run("--model bert")
    text = "".join(json.dumps(line) + "\n" for line in toy(200))
    (tmp_path / "toy.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    before = files_of(tmp_path / "run")
    ask = "run --device cpu --finetune toy.jsonl.gz --lr 5e-3 --epochs 4 --batch 16 --seeds 2"
    capsys.readouterr()
    evaluate.main(ask.split())
    said = capsys.readouterr().out.splitlines()
    evaluate.main([*ask.split(), "--json"])
    found = json.loads(capsys.readouterr().out)["finetune"]
    assert files_of(tmp_path / "run") == before, "the run stays as it is"
    assert found["train"] + found["dev"] == 200 and found["seeds"] == 2
    shares = found["accuracy"]["of_seed"]
    assert found["accuracy"]["least"] == min(shares) and len(shares) == 2
    assert f"dev accuracy {sum(shares) / 2:.1%} ({min(shares):.1%} to {max(shares):.1%}" in said[0]
    assert f"training has most often {found['majority']:.1%}" in said[0]
    assert f"{found['dev']} held out by a hash of the text, 2 labels" in said[1]
    assert found["accuracy"]["mean"] > 0.9 > found["majority"]


@pytest.mark.dist
def test_two_processes_find_what_one_finds(run, tmp_path):
    run()
    write(tmp_path / "toy.jsonl", toy(60))
    flags = "--json --finetune toy.jsonl --lr 5e-3 --epochs 1 --seeds 3"
    ask = f"run --device cpu {flags}".split()
    evaluate_into_file(ask)
    alone = json.loads(Path("said-0.json").read_text())
    start_ranks(2, ask, work=evaluate_into_file)
    assert json.loads(Path("said-0.json").read_text()) == alone
    assert Path("said-1.json").read_text() == ""
