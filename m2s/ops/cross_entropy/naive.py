"""Definition of the weighted cross-entropy of rows: rate times -log softmax at the clean token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def cross_entropy(
    logits: Float[Tensor, "N V"], x_0: Int[Tensor, "N"], rate: Float[Tensor, "N"], vocab: int
) -> Float[Tensor, "N"]:
    """Compute the loss of every row from the definition, with gradients by autograd.

    Args:
        logits: Rows of logits; the first `vocab` columns count.
        x_0: Clean tokens.
        rate: Weight of each row.
        vocab: Number of clean tokens.

    Returns:
        The loss in nats.
    """
    log_mu = torch.log_softmax(logits[:, :vocab], -1)
    return -rate * log_mu.gather(-1, x_0.long().unsqueeze(-1)).squeeze(-1)
