"""Tau-leaping (Campbell et al. 2022): a Poisson number of jumps at rates frozen over the step."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import check
from m2s.belief import Head, rate_from_score
from m2s.process.base import wide
from m2s.sampler.base import Move, Sampler, needs_rates
from m2s.sampler.belief import Belief
from m2s.sampler.categorical import draw
from m2s.sampler.random import Noise

MOST = 64  # jumps of one site in one step; the chance of more is counted as that many


@dataclass(frozen=True)
class TauLeaping(Sampler):
    """The number of jumps from k is Poisson with mean E = (t - s) sum_y Q_t(y -> k) s_y, each to y in proportion to its rate.

    Tokens without an order cannot add up jumps: with exactly one the site moves, with more it stays (the paper's rule). With
    `ordinal`, as for grey levels, the displacements y - k add up and are cut off at the ends.
    """

    name = "tau_leaping"
    open_start = True
    ordinal: bool = False

    def refuse(self, head: Head) -> None:
        needs_rates(self, head)
        if self.ordinal and head.process.mask is not None:
            raise TypeError(f"ordinal tau-leaping adds up displacements, and a mask has no place in an order: {head.process}")

    def step(self, belief: Belief, move: Move, noise: Noise) -> Int[Tensor, "B L"]:
        (jumps,) = belief.map(_number_of_jumps, wide(move.t - move.s), noise("route"))
        belief.notes["several_jumps"] = jumps > 1
        k = belief.x_t.long()
        if not self.ordinal:
            return torch.where(jumps == 1, belief.map(_target, noise("token"))[0], k)
        x = k
        for number in range(int(jumps.max()) if jumps.numel() else 0):
            x = torch.where(number < jumps, x + belief.map(_target, noise(number))[0] - k, x)
        return x.clamp(0, belief.process.vocab - 1)


def _rates(part: Belief) -> Float[Tensor, "*site S"]:
    return rate_from_score(part.score(), part.x_t, part.t, part.process)


def _number_of_jumps(part: Belief, step: Tensor, u: Tensor) -> tuple[Tensor]:
    return (poisson(check.align("s", step, part.x_t) * _rates(part).sum(-1, dtype=part.t.dtype), u),)


def _target(part: Belief, u: Tensor) -> tuple[Tensor]:
    return (draw(_rates(part), u),)


def poisson(mean: Float[Tensor, "*n"], u: Float[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """A Poisson number from one uniform, by its distribution function: how many n have P(N <= n) <= u."""
    term = torch.exp(-mean)
    below, count = term.clone(), torch.zeros_like(u, dtype=torch.long)
    for n in range(1, MOST + 1):
        more = u >= below
        if not more.any():
            break
        count += more
        term = term * mean / n
        below = below + term
    return count
