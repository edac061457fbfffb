"""The weighted sum of a loss over all sites, with its gradient found on the way where an operation can do that."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.belief import Head, Output, Unprojected
from m2s.objective.masked import absorbing, masked_cross_entropy
from m2s.objective.module import Loss, weighted
from m2s.objective.score_entropy import pair, rows_of, score_entropy
from m2s.ops import fused, linear_loss


def total(
    loss: Loss,
    head: Head,
    output: Output,
    x_0: Int[Tensor, "B *site"],
    x_t: Int[Tensor, "B *site"],
    t: Float[Tensor, "B"],
    weight: Float[Tensor, "B *site"],
) -> tuple[Float[Tensor, ""], Float[Tensor, "B *site"]]:
    """sum of weight times loss(head, output, x_0, x_t, t), and its terms, which carry no gradient."""
    if isinstance(output, Unprojected) and fused(output.hidden) and loss in (score_entropy, masked_cross_entropy):
        if loss is masked_cross_entropy:
            absorbing(head)
        rows = rows_of(head, x_0, x_t, t)
        if rows is not None:
            pair(head.process, x_0, x_t, t)
            fused_total = _of_masked_sites if rows.kind == "masked" else linear_loss.total
            return fused_total(output, x_t, x_0, rows, weight)
    terms = weighted(loss(head, output, x_0, x_t, t), weight)
    return terms.sum(), terms.detach()


def _of_masked_sites(
    output: Unprojected, x_t: Tensor, x_0: Tensor, rows: linear_loss.Rows, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`linear_loss.total`, with what is not masked, and so counts for nothing, left out before the last layer."""
    at = torch.eq(x_t.reshape(-1), rows.process.vocab).nonzero().squeeze(-1)
    hidden = output.hidden.reshape(-1, output.hidden.shape[-1])[at]
    token, clean, weight = (value.reshape(-1)[at] for value in (x_t, x_0, weight))
    some = Unprojected(hidden, output.weight, output.bias)
    value, terms = linear_loss.total(some, token, clean, rows._replace(scalars=rows.scalars[:, at]), weight)
    return value, torch.zeros(x_t.numel(), dtype=terms.dtype, device=terms.device).index_copy(0, at, terms).reshape(x_t.shape)
