"""Training losses, one file each, and the bound on the likelihood."""

from m2s.objective.elbo import Elbo, elbo
from m2s.objective.gidd import gidd, gidd_clipped
from m2s.objective.masked import masked_cross_entropy
from m2s.objective.module import Objective, stratified_times
from m2s.objective.path_kl import path_kl
from m2s.objective.score_entropy import score_entropy
from m2s.objective.total import total
from m2s.objective.udlm import udlm

__all__ = [
    "Elbo",
    "Objective",
    "elbo",
    "gidd",
    "gidd_clipped",
    "masked_cross_entropy",
    "path_kl",
    "score_entropy",
    "stratified_times",
    "total",
    "udlm",
]
