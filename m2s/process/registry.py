"""Processes and schedules by name, as `m2s train --process.kind` and `--process.schedule` take them.

An entry is a function that builds the process or the schedule. Its keyword-only arguments are the options that it reads. A
process whose function has an argument `schedule` is given the schedule of the configuration; the others have their own.

    @PROCESSES.register("my-process")
    def my_process(vocab: int, schedule: Schedule, *, strength: float = 2.0) -> MyProcess:
        return MyProcess(vocab, schedule, strength)
"""

from collections.abc import Callable

import torch

from m2s.errors import UserError
from m2s.process.absorbing import Absorbing
from m2s.process.base import Process
from m2s.process.chain import Chain, cosine_betas, even_betas, linear_betas
from m2s.process.hybrid import Hybrid
from m2s.process.rate_matrix import RateMatrix
from m2s.process.schedule import Cosine, Exponential, Geometric, GeometricRate, Linear, LogLinear, Rescaled, Schedule
from m2s.process.uniform import Uniform
from m2s.registry import Registry

PROCESSES: Registry[Callable[..., Process]] = Registry("process")
SCHEDULES: Registry[Callable[..., Schedule]] = Registry("schedule")
MAX_LEVELS = 512  # a rate matrix over more levels would be too large to tabulate
MIN_GAUSSIAN_STEPS = 20  # with fewer steps the largest beta of the discretized Gaussian exceeds 1


@SCHEDULES.register("linear")
def linear(*, rescale: float | None = None) -> Schedule:
    """Build alpha = 1 - t.

    Args:
        rescale: eps of alpha = eps + (1 - 2 eps)(1 - t), as in MD4's code. None: no rescaling.

    Returns:
        The schedule.
    """
    return Linear() if rescale is None else Rescaled(Linear(), rescale)


@SCHEDULES.register("exponential")
def exponential(*, horizon: float = 5.0) -> Exponential:
    """Build alpha = exp(-horizon t).

    Args:
        horizon: The total noise at t = 1.

    Returns:
        The schedule.
    """
    return Exponential(horizon)


@SCHEDULES.register("log-linear")
def log_linear(*, eps: float = 1e-3) -> LogLinear:
    """Build alpha = 1 - (1 - eps) t.

    Args:
        eps: alpha at t = 1.

    Returns:
        The schedule.
    """
    return LogLinear(eps)


@SCHEDULES.register("geometric")
def geometric(*, sigma_min: float = 1e-3, sigma_max: float = 7.0) -> Geometric:
    """Build a total noise that grows geometrically.

    Args:
        sigma_min: Total noise at t = 0.
        sigma_max: Total noise at t = 1.

    Returns:
        The schedule.
    """
    return Geometric(sigma_min, sigma_max)


@SCHEDULES.register("geometric-rate")
def geometric_rate(*, sigma_max: float = 7.0, base: float = 100.0) -> GeometricRate:
    """Build a rate that grows geometrically (tauLDR).

    Args:
        sigma_max: Total noise at t = 1.
        base: The ratio of the rates at t = 1 and t = 0.

    Returns:
        The schedule.
    """
    return GeometricRate(sigma_max, base)


@SCHEDULES.register("cosine")
def cosine(*, rescale: float | None = None) -> Schedule:
    """Build alpha = 1 - cos(pi/2 (1 - t)).

    Args:
        rescale: eps of eps + (1 - 2 eps) alpha, as in MD4's code. None: no rescaling.

    Returns:
        The schedule.
    """
    return Cosine() if rescale is None else Rescaled(Cosine(), rescale)


@PROCESSES.register("uniform")
def uniform(vocab: int, schedule: Schedule) -> Uniform:
    """Build uniform noise.

    Args:
        vocab: The number of clean tokens.
        schedule: The schedule.

    Returns:
        The process.
    """
    return Uniform(vocab, schedule)


@PROCESSES.register("absorbing")
def absorbing(vocab: int, schedule: Schedule) -> Absorbing:
    """Build masking noise.

    Args:
        vocab: The number of clean tokens.
        schedule: The schedule.

    Returns:
        The process.
    """
    return Absorbing(vocab, schedule)


