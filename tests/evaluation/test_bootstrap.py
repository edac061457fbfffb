"""Bootstrap intervals: against plain resampling, and by how often they cover what they should."""

import numpy as np
import pytest
from scipy import stats

from m2s.evaluation.bootstrap import bootstrap, paired_bootstrap


def ratio(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


def sequences(generator: np.random.Generator, count: int) -> np.ndarray:
    """nll [n] and tokens [n]; long sequences have more nats a token, so that their ratio differs from the mean of ratios.

    tokens is uniform on 1..20, nll a sum of so many exponential terms of mean 1 + tokens / 10: the ratio of the means is
    E[T + T^2 / 10] / E[T].
    """
    tokens = generator.integers(1, 21, count)
    return np.stack([generator.gamma(tokens, 1 + tokens / 10), tokens], axis=1).astype(np.float64)


SIZES = np.arange(1, 21)
RATIO = (SIZES + SIZES**2 / 10).sum() / SIZES.sum()


def within(hits: int, trials: int, rate: float) -> bool:
    """Return whether so many hits are likely, with p > 1e-4 under the binomial distribution."""
    return stats.binomtest(hits, trials, rate).pvalue > 1e-4


def test_the_interval_is_that_of_resampling_one_by_one() -> None:
    columns = sequences(np.random.default_rng(1), 37)
    ours = bootstrap(columns, ratio, resamples=4000, seed=3)
    generator = np.random.default_rng(99)
    drawn = [ratio(columns[generator.integers(37, size=37)].sum(0)) for _ in range(4000)]
    assert ours.value == columns[:, 0].sum() / columns[:, 1].sum()
    # a quantile of 4,000 draws has standard error sqrt(q (1 - q) / 4000) in rank: .0025 at .025, twice that between two runs
    for end, q in ((ours.low, 0.025), (ours.high, 0.975)):
        rank = np.mean(np.asarray(drawn) <= end)
        assert abs(rank - q) < 4 * np.sqrt(2 * q * (1 - q) / 4000)


def test_coverage_of_a_known_ratio() -> None:
    """Of 500 data sets of 500 sequences about 95% have the true ratio inside their interval.

    In the long run (4,000 data sets) it is 94% here, and so it is for the normal interval of the delta method.
    """
    generator = np.random.default_rng(0)
    intervals = [bootstrap(sequences(generator, 500), ratio, resamples=500, seed=trial) for trial in range(500)]
    assert within(sum(interval.low <= RATIO <= interval.high for interval in intervals), 500, 0.95)


def test_coverage_at_another_level() -> None:
    generator = np.random.default_rng(5)
    inside = sum(
        interval.low <= 0.0 <= interval.high
        for trial in range(1000)
        for interval in [bootstrap(generator.normal(size=(100, 1)), lambda s: s[..., 0] / 100, 300, trial, level=0.8)]
    )
    assert within(inside, 1000, 0.8)


def test_coverage_of_a_paired_difference_and_its_gain() -> None:
    """Two sets that share most of their noise: the paired interval covers the difference, and is far shorter than unpaired."""
    generator = np.random.default_rng(2)
    inside, widths, apart = 0, [], []
    for trial in range(500):
        first = sequences(generator, 200)
        second = first + np.stack([first[:, 1] * generator.normal(0.25, 0.1, 200), np.zeros(200)], axis=1)
        interval = paired_bootstrap(second, first, ratio, resamples=300, seed=trial)
        inside += interval.low <= 0.25 <= interval.high
        widths.append(interval.high - interval.low)
        one, other = (bootstrap(columns, ratio, 300, trial) for columns in (first, second))
        apart.append(np.hypot(one.high - one.low, other.high - other.low))
    assert within(inside, 500, 0.95)
    assert np.mean(widths) < np.mean(apart) / 5


def test_a_shared_seed_draws_the_same_sequences() -> None:
    """The difference of a set and itself is nought in every resample; so is that of a set and its constant shift."""
    columns = sequences(np.random.default_rng(4), 50)
    same = paired_bootstrap(columns, columns, ratio)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    shifted = columns + np.stack([0.5 * columns[:, 1], np.zeros(50)], axis=1)
    gap = paired_bootstrap(shifted, columns, ratio)
    assert np.allclose([gap.value, gap.low, gap.high], 0.5, atol=1e-12)


def test_seeds_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = sequences(np.random.default_rng(6), 30)
    full = bootstrap(columns, ratio, resamples=500, seed=7)
    assert full == bootstrap(columns, ratio, resamples=500, seed=7) != bootstrap(columns, ratio, resamples=500, seed=8)
    monkeypatch.setattr("m2s.evaluation.bootstrap.CHUNK", 100)
    parts = bootstrap(columns, ratio, resamples=500, seed=7)
    assert np.allclose([full.value, full.low, full.high], [parts.value, parts.low, parts.high], rtol=1e-12)


def test_length_weighted_by_hand() -> None:
    columns = np.array([[2.0, 1.0], [6.0, 4.0]])
    assert bootstrap(columns, ratio).value == 8 / 5
    interval = bootstrap(columns, ratio)
    assert (interval.low, interval.high) == (6 / 4, 2.0)  # both rows the same one: a quarter of resamples each


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (np.ones((1, 2)), {}, "1 sequences, but an interval needs at least 2"),
        (np.ones((4, 2)), {"resamples": 10}, "resamples is 10"),
        (np.ones((4, 2)), {"level": 95.0}, "level is 95"),
        (np.ones((4, 2)), {"seed": -1}, "seed is -1"),
        (np.array([[1.0, 1.0], [0.0, 0.0]]), {}, "not finite"),
    ],
)
def test_errors(columns: np.ndarray, options: dict[str, float], message: str) -> None:
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match=message):
        bootstrap(columns, ratio, **options)


def test_pairs_need_as_many_of_both() -> None:
    with pytest.raises(ValueError, match="3 and 4 sequences"):
        paired_bootstrap(np.ones((3, 2)), np.ones((4, 2)), ratio)
