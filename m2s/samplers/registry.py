"""Every sampler by its name. A new one is a file and a line here."""

import difflib
from dataclasses import fields
from typing import Any

from m2s.heads import Head
from m2s.process import RankOne
from m2s.samplers.adaptive import Adaptive
from m2s.samplers.analytic import Analytic
from m2s.samplers.autoregressive import Autoregressive
from m2s.samplers.base import Sampler
from m2s.samplers.bayes import Ancestral, Bayes
from m2s.samplers.confidence import Confidence
from m2s.samplers.euler import Euler
from m2s.samplers.first_hitting import FirstHitting
from m2s.samplers.forward_backward import ForwardBackward
from m2s.samplers.predictor_corrector import PredictorCorrector
from m2s.samplers.remasking import Remasking
from m2s.samplers.self_correcting import SelfCorrecting
from m2s.samplers.tau_leaping import OrdinalTauLeaping, TauLeaping

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
AUTOREGRESSIVE_SAMPLERS: dict[str, type[Sampler]] = {
    Autoregressive.name: Autoregressive
}  # for heads that no sampler above serves


def default_sampler(head: Head) -> str:
    """The name of the sampler that a head is drawn from if nobody says which: the exact step where there is a posterior."""
    if head.sampler is not None:
        return head.sampler
    if head.has_posterior:
        return Bayes.name
    return Analytic.name if isinstance(head.process, RankOne) else TauLeaping.name


def find_sampler(sampler: str | Sampler) -> Sampler:
    """The sampler of that name, with its default options; one that is given already is itself."""
    return sampler if isinstance(sampler, Sampler) else make_sampler(sampler)


def make_sampler(name: str, **options: Any) -> Sampler:
    """The sampler of that name, with these of its options."""
    known = SAMPLERS | AUTOREGRESSIVE_SAMPLERS
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