@PROCESSES.register("hybrid")
def hybrid(vocab: int, *, p_uniform: float = 0.1) -> Hybrid:
    """Build GIDD's mixture of masking and uniform noise, which has its own schedule.

    Args:
        vocab: The number of clean tokens.
        p_uniform: The uniform mass at t = 1/2, in [0, 1).

    Returns:
        The process.

    Raises:
        ValueError: `p_uniform` is out of range.
    """
    if p_uniform == 1:
        raise UserError(
            option="p_uniform",
            value=p_uniform,
            reason="then every token changes at t = 0",
            hint="give --process.kind uniform in its place",
        )
    return Hybrid(vocab, p_uniform)


@PROCESSES.register("gaussian")
def gaussian(
    vocab: int, schedule: Schedule, *, jump_width: float | None = None, stationary_width: float | None = None
) -> RateMatrix:
    """Build the Gaussian rates between ordered levels of Campbell et al., divided by their spectral gap.

    With this normalization exp(-sigma) is the weight of the slowest mode, for any number of levels.

    Args:
        vocab: The number of levels, at most 512.
        schedule: The schedule.
        jump_width: The width of a jump in levels; by default 6 of 256, in proportion.
        stationary_width: The width of the stationary distribution in levels; by default 512 of 256, in proportion.

    Returns:
        The process.

    Raises:
        ValueError: There are too many levels, or a width is not positive.
    """
    if vocab > MAX_LEVELS:
        raise UserError(
            option="kind",
            value="gaussian",
            reason=f"it tabulates rates between at most {MAX_LEVELS} levels, and the data has {vocab} tokens",
        )
    jump = 6 * vocab / 256 if jump_width is None else jump_width
    stationary = 2.0 * vocab if stationary_width is None else stationary_width
    process = RateMatrix.gaussian(vocab, schedule, jump, stationary)
    rates = process.generator
    # The process is reversible, so this symmetric matrix has the same eigenvalues, and eigvalsh is exact and fast.
    symmetric = torch.sqrt(rates * rates.T).copysign(rates)
    gap = -torch.linalg.eigvalsh(symmetric)[-2]
    return RateMatrix(rates / gap, process.schedule)


@PROCESSES.register("chain-uniform")
def chain_uniform(vocab: int, *, chain_steps: int = 100) -> Chain:
    """Build D3PM's chain of uniform noise with the cosine schedule.

    Args:
        vocab: The number of clean tokens.
        chain_steps: The number of steps.

    Returns:
        The process.

    Raises:
        UserError: There are too few steps.
    """
    return Chain.uniform(vocab, cosine_betas(_at_least(1, chain_steps)))


@PROCESSES.register("chain-absorbing")
def chain_absorbing(vocab: int, *, chain_steps: int = 100) -> Chain:
    """Build D3PM's chain of masking noise, which masks the same number of tokens in every step.

    Args:
        vocab: The number of clean tokens.
        chain_steps: The number of steps.

    Returns:
        The process.

    Raises:
        UserError: There are too few steps.
    """
    return Chain.absorbing(vocab, even_betas(_at_least(1, chain_steps)))


@PROCESSES.register("chain-gaussian")
def chain_gaussian(vocab: int, *, chain_steps: int = 100) -> Chain:
    """Build D3PM's chain of discretized Gaussian noise over ordered levels.

    Args:
        vocab: The number of levels.
        chain_steps: The number of steps, at least 20.

    Returns:
        The process.

    Raises:
        UserError: There are too few steps.
    """
    return Chain.gaussian(vocab, linear_betas(_at_least(MIN_GAUSSIAN_STEPS, chain_steps)))


def _at_least(low: int, steps: int) -> int:
    """Return `steps`, or raise UserError where there are fewer than `low`."""
    if steps < low:
        raise UserError(option="chain_steps", value=steps, expected=f"at least {low}")
    return steps
