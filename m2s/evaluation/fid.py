"""Distances between two sets of images, each seen through the features of a network: FID and KID.

FID (Heusel et al. 2017) is the squared Fréchet distance of two Gaussians with the features' means and covariances. KID
(Binkowski et al. 2018) is the squared maximum mean discrepancy under the kernel (x.y/D + 1)^3, without bias, over subsets.
"""

import math
import zipfile
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

ROWS = 10_000
"""How many features are kept for KID, at most."""


@dataclass
class Statistics:
    """Count, mean and covariance of features, gathered batch by batch in float64, and some of the features themselves.

    `scatter` is the sum of (x - mean)(x - mean)^T. Memory does not grow with the count: `rows` holds what `update` was told to
    keep, for KID.
    """

    count: int
    mean: Float64[Tensor, "D"]
    scatter: Float64[Tensor, "D D"]
    rows: Float32[Tensor, "rows D"]

    @staticmethod
    def empty(width: int) -> "Statistics":
        zeros = torch.zeros(width, dtype=torch.float64)
        return Statistics(0, zeros, zeros.outer(zeros), torch.empty(0, width))

    @property
    def covariance(self) -> Float64[Tensor, "D D"]:
        """Divided by count - 1, as in every published FID."""
        if self.count < 2:
            raise ValueError(f"{self.count} features have no covariance: at least 2 are needed")
        return self.scatter / (self.count - 1)

    def update(self, features: Float[Tensor, "n D"], keep: Int[Tensor, "kept"] | None = None) -> None:
        """Add features, and keep those with the indices `keep`.

        Merging n of mean m into N of mean M, with d = m - M: the scatter grows by theirs and d d^T N n / (N + n)."""
        if not len(features):
            return
        if not features.isfinite().all():
            raise ValueError(f"features{list(validation.first_index(~features.isfinite()))} is not finite")
        wide = features.detach().cpu().double()
        mean, total = wide.mean(0), self.count + len(wide)
        centred, apart = wide - mean, mean - self.mean
        self.scatter.addmm_(centred.T, centred).addr_(apart, apart, alpha=self.count * len(wide) / total)
        self.mean = self.mean + apart * (len(wide) / total)
        self.count = total
        if keep is not None:
            self.rows = torch.cat([self.rows, wide[keep].float()])

    def save(self, path: Path, key: str = "") -> None:
        """An .npz without pickle; `key` says what the features are of."""
        mean, scatter, rows = self.mean.numpy(), self.scatter.numpy(), self.rows.numpy()
        with atomic_write(path) as temporary:
            np.savez(temporary, count=self.count, key=key, mean=mean, scatter=scatter, rows=rows)

    @staticmethod
    def load(path: Path, key: str = "") -> "Statistics":
        """What `save` wrote under the same `key`."""
        try:
            with np.load(path, allow_pickle=False) as file:
                found, count = str(file["key"]), int(file["count"])
                mean, scatter, rows = (torch.from_numpy(file[name]) for name in ("mean", "scatter", "rows"))
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise BadData(f"{path} holds no statistics of features ({type(error).__name__}: {error})") from error
        width = (mean.numel(),)
        fits = mean.dtype == scatter.dtype == torch.float64 and rows.dtype == torch.float32 and rows.ndim == 2
        if not fits or mean.shape != width or scatter.shape != width * 2 or rows.shape[1:] != width:
            raise BadData(f"{path} holds arrays of the wrong shape or type for statistics of features")
        if found != key:
            raise BadData(f"{path} holds statistics of something else (key {found!r}, expected {key!r})")
        return Statistics(count, mean, scatter, rows)


def kept(total: int, rows: int = ROWS) -> Int[Tensor, "kept"]:
    """Which of `total` features are kept for KID: all, or `rows` of them, evenly spaced."""
    return torch.arange(total) if total <= rows else torch.arange(rows) * total // rows


def frechet(a: Statistics, b: Statistics) -> float:
    """|m_a - m_b|^2 + tr C_a + tr C_b - 2 tr (C_a C_b)^(1/2).

    The last trace is the sum of the singular values of C_a^(1/2) C_b^(1/2), which needs no square root of a matrix that is not
    symmetric, and loses no digits where a covariance is singular.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of width {len(a.mean)} and {len(b.mean)} cannot be compared: use one network for both")
    shared = torch.linalg.svdvals(_root(a.covariance).T @ _root(b.covariance)).sum()
    apart = (a.mean - b.mean).square().sum()
    return float(apart + a.covariance.trace() + b.covariance.trace() - 2 * shared)


def _root(covariance: Float64[Tensor, "D D"]) -> Float64[Tensor, "D rank"]:
    """R with R R^T = covariance; eigenvalues that are zero to rounding are left out."""
    values, vectors = torch.linalg.eigh(covariance)
    real = values > len(values) * torch.finfo(values.dtype).eps * values[-1].clamp(min=0)
    return vectors[:, real] * values[real].sqrt()


@dataclass(frozen=True)
class Kid:
    """The mean over subsets; its standard error; the spread (standard deviation) from subset to subset, which papers print."""

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
    """Kernel distance of `subsets` pairs of random subsets of `size` features, in float64.

    Subsets of the same N features overlap, so that spread / sqrt(subsets) would be too small an error. With the spread s of
    subsets of m out of N, the variance of their mean over new data is s^2 (1/subsets + m/(N - m)): the first term is the choice
    of subsets, the second is the delete-d jackknife. N is that of the smaller set. Where both sets follow one law the true
    error is smaller than this.
    """
    validation.positive_int("subsets", subsets, 2)
    validation.positive_int("size", size, 2)
    count = min(len(features_a), len(features_b))
    if size >= count:
        raise ValueError(f"size is {size}, but subsets of {count} features must be smaller than that")
    random = torch.Generator().manual_seed(seed)
    values = torch.empty(subsets, dtype=torch.float64)
    for i in progress(range(subsets)):
        x, y = (f[torch.randperm(len(f), generator=random)[:size].to(f.device)].double() for f in (features_a, features_b))
        values[i] = discrepancy(x, y)
    spread = float(values.std())
    return Kid(float(values.mean()), spread * math.sqrt(1 / subsets + size / (count - size)), spread, subsets, size, seed)


def discrepancy(x: Float64[Tensor, "m D"], y: Float64[Tensor, "m D"]) -> Float64[Tensor, ""]:
    """mean k(x, x') + mean k(y, y') - 2 mean k(x, y), over pairs of different rows in the first two; k = (x.y/D + 1)^3."""
    xx, yy, xy = ((p @ q.T / x.shape[1] + 1) ** 3 for p, q in ((x, x), (y, y), (x, y)))
    pairs = len(x) * (len(x) - 1)
    return (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / pairs - 2 * xy.mean()
