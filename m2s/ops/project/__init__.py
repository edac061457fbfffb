"""Projection: the nearest posterior to a score, for rows of scores or log-scores (Eq. 11)."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import uses_triton
from m2s.ops.derivatives import gradient_by_autograd
from m2s.ops.project import cpu, naive
from m2s.process import SiteCoefficients
from m2s.transforms import is_transformed


def nearest_posterior(
    rows: Float[Tensor, "N V"], k: Int[Tensor, "N"], site: SiteCoefficients, states: int, mask: int | None, log: bool = False
) -> Float[Tensor, "N S"]:
    """Project every row onto the scores of posteriors.

    Args:
        rows: Scores, or log-scores; columns from `states` on are ignored.
        k: Current tokens.
        site: Scalars of the process at every row, `[N]` each.
        states: Number of states, the mask included.
        mask: The mask token, or None.
        log: Whether the rows are log-scores.

    Returns:
        mu over all states, in the dtype of the rows. Its gradient is that of `naive.py`, computed in the backward pass.
    """
    if is_transformed() or any(value.requires_grad for value in site):
        return _differentiable(rows, k, site, states, mask, log)
    if rows.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        mu: Tensor = _NearestPosterior.apply(rows, k, states, mask, log, *site)
        return mu
    return _solve(rows, k, site, states, mask, log)


def _solve(rows: Tensor, k: Tensor, site: SiteCoefficients, states: int, mask: int | None, log: bool) -> Tensor:
    """mu by the kernel or by `cpu.py`, without a gradient."""
    if rows.dtype in (torch.float32, torch.float64) and uses_triton(rows):
        from m2s.ops.project.triton import nearest_posterior as kernel  # imports the optional package triton

        return kernel(rows, k, site, states, mask, log)[0]
    return cpu.nearest_posterior(rows, k, site, states, mask, log)


def _differentiable(rows: Tensor, k: Tensor, site: SiteCoefficients, states: int, mask: int | None, log: bool) -> Tensor:
    """mu by the definition in plain torch, in float64 where the device has it."""
    score = rows[:, :states].to(site.alpha.dtype)
    return naive.nearest_posterior(score.exp() if log else score, k, site, mask).to(rows.dtype)


class _NearestPosterior(torch.autograd.Function):
    """mu, with the gradient of the definition. Within one support mu is affine in the score."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, k: Tensor, states: int, mask: int | None, log: bool, *site: Tensor) -> Tensor:
        ctx.save_for_backward(rows, k, *site)
        ctx.settings = (states, mask, log)
        return _solve(rows, k, SiteCoefficients(*site), states, mask, log)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, k, *site = ctx.saved_tensors

        def mu(rows: Tensor) -> Tensor:
            """The definition as a function of the rows alone."""
            return _differentiable(rows, k, SiteCoefficients(*site), *ctx.settings)

        return (gradient_by_autograd(mu, rows, upstream), *(None for _ in range(10)))
