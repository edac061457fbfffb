"""Cross-entropy of rows of logits: rate times -log softmax at x, with gradient rate (softmax - e_x)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def prepare(*told: Tensor) -> tuple[Tensor, ...]:
    """Tokens and scalars of all rows, before some at a time are asked for: nothing is to be done."""
    return told


def rows(
    logits: Float[Tensor, "N V"],
    k: Int[Tensor, "N"],
    x: Int[Tensor, "N"],
    scalars: Float[Tensor, "1 N"],
    masked: bool,
    vocab: int,
    weight: Float[Tensor, "N"] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N V"] | None]:
    """The loss, and where a weight is given the gradient of weight times loss, in `dtype`. k is x_t, the mask in every row."""
    (rate,) = scalars
    index = x.long().unsqueeze(-1)
    log_mu = torch.log_softmax(logits[:, :vocab], -1)
    loss = -rate * log_mu.gather(-1, index).squeeze(-1)
    if weight is None:
        return loss, None
    others = log_mu.exp_().scatter_(-1, index, 0.0)  # at x the gradient is -(1 - mu_x), their sum
    gradient = others.scatter_(-1, index, -others.sum(-1, keepdim=True))
    gradient = gradient.mul_((rate * weight).to(gradient.dtype).unsqueeze(-1)).to(dtype)
    return loss, torch.nn.functional.pad(gradient, (0, logits.shape[-1] - vocab))
