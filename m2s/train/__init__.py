"""Training: one loop for every head, process, objective and network.

The loop is imported when it is first asked for: it brings torch.distributed, for which commands
that train nothing need not wait.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from m2s.train.config import (
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
    from m2s.train.loop import Diverged, Result, train
    from m2s.train.source import Batch, Source

LATER = {"Batch": "source", "Diverged": "loop", "Result": "loop", "Source": "source", "train": "loop"}

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
    "resolve",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"m2s.train.{LATER[name]}"), name)
