"""Samplers: one small file each, one loop that knows none of them by name, and randomness that belongs to the sample."""

from m2s.sampler.adaptive import Adaptive
from m2s.sampler.analytic import Analytic
from m2s.sampler.base import Move, Plan, Sampler
from m2s.sampler.bayes import Ancestral, Bayes
from m2s.sampler.belief import Belief, Drawn, Shaping
from m2s.sampler.categorical import draw
from m2s.sampler.confidence import Confidence
from m2s.sampler.diagnostics import Diagnostics, Moment
from m2s.sampler.euler import Euler
from m2s.sampler.first_hitting import FirstHitting
from m2s.sampler.forward_backward import ForwardBackward
from m2s.sampler.grid import GRIDS
from m2s.sampler.loop import Step, Trajectory, sample
from m2s.sampler.predictor_corrector import PredictorCorrector
from m2s.sampler.random import Noise
from m2s.sampler.registry import SAMPLERS
from m2s.sampler.remasking import Remasking
from m2s.sampler.self_correcting import SelfCorrecting
from m2s.sampler.tau_leaping import OrdinalTauLeaping, TauLeaping

__all__ = [
    "GRIDS",
    "SAMPLERS",
    "Adaptive",
    "Analytic",
    "Ancestral",
    "Bayes",
    "Belief",
    "Confidence",
    "Diagnostics",
    "Drawn",
    "Euler",
    "FirstHitting",
    "ForwardBackward",
    "Moment",
    "Move",
    "Noise",
    "OrdinalTauLeaping",
    "Plan",
    "PredictorCorrector",
    "Remasking",
    "Sampler",
    "SelfCorrecting",
    "Shaping",
    "Step",
    "TauLeaping",
    "Trajectory",
    "draw",
    "sample",
]
