"""Grids of times from 1 down to 0 (Eq. 17)."""

import math
from collections.abc import Callable


def linear(steps: int) -> list[float]:
    """t_m = 1 - m/M."""
    return [1 - m / steps for m in range(steps)] + [0.0]


def cosine(steps: int) -> list[float]:
    """t_m = cos(pi m / 2M): small steps at the start, where the noise is."""
    return [math.cos(math.pi * m / (2 * steps)) for m in range(steps)] + [0.0]


GRIDS: dict[str, Callable[[int], list[float]]] = {"linear": linear, "cosine": cosine}
