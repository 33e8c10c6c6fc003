"""Fine-tuning a trained model as a classifier, and how often it is right. The run stays as it is.

A BERT is asked at [CLS], through its pooler if it was trained with one; a GPT at the last token of
the text. The examples of a step are packed into rows, isolated from each other.

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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import Transformer
from support.base.rng import seed_of, shuffled
from support.base.runtime import Runtime
from support.evaluation.scoring import Subject
from support.rows.batch import Batch
from support.rows.bert import Pairs, SpecialIds
from support.rows.samples import SPECIAL_TOKENS
from support.step.optim import OptimConfig, Optimizers, lr_at
from support.text.holdout import is_held_out
from support.text.reading import Document, read_objects
from support.text.store import Store

# ---- examples
#
# Labelled texts, or pairs of texts, as files have them and as tokens. No model, no training.
#
# A line is a JSON object with a "label", a string or a whole number, and one of these:
#
#     text; sentence                                            a text
#     text_a, text_b; sentence1, sentence2;                     a pair
#     premise, hypothesis; question, sentence; question1, question2; question, passage
#
# A BERT reads [CLS] text [SEP], or [CLS] a [SEP] b [SEP]; a GPT reads end-of-text and the text, or
# a pair a line each. What is longer than a row is cut at its end, of a pair the longer part first,
# as BERT's authors did (Devlin et al., arXiv 1810.04805).


PAIRS = (
    ("text_a", "text_b"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("question", "passage"),
)
FIELDS = (*PAIRS, ("text",), ("sentence",))
DEV = 5  # one example in so many is held out, where there is no file of others


class Example(NamedTuple):
    where: str  # file:line
    texts: tuple[str, ...]  # one, or two of a pair
    label: str


class Examples(NamedTuple):
    """Two lists of examples, and the labels that those for training have."""

    train: list[Example]
    dev: list[Example]
    labels: list[str]  # in order
    held_out: bool  # dev is a part of the same file

    @property
    def majority(self) -> float:
        """Accuracy on dev of the label that training has most often."""
        commonest = Counter(example.label for example in self.train).most_common(1)[0][0]
        return sum(example.label == commonest for example in self.dev) / len(self.dev)


def read_examples(file: str | Path, dev_file: str | Path | None = None) -> Examples:
    """Read examples; without a second file a fifth of them is held out by a hash of the text.

    Raises: ValueError naming the file and line: no JSON, fields that are missing or change, a label
            that training has not; or if one of the two lists is empty or knows one label only
    """
    train = list(examples_of(file))
    if dev_file is not None:
        dev = list(examples_of(dev_file))
    else:
        held_out = [is_held_out(Document(None, "\n".join(one.texts)), DEV) for one in train]
        dev = [one for one, out in zip(train, held_out, strict=True) if out]
        train = [one for one, out in zip(train, held_out, strict=True) if not out]
    for what, part in (("to train on", train), ("to test on", dev)):
        if not part:
            raise ValueError(
                f"{file if dev_file is None else dev_file}: has no example {what}: add some, or"
                " name a file of others with --dev"
            )
    labels = sorted({example.label for example in train})
    if len(labels) < 2:
        raise ValueError(f"{file}: all examples to train on have label {labels[0]}: add others")
    for one in dev:
        if one.label not in labels:
            known = ", ".join(labels[:8])
            raise ValueError(f"{one.where}: label {one.label} is not among training's: {known}")
        if len(one.texts) != len(train[0].texts):
            raise ValueError(f"{one.where}: pairs and single texts do not mix: choose one of them")
    return Examples(train, dev, labels, dev_file is None)


def examples_of(file: str | Path) -> Iterator[Example]:
    names: tuple[str, ...] | None = None
    for where, line in read_objects(file):
        names = names or next((n for n in FIELDS if set(n) <= set(line)), None)
        if names is None:
            known = "; ".join(", ".join(fields) for fields in FIELDS)
            raise ValueError(f"{where}: has no text: it needs one of these: {known}")
        texts = tuple(line.get(name) for name in names)
        for name, text in zip(names, texts, strict=True):
            if not isinstance(text, str):
                found = "is no text in quotes" if name in line else "is missing"
                raise ValueError(f"{where}: {name} {found}, as the lines before it have it")
        if not isinstance(line.get("label"), str | int):
            raise ValueError(f"{where}: label is missing, or no text or whole number")
        yield Example(where, texts, str(line["label"]))
    if names is None:
        raise ValueError(f"{file}: has no example: write one a line, as a JSON object")


class Encoded(NamedTuple):
    """Examples as documents of a store in memory."""

    store: Store
    spans: np.ndarray  # (n, 2) what is read of each; of a GPT end-of-text after it
    pairs: Pairs | None  # of a BERT, where its parts begin
    special_tokens: int  # that a row has besides those of each
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
    between = [] if is_bert or not are_pairs else encoding.encode_ordinary("\n")
    special_tokens = SPECIAL_TOKENS["pairs" if are_pairs else "bert"] if is_bert else 0
    room = seq_len - max(special_tokens, 1) - len(between)  # a GPT's for end-of-text
    firsts = encoding.encode_ordinary_batch([one.texts[0] for one in examples])
    seconds = encoding.encode_ordinary_batch([one.texts[-1] for one in examples])
    if not are_pairs:
        seconds = [[]] * len(examples)
    texts, first = [], []
    for a, b in zip(firsts, seconds, strict=True):
        of_a, of_b = lengths_within(room, len(a), len(b))
        first.append(of_a)
        texts.append([*a[:of_a], *between, *b[:of_b], encoding.eot_token])
    cut = sum(len(a) + len(b) > room for a, b in zip(firsts, seconds, strict=True))
    tokens = np.array([*chain(*texts)], np.uint32)
    offsets = np.cumsum([0, *map(len, texts)])
    meta = {"end_of_text": encoding.eot_token, "vocab_size": encoding.n_vocab}
    store = Store(Path(examples[0].where.rpartition(":")[0]), meta, tokens, offsets, 0, 0)
    spans = np.stack((offsets[:-1], offsets[1:] - is_bert), axis=1)
    numbers = np.array([labels.index(one.label) for one in examples])
    sizes = np.array(first)
    pairs = Pairs(sizes, spans[:, 0] + sizes) if is_bert and are_pairs else None
    return Encoded(store, spans, pairs, special_tokens, numbers, cut)


def lengths_within(room: int, first: int, second: int) -> tuple[int, int]:
    """How many tokens of two parts are kept, at the cost of the longer one: (8, 3, 9) -> (3, 5)"""
    if first + second <= room:
        return first, second
    first = min(first, max(room - second, room - room // 2))
    return first, min(second, room - first)


WARMUP = 0.1  # of the steps
WEIGHT_DECAY, BETAS, CLIP, DROPOUT = 0.01, (0.9, 0.999), 1.0, 0.1


class Recipe(NamedTuple):
    seeds: int = 3
    epochs: int = 3
    lr: float = 3e-5
    batch: int = 32


DEFAULTS = Recipe()._asdict()


class Packed(NamedTuple):
    """Examples as rows."""

    batch: Batch
    order: np.ndarray  # (n,) the examples in reading order


Pack = Callable[[Encoded, np.ndarray], Packed]  # the examples of these numbers


def compare(
    subject: Subject,
    given: Examples,
    pack: Callable[[Encoded, np.ndarray, int, SpecialIds | None], Packed],
) -> dict[str, Any]:
    """Fine-tune with several seeds; print how often each is right, and return it as JSON has it.

    Args: pack the examples of some numbers -> rows of so many tokens, with a BERT's special ids
    """
    args, here, settings, model, encoding, special_ids, where = subject
    chosen = {name: getattr(args, name) or default for name, default in DEFAULTS.items()}
    recipe, seq_len = Recipe(**chosen), settings.data.seq_len
    how = (given.labels, encoding, seq_len, special_ids is not None)
    train, dev = encoded(given.train, *how), encoded(given.dev, *how)

    def pack_rows(part: Encoded, numbers: np.ndarray) -> Packed:
        return pack(part, numbers, seq_len, special_ids)

    shares = accuracies(model, train, dev, len(given.labels), recipe, pack_rows, here)
    mean = sum(shares) / len(shares)
    spread = f"{min(shares):.1%} to {max(shares):.1%}, {len(shares)} seeds"
    subject.say(
        f"{where}: {args.finetune}: dev accuracy {mean:.1%} ({spread}); always the label that"
        f" training has most often {given.majority:.1%}"
    )
    dev_is = "held out by a hash of the text" if given.held_out else f"of {args.dev}"
    subject.say(
        f"{len(given.train):,} examples to train on, {len(given.dev):,} {dev_is},"
        f" {len(given.labels)} labels; {recipe.epochs} epochs in steps of {recipe.batch} at"
        f" {recipe.lr:g}"
    )
    if cut := train.cut + dev.cut:
        subject.say(f"{cut:,} examples are longer than a row and lose their end")
    counts = {"train": len(given.train), "dev": len(given.dev), "labels": given.labels, "cut": cut}
    accuracy_of = {"mean": mean, "least": min(shares), "most": max(shares), "of_seed": shares}
    found = {"file": args.finetune, "accuracy": accuracy_of, "majority": given.majority}
    return {"finetune": {**found, **counts, **chosen}}


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
    """(B, T) bool: the first token of every document of a BERT, the last of a GPT."""
    _, _, positions, doc_ids = batch.with_documents()
    if kind == "bert":
        return (positions == 0) & (doc_ids >= 0)
    following = F.pad(doc_ids[:, 1:], (0, 1), value=-1)  # (B, T)
    return (doc_ids >= 0) & (following != doc_ids)


def accuracies(
    model: Transformer,
    train: Encoded,
    dev: Encoded,
    labels: int,
    recipe: Recipe,
    pack: Pack,
    runtime: Runtime,
) -> list[float]:
    """Fine-tune copies of a model, one for each seed from 1 on; each one's accuracy on dev.

    Ranks take turns at seeds, so their number changes nothing but the time.

    Raises: ValueError if a loss is not finite
    """
    seeds = range(1, recipe.seeds + 1)
    own = seeds[runtime.rank :: runtime.world_size]
    steps = recipe.epochs * math.ceil(len(train.labels) / recipe.batch)
    hidden = not runtime.is_rank0 or None  # None: shown where there is a terminal
    found = {}
    with tqdm(total=len(own) * steps, unit="step", disable=hidden, leave=False) as bar:
        for seed in own:
            bar.set_description(f"seed {seed} of {recipe.seeds}")
            tuned = finetuned(model, train, labels, recipe, pack, runtime, seed, bar)
            found[seed] = accuracy(tuned, dev, recipe.batch, pack, runtime)
    found = {seed: share for part in runtime.gather(found) for seed, share in part.items()}
    return [found[seed] for seed in seeds]


def finetuned(
    model: Transformer,
    train: Encoded,
    labels: int,
    recipe: Recipe,
    pack: Pack,
    runtime: Runtime,
    seed: int,
    bar: tqdm,
) -> Classifier:
    """A copy of the model after some epochs; `seed` decides its head, its order and its dropout."""
    device = runtime.device
    numbers = np.arange(len(train.labels))
    steps = recipe.epochs * math.ceil(len(numbers) / recipe.batch)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(seed, "finetune"))
        classifier = Classifier(copy.deepcopy(model), labels).to(device).train()
        fp16 = runtime.dtype == torch.float16
        named = dict(classifier.named_parameters())
        optimizers = Optimizers(named, "adamw", WEIGHT_DECAY, BETAS, fp16)
        step = 0
        for epoch in range(recipe.epochs):
            draws = epoch * len(numbers) + numbers
            order = shuffled(draws, len(numbers), seed_of(seed, "order"))
            for first in range(0, len(order), recipe.batch):
                chosen = pack(train, order[first : first + recipe.batch])
                targets = torch.from_numpy(train.labels[chosen.order]).to(device)
                with runtime.autocast():
                    scores = classifier(chosen.batch.to(device)).float()  # (n, labels)
                loss = F.cross_entropy(scores, targets)
                if not loss.isfinite():
                    message = f"the loss is {loss.item()} at step {step} of seed {seed}"
                    raise ValueError(f"--finetune: {message}: choose an --lr below {recipe.lr:g}")
                (loss * optimizers.loss_scale.value).backward()
                optimizers.clip_gradients(CLIP)
                optimizers.step(rate(step, steps, recipe.lr))
                step += 1
                bar.update()
    return classifier


def rate(step: int, steps: int, peak: float) -> float:
    """The learning rate in the middle of a step: up over the first tenth, then down to 0."""
    warmup = math.ceil(WARMUP * steps)
    return lr_at(OptimConfig(tokens=steps, lr=peak, warmup_tokens=warmup), step + 0.5)


@torch.no_grad()
def accuracy(
    classifier: Classifier, examples: Encoded, at_once: int, pack: Pack, runtime: Runtime
) -> float:
    """The share of examples whose label has the highest score."""
    classifier.eval()
    numbers, right = np.arange(len(examples.labels)), 0
    for first in range(0, len(numbers), at_once):
        chosen = pack(examples, numbers[first : first + at_once])
        with runtime.autocast():
            scores = classifier(chosen.batch.to(runtime.device))  # (n, labels)
        right += int((scores.argmax(1).cpu().numpy() == examples.labels[chosen.order]).sum())
    return right / len(numbers)
