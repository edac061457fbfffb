"""The matrix exponential expm(sigma Q) of a rate matrix, with a small relative error in every entry, also in tiny ones.

The algorithm adds and multiplies non-negative numbers only, so that no entry becomes negative and no digit is lost to
cancellation. A short step is summed by uniformization. The step is then doubled until it has the right length. While it is
short, only its off-diagonal part O is squared,

    O <- O (2 - r_i - r_j) + offdiag(O O),   r = row sums of O,

because the diagonal is close to one and would swallow the digits of small entries.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

TERMS = 16  # terms of the uniformization series for one short step
SHORT = 0.25  # a step is short if fewer jumps than this are expected from any state


def expm(rates: Float[Tensor, "S S"], sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
    """Return expm(sigma Q) for a batch of times.

    Args:
        rates: The rate matrix Q, [S, S]: off-diagonal entries are not negative, rows sum to zero.
        sigma: Times, [*b], at least 0. At infinity the result is the limit.

    Returns:
        Transition matrices, [*b, S, S], in the dtype of `rates`.
    """
    states = rates.shape[-1]
    fastest = -rates.diagonal().min()
    flat, place = sigma.reshape(-1).to(rates).unique(return_inverse=True)  # in a sampler all times of a batch are equal
    if fastest == 0:
        return torch.eye(states, dtype=rates.dtype, device=rates.device).expand(*sigma.shape, states, states).clone()
    jumps = (flat * fastest).clamp(max=2.0**60)  # expected number of uniformized jumps; beyond this it is the limit
    # A series of TERMS jumps reaches TERMS states far. Enough doublings join such paths between any two states, and make the
    # first step short.
    least = math.ceil(math.log2(max(states / TERMS, 1))) + 6
    doublings = torch.ceil(torch.log2(jumps.clamp(min=1e-300) / SHORT)).clamp(min=0).long() + least  # also where jumps = 0
    out = torch.empty(len(flat), states, states, dtype=rates.dtype, device=rates.device)
    for count in doublings.unique().tolist():  # one batched product for all times with the same number of doublings
        chosen = doublings == count
        out[chosen] = _double(_short_step(rates / fastest, jumps[chosen] * 2.0**-count), count, jumps[chosen] * 2.0**-count)
    return out[place].reshape(*sigma.shape, states, states)


def _short_step(unit_rates: Tensor, jumps: Tensor) -> Tensor:
    """Return the off-diagonal part of e^{-h} sum_n h^n/n! U^n, U = I + Q/fastest, for small h = `jumps`."""
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
    """Return the transition matrix of 2^count short steps from the off-diagonal part of one."""
    done = 0
    while done < count and float(jumps.max()) * 2**done < SHORT:
        leave = off.sum(-1)
        joined = off @ off
        joined.diagonal(dim1=-2, dim2=-1).zero_()
        off = off * (2 - leave.unsqueeze(-1) - leave.unsqueeze(-2)) + joined
        done += 1
    matrix = off + torch.diag_embed(1 - off.sum(-1))
    for _ in range(count - done):
        matrix = matrix @ matrix
        # A squaring doubles the relative error of a row's sum: after some fifty of them no digit would be left.
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix
