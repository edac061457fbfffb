"""Definition of the measures of a score vector before and after projection, as an audit needs them."""

import torch
from torch import Tensor

from m2s.conversions.bridge import scatter_at, score_from_posterior
from m2s.ops.classify.measures import ProjectedMeasures, replace_nonfinite
from m2s.ops.classify.naive import measure_scores
from m2s.ops.project.naive import nearest_posterior
from m2s.process import RankOne


def measure_projected(
    rows: Tensor, x_t: Tensor, t: Tensor, s: Tensor | None, process: RankOne, box_tolerance: float
) -> ProjectedMeasures:
    """Measure every row of log-scores, its projection and the distance between them, in float64.

    Args:
        rows: Log-scores `[N, V]`; columns from `process.states` on are ignored.
        x_t: Current tokens `[N]`.
        t: Times `[N]`.
        s: Times of the analytic step's end `[N]`, or None to skip its weights.
        process: A rank-one process.
        box_tolerance: Relative tolerance of the box.

    Returns:
        The measures, `[N]` each.
    """
    t = t.double()
    given = rows[:, : process.states].double().exp()
    score = replace_nonfinite(scatter_at(given, x_t, 1.0))
    posterior = nearest_posterior(score, x_t, process.at(x_t, t), process.mask)
    projected = score_from_posterior(posterior, x_t, t, process)
    counted = process.rates_into(x_t, t) > 0
    gap, size = (torch.linalg.vector_norm(value.where(counted, 0), dim=-1) for value in (projected - score, score))
    before, after = (measure_scores(value, x_t, t, s, process, box_tolerance, False) for value in (given, projected))
    total = scatter_at(score, x_t, 0.0)[:, : process.vocab].sum(-1)
    return ProjectedMeasures(before, after, gap / size.clamp(min=1e-300), total)
