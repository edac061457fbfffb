"""The weighted sum of a loss over all positions, with its gradient from the same op where the loss has a fused form."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.heads import FactorizedRate, Head, LogScore, Posterior
from m2s.losses.registry import Loss, entry_of, fused_spec
from m2s.losses.score_entropy import check_pair
from m2s.ops import linear_loss, uses_triton
from m2s.ops.last_layer import Output, Unprojected


def apply_weight(terms: Float[Tensor, "B *site"], weight: Float[Tensor, "B *site"] | None) -> Float[Tensor, "B *site"]:
    """Multiply the loss of each position by its weight.

    Args:
        terms: The loss of each position, [B, L].
        weight: The weights, [B, L]; None: all weights are 1.

    Returns:
        The products, [B, L]. Where the weight is 0 the product is 0, also for an infinite loss.
    """
    if weight is None:
        return terms
    validation.same_shape("weight", weight, "x_0", terms)
    return torch.where(weight == 0, 0, weight * terms)


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
    """Compute the weighted sum of a loss, by its fused form where it has one and fused kernels are active.

    Args:
        loss: The loss, a function of (head, output, x_0, x_t, t).
        head: The head.
        output: The network's output: logits, or hidden states with the last layer.
        x_0: Clean tokens, [B, L].
        x_t: Noisy tokens, [B, L].
        t: Times, [B].
        weight: The weight of each position, [B, L].
        max_masked: Where `skips_unmasked` holds: the number of rows to reserve for masked positions, at least 1. No shape then
            depends on a value, as a CUDA graph requires. More masked positions than this make the sum NaN. None: as many rows
            as there are masked positions.

    Returns:
        The sum, and its terms [B, L], which carry no gradient.
    """
    rows = fused_rows(loss, head, output, x_0, x_t, t, weight, max_masked)
    if rows is not None:
        value, terms = linear_loss.weighted_sum(*rows.arguments)
        return value, rows.at_positions(terms)
    terms = loss(head, output, x_0, x_t, t)
    validation.same_shape("the loss", terms, "x_0", x_0)
    terms = apply_weight(terms, weight)
    return terms.sum(), terms.detach()


class FusedRows(NamedTuple):
    """The rows that a fused op computes.

    Args:
        arguments: Of `m2s.ops.linear_loss.weighted_sum`: output, x_t, x_0, spec and weight, of N rows or of [B, L].
        shape: [B, L].
        at: The positions of the rows among all, [N]; an index past the end is a row to spare. None: the rows are all positions.
    """

    arguments: tuple[Unprojected, Tensor, Tensor, linear_loss.RowLossSpec, Tensor]
    shape: torch.Size
    at: Tensor | None

    def at_positions(self, terms: Tensor) -> Tensor:
        """Return the terms of the rows at their positions, and 0 elsewhere.

        Args:
            terms: The terms of the rows, in the shape of their tokens.

        Returns:
            The terms, [B, L].
        """
        if self.at is None:
            return terms
        count = self.shape.numel()
        return terms.new_zeros(count + 1).index_copy_(0, self.at, terms)[:count].reshape(self.shape)


def fused_rows(
    loss: Loss,
    head: Head,
    output: Output,
    x_0: Int[Tensor, "B *site"],
    x_t: Int[Tensor, "B *site"],
    t: Float[Tensor, "B"],
    weight: Float[Tensor, "B *site"],
    max_masked: int | None = None,
) -> FusedRows | None:
    """Return what the fused op of a loss computes.

    Args:
        loss: The loss, a function of (head, output, x_0, x_t, t).
        head: The head.
        output: The network's output: logits, or hidden states with the last layer.
        x_0: Clean tokens, [B, L].
        x_t: Noisy tokens, [B, L].
        t: Times, [B].
        weight: The weight of each position, [B, L].
        max_masked: As in `weighted_sum`.

    Returns:
        The rows; None where the output is logits, kernels do not run, or the loss has no fused form for this head.
    """
    if not (isinstance(output, Unprojected) and uses_triton(output.hidden)):
        return None
    spec = fused_spec(loss, head, x_0, x_t, t)
    if spec is None:
        return None
    check_pair(head.process, x_0, x_t, t)
    if skips_unmasked(loss, head):
        return _masked_rows(output, x_t, x_0, spec, weight, max_masked)
    return FusedRows((output, x_t, x_0, spec, weight), x_t.shape, None)


def skips_unmasked(loss: Loss, head: Head) -> bool:
    """Return whether the fused form leaves out all unmasked positions: no rate leads into them, so their loss is 0.

    Args:
        loss: The loss.
        head: The head.
    """
    entry, rank_one = entry_of(loss), head.process.rank_one
    fused = entry is not None and entry.fused is not None and entry.zero_unmasked
    return fused and isinstance(head, FactorizedRate | LogScore | Posterior) and rank_one is not None and rank_one.is_pure_mask


def _masked_rows(
    output: Unprojected, x_t: Tensor, x_0: Tensor, spec: linear_loss.RowLossSpec, weight: Tensor, max_masked: int | None
) -> FusedRows:
    """The masked positions alone, which are selected before the last layer."""
    masked, hidden = torch.eq(x_t.reshape(-1), spec.process.vocab), output.hidden.reshape(-1, output.hidden.shape[-1])
    count = len(masked)
    at = masked.nonzero().squeeze(-1) if max_masked is None else _masked_indices(masked, max_masked)
    near = at.clamp(max=count - 1)  # an unused row repeats the last position, with a weight of 0
    token, clean, weight = (value.reshape(-1)[near] for value in (x_t, x_0, weight))
    if max_masked is not None:
        weight = torch.where(at < count, weight, 0)
        weight = torch.where(masked.sum() > max_masked, torch.nan, weight)
    selected = Unprojected(_SelectRows.apply(hidden, at), output.weight, output.bias)
    return FusedRows((selected, token, clean, spec._replace(scalars=spec.scalars[:, near]), weight), x_t.shape, at)


def _masked_indices(masked: Tensor, max_masked: int) -> Tensor:
    """The indices of the first `max_masked` true entries, [max_masked], filled up with the index past the end.

    Without `nonzero`, whose shape depends on values: the host would wait for the device, and a CUDA graph cannot record it.
    """
    count = len(masked)
    order = torch.where(masked, masked.cumsum(0) - 1, max_masked).clamp(max=max_masked)
    indices = torch.arange(count, device=masked.device)
    return indices.new_full((max_masked + 1,), count).index_copy_(0, order, indices)[:max_masked]


class _SelectRows(torch.autograd.Function):
    """Rows at distinct indices. An index past the end gives the last row, which gets no gradient from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, at: Tensor) -> Tensor:
        ctx.save_for_backward(at)
        ctx.count = len(rows)
        return rows.index_select(0, at.clamp(max=len(rows) - 1))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        # The indices are distinct, so a copy will do. The backward of indexing would sort them in order to add.
        (at,) = ctx.saved_tensors
        return upstream.new_zeros(ctx.count + 1, upstream.shape[-1]).index_copy_(0, at, upstream)[: ctx.count], None
