"""Estimators of the likelihood by name, which of them are upper bounds, and what each costs.

ESTIMATORS                                   # by name: nelbo, sedd, mdlm, md4, gidd, udlm, duo, llada, dream, ...
certify(model, head, length)                 # exact, in an enumerable world
"""

from m2s.evaluation.likelihood.base import Estimator, Options, Term
from m2s.evaluation.likelihood.certificate import Certificate, certify, supported, worlds
from m2s.evaluation.likelihood.levels import Levels, Point, Steps, Times
from m2s.evaluation.likelihood.masks import MaskCount, MaskShare
from m2s.evaluation.likelihood.measure import Draws, draw_term, join, measure
from m2s.evaluation.likelihood.registry import ESTIMATORS
from m2s.evaluation.likelihood.world import World, exact_network, random_network

__all__ = [
    "ESTIMATORS",
    "Certificate",
    "Draws",
    "Estimator",
    "Levels",
    "MaskCount",
    "MaskShare",
    "Options",
    "Point",
    "Steps",
    "Term",
    "Times",
    "World",
    "certify",
    "draw_term",
    "exact_network",
    "join",
    "measure",
    "random_network",
    "supported",
    "worlds",
]
