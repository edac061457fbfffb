"""Rotary positions (Su et al. 2021): queries and keys turned by angles that grow with the position.

The product of a query turned by p and a key turned by q depends on p - q alone.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.belief.output import full


def angles(
    length: int, width: int, device: torch.device | None = None, slowest: float = 10_000.0
) -> tuple[Float[Tensor, "{length} half"], Float[Tensor, "{length} half"]]:
    """cos and sin of p slowest^{-2i/width} for positions p < length and i < width/2 (float32)."""
    frequency = slowest ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angle = torch.arange(length, dtype=torch.float32, device=device).unsqueeze(-1) * frequency
    return angle.cos(), angle.sin()


def rotate(
    x: Float[Tensor, "*batch L D"], cos: Float[Tensor, "L half"], sin: Float[Tensor, "L half"]
) -> Float[Tensor, "*batch L D"]:
    """(x_i, x_{i + D/2}) turned by the angle of its position, in float32 at least; the dtype of x is kept."""
    first, second = full(x).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
