"""The randomness of training: a pure function of (seed, step, row of the global batch).

So neither the number of processes nor a restart changes what is drawn, and nothing about it is kept in a state.
"""

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.heads import Shifted
from m2s.ops import use_backend
from m2s.ops.categorical import draw_categorical, uniform_integer
from m2s.ops.counter_noise import CounterNoise
from m2s.process import Process, RankOne
from m2s.rng import derived_seed, permute

TIME, TOUCHED, TOKEN, NORMAL = 0, 1, 2, 3  # purposes


def sample_times(
    rows: Int[Tensor, "n"], batch: int, seed: int, step: int, low: float, high: float, importance: float | None = None
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Times in [low, high) of some rows of the global batch, and the weight of each (float64).

    Every row has its own of `batch` equal intervals of quantiles, dealt out at random. Uniform times have weight
    high - low. With `importance` = c the density is p(t) = 1 / ((t + c) log((high + c)/(low + c))), the weight 1/p(t): a mean
    of weight times loss is the integral over [low, high] in both cases, in expectation.
    """
    stratum = permute(rows.cpu().numpy().astype(np.uint64), batch, derived_seed(seed, "strata"), step).astype(np.int64)
    with use_backend("reference"):  # here, on the host
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
    """A normal number for every token of the vocabulary at every site, float32."""
    u = CounterNoise(seed, rows, length * vocab, step)(NORMAL)
    return torch.special.ndtri(u + 2**-54).to(torch.float32).unflatten(-1, (length, vocab))


def corrupt_by_counter(
    process: Process, x_0: Int[Tensor, "B L"], t: Float[Tensor, "B"], rows: Int[Tensor, "B"], seed: int, step: int | Tensor
) -> Int[Tensor, "B L"]:
    """x_t ~ P_t(.|x_0), the noise of each site by its row and place: the law of `process.corrupt`."""
    validation.tokens("x_0", x_0, process.vocab)
    if isinstance(process, Shifted):
        return process.network_input(x_0.long())
    noise = CounterNoise(seed, rows, x_0.shape[1], step)
    u = noise(TOUCHED)
    if not isinstance(process, RankOne):
        return draw_categorical(process.rows(x_0, to_float64(t)), u)
    t = validation.align("t", to_float64(t), x_0)
    alpha, mixing = process.alpha(t), process.mixing(t)
    token = uniform_integer(noise(TOKEN), process.vocab)
    if process.mask is not None:
        token = torch.where(u < alpha + mixing.mask, process.mask, token)
    return torch.where(u < alpha, x_0.long(), token)
