"""What a sampler is: given the belief at time t, the next state at time s."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.heads import Head
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.process import Chain, RankOne
from m2s.samplers.grid import GRIDS, of_chain
from m2s.samplers.prediction import Prediction, guided_step


class Plan(NamedTuple):
    """One row for each call of the network, one column for each sample: from which time to which it leads, and, for samplers
    that count them, how many masked sites it reveals."""

    t: Float[Tensor, "M B"]
    s: Float[Tensor, "M B"]
    reveal: Int[Tensor, "M B"] | None = None


class Move(NamedTuple):
    """One row of a plan. The belief's own time is t too, but for a sampler with an open start it is never above 1 - t_min."""

    t: Float[Tensor, "B"]
    s: Float[Tensor, "B"]
    reveal: Int[Tensor, "B"] | None = None


@dataclass(frozen=True)
class Sampler(ABC):
    """One way to walk from noise to data. Its options are its fields; its name is the one `m2s.sample` takes."""

    name: ClassVar[str]
    open_start: ClassVar[bool] = False  # the process itself is asked for t = 1 - t_min where the plan says 1
    left_to_right: ClassVar[bool] = False  # a step reads of each sample its first masked site alone, given those before it

    @abstractmethod
    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        """Return the state at time s <= t, from the prediction at time t. It is not asked for s = 0: see `last_step`."""

    def last_step(self, prediction: Prediction, noise: CounterNoise) -> Int[Tensor, "B L"]:
        """Return clean tokens: a draw that removes all noise, also that of t = 0 where a schedule has sigma(0) > 0.

        The loop calls it in place of `step` where the plan has s = 0. It draws from the posterior; for an unconstrained score
        from the positive part of SEDD's denoiser (`denoising_weights`).

        Args:
            belief: The prediction at the last time t > 0 of the plan.
            noise: The uniforms of this step; the draw takes "token".
        """
        if prediction.streams:
            return prediction.draw(noise("token")).token
        token, negative = prediction.map(_denoise, noise("token"))
        prediction.notes["negative_mass"] = negative
        return token

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        """`free` counts the sites of each sample that are to be filled; `noise` is that of step 0. Over a finite chain every
        call leads to a lower step, so that there are no more than the chain has."""
        times = GRIDS[grid](steps)
        if isinstance(head.process, Chain):
            times = of_chain(times, head.process.steps)
        ends = torch.tensor(times, dtype=torch.float64, device=free.device)
        ends = ends.unsqueeze(-1).expand(-1, len(free))
        return Plan(ends[:-1], ends[1:])

    @abstractmethod
    def check_supported(self, head: Head) -> None:
        """Raise TypeError, with the reason, where this sampler cannot serve a head."""


@dataclass(frozen=True)
class StepSampler(Sampler):
    """A sampler whose step is a distribution of the next token at every site. Guidance can combine such distributions."""

    @abstractmethod
    def weights_of(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return weights of the next token at every site; negative ones count as 0."""

    def weights(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return `weights_of`; where guidance combines steps, p_c^g p_u^(1-g) of the positive parts (D-CFG)."""
        if not part.guides_step:
            return self.weights_of(part, s)
        with_condition, without = (self.weights_of(each, s).clamp(min=0) for each in part.apart())
        return guided_step(with_condition, without, part.logits_processor.guidance)


def _denoise(part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
    """A clean token for each site, and the negative mass of the weights it was drawn from."""
    weights = part.denoising_weights()
    negative = -weights.clamp(max=0).sum(-1, dtype=part.t.dtype)
    positive = weights.clamp(min=0)
    nothing = positive.sum(-1, keepdim=True) == 0
    if bool(nothing.any()):
        positive = torch.where(nothing, part.last_step().to(positive.dtype), positive)
    return draw_categorical(positive, u), negative


def needs_posterior(sampler: Sampler, head: Head) -> None:
    if not head.has_posterior and isinstance(head.process, Chain):
        raise TypeError(f"sampler {sampler.name!r} needs a posterior, which no score over a chain has: use m2s.Posterior")
    if not head.has_posterior:
        raise TypeError(
            f"sampler {sampler.name!r} draws from a posterior, and {type(head).__name__} is a free score that need not have "
            f"one: use {_served(head)}, or m2s.Projected(head)"
        )


def needs_mask(sampler: Sampler, head: Head) -> None:
    process = head.process
    if not (isinstance(process, RankOne) and process.is_pure_mask):
        raise TypeError(
            f"sampler {sampler.name!r} is for masks alone, but the process is {process}: it needs m2s.Absorbing; "
            f"use {_served(head)}"
        )


def needs_rates(sampler: Sampler, head: Head) -> None:
    if isinstance(head.process, Chain):
        raise TypeError(f"sampler {sampler.name!r} needs rates, and a finite chain has none: use sampler='bayes'")


def _served(head: Head) -> str:
    """Samplers that serve a head, for who chose one that does not."""
    if head.has_posterior:
        return "sampler='bayes'" if isinstance(head.process, Chain) else "sampler='bayes' or 'euler'"
    also = "'analytic', " if isinstance(head.process, RankOne) else ""
    return f"sampler={also}'euler' or 'tau_leaping'"
