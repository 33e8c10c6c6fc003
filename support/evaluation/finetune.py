"""Fine-tuning a trained model as a classifier, and how often it is right. The run stays as it is.

A line of a file is a JSON object with a "label", a string or a whole number, and the text or the
pair of texts that one of these fields holds:

    text; sentence
    text_a, text_b; sentence1, sentence2;
    premise, hypothesis; question, sentence; question1, question2; question, passage

A BERT reads [CLS] text [SEP], or [CLS] a [SEP] b [SEP], and is asked at [CLS], through its pooler
if it was trained with one. A GPT reads end-of-text and the text, or a pair a line each, and is
asked at the last token. A text longer than a row is cut at its end; the longer part of a pair is
cut first, as BERT's authors did. The examples of a step are packed into rows, isolated from each
other.

Paper: Devlin et al., arXiv 1810.04805, section 4.1 and appendix A.3: steps of 32 examples, 3
epochs, Adam at 2e-5 to 5e-5 with weight decay of 0.01, a linear warmup over a tenth of the steps, a
linear decay, dropout of 0.1. Here the body keeps the dropout that it was trained with, so 0.1 is
that of the classifier alone.

    python evaluate.py runs/bert-nano-1 --finetune reviews.jsonl --lr 1e-3
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import Transformer
from support.base.rng import seed_of, shuffled
from support.base.runtime import Runtime
from support.base.typed_json import mismatch
from support.evaluation.scoring import Laid, Texts, store_in_memory, sums_by_item
from support.rows.batch import Batch
from support.rows.bert import Pairs
from support.rows.samples import SPECIAL_TOKENS
from support.step.optim import OptimConfig, Optimizers, lr_at
from support.text.corpus import Document, is_held_out
from support.text.reading import read_objects

FIELDS = (
    ("text_a", "text_b"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("question", "passage"),
    ("text",),
    ("sentence",),
)
DEV = 5  # one example in five is held out if no file of others is named
WARMUP = 0.1  # of the steps
WEIGHT_DECAY, BETAS, CLIP, DROPOUT = 0.01, (0.9, 0.999), 1.0, 0.1


# ---- examples


class Example(NamedTuple):
    where: str  # file:line
    texts: tuple[str, ...]  # one, or the two of a pair
    label: str

    def is_for_dev(self) -> bool:
        """Whether it is held out if no file of others is named, by a hash of the text."""
        return is_held_out(Document(None, "\n".join(self.texts)), DEV)


class Examples(NamedTuple):
    train: list[Example]
    dev: list[Example]
    labels: list[str]  # those in train, in order

    @property
    def majority(self) -> float:
        """Accuracy on dev of the label that train has most often."""
        commonest = Counter(example.label for example in self.train).most_common(1)[0][0]
        return sum(example.label == commonest for example in self.dev) / len(self.dev)


def read_examples(file: str | Path, dev_file: str | Path | None = None) -> Examples:
    """Read examples; without a second file a fifth of them is held out by a hash of the text.

    Raises: ValueError naming the file and line: no JSON, fields that are missing or change, a label
            that is not in training; or if one of the two lists is empty or has one label only
    """
    train = list(examples_of(file))
    if dev_file is not None:
        dev = list(examples_of(dev_file))
    else:
        dev = [example for example in train if example.is_for_dev()]
        train = [example for example in train if not example.is_for_dev()]
        if not train or not dev:
            raise ValueError(f"{file}: has too few examples to hold some out: name a --dev file")
    labels = sorted({example.label for example in train})
    if len(labels) < 2:
        raise ValueError(f"{file}: all examples to train on have label {labels[0]}: add others")
    for where, texts, label in dev:
        if label not in labels:
            raise ValueError(f"{where}: label {label} is not one of training's: {labels[:8]}")
        if len(texts) != len(train[0].texts):
            raise ValueError(f"{where}: pairs and single texts do not mix: choose one of them")
    return Examples(train, dev, labels)


def examples_of(file: str | Path) -> Iterator[Example]:
    names: tuple[str, ...] = ()
    for where, line in read_objects(file):
        names = names or next((names for names in FIELDS if set(names) <= set(line)), ())
        if not names:
            raise ValueError(f"{where}: has no text: name fields as support/evaluation/finetune.py")
        if wrong := mismatch(line, dict.fromkeys(names, str) | {"label": str | int | bool}):
            raise ValueError(f"{where}: {wrong}")
        yield Example(where, tuple(line[name] for name in names), str(line["label"]))
    if not names:
        raise ValueError(f"{file}: has no example: write one a line, as a JSON object")


# ---- as tokens


class Encoded(NamedTuple):
    """Examples as tokens; a GPT's end with end-of-text."""

    texts: Texts
    labels: np.ndarray  # (n,) int64
    cut: int  # how many were longer than a row


