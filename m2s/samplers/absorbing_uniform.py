"""Uniform noise simulated like masks (Gourevitch et al. 2026): a token stays until it is replaced by a draw from mu."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import scatter_at
from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.reverse_step.routes import uniform_integer
from m2s.samplers.base import Move, StepSampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class AbsorbingUniform(StepSampler):
    """Replace the token k by a draw z ~ mu with probability (alpha_s - alpha_t) / (1 - alpha_t); otherwise it stays.

    This is the reverse step of the absorbing-state form of uniform noise ("Uniform Diffusion Models Revisited", 2605.22765).
    A site has one noise token u, and X_t is u once the site is corrupted, as if u were its mask. Given x_0, the marginals of
    X_t are those of uniform noise. The authors train a network that sees u. Here it is one of uniform noise, which does not.
    A step changes fewer tokens than `Bayes`. The error of replacing several sites at once is of second order in t - s.

    With probability `strength` z is corrupted to time s in place of this step, which is the authors' correction of tokens that
    were replaced before. The steps are then those of Song et al. (2021, Appendix A), with
    sigma = (1 - strength) (1 - alpha_s)/(1 - alpha_t):

        p(y) = (alpha_s - sigma alpha_t) mu_y + sigma [y = k] + strength (1 - alpha_s) / K
    """

    name = "absorbing_uniform"
    needs: ClassVar[tuple[Need, ...]] = (Need.RANK_ONE, Need.POSTERIOR)
    preserves_marginal = Preserves.ONE_SITE
    strength: float = 0.0
    """Probability, in [0, 1], of corrupting a draw from the posterior to time s."""

    def __post_init__(self) -> None:
        validation.in_interval("strength", self.strength, "[0, 1]")

    def check_supported(self, head: Head) -> None:
        super().check_supported(head)
        if head.process.mask is not None:
            raise TypeError(
                f"sampler {self.name!r} is for m2s.Uniform, but the process is {head.process}; use sampler='bayes', or "
                "'remasking' for m2s.Absorbing"
            )

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        s = torch.minimum(to_float64(move.s), prediction.t)
        if not prediction.needs_one_draw:
            return self.draw(prediction, s, noise)
        k, u = prediction.x_t.long(), noise("route")
        replace, stay = self._routes(prediction, s)
        noisy = uniform_integer(noise("jump"), prediction.process.vocab)
        kept = torch.where(u < replace + stay, k, noisy)
        return torch.where(u < replace, prediction.draw_token(noise("token")).token, kept)

    def unguided_weights(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        mu = part.posterior()
        replace, stay = (each.to(mu.dtype).unsqueeze(-1) for each in self._routes(part, s))
        current = scatter_at(torch.zeros_like(mu), part.x_t, 1.0)
        return replace * mu + stay * current + (1 - replace - stay) / part.process.vocab

    def _routes(self, part: Prediction, s: Float[Tensor, "*b"]) -> tuple[Tensor, Tensor]:
        """The probabilities of replacing a token by a draw from mu, and of keeping it."""
        process = part.process.rank_one
        assert process is not None
        s, t = validation.align("s", to_float64(s), part.x_t), validation.align("t", part.t, part.x_t)
        noise_s, noise_t = (process.vocab * process.mixing(time).clean for time in (s, t))
        stay = (1 - self.strength) * noise_s / noise_t.where(noise_t > 0, 1)
        return process.alpha(s) - stay * process.alpha(t), stay
