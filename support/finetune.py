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
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import Transformer
from support.batch import Batch
from support.examples import Encoded, Examples, encoded
from support.masking import SpecialIds
from support.optim import Optimizers, lr_at
from support.rng import seed_of, shuffled
from support.runtime import Runtime
from support.subject import Subject

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
    return lr_at(
        step + 0.5,
        peak=peak,
        floor=0.0,
        schedule="linear",
        warmup_tokens=math.ceil(WARMUP * steps),
        budget=steps,
        decay_share=1.0,
    )


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
