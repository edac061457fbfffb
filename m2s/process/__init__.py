"""How clean data is corrupted."""

from m2s.process.base import Process
from m2s.process.chain import Chain
from m2s.process.rank_one import Absorbing, Hybrid, Mixing, RankOne, SiteCoefficients, Uniform
from m2s.process.rate_matrix import RateMatrix
from m2s.process.schedule import Cosine, Exponential, Geometric, GeometricRate, Linear, LogLinear, Rescaled, Schedule

__all__ = [
    "Absorbing",
    "Chain",
    "Cosine",
    "Exponential",
    "Geometric",
    "GeometricRate",
    "Hybrid",
    "Linear",
    "LogLinear",
    "Mixing",
    "Process",
    "RankOne",
    "RateMatrix",
    "Rescaled",
    "Schedule",
    "SiteCoefficients",
    "Uniform",
]
