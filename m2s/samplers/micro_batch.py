"""Micro-batches: the fixed groups of samples that the network sees together.

Sample i is always row i mod M of a micro-batch of M rows, and every call of the network has M rows. So neither the choice of a
matrix kernel nor the order of a sum can depend on which other samples are drawn: sample i is the same bit for bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from m2s import validation
from m2s.errors import UserError
from m2s.heads.output import call_model
from m2s.ops.counter_noise import CounterNoise
from m2s.ops.last_layer import Output, Unprojected
from m2s.process import Process
from m2s.samplers.base import Move
from m2s.samplers.diagnostics import Diagnostics
from m2s.samplers.events import StepEvent
from m2s.samplers.options import SamplingOptions
from m2s.samplers.prediction import Prediction


@dataclass(frozen=True)
class SamplingRun:
    """What is the same for all micro-batches of a call of `m2s.sample`.

    Args:
        model: The network.
        options: The validated options.
        callback: Called after every step of every micro-batch, or None.
        log: Where to count what happens, or None.
        device: Where the network is called.
        time_dtype: The dtype of the times that the network is given.
    """

    model: Callable[..., Output]
    options: SamplingOptions
    callback: Callable[[StepEvent], None] | None
    log: Diagnostics | None
    device: torch.device
    time_dtype: torch.dtype = torch.float32

    def network_time(self, t: Tensor) -> Tensor:
        """Return the time that the network sees: inside [t_min, 1 - t_min], where it was trained.

        Args:
            t: Time, [M].

        Returns:
            Times, [M].
        """
        return t.clamp(self.options.t_min, 1 - self.options.t_min).to(self.time_dtype)


@dataclass(frozen=True)
class Window:
    """The part of some samples that is filled next.

    Args:
        samples: The consecutive numbers of the samples, [b].
        clamp: Tokens that are given, -1 at sites to be filled, [b, W].
        condition: The condition of each sample, [b, ...], or None.
        number: The number of the window, from 0; windows have different noise.
        sites: Which sites of the sequence these are.
        padded: True at padding, [b, W]; None: there is none.
    """

    samples: Int[Tensor, "b"]
    clamp: Int[Tensor, "b W"]
    condition: Tensor | None
    number: int
    sites: slice
    padded: Bool[Tensor, "b W"] | None = None


class MicroBatch:
    """M rows that the network sees together, and their current state.

    Args:
        samples: The number of the sample of each row, [M].
        requested: The rows that hold requested samples. The others are computed and dropped.
        clamp: Tokens that are given, -1 at free sites, [M, W].
        condition: The condition of each row, [M, ...], or None.
        window: The window that is being filled.
        padded: True at padding, [M, W]; None: there is none.

    Attributes:
        x: The current tokens, [M, W].
        free: True at the sites to be filled, [M, W].
    """

    x: Int[Tensor, "M W"]

    def __init__(
        self,
        samples: Int[Tensor, "M"],
        requested: slice,
        clamp: Int[Tensor, "M W"],
        condition: Tensor | None,
        window: Window,
        padded: Bool[Tensor, "M W"] | None = None,
    ) -> None:
        self.padded = padded
        self.samples, self.requested, self.clamp, self.condition, self.window = samples, requested, clamp, condition, window
        self.free: Bool[Tensor, "M W"] = clamp < 0

    def noise(self, seed: int, step: int) -> CounterNoise:
        """Return the uniforms of a step of these samples.

        Args:
            seed: Seed of the run.
            step: Number of the step.
        """
        return CounterNoise(seed, self.samples, self.clamp.shape[1], step, self.window.number)

    def conditions(self, guidance: float) -> list[Tensor | None]:
        """Return the conditions with which the network is called: one, and with guidance also none.

        Args:
            guidance: The guidance weight; 1: no guidance.
        """
        return [self.condition] if guidance == 1 else [self.condition, None]

    def set_free(self, tokens: Int[Tensor, "M W"]) -> None:
        """Write new tokens to the free sites.

        Args:
            tokens: New tokens of all sites, [M, W]. Those of clamped sites are ignored.
        """
        self.x = torch.where(self.free, tokens, self.clamp)


def micro_batches(window: Window, size: int, device: torch.device) -> Iterator[MicroBatch]:
    """Split the samples of a window into micro-batches. Rows without a sample are padded with clamped zeros.

    Args:
        window: The samples and their clamp and condition.
        size: M, the rows of a micro-batch.
        device: Where its tensors are put.

    Yields:
        Micro-batches, without a state.
    """
    low, high = int(window.samples[0]), int(window.samples[-1]) + 1
    for first in range(low - low % size, high, size):
        begin, end = max(low, first), min(high, first + size)
        requested, rows = slice(begin - first, end - first), slice(begin - low, end - low)
        clamp = window.clamp.new_zeros(size, window.clamp.shape[1])
        clamp[requested] = window.clamp[rows]
        condition = None
        if window.condition is not None:
            condition = window.condition.new_zeros(size, *window.condition.shape[1:])
            condition[requested] = window.condition[rows]
            condition = condition.to(device)
        padded = None
        if window.padded is not None:
            padded = window.padded.new_zeros(clamp.shape)
            padded[requested] = window.padded[rows]
            padded = padded.to(device)
        samples = torch.arange(first, first + size, device=device)
        yield MicroBatch(samples, requested, clamp.to(device), condition, window, padded)


def predict(run: SamplingRun, batch: MicroBatch, outputs: list[Output], t: Tensor, excludes_t_one: bool = False) -> Prediction:
    """Return the prediction of a micro-batch from the outputs of its calls.

    Args:
        run: The call of `m2s.sample`.
        batch: The micro-batch.
        outputs: The output with the condition and, with guidance, the one without.
        t: Time, [M].
        excludes_t_one: Use the prediction at t = 1 as one at 1 - t_min.

    Returns:
        The prediction at all sites of the window, [M, W].
    """
    unconditional = outputs[1] if len(outputs) > 1 else None
    time = t.clamp(max=1 - run.options.t_min) if excludes_t_one else t
    return Prediction(run.options.head, outputs[0], batch.x, time, run.options.logits_processor, unconditional, batch.free)


def time_dtype(model: object) -> torch.dtype:
    """Return the dtype of the times that a network is given. For a network with parameters, torch's default does not matter.

    Args:
        model: The network.

    Returns:
        float64 for a module all of whose floating-point parameters are float64, and float32 for other modules with
        parameters. A function computes in a dtype that is not known, so it is given torch's default dtype.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    kinds = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    if not kinds:
        return torch.get_default_dtype()
    return torch.float64 if kinds == {torch.float64} else torch.float32


