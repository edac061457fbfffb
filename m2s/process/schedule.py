"""Noise schedules: the survival probability alpha_t = e^{-sigma_t} of a token.

Every schedule has `alpha`, `beta` = 1 - alpha, `sigma` = -log alpha, the derivatives `alpha_prime` and `sigma_prime`, and
`one_minus_alpha_ratio(s, t)` = 1 - alpha_t/alpha_s. Each takes times in [0, 1] of any shape and returns the same shape and
dtype. Each is accurate to a few units in the last place at both ends of time, also in float32: where `1 - exp(x)` or
`log(1 + x)` would cancel, `expm1` and `log1p` are used, and differences are written as products.
"""

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import validation
from m2s.errors import UserError, UserTypeError

_warned: set[type] = set()  # classes of schedules for which a warning about precision was given


class Schedule(ABC):
    """Base class of noise schedules: alpha_t decreases in t. A subclass implements `alpha`.

    The other functions have defaults that follow from alpha in float64, the derivatives by forward-mode differentiation. They
    lose digits where beta or alpha is tiny: 1 - alpha_t has an error of about 1e-16, so its relative error is 1e-16 / beta_t.
    The first use of a default warns about that, and raises an error where alpha does not decrease or differentiation does not
    find its derivative. Implement `beta`, `sigma`, `sigma_prime` and `one_minus_alpha_ratio` too to be
    accurate at both ends of time, as the schedules of this module do.

    alpha_0 = 1, except for `Geometric` and `Rescaled`. A schedule with alpha_0 < 1 corrupts already at t = 0, so that a
    likelihood needs its reconstruction term.

    Example:
        >>> class Square(m2s.Schedule):
        ...     def alpha(self, t):
        ...         return (1 - t) ** 2
        >>> head = m2s.Posterior(m2s.Uniform(27, Square()))
    """

    @abstractmethod
    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return alpha_t, the probability that a token is untouched; accurate where it is near zero.

        Args:
            t: Times in [0, 1], [*b]. Defaults of the other functions call it in float64.

        Returns:
            alpha_t, [*b], in the dtype of `t`.
        """

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return beta_t = 1 - alpha_t, accurate where alpha_t is near one.

        Args:
            t: Times in [0, 1], [*b].

        Returns:
            beta_t, [*b], in the dtype of `t`.
        """
        self._warn(t)
        return (1 - self.alpha(t.double())).to(t.dtype)

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return sigma_t = -log alpha_t, the total noise.

        Args:
            t: Times in [0, 1], [*b].

        Returns:
            sigma_t, [*b], in the dtype of `t`. It is infinite where alpha_t = 0.
        """
        self._warn(t)
        return -torch.log(self.alpha(t.double())).to(t.dtype)

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return sigma_t' = -alpha_t'/alpha_t, the noise rate.

        Args:
            t: Times in [0, 1], [*b].

        Returns:
            sigma_t', [*b], in the dtype of `t`. It is infinite where alpha_t = 0.
        """
        alpha, slope = self._with_slope(t)
        return (-slope / alpha).to(t.dtype)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return 1 - alpha_t/alpha_s for s <= t, accurate for a short step.

        It is the probability that a token which is untouched at s is replaced between s and t.

        Args:
            s: Start times, [*b], at most `t`.
            t: End times, [*b].

        Returns:
            1 - alpha_t/alpha_s, [*b], in the dtype of `t`.
        """
        self._warn(t)
        before, after = self.alpha(s.double()), self.alpha(t.double())
        # where no token is untouched at s, none is replaced later
        return torch.where(before > 0, (before - after) / before, 0).to(t.dtype)

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return alpha_t', which is negative.

        Args:
            t: Times in [0, 1], [*b].

        Returns:
            alpha_t', [*b], in the dtype of `t`.
        """
        if type(self).sigma_prime is Schedule.sigma_prime:  # the product below would be 0 times infinity at alpha = 0
            return self._with_slope(t)[1].to(t.dtype)
        return -self.sigma_prime(t) * self.alpha(t)

    def __repr__(self) -> str:
        """The class and its arguments, as a dataclass has them."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({arguments})"

    def _with_slope(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha_t and its derivative, in float64."""
        self._warn(t)
        return self._differentiate(t)

    def _differentiate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha_t and its derivative, in float64, by forward-mode differentiation."""
        time = t.double().contiguous()  # an expanded tensor cannot carry a tangent
        found = torch.func.jvp(self.alpha, (time,), (torch.ones_like(time),))
        return found[0], found[1]

    def _warn(self, t: Tensor) -> None:
        """Check alpha and warn, once for each class that a default is used."""
        kind = type(self)
        if kind not in _warned and type(t).__name__ != "FakeTensor":  # tensors without values cannot be checked
            self._check_alpha(t.device)
            _warned.add(kind)
            warnings.warn(
                f"{kind.__name__} leaves beta, sigma or a derivative to m2s, which computes them from alpha in float64: "
                "digits are lost near t = 0 and t = 1. Implement them for full precision",
                stacklevel=3,
            )

    def _check_alpha(self, device: torch.device) -> None:
        """Raise an error unless alpha decreases and its derivative is that which differentiation finds."""
        name, t = f"{type(self).__name__}.alpha", torch.linspace(0.05, 0.95, 1001, dtype=torch.float64, device=device)
        found = self.alpha(t)
        if not isinstance(found, Tensor) or found.shape != t.shape:
            raise UserTypeError(f"{name} must return a tensor of the shape of t, computed from t with operations of torch")
        low, high = float(found.min()), float(found.max())
        fall = float(found[0] - found[-1])
        if not (low >= 0 and high <= 1 and fall > 0 and bool((found.diff() <= 0).all())):
            raise UserError(
                f"{name} must lie in [0, 1] and decrease in t, but between t = 0.05 and t = 0.95 it goes from "
                f"{float(found[0]):.4g} to {float(found[-1]):.4g}, with values between {low:.4g} and {high:.4g}"
            )
        if type(self).sigma_prime is not Schedule.sigma_prime:
            return
        integral = -float(torch.trapezoid(self._differentiate(t)[1], t))
        if not abs(integral - fall) <= 0.1 * fall:
            raise UserError(
                f"{name} cannot be differentiated: it falls by {fall:.4g} between t = 0.05 and t = 0.95, but the integral of "
                f"its derivative is {integral:.4g}. Compute it from t with operations of torch, without .item(), float(t) or "
                "detach(), or implement sigma_prime too"
            )


@dataclass(frozen=True)
class Linear(Schedule):
    """alpha_t = 1 - t, the schedule of the paper's CIFAR-10 and text runs.

        sigma_t = -log(1 - t),    sigma_t' = 1 / (1 - t)

    Nothing is left of the data at t = 1, where the rate is infinite: samplers start at 1 - t_min.

    Example:
        >>> m2s.Uniform(256, m2s.Linear())
    """

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
    """alpha_t = e^{-horizon t}, the schedule of the paper's MNIST run.

        sigma_t = horizon t,    sigma_t' = horizon

    The paper does not state its horizon. A short one leaves information at t = 1, which `Process.prior_kl` measures: at
    horizon 1 and K = 256 it is 1.40 nats per position.

    Args:
        horizon: Total noise at t = 1.
    """

    horizon: float

    def __post_init__(self) -> None:
        validation.positive_number("horizon", self.horizon)

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
    """alpha_t = 1 - (1 - eps) t, the log-linear schedule of SEDD: the rate stays finite at t = 1, where alpha_1 = eps.

        sigma_t = -log(1 - (1 - eps) t),    sigma_t' = (1 - eps) / alpha_t

    Args:
        eps: alpha at t = 1, in (0, 1).
    """

    eps: float = 1e-3

    def __post_init__(self) -> None:
        validation.positive_number("eps", self.eps)
        validation.in_interval("eps", self.eps, "(0, 1)")

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - t) + self.eps * t  # 1 - (1 - eps) t would lose eps near t = 1

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - self.eps) * t

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.full_like(t, self.eps - 1)

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # log1p(-beta) is accurate near t = 0 and loses eps near t = 1 in float32; log(alpha) is the other way round.
        return torch.where(t < 0.5, -torch.log1p(-self.beta(t)), -torch.log(self.alpha(t)))

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - self.eps) / self.alpha(t)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - self.eps) * (t - s) / self.alpha(s)


@dataclass(frozen=True)
class Geometric(Schedule):
    """sigma_t = sigma_min^{1-t} sigma_max^t, the geometric schedule of SEDD.

        alpha_t = e^{-sigma_t},    sigma_t' = log(sigma_max/sigma_min) sigma_t

    alpha_0 = e^{-sigma_min} is not one, so that a likelihood needs its reconstruction term.

    Args:
        sigma_min: Total noise at t = 0.
        sigma_max: Total noise at t = 1, above `sigma_min`.

    Raises:
        UserError: `sigma_min` is not in (0, sigma_max).
    """

    sigma_min: float
    sigma_max: float

    def __post_init__(self) -> None:
        validation.positive_number("sigma_min", self.sigma_min)
        validation.positive_number("sigma_max", self.sigma_max)
        if self.sigma_min >= self.sigma_max:
            raise UserError(option="sigma_min", value=self.sigma_min, expected=f"below sigma_max = {self.sigma_max}")

    @property
    def _growth(self) -> float:
        """log(sigma_max/sigma_min), the growth rate of sigma."""
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
        # sigma_t - sigma_s = sigma_s expm1(growth (t - s)), without cancellation
        return -torch.expm1(-self.sigma(s) * torch.expm1(self._growth * (t - s)))


@dataclass(frozen=True)
class GeometricRate(Schedule):
    """sigma_t = sigma_max (base^t - 1) / (base - 1), the schedule of Campbell et al. (2022): sigma_0 = 0.

        alpha_t = e^{-sigma_t},    sigma_t' = sigma_max log(base) base^t / (base - 1)

    The rate grows like base^t. The authors write sigma_t = a (b^t - 1): base is b, and sigma_max is a (b - 1).

    Args:
        sigma_max: Total noise at t = 1.
        base: The rate at t = 1 over the rate at t = 0; above 1.

    Raises:
        UserError: `base` is not above 1.
    """

    sigma_max: float
    base: float = 100.0

    def __post_init__(self) -> None:
        validation.positive_number("sigma_max", self.sigma_max)
        validation.positive_number("base", self.base)
        if self.base <= 1:
            raise UserError(option="base", value=self.base, expected="above 1")

    @property
    def _growth(self) -> float:
        """log(base), the growth rate of sigma'."""
        return math.log(self.base)

    @property
    def _scale(self) -> float:
        """The factor a in sigma_t = a (base^t - 1)."""
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
    """alpha_t = 1 - cos(pi (1-t) / 2) = 2 sin^2(pi (1-t) / 4), the cosine schedule of MD4.

        beta_t = sin(pi t / 2),    sigma_t' = (pi/2) cot(pi (1-t) / 4)

    Like `Linear`, it has alpha_1 = 0 and an infinite rate at t = 1.
    """

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # 1 - cos would cancel near t = 1
        return 2 * torch.sin(math.pi / 4 * (1 - t)) ** 2

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.sin(math.pi / 2 * t)

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -math.pi / 2 * torch.sin(math.pi / 2 * (1 - t))

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # each form is accurate in its half of [0, 1], as in LogLinear
        return torch.where(t < 0.5, -torch.log1p(-self.beta(t)), -torch.log(self.alpha(t)))

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return math.pi / 2 / torch.tan(math.pi / 4 * (1 - t))

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # (sin(pi t/2) - sin(pi s/2)) / alpha_s, the difference of sines written as a product
        return 2 * torch.sin(math.pi / 4 * ((1 - t) + (1 - s))) * torch.sin(math.pi / 4 * (t - s)) / self.alpha(s)


