"""The Fréchet distance of embeddings: against scipy, and its jackknife against distances of parts."""

import numpy as np
import pytest
from scipy.linalg import sqrtm

from m2s.evaluation.text.frechet import GROUPS, embedding_distance, jackknife_error


def gaussians(seed: int, count: int, width: int = 5) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(width, width))
    first = generator.normal(size=(count, width)) @ mixing
    return first.astype(np.float32), (generator.normal(0.3, 1.2, (count + 7, width))).astype(np.float32)


def reference_distance(x: np.ndarray, y: np.ndarray) -> float:
    a, b = np.cov(x.T.astype(np.float64)), np.cov(y.T.astype(np.float64))
    gap = x.mean(0, dtype=np.float64) - y.mean(0, dtype=np.float64)
    return float(gap @ gap + np.trace(a) + np.trace(b) - 2 * np.trace(sqrtm(a @ b)).real)


@pytest.mark.parametrize("seed", range(4))
def test_the_distance_is_that_of_the_matrix_root(seed: int) -> None:
    x, y = gaussians(seed, 60)
    assert embedding_distance(x, y) == pytest.approx(reference_distance(x, y), rel=1e-6)
    assert embedding_distance(x, y) == pytest.approx(embedding_distance(y, x), rel=1e-9)
    assert embedding_distance(x, x) == pytest.approx(0, abs=1e-8)


def test_the_jackknife_leaves_out_one_group_at_a_time() -> None:
    x, y = gaussians(9, 50)
    group = np.arange(50) % GROUPS
    values = np.array([reference_distance(x[group != left_out], y) for left_out in range(GROUPS)])
    expected = np.sqrt((GROUPS - 1) / GROUPS * ((values - values.mean()) ** 2).sum())
    assert jackknife_error(x, y) == pytest.approx(expected, rel=1e-5)


def test_few_samples_have_fewer_groups_or_no_error() -> None:
    x, y = gaussians(3, 6)
    group = np.arange(6) % 3
    values = np.array([reference_distance(x[group != left_out], y) for left_out in range(3)])
    expected = np.sqrt(2 / 3 * ((values - values.mean()) ** 2).sum())
    assert jackknife_error(x, y) == pytest.approx(expected, rel=1e-4)
    assert jackknife_error(x[:3], y) is None
