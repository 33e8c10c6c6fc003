"""Rotary positions: rotate queries and keys by angles, so that scores depend on distances.

Su et al., arXiv 2104.09864. Llama 3.1 (arXiv 2407.21783) rotates its slow pairs even more slowly.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Scaling(NamedTuple):
    """How a model that was trained on short rows reads longer ones, as in Llama 3.1.

    A pair that makes more than `fast` turns in `original` positions keeps its speed. A pair that
    makes fewer than `slow` turns is slowed down by `factor`. In between, the speed is interpolated.
    """

    factor: float
    slow: float
    fast: float
    original: float  # positions in a row of the original training

    KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

    @classmethod
    def parsed(cls, text: str) -> "Scaling":
        """Parse factor:slow:fast:original. Example: "32:1:4:8192" for Llama 3.2 1B"""
        try:
            scaling = cls(*map(float, text.split(":")))
        except (TypeError, ValueError):
            scaling = cls(0, 0, 0, 0)
        is_positive = all(0 < number < math.inf for number in scaling)
        if not (is_positive and scaling.slow < scaling.fast):
            raise ValueError(f"rope_scaling {text!a} is not factor:slow:fast:positions")
        return scaling

    def as_published(self) -> dict[str, Any]:
        """Return the entry for a config.json of transformers."""
        values = (*self[:3], int(self.original))
        return {"rope_type": "llama3", **dict(zip(self.KEYS, values, strict=True))}


class Rotary(NamedTuple):
    """The settings that decide the angles."""

    base: float = 10_000.0
    scaling: Scaling | None = None

    def speeds(self, head_width: int, like: Tensor) -> Tensor:
        """Return (D/2,) the angle of each pair per position, on the device of `like`."""
        pair = torch.arange(0, head_width, 2, device=like.device, dtype=like.dtype)
        speeds = self.base ** (-pair / head_width)
        if self.scaling is None:
            return speeds
        factor, slow, fast, original = self.scaling
        turns = original * speeds / (2 * math.pi)
        share = ((turns - slow) / (fast - slow)).clamp(0, 1)  # weight of the unscaled speed
        return share * speeds + (1 - share) * speeds / factor


PUBLISHED = Rotary()


def rotation(positions: Tensor, head_width: int, dtype: torch.dtype, rotary: Rotary) -> Tensor:
    """Return cos and sin of the angle of each position and pair, (B, T, 1, D/2, 2). Eq. 15."""
    speeds = rotary.speeds(head_width, positions.new_empty(0, dtype=dtype))
    angle = positions[:, :, None, None] * speeds  # (B, T, 1, D/2)
    return torch.view_as_real(torch.polar(torch.ones_like(angle), angle))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair (x[2i], x[2i + 1]) of a head by its position's angle.

    Uncompiled code treats a pair as a complex number, because a complex product is one operation,
    where real numbers take seven. Compiled code uses real numbers, because a compiler fuses the
    seven with the operations around them, and inductor has no code for complex numbers.

    Args:    x        (B, T, H, D) float
             rotation (B, T, 1, D/2, 2) cos and sin; everything is computed in their dtype
    Returns: (B, T, H, D) with the dtype of x, rounded once
    """
    pairs = x.to(rotation.dtype).unflatten(-1, (-1, 2))  # (B, T, H, D/2, 2)
    if torch.compiler.is_compiling():
        even, odd = pairs.unbind(-1)  # (B, T, H, D/2) each
        cos, sin = rotation.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotation))
    return turned.flatten(-2).to(x.dtype)  # (B, T, H, D)
