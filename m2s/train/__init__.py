"""Training: one loop for every head, process, objective and network."""

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
from m2s.train.loop import Diverged, Result, train
from m2s.train.source import Batch, Source

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
