"""Uniform noise: a replaced token becomes any token."""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.process.rank_one import Mixing, Scheduled


class Uniform(Scheduled):
    """Uniform noise (Eq. 16): a replaced token becomes any of the K tokens with equal probability.

        m_t(y) = (1 - alpha_t) / K,    n_t(y) = sigma_t' / K

    Args:
        vocab: Number K of tokens, at least 2.
        schedule: alpha_t, such as `m2s.Linear()`.

    Example:
        >>> process = m2s.Uniform(256, m2s.Linear())
        >>> x_t = process.corrupt(x_0, t)
    """

    mask = None

    @property
    def states(self) -> int:  # type: ignore[override]
        """The number of states: there is no mask."""
        return self.vocab

    def _spread(self, mass: Tensor) -> Mixing:
        return Mixing(mass / self.vocab, torch.zeros_like(mass))

    def rho(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return rho_t = (beta_t/K) / (alpha_t + beta_t/K), an off-diagonal entry of P_t over a diagonal one (before Eq. 7).

        Args:
            t: Times, [*b].

        Returns:
            rho_t, [*b], in [0, 1]; computed without subtraction, so that it is accurate near t = 0.
        """
        replaced = self.schedule.beta(t) / self.vocab
        return replaced / (self.schedule.alpha(t) + replaced)
