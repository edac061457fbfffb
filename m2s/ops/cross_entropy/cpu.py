"""Cross-entropy of rows of logits in torch, with its gradient rate (softmax - e_x) computed in place."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.row_blocks import prepare as prepare


def row_losses(
    logits: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    x_0: Int[Tensor, "N"],
    row_scalars: Float[Tensor, "1 N"],
    has_mask: bool,
    vocab: int,
    weight: Float[Tensor, "N"] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N V"] | None]:
    """Compute the loss of rows of logits and, given weights, its gradient.

    Args:
        logits: Rows of logits; the first `vocab` columns count.
        x_t: Current tokens. Not read.
        x_0: Clean tokens.
        row_scalars: The rate of each row.
        has_mask: Whether the process has a mask. Not read.
        vocab: Number of clean tokens.
        weight: Weight of each row, or None for the loss alone.
        dtype: Dtype of the gradient.

    Returns:
        The loss, and the gradient of weight times loss in `dtype`, or None without a weight.
    """
    (rate,) = row_scalars
    index = x_0.long().unsqueeze(-1)
    log_mu = torch.log_softmax(logits[:, :vocab], -1)
    loss = -rate * log_mu.gather(-1, index).squeeze(-1)
    if weight is None:
        return loss, None
    # at x the gradient is -(1 - mu_x): as a sum over the other tokens it does not cancel where mu_x is near 1
    others = log_mu.exp_().scatter_(-1, index, 0.0)
    gradient = others.scatter_(-1, index, -others.sum(-1, keepdim=True))
    gradient = gradient.mul_((rate * weight).to(gradient.dtype).unsqueeze(-1)).to(dtype)
    return loss, torch.nn.functional.pad(gradient, (0, logits.shape[-1] - vocab))
