"""Tau-leaping (Campbell et al. 2022): a Poisson number of jumps at rates that are constant over the step."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Sampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.poisson_jumps import check_order, poisson_jumps, reverse_rates
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class TauLeaping(Sampler):
    """The number of jumps from k is Poisson with mean E = (t - s) sum_y Q_t(y -> k) s_y, each to y in proportion to its rate.

    Jumps between tokens without an order cannot add up: with exactly one jump the site moves, with more it stays (the paper's
    rule).
    """

    name = "tau_leaping"
    needs = (Need.RATES,)
    preserves_marginal = Preserves.NOTHING
    excludes_t_one = True
    ordinal: bool = False
    """Add up the displacements y - k of several jumps, clipped to the vocabulary. For tokens with an order, such as pixels."""

    def check_supported(self, head: Head) -> None:
        super().check_supported(head)
        check_order(self.name, self.ordinal, head)

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        x_s, jumps = poisson_jumps(prediction, reverse_rates, to_float64(move.t - move.s), self.ordinal, noise)
        prediction.notes["several_jumps"] = jumps > 1
        return x_s


@dataclass(frozen=True)
class OrdinalTauLeaping(TauLeaping):
    """`TauLeaping` for tokens with an order: several jumps of one step add up."""

    name = "ordinal_tau_leaping"
    ordinal: bool = True
    """Add up the displacements of several jumps."""
