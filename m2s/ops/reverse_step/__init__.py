"""One token from the posterior of each row of logits, and the step of a sampler that goes by it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import uses_triton
from m2s.ops.reverse_step import naive
from m2s.ops.reverse_step.naive import BayesRoutes, Counter, EulerRoutes, Routes, TokenDraw

__all__ = ["BayesRoutes", "Counter", "EulerRoutes", "Routes", "TokenDraw", "draw_token"]


def draw_token(
    rows: Float[Tensor, "N V"],
    k: Int[Tensor, "N"],
    offset: Float[Tensor, "N"],
    u: Float[Tensor, "N"],
    vocab: int,
    other: bool,
) -> TokenDraw:
    """`reference.draw`, fused for rows in float32 where that is possible."""
    if rows.dtype == torch.float32 and uses_triton(rows):
        from m2s.ops.reverse_step import triton

        return triton.draw_token(rows, k, offset, u, vocab, other)
    return naive.draw_token(rows, k, offset, u, vocab, other)
