"""What every forward process can say: how one site is corrupted, and how fast."""

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64

if TYPE_CHECKING:
    from m2s.process.chain import Chain
    from m2s.process.rank_one import RankOne
    from m2s.process.rate_matrix import RateMatrix


def select_rows(matrices: Float[Tensor, "*b S S"], x: Int[Tensor, "*site"], dim: int) -> Float[Tensor, "*site S"]:
    """Rows (dim = -2) or columns (dim = -1) of per-batch matrices, one for each site."""
    if dim == -1:
        matrices = matrices.transpose(-1, -2)
    batch = matrices.shape[:-2]
    flat = x.long().reshape(*batch, math.prod(x.shape[len(batch) :]))
    index = flat.unsqueeze(-1).expand(*flat.shape, matrices.shape[-1])
    return matrices.gather(-2, index).reshape(*x.shape, matrices.shape[-1])


class Process(ABC):
    """A continuous- or discrete-time Markov chain that corrupts every site independently.

    States 0..vocab-1 are the clean tokens. A process with a mask has one more, the last: `mask` = `vocab`, `states` =
    `vocab` + 1. Matrices are indexed [start, end]: `kernel(t)[..., z, y]` = P_t(y|z), `rates(t)[..., y, k]` = Q_t(y -> k).
    """

    vocab: int
    states: int
    mask: int | None
    has_transitions: ClassVar[bool] = True
    """Whether there are transition matrices and rates. False for next-token prediction, where `kernel`, `step_kernel` and
    `rates` are None: there is no reverse process."""

    @property
    def rank_one(self) -> "RankOne | None":
        """This process where P_t(y|z) = alpha_t [y = z] + m_t(y), which has closed forms at any vocabulary; else None."""
        return None

    @property
    def tabulated(self) -> "RateMatrix | None":
        """This process where its transition matrices are exponentials of a rate matrix; else None."""
        return None

    @property
    def chain(self) -> "Chain | None":
        """This process where it has a finite number of steps and no rates; else None."""
        return None

    @abstractmethod
    def kernel(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """P_t(y|z) as a matrix. For small state spaces: O(states^2) memory for each time."""

    @abstractmethod
    def step_kernel(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """P_{t|s}(y|z) for s <= t, as a matrix."""

    @abstractmethod
    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """The forward generator Q_t; its rows sum to zero."""

    def rows(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """P_t(. | x_0): where each site may have gone."""
        validation.align("t", t, x_0)
        return select_rows(self.kernel(t), x_0, -2)

    def columns(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """P_t(x_t | .): the likelihood of each possible start."""
        validation.align("t", t, x_t)
        return select_rows(self.kernel(t), x_t, -1)

    def rates_into(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Q_t(y -> x_t) for y != x_t, and 0 at x_t: the weight of each candidate in score entropy."""
        validation.align("t", t, x_t)
        rates = select_rows(self.rates(t), x_t, -1)
        return rates.scatter(-1, x_t.long().unsqueeze(-1), 0.0)

    def reference(self) -> Float[Tensor, "S"]:
        """Return the distribution from which sampling starts, float64.

        Where the mask is absorbing it is the mask, also under a schedule with alpha_1 > 0 (`survives_to_the_end`). Otherwise it
        is the distribution at t = 1 of a clean token drawn uniformly: uniform for uniform noise.
        """
        end = self.kernel(torch.ones((), dtype=torch.float64))
        if self.mask is not None and bool(end[self.mask, self.mask] == 1):
            return end[self.mask]
        return end[: self.vocab].mean(0)

    @cached_property
    def has_clean_tokens_at_end(self) -> bool:
        """Whether a clean token can be left at t = 1 although the reference is the mask (alpha_1 > 0, as in SEDD and MDLM).

        The KL from q_1 to the mask is then infinite, and the bound predicts x_1 from masks alone: `m2s.losses.prior_nats`.
        """
        return bool(self.prior_kl(torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.float64)).isinf().any())

    def prior_kl(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        """KL(q_t(. | x_0) || reference), nats per site; infinite where a token is left and the reference is the mask."""
        validation.tokens("x_0", x_0, self.vocab)
        validation.times("t", t)
        rows = self.rows(x_0, to_float64(t))
        return kl_terms(rows, self.reference().to(rows).expand_as(rows)).sum(-1)

    def last_time(self, t_min: float) -> float:
        """Where the integral of the bound stops: 1 - t_min, or 1 where the prior KL at 1 - t_min would be infinite."""
        x_0 = torch.zeros(1, dtype=torch.long)
        t = torch.full((1,), 1 - t_min, dtype=torch.float64)
        return 1 - t_min if self.prior_kl(x_0, t).isfinite().all() else 1.0

    def corrupt(
        self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"], generator: torch.Generator | None = None
    ) -> Int[Tensor, "*site"]:
        """x_t ~ P_t(. | x_0), every site by itself."""
        validation.tokens("x_0", x_0, self.vocab)
        validation.times("t", t)
        return draw_categorical(self.rows(x_0, to_float64(t)), generator)


def kl_terms(p: Float[Tensor, "*n"], q: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """p log(p/q) - p + q >= 0, whose sum over a law is KL(p || q); infinite where q = 0 < p."""
    return torch.special.xlogy(p, p) - torch.special.xlogy(p, q) - p + q


def draw_categorical(distribution: Float[Tensor, "*site S"], generator: torch.Generator | None) -> Int[Tensor, "*site"]:
    """One index from each law by inverse CDF. A state of probability zero is never drawn."""
    total = distribution.cumsum(-1)
    u = torch.rand(distribution.shape[:-1], generator=generator, dtype=distribution.dtype, device=distribution.device)
    index = torch.searchsorted(total, (u * total[..., -1]).unsqueeze(-1), right=True).squeeze(-1)
    last = distribution.shape[-1] - 1 - (distribution.flip(-1) > 0).long().argmax(-1)
    return torch.minimum(index, last)
