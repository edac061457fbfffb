"""Every sampler by its name. A new one is a file and a line here."""

import difflib

from m2s.sampler.adaptive import Adaptive
from m2s.sampler.analytic import Analytic
from m2s.sampler.autoregressive import Autoregressive
from m2s.sampler.base import Sampler
from m2s.sampler.bayes import Ancestral, Bayes
from m2s.sampler.confidence import Confidence
from m2s.sampler.euler import Euler
from m2s.sampler.first_hitting import FirstHitting
from m2s.sampler.forward_backward import ForwardBackward
from m2s.sampler.predictor_corrector import PredictorCorrector
from m2s.sampler.remasking import Remasking
from m2s.sampler.self_correcting import SelfCorrecting
from m2s.sampler.tau_leaping import OrdinalTauLeaping, TauLeaping

SAMPLERS: dict[str, type[Sampler]] = {
    kind.name: kind
    for kind in (
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
    )
}
OTHERS: dict[str, type[Sampler]] = {Autoregressive.name: Autoregressive}  # for heads that no sampler above serves


def find(sampler: str | Sampler) -> Sampler:
    """The sampler of that name, with its default options; one that is given already is itself."""
    if isinstance(sampler, Sampler):
        return sampler
    known = SAMPLERS | OTHERS
    if isinstance(sampler, str) and sampler in known:
        return known[sampler]()
    near = difflib.get_close_matches(str(sampler), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"there is no sampler {sampler!r}{hint}: choose from {', '.join(known)}")
