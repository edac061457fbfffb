"""SEDD's released sampler: the analytic predictor on a linear grid from 1 to 1e-5, then its denoiser."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.belief import Head
from m2s.belief.step import analytic_weights
from m2s.process import RankOne
from m2s.process.base import wide
from m2s.sampler.base import Move, Plan, StepSampler
from m2s.sampler.belief import Belief
from m2s.sampler.categorical import draw
from m2s.sampler.random import Noise


@dataclass(frozen=True)
class Analytic(StepSampler):
    """The positive part of (s P_{t|s}^{-1})_y P_{t|s}(k|y) (`m2s.analytic_weights`), drawn from as it is, as the release does.

    On a realizable score the weights are the Bayes step; elsewhere some are negative, and the mass so dropped is counted. With
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
        def move_by(part: Belief, s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.weights(part, s)
            negative = -weights.clamp(max=0).sum(-1, dtype=part.t.dtype)
            return draw(weights.clamp(min=0), u), negative

        token, negative = belief.map(move_by, torch.minimum(wide(move.s), belief.t), noise("token"))
        belief.notes["negative_mass"] = negative
        return token

    def weights_of(self, part: Belief, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        assert isinstance(part.process, RankOne)
        return analytic_weights(part.score(), part.x_t, s, part.t, part.process)
