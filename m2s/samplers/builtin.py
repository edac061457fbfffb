"""The registrations of all built-in samplers.

A new sampler is a file with a subclass of `Sampler`, and one line here. A user's sampler is registered in the same way, with
`m2s.samplers.SAMPLERS.add("my_name", MySampler)`.
"""

from m2s.samplers.absorbing_uniform import AbsorbingUniform
from m2s.samplers.adaptive import Adaptive
from m2s.samplers.analytic import Analytic
from m2s.samplers.autoregressive import Autoregressive
from m2s.samplers.base import SAMPLERS, NamedSampler
from m2s.samplers.bayes import Ancestral, Bayes
from m2s.samplers.confidence import Confidence
from m2s.samplers.entropy_bound import EntropyBound
from m2s.samplers.euler import Euler
from m2s.samplers.first_hitting import FirstHitting
from m2s.samplers.forward_backward import ForwardBackward
from m2s.samplers.informed import Informed
from m2s.samplers.predictor_corrector import PredictorCorrector
from m2s.samplers.psi import Psi
from m2s.samplers.remasking import Remasking
from m2s.samplers.self_correcting import SelfCorrecting
from m2s.samplers.tau_leaping import OrdinalTauLeaping, TauLeaping

BUILT_IN: tuple[type[NamedSampler], ...] = (
    Bayes,
    Euler,
    Analytic,
    TauLeaping,
    OrdinalTauLeaping,
    ForwardBackward,
    PredictorCorrector,
    Ancestral,
    FirstHitting,
    Confidence,
    Remasking,
    Adaptive,
    SelfCorrecting,
    Psi,
    AbsorbingUniform,
    Informed,
    EntropyBound,
    Autoregressive,
)
for _kind in BUILT_IN:
    SAMPLERS.add(_kind.name, _kind)
