"""Classification of score vectors: measures of rows of scores or log-scores against the scores of posteriors."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.backend import uses_triton
from m2s.ops.classify import naive, naive_projected
from m2s.ops.classify.measures import ProjectedMeasures, ScoreMeasures
from m2s.process import Process, RankOne

__all__ = ["ProjectedMeasures", "ScoreMeasures", "is_fused", "measure_projected", "measure_scores"]


def is_fused(rows: Tensor, process: Process) -> bool:
    """Return whether these rows are measured by the Triton kernel, which takes any number of rows at once.

    Args:
        rows: Scores or log-scores.
        process: The forward process; the kernel is for rank-one processes.

    Returns:
        True for the kernel, False for plain torch.
    """
    return process.rank_one is not None and rows.dtype in (torch.float32, torch.float64) and uses_triton(rows)


def measure_scores(
    rows: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    t: Float[Tensor, "N"],
    s: Float[Tensor, "N"] | None,
    process: Process,
    box_tolerance: float,
    log: bool = False,
) -> ScoreMeasures:
    """Measure every row of scores, in float64.

    Args:
        rows: Scores, or log-scores; columns from `process.states` on are ignored.
        x_t: Current tokens.
        t: Times.
        s: Times of the analytic step's end, or None to skip its weights.
        process: The forward process.
        box_tolerance: Relative tolerance of the box.
        log: Whether the rows are log-scores.

    Returns:
        The measures, `[N]` each.
    """
    rank_one = process.rank_one
    if rank_one is not None and is_fused(rows, process):
        from m2s.ops.classify.triton import measure_scores as kernel  # imports the optional package triton

        return kernel(rows, x_t, t, s, rank_one, box_tolerance, log)
    return naive.measure_scores(rows, x_t, t, s, process, box_tolerance, log)


def measure_projected(
    rows: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    t: Float[Tensor, "N"],
    s: Float[Tensor, "N"] | None,
    process: RankOne,
    box_tolerance: float,
) -> ProjectedMeasures:
    """Measure every row of log-scores and its projection, in float64. The kernel stores no projected score.

    Args:
        rows: Log-scores; columns from `process.states` on are ignored.
        x_t: Current tokens.
        t: Times.
        s: Times of the analytic step's end, or None to skip its weights.
        process: A rank-one process.
        box_tolerance: Relative tolerance of the box.

    Returns:
        The measures before and after, and the distance between the scores.
    """
    if is_fused(rows, process):
        from m2s.ops.classify.triton import measure_projected as kernel  # imports the optional package triton

        return kernel(rows, x_t, t, s, process, box_tolerance)
    return naive_projected.measure_projected(rows, x_t, t, s, process, box_tolerance)
