"""Adaptive sampling (GIDD; von Ruette et al. 2025): what the network most wants changed is drawn first, masked or not."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at
from m2s.heads import Head
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.process import RankOne
from m2s.samplers.base import Move, Plan, Sampler, needs_posterior
from m2s.samplers.first_hitting import first_masked
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Adaptive(Sampler):
    """Draw the sites of greatest (max_z nu_z - nu_k) pi_t(k) from nu, pi_t = m_t / (1 - alpha_t) the distribution of the noise.

    The draw is from nu after temperature, top-k and top-p; the ranking is by nu before them. Ties are broken at random.

    This does not simulate the reverse process: with tokens for noise the distribution of the samples is not that of the data
    even with a perfect network. With a mask alone and one site a step it is, whatever the order. Steps that are left when all
    sites are filled correct what was drawn; the last one is a draw from the posterior at every site.
    """

    name = "adaptive"
    sites: int | None = None
    """Sites of one step; by default as many as fill all of them in the steps there are."""

    def __post_init__(self) -> None:
        if self.sites is not None:
            validation.positive_int("sites", self.sites)

    def check_supported(self, head: Head) -> None:
        needs_posterior(self, head)
        needs_rank_one(self, head)

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        t, s, _ = super().plan(steps, grid, free, head, noise)
        count = (free + steps - 1) // steps if self.sites is None else torch.full_like(free, self.sites)
        return Plan(t, s, count.expand(t.shape))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        assert move.reveal is not None
        token, gain = prediction.map(_wish, noise("token"))
        wrong = gain > 0 if prediction.free is None else (gain > 0) & prediction.free
        return torch.where(first_masked(-gain, wrong, move.reveal, noise("site")), token, prediction.x_t.long())


def _wish(part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
    """A draw from nu, and how much better the best token is than the current one, times the odds that this is noise."""
    process = part.process
    assert isinstance(process, RankOne)
    site = process.at(part.x_t, part.t)
    share = site.own / (process.vocab * site.clean + site.mask)
    sharpened = part.leave_one_out()
    nu = part.without_sharpening().leave_one_out() if part.logits_processor.sharpens else sharpened
    return draw_categorical(sharpened, u), (nu.amax(-1) - gather_at(nu, part.x_t).squeeze(-1)) * share.to(nu.dtype)


def needs_rank_one(sampler: Sampler, head: Head) -> None:
    if not isinstance(head.process, RankOne):
        raise TypeError(
            f"sampler {sampler.name!r} is for rank-one processes (Uniform, Absorbing, Hybrid), not {head.process}: "
            "use sampler='bayes'"
        )
