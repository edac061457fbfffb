"""MAUVE: its parts against scipy and closed forms, and the properties of the definition."""

import itertools

import numpy as np
import pytest
import torch
from scipy.cluster.vq import kmeans2
from scipy.special import beta, rel_entr

from m2s.evaluation.text.clusters import kmeans, lloyd, principal_components
from m2s.evaluation.text.mauve import WEIGHTS, divergence_frontier, frontier_area, mauve_score


def published_area(p: np.ndarray, q: np.ndarray) -> float:
    """The mean of the areas over either axis, as the paper defines it, with the points sorted by each axis."""
    points = [(1.0, 0.0), (0.0, 1.0)]
    for w in WEIGHTS:
        r = w * p + (1 - w) * q
        points.append((np.exp(-5 * rel_entr(q, r).sum()), np.exp(-5 * rel_entr(p, r).sum())))
    areas = []
    for first, second in ((0, 1), (1, 0)):
        ordered = sorted((point[first], -point[second]) for point in points)
        areas.append(sum((b[0] - a[0]) * (-a[1] - b[1]) / 2 for a, b in itertools.pairwise(ordered)))
    return sum(areas) / 2


def histograms(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two histograms of 12 clusters, some of which are empty."""
    counts = np.random.default_rng(seed).poisson(2.0, (2, 12)) + np.eye(2, 12)
    return counts[0] / counts[0].sum(), counts[1] / counts[1].sum()


@pytest.mark.parametrize("seed", range(8))
def test_the_area_is_that_of_the_paper(seed: int) -> None:
    p, q = histograms(seed)
    assert frontier_area(p, q) == pytest.approx(published_area(p, q), abs=1e-12)
    assert 0 < frontier_area(p, q) < 1


@pytest.mark.parametrize("seed", range(8))
def test_the_area_is_symmetric_and_one_for_equal_histograms(seed: int) -> None:
    p, q = histograms(seed)
    assert frontier_area(p, q) == pytest.approx(frontier_area(q, p), abs=1e-12)
    assert frontier_area(p, p) == pytest.approx(1, abs=1e-12)


def test_disjoint_histograms() -> None:
    """The frontier is ((1 - w)^c, w^c), and the area below it c B(c + 1, c). The trapezoids of a convex curve are larger."""
    p, q = np.array([0.3, 0.7, 0, 0]), np.array([0, 0, 0.5, 0.5])
    points = divergence_frontier(p, q)
    inner = np.stack([(1 - WEIGHTS) ** 5, WEIGHTS**5], 1)
    assert np.allclose(points[1:-1], inner, rtol=1e-9) and points[0].tolist() == [1, 0] and points[-1].tolist() == [0, 1]
    exact = 5 * beta(6, 5)
    assert exact < frontier_area(p, q) < 1.05 * exact


def test_the_area_falls_as_a_part_of_other_text_is_mixed_in() -> None:
    p, other = histograms(3)
    areas = [frontier_area(p, (1 - weight) * p + weight * other) for weight in np.linspace(0, 1, 21)]
    assert (np.diff(areas) < 0).all()


def test_lloyd_is_that_of_scipy() -> None:
    x = np.random.default_rng(0).normal(size=(300, 5)) + 4 * np.eye(5)[np.arange(300) % 5]
    first = x[:7]
    centers, labels = kmeans2(x, first, iter=500, minit="matrix")
    found, inertia = lloyd(torch.from_numpy(x), torch.from_numpy(first))
    assert found.tolist() == labels.tolist()
    assert inertia == pytest.approx(((x - centers[labels]) ** 2).sum())


def test_kmeans_returns_the_best_run_and_fills_clusters() -> None:
    """Equal points leave all but one cluster without points; distinct far groups are found."""
    groups = torch.eye(4, dtype=torch.float64).repeat(10, 1) * 100 + torch.arange(40)[:, None] * 1e-3
    labels = kmeans(groups, 4, seed=1)
    assert all(len(set(labels[start::4].tolist())) == 1 for start in range(4)) and len(set(labels.tolist())) == 4
    assert len(set(kmeans(torch.ones(20, 3, dtype=torch.float64), 5, seed=0).tolist())) == 1
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(80, 3)))
    runs = [lloyd(x, x[torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:8]])[1] for seed in range(40)]
    labels = kmeans(x, 8, seed=3)
    centers = torch.stack([x[labels == label].mean(0) for label in range(8)])
    assert float((x - centers[labels]).square().sum()) <= np.median(runs)


def test_an_empty_cluster_moves_to_the_farthest_point() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [50.0]], dtype=torch.float64)
    labels, inertia = lloyd(x, torch.tensor([[1.0], [1e6]], dtype=torch.float64))
    assert labels.tolist() == [0, 0, 0, 1] and inertia == pytest.approx(2.0)


def test_principal_components_keep_the_variance() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 6)) * np.array([5, 3, 2, 1, 0.5, 0.1]) @ np.linalg.qr(generator.normal(size=(6, 6)))[0] + 7
    variances = np.sort(np.linalg.eigvalsh(np.cov(x.T)))[::-1]
    shares = variances.cumsum() / variances.sum()
    for explained in (0.5, 0.9, 0.99, 1.0):
        found = principal_components(torch.from_numpy(x), explained).numpy()
        count = int(np.searchsorted(shares, explained)) + 1 if explained < 1 else 6
        assert found.shape == (200, count)
        assert np.allclose(np.cov(found.T), np.diag(variances[:count]), atol=1e-9)


def test_identical_sets_have_the_value_one() -> None:
    x = np.random.default_rng(0).normal(size=(60, 9)).astype(np.float32)
    found = mauve_score(x, x)
    assert found.value == pytest.approx(1, abs=1e-12) and found.clusters == 6 and len(found.seeds) == 5


def test_the_value_is_that_of_the_true_clusters() -> None:
    """With far groups k-means finds them, so that the histograms are known. The length of an embedding does not matter."""
    generator = np.random.default_rng(5)

    def points(counts: list[int]) -> np.ndarray:
        centers = np.repeat(np.eye(3), counts, axis=0)
        scale = generator.uniform(0.1, 9.0, (len(centers), 1))
        return ((centers + generator.normal(0, 0.02, centers.shape)) * scale).astype(np.float32)

    samples, reference = points([18, 10, 2]), points([10, 9, 11])
    found = mauve_score(samples, reference, seed=4)
    expected = frontier_area(np.array([10, 9, 11]) / 30, np.array([18, 10, 2]) / 30)
    assert found.clusters == 3 and found.components == 2
    assert found.seeds == pytest.approx([expected] * 5)
    assert found.value == pytest.approx(expected)


def test_other_distributions_have_lower_values() -> None:
    generator = np.random.default_rng(1)
    real, same, near, far = (generator.normal(shift, 1, (200, 4)).astype(np.float32) for shift in (0, 0, 0.7, 3))
    values = [mauve_score(samples, real).value for samples in (same, near, far)]
    assert values == sorted(values, reverse=True) and values[0] > 0.8 and values[2] < 0.2
    assert mauve_score(near, real) == mauve_score(near, real)
    assert mauve_score(near, real, seed=1).seeds != mauve_score(near, real, seed=2).seeds
