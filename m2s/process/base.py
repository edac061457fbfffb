"""The interface of every forward process: how one site is corrupted, and how fast."""

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.errors import explain_arguments

if TYPE_CHECKING:
    from m2s.process.chain import Chain
    from m2s.process.rank_one import RankOne
    from m2s.process.rate_matrix import RateMatrix


def select_rows(matrices: Float[Tensor, "*b S S"], x: Int[Tensor, "*site"], dim: int) -> Float[Tensor, "*site S"]:
    """Select one row or column of a matrix for each site.

    Args:
        matrices: One matrix for each example, [*b, S, S]. The shape *b is the start of the shape of `x`.
        x: Index of the row or column at each site, [*site].
        dim: -2 for rows, -1 for columns.

    Returns:
        The rows or columns, [*site, S].
    """
    if dim == -1:
        matrices = matrices.transpose(-1, -2)
    batch = matrices.shape[:-2]
    flat = x.long().reshape(*batch, math.prod(x.shape[len(batch) :]))
    index = flat.unsqueeze(-1).expand(*flat.shape, matrices.shape[-1])
    return matrices.gather(-2, index).reshape(*x.shape, matrices.shape[-1])


class Process(ABC):
    """A Markov chain in continuous or discrete time that corrupts every site independently (Definition 3.2).

    States 0..vocab-1 are the clean tokens. A process with a mask has one state more, the last one. Matrices are indexed
    [start, end]: `transition_matrix(t)[..., z, y]` = P_t(y|z), `rates(t)[..., y, k]` = Q_t(y -> k). Time
    runs from 0 (clean) to 1.

    A subclass defines `vocab`, `states`, `mask`, `transition_matrix` and `step_transition_matrix`, and `rates` if it runs in
    continuous time. The other methods follow from these; a subclass overrides them where it has a closed form.

    What a process can do is a property, so that no caller tests for a class: `rank_one`, `tabulated`, `chain`,
    `has_transitions`, `has_rates`.

    Attributes:
        vocab: Number K of clean tokens.
        states: Number S of states: `vocab`, or `vocab` + 1 with a mask.
        mask: The state of the mask, `vocab`, or None without a mask.
    """

    vocab: int
    states: int
    mask: int | None
    has_transitions: ClassVar[bool] = True
    """Whether there are transition matrices and rates. False for next-token prediction, where `transition_matrix`,
    `step_transition_matrix` and `rates` are None: there is no reverse process."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        explain_arguments(cls)

    @property
    def rank_one(self) -> "RankOne | None":
        """This process if P_t(y|z) = alpha_t [y = z] + m_t(y), which has closed forms for any vocabulary; else None."""
        return None

    @property
    def tabulated(self) -> "RateMatrix | None":
        """This process if its transition matrices are exponentials of a rate matrix; else None."""
        return None

    @property
    def chain(self) -> "Chain | None":
        """This process if it has a finite number of steps and no rates; else None."""
        return None

    @property
    def has_rates(self) -> bool:
        """Whether the process runs in continuous time and has rates Q_t. A finite chain and next-token prediction have none."""
        return self.has_transitions and type(self).rates is not Process.rates

    @abstractmethod
    def transition_matrix(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """Return the transition matrix P_t(y|z) from time 0 to t.

        It takes O(states^2) memory for each time. Code for large vocabularies uses `rows`, `columns` or `rank_one`.

        Args:
            t: Times, [*b].

        Returns:
            Matrices indexed [z, y], [*b, S, S], in the dtype of `t`. Rows sum to one.
        """

    @abstractmethod
    def step_transition_matrix(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """Return the transition matrix P_{t|s}(y|z) from time s to time t.

        Args:
            s: Start times, [*b], at most `t`.
            t: End times, [*b].

        Returns:
            Matrices indexed [z, y], [*b, S, S]. Rows sum to one, and P_s P_{t|s} = P_t.
        """

    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """Return the rate matrix Q_t of the forward process: dP_t/dt = P_t Q_t.

        Only processes in continuous time have one (`has_rates`).

        Args:
            t: Times, [*b].

        Returns:
            Matrices indexed [y, k], [*b, S, S]. Off-diagonal entries are not negative; rows sum to zero.

        Raises:
            ValueError: The process has no rates.
        """
        raise ValueError(
            "a finite chain has no rates, so no score entropy in continuous time: its loss is m2s.losses.chain_kl; with "
            "rates there are m2s.RateMatrix, Uniform and Absorbing"
        )

    def is_mask(self, x: Int[Tensor, "*site"]) -> Bool[Tensor, "*site"]:
        """Return where `x` is the mask; nowhere for a process without a mask.

        Args:
            x: Tokens, [*site].

        Returns:
            Boolean, [*site].
        """
        return torch.zeros_like(x, dtype=torch.bool) if self.mask is None else x.long() == self.mask

    def rows(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the row P_t(. | x_0) of the transition matrix at every site: the distribution of x_t.

        Args:
            x_0: Clean tokens, [*site].
            t: Times, [*b], where *b is the start of *site.

        Returns:
            Probabilities of the states at time t, [*site, S], in the dtype of `t`.
        """
        validation.align("t", t, x_0)
        return select_rows(self.transition_matrix(t), x_0, -2)

    def columns(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the column P_t(x_t | .) of the transition matrix at every site: the likelihood of each clean token.

        Args:
            x_t: Current tokens, [*site].
            t: Times, [*b].

        Returns:
            P_t(x_t | z) of every state z, [*site, S], in the dtype of `t`.
        """
        validation.align("t", t, x_t)
        return select_rows(self.transition_matrix(t), x_t, -1)

    def step_columns(
        self, x_t: Int[Tensor, "*site"], s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]
    ) -> Float[Tensor, "*site S"]:
        """Return the column P_{t|s}(x_t | .) at every site: the likelihood of each token at time s.

        Args:
            x_t: Current tokens at time t, [*site].
            s: Earlier times, [*b].
            t: Times of `x_t`, [*b].

        Returns:
            P_{t|s}(x_t | z) of every state z, [*site, S], in the dtype of `t`.
        """
        return select_rows(self.step_transition_matrix(s, t), x_t, -1)

    def rates_into(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return Q_t(y -> x_t) for y != x_t and 0 at x_t: the weight of each candidate y in score entropy (Eq. 8).

        Args:
            x_t: Current tokens, [*site].
            t: Times, [*b].

        Returns:
            Rates, [*site, S], in the dtype of `t`.
        """
        validation.align("t", t, x_t)
        rates = select_rows(self.rates(t), x_t, -1)
        return rates.scatter(-1, x_t.long().unsqueeze(-1), 0.0)

    def reference(self) -> Float[Tensor, "S"]:
        """Return the distribution from which sampling starts, float64.

        If the mask is absorbing, it is the mask, also under a schedule with alpha_1 > 0 (`has_clean_tokens_at_end`). Otherwise
        it is the distribution at t = 1 of a clean token drawn uniformly: the uniform distribution for uniform noise.

        Returns:
            Probabilities, [S].
        """
        end = self.transition_matrix(torch.ones((), dtype=torch.float64))
        if self.mask is not None and bool(end[self.mask, self.mask] == 1):
            return end[self.mask]
        return end[: self.vocab].mean(0)

    @cached_property
    def has_clean_tokens_at_end(self) -> bool:
        """Whether a clean token can be left at t = 1 although the reference is the mask (alpha_1 > 0, as in SEDD and MDLM).

        The KL from q_1 to the mask is then infinite, and the NELBO predicts x_1 from masks alone: `m2s.losses.prior_nats`.
        """
        return bool(self.prior_kl(torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.float64)).isinf().any())

    def prior_kl(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site"]:
        """Return KL(q_t(. | x_0) || reference) in nats per position, the prior term of the NELBO.

        Args:
            x_0: Clean tokens, [*site].
            t: Times, [*b].

        Returns:
            The divergence, [*site], in float64. It is infinite where a clean token can be left and the reference is the mask.
        """
        validation.tokens("x_0", x_0, self.vocab)
        validation.times("t", t)
        rows = self.rows(x_0, to_float64(t))
        return kl_terms(rows, self.reference().to(rows).expand_as(rows)).sum(-1)

    def last_time(self, t_min: float) -> float:
        """Return the upper end of the NELBO's integral over time.

        Args:
            t_min: The lower end.

        Returns:
            1 - t_min, or 1 if the prior KL at 1 - t_min is infinite.
        """
        x_0 = torch.zeros(1, dtype=torch.long)
        t = torch.full((1,), 1 - t_min, dtype=torch.float64)
        return 1 - t_min if self.prior_kl(x_0, t).isfinite().all() else 1.0

    def corrupt(
        self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"], generator: torch.Generator | None = None
    ) -> Int[Tensor, "*site"]:
        """Draw x_t ~ P_t(. | x_0), every site independently.

        Args:
            x_0: Clean tokens, [*site], usually [B, L].
            t: Times, [*b], usually [B].
            generator: Source of randomness. None uses torch's default generator.

        Returns:
            x_t, [*site].

        Example:
            >>> process = m2s.Uniform(256, m2s.Linear())
            >>> x_t = process.corrupt(torch.randint(256, (8, 784)), torch.rand(8))
        """
        validation.tokens("x_0", x_0, self.vocab)
        validation.times("t", t)
        return _sample_categorical(self.rows(x_0, to_float64(t)), generator)


def kl_terms(p: Float[Tensor, "*n"], q: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return p log(p/q) - p + q, whose sum over two distributions is KL(p || q).

    Every term is at least 0, so that a small divergence is not the difference of large terms.

    Args:
        p: Probabilities.
        q: Probabilities, of the same shape.

    Returns:
        The terms; infinite where q = 0 < p.
    """
    return torch.special.xlogy(p, p) - torch.special.xlogy(p, q) - p + q


def _sample_categorical(probabilities: Float[Tensor, "*site S"], generator: torch.Generator | None) -> Int[Tensor, "*site"]:
    """Draw one index from each row by inverting its CDF. A state of probability zero is never drawn."""
    total = probabilities.cumsum(-1)
    u = torch.rand(probabilities.shape[:-1], generator=generator, dtype=probabilities.dtype, device=probabilities.device)
    index = torch.searchsorted(total, (u * total[..., -1]).unsqueeze(-1), right=True).squeeze(-1)
    # u * total can round up to the total itself, past the last state: take the last one that has a positive probability.
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).long().argmax(-1)
    return torch.minimum(index, last)
