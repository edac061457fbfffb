"""Forward processes: how clean data is corrupted, and by which noise schedule."""

from m2s.process.absorbing import Absorbing
from m2s.process.base import Process
from m2s.process.chain import Chain
from m2s.process.hybrid import Hybrid
from m2s.process.rank_one import Mixing, RankOne, SiteCoefficients
from m2s.process.rate_matrix import RateMatrix
from m2s.process.schedule import Cosine, Exponential, Geometric, GeometricRate, Linear, LogLinear, Rescaled, Schedule
from m2s.process.uniform import Uniform

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
