"""FID and KID: distances between two sets of images, by the features of a network.

FID (Heusel et al. 2017) is the squared Fréchet distance of two Gaussians with the means and covariances of the features. KID
(Binkowski et al. 2018) is the unbiased squared maximum mean discrepancy with k(x, y) = (x.y/D + 1)^3, averaged over subsets.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

from m2s import validation
from m2s.data.files import BadData
from m2s.io import atomic_write
from m2s.npz import read_npz

ROWS = 10_000
"""The greatest number of features that are stored for KID."""


@dataclass
class Statistics:
    """Count, mean and covariance of features, updated batch by batch in float64, and some of the features for KID.

    Memory does not grow with the count.

    Args:
        count: The number of features.
        mean: Their mean, [D].
        scatter: The sum of (x - mean)(x - mean)^T, [D, D].
        rows: The features that `update` stored for KID, [n, D].
    """

    count: int
    mean: Float64[Tensor, "D"]
    scatter: Float64[Tensor, "D D"]
    rows: Float32[Tensor, "rows D"]

    @staticmethod
    def empty(width: int) -> "Statistics":
        """Return the statistics of no features of dimension `width`.

        Args:
            width: The dimension D of a feature.
        """
        zeros = torch.zeros(width, dtype=torch.float64)
        return Statistics(0, zeros, zeros.outer(zeros), torch.empty(0, width))

    @property
    def covariance(self) -> Float64[Tensor, "D D"]:
        """The covariance, divided by count - 1 as in every published FID.

        Raises:
            ValueError: There are fewer than 2 features.
        """
        if self.count < 2:
            raise ValueError(f"{self.count} features have no covariance: at least 2 are needed")
        return self.scatter / (self.count - 1)

    def update(self, features: Float[Tensor, "n D"], selected: Int[Tensor, "kept"] | None = None) -> None:
        """Add features.

        Merging n features of mean m into N of mean M, with d = m - M, adds the scatter of the n and d d^T N n / (N + n).

        Args:
            features: The features, [n, D].
            selected: The indices of those to store for KID; None: none.

        Raises:
            ValueError: A feature is not finite.
        """
        if not len(features):
            return
        if not features.isfinite().all():
            raise ValueError(f"features{list(validation.first_index(~features.isfinite()))} is not finite")
        added = features.detach().cpu().double()
        mean, total = added.mean(0), self.count + len(added)
        centered, shift = added - mean, mean - self.mean
        self.scatter.addmm_(centered.T, centered).addr_(shift, shift, alpha=self.count * len(added) / total)
        self.mean = self.mean + shift * (len(added) / total)
        self.count = total
        if selected is not None:
            self.rows = torch.cat([self.rows, added[selected].float()])

    def save(self, path: Path, key: str = "") -> None:
        """Write a .npz without pickle.

        Args:
            path: The file.
            key: Identifies the images and the network.
        """
        mean, scatter, rows = self.mean.numpy(), self.scatter.numpy(), self.rows.numpy()
        with atomic_write(path) as temporary:
            np.savez(temporary, count=self.count, key=key, mean=mean, scatter=scatter, rows=rows)

    @staticmethod
    def load(path: Path, key: str = "") -> "Statistics":
        """Read what `save` wrote.

        Args:
            path: The file.
            key: The key that the file must have.

        Returns:
            The statistics.

        Raises:
            BadData: The file is missing or damaged, or has another key.
        """
        try:
            file = read_npz(path, ["key", "count", "mean", "scatter", "rows"])
            found, count = str(file["key"]), int(file["count"])
            mean, scatter, rows = (torch.from_numpy(file[name]) for name in ("mean", "scatter", "rows"))
        except (OSError, ValueError, TypeError) as error:
            raise BadData(f"{path} holds no statistics of features ({type(error).__name__}: {error})") from error
        width = (mean.numel(),)
        fits = mean.dtype == scatter.dtype == torch.float64 and rows.dtype == torch.float32 and rows.ndim == 2
        if not fits or mean.shape != width or scatter.shape != width * 2 or rows.shape[1:] != width:
            raise BadData(f"{path} holds arrays of the wrong shape or type for statistics of features")
        if found != key:
            raise BadData(f"{path} holds statistics of something else (key {found!r}, expected {key!r})")
        return Statistics(count, mean, scatter, rows)


def stored_features(total: int, rows: int = ROWS) -> Int[Tensor, "kept"]:
    """Select the features that are stored for KID.

    Args:
        total: The number of features.
        rows: The greatest number to store.

    Returns:
        Indices: all, or `rows` of them, evenly spaced.
    """
    return torch.arange(total) if total <= rows else torch.arange(rows) * total // rows


def frechet(a: Statistics, b: Statistics) -> float:
    """Compute the Fréchet inception distance, |m_a - m_b|^2 + tr C_a + tr C_b - 2 tr (C_a C_b)^(1/2).

    The last trace is the sum of the singular values of C_a^(1/2) C_b^(1/2). This needs no square root of a matrix that is not
    symmetric, and loses no digits where a covariance is singular.

    Args:
        a: The features of one set.
        b: The features of the other.

    Returns:
        The distance.

    Raises:
        ValueError: The features have different dimensions, or a set has fewer than two.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of width {len(a.mean)} and {len(b.mean)} cannot be compared: use one network for both")
    cross = torch.linalg.svdvals(_root(a.covariance).T @ _root(b.covariance)).sum()
    gap = (a.mean - b.mean).square().sum()
    return float(gap + a.covariance.trace() + b.covariance.trace() - 2 * cross)


