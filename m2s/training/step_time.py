"""The time of training steps: a lower bound before the first one, and what the first ones took."""

import math
import time

import torch

MATRIX = {"cpu": 768, "cuda": 8192}  # the size of the product whose speed is measured


def matrix_speed(device: torch.device, bf16: bool) -> float:
    """Measure the speed of a matrix product.

    Args:
        device: The device.
        bf16: Whether the operands are bf16, or else float32.

    Returns:
        Floating point operations per second.
    """
    size = MATRIX.get(device.type, 768)
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if bf16 else torch.float32, device=device)
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def format_seconds(seconds: float) -> str:
    """Return a duration with a unit.

    Args:
        seconds: The duration.
    """
    for limit, size, unit in ((0.1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:,.0f} days"


class Pace:
    """Measures the first steps of a run and says once how long the rest takes.

    Args:
        device: The device. On a GPU the first steps compile kernels and record a graph.
    """

    SECONDS = 1.0  # the time over which steps are measured at least

    def __init__(self, device: torch.device) -> None:
        self._skip = 6 if device.type == "cuda" else 1
        self._count, self._seconds = 0, 0.0

    def add(self, seconds: float, left: int) -> str | None:
        """Add a step.

        Args:
            seconds: The duration of the step.
            left: The number of steps that are left.

        Returns:
            A line for the terminal after enough steps, once; otherwise None.
        """
        if self._skip > 0:
            self._skip -= 1
            return None
        if self._count < 0:
            return None
        self._count, self._seconds = self._count + 1, self._seconds + seconds
        if self._count < 2 or self._seconds < self.SECONDS or not left:
            return None
        each, self._count = self._seconds / self._count, -1
        return f"time: {format_seconds(each)} per step, about {format_seconds(each * left)} for the {left:,} steps left"
