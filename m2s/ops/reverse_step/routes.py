"""Steps of the Bayes and Euler samplers for rank-one processes, as routes: where a position can go, and with what weight.

All that such a step needs of a posterior mu is one draw z ~ mu and two masses: mu_k of the current token k, and `off`, the
sum of mu over the other tokens (never computed as 1 - mu_k).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class TokenDraw(NamedTuple):
    """One draw from the posterior at every position, and the two masses of the posterior. All have the same shape.

    Args:
        token: The token that was drawn.
        probability: Its probability.
        mu_k: The probability of the current token.
        off: Sum of mu over the other tokens, never computed as 1 - mu_k.
    """

    token: Tensor
    probability: Tensor
    mu_k: Tensor
    off: Tensor


class BayesRoutes(NamedTuple):
    """A Bayes step (Eq. 19) at every position as a mixture of three routes.

    Go to z ~ mu with weight `go`; jump to the mixing distribution m_s with weight `jump` (off / m_t(k) + mu_k / P_t(k|k)); or
    stay.

    Args:
        go: Weight of the first route.
        jump: Factor of the weight of the second route.
        m_k: m_t(k); infinite where it is zero.
        stay: P_t(k|k).
        mask: The probability of the mask in the mixing distribution at s.
    """

    go: Tensor
    jump: Tensor
    m_k: Tensor
    stay: Tensor
    mask: Tensor

    @property
    def other(self) -> bool:
        """Whether z is drawn from mu without k."""
        return False

    def take(self, drawn: TokenDraw, k: Tensor, v: Tensor, u: Tensor, vocab: int, mask: int | None) -> tuple[Tensor, Tensor]:
        """Choose a route.

        Args:
            drawn: Draw from the posterior.
            k: Current tokens.
            v: Uniform numbers that choose the target of a jump.
            u: Uniform numbers that choose the route.
            vocab: Number of clean tokens.
            mask: The mask token, or None.

        Returns:
            The next tokens, and the total weight of the two routes that leave.
        """
        target = mixing_target(v, self.mask, vocab, mask)
        leave = self.go + self.jump * (drawn.off / self.m_k + drawn.mu_k / self.stay)
        return torch.where(u < self.go, drawn.token, torch.where(u < leave, target, k)), leave


class EulerRoutes(NamedTuple):
    """An Euler step at every position, as reverse rates out of k.

    With c = off / m(k) + mu_k / P(k|k): to z ~ mu without k at the rate n(k) `token` off, or to y != k by the mixing
    distribution at the rate n(k) c m(y).

    Args:
        token: alpha / m(k); zero where m(k) is.
        m_k: m(k); infinite where it is zero.
        stay: P(k|k).
        clean: m(y) of a clean y.
        mask: m(mask).
        rate: n(k).
        step_length: t - s.
    """

    token: Tensor
    m_k: Tensor
    stay: Tensor
    clean: Tensor
    mask: Tensor
    rate: Tensor
    step_length: Tensor

    @property
    def other(self) -> bool:
        """Whether z is drawn from mu without k."""
        return True

    def take(self, drawn: TokenDraw, k: Tensor, v: Tensor, u: Tensor, vocab: int, mask: int | None) -> tuple[Tensor, Tensor]:
        """Leave with probability min(E, 1), E = (t - s) times the total rate.

        Args:
            drawn: Draw from the posterior without k.
            k: Current tokens.
            v: Uniform numbers that choose the target.
            u: Uniform numbers that decide whether to leave.
            vocab: Number of clean tokens.
            mask: The mask token, or None.

        Returns:
            The next tokens, and E, which may exceed one.
        """
        masked = torch.eq(k, -1 if mask is None else mask)
        common = drawn.off / self.m_k + drawn.mu_k / self.stay
        to_token = self.token * drawn.off
        to_clean = common * self.clean * (vocab - 1 + masked.to(common.dtype))
        to_mask = torch.where(masked, 0, common * self.mask)
        total = to_token + to_clean + to_mask
        v = v * total
        w = ((v - to_token) / to_clean.where(to_clean > 0, 1)).clamp(0, 1)
        target = uniform_integer(w, vocab - 1)
        target = torch.where(masked, uniform_integer(w, vocab), target + (target >= k))  # any clean token but k
        if mask is not None:
            target = torch.where(v < to_token + to_clean, target, mask)
        leave = self.step_length * (self.rate * total)
        return torch.where(u < leave, torch.where(v < to_token, drawn.token, target), k), leave


Routes = BayesRoutes | EulerRoutes


class Counter(NamedTuple):
    """The counter from which a kernel draws its own uniform numbers (`m2s.ops.counter_noise.CounterNoise`).

    Args:
        samples: Numbers of the samples `[B]`.
        length: Positions of each sample.
        key: The two 32-bit words of the seed.
        step: Number of the step.
        words: Last word of the counter, one for each purpose.
    """

    samples: Tensor
    length: int
    key: tuple[int, int]
    step: int
    words: tuple[int, ...]


def uniform_integer(u: Float[Tensor, "*site"], count: int) -> Int[Tensor, "*site"]:
    """Map uniform numbers to 0, ..., count - 1 with equal probabilities.

    Args:
        u: Uniform numbers in [0, 1].
        count: Number of integers.

    Returns:
        One integer for each number.
    """
    return (u * count).long().clamp(max=count - 1)


def mixing_target(v: Float[Tensor, "*site"], share: Tensor, vocab: int, mask: int | None) -> Int[Tensor, "*site"]:
    """Map uniform numbers to draws from a mixing distribution.

    Args:
        v: Uniform numbers in [0, 1).
        share: The probability of the mask, of a shape that broadcasts to that of `v`. Clean tokens share the rest equally.
        vocab: Number of clean tokens.
        mask: The mask token, or None.

    Returns:
        One state for each number.
    """
    target = uniform_integer((v - share) / (1 - share).clamp(min=1e-300), vocab)
    return target if mask is None else torch.where(v < share, mask, target)
