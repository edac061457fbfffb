"""Simulation of the reverse process by a `Sampler`: network, prediction, next state. It knows no sampler by name."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.heads import Head
from m2s.heads.output import hide_padding
from m2s.ops.categorical import draw_categorical
from m2s.ops.counter_noise import CounterNoise
from m2s.progress import bar_class
from m2s.samplers.base import Move, Plan, Sampler
from m2s.samplers.micro_batch import MicroBatch, SamplingRun, call_network, check_outputs, predict, report_step
from m2s.samplers.prediction import Prediction

AFTER_LAST_STEP = 0xFFFFFFF0  # the step number of the noise for masks that are drawn after the last step


@dataclass
class _Reverse:
    """A micro-batch with the times of its steps."""

    batch: MicroBatch
    plan: Plan
    reaches_zero: list[tuple[bool, bool]]
    """For each step, whether it leads to s = 0 for some sample, and for all. On the host, so that no step waits for the GPU."""


def simulate_reverse_process(run: SamplingRun, batches: list[MicroBatch], progress: bool) -> None:
    """Draw the free sites of some micro-batches by the chosen sampler.

    All micro-batches take step 0, then all take step 1, and so on.

    Args:
        run: The call of `m2s.sample`.
        batches: Micro-batches; their state `x` is clean tokens afterwards.
        progress: Show a progress bar.
    """
    started = [_start(run, batch) for batch in batches]
    most = max(len(each.plan.t) for each in started)
    work = [(number, each) for number in range(most + 1) for each in started if number <= len(each.plan.t)]
    for number, each in bar_class()(work, desc="sampling", unit="step", disable=not progress):
        if number < len(each.plan.t):
            _step(run, each, number)
        else:
            _draw_remaining_masks(run, each.batch)


def _start(run: SamplingRun, batch: MicroBatch) -> _Reverse:
    """Draw x_1 from the reference distribution, which is all masks where the mask is absorbing, and make the plan."""
    options = run.options
    noise = batch.noise(options.seed, 0)
    u = noise("start")
    batch.set_free(draw_categorical(options.head.process.reference().to(u), u))
    head = options.effective_head
    plan = make_plan(_sampler(run), options.steps, options.grid, batch.free.sum(-1), head, noise, options.t_min)
    last = plan.s <= 0
    reaches_zero = list(zip(last.any(-1).tolist(), last.all(-1).tolist(), strict=True))
    return _Reverse(batch, plan, reaches_zero)


def _step(run: SamplingRun, each: _Reverse, number: int) -> None:
    """Take one step of the plan."""
    batch, plan, sampler, head = each.batch, each.plan, _sampler(run), run.options.head
    move = Move(plan.t[number], plan.s[number], None if plan.reveal is None else plan.reveal[number])
    noise = batch.noise(run.options.seed, number + 1)
    call = "first" if number == 0 else "last" if number == len(plan.t) - 1 else ""
    prediction = _call_and_predict(run, batch, move.t, sampler.excludes_t_one or head.excludes_t_one, call)
    x_s = take_step(sampler, prediction, move, noise, each.reaches_zero[number])
    x_t = batch.x
    batch.set_free(x_s)
    report_step(run, batch, number, len(plan.t), move, x_t, prediction)


def take_step(
    sampler: Sampler, prediction: Prediction, move: Move, noise: CounterNoise, reaches_zero: tuple[bool, bool]
) -> Int[Tensor, "M L"]:
    """Return the state at the end of a step: that of `last_step` where it leads to s = 0, otherwise that of `step`.

    Args:
        sampler: The sampler.
        prediction: The prediction at time t.
        move: The times of the step.
        noise: The uniforms of the step.
        reaches_zero: Whether s = 0 for some samples, and for all.

    Returns:
        Tokens, [M, L].

    Raises:
        UserError: The sampler returned another shape.
    """
    some, every = reaches_zero
    x_s = last = sampler.last_step(prediction, noise) if some else prediction.x_t
    if not every:
        x_s = sampler.step(prediction, move, noise)
    for state in (x_s, last):
        validation.same_shape(f"the state that sampler {sampler.name!r} returned", state, "x_t", prediction.x_t)
    # Samplers with random times reach s = 0 at different steps.
    return torch.where((move.s <= 0).unsqueeze(-1), last, x_s) if some and not every else x_s


def make_plan(
    sampler: Sampler, steps: int, grid: str, free: Int[Tensor, "M"], head: Head, noise: CounterNoise, t_min: float
) -> Plan:
    """Return the plan of a sampler, whose last step is inside the times that a network of scores sees.

    Args:
        sampler: The sampler.
        steps: The number of steps.
        grid: A name in `GRIDS`.
        free: The number of free sites of each sample, [M].
        head: The head as samplers see it.
        noise: The uniforms of step 0.
        t_min: The network sees times in [t_min, 1 - t_min].

    Returns:
        The plan.
    """
    plan = sampler.plan(steps, grid, free, head, noise)
    if head.predicts_score:
        # The last step inverts the noise of the score, so both must be of one time: the one that the network sees.
        plan = plan._replace(t=torch.where(plan.s <= 0, plan.t.clamp(min=t_min), plan.t))
    return plan


def _draw_remaining_masks(run: SamplingRun, batch: MicroBatch) -> None:
    """Draw masks that are left after the last step from the prediction at t_min, and count them."""
    options = run.options
    mask = options.head.process.mask
    if mask is None:
        return
    left = (batch.x == mask) & batch.free
    if run.log is not None:
        run.log.masks_left += int(left[batch.requested].sum())
    if not bool(left.any()):
        return
    t = torch.full((len(batch.x),), options.t_min, dtype=torch.float64, device=run.device)
    prediction = _call_and_predict(run, batch, t, excludes_t_one=False, call="last")
    u = batch.noise(options.seed, AFTER_LAST_STEP)("last")
    (token,) = prediction.map(lambda part, u: (draw_categorical(part.last_step(), u),), u)
    batch.x = torch.where(left, token, batch.x)


def _call_and_predict(
    run: SamplingRun, batch: MicroBatch, t: Float[Tensor, "M"], excludes_t_one: bool, call: str = ""
) -> Prediction:
    """Call the network at the current state, with guidance also without the condition. Check a "first" or "last" call."""
    options = run.options
    head, time = options.head, run.network_time(t)
    seen = hide_padding(run.model, head.network_input(batch.x), batch.padded)
    outputs = [call_network(run.model, head.process, seen, time, condition) for condition in batch.conditions(options.guidance)]
    if call:
        check_outputs(run, batch, outputs, batch.free, call)
    return predict(run, batch, outputs, t, excludes_t_one)


def _sampler(run: SamplingRun) -> Sampler:
    """The chosen sampler, which `SamplingOptions` has checked to be one of the reverse process."""
    assert isinstance(run.options.sampler_object, Sampler)
    return run.options.sampler_object
