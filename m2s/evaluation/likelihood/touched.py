"""Noise at one time, split by whether any token was replaced: the first part is exact, the second is sampled."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s.evaluation.likelihood.levels import COUNT, KIND, POSITION, TOKEN, Levels
from m2s.ops.categorical import uniform_integer
from m2s.ops.counter_noise import CounterNoise
from m2s.process import Process, RankOne


@dataclass(frozen=True)
class Untouched(Levels):
    """One time, given that no token was replaced: x_t = x_0. The weight is the probability alpha_t^L of that.

    Together with `Touched` it is the mean over x_t at one time, of which this part needs no random number.

    Args:
        t: The time.
    """

    t: float

    def draw(self, process: Process, u: Float[Tensor, "B"], sizes: Int[Tensor, "B"]) -> tuple[Tensor, Tensor]:
        return torch.full_like(u, self.t), untouched(process, self.t, sizes).to(u)

    def nodes(self, process: Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        return [(self.t, float(untouched(process, self.t, torch.tensor([size]))))]

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
        return x_0.long()

    def probability(
        self, process: Process, x_0: Int[Tensor, "n L"], x_t: Int[Tensor, "n L"], level: Float[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        return (x_0.long() == x_t.long()).all(-1).double()


@dataclass(frozen=True)
class Touched(Levels):
    """One time, given that at least one token was replaced. The weight is the probability 1 - alpha_t^L of that.

    Args:
        t: The time.
    """

    t: float

    def draw(self, process: Process, u: Float[Tensor, "B"], sizes: Int[Tensor, "B"]) -> tuple[Tensor, Tensor]:
        return torch.full_like(u, self.t), 1 - untouched(process, self.t, sizes).to(u)

    def nodes(self, process: Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        return [(self.t, 1 - float(untouched(process, self.t, torch.tensor([size]))))]

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
        rank_one = process.rank_one
        assert rank_one is not None
        noise = CounterNoise(seed, rows, x_0.shape[1], step)
        counted = torch.ones_like(x_0, dtype=torch.bool) if free is None else free
        touched = draw_touched(rank_one.alpha(level), counted, noise.once(COUNT), noise(POSITION), least=1)
        return replace_tokens(rank_one, x_0, level, touched, noise(KIND), noise(TOKEN))

    def probability(
        self, process: Process, x_0: Int[Tensor, "n L"], x_t: Int[Tensor, "n L"], level: Float[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        nothing = untouched(process, self.t, torch.full((len(x_0),), x_0.shape[1]))
        same = (x_0.long() == x_t.long()).all(-1)
        return (super().probability(process, x_0, x_t, level) - torch.where(same, nothing, 0)) / (1 - nothing)


def untouched(process: Process, t: float, sizes: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Return the probability alpha_t^L that no token of a sequence was replaced.

    Args:
        process: A rank-one process.
        t: The time.
        sizes: Lengths L, [B].

    Returns:
        Probabilities, [B], float64.
    """
    assert process.rank_one is not None
    return process.rank_one.alpha(torch.full((len(sizes),), t, dtype=torch.float64, device=sizes.device)) ** sizes


def draw_touched(
    alpha: Float[Tensor, "B"],
    counted: Bool[Tensor, "B L"],
    u: Float[Tensor, "B"],
    rank: Float[Tensor, "B L"],
    least: int = 0,
) -> Bool[Tensor, "B L"]:
    """Draw which tokens are replaced, each with probability 1 - alpha independently: their number, then their positions.

    Args:
        alpha: The probability that a token is untouched, [B].
        counted: Where tokens can be replaced, [B, L].
        u: A uniform number for the number of replaced tokens, [B].
        rank: Numbers whose order is a uniformly random order of the positions, [B, L].
        least: Draw given that at least so many tokens are replaced, 0 or 1.

    Returns:
        True where a token is replaced, [B, L].
    """
    place = torch.where(counted, rank, torch.inf).argsort(-1).argsort(-1)
    return place < draw_number(alpha, counted.sum(-1), u, least).unsqueeze(-1)


def draw_number(alpha: Float[Tensor, "B"], sizes: Int[Tensor, "B"], u: Float[Tensor, "B"], least: int = 0) -> Int[Tensor, "B"]:
    """Draw the number of replaced tokens, binomial with L trials of probability 1 - alpha, by inverting its distribution.

    Args:
        alpha: The probability that a token is untouched, [B].
        sizes: The number L of tokens, [B].
        u: Uniform numbers, [B].
        least: Draw given that at least so many tokens are replaced, 0 or 1.

    Returns:
        Numbers, [B].
    """
    number = torch.arange(int(sizes.max()) + 1, dtype=torch.float64, device=alpha.device)
    size, kept = sizes.double().unsqueeze(-1), alpha.double().unsqueeze(-1)
    others = (size - number).clamp(min=0)
    log_choose = torch.lgamma(size + 1) - torch.lgamma(number + 1) - torch.lgamma(others + 1)
    log_mass = log_choose + torch.special.xlogy(number, 1 - kept) + torch.special.xlogy(others, kept)
    total = torch.where((number <= size) & (number >= least), log_mass.exp(), 0.0).cumsum(-1)
    drawn = torch.searchsorted(total, (u * total[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    return torch.minimum(drawn, sizes)


def replace_tokens(
    process: RankOne,
    x_0: Int[Tensor, "B L"],
    t: Float[Tensor, "B"],
    touched: Bool[Tensor, "B L"],
    kind: Float[Tensor, "B L"],
    token: Float[Tensor, "B L"],
) -> Int[Tensor, "B L"]:
    """Return noisy tokens, given which are replaced.

    Args:
        process: The process.
        x_0: Clean tokens, [B, L].
        t: Times, [B].
        touched: True where a token is replaced, [B, L].
        kind: Uniform numbers that choose between the mask and a clean token, [B, L].
        token: Uniform numbers that choose the clean token, [B, L].

    Returns:
        Noisy tokens, [B, L].
    """
    drawn = uniform_integer(token, process.vocab)
    if process.mask is not None:
        share = process.mixing(t).mask / (1 - process.alpha(t))
        drawn = torch.where(kind < share.unsqueeze(-1), process.mask, drawn)
    return torch.where(touched, drawn, x_0.long())
