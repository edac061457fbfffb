"""Remasking (ReMDM, Wang et al. 2025): revealed tokens may be masked again, so that errors can be corrected."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Sampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Remasking(Sampler):
    """Mask a revealed site again with probability sigma = strength * min(1, (1 - alpha_s)/alpha_t).

    A masked site is revealed with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), so that the distribution of
    every site at s is the right one. strength = 0 is ancestral sampling. `strength` applies to each step, not to a unit of
    time: more steps mean more remasking, and the error decreases like the square root of the step. Clamped sites are never
    masked.
    """

    name = "remasking"
    needs = (Need.PURE_MASK, Need.POSTERIOR)
    preserves_marginal = Preserves.ONE_SITE
    strength: float = 0.1
    """Fraction, in [0, 1], of the largest remasking probability that keeps the marginals."""

    def __post_init__(self) -> None:
        validation.in_interval("strength", self.strength, "[0, 1]")

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        process, k = prediction.process.rank_one, prediction.x_t.long()
        assert process is not None
        s, t = (validation.align("t", time, prediction.x_t) for time in (to_float64(move.s), prediction.t))
        alpha_s, alpha_t = process.alpha(s), process.alpha(t)
        masked_s, masked_t = process.mixing(s).mask, process.mixing(t).mask
        largest = torch.where(alpha_t > 0, masked_s / alpha_t.where(alpha_t > 0, 1), 1).clamp(max=1)
        again = self.strength * largest
        reveal = (alpha_s - (1 - again) * alpha_t) / masked_t.where(masked_t > 0, 1)
        u = noise("route")
        revealed = torch.where(u < reveal, prediction.draw_token(noise("token")).token, k)
        return torch.where(prediction.masked, revealed, torch.where(u < again, torch.full_like(k, process.states - 1), k))
