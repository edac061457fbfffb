"""The random numbers of training: a pure function of (seed, step, example of the global batch).

Neither the number of processes nor a restart changes them, and a checkpoint need not store a generator.
"""

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.ops import use_backend
from m2s.ops.categorical import draw_categorical, uniform_integer
from m2s.ops.counter_noise import CounterNoise
from m2s.process import Process
from m2s.rng import derived_seed, permute

TIME, TOUCHED, TOKEN, NORMAL = 0, 1, 2, 3  # one stream of random numbers for each purpose


def sample_times(
    rows: Int[Tensor, "n"], batch: int, seed: int, step: int, low: float, high: float, importance: float | None = None
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Draw stratified times in [low, high) for some examples of the global batch.

    Every example has its own of `batch` equal intervals of quantiles, in random order. With uniform times the weight is
    high - low. With `importance` = c the density is p(t) = 1 / ((t + c) log((high + c)/(low + c))) and the weight is 1/p(t).
    In both cases the expected mean of weight times loss is the integral over [low, high].

    Args:
        rows: The examples' indices in the global batch, [n].
        batch: The size of the global batch.
        seed: The seed of the run.
        step: The training step.
        low: The smallest time.
        high: The end of the interval.
        importance: c of the density; None: times are uniform.

    Returns:
        The times and their weights in float64, [n] each.

    Raises:
        ValueError: `importance` is 0 where times start at 0.
    """
    stratum = permute(rows.cpu().numpy().astype(np.uint64), batch, derived_seed(seed, "strata"), step).astype(np.int64)
    with use_backend("reference"):  # on the host, whatever the device of the run
        u = CounterNoise(seed, rows.cpu(), 1, step).once(TIME)
    quantile = ((torch.from_numpy(stratum) + u) / batch).clamp(max=1 - 1e-12)
    if importance is None:
        return low + (high - low) * quantile, torch.full_like(quantile, high - low)
    if low + importance <= 0:
        raise ValueError(f"importance is {importance}, but it must be positive where times start at {low}")
    log_range = math.log((high + importance) / (low + importance))
    t = ((low + importance) * torch.exp(log_range * quantile) - importance).clamp(low, high - 1e-12)
    return t, (t + importance) * log_range


def normals_by_counter(
    rows: Int[Tensor, "B"], length: int, vocab: int, seed: int, step: int | Tensor
) -> Float[Tensor, "B {length} {vocab}"]:
    """Draw a normal number for every token of the vocabulary at every position.

    Args:
        rows: The examples' indices in the global batch, [B].
        length: The number of positions L.
        vocab: The number of tokens K.
        seed: The seed of the run.
        step: The training step.

    Returns:
        The numbers in float32, [B, L, K].
    """
    u = CounterNoise(seed, rows, length * vocab, step)(NORMAL)
    return torch.special.ndtri(u + 2**-54).to(torch.float32).unflatten(-1, (length, vocab))


def corrupt_by_counter(
    process: Process, x_0: Int[Tensor, "B L"], t: Float[Tensor, "B"], rows: Int[Tensor, "B"], seed: int, step: int | Tensor
) -> Int[Tensor, "B L"]:
    """Draw x_t ~ P_t(.|x_0). The noise of a position is a function of its example and its place.

    It has the distribution of `process.corrupt`, with random numbers that do not depend on the batch around an example.

    Args:
        process: The process.
        x_0: Clean tokens, [B, L].
        t: Times, [B].
        rows: The examples' indices in the global batch, [B].
        seed: The seed of the run.
        step: The training step.

    Returns:
        Noisy tokens, [B, L].
    """
    validation.tokens("x_0", x_0, process.vocab)
    if not process.has_transitions:  # nothing is random
        return process.corrupt(x_0, t)
    noise = CounterNoise(seed, rows, x_0.shape[1], step)
    u = noise(TOUCHED)
    rank_one = process.rank_one
    if rank_one is None:  # float64: short times keep their digits, and cumulative sums their small probabilities
        return draw_categorical(process.rows(x_0, to_float64(t)), u)
    t = validation.align("t", to_float64(t), x_0)
    alpha, mixing = rank_one.alpha(t), rank_one.mixing(t)
    token = uniform_integer(noise(TOKEN), process.vocab)
    if process.mask is not None:
        token = torch.where(u < alpha + mixing.mask, process.mask, token)
    return torch.where(u < alpha, x_0.long(), token)
