"""Does one posterior stand behind a whole score vector? The paper's four classes, and what a sampler does with the vectors
that have none."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import scatter_at, validate_inputs
from m2s.conversions.inverse import weighted_system
from m2s.conversions.least_squares import is_determined
from m2s.ops.classify import is_fused, measure_scores
from m2s.ops.classify.naive import distance, finite
from m2s.process import Process, RankOne
from m2s.realizability.projection import project

CLASSES = ("outside the box", "material", "boundary", "realizable")
BLOCK = 1 << 22  # entries in float64 at once


class Diagnosis(NamedTuple):
    """What one score vector looks like; every field has the shape of x_t."""

    classes: Tensor  # 0 outside the box, 1 material, 2 boundary, 3 realizable
    strict: Tensor  # the same with no tolerance on the box: the paper's count
    outside: Tensor  # coordinates outside the box, no tolerance
    lowest: Tensor  # min of the signed posterior, or of the nearest posterior where the score does not fix a signed one
    off_plane: Tensor  # distance of the score from the plane of bridged scores, relative to it; 0 for uniform
    negative_weights: Tensor  # candidates with a negative weight in the analytic step to `s` (0 without one)
    negative_mass: Tensor  # their mass
    beyond: Tensor  # coordinates outside the box by more than the tolerance
    signed_mass: Tensor  # -sum of the negative entries of the signed posterior


def diagnose(
    score: Float[Tensor, "*site S"],
    x_t: Int[Tensor, "*site"],
    t: Float[Tensor, "*b"],
    process: Process,
    s: Float[Tensor, "*b"] | None = None,
    box_tolerance: float = 1e-6,
    posterior_tolerance: float = 1e-6,
) -> Diagnosis:
    """Classify every score vector, in float64; with `s`, also weigh the analytic sampler's step from t to s.

    Of a network's output the score is `head.log_score(output, x_t, t).exp()`.
    A float32 score carries noise of about 6e-8 beta/(K alpha) into the signed posterior: near t = 1 hand over float64 scores.
    """
    validate_inputs("score", score, x_t, t, process, open_ends=True)
    validation.score("score", score, x_t)
    if s is not None:
        if not isinstance(process, RankOne):
            raise TypeError(f"the analytic step to s is for rank-one processes (Uniform, Absorbing, Hybrid), not {process}")
        validation.times("s", s)
        validation.not_after("s", s, "t", t)
    flat_x = x_t.reshape(-1)
    flat_score = score.reshape(-1, score.shape[-1])
    spread = validation.align("t", t, x_t).expand(x_t.shape).reshape(-1).double()
    earlier = None if s is None else validation.align("s", s, x_t).expand(x_t.shape).reshape(-1).double()
    per_row = score.shape[-1] if isinstance(process, RankOne) else score.shape[-1] ** 2
    rows = max(1, len(flat_x) if is_fused(flat_score, process) else BLOCK // per_row)
    parts = [
        _diagnose(
            flat_score[at],
            flat_x[at],
            spread[at],
            None if earlier is None else earlier[at],
            process,
            box_tolerance,
            posterior_tolerance,
        )
        for at in (slice(start, start + rows) for start in range(0, max(1, len(flat_x)), rows))
    ]
    return Diagnosis(*(torch.cat(field).reshape(x_t.shape) for field in zip(*parts, strict=True)))


def _diagnose(
    score: Tensor, x_t: Tensor, t: Tensor, s: Tensor | None, process: Process, box_tolerance: float, posterior_tolerance: float
) -> Diagnosis:
    found = measure_scores(score, x_t, t, s, process, box_tolerance)
    lowest, off_plane = found.lowest, found.off_plane
    if not isinstance(process, RankOne):
        lowest, off_plane = _where_several_posteriors_fit(lowest, off_plane, score.double(), x_t, t, process)
    material = (lowest < -posterior_tolerance) | (off_plane > box_tolerance)
    inside = torch.where(material, 1, torch.where(lowest < 0, 2, 3))
    classes = torch.where(found.beyond > 0, 0, inside)
    strict = torch.where(found.outside > 0, 0, inside)
    signed_mass = torch.where(lowest < 0, found.signed_mass, 0)
    return Diagnosis(
        classes,
        strict,
        found.outside,
        lowest,
        off_plane,
        found.negative_weights,
        found.negative_mass,
        found.beyond,
        signed_mass,
    )


def _where_several_posteriors_fit(
    lowest: Tensor, off_plane: Tensor, score: Tensor, x_t: Tensor, t: Tensor, process: Process
) -> tuple[Tensor, Tensor]:
    """Where the rank condition fails the signed posterior is one of many: there only the distance to the nearest true one
    counts."""
    score = finite(scatter_at(score, x_t, 1.0))
    several = ~is_determined(*weighted_system(score, x_t, t, process))
    if several.any():
        some = (score[several], x_t[several], t[several], process)
        nearest = project(*some)
        lowest = lowest.masked_scatter(several, nearest[..., : process.vocab].amin(-1))
        off_plane = off_plane.masked_scatter(several, distance(nearest, *some))
    return lowest, off_plane


def classify(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Int[Tensor, "*site"]:
    """0 outside the box, 1 in the box but materially (below -1e-6) without a posterior, 2 on the numerical boundary, 3
    realizable. Of a network's output the score is `head.log_score(output, x_t, t).exp()`."""
    return diagnose(score, x_t, t, process).classes
