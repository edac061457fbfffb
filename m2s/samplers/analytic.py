"""SEDD's released sampler: the analytic predictor on a grid from 1 to 1e-5, then its denoiser."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.conversions.reverse_step import analytic_weights
from m2s.dtypes import to_float64
from m2s.heads import Head
from m2s.ops.analytic_step.naive import draw_from
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers.base import Move, Plan, StepSampler
from m2s.samplers.capabilities import Need, Preserves
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Analytic(StepSampler):
    """Draw from the positive part of (s P_{t|s}^{-1})_y P_{t|s}(k|y) (`m2s.analytic_weights`), as SEDD's release does.

    For a realizable score the weights are the Bayes step. For others some weights are negative; `Diagnostics` counts the mass
    that is dropped. With `m2s.Projected(head)` this is the paper's Algorithm 4.
    """

    name = "analytic"
    needs = (Need.RANK_ONE,)
    preserves_marginal = Preserves.ONE_SITE
    excludes_t_one = True
    end: float = 1e-5
    """Time at which the grid ends. One more call of the network, the denoiser, makes the step from there to 0."""

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        """Scale the grid to [end, 1] and add one call for the denoiser. Linear: linspace(1, 1e-5), as released."""
        t, s, _ = super().plan(steps, grid, free, head, noise)
        t, s = (self.end + (1 - self.end) * ends for ends in (t, s))
        return Plan(torch.cat([t, s[-1:]]), torch.cat([s, torch.zeros_like(s[-1:])]))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        # Near t = 1 the prediction holds at 1 - t_min, which may be below s.
        s, u = torch.minimum(to_float64(move.s), prediction.t), noise("token")
        if type(self) is Analytic and prediction.fuses_analytic_step:
            token, negative = prediction.analytic_step(s, u)
        else:
            token, negative = prediction.map(lambda part, s, u: draw_from(self.weights(part, s), u), s, u)
        prediction.notes["negative_mass"] = negative
        return token

    def unguided_weights(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        process = part.process.rank_one
        assert process is not None
        return analytic_weights(part.score(), part.x_t, s, part.t, process)
