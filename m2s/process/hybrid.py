"""GIDD's noise: a mixture of masking and uniform replacement."""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import validation
from m2s.errors import UserError
from m2s.process.rank_one import Mixing, RankOne
from m2s.process.schedule import Linear, Schedule


class Hybrid(RankOne):
    """GIDD's interpolation between masking and uniform noise, as in its released code. The reference is the mask.

    With c = B sqrt(t(1-t)), B = 2p/(1-p), and u the uniform distribution of the clean tokens:

        alpha_t = (1-t) / (1+c),    m_t = (t e_mask + c u) / (1+c)
        n_t(mask) = 1 / ((1-t) (1+c)),    n_t(y) = B / (2 K sqrt(t(1-t)) (1+c)) for a clean y

    The rate into clean tokens diverges like t^{-1/2} at t = 0.

    Args:
        vocab: Number K of clean tokens, at least 2.
        p_uniform: The mass p of uniform noise at t = 1/2, in [0, 1). With 0 it is masking noise with alpha_t = 1 - t.

    Raises:
        UserError: `p_uniform` is not in [0, 1).

    Example:
        >>> process = m2s.Hybrid(50_257, p_uniform=0.1)
    """

    def __init__(self, vocab: int, p_uniform: float) -> None:
        validation.positive_int("vocab", vocab, low=2)
        if not validation.is_number(p_uniform) or not 0 <= p_uniform < 1:
            hint = "for pure uniform noise use m2s.Uniform" if validation.is_number(p_uniform) and p_uniform == 1 else None
            raise UserError(option="p_uniform", value=p_uniform, expected="in [0, 1)", hint=hint)
        self.vocab, self.states, self.mask = vocab, vocab + 1, vocab
        self.p_uniform = p_uniform
        self._b = 2 * p_uniform / (1 - p_uniform)
        self._masking_schedule = Linear() if p_uniform == 0 else None

    @property
    def masking_schedule(self) -> Schedule | None:
        return self._masking_schedule

    def _c(self, t: Tensor) -> Tensor:
        """Return c = B sqrt(t(1-t))."""
        return self._b * torch.sqrt(t * (1 - t))

    def alpha(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return (1 - t) / (1 + self._c(t))

    def mixing(self, t: Float[Tensor, "*b"]) -> Mixing:
        c = self._c(t)
        return Mixing(c / (1 + c) / self.vocab, t / (1 + c))

    def mixing_rate(self, t: Float[Tensor, "*b"]) -> Mixing:
        c = self._c(t)
        # At t = 0 and B = 0 the formula is 0/0.
        clean = self._b / (2 * torch.sqrt(t * (1 - t)) * (1 + c)) if self._b else torch.zeros_like(t)
        return Mixing(clean / self.vocab, 1 / ((1 - t) * (1 + c)))

    def step(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> tuple[Tensor, Mixing]:
        # q(clean) needs c_t - c_s (1-t)/(1-s), which cancels for a short step. As a difference of square roots it is
        # B sqrt(1-t) (t-s)/(1-s) / (sqrt t + sqrt(s (1-t)/(1-s))).
        c = self._c(t)
        removed = (t - s) / (1 - s)
        roots = torch.sqrt(t) + torch.sqrt(s * (1 - t) / (1 - s))
        clean = self._b * torch.sqrt(1 - t) * removed / torch.where(roots > 0, roots, 1)
        return self.alpha(t) / self.alpha(s), Mixing(clean / (1 + c) / self.vocab, removed / (1 + c))

    def __repr__(self) -> str:
        return f"Hybrid({self.vocab}, p_uniform={self.p_uniform})"
