"""Projection: the nearest posterior to a score, for rows of scores or log-scores (Eq. 11)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import uses_triton
from m2s.ops.project import cpu
from m2s.process import SiteCoefficients


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
        mu over all states, in the dtype of the rows.
    """
    if rows.dtype in (torch.float32, torch.float64) and uses_triton(rows):
        from m2s.ops.project.triton import nearest_posterior as kernel  # imports the optional package triton

        return kernel(rows, k, site, states, mask, log)[0]
    return cpu.nearest_posterior(rows, k, site, states, mask, log)
