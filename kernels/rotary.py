"""Rotary positions: queries and keys are turned by an angle, so that scores tell distances.

Su et al., arXiv 2104.09864.
"""

import torch
from torch import Tensor


def rotation(
    positions: Tensor, head_width: int, dtype: torch.dtype = torch.float32, base: float = 10_000.0
) -> Tensor:
    """e^(i angle) for each position and pair, (B, T, 1, D/2) complex. arXiv 2104.09864, eq. 15."""
    pair = torch.arange(0, head_width, 2, device=positions.device, dtype=dtype)
    angle = positions[:, :, None, None] * base ** (-pair / head_width)  # (B, T, 1, D/2)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (x[2i], x[2i + 1]) of a head, a complex number, by its position's angle.

    Args: x        (B, T, H, D)
          rotation (B, T, 1, D/2) complex, of modulus 1
    """
    pairs = x.to(rotation.real.dtype).unflatten(-1, (-1, 2))  # (B, T, H, D/2, 2)
    turned = torch.view_as_complex(pairs) * rotation  # (B, T, H, D/2)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)  # (B, T, H, D)
