"""Measures of a model and of its samples: likelihood, FID, generative perplexity, with their errors.

`m2s.audit` is `m2s.evaluation.audit.audit`. What is here is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m2s.evaluation.bpd import DatasetNelbo, dataset_nelbo

PARTS = ("audit", "bootstrap", "bpd", "fid", "genppl", "inception", "judge", "repair")
LATER = {"DatasetNelbo": "bpd", "dataset_nelbo": "bpd"}

__all__ = ["DatasetNelbo", "dataset_nelbo"]


def __getattr__(name: str) -> Any:
    if name in PARTS:
        return import_module(f"m2s.evaluation.{name}")
    if name in LATER:
        return getattr(import_module(f"m2s.evaluation.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
