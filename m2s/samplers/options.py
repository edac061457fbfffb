"""What a call of `m2s.sample` asks for, checked before anything is computed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from m2s import validation
from m2s.heads import Head, LogScore, NextToken
from m2s.process import Chain
from m2s.realizability import Projected
from m2s.samplers.base import Sampler, StepSampler, needs_posterior
from m2s.samplers.grid import GRIDS
from m2s.samplers.prediction import LogitsProcessor
from m2s.samplers.registry import default_sampler, find_sampler

MICRO_BATCH = 16


@dataclass(frozen=True)
class SamplingOptions:
    """The arguments of `m2s.sample`, but for the network and what watches it. Making one raises what cannot be done."""

    head: Head
    shape: tuple[int, int]
    steps: int = 128
    sampler: str | Sampler = "auto"
    grid: str = "cosine"
    seed: int = 0
    clamp: Tensor | None = None
    condition: Tensor | None = None
    guidance: float = 1.0
    guide: Literal["posterior", "rates", "step"] = "posterior"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    on: Literal["posterior", "leave_one_out"] = "posterior"
    batch_size: int | None = None
    start: int = 0
    micro_batch: int = MICRO_BATCH
    window: int | None = None
    overlap: int | None = None
    t_min: float = 1e-3

    def __post_init__(self) -> None:
        validation.instance("head", self.head, Head, "a head such as m2s.Posterior(process)")
        if isinstance(self.head, Projected) and isinstance(self.head.process, Chain):
            raise TypeError("m2s.Projected needs rates, and a finite chain has none: use m2s.Posterior")
        if self.head.sampler not in (None, self.chosen.name):
            raise TypeError(f"{self.head} is drawn from by sampler={self.head.sampler!r} alone, not by {self.chosen.name!r}")
        self._refuse(self.head)
        n, _ = self._checked_shape()
        validation.positive_int("steps", self.steps)
        validation.positive_int("start", self.start, low=0)
        validation.positive_int("micro_batch", self.micro_batch)
        if self.batch_size is not None:
            validation.positive_int("batch_size", self.batch_size)
        if not isinstance(self.grid, str) or self.grid not in GRIDS:
            raise ValueError(f"there is no grid {self.grid!r}: choose from {', '.join(GRIDS)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is {self.seed!r}, but it must be an int in [0, 2^64)")
        if self.start + n > 1 << 32:
            raise ValueError(f"start + n is {self.start + n}, but samples are numbered below 2^32")
        if not 0 < self.t_min < 0.5:
            raise ValueError(f"t_min is {self.t_min}, but it must lie between 0 and 1/2")
        if self.condition is not None and (not isinstance(self.condition, Tensor) or self.condition.ndim == 0):
            raise TypeError(f"condition must be a torch.Tensor with a row for each sample, not {self.condition!r}")
        if self.condition is not None and len(self.condition) != n:
            raise ValueError(f"condition has {len(self.condition)} rows, but {n} samples were asked for")
        self._check_shaping()
        self._check_clamp()
        list(self.windows())

    @cached_property
    def chosen(self) -> Sampler:
        return find_sampler(default_sampler(self.acts_as) if self.sampler == "auto" else self.sampler)

    def _refuse(self, head: Head) -> None:
        """Raise TypeError where the sampler cannot serve a head. Over a finite chain one serves: the exact step."""
        try:
            return self.chosen.check_supported(head)
        except TypeError as error:
            refusal = error
        if isinstance(head.process, Chain):
            needs_posterior(self.chosen, head)
            raise TypeError(
                f"sampler {self.chosen.name!r} does not draw from a finite chain, {head.process}: use sampler='bayes'"
            ) from refusal
        raise refusal

    @property
    def logits_processor(self) -> LogitsProcessor:
        guide = self.guide if self.head.has_posterior or self.guide == "step" else "rates"
        on = "posterior" if isinstance(self.head, NextToken) else self.on  # which has not seen the site: both are the same law
        return LogitsProcessor(self.temperature, self.top_k, self.top_p, on, self.guidance, guide)

    @cached_property
    def acts_as(self) -> Head:
        """What the head is to a sampler: guidance on rates makes an unconstrained score of any."""
        return LogScore(self.head.process) if self.guidance != 1 and self.logits_processor.guide == "rates" else self.head

    def windows(self) -> Iterator[slice]:
        """The whole, or windows that share `overlap` tokens with the one before."""
        length = self.shape[1]
        if self.window is None:
            if self.overlap is not None:
                raise ValueError("overlap is for sequences longer than a window: give window too")
            yield slice(0, length)
            return
        validation.positive_int("window", self.window, low=2)
        overlap = self.window // 2 if self.overlap is None else self.overlap
        if isinstance(overlap, bool) or not isinstance(overlap, int) or not 0 <= overlap < self.window:
            raise ValueError(f"overlap is {overlap!r}, but it must lie in 0..{self.window - 1}, below the window")
        begin = 0
        while begin == 0 or begin + overlap < length:
            yield slice(begin, min(begin + self.window, length))
            begin += self.window - overlap

    def _checked_shape(self) -> tuple[int, int]:
        if not isinstance(self.shape, tuple | list | torch.Size) or len(self.shape) != 2:
            raise ValueError(f"shape is {self.shape!r}, but it must be (number of samples, length)")
        for name, value in zip(("shape[0]", "shape[1]"), self.shape, strict=True):
            validation.positive_int(name, value)
        return self.shape

    def _check_shaping(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}, but it must be positive; for the likeliest token use top_k=1")
        if self.top_k is not None:
            validation.positive_int("top_k", self.top_k)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but it must lie in (0, 1]")
        for name, known in (("on", ("posterior", "leave_one_out")), ("guide", ("posterior", "rates", "step"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(map(repr, known))}")
        if isinstance(self.guidance, bool) or not isinstance(self.guidance, int | float) or not math.isfinite(self.guidance):
            raise ValueError(f"guidance is {self.guidance!r}, but it must be a finite number")
        if self.guidance != 1 and self.condition is None:
            raise ValueError(f"guidance is {self.guidance}, but there is no condition to exaggerate")
        if self.acts_as is not self.head:
            try:
                self._refuse(self.acts_as)
            except TypeError as error:
                raise TypeError(f"guidance on rates makes an unconstrained score of every head: {error}") from None
        if self.guidance != 1 and self.guide == "step" and not isinstance(self.chosen, StepSampler):
            raise TypeError(
                f"guide='step' combines the distributions of one step, which sampler {self.chosen.name!r} does not state: use "
                "sampler='bayes' or 'ancestral', for an unconstrained score 'analytic'; or guide='posterior' or 'rates'"
            )
        if self.logits_processor.sharpens and self.guidance != 1 and self.guide == "step":
            raise TypeError("temperature, top_k and top_p sharpen a posterior, and guide='step' combines steps: leave them out")
        if self.logits_processor.sharpens and (not self.head.has_posterior or self.logits_processor.guide == "rates"):
            raise TypeError(
                "temperature, top_k and top_p sharpen a posterior, and an unconstrained score (or guidance on rates) has none: "
                "use m2s.Projected(head)"
            )

    def _check_clamp(self) -> None:
        if self.clamp is None:
            return
        if not isinstance(self.clamp, Tensor) or self.clamp.dtype.is_floating_point or self.clamp.dtype == torch.bool:
            raise TypeError("clamp must be a torch.Tensor of integers: tokens, and -1 where the site is free")
        if self.clamp.shape != tuple(self.shape):
            raise ValueError(f"clamp has shape {list(self.clamp.shape)}, but the samples have shape {list(self.shape)}")
        vocab = self.head.process.vocab
        bad = (self.clamp.long() < -1) | (self.clamp.long() >= vocab)
        if bad.any():
            at = validation.first_index(bad)
            raise ValueError(
                f"clamp{list(at)} is {int(self.clamp[at])}, but it must be a token in 0..{vocab - 1}, or -1 for a free site"
            )
