"""Rotary position embeddings (Su et al. 2021): queries and keys are rotated by angles that grow with the position.

The product of a query at position p and a key at position q then depends on p - q only.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def _tables(length: int, width: int, slowest: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequency = slowest ** (-torch.arange(0, width, 2, dtype=dtype, device=device) / width)
    angle = torch.arange(length, dtype=dtype, device=device).unsqueeze(-1) * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


# Opaque to a compiler, which would recompute angle, cosine and sine for every number that it rotates.
_angles = torch.library.custom_op("m2s::angles", _tables, mutates_args=())


@_angles.register_fake
def _(length: int, width: int, slowest: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    table = torch.empty(length, width, dtype=dtype, device=device)
    return table, torch.empty_like(table)


def angles(
    length: int,
    width: int,
    device: torch.device | None = None,
    slowest: float = 10_000.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Float[Tensor, "{length} {width}"], Float[Tensor, "{length} {width}"]]:
    """Return the tables of rotary position embeddings.

    Args:
        length: The number of positions.
        width: Features of an attention head, even.
        device: Where the tables are made; None: torch's default device.
        slowest: The ratio of the highest frequency, which is one, to the lowest.
        dtype: The dtype of the tables, in which they are computed; float32, or float64 for a network in float64.

    Returns:
        (cos, cos) and (-sin, sin) of p slowest^{-2i/width} for positions p and i < width/2, each [length, width].
    """
    # The first call of a custom operation imports torch's compiler, which takes a second.
    tables = _angles if torch.compiler.is_compiling() else _tables
    cos, sin = tables(length, width, slowest, torch.get_default_device() if device is None else device, dtype)
    return cos, sin
