"""Measures of a model and of its samples: likelihood, FID, generative perplexity, with their errors.

`m2s.audit` is `m2s.evaluate.audit.audit`. What is here is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m2s.evaluate.bpd import Bound, bound

PARTS = ("audit", "bootstrap", "bpd", "fid", "genppl", "inception", "judge", "repair")
LATER = {"Bound": "bpd", "bound": "bpd"}

__all__ = ["Bound", "bound"]


def __getattr__(name: str) -> Any:
    if name in PARTS:
        return import_module(f"m2s.evaluate.{name}")
    if name in LATER:
        return getattr(import_module(f"m2s.evaluate.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
