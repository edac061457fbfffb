"""One token from the posterior of each row of logits, and the step of a sampler that goes by it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.choice import fused
from m2s.ops.draw import reference
from m2s.ops.draw.reference import BayesRoutes, Counter, Drawn, EulerRoutes, Routes

__all__ = ["BayesRoutes", "Counter", "Drawn", "EulerRoutes", "Routes", "draw"]


def draw(
    rows: Float[Tensor, "N V"],
    k: Int[Tensor, "N"],
    offset: Float[Tensor, "N"],
    u: Float[Tensor, "N"],
    vocab: int,
    other: bool,
) -> Drawn:
    """`reference.draw`, fused for rows in float32 where that is possible."""
    if rows.dtype == torch.float32 and fused(rows):
        from m2s.ops.draw import triton

        return triton.draw(rows, k, offset, u, vocab, other)
    return reference.draw(rows, k, offset, u, vocab, other)
