"""The nearest posterior to a score, for rows of scores or of their logarithms."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import uses_triton
from m2s.ops.project import naive
from m2s.process import SiteCoefficients


def nearest_posterior(
    rows: Float[Tensor, "N V"], k: Int[Tensor, "N"], site: SiteCoefficients, states: int, mask: int | None, log: bool = False
) -> Float[Tensor, "N S"]:
    """mu for every row of scores, or of log-scores if `log`; the scalars of `site` are [N], columns past `states` mean
    nothing."""
    if rows.dtype in (torch.float32, torch.float64) and uses_triton(rows):
        from m2s.ops.project.triton import nearest_posterior as kernel

        return kernel(rows, k, site, states, mask, log)[0]
    return naive.nearest_posterior(rows, k, site, states, mask, log)
