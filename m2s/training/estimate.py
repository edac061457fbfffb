"""Memory and time of a training step, estimated before the step is made.

The network and the loss run once on fake tensors, which have shapes but no values. This takes no memory, and the storage that
they would hold is counted. With N parameters and micro-batches of B examples the estimate in bytes is

    20 N + B (activations + loss) + 2 A (8 L + 40)

The 20 bytes are the weight, its average, two moments and the gradient, in float32. Activations are what the forward pass of
one example keeps for the backward pass, logits included. The loss is the most that its forward and backward pass hold beside
them, the gradient of the logits included. The last term is small: the A examples of a step, with L tokens, index, time, weight
and loss each, and those of the next step.

A tabulated process adds its tables. Its loss reads values, so that it cannot be traced: a constant takes its place.

On a GPU three things differ, and the constants below come from runs on one H200 (RESULTS.md). Activations are in bf16. A
compiled network keeps fewer of them: `COMPILED` of what the eager one keeps. Fused kernels never hold all logits.

`benchmarks/memory.py` compares the estimate with the peak that the operating system reports.
"""

import dataclasses
import functools
import json
import math
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from m2s.data.source import Source
from m2s.devices import available_memory
from m2s.distributed import World
from m2s.errors import UserError, counted
from m2s.losses.registry import has_fused_form
from m2s.methods import METHODS
from m2s.methods.base import MethodParts
from m2s.models import build
from m2s.ops import use_backend, why_unavailable
from m2s.patches import AttributePatches
from m2s.training.build import describe_network
from m2s.training.compilation import COMPILED as COMPILED_DEVICES
from m2s.training.config import Config, replace
from m2s.training.parallel import blocks, recompute
from m2s.training.validate import validation_rows

GIB = 2**30
WEIGHT_BYTES = 20  # weight, average, two moments, gradient
BATCHES = 2  # batches in memory: that of the step, and the next one
TOKEN_BYTES, EXAMPLE_BYTES = 8, 40  # of a batch: a token, and index, row, time, weight and loss of an example
COMPILED = 0.8  # activations of a compiled network over those of the eager one
COMPILED_LOSS = 8.0  # bytes per logit of a compiled loss, with the last layer of a transformer
FUSED_LOSS = 2.0**30  # bytes of the fused last layer and loss, whatever the batch
UNKNOWN_LOSS = 32.0  # bytes per logit where the loss cannot be traced
TABULATED_LOSS, TABULATED_COMPILED_LOSS = 256.0, 64.0  # the same for a tabulated process, eager and compiled
TABLES = 1000  # matrices that a tabulated process holds
SCORE_VALIDATION = 32.0  # bytes per logit of the validation of a score, whose posterior is computed in float64
GPU_VALIDATION = 8.0  # bytes per logit of an eager loss without its gradient
TRACED_LOGITS = 2**19  # the loss is traced on about so many logits
SHOWN = 0.02  # the part of the memory from which on the batch is named
FITS = 0.9  # an advice leaves a tenth of the memory free
MATRIX = {"cpu": 768, "cuda": 8192}  # the size of the product whose speed is measured


@dataclass(frozen=True)
class Step:
    """The memory of one example, from a trace on fake tensors.

    Args:
        parameters: Parameters of the network.
        activations: Bytes that the forward pass of an example keeps. With activation checkpointing also those of one block.
        loss: Bytes that the loss of an example holds beside them.
        operations: Floating point operations of the forward pass of an example.
        why: Why activations or the loss could not be traced; empty where they could.
    """

    parameters: int
    activations: float
    loss: float
    operations: float
    why: str = ""


@dataclass(frozen=True)
class Estimate:
    """The memory of a run on one process and the work of a step.

    Args:
        step: The memory of an example.
        examples: Examples of one call of the network.
        weights: Bytes of weights, average, moments and gradients on this process, and of the tables of a tabulated process.
        activations: Bytes of the activations of a call.
        loss: Bytes of the loss of a call.
        validation: Bytes of a call of the validation, without the weights.
        batch: Bytes of the tokens, times and losses of this step and of the next one.
        operations: Floating point operations of a training step on this process, forward and backward.
        available: Bytes that are available; None where that is unknown.
    """

    step: Step
    examples: int
    weights: float
    activations: float
    loss: float
    validation: float
    batch: float
    operations: float
    available: float | None

    @property
    def total(self) -> float:
        """Bytes of the run: weights, batch, and the larger of training and validation."""
        return self.weights + self.batch + max(self.activations + self.loss, self.validation)

    def of(self, examples: int) -> "Estimate":
        """Return the estimate with another number of examples in a call of the network.

        Args:
            examples: The number.
        """
        share = examples / self.examples
        loss = self.loss if self.loss == FUSED_LOSS else self.loss * share
        return dataclasses.replace(self, examples=examples, activations=self.activations * share, loss=loss)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, as far as it is known."""
        return self.available is None or self.total <= self.available


class _LiveStorage(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, while they live.

    `bytes` is the number of bytes now, `peak` the largest so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._free, storage._cdata)
        return result

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)


@contextmanager
def _fake_tensors() -> Iterator[None]:
    """Inside this context tensors have no values, and random numbers outside are not changed."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True), use_backend("reference"):
        yield


