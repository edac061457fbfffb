"""Tau-leaping with the corrector of Campbell et al. (2022): further leaps by forward plus reverse rates."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import mixing_vector, scatter_at
from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.process import Process
from m2s.process.base import select_rows
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.poisson_jumps import check_order, poisson_jumps, reverse_rates
from m2s.samplers.prediction import Prediction
from m2s.samplers.tau_leaping import OrdinalTauLeaping


@dataclass(frozen=True)
class ForwardBackward(Sampler):
    """Tau-leaping, and after each step to 0 < s <= `entry`, `corrections` leaps at s with the rates

        R(k -> y) = Q_s(k -> y) + Q_s(y -> k) s_y,

    forward plus reverse. In the limit of short leaps they leave p_s unchanged. Each leap is one call of the network.
    """

    name = "forward_backward"
    needs = (Need.RATES,)
    preserves_marginal = Preserves.NOTHING
    excludes_t_one = True
    ordinal: bool | None = None
    """Displacements of several jumps add up; otherwise a site with several jumps stays. By default they add up unless there is
    a mask, which has no place in an order."""
    corrections: int = 10
    """Leaps of the corrector after each step."""
    leap: float = 0.003
    """Length of one leap of the corrector in units of time: the authors' 1.5 steps of 1/500."""
    entry: float = 0.1
    """The largest time at which the corrector runs."""

    def __post_init__(self) -> None:
        validation.positive_int("corrections", self.corrections)
        validation.positive_number("leap", self.leap)
        validation.in_interval("entry", self.entry, "(0, 1]")

    def check_supported(self, head: Head) -> None:
        super().check_supported(head)
        check_order(self.name, self._adds_jumps(head.process), head)

    def _adds_jumps(self, process: Process) -> bool:
        """Whether displacements add up."""
        return process.mask is None if self.ordinal is None else self.ordinal

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        rows: list[tuple[Tensor, Tensor]] = []
        for start, end in zip(*super().plan(steps, grid, free, head, noise)[:2], strict=True):
            corrected = bool(((end > 0) & (end <= self.entry)).all())
            rows += [(start, end)] + [(end, end)] * (self.corrections if corrected else 0)
        return Plan(torch.stack([start for start, _ in rows]), torch.stack([end for _, end in rows]))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        ordinal = self._adds_jumps(prediction.process)
        if bool((move.s < move.t).any()):
            return OrdinalTauLeaping(ordinal).step(prediction, move, noise)
        return poisson_jumps(prediction, forward_and_reverse_rates, torch.full_like(prediction.t, self.leap), ordinal, noise)[0]


def forward_and_reverse_rates(part: Prediction) -> Float[Tensor, "*site S"]:
    """Return Q_t(k -> y) + Q_t(y -> k) s_y.

    Args:
        part: A prediction.

    Returns:
        Rates, [*site, S]; 0 at k.
    """
    process, k = part.process, part.x_t
    rank_one = process.rank_one
    if rank_one is not None:
        rate = rank_one.mixing_rate(validation.align("t", part.t, k).expand(k.shape))
        forward = mixing_vector(rank_one, rank_one.at(k, part.t)._replace(clean=rate.clean, mask=rate.mask))
    else:
        forward = select_rows(process.rates(part.t), k, -2)
    reverse = reverse_rates(part)
    return reverse + scatter_at(forward, k, 0.0).to(reverse.dtype)