def call_network(
    model: Callable[..., Output], process: Process, x_t: Tensor, t: Tensor, condition: Tensor | None, **cached: Tensor
) -> Output:
    """Call the network and check the shape of its output before it is reshaped.

    Args:
        model: The network.
        process: The process, for the number of states.
        x_t: Tokens, [M, W].
        t: Times, [M].
        condition: Conditions, [M, ...], or None.
        cached: `cache` and `at` of a network with a key-value cache.

    Returns:
        Logits, [M, W, >= S], or `m2s.Unprojected`.

    Raises:
        ValueError: The output has another shape, or holds NaN inside `m2s.checked()`.
        TypeError: The output is not a float tensor.
    """
    output, states = call_model(model, process, x_t, t, condition, **cached), process.states
    if isinstance(output, Unprojected):
        rows = output.weight.shape[0]
        output.wide_enough(states)
        if output.hidden.shape[:-1] != x_t.shape:
            raise ValueError(
                f"the network's output has shape {[*output.hidden.shape[:-1], rows]} (its last layer has {rows} rows), "
                f"expected {[*x_t.shape, states]} or more columns"
            )
        validation.not_nan("the network's output", output.hidden)
    else:
        validation.probabilities("the network's output", output, x_t, states, wider=True)
    return output


def check_outputs(run: SamplingRun, batch: MicroBatch, outputs: list[Output], sites: Bool[Tensor, "M W"], call: str) -> None:
    """Check that the network's output is finite where tokens are drawn from it.

    Reading the values waits for a GPU. So this is done for the first and the last call of each micro-batch only: weights that
    diverged give NaN in every call. A logit of minus infinity is valid, because it rules a token out.

    Args:
        run: The call of `m2s.sample`.
        batch: The micro-batch.
        outputs: The outputs of its calls.
        sites: The sites to check, [M, W].
        call: Which call it is, for the message: "first" or "last".

    Raises:
        UserError: A site has NaN or plus infinity, or a posterior has no token that is not ruled out.
    """
    states = run.options.head.process.states
    for output in outputs:
        # The maximum is NaN where an entry is. Columns past `states` have no meaning.
        rows = output.hidden.abs().amax(-1) if isinstance(output, Unprojected) else output[..., :states].amax(-1)
        bad = rows.isnan() | rows.isposinf()
        if run.options.head.has_posterior:
            bad |= rows.isneginf()
        bad = (bad & sites)[batch.requested]
        if bool(bad.any()):
            index = validation.first_index(bad)
            sample, site = int(batch.samples[batch.requested][index[0]]), index[1] + (batch.window.sites.start or 0)
            value = float(rows[batch.requested][index])
            raise UserError(
                f"the network's output at sample {sample}, site {site} in the {call} call is {value:g}, so nothing can be "
                "drawn from it: its weights diverged in training, or its precision is too low. "
                "m2s.checked() finds the first such call"
            )


def report_step(
    run: SamplingRun, batch: MicroBatch, number: int, steps: int, move: Move, x_t: Tensor, prediction: Prediction
) -> None:
    """Count a finished step in the diagnostics and call the callback.

    Args:
        run: The call of `m2s.sample`.
        batch: The micro-batch, in its state after the step.
        number: The number of the step.
        steps: The number of steps.
        move: The times of the step.
        x_t: The state before the step, [M, W].
        prediction: The prediction of the step.
    """
    requested = batch.requested
    if run.log is not None:
        run.log.add(number, prediction, move, batch.x, requested)
    if run.callback is not None:
        tensors = (batch.samples[requested], move.t[requested], move.s[requested], x_t[requested], batch.x[requested])
        sites, length = batch.window.sites, run.options.shape[1]
        run.callback(StepEvent(number, steps, *tensors, prediction.samples(requested), sites, length))
