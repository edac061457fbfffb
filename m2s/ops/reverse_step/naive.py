"""Definition of a draw from the posterior: softmax, cumulative sum, inverse CDF, all in float64."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.reverse_step.routes import TokenDraw


def draw_token(
    rows: Float[Tensor, "N V"],
    k: Int[Tensor, "N"],
    offset: Float[Tensor, "N"],
    u: Float[Tensor, "N"],
    vocab: int,
    other: bool,
) -> TokenDraw:
    """Draw one token per row from softmax(rows + offset at k).

    Args:
        rows: Posterior logits; the first `vocab` columns count.
        k: Current tokens; `vocab` or more stands for the mask, which is no column.
        offset: Number added to the logit of k; infinite where k is certainly the clean token.
        u: One uniform number in [0, 1) per row.
        vocab: Number of clean tokens.
        other: Draw from the posterior without k, renormalized.

    Returns:
        Token, its probability, mu_k, and the mass of the other tokens.
    """
    known = offset == torch.inf
    is_k = torch.arange(vocab) == k[:, None]
    logits = rows[:, :vocab].double() + torch.where(is_k & ~known[:, None], offset[:, None], 0)
    mu = torch.softmax(logits, -1)
    mu_k, off = torch.where(is_k, mu, 0).sum(-1), torch.where(is_k, 0, mu).sum(-1)
    if other:
        mu = torch.where(is_k, 0, mu) / off.where(off > 0, 1)[:, None]
    cumulative = mu.cumsum(-1)
    token = torch.searchsorted(cumulative, (u * cumulative[:, -1]).unsqueeze(-1), right=True).squeeze(-1).clamp(max=vocab - 1)
    return TokenDraw(
        torch.where(known, k, token),
        torch.where(known, 0.0 if other else 1.0, mu.gather(-1, token.unsqueeze(-1)).squeeze(-1)),
        torch.where(known, 1.0, mu_k),
        torch.where(known, 0.0, off),
    )