@dataclass(frozen=True)
class Rescaled(Schedule):
    """alpha_t = eps + (1 - 2 eps) alpha~_t for another schedule alpha~: between 1 - eps and eps if alpha~ is between 1 and 0.

    MD4's released code trains with eps = 1e-4 over its linear and its cosine schedule. Rates and loss weights are then finite
    at both ends of time. Because alpha_0 is not one, a likelihood needs its reconstruction term.

    Args:
        schedule: The schedule alpha~.
        eps: alpha at t = 1 and 1 - alpha at t = 0, in (0, 0.5).

    Example:
        >>> m2s.Absorbing(256, m2s.Rescaled(m2s.Linear(), eps=1e-4))
    """

    schedule: Schedule
    eps: float = 1e-4

    def __post_init__(self) -> None:
        validation.instance("schedule", self.schedule, Schedule, "a schedule such as m2s.Linear()")
        validation.positive_number("eps", self.eps)
        validation.in_interval("eps", self.eps, "(0, 0.5)")

    @property
    def _factor(self) -> float:
        """1 - 2 eps."""
        return 1 - 2 * self.eps

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.eps + self._factor * self.schedule.alpha(t)

    def beta(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.eps + self._factor * self.schedule.beta(t)

    def alpha_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self._factor * self.schedule.alpha_prime(t)

    def sigma(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        alpha, beta = self.alpha(t), self.beta(t)
        # each form is accurate on its side of beta = 1/2
        return torch.where(beta < 0.5, -torch.log1p(-beta), -torch.log(alpha))

    def sigma_prime(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return -self.alpha_prime(t) / self.alpha(t)

    def one_minus_alpha_ratio(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        # alpha_s - alpha_t = (1 - 2 eps) alpha~_s (1 - alpha~_t/alpha~_s); where alpha~_s = 0 the ratio is 0/0 and the
        # difference is 0
        alpha = self.schedule.alpha(s)
        difference = torch.where(alpha > 0, alpha * self.schedule.one_minus_alpha_ratio(s, t), 0)
        return self._factor * difference / self.alpha(s)
