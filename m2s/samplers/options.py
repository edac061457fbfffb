"""The options of `m2s.sample`, checked when they are built and not again after that."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from m2s import validation
from m2s.errors import UserError, UserTypeError
from m2s.heads import Head, LogScore
from m2s.realizability import Projected
from m2s.rng import draw_seed
from m2s.samplers.base import NamedSampler, StepSampler
from m2s.samplers.capabilities import default_sampler
from m2s.samplers.grid import GRIDS
from m2s.samplers.logits_processor import LogitsProcessor
from m2s.samplers.registry import find_sampler

LEAST_ROWS, MOST_ROWS = 16, 1024
POSITIONS = 8192  # of one call of the network, where the number of rows is chosen


def default_micro_batch(length: int) -> int:
    """Return the rows of a call of the network where no number is given.

    It is the greatest power of two that is at most 8192 / length, between 16 and 1,024. It depends on the length alone: neither
    the number of samples nor the device may change a sample.

    Args:
        length: The number of positions of a call.

    Returns:
        The number of rows.

    Example:
        >>> [m2s.samplers.default_micro_batch(length) for length in (2, 64, 100, 784)]
        [1024, 128, 64, 16]
    """
    rows = max(1, POSITIONS // length)
    return min(MOST_ROWS, max(LEAST_ROWS, 1 << (rows.bit_length() - 1)))


@dataclass(frozen=True)
class SamplingOptions:
    """The arguments of `m2s.sample` on which samples depend, except the network.

    Build it once and pass it to `m2s.samplers.sample_with_options`. Building it raises an error for every combination that is
    not supported, before the network is called.

    Args:
        head: What the network's output means.
        shape: (n, L), the number of samples and their length.
        steps: Calls of the network for each sample.
        sampler: A name, an object, or "auto".
        grid: "cosine" or "linear".
        seed: Of all randomness. By default it is drawn from torch's global generator when the options are built.
        clamp: Tokens that stay as they are, [n, L]; -1 at sites to be drawn.
        condition: A condition for each sample, [n, ...].
        guidance: Strength of classifier-free guidance.
        guide: What guidance combines.
        temperature: Sharpens the posterior.
        top_p: Keep the smallest set of tokens with this probability.
        top_k: Keep the `top_k` most likely tokens.
        on: The distribution to which temperature, top-k and top-p apply.
        batch_size: Samples that take a step together.
        start: The number of the first sample.
        micro_batch: Rows of every call of the network; None: `default_micro_batch` of the length of a call.
        window: The length that the network was trained on, where L is greater.
        overlap: Tokens that a window shares with the one before.
        t_min: The network sees times in [t_min, 1 - t_min] only.
        lengths: The length of each sample, [n]; the rest of it is padding.

    Raises:
        TypeError: The sampler does not support the head.
        UserTypeError: An argument has the wrong type, or cannot be combined with another.
        UserError: An argument is out of range.
    """

    head: Head
    shape: tuple[int, int]
    steps: int = 128
    sampler: str | NamedSampler = "auto"
    grid: str = "cosine"
    seed: int = field(default_factory=draw_seed)
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
    micro_batch: int | None = None
    window: int | None = None
    overlap: int | None = None
    t_min: float = 1e-3
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.guidance, bool) or not validation.is_number(self.guidance):
            raise UserError(option="guidance", value=self.guidance, expected="a finite number")
        if not validation.is_number(self.temperature) or not self.temperature > 0:
            hint = "for the most likely token use top_k 1"
            raise UserError(option="temperature", value=self.temperature, expected="positive", hint=hint)
        self._check_head()
        self._check_numbers()
        self._check_condition()
        self._check_sharpening()
        self._check_guidance()
        self._check_clamp()
        self._check_lengths()
        list(self.windows())  # raises where window or overlap is invalid

    @cached_property
    def call_rows(self) -> int:
        """The rows of every call of the network: `micro_batch`, or the default for the length of a window."""
        return self.micro_batch or default_micro_batch(min(self.shape[1], self.window or self.shape[1]))

    @cached_property
    def sampler_object(self) -> NamedSampler:
        """The sampler object."""
        return find_sampler(default_sampler(self.effective_head) if self.sampler == "auto" else self.sampler)

    @cached_property
    def logits_processor(self) -> LogitsProcessor:
        """Sharpening and guidance, with the defaults of the head filled in."""
        guide = self.guide if self.head.has_posterior or self.guide == "step" else "rates"
        # A next-token head has not seen the site, so that posterior and leave-one-out distribution are the same.
        on = "posterior" if self.head.generates_left_to_right else self.on
        # float: torch converts an int to int64, which 10**20 does not fit.
        return LogitsProcessor(float(self.temperature), self.top_k, self.top_p, on, float(self.guidance), guide)

    @cached_property
    def effective_head(self) -> Head:
        """The head as samplers see it: guidance of rates makes an unconstrained score of every head."""
        guides_rates = self.guidance != 1 and self.logits_processor.guide == "rates"
        return LogScore(self.head.process) if guides_rates else self.head

    def windows(self) -> Iterator[slice]:
        """Yield the sites of each window: all sites, or windows that overlap the previous one by `overlap` sites.

        Raises:
            UserError: `overlap` is out of range, or given without a window.
        """
        length = self.shape[1]
        if self.window is None:
            if self.overlap is not None:
                raise UserError(option="overlap", value=self.overlap, reason="there is no window", hint="give window too")
            yield slice(0, length)
            return
        validation.positive_int("window", self.window, low=2)
        overlap = self.window // 2 if self.overlap is None else self.overlap
        if isinstance(overlap, bool) or not isinstance(overlap, int) or not 0 <= overlap < self.window:
            raise UserError(option="overlap", value=overlap, expected=f"an int in 0..{self.window - 1}, below the window")
        begin = 0
        while begin == 0 or begin + overlap < length:
            yield slice(begin, min(begin + self.window, length))
            begin += self.window - overlap

    def _check_head(self) -> None:
        """The sampler supports the head."""
        validation.instance("head", self.head, Head, "a head such as m2s.Posterior(process)")
        if isinstance(self.head, Projected) and self.head.process.chain is not None:
            raise TypeError("m2s.Projected needs rates, and a finite chain has none: use m2s.Posterior")
        self.sampler_object.check_supported(self.head)

    def _check_numbers(self) -> None:
        """Everything that is one number, or a name."""
        if not isinstance(self.shape, tuple | list | torch.Size) or len(self.shape) != 2:
            raise UserError(option="shape", value=self.shape, expected="(number of samples, length)")
        for name, value in zip(("shape[0]", "shape[1]"), self.shape, strict=True):
            validation.positive_int(name, value)
        validation.positive_int("steps", self.steps)
        validation.positive_int("start", self.start, low=0)
        if self.micro_batch is not None:
            validation.positive_int("micro_batch", self.micro_batch)
        if self.batch_size is not None:
            validation.positive_int("batch_size", self.batch_size)
        validation.instance("grid", self.grid, str, "the name of a time grid")
        GRIDS.find(self.grid, "grid")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise UserError(option="seed", value=self.seed, expected="an int in [0, 2^64)")
        if self.start + self.shape[0] > 1 << 32:
            reason = f"start + n is {self.start + self.shape[0]}, and samples are numbered below 2^32"
            raise UserError(option="start", value=self.start, reason=reason)
        validation.in_interval("t_min", self.t_min, "(0, 0.5)")

    def _check_condition(self) -> None:
        """There is one condition for each sample."""
        if self.condition is None:
            return
        if not isinstance(self.condition, Tensor) or self.condition.ndim == 0:
            expected = f"a torch.Tensor with a row for each sample, not {self.condition!r}"
            raise UserTypeError(option="condition", expected=expected)
        if len(self.condition) != self.shape[0]:
            message = f"condition has {len(self.condition)} rows, but {self.shape[0]} samples were asked for"
            raise UserError(message, option="condition")

    def _check_sharpening(self) -> None:
        """Top-k and top-p are valid."""
        if self.top_k is not None:
            validation.positive_int("top_k", self.top_k)
        validation.in_interval("top_p", self.top_p, "(0, 1]")
        validation.choice("on", self.on, ("posterior", "leave_one_out"))

    def _check_guidance(self) -> None:
        """Guidance is valid, and the sampler and the sharpening can be combined with it."""
        validation.choice("guide", self.guide, ("posterior", "rates", "step"))
        if self.guidance != 1 and self.condition is None:
            raise UserError(option="guidance", value=self.guidance, reason="there is no condition", hint="give condition too")
        if self.effective_head is not self.head:
            try:
                self.sampler_object.check_supported(self.effective_head)
            except TypeError as error:
                raise TypeError(f"guidance on rates makes an unconstrained score of every head: {error}") from None
        guides_step = self.guidance != 1 and self.guide == "step"
        if guides_step and not isinstance(self.sampler_object, StepSampler):
            raise UserTypeError(
                option="guide",
                value=self.guide,
                reason=f"sampler {self.sampler_object.name!r} does not compute distributions of one step to combine",
                hint="use sampler 'bayes' or 'ancestral', or 'analytic' for an unconstrained score; or another guide",
            )
        if not self.logits_processor.sharpens:
            return
        if guides_step:
            reason = "temperature, top_k and top_p sharpen a posterior, and this combines steps"
            raise UserTypeError(option="guide", value=self.guide, reason=reason, hint="leave them out")
        if not self.head.has_posterior or self.logits_processor.guide == "rates":
            defaults = {"temperature": 1, "top_k": None, "top_p": 1}
            option = next(name for name, default in defaults.items() if getattr(self, name) != default)
            raise UserTypeError(
                option=option,
                value=getattr(self, option),
                reason="it sharpens a posterior, and an unconstrained score (or guidance on rates) has none",
                hint="use m2s.Projected(head)",
            )

    def _check_lengths(self) -> None:
        """There is one length for each sample, and samples are neither filled in windows nor from left to right."""
        if self.lengths is None:
            return
        given, (n, length) = self.lengths, self.shape
        if not isinstance(given, Tensor) or given.dtype.is_floating_point or given.shape != (n,):
            raise UserTypeError(option="lengths", expected=f"a torch.Tensor of {n} integers, one for each sample")
        if bool(((given < 1) | (given > length)).any()):
            raise UserError(option="lengths", value=given.tolist()[:8], expected=f"between 1 and {length}, the length in shape")
        if self.window is not None:
            raise UserError(option="lengths", reason="windows have one length", hint="leave out window")
        if self.head.generates_left_to_right:
            reason = "a next-token model does not see what follows"
            raise UserError(option="lengths", reason=reason, hint="leave it out, and cut the samples")

    def _check_clamp(self) -> None:
        """Clamped tokens are clean tokens, and the shape is that of the samples."""
        if self.clamp is None:
            return
        if not isinstance(self.clamp, Tensor) or self.clamp.dtype.is_floating_point or self.clamp.dtype == torch.bool:
            raise UserTypeError(option="clamp", expected="a torch.Tensor of integers: tokens, and -1 at sites to be drawn")
        if self.clamp.shape != tuple(self.shape):
            message = f"clamp has shape {list(self.clamp.shape)}, but the samples have shape {list(self.shape)}"
            raise UserError(message, option="clamp")
        vocab = self.head.process.vocab
        bad = (self.clamp.long() < -1) | (self.clamp.long() >= vocab)
        if bad.any():
            at = validation.first_index(bad)
            expected = f"a token in 0..{vocab - 1}, or -1 to be drawn"
            raise UserError(f"clamp{list(at)} is {int(self.clamp[at])}, but it must be {expected}", option="clamp")
