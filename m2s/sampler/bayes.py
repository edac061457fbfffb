"""Bayes: the exact finite-step posterior (Eq. 19, Algorithm 3)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import check
from m2s.belief import Head
from m2s.belief.step import bayes_law
from m2s.ops.draw import BayesRoutes
from m2s.process import RankOne
from m2s.process.base import wide
from m2s.sampler.base import Move, StepSampler, needs_mask, needs_posterior
from m2s.sampler.belief import Belief
from m2s.sampler.categorical import draw
from m2s.sampler.random import Noise


@dataclass(frozen=True)
class Bayes(StepSampler):
    """p(y) = sum_z mu_z P_s(y|z) P_{t|s}(k|y) / P_t(k|z); at s = 0 a draw from mu.

    For a rank-one process a mixture of three routes, with N = sum_z mu_z / P_t(k|z): go to a draw z ~ mu with weight
    q(k) alpha_s / m_t(k), jump by the mixing distribution at s with weight q(k) (1 - alpha_s) N, or stay.
    """

    name = "bayes"

    def refuse(self, head: Head) -> None:
        needs_posterior(self, head)

    def step(self, belief: Belief, move: Move, noise: Noise) -> Int[Tensor, "B L"]:
        s = torch.minimum(wide(move.s), belief.t)
        if not belief.streams:
            return belief.map(lambda part, s, u: (draw(self.weights(part, s).clamp(min=0), u),), s, noise("token"))[0]
        return belief.step(routes(belief, s), noise)[0]

    def weights_of(self, part: Belief, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return bayes_law(part.posterior(), part.x_t, s, part.t, part.process)


def routes(belief: Belief, s: Float[Tensor, "*b"]) -> BayesRoutes:
    """The weights of the first two routes at every site; the third has the rest."""
    process = belief.process
    assert isinstance(process, RankOne)
    now = process.at(belief.x_t, belief.t)
    reached = now.own > 0
    s, t = check.align("s", s, belief.x_t), check.align("t", belief.t, belief.x_t)
    _, step = process.step(s, t)
    into = torch.where(belief.masked, step.mask, step.clean)  # q(k)
    alpha_s, mixing_s = process.alpha(s), process.mixing(s)
    total = process.vocab * mixing_s.clean + mixing_s.mask
    last = s <= 0
    return BayesRoutes(
        go=torch.where(last, 1.0, torch.where(reached, into * alpha_s / now.own.where(reached, 1), 0)),
        jump=torch.where(reached & ~last, into * total, 0),
        own=now.own.where(reached, torch.inf),
        stay=now.stay.where(now.stay > 0, 1),
        mask=mixing_s.mask / total.where(total > 0, 1),
    )


@dataclass(frozen=True)
class Ancestral(Bayes):
    """For masks: each masked site is revealed with probability (alpha_s - alpha_t) / (1 - alpha_t), by a draw from mu; a
    revealed one stays. It is the Bayes step of the absorbing process."""

    name = "ancestral"

    def refuse(self, head: Head) -> None:
        needs_mask(self, head)
        needs_posterior(self, head)