def encoded(
    examples: list[Example],
    labels: list[str],
    encoding: tiktoken.Encoding,
    seq_len: int,
    is_bert: bool,
) -> Encoded:
    """The tokens of examples, and the numbers of their labels among `labels`."""
    are_pairs = len(examples[0].texts) == 2
    middle = [] if is_bert or not are_pairs else encoding.encode_ordinary("\n")
    special_tokens = SPECIAL_TOKENS["pairs" if are_pairs else "bert"] if is_bert else 0
    room = seq_len - max(special_tokens, 1) - len(middle)  # a GPT's for end-of-text
    first = encoding.encode_ordinary_batch([example.texts[0] for example in examples])
    second = encoding.encode_ordinary_batch([" ".join(e.texts[1:]) for e in examples])
    texts, sizes, cut = [], [], 0
    for a, b in zip(first, second, strict=True):
        of_a, of_b = lengths_within(room, len(a), len(b))
        cut += of_a + of_b < len(a) + len(b)
        sizes.append(of_a)
        texts.append([*a[:of_a], *middle, *b[:of_b], encoding.eot_token])
    store = store_in_memory(examples[0].where.rpartition(":")[0], texts, encoding)
    start = store.offsets[:-1]
    return Encoded(
        texts=Texts(
            store,
            spans=np.stack((start, store.offsets[1:] - is_bert), axis=1),
            pairs=Pairs(np.array(sizes), start + sizes) if is_bert and are_pairs else None,
            special_tokens=special_tokens,
        ),
        labels=np.array([labels.index(example.label) for example in examples]),
        cut=cut,
    )


