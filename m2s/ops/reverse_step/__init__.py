"""Sampling steps: one token from the posterior of each row of logits, and the Bayes or Euler step that uses it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import uses_triton
from m2s.ops.reverse_step import cpu
from m2s.ops.reverse_step.routes import BayesRoutes, Counter, EulerRoutes, Routes, TokenDraw

__all__ = ["BayesRoutes", "Counter", "EulerRoutes", "Routes", "TokenDraw", "draw_token"]


def draw_token(
    rows: Float[Tensor, "N V"],
    k: Int[Tensor, "N"],
    offset: Float[Tensor, "N"],
    u: Float[Tensor, "N"],
    vocab: int,
    other: bool,
) -> TokenDraw:
    """Draw one token per row from softmax(rows + offset at k), by a Triton kernel for float32 rows where one can run.

    Args:
        rows: Posterior logits; the first `vocab` columns count.
        k: Current tokens; `vocab` stands for the mask.
        offset: Number added to the logit of k; infinite where k is certainly the clean token.
        u: One uniform number in [0, 1) per row.
        vocab: Number of clean tokens.
        other: Draw from the posterior without k, renormalized.

    Returns:
        Token, its probability, mu_k, and the mass of the other tokens.
    """
    if rows.dtype == torch.float32 and uses_triton(rows):
        from m2s.ops.reverse_step import triton  # imports the optional package triton

        return triton.draw_token(rows, k, offset, u, vocab, other)
    return cpu.draw_token(rows, k, offset, u, vocab, other)
