"""Principal components and k-means, in float64 on any device."""

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from m2s.rng import derived_seed

RESTARTS, ITERATIONS = 5, 500


def principal_components(x: Float64[Tensor, "n D"], explained: float) -> Float64[Tensor, "n k"]:
    """Project points onto their first principal components.

    Args:
        x: The points, [n, D].
        explained: The fraction of the variance that the components must explain, in (0, 1].

    Returns:
        The coordinates of the points, centered, [n, k], with the smallest k that explains so much.
    """
    centered = x - x.mean(0)
    values, vectors = torch.linalg.eigh(centered.T @ centered)
    share = values.flip(0).clamp(min=0).cumsum(0)
    count = int((share < explained * share[-1]).sum()) + 1
    return centered @ vectors.flip(1)[:, :count]


def kmeans(x: Float64[Tensor, "n D"], clusters: int, seed: int) -> Int[Tensor, "n"]:
    """Divide points into clusters by Lloyd's algorithm: the best of 5 runs, each from other points as first centers.

    Args:
        x: The points, [n, D].
        clusters: The number of clusters, at most n.
        seed: The seed of the first centers.

    Returns:
        The cluster of each point, [n].
    """
    runs = []
    for restart in range(RESTARTS):
        generator = torch.Generator().manual_seed(derived_seed(seed, "k-means", restart))
        first = torch.randperm(len(x), generator=generator)[:clusters].to(x.device)
        runs.append(lloyd(x, x[first]))
    return min(runs, key=lambda run: run[1])[0]


def lloyd(
    x: Float64[Tensor, "n D"], centers: Float64[Tensor, "k D"], iterations: int = ITERATIONS
) -> tuple[Int[Tensor, "n"], float]:
    """Move centers to the means of their points until no point changes its cluster.

    A center without points moves to the point that is farthest from its center.

    Args:
        x: The points, [n, D].
        centers: The first centers, [k, D].
        iterations: The greatest number of iterations.

    Returns:
        The cluster of each point, [n], and the sum of the squared distances to the centers.
    """
    squares, labels = x.square().sum(1), None
    for _ in range(iterations):
        distances = centers.square().sum(1) - 2 * x @ centers.T
        nearest, found = distances.min(1)
        if labels is not None and torch.equal(found, labels):
            break
        labels = found
        # A product with a one-hot matrix: sums by index are not deterministic on a GPU.
        members = torch.nn.functional.one_hot(labels, len(centers)).to(x.dtype)
        counts = members.sum(0)
        centers = torch.where(counts[:, None] > 0, members.T @ x / counts.clamp(min=1)[:, None], centers)
        if empty := int((counts == 0).sum()):
            centers[counts == 0] = x[(nearest + squares).topk(empty).indices]
    assert labels is not None  # there is at least one iteration
    return labels, float((x - centers[labels]).square().sum())
