"""Grids of times from 1 down to 0 (Eq. 17)."""

import math
from collections.abc import Callable

from m2s.registry import Registry

GRIDS: Registry[Callable[[int], list[float]]] = Registry("grid")


@GRIDS.register("linear")
def linear(steps: int) -> list[float]:
    """Return t_m = 1 - m/M.

    Args:
        steps: M, the number of steps.

    Returns:
        M + 1 times.
    """
    return [1 - m / steps for m in range(steps)] + [0.0]


@GRIDS.register("cosine")
def cosine(steps: int) -> list[float]:
    """Return t_m = cos(pi m / 2M): small steps at the start, where most of the noise is.

    Args:
        steps: M, the number of steps.

    Returns:
        M + 1 times.
    """
    return [math.cos(math.pi * m / (2 * steps)) for m in range(steps)] + [0.0]


def chain_grid(times: list[float], steps: int) -> list[float]:
    """Move the times of a grid to those of a finite chain, n/T.

    Each time becomes the nearest n/T that is below the one before and leaves at least one for each time after it. A grid with
    T steps or more becomes all times of the chain.

    Args:
        times: Decreasing times from 1 to 0.
        steps: T, the number of steps of the chain.

    Returns:
        Strictly decreasing times from 1 to 0.
    """
    moves = min(len(times) - 1, steps)
    if moves == steps:
        return [n / steps for n in range(steps, -1, -1)]
    taken = [steps]
    for m, time in enumerate(times[1:], 1):
        taken.append(min(taken[-1] - 1, max(round(time * steps), moves - m)))
    return [n / steps for n in taken]
