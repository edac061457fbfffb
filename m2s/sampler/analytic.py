"""SEDD's released sampler: the analytic predictor on a linear grid from 1 to 1e-5, then its denoiser."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s.belief import Head
from m2s.belief.step import analytic_weights
from m2s.process import RankOne
from m2s.process.base import wide
from m2s.sampler.base import Move, Plan, Sampler
from m2s.sampler.belief import Belief
from m2s.sampler.categorical import draw
from m2s.sampler.random import Noise


@dataclass(frozen=True)
class Analytic(Sampler):
    """The positive part of (s P_{t|s}^{-1})_y P_{t|s}(k|y) (`m2s.analytic_weights`), drawn from as it is, as the release does.

    On a realizable score the weights are the Bayes law; elsewhere some are negative, and the mass so dropped is counted. The
    last step, to t = 0, never leads to the mask: where no clean token has a positive weight, its law is s_y P_t(k|y). With
    `m2s.Projected(head)` this is the paper's Algorithm 4.
    """

    name = "analytic"
    open_start = True
    end: float = 1e-5
    """Where the grid ends and the denoiser takes over."""

    def refuse(self, head: Head) -> None:
        if not isinstance(head.process, RankOne):
            raise TypeError(
                f"sampler {self.name!r} is for rank-one processes (Uniform, Absorbing, Hybrid), not {head.process}: use 'euler'"
            )

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: Noise) -> Plan:
        """The grid squeezed into [end, 1] (linear: linspace(1, 1e-5), as released), and one call more for the denoiser."""
        t, s, _ = super().plan(steps, grid, free, head, noise)
        t, s = (self.end + (1 - self.end) * ends for ends in (t, s))
        return Plan(torch.cat([t, s[-1:]]), torch.cat([s, torch.zeros_like(s[-1:])]))

    def step(self, belief: Belief, move: Move, noise: Noise) -> Int[Tensor, "B L"]:
        token, negative = belief.map(_move, torch.minimum(wide(move.s), belief.t), noise("token"))
        belief.notes["negative_mass"] = negative
        return token


def _move(part: Belief, s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(part.process, RankOne)
    weights = analytic_weights(part.score(), part.x_t, s, part.t, part.process)
    negative = -weights.clamp(max=0).sum(-1, dtype=part.t.dtype)
    weights = weights.clamp(min=0)
    if part.process.mask is not None:
        clean = torch.nn.functional.pad(weights[..., :-1], (0, 1))
        nothing = clean.sum(-1, keepdim=True) == 0
        if bool((nothing & (s <= 0).unsqueeze(-1)).any()):
            clean = torch.where(nothing, part.last_step().to(clean.dtype), clean)
        weights = torch.where((s <= 0).unsqueeze(-1), clean, weights)
    return draw(weights, u), negative
