"""Score entropy of a free log-score: h(s, r) = r (e^d - 1 - d), d = log s - log r, with gradient n r (e^d - 1) = n (s - r).

For a rank-one process the ratio r_y takes at most three values at a site, so nothing but the output and its gradient is a
K-vector.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2s.ops.posterior_entropy.naive import block_rows
from m2s.process import SiteCoefficients


def bregman(d: Tensor) -> Tensor:
    """e^d - 1 - d, by its series for small d, where the difference would cancel."""
    series = torch.full_like(d, 1 / 40320)
    for factorial in (5040, 720, 120, 24, 6, 2):
        series = series * d + 1 / factorial
    return torch.where(d.abs() < (0.2 if d.dtype == torch.float32 else 0.02), series * d * d, torch.expm1(d) - d)


def entropy_from_logs(
    log_score: Float[Tensor, "*site S"], log_ratio: Float[Tensor, "*site S"], weight: Float[Tensor, "*site S"]
) -> Float[Tensor, "*site"]:
    """sum_y weight_y h(s_y, r_y) for any weights, ordinary autograd; h(s, 0) = s, and a weight of zero gives exactly zero.

    A weight can be as small as its ratio is large, so their product is formed in logarithms: w h = w r (e^d - 1 - d), or
    w s - w r (1 + d).
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


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 scalar as two numbers of `dtype`, so that a difference with it keeps its digits."""
    high = value.to(dtype)
    return high, (value - high.to(value.dtype)).to(dtype)


def prepare(*told: Tensor) -> tuple[Tensor, ...]:
    """Tokens and scalars of all rows, before some at a time are asked for: nothing is to be done."""
    return told


def rows(
    logits: Float[Tensor, "N V"],
    k: Int[Tensor, "N"],
    x: Int[Tensor, "N"],
    scalars: Float[Tensor, "5 N"],
    masked: bool,
    vocab: int,
    weight: Float[Tensor, "N"] | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N V"] | None]:
    """The loss of log-scores (logits less the row's shift), and where a weight is given the gradient of weight times loss, in
    `dtype`."""
    states = vocab + 1 if masked else vocab
    gradient = None if weight is None else torch.zeros(logits.shape, dtype=dtype, device=logits.device)
    log_r, log_r_x, log_r_mask, rate, shift = (value.unsqueeze(-1) for value in scalars)
    rate = rate.to(logits.dtype)
    loss = torch.empty_like(rate)
    k, x = k.long().unsqueeze(-1), x.long().unsqueeze(-1)
    size = block_rows(logits)
    for start in range(0, len(logits), size):
        at = slice(start, start + size)
        value = logits[at, :states]
        logs = (log_r[at], log_r_x[at], log_r_mask[at])
        d, ratio = _differences(value, k[at], x[at], *logs, shift[at], vocab if masked else None)
        h = torch.where(ratio > 0, ratio * bregman(d), d.exp()).scatter_(-1, k[at], 0.0)
        loss[at] = torch.where(rate[at] > 0, rate[at] * h.sum(-1, keepdim=True), 0)
        if gradient is not None and weight is not None:
            scale = rate[at] * weight[at, None].to(rate.dtype)
            slope = torch.where(ratio > 0, ratio * torch.expm1(d), d.exp()).scatter_(-1, k[at], 0.0)
            gradient[at, :states] = torch.where(scale != 0, scale * slope, 0).to(dtype)
    return loss.squeeze(-1), gradient


class _FreeScoreEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_score: Tensor, k: Tensor, x: Tensor, scalars: Tensor, masked: bool, vocab: int) -> Tensor:
        ones = torch.ones_like(scalars[0]) if ctx.needs_input_grad[0] else None
        loss, gradient = rows(log_score, k, x, scalars, masked, vocab, ones, log_score.dtype)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream.unsqueeze(-1), *(None for _ in range(5)))


def _differences(
    value: Tensor, k: Tensor, x: Tensor, log_r: Tensor, log_r_x: Tensor, log_r_mask: Tensor, shift: Tensor, mask: int | None
) -> tuple[Tensor, Tensor]:
    """log s - log r and r for a block of rows, whose log-ratios are scalars for clean y, for y = x and for the mask; where
    r = 0, log s."""

    def against(entry: Tensor, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        finite = log_ratio > -torch.inf
        high, low = split(log_ratio.where(finite, 0) + shift, value.dtype)
        return (entry - high) - low, log_ratio.exp().to(value.dtype)

    d, ratio = against(value, log_r)
    ratio = ratio.expand_as(value).clone()
    columns = [(x, log_r_x)]
    if mask is not None:
        columns.append((torch.full_like(x, mask), log_r_mask))
    for column, log_ratio in columns:
        difference, own_ratio = against(value.gather(-1, column), log_ratio)
        d.scatter_(-1, column, difference)
        ratio.scatter_(-1, column, own_ratio)
    return d, ratio


def scalars(
    x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], site: SiteCoefficients, shift: Float[Tensor, "*site"] | None = None
) -> Float[Tensor, "5 N"]:
    """What a row needs besides its logits and tokens: log r for clean y, for y = x_0 and for the mask; the rate; what is taken
    from the logits."""
    reached = torch.where(x_0 == x_t, site.stay, site.own)
    log_reached = torch.log(reached.where(reached > 0, 1))

    def log_ratio(mass: Tensor) -> Tensor:
        return torch.where(mass > 0, torch.log(mass.where(mass > 0, 1)) - log_reached, -torch.inf).reshape(-1)

    rate = torch.where(reached > 0, site.rate, 0).reshape(-1)
    taken = torch.zeros_like(rate) if shift is None else shift.reshape(-1).to(rate)
    return torch.stack([log_ratio(site.clean), log_ratio(site.alpha + site.clean), log_ratio(site.mask), rate, taken])


def unconstrained_score_entropy(
    log_score: Float[Tensor, "*site S"],
    x_0: Int[Tensor, "*site"],
    x_t: Int[Tensor, "*site"],
    site: SiteCoefficients,
    mask: int | None,
    shift: Float[Tensor, "*site"] | None = None,
) -> Float[Tensor, "*site"]:
    """n(k) sum_{y != k} h(s_y, r_y) for a rank-one process; `site` holds its scalars, best in float64. `shift` is taken from
    the log-scores."""
    states = log_score.shape[-1]
    vocab = states if mask is None else mask
    flat = log_score.reshape(-1, states)
    told = scalars(x_0, x_t, site, shift)
    loss = _FreeScoreEntropy.apply(flat, x_t.reshape(-1), x_0.reshape(-1), told, mask is not None, vocab)
    return loss.reshape(x_0.shape)
