"""What a score vector says of its posterior: its place in the box, its signed posterior, and the analytic step's weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from m2s.conversions.bridge import scatter_at, score_from_posterior
from m2s.conversions.inverse import affine_inverse, box
from m2s.conversions.reverse_step import analytic_weights
from m2s.process import Process, RankOne


class ScoreMeasures(NamedTuple):
    """One number for each row."""

    outside: Tensor  # coordinates outside the box, no tolerance
    beyond: Tensor  # coordinates outside it by more than the tolerance
    lowest: Tensor  # min of the signed posterior
    signed_mass: Tensor  # -sum of its negative entries
    off_plane: Tensor  # distance of the score from the plane of bridged scores, relative to it; 0 for uniform
    negative_weights: Tensor  # candidates with a negative weight in the analytic step to `s` (0 without one)
    negative_mass: Tensor  # their mass


def measure_scores(
    rows: Tensor, x_t: Tensor, t: Tensor, s: Tensor | None, process: Process, box_tolerance: float, log: bool
) -> ScoreMeasures:
    values = rows[:, : process.states].double()
    score = scatter_at(values.exp() if log else values, x_t, 1.0)
    low, high = box(x_t, t, process)
    # by what is inside, so that NaN is not; then without it, and without infinity, for what follows
    outside = (~((score >= low) & (score <= high))).sum(-1)
    beyond = (~((score >= low * (1 - box_tolerance)) & (score <= high * (1 + box_tolerance)))).sum(-1)
    score = finite(score)
    signed = affine_inverse(score, x_t, t, process)
    lowest = signed[..., : process.vocab].amin(-1)
    signed_mass = -signed[..., : process.vocab].clamp(max=0).sum(-1)
    off_plane = distance(signed, score, x_t, t, process)
    if s is not None and isinstance(process, RankOne):
        weights = analytic_weights(score, x_t, s, t, process)
        negative, mass = (weights < 0).sum(-1), -weights.clamp(max=0).sum(-1)
    else:
        negative, mass = torch.zeros_like(outside), torch.zeros_like(lowest)
    return ScoreMeasures(outside, beyond, lowest, signed_mass, off_plane, negative, mass)


def finite(score: Tensor) -> Tensor:
    """What is no number, or infinite, is outside the box, and counts as 1 from there on."""
    return torch.where(score.isfinite(), score, 1)


def distance(mu: Tensor, score: Tensor, x_t: Tensor, t: Tensor, process: Process) -> Tensor:
    """|B mu - s| / |s| over the candidates that have a rate into k."""
    counted = process.rates_into(x_t, t) > 0
    gap = torch.where(counted, score_from_posterior(mu, x_t, t, process) - score, 0)
    size = torch.linalg.vector_norm(torch.where(counted, score, 0), dim=-1)
    return torch.linalg.vector_norm(gap, dim=-1) / size.clamp(min=1e-300)
