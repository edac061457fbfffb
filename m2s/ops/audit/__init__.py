"""What a score vector says of its posterior, for rows of scores or of their logarithms."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.audit import reference
from m2s.ops.audit.reference import Measures
from m2s.ops.choice import fused
from m2s.process import Process, RankOne

__all__ = ["Measures", "is_fused", "measure"]


def is_fused(rows: Tensor, process: Process) -> bool:
    """Whether these rows go to the kernel, which takes any number of them."""
    return isinstance(process, RankOne) and rows.dtype in (torch.float32, torch.float64) and fused(rows)


def measure(
    rows: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    t: Float[Tensor, "N"],
    s: Float[Tensor, "N"] | None,
    process: Process,
    box_tolerance: float,
    log: bool = False,
) -> Measures:
    """Of every row of scores, or of log-scores if `log`, in float64; columns past `process.states` mean nothing."""
    if isinstance(process, RankOne) and is_fused(rows, process):
        from m2s.ops.audit.triton import measure as kernel

        return kernel(rows, x_t, t, s, process, box_tolerance, log)
    return reference.measure(rows, x_t, t, s, process, box_tolerance, log)
