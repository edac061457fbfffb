"""Levels of masking noise that are not times: a share of masks, and a number of masks without replacement."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from m2s.evaluation.likelihood.levels import OPEN, POSITION, Levels, Times
from m2s.losses.noise import TOUCHED
from m2s.ops.counter_noise import CounterNoise
from m2s.process import Process
from m2s.process.rank_one import time_of_mask_probability


@dataclass(frozen=True)
class MaskShare(Levels):
    """Every position is masked with probability lambda, uniform on [low, high); the weight is factor/lambda.

    Args:
        low: The smallest probability.
        high: The largest one.
        factor: The factor of the mean; None: high - low.
    """

    low: float = 0.0
    high: float = 1.0
    factor: float | None = None

    def draw(self, process: Process, u: Float[Tensor, "B"], sizes: Int[Tensor, "B"]) -> tuple[Tensor, Tensor]:
        share, factor = Times(self.low, self.high, self.factor).draw(process, u, sizes)
        share = share.clamp(min=OPEN)
        return share, factor / share

    def nodes(self, process: Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        times = Times(self.low, self.high, self.factor).nodes(process, size, breaks)
        return [(share, weight / share) for share, weight in times]

    def time(self, process: Process, level: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return time_of_mask_share(process, level)

    def corrupt(
        self,
        process: Process,
        x_0: Int[Tensor, "B L"],
        level: Float[Tensor, "B"],
        rows: Int[Tensor, "B"],
        seed: int,
        step: int,
        free: Bool[Tensor, "B L"] | None = None,
    ) -> Int[Tensor, "B L"]:
        assert process.mask is not None
        # The numbers of `corrupt_by_counter`, so that estimators over times and over shares are compared on the same noise.
        masked = CounterNoise(seed, rows, x_0.shape[1], step)(TOUCHED) >= 1 - level.unsqueeze(-1)
        return torch.where(masked if free is None else masked & free, process.mask, x_0.long())

    def probability(
        self, process: Process, x_0: Int[Tensor, "n L"], x_t: Int[Tensor, "n L"], level: Float[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        masked = process.is_mask(x_t)
        share = level.unsqueeze(-1)
        return torch.where(masked, share, torch.where(x_t.long() == x_0.long(), 1 - share, 0.0)).prod(-1)


@dataclass(frozen=True)
class MaskCount(Levels):
    """n positions are masked, n uniform on 1..L, all sets of n positions equally likely; the weight is L/n.

    The level is the share n/L.
    """

    def draw(self, process: Process, u: Float[Tensor, "B"], sizes: Int[Tensor, "B"]) -> tuple[Tensor, Tensor]:
        number = torch.minimum((u * sizes).floor() + 1, sizes.to(u))
        return number / sizes, sizes / number

    def nodes(self, process: Process, size: int, breaks: tuple[float, ...] = ()) -> list[tuple[float, float]]:
        return [(number / size, 1 / number) for number in range(1, size + 1)]

    def time(self, process: Process, level: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return time_of_mask_share(process, level)

    def corrupt(
        self,
        process: Process,
        x_0: Int[Tensor, "B L"],
        level: Float[Tensor, "B"],
        rows: Int[Tensor, "B"],
        seed: int,
        step: int,
        free: Bool[Tensor, "B L"] | None = None,
    ) -> Int[Tensor, "B L"]:
        assert process.mask is not None
        counted = torch.ones_like(x_0, dtype=torch.bool) if free is None else free
        u = CounterNoise(seed, rows, x_0.shape[1], step)(POSITION)
        rank = torch.where(counted, u, 2.0).argsort(-1).argsort(-1)
        number = (level * counted.sum(-1)).round()
        return torch.where(rank < number.unsqueeze(-1), process.mask, x_0.long())

    def probability(
        self, process: Process, x_0: Int[Tensor, "n L"], x_t: Int[Tensor, "n L"], level: Float[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        length, masked = x_0.shape[1], process.is_mask(x_t)
        number = (level * length).round().long()
        reached = (masked | (x_t.long() == x_0.long())).all(-1) & (masked.sum(-1) == number)
        sets = torch.tensor([math.comb(length, each) for each in range(length + 1)], dtype=level.dtype)
        return torch.where(reached, 1 / sets[number], 0.0)


def time_of_mask_share(process: Process, share: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Return the time at which a token is masked with a given probability.

    Args:
        process: A rank-one process with a mask.
        share: Probabilities of the mask, [B].

    Returns:
        Times, [B]; 1 where no time has so many masks.
    """
    assert process.rank_one is not None
    return time_of_mask_probability(process.rank_one, share)
