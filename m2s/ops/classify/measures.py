"""The result of the classification of score vectors, and what the definition and the projection share."""

from typing import NamedTuple

import torch
from torch import Tensor

from m2s.conversions.bridge import score_from_posterior
from m2s.process import Process


class ScoreMeasures(NamedTuple):
    """Measures of score vectors, one number per row.

    Args:
        outside: Coordinates outside the box, without tolerance.
        beyond: Coordinates outside the box by more than the tolerance.
        lowest: Least entry of the signed posterior.
        signed_mass: Minus the sum of its negative entries.
        off_plane: Distance of the score from the hyperplane of posterior scores, relative to its norm; 0 for a uniform process.
        negative_weights: Candidates with a negative weight in the analytic step to `s` (0 without `s`).
        negative_mass: Minus the sum of the negative weights.
    """

    outside: Tensor
    beyond: Tensor
    lowest: Tensor
    signed_mass: Tensor
    off_plane: Tensor
    negative_weights: Tensor
    negative_mass: Tensor


class ProjectedMeasures(NamedTuple):
    """Measures of score vectors as they are and after projection, one number per row.

    Args:
        before: Measures of the scores as they are.
        after: Measures of the scores of the nearest posteriors.
        distance: |s' - s| / |s| of the projected score s', over the candidates that have a rate into k.
        total: Sum of the scores of the clean tokens other than k, as they are.
    """

    before: ScoreMeasures
    after: ScoreMeasures
    distance: Tensor
    total: Tensor


def replace_nonfinite(score: Tensor) -> Tensor:
    """Replace NaN and infinity by 1: such a coordinate is counted as outside the box and has no other effect.

    Args:
        score: Scores.

    Returns:
        Finite scores.
    """
    return torch.where(score.isfinite(), score, 1)


def relative_distance(mu: Tensor, score: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Tensor:
    """Compute |B mu - s| / |s| over the candidates that have a rate into k.

    Args:
        mu: Posterior, possibly signed, `[N, S]`.
        score: Score `[N, S]`.
        x_t: Current tokens `[N]`.
        t: Times `[N]`.
        process: The forward process.

    Returns:
        The relative distance `[N]`.
    """
    counted = process.rates_into(x_t, t) > 0
    gap = torch.where(counted, score_from_posterior(mu, x_t, t, process) - score, 0)
    size = torch.linalg.vector_norm(torch.where(counted, score, 0), dim=-1)
    return torch.linalg.vector_norm(gap, dim=-1) / size.clamp(min=1e-300)
