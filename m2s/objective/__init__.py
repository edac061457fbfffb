"""Training losses, one file each, and the bound on the likelihood."""

from m2s.objective.elbo import Elbo, elbo
from m2s.objective.masked import masked_cross_entropy
from m2s.objective.module import Objective, stratified_times
from m2s.objective.score_entropy import score_entropy
from m2s.objective.total import total

__all__ = ["Elbo", "Objective", "elbo", "masked_cross_entropy", "score_entropy", "stratified_times", "total"]
