"""Whether a score vector has a posterior: the paper's four classes, and how far a score is from having one."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import scatter_at, validate_inputs
from m2s.conversions.inverse import weighted_system
from m2s.conversions.least_squares import is_determined
from m2s.ops.classify import ScoreMeasures, is_fused, measure_projected, measure_scores
from m2s.ops.classify.measures import relative_distance, replace_nonfinite
from m2s.process import Process, RankOne
from m2s.realizability.projection import project

SCORE_CLASSES = ("outside", "material", "boundary", "realizable")
"""The classes of a score vector, by the number that `m2s.classify` returns. "outside" is outside the box."""
BLOCK = 1 << 22  # float64 entries that are processed at once


class Diagnosis(NamedTuple):
    """What `m2s.diagnose` measures of a score vector. Every field has the shape of x_t.

    Args:
        classes: 0 outside the box, 1 material, 2 boundary, 3 realizable.
        strict: The same classes with no tolerance on the box: the paper's count.
        outside: Number of coordinates outside the box, with no tolerance.
        lowest: Least entry of the signed posterior; where the score does not determine it, of the nearest posterior.
        off_plane: Distance of the score from the plane of the bridge's scores, relative to its norm; 0 for uniform noise.
        negative_weights: Number of candidates with a negative weight in the analytic step to `s`; 0 without `s`.
        negative_mass: Minus the sum of those weights.
        beyond: Number of coordinates outside the box by more than the tolerance.
        signed_mass: Minus the sum of the negative entries of the signed posterior.
    """

    classes: Tensor
    strict: Tensor
    outside: Tensor
    lowest: Tensor
    off_plane: Tensor
    negative_weights: Tensor
    negative_mass: Tensor
    beyond: Tensor
    signed_mass: Tensor


class ProjectedDiagnosis(NamedTuple):
    """What `diagnose_projected` measures of a score vector and of its projection. Every field has one entry for each row.

    Args:
        before: The measures of the score as it is.
        after: The measures of the projected score.
        distance: |s_projected - s| / |s|, over the candidates that have a forward rate into k.
        total: Sum of the scores of the clean tokens other than k.
    """

    before: Diagnosis
    after: Diagnosis
    distance: Tensor
    total: Tensor


def diagnose(
    score: Float[Tensor, "*site S"],
    x_t: Int[Tensor, "*site"],
    t: Float[Tensor, "*b"],
    process: Process,
    s: Float[Tensor, "*b"] | None = None,
    box_tolerance: float = 1e-6,
    posterior_tolerance: float = 1e-6,
) -> Diagnosis:
    """Measure how far every score vector is from having a posterior, in float64 (Eqs. 12, 13).

    A score in float32 has rounding errors of about 6e-8 beta/(K alpha) in its signed posterior: near t = 1 give float64 scores.

    Args:
        score: Scores, [*site, S]; `head.log_score(output, x_t, t).exp()` for a network's output. The entry at x_t is ignored.
        x_t: Current tokens, [*site].
        t: Times in (0, 1), [*b].
        process: A forward process with rates.
        s: End of a step of the analytic sampler, [*b], at most t. If given, its negative weights are counted.
        box_tolerance: Relative tolerance on the box and on the plane of the bridge's scores.
        posterior_tolerance: A signed posterior with all entries above minus this is on the boundary, not material.

    Returns:
        The classes and measures, each [*site].

    Raises:
        TypeError: `s` is given and the process is not rank-one.
        ValueError: The score has negative entries, as log-scores have.

    Example:
        >>> score = head.log_score(model(x_t, t), x_t, t).exp()
        >>> found = m2s.diagnose(score, x_t, t, head.process, s=0.9 * t)
        >>> material = (found.classes == 1).float().mean()
        >>> found.negative_mass.mean()
    """
    validate_inputs("score", score, x_t, t, process, open_ends=True)
    validation.score("score", score, x_t)
    if s is not None:
        if process.rank_one is None:
            raise TypeError(f"the analytic step to s is for rank-one processes (Uniform, Absorbing, Hybrid), not {process}")
        validation.times("s", s)
        validation.not_after("s", s, "t", t)
    flat_x = x_t.reshape(-1)
    flat_score = score.reshape(-1, score.shape[-1])
    flat_t = validation.align("t", t, x_t).expand(x_t.shape).reshape(-1).double()
    flat_s = None if s is None else validation.align("s", s, x_t).expand(x_t.shape).reshape(-1).double()
    # The matrix form has S^2 entries for each site. The fused kernel needs no blocks.
    per_site = score.shape[-1] if process.rank_one is not None else score.shape[-1] ** 2
    rows = max(1, len(flat_x) if is_fused(flat_score, process) else BLOCK // per_site)
    parts = [
        _diagnose(
            flat_score[at],
            flat_x[at],
            flat_t[at],
            None if flat_s is None else flat_s[at],
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
    """Diagnose one block of sites, [N, S]."""
    found = measure_scores(score, x_t, t, s, process, box_tolerance)
    lowest, off_plane = found.lowest, found.off_plane
    if process.rank_one is None:
        lowest, off_plane = _measure_undetermined(lowest, off_plane, score.double(), x_t, t, process)
    return _find_classes(found._replace(lowest=lowest, off_plane=off_plane), box_tolerance, posterior_tolerance)


def diagnose_projected(
    log_score: Float[Tensor, "N V"],
    x_t: Int[Tensor, "N"],
    t: Float[Tensor, "N"],
    process: RankOne,
    s: Float[Tensor, "N"] | None = None,
    box_tolerance: float = 1e-6,
    posterior_tolerance: float = 1e-6,
) -> ProjectedDiagnosis:
    """Measure every score vector as `diagnose` does, before and after projection. The kernel stores no score in float64.

    Arguments are not validated: samplers have validated them.

    Args:
        log_score: Log-scores, [N, V]. Columns past `process.states` are padding. Scores that are not finite count as outside
            the box, and as 1 in everything else.
        x_t: Current tokens, [N].
        t: Times in (0, 1), [N].
        process: A rank-one process.
        s: End of a step of the analytic sampler, [N], at most t. If given, its negative weights are counted.
        box_tolerance: Relative tolerance on the box and on the plane of the bridge's scores.
        posterior_tolerance: A signed posterior with all entries above minus this is on the boundary, not material.

    Returns:
        The measures of both, each [N].
    """
    s = None if s is None else s.double()
    found = measure_projected(log_score, x_t, t.double(), s, process, box_tolerance)
    before, after = (_find_classes(one, box_tolerance, posterior_tolerance) for one in (found.before, found.after))
    return ProjectedDiagnosis(before, after, found.distance, found.total)


def _find_classes(found: ScoreMeasures, box_tolerance: float, posterior_tolerance: float) -> Diagnosis:
    """Return the classes that measures belong to, with the measures."""
    lowest, off_plane = found.lowest, found.off_plane
    material = (lowest < -posterior_tolerance) | (off_plane > box_tolerance)
    inside = torch.where(material, 1, torch.where(lowest < 0, 2, 3))
    return Diagnosis(
        classes=torch.where(found.beyond > 0, 0, inside),
        strict=torch.where(found.outside > 0, 0, inside),
        outside=found.outside,
        lowest=lowest,
        off_plane=off_plane,
        negative_weights=found.negative_weights,
        negative_mass=found.negative_mass,
        beyond=found.beyond,
        signed_mass=torch.where(lowest < 0, found.signed_mass, 0),
    )


def _measure_undetermined(
    lowest: Tensor, off_plane: Tensor, score: Tensor, x_t: Tensor, t: Tensor, process: Process
) -> tuple[Tensor, Tensor]:
    """Measure again the sites where the rank condition fails, by the distance to the nearest posterior.

    There the signed posterior is one of many, so that its negative entries prove nothing.
    """
    score = replace_nonfinite(scatter_at(score, x_t, 1.0))
    undetermined = ~is_determined(*weighted_system(score, x_t, t, process))
    if undetermined.any():
        some = (score[undetermined], x_t[undetermined], t[undetermined], process)
        nearest = project(*some)
        lowest = lowest.masked_scatter(undetermined, nearest[..., : process.vocab].amin(-1))
        off_plane = off_plane.masked_scatter(undetermined, relative_distance(nearest, *some))
    return lowest, off_plane


def classify(
    score: Float[Tensor, "*site S"], x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"], process: Process
) -> Int[Tensor, "*site"]:
    """Return the class of every score vector (Eqs. 12, 13).

        0  outside the box: a coordinate is impossible under any posterior
        1  material: in the box, but the signed posterior has an entry below -1e-6
        2  boundary: the least entry of the signed posterior is between -1e-6 and 0
        3  realizable: the score is the bridge of a posterior

    Args:
        score: Scores, [*site, S]; `head.log_score(output, x_t, t).exp()` for a network's output. The entry at x_t is ignored.
        x_t: Current tokens, [*site].
        t: Times in (0, 1), [*b].
        process: A forward process with rates.

    Returns:
        Classes 0 to 3, [*site]. `m2s.realizability.SCORE_CLASSES` has their names.

    Raises:
        ValueError: The score has negative entries, as log-scores have.

    Example:
        >>> process = m2s.Uniform(256, m2s.Linear())
        >>> score = m2s.score_from_posterior(mu, x_t, t, process)
        >>> bool((m2s.classify(score, x_t, t, process) >= 2).all())
        True
    """
    return diagnose(score, x_t, t, process).classes
