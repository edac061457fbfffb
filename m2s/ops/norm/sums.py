"""Sizes of the partial sums of the backward pass, which the kernel and its fake version share."""

from torch import Tensor

# Rows of one example per program: more rows leave fewer partial sums to add up, but fewer programs to run in parallel.
ROWS = 16


def number_of_sums(gate: Tensor | None, scale: Tensor | None) -> int:
    """Return how many sums over rows the backward pass computes: U, dshift with modulation, dgate with a gate.

    Args:
        gate: The gate, or None.
        scale: The scale, or None.

    Returns:
        1, 2 or 3.
    """
    return 1 + (scale is not None) + (gate is not None)
