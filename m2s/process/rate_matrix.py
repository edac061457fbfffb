"""The tabulated family: P_t = expm(sigma_t Q) for any rate matrix Q on up to about 512 states.

The exponential is entrywise non-negative and accurate to a small relative error in every entry, tiny ones included. A short
step is summed by uniformization, then doubled. While the step is short its off-diagonal part O is squared by itself,

    O <- O (2 - r_i - r_j) + offdiag(O O),   r = row sums of O,

which adds only positive terms, so that no digit of a small entry is lost to the ones on the diagonal.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import check
from m2s.process.base import Process
from m2s.process.schedule import Schedule

TERMS = 16  # of the uniformization series for one short step
KNOWN = 3  # kernels that are kept: a sampler's step has those of t, of s and from s to t
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


class RateMatrix(Process):
    """Corruption by P_t = expm(sigma_t Q): `rates[y, k]` = Q(y -> k), rows summing to zero, times a scalar schedule.

    With `mask=True` the last state is not a clean token. Kernels are computed in float64 and returned in the dtype of t.
    """

    def __init__(self, rates: Float[Tensor, "S S"], schedule: Schedule, mask: bool = False) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(f"schedule must be a schedule such as m2s.Linear(), not {schedule!r}")
        rates = torch.as_tensor(rates)
        if rates.ndim != 2 or rates.shape[0] != rates.shape[1] or rates.shape[0] < 2:
            raise ValueError(f"rates must be a square matrix over at least two states, but its shape is {list(rates.shape)}")
        if not rates.dtype.is_floating_point:
            raise TypeError(f"rates must hold floats, but its dtype is {rates.dtype}")
        rates = rates.double()
        if not rates.isfinite().all():
            raise ValueError(f"rates{list(check.first(~rates.isfinite()))} is not finite")
        off = rates - torch.diag(rates.diagonal())
        if (off < 0).any():
            at = check.first(off < 0)
            raise ValueError(f"rates{list(at)} is {float(rates[at]):g}, but off-diagonal rates must not be negative")
        total = off.sum(-1)
        wrong = (total + rates.diagonal()).abs() > 1e-9 * total.clamp(min=1e-300).maximum(rates.diagonal().abs())
        if wrong.any():
            row = int(check.first(wrong)[0])
            raise ValueError(
                f"row {row} of rates sums to {float(rates[row].sum()):g}, but the rows of a rate matrix sum to zero"
            )
        self.generator = off - torch.diag(total)
        self._copies = {self.generator.device: self.generator}
        self._known: list[tuple[Tensor, Tensor]] = []  # times and their kernels, the last few
        self.schedule = schedule
        self.states = rates.shape[0]
        self.vocab = self.states - 1 if mask else self.states
        self.mask = self.states - 1 if mask else None

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self.generator.to(device)
        return self._copies[device]

    def _expm(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """`expm`, remembered: the loss and the noise of an update, or the parts of a batch, ask for the same times again."""
        for known, kernel in self._known:
            if known.device == sigma.device and known.shape == sigma.shape and torch.equal(known, sigma):
                return kernel
        kernel = expm(self._on(sigma.device), sigma)
        self._known = [(sigma.clone(), kernel), *self._known[: KNOWN - 1]]
        return kernel

    def kernel(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return self._expm(self.schedule.sigma(t.double())).to(t.dtype, copy=True)

    def step_kernel(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        sigma = -torch.log1p(-self.schedule.lost(s.double(), t.double()))
        return self._expm(sigma).to(t.dtype, copy=True)

    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return (self.schedule.sigma_prime(t.double())[..., None, None] * self._on(t.device)).to(t.dtype)

    @classmethod
    def uniform(cls, vocab: int, schedule: Schedule) -> "RateMatrix":
        """Q(y -> k) = 1/K: the same process as `m2s.Uniform`, tabulated."""
        check.positive_int("vocab", vocab, low=2)
        return cls(torch.full((vocab, vocab), 1 / vocab, dtype=torch.float64) - torch.eye(vocab, dtype=torch.float64), schedule)

    @classmethod
    def absorbing(cls, vocab: int, schedule: Schedule) -> "RateMatrix":
        """Q(y -> mask) = 1: the same process as `m2s.Absorbing`, tabulated."""
        check.positive_int("vocab", vocab, low=2)
        rates = torch.zeros(vocab + 1, vocab + 1, dtype=torch.float64)
        rates[:vocab, vocab] = 1.0
        rates[:vocab, :vocab] = -torch.eye(vocab, dtype=torch.float64)
        return cls(rates, schedule, mask=True)

    @classmethod
    def birth_death(cls, birth: Float[Tensor, "n"], death: Float[Tensor, "n"], schedule: Schedule) -> "RateMatrix":
        """Q(i -> i+1) = birth[i], Q(i+1 -> i) = death[i]."""
        birth, death = torch.as_tensor(birth).double(), torch.as_tensor(death).double()
        if birth.ndim != 1 or birth.shape != death.shape:
            raise ValueError(
                f"birth and death must be vectors of one length, but have shapes {list(birth.shape)}, {list(death.shape)}"
            )
        check.not_negative("birth", birth)
        check.not_negative("death", death)
        rates = torch.diag(birth, 1) + torch.diag(death, -1)
        return cls(rates - torch.diag(rates.sum(-1)), schedule)

    @classmethod
    def gaussian(cls, vocab: int, schedule: Schedule, jump_width: float = 6.0, stationary_width: float = 512.0) -> "RateMatrix":
        """The Gaussian rate of Campbell et al. (2022) for ordered levels, in Metropolis form.

        Q(i -> j) = exp(-(|i-j| - 1)^2 / jump_width^2) min(1, pi_j / pi_i), so that the chain is reversible with stationary law
        pi_i ∝ exp(-(i - (K-1)/2)^2 / (2 stationary_width^2)).
        (The released code centres pi half a level below the middle.)
        """
        check.positive_int("vocab", vocab, low=2)
        if not (jump_width > 0 and stationary_width > 0):
            raise ValueError(f"jump_width and stationary_width must be positive, but are {jump_width} and {stationary_width}")
        level = torch.arange(vocab, dtype=torch.float64)
        log_law = -((level - (vocab - 1) / 2) ** 2) / (2 * stationary_width**2)
        distance = (level[:, None] - level[None, :]).abs()
        rates = torch.exp(-(((distance - 1) / jump_width) ** 2)) * torch.exp((log_law[None, :] - log_law[:, None]).clamp(max=0))
        rates.fill_diagonal_(0.0)
        return cls(rates - torch.diag(rates.sum(-1)), schedule)

    def __repr__(self) -> str:
        return f"RateMatrix({self.states} states, {self.schedule}, mask={self.mask is not None})"
