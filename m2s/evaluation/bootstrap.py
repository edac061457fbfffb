"""Bootstrap intervals over sequences. Sequences are independent, the tokens of one sequence are not.

A statistic is a function of sums over sequences, such as exp(sum of nll / sum of tokens). So a resample is a vector of counts,
one for each sequence, and all resamples are one matrix product.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

CHUNK = 2**22  # greatest number of counts in memory at once

Statistic = Callable[[Any], Any]
"""Maps sums of columns [..., c] to values [...]."""


@dataclass(frozen=True)
class Interval:
    """A statistic and its percentile bootstrap interval.

    Args:
        value: The statistic of all sequences.
        low: The lower end of the interval.
        high: The upper end of the interval.
    """

    value: float
    low: float
    high: float


def bootstrap(
    columns: Float[np.ndarray, "n c"], statistic: Statistic, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Compute the percentile bootstrap interval of a statistic.

    The resampled sequences depend on the seed and the number of sequences only. So two sets of the same size are resampled
    with the same indices.

    Args:
        columns: The numbers of each sequence, [n, c].
        statistic: A function of the sums of the columns.
        resamples: The number of resamples, at least 100.
        seed: The seed of the resamples.
        level: The probability of the interval.

    Returns:
        The statistic and its interval.

    Raises:
        ValueError: An argument is out of range, or the statistic is not finite in some resample.
    """
    values = resampled(columns, statistic, resamples, seed)
    return percentile_interval(float(statistic(columns.sum(0))), values, level)


def resampled(
    columns: Float[np.ndarray, "n c"], statistic: Statistic, resamples: int = 2000, seed: int = 0
) -> Float[np.ndarray, "resamples"]:
    """Compute a statistic of bootstrap resamples.

    Args:
        columns: The numbers of each sequence, [n, c].
        statistic: A function of the sums of the columns.
        resamples: The number of resamples, at least 100.
        seed: The seed of the resamples. Sets of the same size are resampled with the same indices.

    Returns:
        The statistic of each resample, [resamples].

    Raises:
        ValueError: An argument is out of range.
    """
    count = len(columns)
    if count < 2:
        raise ValueError(f"there are {count} sequences, but an interval needs at least 2")
    if resamples < 100:
        raise ValueError(f"resamples is {resamples}, but an interval needs at least 100")
    if seed < 0:
        raise ValueError(f"seed is {seed}, but it must be 0 or more")
    chunks = _stored_counts(count, resamples, seed) if resamples * count <= CHUNK else _all_counts(count, resamples, seed)
    return np.concatenate([statistic(counts @ columns) for counts in chunks])


def _all_counts(count: int, resamples: int, seed: int) -> Iterator[Float[np.ndarray, "r n"]]:
    """Yield how often each sequence is in each resample, for some resamples at a time."""
    generator = np.random.default_rng(seed)
    chunk = max(1, CHUNK // count)
    for done in range(0, resamples, chunk):
        yield _counts(generator.integers(count, size=(min(chunk, resamples - done), count))).astype(np.float64)


@functools.lru_cache(maxsize=1)
def _stored_counts(count: int, resamples: int, seed: int) -> list[Float[np.ndarray, "r n"]]:
    """Return the counts, and keep them for the next statistic of as many sequences: drawing them takes most of the time."""
    return list(_all_counts(count, resamples, seed))


def percentile_interval(value: float, values: Float[np.ndarray, "resamples"], level: float = 0.95) -> Interval:
    """Return the percentile interval of a statistic.

    Args:
        value: The statistic of all sequences.
        values: The statistic of each resample, [resamples].
        level: The probability of the interval.

    Returns:
        The statistic and its interval.

    Raises:
        ValueError: The level is out of range, or the statistic is not finite in some resample.
    """
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, but it must lie between 0 and 1")
    if not np.isfinite(values).all():
        raise ValueError("the statistic is not finite in some resamples: too few sequences have anything to count")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def _counts(index: Int[np.ndarray, "r n"]) -> Int[np.ndarray, "r n"]:
    """Count how often each sequence is in each resample."""
    resamples, count = index.shape
    flat = index + count * np.arange(resamples)[:, None]
    return np.bincount(flat.ravel(), minlength=resamples * count).reshape(resamples, count)


def paired_bootstrap(
    first: Float[np.ndarray, "n c"],
    second: Float[np.ndarray, "m c"],
    statistic: Statistic,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Compute the bootstrap interval of statistic(first) - statistic(second) over pairs of sequences.

    Args:
        first: The numbers of each sequence of one set, [n, c].
        second: Those of the other set, [n, c]. Sequence i of both is a pair, and is resampled together.
        statistic: A function of the sums of the columns.
        resamples: The number of resamples, at least 100.
        seed: The seed of the resamples.
        level: The probability of the interval.

    Returns:
        The difference and its interval.

    Raises:
        ValueError: The sets have different sizes, or an argument is out of range.
    """
    if len(first) != len(second):
        raise ValueError(f"there are {len(first)} and {len(second)} sequences, but pairs need the same number of both")
    width = first.shape[1]
    both = np.concatenate([first, second], axis=1)
    return bootstrap(both, lambda sums: statistic(sums[..., :width]) - statistic(sums[..., width:]), resamples, seed, level)


def error_bars(intervals: Sequence[Mapping[str, float]]) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "2 n"]]:
    """Return values and error bars, as matplotlib's `errorbar` takes them.

    Args:
        intervals: Several `Interval`s as dictionaries.

    Returns:
        The values [n], and the lengths of the bars below and above [2, n]. A length is 0 where a skewed
        interval does not contain its value.
    """
    known = [Interval(**interval) for interval in intervals]
    value = np.array([one.value for one in known])
    below_above = np.array([[one.value - one.low for one in known], [one.high - one.value for one in known]])
    return value, np.maximum(below_above, 0.0)
