"""Self-correction (GIDD; von Ruette et al. 2025): after sampling, tokens that the network would not have drawn are replaced."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.conversions.bridge import gather_at, safe_log
from m2s.heads import Head
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.process import RankOne
from m2s.samplers.adaptive import needs_rank_one
from m2s.samplers.base import Move, Plan, Sampler, needs_posterior
from m2s.samplers.bayes import Bayes
from m2s.samplers.first_hitting import first_masked
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class SelfCorrecting(Sampler):
    """After the predictor's last step, `corrections` calls of the network at a small time. Each draws z at every site from
    nu^(1/temperature) and replaces the token k of those `sites` sites where z != k has the greatest probability.

    Ours: only where nu_z > nu_k. So no step lowers the likelihood of a site it changes, nor the share of tokens that are the
    network's first choice, and a sample that nothing improves stays as it is; the authors watch that share and stop by it.
    """

    name = "self_correcting"
    open_start = True  # one answer for every predictor
    predictor: Sampler = field(default_factory=Bayes)
    corrections: int = 128
    temperature: float = 0.1
    time: float = 0.01
    """What the network is told."""
    sites: int = 1

    def __post_init__(self) -> None:
        validation.instance("predictor", self.predictor, Sampler, "a sampler such as m2s.samplers.Bayes()")
        validation.positive_int("corrections", self.corrections)
        validation.positive_int("sites", self.sites)
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature}, but it must be a positive number")
        if not 0 < self.time < 1:
            raise ValueError(f"time is {self.time}, but it must lie between 0 and 1")

    def check_supported(self, head: Head) -> None:
        needs_posterior(self, head)
        needs_rank_one(self, head)
        assert isinstance(head.process, RankOne)
        if head.process.is_pure_mask:
            raise TypeError(
                f"sampler {self.name!r} replaces tokens, and under a mask alone, {head.process}, no token is ever doubted: it "
                "needs m2s.Hybrid or m2s.Uniform; use sampler='remasking'"
            )
        self.predictor.check_supported(head)

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        t, s, reveal = self.predictor.plan(steps, grid, free, head, noise)
        more = t.new_full((self.corrections, len(free)), self.time)
        counts = None if reveal is None else torch.cat([reveal, torch.zeros_like(more, dtype=reveal.dtype)])
        return Plan(torch.cat([t, more]), torch.cat([s, more]), counts)

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        if bool((move.s < move.t).any()):
            return self.predictor.step(prediction, move, noise)
        token, surety = prediction.map(self._better, noise("token"))
        wrong = surety > 0 if prediction.free is None else (surety > 0) & prediction.free
        count = torch.full((len(token),), self.sites, device=token.device)
        return torch.where(first_masked(-surety, wrong, count, noise("site")), token, prediction.x_t.long())

    def _better(self, part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
        """A draw from the sharpened law and its probability there, 0 where it is no better than the token that is there."""
        nu = part.leave_one_out()
        distribution = torch.softmax(safe_log(nu) / self.temperature, -1)
        token = draw_categorical(distribution, u)
        better = gather_at(nu, token) > gather_at(nu, part.x_t)
        return token, torch.where(better, gather_at(distribution, token), 0).squeeze(-1)
