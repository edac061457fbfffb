"""Score entropy of an unconstrained log-score in torch: h(s, r) = r (e^d - 1 - d), d = log s - log r.

`naive.py` has the definition. The gradient with respect to log s is n r (e^d - 1) = n (s - r). For a rank-one process the ratio
r_y takes at most three values in a row (clean y, y = x_0, the mask), so only the output and its gradient are vectors over the
vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.row_blocks import block_rows
from m2s.ops.row_blocks import prepare as prepare
from m2s.process import SiteCoefficients
from m2s.transforms import is_transformed


def bregman(d: Tensor) -> Tensor:
    """Compute e^d - 1 - d, by its series for small d, where the difference would cancel.

    Args:
        d: Argument.

    Returns:
        The value, with the shape of `d`.
    """
    series = torch.full_like(d, 1 / 40320)
    for factorial in (5040, 720, 120, 24, 6, 2):
        series = series * d + 1 / factorial
    return torch.where(d.abs() < (0.2 if d.dtype == torch.float32 else 0.02), series * d * d, torch.expm1(d) - d)


def entropy_from_logs(
    log_score: Float[Tensor, "*site S"], log_ratio: Float[Tensor, "*site S"], weight: Float[Tensor, "*site S"]
) -> Float[Tensor, "*site"]:
    """Compute sum_y weight_y h(s_y, r_y) for arbitrary ratios and weights, with ordinary autograd.

    A weight can be as small as its ratio is large, so their product is formed in logarithms: w h = w r (e^d - 1 - d), or
    w s - w r (1 + d).

    Args:
        log_score: log s.
        log_ratio: log r; -inf stands for r = 0, where h(s, 0) = s.
        weight: Weight of each state; 0 contributes exactly 0.

    Returns:
        The sum over states.
    """
    counted = weight > 0
    compared = counted & (log_ratio > -torch.inf)
    log_weight = torch.log(weight.where(counted, 1))
    log_score = torch.where(counted, log_score, 0)
    log_ratio = torch.where(compared, log_ratio, 0)
    d = torch.where(compared, log_score - log_ratio, 0)
    weighted_ratio, weighted_score = torch.exp(log_weight + log_ratio), torch.exp(log_weight + log_score)
    near = d.abs() < 1
    h = torch.where(near, weighted_ratio * bregman(d.where(near, 0)), weighted_score - weighted_ratio * (1 + d))
    return torch.where(compared, h, torch.where(counted, weighted_score, 0)).sum(-1)


def differentiable_score_entropy(
    log_score: Float[Tensor, "*site S"],
    x_0: Int[Tensor, "*site"],
    x_t: Int[Tensor, "*site"],
    site: SiteCoefficients,
    mask: int | None,
) -> Float[Tensor, "*site"]:
    """Compute the same as `unconstrained_score_entropy` in plain torch, which autograd differentiates any number of times.

    It holds several float64 tensors over the vocabulary.

    Args:
        log_score: Log-scores over all states.
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars of the process at every position, in float64 where the device has it.
        mask: The mask token, or None.

    Returns:
        The loss of every position in nats, in the dtype of `site`.
    """
    alpha, clean, at_mask, rate = (value.unsqueeze(-1) for value in (site.alpha, site.clean, site.mask, site.rate))
    states = torch.arange(log_score.shape[-1], device=log_score.device)
    p_y = clean if mask is None else torch.where(states == mask, at_mask, clean)
    p_y = torch.where(states == x_0.long().unsqueeze(-1), alpha + p_y, p_y)  # P_t(y|x_0)
    p_k = torch.where(x_0 == x_t, site.stay, site.m_k).unsqueeze(-1)
    reached = p_y > 0
    log_ratio = torch.where(reached, torch.log(p_y.where(reached, 1)) - torch.log(p_k.where(p_k > 0, 1)), -torch.inf)
    weight = torch.where((p_k > 0) & (states != x_t.long().unsqueeze(-1)), rate, 0)
    return entropy_from_logs(log_score.to(weight.dtype), log_ratio, weight)


def _split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 scalar as a sum of two numbers of `dtype`, so that subtracting it keeps all digits."""
    high = value.to(dtype)
    return high, (value - high.to(value.dtype)).to(dtype)