def _trace_network(model: nn.Module, length: int, bf16: bool, examples: int) -> int:
    """The bytes that a forward pass keeps for the backward pass."""
    x_t, t = torch.zeros(examples, length, dtype=torch.long), torch.zeros(examples)
    with _LiveStorage() as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(x_t, t, None)
        kept = live.bytes
    del output
    return kept


def _trace_activations(model: nn.Module, length: int, bf16: bool) -> tuple[float, float]:
    """The bytes that one more example adds, and the floating point operations of an example.

    Storage that does not depend on the batch, such as cast weights, cancels in the difference.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        one = _trace_network(model, length, bf16, 1)
    return max(0.0, float(_trace_network(model, length, bf16, 2) - one)), float(counter.get_total_flops())


def _trace_recomputed(model: nn.Module, length: int, bf16: bool, full: float) -> float:
    """The bytes that one more example adds with activation checkpointing: inputs of blocks, and one block."""
    count, patches = len(blocks(model)), AttributePatches()
    recompute(model, patches)
    try:
        kept, _ = _trace_activations(model, length, bf16)
    finally:
        patches.close()
    return kept + 2 * (full - kept) / max(count, 2)  # of one block the activations, and as many gradients


def _trace_loss(parts: MethodParts, length: int) -> float:
    """Bytes that the loss of an example of `length` positions holds beside the logits, forward and backward."""
    process = parts.head.process

    def peak(examples: int, positions: int) -> float:
        x = torch.zeros(examples, positions, dtype=torch.long)
        t = torch.zeros(examples, dtype=torch.float64)
        logits = torch.zeros(examples, positions, process.states, requires_grad=True)
        with _LiveStorage() as live:
            parts.loss(parts.head, logits, x, x, t).sum().backward()
        return live.peak

    # Some losses loop over chunks of positions. A part of a long sequence is enough: what they hold grows with the positions.
    short = max(1, min(length, TRACED_LOGITS // process.states))
    one = peak(1, short)
    per_position = max(0.0, peak(1, 2 * short) - one) / short if length > short else 0.0
    return max(0.0, peak(2, short) - one) + per_position * (length - short)


@functools.lru_cache(maxsize=64)
def _trace(key: str, length: int, bf16: bool, unprojected: bool, recomputed: bool, given: "_Given") -> Step:
    """`trace_step`; `key` names everything in `given` that the result depends on."""
    del key
    states = given.parts.head.process.states
    why, activations, operations = "", 0.0, 0.0
    with _fake_tensors():
        model = build(given.description).train()
        parameters = sum(weight.numel() for weight in model.parameters())
        if unprojected:
            model.unprojected = True  # type: ignore[assignment]
        try:
            activations, operations = _trace_activations(model, length, bf16)
            if recomputed:
                activations = _trace_recomputed(model, length, bf16, activations)
        except Exception as error:  # a network of a plugin may read values, which fake tensors do not have
            why = f"the network cannot be traced ({type(error).__name__})"
        try:
            loss = _trace_loss(given.parts, length)
        except Exception:  # a loss may read them too, such as one that needs a transition matrix for each time
            tabulated = given.parts.head.process.tabulated is not None
            loss = (TABULATED_LOSS if tabulated else UNKNOWN_LOSS) * length * states
    return Step(parameters, activations, loss, operations, why)


@dataclass(frozen=True)
class _Given:
    """The objects of a trace. All are equal, because the key of the cache names what they are."""

    description: dict[str, Any]
    parts: MethodParts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given)

    def __hash__(self) -> int:
        return 0


def trace_step(config: Config, source: Source, bf16: bool = False, unprojected: bool = False, recomputed: bool = False) -> Step:
    """Trace a training step of one example on fake tensors.

    Args:
        config: The resolved configuration.
        source: The data. Its length, vocabulary and shape matter.
        bf16: Whether the body of the network runs in bf16.
        unprojected: Whether the network, a transformer, returns hidden states, so that no logits are counted.
        recomputed: Whether activations are computed again in the backward pass.

    Returns:
        The memory and the operations of an example.

    Raises:
        UserError: The configuration does not describe a network.
    """
    parts = METHODS[config.method].build(source.vocab, config.process, config.head)
    description = describe_network(config.network, parts.head.process, source)
    key = json.dumps([description, source.vocab], default=repr, sort_keys=True)
    key += repr((config.method, config.process, config.head))
    return _trace(key, source.length, bf16, unprojected, recomputed, _Given(description, parts))


def estimate(config: Config, source: Source, world: World) -> Estimate:
    """Estimate the memory and the work of a run.

    Args:
        config: The resolved configuration.
        source: The data.
        world: The processes and their device.

    Returns:
        The estimate for one process.

    Raises:
        UserError: The configuration does not describe a network.
    """
    run, device, transformer = config.run, world.device, config.network.kind == "dit"
    gpu = device.type == "cuda"
    parts = METHODS[config.method].build(source.vocab, config.process, config.head)
    fused = gpu and transformer and run.kernels != "reference" and not why_unavailable(device)
    fused = fused and has_fused_form(parts.loss, parts.head)
    compiled = run.compile == "yes" or (run.compile == "auto" and device.type in COMPILED_DEVICES)
    step = trace_step(config, source, is_bf16(config, device), transformer and (fused or compiled), run.recompute)
    logits = source.length * parts.head.process.states
    local = run.batch // world.size
    examples = run.micro_batch or local
    tables = 8.0 * TABLES * parts.head.process.states**2 if parts.head.process.tabulated else 0.0
    loss = step.loss
    if compiled:
        loss = (TABULATED_COMPILED_LOSS if tables else COMPILED_LOSS) * logits
    # Validation keeps no activations, and the weights beside their average take the place of the gradients.
    rows = min(validation_rows(device, logits), run.validation_samples, source.held_out)
    validated = step.loss if parts.head.has_posterior else max(step.loss, SCORE_VALIDATION * logits)
    if gpu:
        validated = GPU_VALIDATION * logits
    available = available_memory(device)
    if available is not None and not gpu:
        available /= int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return Estimate(
        step=step,
        examples=examples,
        weights=WEIGHT_BYTES * step.parameters / (world.size if run.parallel == "fsdp" else 1) + tables,
        activations=step.activations * (COMPILED if compiled else 1) * examples,
        loss=FUSED_LOSS if fused else loss * examples,
        validation=0.0 if fused else rows * (4 * logits + validated),
        batch=float(BATCHES * local * (TOKEN_BYTES * source.length + EXAMPLE_BYTES)),
        operations=3 * step.operations * local,
        available=available,
    )


def is_bf16(config: Config, device: torch.device) -> bool:
    """Return whether the body of the network runs in bf16.

    Args:
        config: The configuration.
        device: The device.
    """
    return config.run.precision == "bf16" or (config.run.precision == "auto" and device.type == "cuda")


def matrix_speed(device: torch.device, bf16: bool) -> float:
    """Measure the speed of a matrix product.

    Args:
        device: The device.
        bf16: Whether the operands are bf16, or else float32.

    Returns:
        Floating point operations per second.
    """
    size = MATRIX.get(device.type, 768)
    matrix = torch.ones(size, size, dtype=torch.bfloat16 if bf16 else torch.float32, device=device)
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def describe_estimate(found: Estimate, config: Config, device: torch.device) -> str:
    """Return the estimate as lines for the terminal.

    Args:
        found: The estimate.
        config: The resolved configuration.
        device: The device.

    Returns:
        One line about memory and one about time.
    """
    available = "" if found.available is None else f" of {format_bytes(found.available)} available"
    parts = [format_bytes(value) for value in (found.weights, found.activations, found.loss)]
    lines = f"memory: about {format_bytes(found.total)}{available} (weights, average, moments and gradients {parts[0]}; "
    batch = f"; batch {format_bytes(found.batch)}" if found.batch > SHOWN * found.total else ""
    lines += f"activations {parts[1]} and loss {parts[2]} of {counted(found.examples, 'example')}{batch})"
    if found.step.why:
        lines += f"; {found.step.why}: without activations"
    if not found.operations:
        return lines
    seconds = found.operations / matrix_speed(device, is_bf16(config, device))
    lines += f"\ntime: at least {format_seconds(seconds)} per step for the matrix products, "
    return lines + f"{format_seconds(seconds * config.run.steps)} for {config.run.steps:,} steps; the first steps are measured"


def check_memory(config: Config, source: Source, world: World) -> Estimate:
    """Estimate the memory of a run and raise an error where it will not suffice.

    Args:
        config: The resolved configuration.
        source: The data.
        world: The processes. Every process must call this.

    Returns:
        The estimate.

    Raises:
        UserError: The memory of some process is too small. The message names options that make the run fit.
    """
    found = estimate(config, source, world)
    short = torch.full((1,), float(not found.fits), dtype=torch.float64, device=world.device)
    if world.sum(short).item() == 0 or config.run.on_low_memory == "warn":
        return found
    reason = f"a training step on {counted(found.examples, 'example')} at a time needs about {format_bytes(found.total)}"
    reason += " of memory"
    if found.available is not None:
        reason += f", and {format_bytes(found.available)} are available"
    option, value = "micro_batch", config.run.micro_batch or "auto"
    if _batch_is_too_large(found):
        option, value = "batch", config.run.batch
    raise UserError(
        option=option,
        value=value,
        reason=reason,
        hint=f"{advice(config, source, world)}. --on-low-memory warn starts all the same",
    )


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in increasing order.

    Args:
        number: The number.
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def advice(config: Config, source: Source, world: World) -> str:
    """Return which options to change, and to what, so that a run fits into the memory.

    Args:
        config: The resolved configuration.
        source: The data.
        world: The processes and their device.

    Returns:
        The largest micro-batch that fits, with activation checkpointing where that is needed; otherwise what else to make
        smaller.
    """
    for recomputed in (False, True):
        if config.run.recompute and not recomputed:
            continue
        changed = replace(config, "recompute", recomputed)
        found = estimate(changed, source, world)
        for size in reversed(divisors(found.examples)):
            part = found.of(size)
            if part.total <= FITS * (math.inf if part.available is None else part.available):
                option = "--recompute " if recomputed and not config.run.recompute else ""
                return (
                    f"give {option}--micro-batch {size}, which needs about {format_bytes(part.total)}; the batch stays the same"
                    f"{_least_time(found, changed, world.device)}"
                )
    least = found.of(1).total
    if _batch_is_too_large(found):
        alone = f"the {counted(config.run.batch, 'example')} of a step alone take about {format_bytes(found.batch)}"
        return f"give a smaller --batch: {alone}"
    shorter = " or shorter examples (--data.length)" if config.data.name == "text" else ""
    return (
        f"give a smaller network ({_smaller_size(config)}--network.width){shorter}: --recompute --micro-batch 1 still needs "
        f"about {format_bytes(least)}"
    )


def _batch_is_too_large(found: Estimate) -> bool:
    """Whether the examples of a step alone take most of the memory, so that smaller micro-batches do not help."""
    return found.batch > found.of(1).total - found.batch


def _smaller_size(config: Config) -> str:
    """The option for the smallest network as the start of a list; empty where the run has it already."""
    return "" if config.network.size == "tiny" else "--network.size tiny, or "


def _least_time(found: Estimate, config: Config, device: torch.device) -> str:
    """The least time of a step and of a run, as the end of an advice; empty where it is unknown."""
    if not found.operations:
        return ""
    again = 4 / 3 if config.run.recompute else 1.0  # the backward pass makes the forward pass again
    seconds = again * found.operations / matrix_speed(device, is_bf16(config, device))
    run = f"the run of {config.run.steps:,} steps at least {format_seconds(seconds * config.run.steps)}"
    less = "fewer --steps and a smaller --batch take less"
    if config.network.size != "tiny":
        less = "fewer --steps, a smaller --batch and --network.size tiny take less"
    return f" (a step then takes at least {format_seconds(seconds)}, {run}: {less})"


def format_bytes(count: float) -> str:
    """Return a number of bytes with a unit.

    Args:
        count: The number.
    """
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Return a duration with a unit.

    Args:
        seconds: The duration.
    """
    for limit, size, unit in ((0.1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:,.0f} days"


class Pace:
    """Measures the first steps of a run and says once how long the rest takes.

    Args:
        device: The device. On a GPU the first steps compile kernels and record a graph.
    """

    SECONDS = 1.0  # the time over which steps are measured at least

    def __init__(self, device: torch.device) -> None:
        self._skip = 6 if device.type == "cuda" else 1
        self._count, self._seconds = 0, 0.0

    def add(self, seconds: float, left: int) -> str | None:
        """Add a step.

        Args:
            seconds: The duration of the step.
            left: The number of steps that are left.

        Returns:
            A line for the terminal after enough steps, once; otherwise None.
        """
        if self._skip > 0:
            self._skip -= 1
            return None
        if self._count < 0:
            return None
        self._count, self._seconds = self._count + 1, self._seconds + seconds
        if self._count < 2 or self._seconds < self.SECONDS or not left:
            return None
        each, self._count = self._seconds / self._count, -1
        return f"time: {format_seconds(each)} per step, about {format_seconds(each * left)} for the {left:,} steps left"
