"""m2s: mean-to-score discrete diffusion.

Processes say how clean data is corrupted, heads say what a network's output means, objectives train it, samplers draw from it,
and `realizability` says whether a score has a posterior behind it.
"""

from m2s.belief import (
    FactorizedRate,
    Head,
    LogScore,
    Ordinal,
    Posterior,
    Unprojected,
    leave_one_out_from_posterior,
    posterior_from_leave_one_out,
    rate_from_score,
    score_from_leave_one_out,
    score_from_posterior,
    score_from_rate,
)
from m2s.belief.step import analytic_weights, bayes_law
from m2s.check import checked
from m2s.hub import Checkpoint, load
from m2s.objective import Elbo, Objective, elbo, masked_cross_entropy, score_entropy, stratified_times
from m2s.process import (
    Absorbing,
    Chain,
    Cosine,
    Exponential,
    Geometric,
    Hybrid,
    Linear,
    LogLinear,
    Process,
    RateMatrix,
    Schedule,
    Uniform,
)
from m2s.realizability import Diagnosis, Projected, affine_inverse, box, classify, diagnose, project
from m2s.sampler import Trajectory, sample

__version__ = "0.1.0"

__all__ = [
    "Absorbing",
    "Chain",
    "Checkpoint",
    "Cosine",
    "Diagnosis",
    "Elbo",
    "Exponential",
    "FactorizedRate",
    "Geometric",
    "Head",
    "Hybrid",
    "Linear",
    "LogLinear",
    "LogScore",
    "Objective",
    "Ordinal",
    "Posterior",
    "Process",
    "Projected",
    "RateMatrix",
    "Schedule",
    "Trajectory",
    "Uniform",
    "Unprojected",
    "affine_inverse",
    "analytic_weights",
    "bayes_law",
    "box",
    "checked",
    "classify",
    "diagnose",
    "elbo",
    "leave_one_out_from_posterior",
    "load",
    "masked_cross_entropy",
    "posterior_from_leave_one_out",
    "project",
    "rate_from_score",
    "sample",
    "score_entropy",
    "score_from_leave_one_out",
    "score_from_posterior",
    "score_from_rate",
    "stratified_times",
]
