"""Confidence-based unmasking (MaskGIT, Chang et al. 2022): what the network is surest of first."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.process import RankOne
from m2s.samplers.base import Move, Plan, Sampler, needs_mask, needs_posterior
from m2s.samplers.first_hitting import first_masked
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Confidence(Sampler):
    """Draw z ~ mu at every masked site and keep those of greatest log mu_z + noise * Gumbel, as many as the schedule says.

    The draw is from mu after temperature, top-k and top-p; the ranking is by mu before them, as in MaskGIT and LLaDA, for
    sharpened probabilities are often all 1. Ties are broken at random.

    The number of masks left at s is beta_s times the number of sites, rounded. This does not simulate the reverse process: the
    distribution of the samples is not that of the data even with a perfect network, and they are less diverse. `noise` brings
    some of that back.
    """

    name = "confidence"
    noise: float = 0.0
    """How much Gumbel noise is added to the confidence, in nats."""

    def check_supported(self, head: Head) -> None:
        needs_mask(self, head)
        needs_posterior(self, head)

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        assert isinstance(head.process, RankOne)
        t, s, _ = super().plan(steps, grid, free, head, noise)
        left = torch.cat([free.unsqueeze(0), torch.round(free * head.process.mixing(s).mask).long()])
        left[-1] = 0
        return Plan(t, s, -left.diff(dim=0))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        assert move.reveal is not None
        drawn = prediction.draw(noise("token"))
        share = (
            prediction.without_sharpening().probability(drawn.token) if prediction.logits_processor.sharpens else drawn.share
        )
        confidence = torch.log(share)
        if self.noise:
            confidence = confidence - self.noise * torch.log(-torch.log(noise("order")))
        chosen = first_masked(-confidence, prediction.masked, move.reveal, noise("site"))
        return torch.where(chosen, drawn.token, prediction.x_t.long())
