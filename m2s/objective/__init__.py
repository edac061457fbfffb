"""Training losses, one file each, and the bound on the likelihood."""

from m2s.objective.any_order import any_order
from m2s.objective.chain import chain, chain_kl, d3pm
from m2s.objective.ct_elbo import ct_elbo
from m2s.objective.duo import Relaxed
from m2s.objective.elbo import Elbo, elbo, prior_nats
from m2s.objective.gidd import gidd, gidd_clipped
from m2s.objective.likelihood import likelihood, nothing_lost
from m2s.objective.masked import masked_cross_entropy
from m2s.objective.module import Objective, stratified_times
from m2s.objective.path_kl import path_kl
from m2s.objective.score_entropy import score_entropy
from m2s.objective.total import total
from m2s.objective.udlm import udlm

__all__ = [
    "Elbo",
    "Objective",
    "Relaxed",
    "any_order",
    "chain",
    "chain_kl",
    "ct_elbo",
    "d3pm",
    "elbo",
    "gidd",
    "gidd_clipped",
    "likelihood",
    "masked_cross_entropy",
    "nothing_lost",
    "path_kl",
    "prior_nats",
    "score_entropy",
    "stratified_times",
    "total",
    "udlm",
]
