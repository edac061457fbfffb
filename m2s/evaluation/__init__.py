"""Evaluation of models and of samples: NELBO, FID, KID, generative perplexity, audits, with standard errors.

`m2s.audit` is `m2s.evaluation.audit.audit`. `METRICS` and `TEXT_METRICS` are the registries of metrics, to which a plugin adds
its own. The modules are imported on first access, since some of them import large packages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m2s.evaluation.bpd import DatasetNelbo, dataset_nelbo
    from m2s.evaluation.registry import METRICS, Metric
    from m2s.evaluation.text import TEXT_METRICS, TextMetric

PARTS = (
    "audit",
    "bootstrap",
    "bpd",
    "comparison",
    "earlier_names",
    "fid",
    "genppl",
    "gguf",
    "harness",
    "inception",
    "judge",
    "judge_files",
    "likelihood",
    "ngrams",
    "pixels",
    "published",
    "registry",
    "repair",
    "text",
    "zero_shot",
)
LAZY_IMPORTS = {
    "DatasetNelbo": "bpd",
    "dataset_nelbo": "bpd",
    "METRICS": "registry",
    "Metric": "registry",
    "TEXT_METRICS": "text",
    "TextMetric": "text",
}

__all__ = ["METRICS", "TEXT_METRICS", "DatasetNelbo", "Metric", "TextMetric", "dataset_nelbo"]


def __getattr__(name: str) -> Any:
    if name in PARTS:
        return import_module(f"m2s.evaluation.{name}")
    if name in LAZY_IMPORTS:
        return getattr(import_module(f"m2s.evaluation.{LAZY_IMPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
