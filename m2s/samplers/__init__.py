"""Samplers: one file each. `m2s.sample` runs them and knows none of them by name."""

from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.absorbing_uniform import AbsorbingUniform
from m2s.samplers.adaptive import Adaptive
from m2s.samplers.analytic import Analytic
from m2s.samplers.autoregressive import Autoregressive
from m2s.samplers.base import SAMPLERS, Move, NamedSampler, Plan, Sampler, StepSampler
from m2s.samplers.bayes import Ancestral, Bayes
from m2s.samplers.builtin import BUILT_IN
from m2s.samplers.capabilities import Need, Preserves, default_sampler
from m2s.samplers.confidence import Confidence
from m2s.samplers.diagnostics import Diagnostics, WeightStats
from m2s.samplers.entropy_bound import EntropyBound
from m2s.samplers.euler import Euler
from m2s.samplers.events import StepEvent, Trajectory
from m2s.samplers.first_hitting import FirstHitting
from m2s.samplers.forward_backward import ForwardBackward
from m2s.samplers.grid import GRIDS
from m2s.samplers.informed import Informed
from m2s.samplers.loop import sample, sample_with_options
from m2s.samplers.options import SamplingOptions, default_micro_batch
from m2s.samplers.prediction import LogitsProcessor, Prediction, TokenDraw
from m2s.samplers.predictor_corrector import PredictorCorrector
from m2s.samplers.psi import Psi
from m2s.samplers.registry import find_sampler, make_sampler
from m2s.samplers.remasking import Remasking
from m2s.samplers.self_correcting import SelfCorrecting
from m2s.samplers.tau_leaping import OrdinalTauLeaping, TauLeaping

__all__ = [
    "BUILT_IN",
    "GRIDS",
    "SAMPLERS",
    "AbsorbingUniform",
    "Adaptive",
    "Analytic",
    "Ancestral",
    "Autoregressive",
    "Bayes",
    "Confidence",
    "CounterNoise",
    "Diagnostics",
    "EntropyBound",
    "Euler",
    "FirstHitting",
    "ForwardBackward",
    "Informed",
    "LogitsProcessor",
    "Move",
    "NamedSampler",
    "Need",
    "OrdinalTauLeaping",
    "Plan",
    "Prediction",
    "PredictorCorrector",
    "Preserves",
    "Psi",
    "Remasking",
    "Sampler",
    "SamplingOptions",
    "SelfCorrecting",
    "StepEvent",
    "StepSampler",
    "TauLeaping",
    "TokenDraw",
    "Trajectory",
    "WeightStats",
    "default_micro_batch",
    "default_sampler",
    "draw_categorical",
    "find_sampler",
    "make_sampler",
    "sample",
    "sample_with_options",
]
