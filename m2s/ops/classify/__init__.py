"""What a score vector says of its posterior, for rows of scores or of their logarithms."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import uses_triton
from m2s.ops.classify import naive
from m2s.ops.classify.naive import ScoreMeasures
from m2s.process import Process, RankOne

__all__ = ["ScoreMeasures", "is_fused", "measure_scores"]


def is_fused(rows: Tensor, process: Process) -> bool:
    """Whether these rows go to the kernel, which takes any number of them."""
    return isinstance(process, RankOne) and rows.dtype in (torch.float32, torch.float64) and uses_triton(rows)


def measure_scores(
    rows: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    t: Float[Tensor, "N"],
    s: Float[Tensor, "N"] | None,
    process: Process,
    box_tolerance: float,
    log: bool = False,
) -> ScoreMeasures:
    """Of every row of scores, or of log-scores if `log`, in float64; columns past `process.states` mean nothing."""
    if isinstance(process, RankOne) and is_fused(rows, process):
        from m2s.ops.classify.triton import measure_scores as kernel

        return kernel(rows, x_t, t, s, process, box_tolerance, log)
    return naive.measure_scores(rows, x_t, t, s, process, box_tolerance, log)
