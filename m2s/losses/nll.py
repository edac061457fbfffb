"""The negative log-likelihood of clean tokens, from which the cross entropies are made."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def nll_of_tokens(logits: Float[Tensor, "*site K"], x_0: Int[Tensor, "*site"]) -> Float[Tensor, "*site"]:
    """Compute -log softmax(logits)[x_0] at every position.

    Args:
        logits: Logits of the clean tokens, [*site, K].
        x_0: Clean tokens, [*site].

    Returns:
        Nats, [*site], in the dtype of `logits`.
    """
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, -2), x_0.long().flatten(), reduction="none")
    return flat.reshape(x_0.shape)
