"""Definition of the measures of a score vector: position in the box, signed posterior, and weights of the analytic step."""

import torch
from torch import Tensor

from m2s.conversions.bridge import scatter_at
from m2s.conversions.inverse import affine_inverse, box
from m2s.conversions.reverse_step import analytic_weights
from m2s.ops.classify.measures import ScoreMeasures, relative_distance, replace_nonfinite
from m2s.process import Process


def measure_scores(
    rows: Tensor, x_t: Tensor, t: Tensor, s: Tensor | None, process: Process, box_tolerance: float, log: bool
) -> ScoreMeasures:
    """Measure every row of scores, in float64.

    Args:
        rows: Scores `[N, V]`, or log-scores; columns from `process.states` on are ignored.
        x_t: Current tokens `[N]`.
        t: Times `[N]`.
        s: Times of the analytic step's end `[N]`, or None to skip its weights.
        process: The forward process.
        box_tolerance: Relative tolerance of the box.
        log: Whether the rows are log-scores.

    Returns:
        The measures, `[N]` each.
    """
    values = rows[:, : process.states].double()
    score = scatter_at(values.exp() if log else values, x_t, 1.0)
    low, high = box(x_t, t, process)
    # negated inequalities, so that NaN counts as outside; from here on NaN and infinity are replaced
    outside = (~((score >= low) & (score <= high))).sum(-1)
    beyond = (~((score >= low * (1 - box_tolerance)) & (score <= high * (1 + box_tolerance)))).sum(-1)
    score = replace_nonfinite(score)
    signed = affine_inverse(score, x_t, t, process)
    lowest = signed[..., : process.vocab].amin(-1)
    signed_mass = -signed[..., : process.vocab].clamp(max=0).sum(-1)
    off_plane = relative_distance(signed, score, x_t, t, process)
    rank_one = process.rank_one
    if s is not None and rank_one is not None:
        weights = analytic_weights(score, x_t, s, t, rank_one)
        negative, mass = (weights < 0).sum(-1), -weights.clamp(max=0).sum(-1)
    else:
        negative, mass = torch.zeros_like(outside), torch.zeros_like(lowest)
    return ScoreMeasures(outside, beyond, lowest, signed_mass, off_plane, negative, mass)