def lengths_within(room: int, first: int, second: int) -> tuple[int, int]:
    """How many tokens of two parts are kept, the longer one losing first: (8, 3, 9) -> (3, 5)"""
    if first + second <= room:
        return first, second
    first = min(first, max(room - second, room - room // 2))
    return first, min(second, room - first)


# ---- the classifier


class Recipe(NamedTuple):
    seeds: int = 3
    epochs: int = 3
    lr: float = 3e-5
    batch: int = 32  # examples of a step


class Classifier(nn.Module):
    """A trained model and a linear layer on what it says of each document."""

    def __init__(self, model: Transformer, labels: int):
        super().__init__()
        self.model = model
        self.drop = nn.Dropout(DROPOUT)
        self.head = nn.Linear(model.config.width, labels)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> Tensor:
        """(n, labels) scores of the documents, in reading order."""
        x = self.model.hidden_states(batch.tokens, batch.positions, batch.doc_ids)  # (B, T, C)
        x = x[asked_at(batch, self.model.config.kind)]  # (n, C)
        if self.model.config.nsp:
            x = torch.tanh(self.model.pooler(x))
        return self.head(self.drop(x))


def asked_at(batch: Batch, kind: str) -> Tensor:
    """(B, T) bool: the first token of every document for a BERT, the last one for a GPT."""
    _, _, positions, doc_ids = batch.with_documents()
    if kind == "bert":
        return (positions == 0) & (doc_ids >= 0)
    following = F.pad(doc_ids[:, 1:], (0, 1), value=-1)  # (B, T)
    return (doc_ids >= 0) & (following != doc_ids)


class Tuning(NamedTuple):
    """Fine-tuning copies of a model on some examples, one copy for each seed."""

    model: Transformer
    train: Encoded
    labels: int
    recipe: Recipe
    lay: Callable[[Texts, np.ndarray | None], Laid]  # those with these numbers, in rows; None: all
    runtime: Runtime

    @property
    def steps(self) -> int:
        return self.recipe.epochs * math.ceil(len(self.train.labels) / self.recipe.batch)

    def accuracies(self, dev: Encoded, at_once: int) -> list[float]:
        """The accuracy on dev of the classifier of each seed from 1 on.

        Ranks take turns at seeds, so their number changes nothing but the time.

        Args: at_once rows of dev
        """
        runtime, seeds = self.runtime, range(1, self.recipe.seeds + 1)
        own = seeds[runtime.rank :: runtime.world_size]
        hidden = not runtime.is_rank0 or None  # None: shown where there is a terminal
        laid, of_seed = self.lay(dev.texts, None), {}
        with tqdm(total=len(own) * self.steps, unit="step", disable=hidden, leave=False) as bar:
            for seed in own:
                bar.set_description(f"seed {seed} of {len(seeds)}")
                answers = answers_of(self.classifier(seed, bar.update), laid, runtime, at_once)
                of_seed[seed] = float((answers == dev.labels).mean())
        for part in runtime.gather(of_seed):
            of_seed |= part
        return [of_seed[seed] for seed in seeds]

    def classifier(self, seed: int, stepped: Callable[[], object] = lambda: None) -> Classifier:
        """A copy of the model after all steps; `seed` decides its head, its order, its dropout.

        Raises: ValueError if a loss is not finite
        """
        recipe, device, n, step = self.recipe, self.runtime.device, len(self.train.labels), 0
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed_of(seed, "finetune"))
            classifier = Classifier(copy.deepcopy(self.model), self.labels).to(device).train()
            fp16 = self.runtime.dtype == torch.float16
            named = dict(classifier.named_parameters())
            optimizers = Optimizers(named, "adamw", WEIGHT_DECAY, BETAS, fp16)
            for epoch in range(recipe.epochs):
                order = shuffled(epoch * n + np.arange(n), n, seed_of(seed, "order"))
                for first in range(0, n, recipe.batch):
                    laid = self.lay(self.train.texts, order[first : first + recipe.batch])
                    targets = torch.from_numpy(self.train.labels[laid.item]).to(device)
                    with self.runtime.autocast():
                        scores = classifier(laid.read(laid.rows).to(device)).float()  # (n, labels)
                    loss = F.cross_entropy(scores, targets)
                    if not loss.isfinite():
                        raise ValueError(
                            f"--finetune: the loss is {loss.item()} at step {step} of seed {seed}:"
                            f" choose an --lr below {recipe.lr:g}"
                        )
                    (loss * optimizers.loss_scale.value).backward()
                    optimizers.clip_gradients(CLIP)
                    optimizers.step(rate(step, self.steps, recipe.lr))
                    step += 1
                    stepped()
        return classifier


def rate(step: int, steps: int, peak: float) -> float:
    """The learning rate in the middle of a step: up over the first tenth, then down to 0."""
    warmup = math.ceil(WARMUP * steps)
    return lr_at(OptimConfig(tokens=steps, lr=peak, warmup_tokens=warmup), step + 0.5)


def answers_of(classifier: Classifier, laid: Laid, runtime: Runtime, at_once: int) -> np.ndarray:
    """(n,) the label with the highest score for each example, found by this rank alone."""

    def measure(batch: Batch) -> tuple[Tensor, Tensor]:
        scores = classifier(batch.to(runtime.device))  # (n, labels)
        return asked_at(batch, classifier.model.config.kind).flatten(), scores.argmax(1).cpu()

    alone = replace(runtime, rank=0, world_size=1)
    return sums_by_item(measure, laid, classifier, alone, columns=1, at_once=at_once)[:, 0]
