"""What a sampler is: a rule for one step of the reverse process, from the prediction at time t to the state at time s <= t."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.heads import Head
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.registry import Registry
from m2s.samplers.capabilities import Need, Preserves, check_need
from m2s.samplers.grid import GRIDS, chain_grid
from m2s.samplers.logits_processor import guided_step
from m2s.samplers.prediction import Prediction


class Plan(NamedTuple):
    """The times of all network calls of a run: one row for each call, one column for each sample.

    Args:
        t: Times at which the network is called, [M, B].
        s: Times to which the steps lead, [M, B].
        reveal: How many sites each step fills, [M, B], for samplers that count them; otherwise None.
    """

    t: Float[Tensor, "M B"]
    s: Float[Tensor, "M B"]
    reveal: Int[Tensor, "M B"] | None = None


class Move(NamedTuple):
    """One row of a plan: one step.

    Args:
        t: Time at the start of the step, [B]. `Prediction.t` is the same, or 1 - t_min at t = 1 where `Sampler.excludes_t_one`.
        s: Time at its end, [B].
        reveal: How many sites to fill, [B], for samplers that count them; otherwise None.
    """

    t: Float[Tensor, "B"]
    s: Float[Tensor, "B"]
    reveal: Int[Tensor, "B"] | None = None


@dataclass(frozen=True)
class NamedSampler(ABC):
    """An entry of `SAMPLERS`, which `m2s.sample(sampler=...)` accepts by name or as an object.

    Its options are the fields of the dataclass. `Sampler` is the base class for samplers of the reverse process.

    Attributes:
        name: The name in `SAMPLERS`. By default the name of the class in lower case with underscores.
        needs: Capabilities that a head must have.
        preserves_marginal: For which sequences a step from t to s turns p_t into p_s, given an exact prediction. None: not
            declared, or there is no p_t.
    """

    name: ClassVar[str]
    has_default_name: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = ()
    preserves_marginal: ClassVar[Preserves | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Name a class that has no name of its own and inherits none that was given."""
        super().__init_subclass__(**options)
        if "name" in cls.__dict__:
            cls.has_default_name = False
        elif cls.has_default_name:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def check_supported(self, head: Head) -> None:
        """Check that this sampler can draw from a head.

        Args:
            head: The head.

        Raises:
            TypeError: The head, or its process, does not have one of the capabilities in `needs`.
        """
        for need in self.needs:
            check_need(self.name, need, head)


SAMPLERS: Registry[type[NamedSampler]] = Registry("sampler")


