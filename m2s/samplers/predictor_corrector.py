"""Predictor-corrector: any sampler, and after each of its steps some sites drawn anew given all others."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.heads import Head, score_from_posterior
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.process import RankOne
from m2s.samplers.analytic import Analytic
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.bayes import Bayes
from m2s.samplers.prediction import Prediction
from m2s.samplers.tau_leaping import TauLeaping


@dataclass(frozen=True)
class PredictorCorrector(Sampler):
    """After each step to s > 0, `corrections` Gibbs moves at s, each with a call of the network of its own.

    A Gibbs move draws a site from s_y / sum(s) with s_k = 1, its law given the others, Pr(X_s^i = y | X_s^{-i}), by the head's
    score (a posterior head has none for other clean tokens at an unmasked site, and keeps to what it knows). One site at a time
    (`sites=1`, chosen evenly) leaves p_s as it is; several at once are faster and not exact.
    """

    name = "predictor_corrector"
    open_start = True  # one answer for every predictor
    predictor: Sampler | None = None
    """By default `Bayes`; for a free score `Analytic`, or `TauLeaping` where rates are tabulated."""
    corrections: int = 1
    sites: int = 1

    def __post_init__(self) -> None:
        if self.predictor is not None:
            validation.instance("predictor", self.predictor, Sampler, "a sampler such as m2s.samplers.Bayes()")
        validation.positive_int("corrections", self.corrections)
        validation.positive_int("sites", self.sites)

    def check_supported(self, head: Head) -> None:
        self.first(head).check_supported(head)

    def first(self, prediction: Head | Prediction) -> Sampler:
        """The predictor."""
        if self.predictor is not None or prediction.has_posterior:
            return self.predictor or Bayes()
        return Analytic() if isinstance(prediction.process, RankOne) else TauLeaping()

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        predictor = self.first(head)
        t, s, reveal = predictor.plan(steps, grid, free, head, noise)
        if reveal is not None:
            raise TypeError(f"sampler {predictor.name!r} reveals sites one after another and takes no corrector")
        rows: list[tuple[Tensor, Tensor]] = []
        for start, end in zip(t, s, strict=True):
            rows += [(start, end)] + [(end, end)] * (self.corrections if bool((end > 0).all()) else 0)
        return Plan(torch.stack([start for start, _ in rows]), torch.stack([end for _, end in rows]))

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        if bool((move.s < move.t).any()):
            return self.first(prediction).step(prediction, move, noise)
        return gibbs(prediction, self.sites, noise)


def gibbs(prediction: Prediction, sites: int, noise: CounterNoise) -> Int[Tensor, "B L"]:
    """`sites` sites of each sample, chosen evenly, drawn from their law given all others at time t."""
    x = prediction.x_t.long()
    order = noise("order") if prediction.free is None else noise("order").masked_fill(~prediction.free, torch.inf)
    chosen = order.argsort(dim=-1, stable=True)[:, :sites]  # as many rows whatever is clamped: a clamped one is put back
    at = (chosen + torch.arange(len(x), device=x.device).unsqueeze(-1) * x.shape[1]).reshape(-1)
    part = prediction[at]
    score, k = part.score(), part.x_t.long()
    # No loss is taken at a token that is certainly clean, so an unconstrained score means nothing there: the process knows.
    clean = torch.nn.functional.one_hot(k, part.process.states).to(score)
    score = torch.where(part.certain().unsqueeze(-1), score_from_posterior(clean, k, part.t, part.process), score)
    new = draw_categorical(score, noise("token").reshape(-1)[at])
    moved = x.reshape(-1).scatter(0, at, new).reshape(x.shape)
    return moved if prediction.free is None else torch.where(prediction.free, moved, x)
