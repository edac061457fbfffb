"""Noise schedules: the survival probability alpha_t = e^{-sigma_t} of a token, accurate at both ends of [0, 1].

Every schedule states `alpha`, `beta` = 1 - alpha, `sigma`, `sigma_prime`, and `lost(s, t)` = 1 - alpha_t/alpha_s, each in a
form without cancellation, in the dtype of the time it is given.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}, but it must be a positive number")


class Schedule(ABC):
    """alpha decreasing in t, with alpha_0 = 1 unless the schedule says otherwise."""

    @abstractmethod
    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]: ...

    @abstractmethod
    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """1 - alpha_t, accurate where alpha_t is near one."""

    @abstractmethod
    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """-log alpha_t."""

    @abstractmethod
    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """d sigma / dt = -alpha'/alpha."""

    @abstractmethod
    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """1 - alpha_t/alpha_s for s <= t, accurate for a short step."""

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -self.sigma_prime(t) * self.alpha(t)


@dataclass(frozen=True)
class Linear(Schedule):
    """alpha = 1 - t: the paper's CIFAR-10 and text runs."""

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return 1 - t

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return t.clone()

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.full_like(t, -1.0)

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -torch.log1p(-t)

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return 1 / (1 - t)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (t - s) / (1 - s)


@dataclass(frozen=True)
class Exponential(Schedule):
    """alpha = e^{-horizon t}: the paper's MNIST run, which does not state its horizon. See `Process.prior_kl`."""

    horizon: float

    def __post_init__(self) -> None:
        _positive("horizon", self.horizon)

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.exp(-self.horizon * t)

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -torch.expm1(-self.horizon * t)

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.horizon * t

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.full_like(t, self.horizon)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -torch.expm1(-self.horizon * (t - s))


@dataclass(frozen=True)
class LogLinear(Schedule):
    """alpha = 1 - (1 - eps) t (SEDD): the rate stays finite at t = 1, where alpha = eps."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _positive("eps", self.eps)
        if self.eps >= 1:
            raise ValueError(f"eps is {self.eps}, but it must lie in (0, 1)")

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - t) + self.eps * t

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - self.eps) * t

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.full_like(t, self.eps - 1)

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # log1p is accurate near t = 0 and loses eps near t = 1 in float32; log of alpha is the other way round.
        return torch.where(t < 0.5, -torch.log1p(-self.beta(t)), -torch.log(self.alpha(t)))

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - self.eps) / self.alpha(t)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - self.eps) * (t - s) / self.alpha(s)


@dataclass(frozen=True)
class Geometric(Schedule):
    """sigma = sigma_min^{1-t} sigma_max^t (SEDD). alpha_0 = e^{-sigma_min} is not one: a likelihood needs its
    reconstruction term."""

    sigma_min: float
    sigma_max: float

    def __post_init__(self) -> None:
        _positive("sigma_min", self.sigma_min)
        _positive("sigma_max", self.sigma_max)
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"sigma_min is {self.sigma_min}, but it must be below sigma_max = {self.sigma_max}")

    @property
    def _growth(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.exp(-self.sigma(t))

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -torch.expm1(-self.sigma(t))

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.sigma_min * torch.exp(self._growth * t)

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self._growth * self.sigma(t)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -torch.expm1(-self.sigma(s) * torch.expm1(self._growth * (t - s)))


@dataclass(frozen=True)
class GeometricRate(Schedule):
    """sigma = sigma_max (base^t - 1) / (base - 1) (Campbell et al.): the rate grows like base^t, and sigma(0) = 0.

    The authors write a (b^t - 1): base is b, sigma_max is a (b - 1).

    Args:
        sigma_max: Total noise at t = 1.
        base: How many times larger the rate is at t = 1 than at t = 0; above 1.
    """

    sigma_max: float
    base: float = 100.0

    def __post_init__(self) -> None:
        _positive("sigma_max", self.sigma_max)
        _positive("base", self.base)
        if self.base <= 1:
            raise ValueError(f"base is {self.base}, but it must be above 1")

    @property
    def _growth(self) -> float:
        return math.log(self.base)

    @property
    def _scale(self) -> float:
        return self.sigma_max / (self.base - 1)

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.exp(-self.sigma(t))

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -torch.expm1(-self.sigma(t))

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self._scale * torch.expm1(self._growth * t)

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self._scale * self._growth * torch.exp(self._growth * t)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # sigma_t - sigma_s = scale e^{growth s} expm1(growth (t - s)), without cancellation
        return -torch.expm1(-self._scale * torch.exp(self._growth * s) * torch.expm1(self._growth * (t - s)))


@dataclass(frozen=True)
class Cosine(Schedule):
    """alpha = 1 - cos(pi (1-t) / 2) (MD4), as 2 sin^2(pi (1-t) / 4)."""

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return 2 * torch.sin(math.pi / 4 * (1 - t)) ** 2

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.sin(math.pi / 2 * t)

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -math.pi / 2 * torch.sin(math.pi / 2 * (1 - t))

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.where(t < 0.5, -torch.log1p(-self.beta(t)), -torch.log(self.alpha(t)))

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return math.pi / 2 / torch.tan(math.pi / 4 * (1 - t))

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # sin(pi t/2) - sin(pi s/2), as a product, over alpha_s
        return 2 * torch.sin(math.pi / 4 * ((1 - t) + (1 - s))) * torch.sin(math.pi / 4 * (t - s)) / self.alpha(s)


@dataclass(frozen=True)
class Rescaled(Schedule):
    """alpha = eps + (1 - 2 eps) alpha~ of another schedule alpha~: it falls from 1 - eps to eps where alpha~ falls from 1 to 0.

    MD4's released code trains with it, eps = 1e-4, over its linear and its cosine schedule. Rates and loss weights are then
    finite at both ends of time. Because alpha_0 is not one, a likelihood needs its reconstruction term.

    Args:
        schedule: The schedule alpha~.
        eps: alpha at t = 1 and 1 - alpha at t = 0, in (0, 0.5).

    Example:
        >>> m2s.Absorbing(256, m2s.Rescaled(m2s.Linear(), eps=1e-4))
    """

    schedule: Schedule
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule must be a schedule such as m2s.Linear(), not {self.schedule!r}")
        _positive("eps", self.eps)
        if self.eps >= 0.5:
            raise ValueError(f"eps is {self.eps}, but it must lie in (0, 0.5)")

    @property
    def _factor(self) -> float:
        return 1 - 2 * self.eps

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.eps + self._factor * self.schedule.alpha(t)

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.eps + self._factor * self.schedule.beta(t)

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self._factor * self.schedule.alpha_prime(t)

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        alpha, beta = self.alpha(t), self.beta(t)
        return torch.where(beta < 0.5, -torch.log1p(-beta), -torch.log(alpha))

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -self.alpha_prime(t) / self.alpha(t)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # alpha_s - alpha_t = (1 - 2 eps) alpha~_s lost~(s, t); at alpha~_s = 0, where lost~ is 0/0, nothing is left to lose
        alpha = self.schedule.alpha(s)
        lost = torch.where(alpha > 0, alpha * self.schedule.one_minus_alpha_ratio(s, t), 0)
        return self._factor * lost / self.alpha(s)
