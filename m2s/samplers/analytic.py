"""SEDD's released sampler: the analytic predictor on a linear grid from 1 to 1e-5, then its denoiser."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.reverse_step import analytic_weights
from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.process import RankOne
from m2s.samplers.base import Move, Plan, StepSampler
from m2s.samplers.prediction import Prediction


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

    def check_supported(self, head: Head) -> None:
        if not isinstance(head.process, RankOne):
            raise TypeError(
                f"sampler {self.name!r} is for rank-one processes (Uniform, Absorbing, Hybrid), not {head.process}: use 'euler'"
            )

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        """The grid squeezed into [end, 1] (linear: linspace(1, 1e-5), as released), and one call more for the denoiser."""
        t, s, _ = super().plan(steps, grid, free, head, noise)
        t, s = (self.end + (1 - self.end) * ends for ends in (t, s))
        return Plan(torch.cat([t, s[-1:]]), torch.cat([s, torch.zeros_like(s[-1:])]))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        def move_by(part: Prediction, s: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.weights(part, s)
            negative = -weights.clamp(max=0).sum(-1, dtype=part.t.dtype)
            return draw_categorical(weights.clamp(min=0), u), negative

        token, negative = prediction.map(move_by, torch.minimum(to_float64(move.s), prediction.t), noise("token"))
        prediction.notes["negative_mass"] = negative
        return token

    def weights_of(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        assert isinstance(part.process, RankOne)
        return analytic_weights(part.score(), part.x_t, s, part.t, part.process)
