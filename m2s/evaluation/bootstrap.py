"""Intervals by resampling whole sequences: the tokens of one sequence lean on each other, the sequences do not.

A statistic is a function of sums over sequences, such as exp(sum of nll / sum of tokens). So a resample is a row of
counts, and all resamples are one matrix product.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

CHUNK = 2**22  # greatest number of counts held at once

Statistic = Callable[[Any], Any]  # sums [..., c] -> values [...]


@dataclass(frozen=True)
class Interval:
    """A statistic of the sequences as they are, and the percentile interval of its resamples."""

    value: float
    low: float
    high: float


def bootstrap(
    columns: Float[np.ndarray, "n c"], statistic: Statistic, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """The percentile interval of `statistic(sums of the columns)`; the rows of `columns` are the sequences.

    The same seed draws the same sequences whatever the columns hold, so that two sets of sequences are resampled alike.
    """
    count = len(columns)
    if count < 2:
        raise ValueError(f"there are {count} sequences, but an interval needs at least 2")
    if resamples < 100:
        raise ValueError(f"resamples is {resamples}, but an interval needs at least 100")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, but it must lie between 0 and 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}, but it must be 0 or more")
    value = float(statistic(columns.sum(0)))
    generator = np.random.default_rng(seed)
    rows = max(1, CHUNK // count)
    draws = (generator.integers(count, size=(min(rows, resamples - done), count)) for done in range(0, resamples, rows))
    drawn = np.concatenate([statistic(_counts(draw) @ columns) for draw in draws])
    if not np.isfinite(drawn).all():
        raise ValueError("the statistic is not finite in some resamples: too few sequences have anything to count")
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def _counts(draw: Int[np.ndarray, "r n"]) -> Int[np.ndarray, "r n"]:
    """How often each sequence is in each resample."""
    rows, count = draw.shape
    flat = draw + count * np.arange(rows)[:, None]
    return np.bincount(flat.ravel(), minlength=rows * count).reshape(rows, count)


def paired(
    first: Float[np.ndarray, "n c"],
    second: Float[np.ndarray, "m c"],
    statistic: Statistic,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """The interval of statistic(first) - statistic(second), where row i of both belongs together and is drawn together."""
    if len(first) != len(second):
        raise ValueError(f"there are {len(first)} and {len(second)} sequences, but pairs need as many of both")
    width = first.shape[1]
    both = np.concatenate([first, second], axis=1)
    return bootstrap(both, lambda sums: statistic(sums[..., :width]) - statistic(sums[..., width:]), resamples, seed, level)


def reach(intervals: Sequence[Mapping[str, float]]) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "2 n"]]:
    """Values, and how far the intervals reach below and above them (nought where a skewed interval leaves its value out)."""
    known = [Interval(**interval) for interval in intervals]
    value = np.array([one.value for one in known])
    below_above = np.array([[one.value - one.low for one in known], [one.high - one.value for one in known]])
    return value, np.maximum(below_above, 0.0)
