"""Confidence-based unmasking (MaskGIT, Chang et al. 2022): reveal the most confident predictions first."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.first_hitting import first_sites
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Confidence(Sampler):
    """Draw z ~ mu at every masked site and reveal the sites of greatest log mu_z + noise * Gumbel.

    The draw is from mu after temperature, top-k and top-p. The ranking is by mu before them, as in MaskGIT and LLaDA, because
    sharpened probabilities are often all 1. Ties are broken at random. The number of masks left at s is beta_s times the
    number of sites, rounded.

    This does not simulate the reverse process. Even with a perfect network the samples do not have the distribution of the
    data: they are less diverse. `noise` restores some diversity.
    """

    name = "confidence"
    needs = (Need.PURE_MASK, Need.POSTERIOR)
    preserves_marginal = Preserves.NOTHING
    noise: float = 0.0
    """Scale of the Gumbel noise that is added to the confidence, in nats."""

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        process = head.process.rank_one
        assert process is not None
        t, s, _ = super().plan(steps, grid, free, head, noise)
        left = torch.cat([free.unsqueeze(0), torch.round(free * process.mixing(s).mask).long()])
        left[-1] = 0
        return Plan(t, s, -left.diff(dim=0))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        assert move.reveal is not None
        drawn = prediction.draw_token(noise("token"))
        sharpens = prediction.logits_processor.sharpens
        probability = prediction.without_sharpening().probability(drawn.token) if sharpens else drawn.probability
        confidence = torch.log(probability)
        if self.noise:
            confidence = confidence - self.noise * torch.log(-torch.log(noise("order")))
        chosen = first_sites(-confidence, prediction.masked, move.reveal, noise("site"))
        return torch.where(chosen, drawn.token, prediction.x_t.long())
