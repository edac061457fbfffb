"""Euler: one step of the reverse rates (Eq. 18, Algorithm 2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import Head, rate_from_score
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.reverse_step import EulerRoutes
from m2s.process import RankOne
from m2s.samplers.base import Move, Sampler, needs_rates
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class Euler(Sampler):
    """Leave with probability min(E, 1), E = (t - s) sum_y Q_t(y -> k) s_y, and go to y in proportion to its rate.

    Rank-one with a posterior, c = off/m(k) + mu_k/(alpha + m(k)): the rate k -> y is n(k) [alpha mu_y / m(k) + m(y) c], so that
    a jump goes to z ~ mu without k in proportion alpha off / m(k), else by the mixing law without k. Counted: how often E > 1.
    """

    name = "euler"
    open_start = True

    def check_supported(self, head: Head) -> None:
        needs_rates(self, head)

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        span = validation.align("t", to_float64(move.t - move.s), prediction.x_t)
        if prediction.streams:
            token, exit_mass = prediction.step(routes(prediction, span), noise)
        else:
            rate, target = prediction.map(_by_rates, noise("token"))
            exit_mass = span * rate
            token = torch.where(noise("route") < exit_mass, target, prediction.x_t.long())
        prediction.notes["exit_above_one"] = exit_mass > 1 + 1e-9
        return token


def _by_rates(part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
    """The exit rate and where a jump leads, from K-vectors of rates."""
    rates = rate_from_score(part.score(), part.x_t, part.t, part.process)
    return rates.sum(-1, dtype=part.t.dtype), draw_categorical(rates, u)


def routes(prediction: Prediction, span: Tensor) -> EulerRoutes:
    """The rates of every site, but for what the belief says."""
    process = prediction.process
    assert isinstance(process, RankOne)
    site = process.at(prediction.x_t, prediction.t)
    reached = site.own > 0
    return EulerRoutes(
        token=torch.where(reached, site.alpha / site.own.where(reached, 1), 0),
        own=site.own.where(reached, torch.inf),
        stay=site.stay.where(site.stay > 0, 1),
        clean=site.clean,
        mask=site.mask,
        rate=site.rate.where(site.rate > 0, 0),
        span=span,
    )
