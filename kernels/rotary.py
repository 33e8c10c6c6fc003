"""Rotary positions: queries and keys are turned by an angle, so that scores depend on distances.

Su et al., arXiv 2104.09864.
"""

import torch
from torch import Tensor


def rotation(
    positions: Tensor, head_width: int, dtype: torch.dtype = torch.float32, base: float = 10_000.0
) -> Tensor:
    """cos and sin of the angle for each position and pair, (B, T, 1, D/2, 2). Eq. 15."""
    pair = torch.arange(0, head_width, 2, device=positions.device, dtype=dtype)
    angle = positions[:, :, None, None] * base ** (-pair / head_width)  # (B, T, 1, D/2)
    return torch.view_as_real(torch.polar(torch.ones_like(angle), angle))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (x[2i], x[2i + 1]) of a head by its position's angle.

    A pair is a complex number, and the turn a complex product: one operation if uncompiled, where
    real numbers take seven. A compiler fuses those seven with the operations around them, and
    inductor does not generate code for complex numbers.

    Args:    x        (B, T, H, D) float
             rotation (B, T, 1, D/2, 2) cos and sin; everything is computed in their dtype
    Returns: (B, T, H, D) of the dtype of x, rounded once
    """
    pairs = x.to(rotation.dtype).unflatten(-1, (-1, 2))  # (B, T, H, D/2, 2)
    if torch.compiler.is_compiling():
        even, odd = pairs.unbind(-1)  # (B, T, H, D/2) each
        cos, sin = rotation.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        product = torch.view_as_complex(pairs) * torch.view_as_complex(rotation)
        turned = torch.view_as_real(product)
    return turned.flatten(-2).to(x.dtype)  # (B, T, H, D)
