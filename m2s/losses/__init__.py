"""Training losses, one file each, and the NELBO."""

from m2s.losses.any_order import any_order
from m2s.losses.ct_elbo import ct_elbo
from m2s.losses.d3pm import chain, chain_kl, d3pm
from m2s.losses.duo import Relaxed
from m2s.losses.elbo import Elbo, elbo, prior_nats
from m2s.losses.gidd import gidd, gidd_clipped
from m2s.losses.masked_cross_entropy import masked_cross_entropy
from m2s.losses.next_token import next_token_nll, zero_integral
from m2s.losses.objective import Objective, stratified_times
from m2s.losses.path_kl import path_kl
from m2s.losses.score_entropy import score_entropy
from m2s.losses.udlm import udlm
from m2s.losses.weighted_sum import weighted_sum

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
    "masked_cross_entropy",
    "next_token_nll",
    "path_kl",
    "prior_nats",
    "score_entropy",
    "stratified_times",
    "udlm",
    "weighted_sum",
    "zero_integral",
]
