"""Tau-leaping (Campbell et al. 2022): a Poisson number of jumps at rates frozen over the step."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from m2s.belief import Head
from m2s.process.base import wide
from m2s.sampler.base import Move, Sampler
from m2s.sampler.belief import Belief
from m2s.sampler.leap import backwards, leap, needs_levels
from m2s.sampler.random import Noise


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
        needs_levels(self, self.ordinal, head)

    def step(self, belief: Belief, move: Move, noise: Noise) -> Int[Tensor, "B L"]:
        x, jumps = leap(belief, backwards, wide(move.t - move.s), self.ordinal, noise)
        belief.notes["several_jumps"] = jumps > 1
        return x


@dataclass(frozen=True)
class OrdinalTauLeaping(TauLeaping):
    """`TauLeaping` for levels that have an order: several jumps of one step add up."""

    name = "ordinal_tau_leaping"
    ordinal: bool = True