def row_losses(
    logits: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    x_0: Int[Tensor, "N"],
    row_scalars: Float[Tensor, "5 N"],
    has_mask: bool,
    vocab: int,
    weight: Float[Tensor, "N"] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N V"] | None]:
    """Compute the loss of rows of log-scores and, given weights, its gradient.

    Args:
        logits: Network outputs: log-scores plus the shift of the row. The first `vocab` columns count, and with a mask one
            more.
        x_t: Current tokens.
        x_0: Clean tokens.
        row_scalars: As `row_scalars` stacks them.
        has_mask: Whether the process has a mask, the state `vocab`.
        vocab: Number of clean tokens.
        weight: Weight of each row, or None for the loss alone.
        dtype: Dtype of the gradient.

    Returns:
        The loss, and the gradient of weight times loss in `dtype`, or None without a weight.
    """
    states = vocab + 1 if has_mask else vocab
    gradient = None if weight is None else torch.zeros(logits.shape, dtype=dtype, device=logits.device)
    log_r, log_r_x, log_r_mask, rate, shift = (value.unsqueeze(-1) for value in row_scalars)
    rate = rate.to(logits.dtype)
    loss = torch.empty_like(rate)
    k, x = x_t.long().unsqueeze(-1), x_0.long().unsqueeze(-1)
    size = block_rows(logits)
    for start in range(0, len(logits), size):
        at = slice(start, start + size)
        value = logits[at, :states]
        logs = (log_r[at], log_r_x[at], log_r_mask[at])
        d, ratio = differences(value, x[at], *logs, shift[at], vocab if has_mask else None)
        h = torch.where(ratio > 0, ratio * bregman(d), d.exp()).scatter_(-1, k[at], 0.0)
        loss[at] = torch.where(rate[at] > 0, rate[at] * h.sum(-1, keepdim=True), 0)
        if gradient is not None and weight is not None:
            scale = rate[at] * weight[at, None].to(rate.dtype)
            slope = torch.where(ratio > 0, ratio * torch.expm1(d), d.exp()).scatter_(-1, k[at], 0.0)
            gradient[at, :states] = torch.where(scale != 0, scale * slope, 0).to(dtype)
    return loss.squeeze(-1), gradient


class _UnconstrainedScoreEntropy(torch.autograd.Function):
    """The loss of each row and, as a second result, its gradient g, which is computed in the forward pass.

    g_y = n (s_y - r_y) has the derivative n s_y = g_y + n r_y with respect to log s_y. So second derivatives need g alone, and
    the log-scores are not stored. g is a result so that autograd knows what it was computed from.
    """

    @staticmethod
    def forward(
        ctx: Any, log_score: Tensor, k: Tensor, x: Tensor, row_scalars: Tensor, has_mask: bool, vocab: int
    ) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(row_scalars[0]) if ctx.needs_input_grad[0] else None
        loss, gradient = row_losses(log_score, k, x, row_scalars, has_mask, vocab, ones, log_score.dtype)
        if gradient is None:
            return loss, log_score.new_empty(0)
        if not torch.compiler.is_compiling():  # which knows that the zeros in place of None are not used
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradient, k, x, row_scalars)
        ctx.has_mask = has_mask
        return loss, gradient

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, upstream_of_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient, k, x, row_scalars = ctx.saved_tensors
        result = None if upstream is None else gradient * upstream.unsqueeze(-1)
        if upstream_of_gradient is not None and not torch.compiler.is_compiling():  # of a second derivative
            second = _second_derivative(gradient, k, x, row_scalars, ctx.has_mask) * upstream_of_gradient
            result = second if result is None else result + second
        return (result, *(None for _ in range(5)))


def _second_derivative(gradient: Tensor, k: Tensor, x: Tensor, row_scalars: Tensor, has_mask: bool) -> Tensor:
    """n s_y = g_y + n r_y for every row, 0 at y = k."""
    log_r, log_r_x, log_r_mask, rate, _ = (value.unsqueeze(-1) for value in row_scalars)
    states = torch.arange(gradient.shape[-1], device=gradient.device)
    ratio = torch.where(states == x.unsqueeze(-1), log_r_x, log_r)
    if has_mask:
        ratio = torch.where(states == len(states) - 1, log_r_mask, ratio)
    at_k = states == k.unsqueeze(-1)
    return torch.where(at_k | (rate == 0), 0, gradient + (rate * ratio.exp()).to(gradient.dtype))


