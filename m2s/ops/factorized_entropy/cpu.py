"""Score entropy of an exit rate and a jump distribution in torch, as two divergences without cancellation.

`naive.py` has the definition. With R = sum_{y != k} r_y, the true jump distribution J*_y = r_y / R and the predicted exit rate
e^{o_k} (S - 1), both in units of n(k), the loss of Neural CTMC is

    n(k) R [b(o_k + log(S - 1) - log R) + sum_{y != k} J*_y b(log J_y - log J*_y)],      b(d) = e^d - 1 - d >= 0,

where a candidate with J*_y = 0 adds J_y. Every term is non-negative. The gradient is

    n(k) R (J_y - J*_y) at y != k,      n(k) R (e^{o_k} (S - 1) / R - 1) at k.

J* takes at most three values in a row (clean y, y = x_0, the mask), as r does. R is a sum over the candidates and not
(1 - P_t(k|x_0)) / P_t(k|x_0).
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.row_blocks import block_rows
from m2s.ops.row_blocks import prepare as prepare
from m2s.ops.score_entropy.cpu import bregman, differences
from m2s.process import SiteCoefficients


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
    """Compute the loss of rows of outputs and, given weights, its gradient.

    Args:
        logits: Network outputs: the log of the exit rate at x_t, logits of the jump distribution elsewhere. The first `vocab`
            columns count, and with a mask one more.
        x_t: Current tokens.
        x_0: Clean tokens.
        row_scalars: As `row_scalars` stacks them.
        has_mask: Whether the process has a mask, the state `vocab`.
        vocab: Number of clean tokens.
        weight: Weight of each row, or None for the loss alone.
        dtype: Dtype of the gradient.

    Returns:
        The loss in the dtype of `row_scalars`, and the gradient of weight times loss in `dtype`, or None without a weight.
    """
    states = vocab + 1 if has_mask else vocab
    gradient = None if weight is None else torch.zeros(logits.shape, dtype=dtype, device=logits.device)
    log_jump, log_jump_x, log_jump_mask, exit_rate, log_exit = (value.unsqueeze(-1) for value in row_scalars)
    loss = torch.empty_like(exit_rate)
    k, x = x_t.long().unsqueeze(-1), x_0.long().unsqueeze(-1)
    size = block_rows(logits)
    for start in range(0, len(logits), size):
        at = slice(start, start + size)
        value = logits[at, :states]
        total = _log_total(value.scatter(-1, k[at], -torch.inf), exit_rate.dtype)
        logs = (log_jump[at], log_jump_x[at], log_jump_mask[at])
        d, jump = differences(value, x[at], *logs, total, vocab if has_mask else None)
        d_exit = value.gather(-1, k[at]).to(log_exit.dtype) - log_exit[at]
        terms = torch.where(jump > 0, jump * bregman(d), d.exp()).scatter_(-1, k[at], 0.0)
        divergence = terms.sum(-1, keepdim=True, dtype=exit_rate.dtype) + bregman(d_exit)
        loss[at] = torch.where(exit_rate[at] > 0, exit_rate[at] * divergence, 0)
        if gradient is not None and weight is not None:
            scale = exit_rate[at] * weight[at, None].to(exit_rate.dtype)
            slope = torch.where(jump > 0, jump * torch.expm1(d), d.exp())
            slope.scatter_(-1, k[at], torch.expm1(d_exit).to(slope.dtype))
            gradient[at, :states] = torch.where(scale != 0, scale.to(slope.dtype) * slope, 0).to(dtype)
    return loss.squeeze(-1), gradient


def _log_total(candidates: Tensor, dtype: torch.dtype) -> Tensor:
    """log sum exp of rows `[N, S]` whose entry at k is -inf, with the sum in `dtype`."""
    top = candidates.amax(-1, keepdim=True)
    return top.to(dtype) + torch.log(torch.exp(candidates - top).sum(-1, keepdim=True, dtype=dtype))


def row_scalars(
    x_0: Int[Tensor, "*site"], x_t: Int[Tensor, "*site"], site: SiteCoefficients, vocab: int, mask: int | None
) -> Float[Tensor, "5 N"]:
    """Compute the row scalars of this loss.

    Args:
        x_0: Clean tokens.
        x_t: Current tokens.
        site: Scalars of the process at every position.
        vocab: Number of clean tokens.
        mask: The mask token, or None.

    Returns:
        `[5, N]`: log J* for clean y, log J* for y = x_0, log J* for the mask, n(k) R, log R - log(S - 1). log J* is -inf where
        J* = 0.
    """
    same = torch.eq(x_0, x_t)
    masked = torch.zeros_like(same) if mask is None else torch.eq(x_t, mask)
    p_k, p_x = torch.where(same, site.stay, site.m_k), site.alpha + site.clean
    others = vocab - torch.where(same | masked, 1, 2)  # clean candidates other than x_0
    left = others * site.clean + torch.where(same, 0, p_x) + torch.where(masked, 0, site.mask)  # 1 - P_t(k|x_0)
    log_left = torch.log(left.where(left > 0, 1))

    def log_jump(mass: Tensor) -> Tensor:
        """log(mass / left), -inf where mass = 0."""
        return torch.where(mass > 0, torch.log(mass.where(mass > 0, 1)) - log_left, -torch.inf)

    safe_p_k = p_k.where(p_k > 0, 1)
    exit_rate = torch.where(p_k > 0, site.rate * left / safe_p_k, 0)
    candidates = vocab - 1 if mask is None else vocab
    log_exit = log_left - torch.log(safe_p_k) - math.log(candidates)
    rows = [log_jump(site.clean), log_jump(p_x), log_jump(site.mask), exit_rate, log_exit]
    return torch.stack([row.reshape(-1) for row in rows])
