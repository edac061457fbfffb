"""What `m2s benchmark` measures: times, memory and accuracy, as ratios within one run. A part is one file here and one line
below; its `measure` takes a `Setting` and returns what JSON holds. Only the command imports this package."""

from collections.abc import Callable
from typing import Any

from m2s.benchmark import audit, loss, projection, reverse_step, sample, train
from m2s.benchmark.setting import Setting

PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "loss": loss.measure,
    "projection": projection.measure,
    "audit": audit.measure,
    "draw": reverse_step.measure,
    "train": train.measure,
    "sample": sample.measure,
}

__all__ = ["PARTS", "Setting"]