def _root(covariance: Float64[Tensor, "D D"]) -> Float64[Tensor, "D rank"]:
    """Return R with R R^T = covariance. Eigenvalues that are zero up to rounding are left out."""
    values, vectors = torch.linalg.eigh(covariance)
    real = values > len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
    return vectors[:, real] * values[real].sqrt()


@dataclass(frozen=True)
class Kid:
    """The kernel inception distance.

    Args:
        mean: The mean over subsets.
        error: The standard error of the mean, over new data.
        spread: The standard deviation between subsets, which papers report.
        subsets: The number of subsets.
        size: The number of features of a subset.
        seed: The seed of the subsets.
    """

    mean: float
    error: float
    spread: float
    subsets: int
    size: int
    seed: int


def kid(
    features_a: Float[Tensor, "a D"],
    features_b: Float[Tensor, "b D"],
    subsets: int = 100,
    size: int = 1000,
    seed: int = 0,
    progress: Callable[[range], Iterable[int]] = iter,
) -> Kid:
    """Compute the kernel inception distance over pairs of random subsets, in float64.

    Subsets of the same N features overlap, so spread / sqrt(subsets) would be too small an error. With the spread s of subsets
    of m out of N, the variance of their mean over new data is s^2 (1/subsets + m/(N - m)). The first term is the choice of
    subsets, the second is the delete-d jackknife. N is the size of the smaller set. Where both sets have the same distribution,
    the true error is smaller than this.

    Args:
        features_a: Features of one set, [a, D].
        features_b: Features of the other, [b, D].
        subsets: The number of pairs of subsets.
        size: The number of features of a subset, below that of both sets.
        seed: The seed of the subsets.
        progress: Wraps the range of subsets, for a progress bar.

    Returns:
        The mean over subsets and its errors.

    Raises:
        ValueError: `size` is too large.
    """
    validation.positive_int("subsets", subsets, 2)
    validation.positive_int("size", size, 2)
    count = min(len(features_a), len(features_b))
    if size >= count:
        raise ValueError(f"size is {size}, but subsets of {count} features must be smaller than that")
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(subsets, dtype=torch.float64)
    for i in progress(range(subsets)):
        x, y = (f[torch.randperm(len(f), generator=generator)[:size].to(f.device)].double() for f in (features_a, features_b))
        values[i] = squared_mmd(x, y)
    spread = float(values.std())
    return Kid(float(values.mean()), spread * math.sqrt(1 / subsets + size / (count - size)), spread, subsets, size, seed)


def squared_mmd(x: Float64[Tensor, "m D"], y: Float64[Tensor, "m D"]) -> Float64[Tensor, ""]:
    """Compute the unbiased squared MMD, mean k(x, x') + mean k(y, y') - 2 mean k(x, y) with k = (x.y/D + 1)^3.

    Args:
        x: Features, [m, D].
        y: Features, [m, D].

    Returns:
        The discrepancy, a scalar. The first two means are over pairs of different features.
    """
    xx, yy, xy = ((p @ q.T / x.shape[1] + 1) ** 3 for p, q in ((x, x), (y, y), (x, y)))
    pairs = len(x) * (len(x) - 1)
    return (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / pairs - 2 * xy.mean()
