"""Draws from the posterior in torch, exact at any vocabulary size and for any logits.

Weights are summed in float64 in blocks of 256 columns, or fewer for a small vocabulary. The block of the drawn token is found
from the block sums, then the token inside it. The weight of the current token is kept apart from the others, so that neither
hides the digits of the other.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.dtypes import float64_dtype
from m2s.ops.reverse_step.routes import TokenDraw

BLOCK = 256


def block_width(columns: int) -> int:
    """Return the columns per block: 256, or fewer where the vocabulary is small, so that little of a block is padding.

    Args:
        columns: The number of weights in a row.
    """
    return min(BLOCK, max(32, 1 << (columns - 1).bit_length()))


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
    logits, double = rows[:, :vocab], float64_dtype(rows)
    known = offset == torch.inf
    clean = k < vocab
    index = k.clamp(max=vocab - 1).unsqueeze(-1)
    logit_k = logits.gather(-1, index)
    width = block_width(vocab)
    weights = torch.empty(len(k), -(-vocab // width) * width, dtype=logits.dtype, device=logits.device)
    weights[:, vocab:] = 0
    others = weights[:, :vocab].copy_(logits)
    others.scatter_(-1, index, logit_k.masked_fill(clean.unsqueeze(-1), -torch.inf))
    top = others.amax(-1, keepdim=True)
    top = torch.where(top > -torch.inf, top, logit_k.where(logit_k > -torch.inf, 0))  # where no other token is possible
    others.sub_(top).exp_()
    blocks = weights.unflatten(-1, (-1, width))
    sums = blocks.sum(-1, dtype=double)
    others_total = sums.sum(-1)
    log_k = (logit_k.to(double) - top.to(double)).squeeze(-1) + offset.to(double).masked_fill(known, 0)
    log_k = log_k.where(clean, -torch.inf)
    # mu_k and off by the logistic function of the log-odds: both are exact where the other one is near 1
    log_odds = log_k - torch.log(others_total)
    mu_k, off = torch.sigmoid(log_odds), torch.sigmoid(-log_odds)
    weight_k = torch.zeros_like(log_k) if other else log_k.clamp(max=600).exp()  # e^600 is finite and beats every sum
    token = invert_cdf(blocks, sums, u, index.squeeze(-1), weight_k).clamp(max=vocab - 1)
    weight = torch.where(clean & (token == k), weight_k, weights.gather(-1, token.unsqueeze(-1)).squeeze(-1).to(double))
    total = others_total + weight_k
    probability = weight / total.where(total > 0, 1)
    return TokenDraw(
        torch.where(known, k, token),
        torch.where(known, 0.0 if other else 1.0, probability),
        torch.where(known, 1.0, mu_k),
        torch.where(known, 0.0, off),
    )


def invert_cdf(
    blocks: Float[Tensor, "*site N W"],
    sums: Float[Tensor, "*site N"],
    u: Float[Tensor, "*site"],
    at: Int[Tensor, "*site"] | None = None,
    more: Float[Tensor, "*site"] | None = None,
) -> Int[Tensor, "*site"]:
    """Find the index at which the cumulative sum of weights first exceeds u times their total.

    Args:
        blocks: Weights in N blocks of W.
        sums: Sum of each block.
        u: One uniform number in [0, 1) per position.
        at: Index of one weight to increase, or None.
        more: What to add to the weight at `at`, in the dtype of `sums`.

    Returns:
        The index, counted through all blocks.
    """
    width = blocks.shape[-1]
    if at is not None and more is not None:
        sums = sums.scatter_add(-1, (at // width).unsqueeze(-1), more.unsqueeze(-1))
    cumulative = sums.cumsum(-1)
    target = u.to(sums.dtype) * cumulative[..., -1]
    block = _first_above(cumulative, sums, target)
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1), 0)
    index = block[..., None, None].expand(*block.shape, 1, width)
    inside = blocks.gather(-2, index).squeeze(-2).to(sums.dtype)
    if at is not None and more is not None:
        here = torch.where(at // width == block, more, 0)
        inside = inside.scatter_add(-1, (at % width).unsqueeze(-1), here.unsqueeze(-1))
    return block * width + _first_above(inside.cumsum(-1), inside, target - before)


def _first_above(cumulative: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds the target; where rounding leaves none, the last of positive weight."""
    found = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(found, last)
