"""The rank-one family of forward processes, with closed forms at any vocabulary size.

    P_t(y|z) = alpha_t [y = z] + m_t(y),      alpha_t + sum_y m_t(y) = 1

A token is untouched with probability alpha_t; otherwise it is replaced. The mixing measure m_t has one value on the clean
tokens and another on the mask. Two formulas follow:

    between s < t:  P_{t|s} = A I + 1 q^T,   A = alpha_t / alpha_s,   q = m_t - A m_s
    rates:          Q_t(y -> k) = n_t(k) for y != k,   n_t = m_t' - (alpha_t'/alpha_t) m_t

So a few scalars describe a site, and no S x S matrix is needed.
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
    """A measure on the states that is constant on the clean tokens, such as m_t.

    Args:
        clean: m(y) of each clean token y.
        mask: m(mask); 0 for a process without a mask.
    """

    clean: Tensor
    mask: Tensor


class SiteCoefficients(NamedTuple):
    """The scalars that describe a site at time t with current token k = x_t. Each has the shape of x_t.

    Args:
        alpha: alpha_t, the probability that the token is untouched.
        m_k: m_t(k), the mixing measure at the current token; P_t(k|z) for z != k.
        stay: alpha_t + m_t(k) = P_t(k|k).
        clean: m_t(y) of a clean token y.
        mask: m_t(mask); 0 for a process without a mask.
        rate: n_t(k) = Q_t(y -> k), the forward rate into k from any other state y.
    """

    alpha: Tensor
    m_k: Tensor
    stay: Tensor
    clean: Tensor
    mask: Tensor
    rate: Tensor


class RankOne(Process):
    """Base class of `m2s.Uniform`, `m2s.Absorbing` and `m2s.Hybrid`.

    A subclass defines `alpha`, `mixing`, `mixing_rate` and `step`.
    """

    @property
    def rank_one(self) -> "RankOne":
        return self

    @property
    def masking_schedule(self) -> Schedule | None:
        """The schedule of alpha_t if a replaced token always becomes the mask; else None."""
        return None

    @property
    def is_pure_mask(self) -> bool:
        """Whether a replaced token always becomes the mask, so that an unmasked token is certainly clean."""
        return self.masking_schedule is not None

    @abstractmethod
    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return alpha_t, the probability that a token is untouched.

        Args:
            t: Times, [*b].

        Returns:
            alpha_t, [*b], in the dtype of `t`.
        """

    @abstractmethod
    def mixing(self, t: Float[Tensor, "*b"]) -> Mixing:
        """Return the mixing measure m_t.

        Args:
            t: Times, [*b].

        Returns:
            m_t(y) of a clean token y and m_t(mask), each [*b].
        """

    @abstractmethod
    def mixing_rate(self, t: Float[Tensor, "*b"]) -> Mixing:
        """Return the rates n_t = m_t' - (alpha_t'/alpha_t) m_t into each state.

        Args:
            t: Times, [*b].

        Returns:
            n_t(y) of a clean token y and n_t(mask), each [*b].
        """

    @abstractmethod
    def step(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> tuple[Tensor, Mixing]:
        """Return A = alpha_t/alpha_s and q = m_t - A m_s of P_{t|s} = A I + 1 q^T, without cancellation in q.

        Args:
            s: Start times, [*b], at most `t`.
            t: End times, [*b].

        Returns:
            A, [*b], and q of a clean token and of the mask, each [*b].
        """

    def removed_noise(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> tuple[Tensor, Mixing]:
        """Return A and q of the noise that a reverse step from t to s removes: `step(s, t)`, and for s = 0 all of P_t.

        The two differ at s = 0 under a schedule with sigma(0) > 0, where P_{t|0} leaves the noise of t = 0 in place.

        Args:
            s: Times after the reverse step, [*b], at most `t`.
            t: Times before the reverse step, [*b].

        Returns:
            A, [*b], and q of a clean token and of the mask, each [*b].
        """
        survival, mixing = self.step(s, t)
        clean, total = s <= 0, self.mixing(t)
        parts = (torch.where(clean, *pair) for pair in zip(total, mixing, strict=True))
        return torch.where(clean, self.alpha(t), survival), Mixing(*parts)

    def at(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> SiteCoefficients:
        """Return the scalars of every site.

        Args:
            x_t: Current tokens, [*site].
            t: Times, [*b], where *b is the start of *site.
        """
        t = validation.align("t", t, x_t)
        alpha, mixing, rate = self.alpha(t), self.mixing(t), self.mixing_rate(t)
        masked = self.is_mask(x_t)
        at_current = torch.where(masked, mixing.mask, mixing.clean)
        into_current = torch.where(masked, rate.mask, rate.clean)
        full = torch.broadcast_tensors(alpha, at_current, alpha + at_current, mixing.clean, mixing.mask, into_current)
        return SiteCoefficients(*full)

    def _matrix(self, diagonal: Tensor, mixing: Mixing) -> Tensor:
        """Return diagonal I + 1 m^T."""
        eye = torch.eye(self.states, dtype=diagonal.dtype, device=diagonal.device)
        return diagonal[..., None, None] * eye + mixing_vector(self, mixing).unsqueeze(-2)

    def transition_matrix(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return self._matrix(self.alpha(t), self.mixing(t))

    def step_transition_matrix(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return self._matrix(*self.step(s, t))

    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        rate = self.mixing_rate(t)
        # The diagonal is n_t(y) - total, since `_matrix` adds n_t(y) to every entry of column y.
        total = rate.clean * self.vocab + rate.mask
        return self._matrix(-total, rate)

    def rows(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        t = validation.align("t", t, x_0)
        # `clone` because scatter_add_ cannot write to an expanded tensor.
        rows = mixing_vector(self, self.mixing(t)).expand(*x_0.shape, self.states).clone()
        return rows.scatter_add_(-1, x_0.long().unsqueeze(-1), self.alpha(t).expand(x_0.shape).unsqueeze(-1))

    def columns(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        site = self.at(x_t, t)
        return self._column(x_t, site.m_k, site.stay)

    def step_columns(
        self, x_t: Int[Tensor, "*site"], s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*site S"]:
        """Return P_{t|s}(x_t | .) at every site, and at s = 0 P_t(x_t | .): all noise (`removed_noise`)."""
        survival, mixing = self.removed_noise(validation.align("s", s, x_t), validation.align("t", t, x_t))
        into = torch.where(self.is_mask(x_t), mixing.mask, mixing.clean)
        return self._column(x_t, into, survival + into)

    def rates_into(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        rate = self.at(x_t, t).rate
        return self._column(x_t, rate, torch.zeros_like(rate))

    def _column(self, x_t: Tensor, elsewhere: Tensor, at_current: Tensor) -> Tensor:
        """Return vectors over the states with the value `at_current` at x_t and `elsewhere` at every other state."""
        column = elsewhere.unsqueeze(-1).repeat(*(1 for _ in x_t.shape), self.states)
        return column.scatter_(-1, x_t.long().unsqueeze(-1), at_current.unsqueeze(-1))

    def reference(self) -> Float[Tensor, "S"]:
        end = torch.ones((), dtype=torch.float64)
        if self.is_pure_mask:
            return mixing_vector(self, Mixing(torch.zeros_like(end), end))
        mixing = self.mixing(end)
        return mixing_vector(self, Mixing(mixing.clean + self.alpha(end) / self.vocab, mixing.mask))

    def prior_kl(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        validation.tokens("x_0", x_0, self.vocab)
        validation.times("t", t)
        t = validation.align("t", to_float64(t), x_0)
        alpha, mixing = self.alpha(t), self.mixing(t)
        reference = self.reference().to(alpha)
        clean = reference[0].expand(alpha.shape)
        # One state has probability alpha + m(y), and K - 1 states have m(y): no sum over the vocabulary is needed.
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
        # The noise is drawn at all sites, so that the number of random draws does not depend on the data.
        noise = torch.randint(self.vocab, x_0.shape, generator=generator, device=x_0.device)
        if self.mask is not None:
            noise = torch.where(u < alpha + mixing.mask, torch.full_like(noise, self.mask), noise)
        return torch.where(u < alpha, x_0.long(), noise)


def mixing_vector(process: RankOne, site: SiteCoefficients | Mixing) -> Float[Tensor, "*site S"]:
    """Return a mixing measure as a vector over the states.

    Args:
        process: The process.
        site: Anything with the fields `clean` and `mask`, each [*site].

    Returns:
        m(y) of every state y, [*site, S].
    """
    clean = site.clean.unsqueeze(-1).expand(*site.clean.shape, process.vocab)
    return clean if process.mask is None else torch.cat([clean, site.mask.unsqueeze(-1)], -1)


def time_of_mask_probability(process: RankOne, probability: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return the time at which a token is masked with a given probability, by bisection.

    Args:
        process: A process with a mask.
        probability: Probabilities m_t(mask), [*n].

    Returns:
        Times, [*n]; 1 where no time has so many masks.
    """
    low, high = torch.zeros_like(probability), torch.ones_like(probability)
    for _ in range(60):  # to the last bit of float64
        middle = (low + high) / 2
        late = process.mixing(middle).mask > probability
        low, high = torch.where(late, low, middle), torch.where(late, middle, high)
    return (low + high) / 2


class Scheduled(RankOne):
    """A rank-one process whose replaced tokens always have the same distribution pi: m_t = (1 - alpha_t) pi.

    Then n_t = sigma_t' pi and q = (1 - alpha_t/alpha_s) pi.

    Args:
        vocab: Number K of clean tokens, at least 2.
        schedule: alpha_t.

    Raises:
        TypeError: There is no schedule, or it is not one.
    """

    def __init__(self, vocab: int, schedule: Schedule | None = None) -> None:
        validation.positive_int("vocab", vocab, low=2)
        if schedule is None:
            name = type(self).__name__
            raise TypeError(f"m2s.{name} needs a schedule, such as m2s.Linear(): m2s.{name}({vocab}, m2s.Linear())")
        validation.instance("schedule", schedule, Schedule, "a schedule such as m2s.Linear()")
        self.vocab, self.schedule = vocab, schedule

    @abstractmethod
    def _spread(self, mass: Tensor) -> Mixing:
        """Return mass * pi."""

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return self.schedule.alpha(t)

    def mixing(self, t: Float[Tensor, "*b"]) -> Mixing:
        return self._spread(self.schedule.beta(t))

    def mixing_rate(self, t: Float[Tensor, "*b"]) -> Mixing:
        return self._spread(self.schedule.sigma_prime(t))

    def step(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> tuple[Tensor, Mixing]:
        return self.alpha(t) / self.alpha(s), self._spread(self.schedule.one_minus_alpha_ratio(s, t))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vocab}, {self.schedule})"
