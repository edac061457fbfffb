"""The exact finite step of the reverse process (Eq. 19, Algorithm 3)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.reverse_step import bayes_probabilities
from m2s.dtypes import to_float64
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.reverse_step import BayesRoutes
from m2s.samplers.base import Move, StepSampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Bayes(StepSampler):
    """Draw from p(y) = sum_z mu_z P_s(y|z) P_{t|s}(k|y) / P_t(k|z) (`m2s.bayes_probabilities`); at s = 0 from mu.

    For a rank-one process p is a mixture of three routes, with N = sum_z mu_z / P_t(k|z): move to a
    draw z ~ mu with weight q(k) alpha_s / m_t(k), to a draw from the mixing distribution at s with weight
    q(k) (1 - alpha_s) N, or keep k.
    """

    name = "bayes"
    needs: ClassVar[tuple[Need, ...]] = (Need.POSTERIOR,)
    preserves_marginal = Preserves.ONE_SITE

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        s = torch.minimum(to_float64(move.s), prediction.t)
        if prediction.needs_one_draw:
            return prediction.step(routes(prediction, s), noise)[0]
        return self.draw(prediction, s, noise)

    def unguided_weights(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        return bayes_probabilities(part.posterior(), part.x_t, s, part.t, part.process)


def routes(prediction: Prediction, s: Float[Tensor, "*b"]) -> BayesRoutes:
    """Return the coefficients of a Bayes step of a rank-one process at every site.

    Args:
        prediction: The prediction at time t, with sites [B, L].
        s: Time at the end of the step, [B].

    Returns:
        The weights of the first two routes; the third has the rest.
    """
    process = prediction.process.rank_one
    assert process is not None
    now = process.at(prediction.x_t, prediction.t)
    reached = now.m_k > 0  # m_t(k) = 0 at a token that is certainly clean
    s, t = validation.align("s", s, prediction.x_t), validation.align("t", prediction.t, prediction.x_t)
    _, step = process.step(s, t)
    into = torch.where(prediction.masked, step.mask, step.clean)  # q(k)
    alpha_s, mixing_s = process.alpha(s), process.mixing(s)
    total = process.vocab * mixing_s.clean + mixing_s.mask
    last = s <= 0
    return BayesRoutes(
        go=torch.where(last, 1.0, torch.where(reached, into * alpha_s / now.m_k.where(reached, 1), 0)),
        jump=torch.where(reached & ~last, into * total, 0),
        m_k=now.m_k.where(reached, torch.inf),
        stay=now.stay.where(now.stay > 0, 1),
        mask=mixing_s.mask / total.where(total > 0, 1),
    )


@dataclass(frozen=True)
class Ancestral(Bayes):
    """The Bayes step of the absorbing process.

    Each masked site is revealed with probability (alpha_s - alpha_t) / (1 - alpha_t), by a draw from mu. A revealed token
    stays.
    """

    name = "ancestral"
    needs = (Need.PURE_MASK, Need.POSTERIOR)
