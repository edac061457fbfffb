"""Tau-leaping as Campbell et al. (2022) sample: jumps between levels add up, and leaps forward and back mend the law."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import mixing_vector, scatter_at
from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.process import Process, RankOne
from m2s.process.base import select_rows
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.poisson_jumps import needs_levels, poisson_jumps, reverse_rates
from m2s.samplers.prediction import Prediction
from m2s.samplers.tau_leaping import OrdinalTauLeaping


@dataclass(frozen=True)
class ForwardBackward(Sampler):
    """Tau-leaping, and after each step to 0 < s <= `entry`, `corrections` leaps at s with the rates

        R(k -> y) = Q_s(k -> y) + Q_s(y -> k) s_y,

    forward and reverse, which leave p_s as it is but for the length of the leap. Each is a call of the network.
    """

    name = "forward_backward"
    open_start = True
    ordinal: bool | None = None
    """Several jumps add up, as for grey levels; without, a site with more than one stays. By default they do but where there is
    a mask, which has no place in an order."""
    corrections: int = 10
    leap: float = 0.003
    """How long one is, in units of time: the authors' 1.5 steps of 1/500."""
    entry: float = 0.1
    """The time from which on there are any."""

    def __post_init__(self) -> None:
        validation.positive_int("corrections", self.corrections)
        if not (math.isfinite(self.leap) and self.leap > 0):
            raise ValueError(f"leap is {self.leap}, but it must be a positive number")
        if not 0 < self.entry <= 1:
            raise ValueError(f"entry is {self.entry}, but it must lie in (0, 1]")

    def check_supported(self, head: Head) -> None:
        needs_levels(self, self._adds(head.process), head)

    def _adds(self, process: Process) -> bool:
        return process.mask is None if self.ordinal is None else self.ordinal

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        rows: list[tuple[Tensor, Tensor]] = []
        for start, end in zip(*super().plan(steps, grid, free, head, noise)[:2], strict=True):
            inside = bool(((end > 0) & (end <= self.entry)).all())
            rows += [(start, end)] + [(end, end)] * (self.corrections if inside else 0)
        return Plan(torch.stack([start for start, _ in rows]), torch.stack([end for _, end in rows]))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        ordinal = self._adds(prediction.process)
        if bool((move.s < move.t).any()):
            return OrdinalTauLeaping(ordinal).step(prediction, move, noise)
        return poisson_jumps(prediction, both_ways, torch.full_like(prediction.t, self.leap), ordinal, noise)[0]


def both_ways(part: Prediction) -> Float[Tensor, "*site S"]:
    """Q_t(k -> y) + Q_t(y -> k) s_y, 0 at k."""
    process, k = part.process, part.x_t
    if isinstance(process, RankOne):
        rate = process.mixing_rate(validation.align("t", part.t, k).expand(k.shape))
        forward = mixing_vector(process, process.at(k, part.t)._replace(clean=rate.clean, mask=rate.mask))
    else:
        forward = select_rows(process.rates(part.t), k, -2)
    reverse = reverse_rates(part)
    return reverse + scatter_at(forward, k, 0.0).to(reverse.dtype)
