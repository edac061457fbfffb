"""The rank-one family: P_t(y|z) = alpha_t [y = z] + m_t(y), where the mixing law m_t has one value on clean tokens and one
on the mask.

    between s < t:  P_{t|s} = A I + 1 q^T,   A = alpha_t / alpha_s,   q = m_t - A m_s
    rates:          Q_t(y -> k) = n_t(k) for y != k,   n_t = m_t' - (alpha_t'/alpha_t) m_t

so that everything about a site is a handful of scalars, whatever the size of the vocabulary.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.process.base import Process, kl_terms
from m2s.process.schedule import Schedule


class Mixing(NamedTuple):
    """A measure that is constant on the clean tokens: its value on each of them, and on the mask (0 without one)."""

    clean: Tensor
    mask: Tensor


class SiteCoefficients(NamedTuple):
    """The scalars of one site at time t, k = x_t its current token; each has the shape of x_t."""

    alpha: Tensor  # alpha_t
    own: Tensor  # m_t(k)
    stay: Tensor  # alpha_t + m_t(k) = P_t(k|k)
    clean: Tensor  # m_t(y) for a clean y
    mask: Tensor  # m_t(mask)
    rate: Tensor  # n_t(k): the forward rate into k from anywhere else


class RankOne(Process):
    """Base of `Uniform`, `Absorbing` and `Hybrid`."""

    @property
    def rank_one(self) -> "RankOne":
        return self

    @property
    def is_pure_mask(self) -> bool:
        """Whether nothing but the mask ever takes a token's place."""
        return False

    @abstractmethod
    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The probability alpha_t that a token was never touched."""

    @abstractmethod
    def mixing(self, t: Float[Tensor, "*b"]) -> Mixing:
        """m_t."""

    @abstractmethod
    def mixing_rate(self, t: Float[Tensor, "*b"]) -> Mixing:
        """n_t = m_t' - (alpha'/alpha) m_t."""

    @abstractmethod
    def step(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> tuple[Tensor, Mixing]:
        """A = alpha_t/alpha_s and q = m_t - A m_s, without cancellation."""

    def removed_noise(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> tuple[Tensor, Mixing]:
        """A and q of the noise that a reverse step from t to s removes: `step(s, t)`, and for s = 0 all of P_t.

        The two differ at s = 0 under a schedule with sigma(0) > 0, where P_{t|0} leaves the noise of t = 0 in place.
        """
        keep, mixing = self.step(s, t)
        clean, whole = s <= 0, self.mixing(t)
        parts = (torch.where(clean, *pair) for pair in zip(whole, mixing, strict=True))
        return torch.where(clean, self.alpha(t), keep), Mixing(*parts)

    def at(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> SiteCoefficients:
        """The scalars of every site."""
        t = validation.align("t", t, x_t)
        alpha, mixing, rate = self.alpha(t), self.mixing(t), self.mixing_rate(t)
        masked = x_t.long() == self.mask if self.mask is not None else torch.zeros_like(x_t, dtype=torch.bool)
        own = torch.where(masked, mixing.mask, mixing.clean)
        full = torch.broadcast_tensors(
            alpha, own, alpha + own, mixing.clean, mixing.mask, torch.where(masked, rate.mask, rate.clean)
        )
        return SiteCoefficients(*full)

    def _vector(self, mixing: Mixing) -> Tensor:
        clean = mixing.clean.unsqueeze(-1).expand(*mixing.clean.shape, self.vocab)
        return clean if self.mask is None else torch.cat([clean, mixing.mask.unsqueeze(-1)], -1)

    def _matrix(self, diagonal: Tensor, mixing: Mixing) -> Tensor:
        eye = torch.eye(self.states, dtype=diagonal.dtype, device=diagonal.device)
        return diagonal[..., None, None] * eye + self._vector(mixing).unsqueeze(-2)

    def kernel(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return self._matrix(self.alpha(t), self.mixing(t))

    def step_kernel(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return self._matrix(*self.step(s, t))

    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        rate = self.mixing_rate(t)
        total = rate.clean * self.vocab + rate.mask
        return self._matrix(-total, rate)

    def rows(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        t = validation.align("t", t, x_0)
        rows = self._vector(self.mixing(t)).expand(*x_0.shape, self.states).clone()
        return rows.scatter_add_(-1, x_0.long().unsqueeze(-1), self.alpha(t).expand(x_0.shape).unsqueeze(-1))

    def columns(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        site = self.at(x_t, t)
        columns = site.own.unsqueeze(-1).repeat(*(1 for _ in x_t.shape), self.states)
        return columns.scatter_(-1, x_t.long().unsqueeze(-1), site.stay.unsqueeze(-1))

    def rates_into(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        rate = self.at(x_t, t).rate.unsqueeze(-1).repeat(*(1 for _ in x_t.shape), self.states)
        return rate.scatter_(-1, x_t.long().unsqueeze(-1), 0.0)

    def reference(self) -> Float[Tensor, "S"]:
        end = torch.ones((), dtype=torch.float64)
        if self.is_pure_mask:
            return self._vector(Mixing(torch.zeros_like(end), end))
        mixing = self.mixing(end)
        return self._vector(Mixing(mixing.clean + self.alpha(end) / self.vocab, mixing.mask))

    def prior_kl(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        validation.tokens("x_0", x_0, self.vocab)
        validation.times("t", t)
        t = validation.align("t", to_float64(t), x_0)
        alpha, mixing = self.alpha(t), self.mixing(t)
        reference = self.reference().to(alpha)
        clean = reference[0].expand(alpha.shape)
        kl = kl_terms(alpha + mixing.clean, clean) + (self.vocab - 1) * kl_terms(mixing.clean, clean)
        if self.mask is not None:
            kl = kl + kl_terms(mixing.mask, reference[-1].expand(alpha.shape))
        return kl.expand(x_0.shape)

    def corrupt(
        self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"], generator: torch.Generator | None = None
    ) -> Int[Tensor, "*site"]:
        validation.tokens("x_0", x_0, self.vocab)
        validation.times("t", t)
        t = validation.align("t", to_float64(t), x_0)
        alpha, mixing = self.alpha(t), self.mixing(t)
        u = torch.rand(x_0.shape, generator=generator, dtype=alpha.dtype, device=x_0.device)
        noise = torch.randint(self.vocab, x_0.shape, generator=generator, device=x_0.device)
        if self.mask is not None:
            noise = torch.where(u < alpha + mixing.mask, torch.full_like(noise, self.mask), noise)
        return torch.where(u < alpha, x_0.long(), noise)


class _Scheduled(RankOne):
    """m_t = (1 - alpha_t) times a fixed law."""

    def __init__(self, vocab: int, schedule: Schedule | None = None) -> None:
        validation.positive_int("vocab", vocab, low=2)
        if schedule is None:
            name = type(self).__name__
            raise TypeError(f"m2s.{name}({vocab}) lacks its schedule, such as m2s.Linear(): m2s.{name}({vocab}, m2s.Linear())")
        if not isinstance(schedule, Schedule):
            raise TypeError(f"schedule must be a schedule such as m2s.Linear(), not {schedule!r}")
        self.vocab, self.schedule = vocab, schedule

    @abstractmethod
    def _spread(self, mass: Tensor) -> Mixing:
        """`mass` shared out by the fixed law."""

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.schedule.alpha(t)

    def mixing(self, t: Float[Tensor, "*b"]) -> Mixing:
        return self._spread(self.schedule.beta(t))

    def mixing_rate(self, t: Float[Tensor, "*b"]) -> Mixing:
        return self._spread(self.schedule.sigma_prime(t))

    def step(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> tuple[Tensor, Mixing]:
        lost = self.schedule.one_minus_alpha_ratio(s, t)
        return self.alpha(t) / self.alpha(s), self._spread(lost)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab}, {self.schedule})"


class Uniform(_Scheduled):
    """A touched token becomes any of the `vocab` tokens with equal probability: m_t(y) = (1 - alpha_t) / K."""

    mask = None

    @property
    def states(self) -> int:  # type: ignore[override]
        return self.vocab

    def _spread(self, mass: Tensor) -> Mixing:
        return Mixing(mass / self.vocab, torch.zeros_like(mass))

    def rho(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """rho_t = (beta/K) / (alpha + beta/K), the off-diagonal entry of the kernel over its diagonal one (before Eq. 7)."""
        own = self.schedule.beta(t) / self.vocab
        return own / (self.schedule.alpha(t) + own)


class Absorbing(_Scheduled):
    """A touched token becomes the mask: m_t = (1 - alpha_t) e_mask."""

    def __init__(self, vocab: int, schedule: Schedule | None = None) -> None:
        super().__init__(vocab, schedule)
        self.states, self.mask = vocab + 1, vocab

    @property
    def is_pure_mask(self) -> bool:
        return True

    def _spread(self, mass: Tensor) -> Mixing:
        return Mixing(torch.zeros_like(mass), mass)


class Hybrid(RankOne):
    """GIDD's interpolation between mask and uniform; the reference law is the mask.

    c = B sqrt(t(1-t)), B = 2p/(1-p):   alpha = (1-t)/(1+c),   m = (t e_mask + c u)/(1+c),   u uniform on clean tokens.
    Here n_t(mask) = 1/((1-t)(1+c)) and n_t(clean) = B / (2 K sqrt(t(1-t)) (1+c)), which diverges like t^{-1/2} at 0.
    """

    def __init__(self, vocab: int, p_uniform: float) -> None:
        validation.positive_int("vocab", vocab, low=2)
        if not 0 <= p_uniform < 1:
            uniform = "; for pure uniform noise use m2s.Uniform" if p_uniform == 1 else ""
            raise ValueError(f"p_uniform is {p_uniform}, but it must lie in [0, 1){uniform}")
        self.vocab, self.states, self.mask = vocab, vocab + 1, vocab
        self.p_uniform = p_uniform
        self._b = 2 * p_uniform / (1 - p_uniform)

    @property
    def is_pure_mask(self) -> bool:
        return self.p_uniform == 0

    def _c(self, t: Tensor) -> Tensor:
        return self._b * torch.sqrt(t * (1 - t))

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - t) / (1 + self._c(t))

    def mixing(self, t: Float[Tensor, "*b"]) -> Mixing:
        c = self._c(t)
        return Mixing(c / (1 + c) / self.vocab, t / (1 + c))

    def mixing_rate(self, t: Float[Tensor, "*b"]) -> Mixing:
        c = self._c(t)
        clean = self._b / (2 * torch.sqrt(t * (1 - t)) * (1 + c)) if self._b else torch.zeros_like(t)
        return Mixing(clean / self.vocab, 1 / ((1 - t) * (1 + c)))

    def step(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> tuple[Tensor, Mixing]:
        # c_t - c_s (1-t)/(1-s) = B sqrt(1-t) (t-s)/(1-s) / (sqrt t + sqrt(s (1-t)/(1-s)))
        c = self._c(t)
        lost = (t - s) / (1 - s)
        roots = torch.sqrt(t) + torch.sqrt(s * (1 - t) / (1 - s))
        clean = self._b * torch.sqrt(1 - t) * lost / torch.where(roots > 0, roots, 1)
        return self.alpha(t) / self.alpha(s), Mixing(clean / (1 + c) / self.vocab, lost / (1 + c))

    def __repr__(self) -> str:
        return f"Hybrid({self.vocab}, p_uniform={self.p_uniform})"
