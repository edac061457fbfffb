"""Euler: one step of the reverse rates (Eq. 18, Algorithm 2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from m2s import check
from m2s.belief import Head, rate_from_score
from m2s.process import RankOne
from m2s.process.base import wide
from m2s.sampler.base import Move, Sampler, needs_rates
from m2s.sampler.belief import Belief
from m2s.sampler.categorical import draw, integer
from m2s.sampler.random import Noise


@dataclass(frozen=True)
class Euler(Sampler):
    """Leave with probability min(E, 1), E = (t - s) sum_y Q_t(y -> k) s_y, and go to y in proportion to its rate.

    Rank-one with a posterior, c = off/m(k) + mu_k/(alpha + m(k)): the rate k -> y is n(k) [alpha mu_y / m(k) + m(y) c], so that
    a jump goes to z ~ mu without k in proportion alpha off / m(k), else by the mixing law without k. Counted: how often E > 1.
    """

    name = "euler"
    open_start = True

    def refuse(self, head: Head) -> None:
        needs_rates(self, head)

    def step(self, belief: Belief, move: Move, noise: Noise) -> Int[Tensor, "B L"]:
        if belief.streams:
            rate, target = _by_routes(belief, noise)
        else:
            rate, target = belief.map(_by_rates, noise("token"))
        exit_mass = check.align("t", wide(move.t - move.s), belief.x_t) * rate
        belief.notes["exit_above_one"] = exit_mass > 1 + 1e-9
        return torch.where(noise("route") < exit_mass, target, belief.x_t.long())


def _by_rates(part: Belief, u: Tensor) -> tuple[Tensor, Tensor]:
    """The exit rate and where a jump leads, from K-vectors of rates."""
    rates = rate_from_score(part.score(), part.x_t, part.t, part.process)
    return rates.sum(-1, dtype=part.t.dtype), draw(rates, u)


def _by_routes(belief: Belief, noise: Noise) -> tuple[Tensor, Tensor]:
    process, k = belief.process, belief.x_t.long()
    assert isinstance(process, RankOne)
    token, _, own, off = belief.draw(noise("token"), other=True)
    site = process.at(belief.x_t, belief.t)
    reached = site.own > 0
    divisor = site.own.where(reached, 1)
    masked = belief.masked
    common = torch.where(reached, off / divisor, 0) + own / site.stay
    to_token = torch.where(reached, site.alpha / divisor * off, 0)
    to_clean = common * site.clean * (process.vocab - 1 + masked.to(common.dtype))
    to_mask = torch.where(masked, 0, common * site.mask)
    total = to_token + to_clean + to_mask
    v = noise("jump") * total
    w = ((v - to_token) / to_clean.where(to_clean > 0, 1)).clamp(0, 1)
    landing = integer(w, process.vocab - 1)
    landing = torch.where(masked, integer(w, process.vocab), landing + (landing >= k))  # any clean token but k
    if process.mask is not None:
        landing = torch.where(v < to_token + to_clean, landing, process.mask)
    return torch.where(site.rate > 0, site.rate * total, 0), torch.where(v < to_token, token, landing)