def differences(
    value: Float[Tensor, "N S"],
    x: Int[Tensor, "N 1"],
    log_r: Float[Tensor, "N 1"],
    log_r_x: Float[Tensor, "N 1"],
    log_r_mask: Float[Tensor, "N 1"],
    shift: Float[Tensor, "N 1"],
    mask: int | None,
) -> tuple[Float[Tensor, "N S"], Float[Tensor, "N S"]]:
    """Compute d = log s - log r and r for rows of log s + shift, where r takes at most three values in a row.

    Args:
        value: log s + shift.
        x: Clean tokens.
        log_r: log r of all columns but x and the mask, in float64; -inf stands for r = 0.
        log_r_x: log r at x.
        log_r_mask: log r at the mask.
        shift: Number that is subtracted from `value`, in float64.
        mask: The mask, or None.

    Returns:
        d and r in the dtype of `value`; where r = 0, d = log s.
    """

    def against(entry: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """d and r of entries that have the same ratio."""
        finite = log_ratio > -torch.inf
        high, low = _split(log_ratio.where(finite, 0) + shift, value.dtype)
        return (entry - high) - low, log_ratio.exp().to(value.dtype)

    d, ratio = against(value, log_r)
    ratio = ratio.expand_as(value).clone()
    columns = [(x, log_r_x)]
    if mask is not None:
        columns.append((torch.full_like(x, mask), log_r_mask))
    for column, log_ratio in columns:
        difference, column_ratio = against(value.gather(-1, column), log_ratio)
        d.scatter_(-1, column, difference)
        ratio.scatter_(-1, column, column_ratio)
    return d, ratio


def row_scalars(
    x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], site: SiteCoefficients, shift: Float[Tensor, "*site"] | None = None
) -> Float[Tensor, "5 N"]:
    """Compute the row scalars of this loss.

    Args:
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars of the process at every position.
        shift: Number that is subtracted from the network outputs to get log-scores; 0 by default.

    Returns:
        `[5, N]`: log r for clean y, log r for y = x_0, log r for the mask, n(k), shift. log r is -inf where r = 0.
    """
    p_k = torch.where(x_0 == x_t, site.stay, site.m_k)  # P_t(x_t|x_0)
    log_p_k = torch.log(p_k.where(p_k > 0, 1))

    def log_ratio(mass: Tensor) -> Tensor:
        """log(mass / P_t(x_t|x_0)), -inf where mass = 0."""
        return torch.where(mass > 0, torch.log(mass.where(mass > 0, 1)) - log_p_k, -torch.inf).reshape(-1)

    rate = torch.where(p_k > 0, site.rate, 0).reshape(-1)
    shifts = torch.zeros_like(rate) if shift is None else shift.reshape(-1).to(rate)
    return torch.stack([log_ratio(site.clean), log_ratio(site.alpha + site.clean), log_ratio(site.mask), rate, shifts])


def unconstrained_score_entropy(
    log_score: Float[Tensor, "*site S"],
    x_0: Int[Tensor, "*site"],
    x_t: Int[Tensor, "*site"],
    site: SiteCoefficients,
    mask: int | None,
    shift: Float[Tensor, "*site"] | None = None,
) -> Float[Tensor, "*site"]:
    """Compute n(k) sum_{y != k} h(s_y, r_y) for log-scores of a rank-one process (Eq. 8).

    Args:
        log_score: Log-scores over all states, plus `shift`.
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars of the process at every position, in float64 where the device has it.
        mask: The mask token, or None.
        shift: Number that is subtracted from `log_score`; 0 by default.

    Returns:
        The loss of every position in nats, in the dtype of `log_score`.
    """
    if is_transformed() or any(value.requires_grad for value in (*site, *(() if shift is None else (shift,)))):
        values = log_score if shift is None else log_score.to(shift.dtype) - shift.unsqueeze(-1)
        return differentiable_score_entropy(values, x_0, x_t, site, mask).to(log_score.dtype)
    states = log_score.shape[-1]
    vocab = states if mask is None else mask
    flat = log_score.reshape(-1, states)
    scalars = row_scalars(x_0, x_t, site, shift)
    loss, _ = _UnconstrainedScoreEntropy.apply(flat, x_t.reshape(-1), x_0.reshape(-1), scalars, mask is not None, vocab)
    return loss.reshape(x_0.shape)
