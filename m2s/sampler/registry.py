"""Every sampler by its name. A new one is a file and a line here."""

import difflib
from dataclasses import fields
from typing import Any

from m2s.belief import Head
from m2s.process import RankOne
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


def natural(head: Head) -> str:
    """The name of the sampler that a head is drawn from if nobody says which: the exact step where there is a posterior."""
    if head.sampler is not None:
        return head.sampler
    if head.has_posterior:
        return Bayes.name
    return Analytic.name if isinstance(head.process, RankOne) else TauLeaping.name


def find(sampler: str | Sampler) -> Sampler:
    """The sampler of that name, with its default options; one that is given already is itself."""
    return sampler if isinstance(sampler, Sampler) else make(sampler)


def make(name: str, **options: Any) -> Sampler:
    """The sampler of that name, with these of its options."""
    known = SAMPLERS | OTHERS
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"there is no sampler {name!r}{hint}: choose from {', '.join(known)}")
    for option, value in options.items():
        readers = [kind.name for kind in known.values() if option in {field.name for field in fields(kind)}]
        if name not in readers:
            raise ValueError(
                f"{option} is {value}, but sampler {name!r} does not read it, only {', '.join(readers)}: leave it out"
            )
    return known[name](**options)
