"""The weighted sum of a loss over all sites, with its gradient found on the way where an operation can do that."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import check
from m2s.belief import Head, Output, Unprojected
from m2s.objective.masked import absorbing, masked_cross_entropy, reveal_rate
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
    if isinstance(output, Unprojected) and fused(output.hidden):
        if loss is masked_cross_entropy:
            return _of_masked_sites(head, output, x_0, x_t, t, weight)
        if loss is score_entropy and (rows := rows_of(head, x_0, x_t, t)):
            pair(head.process, x_0, x_t, t)
            return linear_loss.total(output, x_t, x_0, rows, weight)
    terms = weighted(loss(head, output, x_0, x_t, t), weight)
    return terms.sum(), terms.detach()


def _of_masked_sites(
    head: Head, output: Unprojected, x_0: Tensor, x_t: Tensor, t: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Masked cross-entropy; sites that are not masked are left out before the last layer."""
    process = absorbing(head)
    pair(process, x_0, x_t, t)
    at = (x_t.reshape(-1) == process.vocab).nonzero().squeeze(-1)
    rate = check.align("t", reveal_rate(process, t), x_t).expand(x_t.shape)
    hidden = output.hidden.reshape(-1, output.hidden.shape[-1])[at]
    token, clean, rate, weight = (value.reshape(-1)[at] for value in (x_t, x_0, rate, weight))
    some = Unprojected(hidden, output.weight, output.bias)
    rows = linear_loss.Rows("masked", rate.unsqueeze(0), process)
    value, terms = linear_loss.total(some, token, clean, rows, weight)
    return value, torch.zeros(x_t.numel(), dtype=terms.dtype, device=terms.device).index_copy(0, at, terms).reshape(x_t.shape)
