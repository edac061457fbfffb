"""Tau-leaping (Campbell et al. 2022): a Poisson number of jumps at rates frozen over the step."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Sampler
from m2s.samplers.poisson_jumps import needs_levels, poisson_jumps, reverse_rates
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class TauLeaping(Sampler):
    """The number of jumps from k is Poisson with mean E = (t - s) sum_y Q_t(y -> k) s_y, each to y in proportion to its rate.

    Tokens without an order cannot add up jumps: with exactly one the site moves, with more it stays (the paper's rule). With
    `ordinal`, as for grey levels, the displacements y - k add up and are cut off at the ends.
    """

    name = "tau_leaping"
    open_start = True
    ordinal: bool = False

    def check_supported(self, head: Head) -> None:
        needs_levels(self, self.ordinal, head)

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        x, jumps = poisson_jumps(prediction, reverse_rates, to_float64(move.t - move.s), self.ordinal, noise)
        prediction.notes["several_jumps"] = jumps > 1
        return x


@dataclass(frozen=True)
class OrdinalTauLeaping(TauLeaping):
    """`TauLeaping` for levels that have an order: several jumps of one step add up."""

    name = "ordinal_tau_leaping"
    ordinal: bool = True
