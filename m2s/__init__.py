"""m2s: mean-to-score discrete diffusion.

Processes say how clean data is corrupted, heads say what a network's output means, objectives train it, samplers draw from it,
and `realizability` says whether a score has a posterior behind it. Packages that are not imported
here, such as `m2s.training` and `m2s.evaluation`, are imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from m2s import startup as startup  # first: it handles Ctrl-C during the imports below
from m2s.conversions.reverse_step import analytic_weights, bayes_probabilities
from m2s.evaluation.audit import audit
from m2s.heads import (
    FactorizedRate,
    Head,
    LogScore,
    Ordinal,
    Posterior,
    leave_one_out_from_posterior,
    posterior_from_leave_one_out,
    rate_from_score,
    score_from_leave_one_out,
    score_from_posterior,
    score_from_rate,
)
from m2s.hub import Checkpoint, from_transformers, load, save
from m2s.losses import Elbo, Objective, elbo, masked_cross_entropy, score_entropy, stratified_times
from m2s.ops.last_layer import Unprojected
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
from m2s.samplers import Trajectory, sample
from m2s.validation import checked
from m2s.version import __version__ as __version__

LAZY = {"fit": "m2s.training.fitting", "certify": "m2s.evaluation.likelihood"}  # functions whose modules take long to import
PARTS = ("benchmark", "cli", "data", "evaluation", "methods", "models", "presets", "report", "training")

if TYPE_CHECKING:
    from m2s import benchmark as benchmark
    from m2s import cli as cli
    from m2s import data as data
    from m2s import evaluation as evaluation
    from m2s import methods as methods
    from m2s import models as models
    from m2s import presets as presets
    from m2s import report as report
    from m2s import training as training
    from m2s.evaluation.likelihood import certify
    from m2s.training.fitting import fit
else:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in LAZY:
            return getattr(import_module(LAZY[name]), name)
        if name not in PARTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"m2s.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *PARTS, *LAZY} - {"Any", "TYPE_CHECKING", "import_module"})


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
    "bayes_probabilities",
    "box",
    "certify",
    "checked",
    "classify",
    "diagnose",
    "elbo",
    "fit",
    "from_transformers",
    "leave_one_out_from_posterior",
    "load",
    "masked_cross_entropy",
    "posterior_from_leave_one_out",
    "project",
    "rate_from_score",
    "sample",
    "save",
    "score_entropy",
    "score_from_leave_one_out",
    "score_from_posterior",
    "score_from_rate",
    "stratified_times",
]
