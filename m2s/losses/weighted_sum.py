"""The weighted sum of a loss over all sites, with its gradient found on the way where an operation can do that."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2s.heads import Head, LogScore, Posterior
from m2s.losses.masked_cross_entropy import absorbing, masked_cross_entropy
from m2s.losses.objective import Loss, apply_weight
from m2s.losses.score_entropy import check_pair, row_loss_spec, score_entropy
from m2s.ops import linear_loss, uses_triton
from m2s.ops.last_layer import Output, Unprojected
from m2s.process import RankOne

FUSED: tuple[Loss, ...] = (score_entropy, masked_cross_entropy)


def weighted_sum(
    loss: Loss,
    head: Head,
    output: Output,
    x_0: Int[Tensor, "B *site"],
    x_t: Int[Tensor, "B *site"],
    t: Float[Tensor, "B"],
    weight: Float[Tensor, "B *site"],
    max_masked: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "B *site"]]:
    """sum of weight times loss(head, output, x_0, x_t, t), and its terms, which carry no gradient.

    Where it `picks` masked sites out, `room` is the number of rows to make of them, whatever their own: then no shape depends
    on a value, and the host waits for none. It must be 1 at least; more masked sites than room make NaN of the sum.
    """
    if isinstance(output, Unprojected) and uses_triton(output.hidden) and loss in FUSED:
        if loss is masked_cross_entropy:
            absorbing(head)
        rows = row_loss_spec(head, x_0, x_t, t)
        if rows is not None:
            check_pair(head.process, x_0, x_t, t)
            if skips_unmasked(loss, head):
                return _of_masked_sites(output, x_t, x_0, rows, weight, max_masked)
            return linear_loss.weighted_sum(output, x_t, x_0, rows, weight)
    terms = apply_weight(loss(head, output, x_0, x_t, t), weight)
    return terms.sum(), terms.detach()


def skips_unmasked(loss: Loss, head: Head) -> bool:
    """Whether the fused `total` leaves out all sites but the masked ones: no rate leads into the others, whose loss is 0."""
    only_masks = isinstance(head.process, RankOne) and head.process.is_pure_mask
    return loss in FUSED and isinstance(head, Posterior | LogScore) and only_masks


def _of_masked_sites(
    output: Unprojected, x_t: Tensor, x_0: Tensor, rows: linear_loss.RowLossSpec, weight: Tensor, max_masked: int | None
) -> tuple[Tensor, Tensor]:
    """`linear_loss.total`, with what is not masked, and so counts for nothing, left out before the last layer."""
    masked, hidden = torch.eq(x_t.reshape(-1), rows.process.vocab), output.hidden.reshape(-1, output.hidden.shape[-1])
    count = len(masked)
    at = masked.nonzero().squeeze(-1) if max_masked is None else _places(masked, max_masked)
    near = at.clamp(max=count - 1)  # what has no site is the last one once more, with a weight of 0
    token, clean, weight = (value.reshape(-1)[near] for value in (x_t, x_0, weight))
    if max_masked is not None:
        weight = torch.where(at < count, weight, 0)
        weight = torch.where(masked.sum() > max_masked, torch.nan, weight)
    some = Unprojected(_Picked.apply(hidden, at), output.weight, output.bias)
    value, terms = linear_loss.weighted_sum(some, token, clean, rows._replace(scalars=rows.scalars[:, near]), weight)
    return value, terms.new_zeros(count + 1).index_copy_(0, at, terms)[:count].reshape(x_t.shape)


def _places(masked: Tensor, max_masked: int) -> Tensor:
    """Where the first `room` true entries are; one past the end for each that is lacking."""
    count = len(masked)
    order = torch.where(masked, masked.cumsum(0) - 1, max_masked).clamp(max=max_masked)
    indices = torch.arange(count, device=masked.device)
    return indices.new_full((max_masked + 1,), count).index_copy_(0, order, indices)[:max_masked]


class _Picked(torch.autograd.Function):
    """Rows at places that differ, but for those one past the end: there is the last row, which gets no gradient from them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.count = len(rows)
        return rows.index_select(0, at.clamp(max=len(rows) - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors  # a copy, where that of an index would sort them in order to add
        return upstream.new_zeros(ctx.count + 1, upstream.shape[-1]).index_copy_(0, at, upstream)[: ctx.count], None
