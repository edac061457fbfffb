"""Predictor-corrector: any sampler, and after each of its steps some sites drawn anew given all others."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import check
from m2s.belief import Head
from m2s.sampler.analytic import Analytic
from m2s.sampler.base import Move, Plan, Sampler
from m2s.sampler.bayes import Bayes
from m2s.sampler.belief import Belief
from m2s.sampler.draw import draw
from m2s.sampler.first_hitting import first_of
from m2s.sampler.random import Noise


@dataclass(frozen=True)
class PredictorCorrector(Sampler):
    """After each step to s > 0, `corrections` Gibbs moves at s, each with a call of the network of its own.

    A Gibbs move draws a site from its law given the others, Pr(X_s^i = y | X_s^{-i}) = s_y / sum(s) = (nu P_s)_y, with s_k = 1.
    One site at a time (`sites=1`, chosen evenly) leaves p_s as it is; several at once are faster and not exact.
    """

    name = "predictor_corrector"
    open_start = True  # one answer for every predictor
    predictor: Sampler | None = None
    """By default `Bayes`, and `Analytic` for a free score."""
    corrections: int = 1
    sites: int = 1

    def __post_init__(self) -> None:
        if self.predictor is not None:
            check.instance("predictor", self.predictor, Sampler, "a sampler such as m2s.sampler.Bayes()")
        check.positive_int("corrections", self.corrections)
        check.positive_int("sites", self.sites)

    def refuse(self, head: Head) -> None:
        self.first(head).refuse(head)

    def first(self, head: Head) -> Sampler:
        """The predictor."""
        return self.predictor or (Bayes() if head.has_posterior else Analytic())

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: Noise) -> Plan:
        predictor = self.first(head)
        t, s, reveal = predictor.plan(steps, grid, free, head, noise)
        if reveal is not None:
            raise TypeError(f"sampler {predictor.name!r} reveals sites one after another and takes no corrector")
        rows: list[tuple[Tensor, Tensor]] = []
        for start, end in zip(t, s, strict=True):
            rows += [(start, end)] + [(end, end)] * (self.corrections if bool((end > 0).all()) else 0)
        return Plan(torch.stack([start for start, _ in rows]), torch.stack([end for _, end in rows]))

    def step(self, belief: Belief, move: Move, noise: Noise) -> Int[Tensor, "B L"]:
        if bool((move.s < move.t).any()):
            return self.first(belief.head).step(belief, move, noise)
        return gibbs(belief, self.sites, noise)


def gibbs(belief: Belief, sites: int, noise: Noise) -> Int[Tensor, "B L"]:
    """`sites` sites of each sample, chosen evenly, drawn from their law given all others at time t."""
    x = belief.x_t.long()
    free = belief.free if belief.free is not None else torch.ones_like(x, dtype=torch.bool)
    chosen = first_of(noise("order"), free, torch.full((len(x),), sites, device=x.device))
    at = chosen.reshape(-1).nonzero().squeeze(-1)
    part = belief[at]
    new = draw(part.score(), noise("token").reshape(-1)[at])
    return x.reshape(-1).scatter(0, at, new).reshape(x.shape)
