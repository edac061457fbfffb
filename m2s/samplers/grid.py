"""Grids of times from 1 down to 0 (Eq. 17)."""

import math
from collections.abc import Callable


def linear(steps: int) -> list[float]:
    """t_m = 1 - m/M."""
    return [1 - m / steps for m in range(steps)] + [0.0]


def cosine(steps: int) -> list[float]:
    """t_m = cos(pi m / 2M): small steps at the start, where the noise is."""
    return [math.cos(math.pi * m / (2 * steps)) for m in range(steps)] + [0.0]


def of_chain(times: list[float], steps: int) -> list[float]:
    """A grid over a chain of finitely many steps: every time the nearest n/T that is not taken and leaves one to each of those
    after it; all of them, once, where the grid has as many or more."""
    moves = min(len(times) - 1, steps)
    if moves == steps:
        return [n / steps for n in range(steps, -1, -1)]
    taken = [steps]
    for m, time in enumerate(times[1:], 1):
        taken.append(min(taken[-1] - 1, max(round(time * steps), moves - m)))
    return [n / steps for n in taken]


GRIDS: dict[str, Callable[[int], list[float]]] = {"linear": linear, "cosine": cosine}
