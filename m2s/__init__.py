"""m2s: mean-to-score discrete diffusion.

Processes say how clean data is corrupted, heads say what a network's output means, objectives train it, samplers draw from it,
and `realizability` says whether a score has a posterior behind it. `m2s.train`, `m2s.evaluate` and the other parts that are not
imported here are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from m2s.evaluate.audit import audit
from m2s.hub import Checkpoint, load
from m2s.objective import Elbo, Objective, elbo, masked_cross_entropy, score_entropy, stratified_times
from m2s.process import (
    Absorbing,
    Chain,
    Cosine,
    Exponential,
    Geometric,
    GeometricRate,
    Hybrid,
    Linear,
    LogLinear,
    Process,
    RateMatrix,
    Schedule,
    Uniform,
)
from m2s.process.schedule import Rescaled
from m2s.realizability import Diagnosis, Projected, affine_inverse, box, classify, diagnose, project
from m2s.sampler import Trajectory, sample

__version__ = "0.1.0"

PARTS = ("benchmark", "cli", "data", "evaluate", "method", "model", "presets", "report", "train")

if TYPE_CHECKING:
    from m2s import benchmark as benchmark
    from m2s import cli as cli
    from m2s import data as data
    from m2s import evaluate as evaluate
    from m2s import method as method
    from m2s import model as model
    from m2s import presets as presets
    from m2s import report as report
    from m2s import train as train
else:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in PARTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"m2s.{name}")


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
    "GeometricRate",
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
    "Rescaled",
    "Schedule",
    "Trajectory",
    "Uniform",
    "Unprojected",
    "affine_inverse",
    "analytic_weights",
    "audit",
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
