"""How an estimator draws noise: a distribution of noise levels, and noisy tokens at a level.

A term of an estimator is the mean of weight(level) times a function of noisy tokens. `draw` samples a level, `nodes` replaces
the mean over levels by a sum, and `probability` is what enumeration needs.
"""

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s.dtypes import to_float64
from m2s.losses.noise import corrupt_by_counter
from m2s.process import Process
from m2s.validation import SMALLEST

ORDER, PANEL = 8, 2.0  # nodes of Gauss-Legendre in a panel, and its width in logit(t)
OPEN = 1e-11  # an integral that starts at 0 or ends at 1 is cut here in quadrature
POSITION, LEVEL_OF_TIME, COUNT, KIND, TOKEN = 20, 21, 22, 23, 24  # the purposes of random numbers


class Levels(ABC):
    """A distribution of noise levels. A level is a time, a share of masks or a number of masks."""

    @abstractmethod
    def draw(
        self, process: Process, u: Float[Tensor, "B"], sizes: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Return a level for each example, and the weight of its value.

        Args:
            process: The forward process.
            u: Uniform numbers in [0, 1), [B].
            sizes: The number of positions that are corrupted, [B].

        Returns:
            Levels and weights, float64, [B] each.
        """

    @abstractmethod
    def nodes(self, process: Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        """Return levels and weights whose weighted sum is the mean of weight times value, exactly or by quadrature.

        Args:
            process: The forward process.
            size: The number of positions.
            breaks: Times where the integrand has a kink.
        """

    def time(self, process: Process, level: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return the times that belong to levels: the level itself, unless a subclass differs.

        Args:
            process: The forward process.
            level: Levels, [B].

        Returns:
            Times, [B].
        """
        return level

    def corrupt(
        self,
        process: Process,
        x_0: Int[Tensor, "B L"],
        level: Float[Tensor, "B"],
        rows: Int[Tensor, "B"],
        seed: int,
        step: int,
        free: Bool[Tensor, "B L"] | None = None,
    ) -> Int[Tensor, "B L"]:
        """Draw noisy tokens; their noise is a function of the seed, the example and the step.

        Args:
            process: The forward process.
            x_0: Clean tokens, [B, L].
            level: Levels, [B].
            rows: Numbers of the examples, [B].
            seed: The seed.
            step: The number of the pass.
            free: True where a token is corrupted, [B, L]; None: everywhere.

        Returns:
            Noisy tokens, [B, L].
        """
        x_t = corrupt_by_counter(process, x_0, self.time(process, level), rows, seed, step)
        return x_t if free is None else torch.where(free, x_t, x_0)

    def probability(
        self, process: Process, x_0: Int[Tensor, "n L"], x_t: Int[Tensor, "n L"], level: Float[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """Return the probability of noisy tokens given clean ones.

        Args:
            process: The forward process.
            x_0: Clean tokens, [n, L].
            x_t: Noisy tokens, [n, L].
            level: Levels, [n].

        Returns:
            Probabilities, [n], float64.
        """
        t = self.time(process, level)
        return process.rows(x_0, to_float64(t)).gather(-1, x_t.long().unsqueeze(-1)).squeeze(-1).prod(-1)


@dataclass(frozen=True)
class Times(Levels):
    """Times in [low, high), uniform or with density proportional to 1/(t + importance).

    Args:
        low: The smallest time.
        high: The largest time.
        factor: The factor of the mean over uniform times; None: high - low, so that the mean is an integral. Released code
            often leaves it out, which is 1.
        importance: c of the density 1/(t + c); the weight corrects for it. None: uniform.
    """

    low: float
    high: float
    factor: float | None = None
    importance: float | None = None

    @property
    def _scale(self) -> float:
        """The mean over uniform times in units of the integral."""
        return 1.0 if self.factor is None else self.factor / (self.high - self.low)

    def draw(self, process: Process, u: Float[Tensor, "B"], sizes: Int[Tensor, "B"]) -> tuple[Tensor, Tensor]:
        if self.importance is None:
            # u can be 0, and losses take times in (0, 1)
            t = (self.low + (self.high - self.low) * u).clamp(max(self.low, SMALLEST), self.high - 1e-12)
            return t, torch.full_like(t, self._scale * (self.high - self.low))
        start = self.low + self.importance
        log_range = math.log((self.high + self.importance) / start)
        t = (start * torch.exp(log_range * u) - self.importance).clamp(self.low, self.high - 1e-12)
        return t, self._scale * log_range * (t + self.importance)

    def nodes(self, process: Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        return [(t, self._scale * weight) for t, weight in quadrature(self.low, self.high, breaks)]


@dataclass(frozen=True)
class Steps(Levels):
    """The times n/T of a grid, n uniform on first..T. The mean is multiplied by the number of these steps.

    Args:
        steps: T.
        first: The first step that counts.
    """

    steps: int
    first: int = 1

    def draw(self, process: Process, u: Float[Tensor, "B"], sizes: Int[Tensor, "B"]) -> tuple[Tensor, Tensor]:
        count = self.steps - self.first + 1
        number = self.first + (u * count).floor().clamp(max=count - 1)
        return number / self.steps, torch.full_like(u, count)

    def nodes(self, process: Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        return [(number / self.steps, 1.0) for number in range(self.first, self.steps + 1)]


@dataclass(frozen=True)
class Point(Levels):
    """One time.

    Args:
        t: The time.
    """

    t: float

    def draw(self, process: Process, u: Float[Tensor, "B"], sizes: Int[Tensor, "B"]) -> tuple[Tensor, Tensor]:
        return torch.full_like(u, self.t), torch.ones_like(u)

    def nodes(self, process: Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        return [(self.t, 1.0)]


def quadrature(low: float, high: float, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
    """Return nodes and weights of Gauss-Legendre quadrature in logit(t), in which loss integrands are smooth at both ends.

    Args:
        low: The start of the integral; below 1e-11 it starts there.
        high: The end of the integral; above 1 - 1e-11 it ends there.
        breaks: Times between which the integrand is smooth.

    Returns:
        Pairs of t and its weight.
    """
    low, high = max(low, OPEN), min(high, 1 - OPEN)
    ends = [low, *sorted(t for t in breaks if low < t < high), high]
    place, weight = np.polynomial.legendre.leggauss(ORDER)
    found: list[tuple[float, float]] = []
    for start, end in itertools.pairwise(ends):
        first, last = (math.log(t / (1 - t)) for t in (start, end))
        edges = np.linspace(first, last, 1 + max(1, math.ceil((last - first) / PANEL)))
        for left, right in itertools.pairwise(edges.tolist()):
            t = 1 / (1 + np.exp(-((left + right) / 2 + (right - left) / 2 * place)))
            found += zip(t.tolist(), ((right - left) / 2 * weight * t * (1 - t)).tolist(), strict=True)
    return found
