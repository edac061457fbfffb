"""Adaptive sampling (GIDD; von Ruette et al. 2025): draw first the sites that gain most, masked or not."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at
from m2s.heads import Head
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.first_hitting import first_sites
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Adaptive(Sampler):
    """Draw the sites of greatest gain (max_z nu_z - nu_k) pi_t(k) from nu, pi_t = m_t / (1 - alpha_t) the noise distribution.

    The draw is from nu after temperature, top-k and top-p; the ranking is by nu before them. Ties are broken at random. Steps
    that are left when all sites are filled correct earlier draws. The last step draws every site from the posterior.

    This does not simulate the reverse process. With uniform noise the samples do not have the distribution of the data even
    with a perfect network. With a mask and one site a step they do, in any order.
    """

    name = "adaptive"
    needs = (Need.POSTERIOR, Need.RANK_ONE)
    preserves_marginal = Preserves.NOTHING
    sites: int | None = None
    """Sites of one step; by default as many as fill all sites in the given number of steps."""

    def __post_init__(self) -> None:
        if self.sites is not None:
            validation.positive_int("sites", self.sites)

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        t, s, _ = super().plan(steps, grid, free, head, noise)
        count = (free + steps - 1) // steps if self.sites is None else torch.full_like(free, self.sites)
        return Plan(t, s, count.expand(t.shape))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        assert move.reveal is not None
        token, gain = prediction.map(_token_and_gain, noise("token"))
        wrong = gain > 0 if prediction.free is None else (gain > 0) & prediction.free
        return torch.where(first_sites(-gain, wrong, move.reveal, noise("site")), token, prediction.x_t.long())


def _token_and_gain(part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from nu, and (max_z nu_z - nu_k) pi_t(k)."""
    process = part.process.rank_one
    assert process is not None
    site = process.at(part.x_t, part.t)
    noise_probability = site.m_k / (process.vocab * site.clean + site.mask)  # pi_t(k)
    sharpened = part.leave_one_out()
    nu = part.without_sharpening().leave_one_out() if part.logits_processor.sharpens else sharpened
    gain = (nu.amax(-1) - gather_at(nu, part.x_t).squeeze(-1)) * noise_probability.to(nu.dtype)
    return draw_categorical(sharpened, u), gain
