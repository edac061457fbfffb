"""The tabulated family: P_t = expm(sigma_t Q) for any rate matrix Q on up to about 512 states."""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import validation
from m2s.process.base import Process
from m2s.process.expm import expm
from m2s.process.expm_table import ExpmTable
from m2s.process.schedule import Schedule

NONE = 1e-200  # as good as no rate; the inverse of one, and what is multiplied by that, must be a number
KNOWN = 3  # kernels that are kept: a sampler's step has those of t, of s and from s to t


class RateMatrix(Process):
    """Corruption by P_t = expm(sigma_t Q): `rates[y, k]` = Q(y -> k), rows summing to zero, times a scalar schedule.

    With `mask=True` the last state is not a clean token. Kernels are computed in float64 and returned in the dtype of t.
    """

    @property
    def tabulated(self) -> "RateMatrix":
        return self

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
            raise ValueError(f"rates{list(validation.first_index(~rates.isfinite()))} is not finite")
        off = rates - torch.diag(rates.diagonal())
        if (off < 0).any():
            at = validation.first_index(off < 0)
            raise ValueError(f"rates{list(at)} is {float(rates[at]):g}, but off-diagonal rates must not be negative")
        total = off.sum(-1)
        wrong = (total + rates.diagonal()).abs() > 1e-9 * total.clamp(min=1e-300).maximum(rates.diagonal().abs())
        if wrong.any():
            row = int(validation.first_index(wrong)[0])
            raise ValueError(
                f"row {row} of rates sums to {float(rates[row].sum()):g}, but the rows of a rate matrix sum to zero"
            )
        self.generator = off - torch.diag(total)
        self._copies = {self.generator.device: self.generator}
        self._known: list[tuple[Tensor, Tensor]] = []  # times and their kernels, the last few
        self._ladders: dict[torch.device, ExpmTable | None] = {}
        self.schedule = schedule
        self.states = rates.shape[0]
        self.vocab = self.states - 1 if mask else self.states
        self.mask = self.states - 1 if mask else None

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._copies:
            self._copies[device] = self.generator.to(device)
        return self._copies[device]

    def prepare(self, device: torch.device) -> bool:
        """Make tables there by which the kernels of a batch of times, each another, take a few products and no look at any of
        them; from then on they are used on that device. False where the chain has none: it has too many states, does not
        forget where it began, or takes too many jumps from one end to the other."""
        if device.type == "mps":  # without float64
            return False
        place = torch.empty(0, device=device).device
        if place not in self._ladders:
            self._ladders[place] = ExpmTable.of(self._on(place))
        return self._ladders[place] is not None

    def _expm(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """`expm`, remembered: the loss and the noise of an update, or the parts of a batch, ask for the same times again."""
        ladder = self._ladders.get(sigma.device)
        if ladder is not None:
            return ladder(sigma)
        for known, kernel in self._known:
            if known.device == sigma.device and known.shape == sigma.shape and torch.equal(known, sigma):
                return kernel
        kernel = expm(self._on(sigma.device), sigma)
        self._known = [(sigma.clone(), kernel), *self._known[: KNOWN - 1]]
        return kernel

    def kernel(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return self._expm(self.schedule.sigma(t.double())).to(t.dtype, copy=True)

    def step_kernel(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        sigma = -torch.log1p(-self.schedule.one_minus_alpha_ratio(s.double(), t.double()))
        return self._expm(sigma).to(t.dtype, copy=True)

    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return (self.schedule.sigma_prime(t.double())[..., None, None] * self._on(t.device)).to(t.dtype)

    @classmethod
    def uniform(cls, vocab: int, schedule: Schedule) -> "RateMatrix":
        """Q(y -> k) = 1/K: the same process as `m2s.Uniform`, tabulated."""
        validation.positive_int("vocab", vocab, low=2)
        return cls(torch.full((vocab, vocab), 1 / vocab, dtype=torch.float64) - torch.eye(vocab, dtype=torch.float64), schedule)

    @classmethod
    def absorbing(cls, vocab: int, schedule: Schedule) -> "RateMatrix":
        """Q(y -> mask) = 1: the same process as `m2s.Absorbing`, tabulated."""
        validation.positive_int("vocab", vocab, low=2)
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
        validation.not_negative("birth", birth)
        validation.not_negative("death", death)
        rates = torch.diag(birth, 1) + torch.diag(death, -1)
        return cls(rates - torch.diag(rates.sum(-1)), schedule)

    @classmethod
    def gaussian(cls, vocab: int, schedule: Schedule, jump_width: float = 6.0, stationary_width: float = 512.0) -> "RateMatrix":
        """The Gaussian rate of Campbell et al. (2022) for ordered levels, in Metropolis form.

        Q(i -> j) = exp(-(|i-j| - 1)^2 / jump_width^2) min(1, pi_j / pi_i), so that the chain is reversible with stationary law
        pi_i ∝ exp(-(i - (K-1)/2)^2 / (2 stationary_width^2)).
        (The released code centres pi half a level below the middle.)
        """
        validation.positive_int("vocab", vocab, low=2)
        if not (jump_width > 0 and stationary_width > 0):
            raise ValueError(f"jump_width and stationary_width must be positive, but are {jump_width} and {stationary_width}")
        level = torch.arange(vocab, dtype=torch.float64)
        log_law = -((level - (vocab - 1) / 2) ** 2) / (2 * stationary_width**2)
        distance = (level[:, None] - level[None, :]).abs()
        rates = torch.exp(-(((distance - 1) / jump_width) ** 2)) * torch.exp((log_law[None, :] - log_law[:, None]).clamp(max=0))
        rates.fill_diagonal_(0.0)
        rates[rates < NONE] = 0.0
        return cls(rates - torch.diag(rates.sum(-1)), schedule)

    def __repr__(self) -> str:
        return f"RateMatrix({self.states} states, {self.schedule}, mask={self.mask is not None})"
