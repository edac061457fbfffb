"""The registry of benchmark parts."""

from collections.abc import Callable
from typing import Any

from m2s.benchmark.setting import Setting
from m2s.registry import Registry

Measure = Callable[[Setting], dict[str, Any]]
PARTS: Registry[Measure] = Registry("part to measure")
"""The parts of `m2s benchmark` by name. A part measures something in a `Setting` and returns `Comparison.result`."""
