"""What an evaluation found: of all its text, and of each document. No model is run here."""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.atomic import atomic_write


class HeldOut(NamedTuple):
    """The result of an evaluation."""

    val_loss: float  # nats per target
    val_bpb: float  # bits per byte of text; end-of-text is a target too, but has no bytes
    targets: int
    bytes: int
    nsp_accuracy: float | None = None  # share of pairs told rightly, of a BERT with --nsp
    nsp_pairs: int | None = None

    def logged(self) -> dict[str, float]:
        """The fields that there are."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        pairs = (
            ""
            if self.nsp_accuracy is None
            else f", {self.nsp_accuracy:.1%} of {self.nsp_pairs:,} pairs right"
        )
        return f"{self.val_bpb:.4f} bits per byte{pairs}"


class Documents(NamedTuple):
    """The result by document, in the store's order. Each field is (n,)."""

    numbers: np.ndarray  # in the store, from 0
    nats: np.ndarray  # summed over the targets
    targets: np.ndarray
    bytes: np.ndarray  # of the targets

    def total(self) -> HeldOut:
        nats, targets, size = (column.sum().item() for column in self[1:])
        return HeldOut(nats / targets, bits_per_byte(nats, max(size, 1)), targets, size)

    def write(self, file: Path) -> None:
        """One JSON object a document and line; bits per byte are null where it has no byte."""
        with atomic_write(file) as out:
            for number, nats, targets, size in zip(*map(np.ndarray.tolist, self), strict=True):
                bpb = bits_per_byte(nats, size) if size else None
                line = {"document": number, "tokens": targets, "bytes": size, "nats": nats}
                # NaN, which JSON does not have, is an error and leaves no file.
                out.write(json.dumps(line | {"bpb": bpb}, allow_nan=False).encode() + b"\n")


def bits_per_byte(nats: float, size: int) -> float:
    return nats / math.log(2) / size


def check_file(file: Path) -> None:
    """Refuse a file that cannot be written, before the work that it is for.

    Raises: ValueError naming --by-document
    """
    if file.is_dir():
        raise ValueError(f"--by-document {file} is a folder: name a file in it")
    if file.exists() and not file.is_file():
        raise ValueError(f"--by-document {file} is no file that can be replaced: name another")
    if not os.access(file.parent, os.W_OK):
        found = "cannot be written to" if file.parent.is_dir() else "does not exist"
        raise ValueError(f"--by-document {file}: the folder {file.parent} {found}")
