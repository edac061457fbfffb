"""Samplers: one small file each, one loop that knows none of them by name, and randomness that belongs to the sample."""

from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.adaptive import Adaptive
from m2s.samplers.analytic import Analytic
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.bayes import Ancestral, Bayes
from m2s.samplers.confidence import Confidence
from m2s.samplers.diagnostics import Diagnostics, WeightStats
from m2s.samplers.euler import Euler
from m2s.samplers.first_hitting import FirstHitting
from m2s.samplers.forward_backward import ForwardBackward
from m2s.samplers.grid import GRIDS
from m2s.samplers.loop import StepEvent, Trajectory, sample
from m2s.samplers.prediction import LogitsProcessor, Prediction, TokenDraw
from m2s.samplers.predictor_corrector import PredictorCorrector
from m2s.samplers.registry import SAMPLERS
from m2s.samplers.remasking import Remasking
from m2s.samplers.self_correcting import SelfCorrecting
from m2s.samplers.tau_leaping import OrdinalTauLeaping, TauLeaping

__all__ = [
    "GRIDS",
    "SAMPLERS",
    "Adaptive",
    "Analytic",
    "Ancestral",
    "Bayes",
    "Confidence",
    "CounterNoise",
    "Diagnostics",
    "Euler",
    "FirstHitting",
    "ForwardBackward",
    "LogitsProcessor",
    "Move",
    "OrdinalTauLeaping",
    "Plan",
    "Prediction",
    "PredictorCorrector",
    "Remasking",
    "Sampler",
    "SelfCorrecting",
    "StepEvent",
    "TauLeaping",
    "TokenDraw",
    "Trajectory",
    "WeightStats",
    "draw_categorical",
    "sample",
]
