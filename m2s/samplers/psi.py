"""Psi-samplers (Deschenaux et al. 2026): a mixture of the Bayes step and of fresh noise on a predicted clean token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import apply_transition, mixing_vector
from m2s.conversions.reverse_step import bayes_probabilities
from m2s.dtypes import to_float64
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.reverse_step.routes import mixing_target
from m2s.samplers.base import Move, StepSampler
from m2s.samplers.bayes import routes
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Psi(StepSampler):
    """With probability kappa take the Bayes step, otherwise corrupt a draw from the posterior to time s.

        p(y) = kappa sum_z mu_z q(y | x_t = k, z) + (1 - kappa) sum_z mu_z P_s(y|z),        low <= t <= high

    ("The Diffusion Duality, Chapter II", arXiv:2602.21185.) Given x_0, both parts have the distribution P_s(.|x_0) at s, so one
    site keeps its marginal for every kappa. The second part is a corrector: it replaces tokens whatever their value, so that
    errors of earlier steps can be corrected. Sites that it replaces in the same step are drawn independently of each other, and
    that error does not vanish with the length of the step. At times outside [low, high], and with kappa = 1, this is `Bayes`.
    For an absorbing mask a revealed token is masked again with probability (1 - kappa) (1 - alpha_s), as in ReMDM.
    """

    name = "psi"
    needs: ClassVar[tuple[Need, ...]] = (Need.POSTERIOR,)
    preserves_marginal = Preserves.ONE_SITE
    kappa: float = 0.95
    """Weight of the Bayes step, in [0, 1]; the rest is the corrector."""
    low: float = 0.1
    """The smallest time at which the corrector is used."""
    high: float = 0.5
    """The largest time at which the corrector is used."""

    def __post_init__(self) -> None:
        for name in ("kappa", "low", "high"):
            validation.in_interval(name, getattr(self, name), "[0, 1]")

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        s = torch.minimum(to_float64(move.s), prediction.t)
        if not prediction.needs_one_draw:
            return self.draw(prediction, s, noise)
        process, k = prediction.process.rank_one, prediction.x_t.long()
        assert process is not None
        drawn, bayes = prediction.draw_token(noise("token")), routes(prediction, s)
        jump, choice = noise("jump"), noise("order")
        kept, _ = bayes.take(drawn, k, jump, noise("route"), process.vocab, process.mask)
        kappa = validation.align("t", self._kappa(prediction.t), k).expand(k.shape)
        # Given that it is not below kappa, this is a uniform number again.
        u = (choice - kappa) / (1 - kappa).where(kappa < 1, 1)
        noisy = mixing_target(jump, bayes.mask, process.vocab, process.mask)
        corrupted = torch.where(u < process.alpha(validation.align("s", s, k)), drawn.token, noisy)
        return torch.where(choice < kappa, kept, corrupted)

    def unguided_weights(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        mu = part.posterior()
        kappa = validation.align("t", self._kappa(part.t), part.x_t).unsqueeze(-1).to(mu.dtype)
        return kappa * bayes_probabilities(mu, part.x_t, s, part.t, part.process) + (1 - kappa) * _corrupted(mu, part, s)

    def _kappa(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """The weight of the Bayes step at time t: `kappa` inside [low, high], otherwise 1."""
        inside = (t >= self.low) & (t <= self.high)
        return torch.where(inside, torch.full_like(t, self.kappa), torch.ones_like(t))


def _corrupted(mu: Float[Tensor, "*site S"], part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
    """mu P_s, the distribution of a draw from mu that is corrupted to time s."""
    rank_one = part.process.rank_one
    if rank_one is None:
        transition = part.process.transition_matrix(to_float64(s))
        return apply_transition(mu.to(transition.dtype), transition).to(mu.dtype)
    at_s = rank_one.at(part.x_t, to_float64(s))
    return (at_s.alpha.unsqueeze(-1) * mu + mixing_vector(rank_one, at_s)).to(mu.dtype)
