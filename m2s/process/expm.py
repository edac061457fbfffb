"""expm(sigma Q) of a generator, without negative entries and accurate to a small relative error in every entry, tiny ones
included.

A short step is summed by uniformization, then doubled. While the step is short its off-diagonal part O is squared by itself,

    O <- O (2 - r_i - r_j) + offdiag(O O),   r = row sums of O,

which adds only positive terms, so that no digit of a small entry is lost to the ones on the diagonal.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

TERMS = 16  # of the uniformization series for one short step
SHORT = 0.25  # a step in which less than this is expected to leave any state


def expm(rates: Float[Tensor, "S S"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
    """expm(sigma Q) for a generator Q and times sigma >= 0 (infinity allowed: the limit), by positive terms only."""
    states = rates.shape[-1]
    fastest = -rates.diagonal().min()
    flat, place = sigma.reshape(-1).to(rates).unique(return_inverse=True)  # each time once: a sampler's are all equal
    if fastest == 0:
        return torch.eye(states, dtype=rates.dtype, device=rates.device).expand(*sigma.shape, states, states).clone()
    jumps = (flat * fastest).clamp(max=2.0**60)  # expected number of uniformized jumps; past this the chain is at its limit
    # Enough doublings that a path between any two states is found by joining short ones, and that the first step is short.
    least = math.ceil(math.log2(max(states / TERMS, 1))) + 6
    doublings = torch.ceil(torch.log2(jumps.clamp(min=1e-300) / SHORT)).clamp(min=0).long() + least
    out = torch.empty(len(flat), states, states, dtype=rates.dtype, device=rates.device)
    for count in doublings.unique().tolist():  # one batched product for all the times that double equally often
        chosen = doublings == count
        out[chosen] = _double(_short_step(rates / fastest, jumps[chosen] * 2.0**-count), count, jumps[chosen] * 2.0**-count)
    return out[place].reshape(*sigma.shape, states, states)


def _short_step(unit_rates: Tensor, jumps: Tensor) -> Tensor:
    """Off-diagonal part of e^{-h} sum_n h^n/n! U^n, U = I + Q/fastest, for small h = `jumps`."""
    eye = torch.eye(unit_rates.shape[-1], dtype=unit_rates.dtype, device=unit_rates.device)
    jump = (unit_rates + eye).clamp(min=0)
    power, total = eye, torch.zeros(len(jumps), *eye.shape, dtype=eye.dtype, device=eye.device)
    weight = torch.exp(-jumps)
    for n in range(1, TERMS + 1):
        power = power @ jump
        weight = weight * jumps / n
        total += weight[:, None, None] * power
    total.diagonal(dim1=-2, dim2=-1).zero_()
    return total


def _double(off: Tensor, count: int, jumps: Tensor) -> Tensor:
    """The kernel over 2^count short steps from the off-diagonal part of one."""
    done = 0
    while done < count and float(jumps.max()) * 2**done < SHORT:
        leave = off.sum(-1)
        joined = off @ off
        joined.diagonal(dim1=-2, dim2=-1).zero_()
        off = off * (2 - leave.unsqueeze(-1) - leave.unsqueeze(-2)) + joined
        done += 1
    kernel = off + torch.diag_embed(1 - off.sum(-1))
    for _ in range(count - done):
        kernel = kernel @ kernel
        kernel = kernel / kernel.sum(-1, keepdim=True)
    return kernel
