"""What a run says of its estimate: two lines at its start, and an error with advice where the memory is too small."""

import math

import torch

from m2s.data.source import Source
from m2s.distributed import World
from m2s.errors import UserError, counted
from m2s.training.config import Config, replace
from m2s.training.estimate import GIB, Estimate, estimate, is_bf16
from m2s.training.step_time import format_seconds, matrix_speed

SHOWN = 0.02  # the part of the memory from which on the batch is named
FITS = 0.9  # an advice leaves a tenth of the memory free


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
        hint=f"{advice(config, source, world)}. --on-low-memory warn starts anyway",
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
