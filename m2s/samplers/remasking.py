"""Remasking (ReMDM, Wang et al. 2025): revealed tokens may be masked again, so that a mistake can be mended."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.process import RankOne
from m2s.samplers.base import Move, Sampler, needs_mask, needs_posterior
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Remasking(Sampler):
    """A revealed site is masked again with probability sigma = strength * min(1, (1 - alpha_s)/alpha_t), and a masked one is
    revealed with probability (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t): every site's law at s stays what it should be.

    strength = 0 is ancestral sampling. The share is one for each step, not for each unit of time, so that more steps mean more
    remasking: the law tends to the data's like the root of the step. Clamped sites are never masked.
    """

    name = "remasking"
    strength: float = 0.1
    """The share, in [0, 1], of the most remasking that keeps the marginals."""

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise ValueError(f"strength is {self.strength}, but it must lie in [0, 1]")

    def check_supported(self, head: Head) -> None:
        needs_mask(self, head)
        needs_posterior(self, head)

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        process, k = prediction.process, prediction.x_t.long()
        assert isinstance(process, RankOne)
        s, t = (validation.align("t", time, prediction.x_t) for time in (to_float64(move.s), prediction.t))
        alpha_s, alpha_t = process.alpha(s), process.alpha(t)
        masked_s, masked_t = process.mixing(s).mask, process.mixing(t).mask
        most = torch.where(alpha_t > 0, masked_s / alpha_t.where(alpha_t > 0, 1), 1).clamp(max=1)
        again = self.strength * most
        reveal = (alpha_s - (1 - again) * alpha_t) / masked_t.where(masked_t > 0, 1)
        u = noise("route")
        revealed = torch.where(u < reveal, prediction.draw(noise("token")).token, k)
        return torch.where(prediction.masked, revealed, torch.where(u < again, torch.full_like(k, process.states - 1), k))