@dataclass(frozen=True)
class Sampler(NamedSampler):
    """A sampler of the reverse process. A subclass implements `step`, and needs nothing else.

    Example:
        >>> class Redraw(m2s.samplers.Sampler):
        ...     def step(self, prediction, move, noise):
        ...         x_0 = prediction.draw_token(noise("token")).token
        ...         return torch.where(noise("route") < (move.s / move.t)[:, None], prediction.x_t, x_0)
        >>> x = m2s.sample(model, head, (4, 64), sampler=Redraw())

    Give it to `m2s.sample` as an object. With options, make it a dataclass; `SAMPLERS.add` gives it to the commands.

    Attributes:
        excludes_t_one: Whether rates or scores at t = 1 are infinite, so that the first step uses those at 1 - t_min.
    """

    excludes_t_one: ClassVar[bool] = False

    @abstractmethod
    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Int[Tensor, "B L"]:
        """Take one step. The loop calls `last_step` instead where the plan has s = 0.

        Args:
            prediction: The network's prediction at time t.
            move: The times t and s <= t of the step.
            noise: Uniforms of this step, by purpose: `noise("token")` is [B, L].

        Returns:
            The state at time s, [B, L]. Clamped sites may have any value: the loop restores them.
        """

    def last_step(self, prediction: Prediction, noise: CounterNoise) -> Int[Tensor, "B L"]:
        """Return clean tokens: a draw that removes all noise, also that of t = 0 where a schedule has sigma(0) > 0.

        The loop calls it in place of `step` where the plan has s = 0. It draws from the posterior; for an unconstrained score
        from the positive part of SEDD's denoiser (`denoising_weights`).

        Args:
            prediction: The prediction at the last time t > 0 of the plan.
            noise: The uniforms of this step; the draw takes "token".

        Returns:
            Clean tokens, [B, L].
        """
        if prediction.needs_one_draw:
            return prediction.draw_token(noise("token")).token
        if prediction.fuses_analytic_step and prediction.process.mask is None:
            token, negative = prediction.analytic_step(torch.zeros_like(prediction.t), noise("token"))
        else:
            token, negative = prediction.map(_denoise, noise("token"))
        prediction.notes["negative_mass"] = negative
        return token

    def plan(self, steps: int, grid: str, free: Int[Tensor, "B"], head: Head, noise: CounterNoise) -> Plan:
        """Return the times of all network calls.

        Args:
            steps: The requested number of steps. For a finite chain, the plan has at most the number of its steps.
            grid: A name in `GRIDS`.
            free: The number of sites of each sample that are not clamped, [B].
            head: The head.
            noise: The uniforms of step 0, for samplers with random times.

        Returns:
            The plan. Times are float64.
        """
        times = GRIDS[grid](steps)
        chain = head.process.chain
        if chain is not None:
            times = chain_grid(times, chain.steps)
        ends = torch.tensor(times, dtype=torch.float64, device=free.device)
        ends = ends.unsqueeze(-1).expand(-1, len(free))
        return Plan(ends[:-1], ends[1:])

    def check_supported(self, head: Head) -> None:
        """Check that this sampler can draw from a head.

        Args:
            head: The head.

        Raises:
            TypeError: There is no reverse process, or one of the capabilities in `needs` is missing.
        """
        check_need(self.name, Need.TRANSITIONS, head)
        super().check_supported(head)


@dataclass(frozen=True)
class StepSampler(Sampler):
    """A sampler whose step draws every site from a distribution of the next token. Guidance can combine such distributions."""

    @abstractmethod
    def unguided_weights(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return weights of the next token at every site, [*site, S], without guidance of steps; negative ones count as 0.

        Args:
            part: The prediction at time t, at all or some sites [*site].
            s: Time at the end of the step, at most t: [B], or [*site] where `part` holds single sites.
        """

    def weights(self, part: Prediction, s: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return weights of the next token at every site, [*site, S].

        Where guidance combines steps they are p_c^g p_u^(1-g) of the positive parts (D-CFG of UDLM).

        Args:
            part: The prediction at time t, at all or some sites [*site].
            s: Time at the end of the step, as in `unguided_weights`.
        """
        if not part.guides_step:
            return self.unguided_weights(part, s)
        conditional, unconditional = (self.unguided_weights(each, s).clamp(min=0) for each in part.split_guidance())
        return guided_step(conditional, unconditional, part.logits_processor.guidance)

    def draw(self, prediction: Prediction, s: Float[Tensor, "B"], noise: CounterNoise) -> Int[Tensor, "B L"]:
        """Draw every site from its weights.

        Args:
            prediction: The prediction at time t.
            s: Time at the end of the step, at most t.
            noise: The uniforms of this step; the draw takes "token".

        Returns:
            The state at time s, [B, L].
        """

        def token(part: Prediction, s: Tensor, u: Tensor) -> tuple[Tensor]:
            return (draw_categorical(self.weights(part, s).clamp(min=0), u),)

        return prediction.map(token, s, noise("token"))[0]


def _denoise(part: Prediction, u: Tensor) -> tuple[Tensor, Tensor]:
    """A clean token for each site, and the negative mass of the weights it was drawn from."""
    weights = part.denoising_weights()
    negative = -weights.clamp(max=0).sum(-1, dtype=part.t.dtype)
    positive = weights.clamp(min=0)
    nothing = positive.sum(-1, keepdim=True) == 0
    if bool(nothing.any()):
        positive = torch.where(nothing, part.last_step().to(positive.dtype), positive)
    return draw_categorical(positive, u), negative
