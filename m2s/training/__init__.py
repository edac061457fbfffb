"""Training: one loop for every head, process, loss and network.

The loop is imported on first access, because it imports torch.distributed, which takes time that other commands need not spend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from m2s.data.source import Batch, Source
from m2s.training.config import (
    Config,
    DataConfig,
    HeadConfig,
    NetworkConfig,
    OptimizerConfig,
    ProcessConfig,
    RunConfig,
    resolve,
)

if TYPE_CHECKING:
    from m2s.training.fitting import fit
    from m2s.training.loop import Diverged, Result, train

LAZY_IMPORTS = {"Diverged": "loop", "fit": "fitting", "Result": "loop", "train": "loop"}

__all__ = [
    "Batch",
    "Config",
    "DataConfig",
    "Diverged",
    "HeadConfig",
    "NetworkConfig",
    "OptimizerConfig",
    "ProcessConfig",
    "Result",
    "RunConfig",
    "Source",
    "fit",
    "resolve",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"m2s.training.{LAZY_IMPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY_IMPORTS})
