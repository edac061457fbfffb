"""The tabulated family of forward processes: P_t = expm(sigma_t Q) for any rate matrix Q on up to about 512 states."""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import validation
from m2s.errors import UserError
from m2s.process.base import Process
from m2s.process.expm import expm
from m2s.process.expm_table import ExpmTable
from m2s.process.schedule import Schedule

SMALLEST_RATE = 1e-200  # smaller rates count as zero: the bridge divides by them, and products of the quotients must be finite
CACHED_MATRICES = 3  # a sampler's step uses the transition matrices of t, of s, and from s to t


class RateMatrix(Process):
    """Corruption by P_t = expm(sigma_t Q), Q_t = sigma_t' Q: any rate matrix times a scalar schedule.

    Transition matrices are computed in float64, with a small relative error in every entry (`m2s.process.expm`), and returned
    in the dtype of t.

    Args:
        rates: Q, [S, S]: `rates[y, k]` = Q(y -> k). Off-diagonal entries are not negative; rows sum to zero.
        schedule: sigma_t = -log alpha_t.
        mask: Whether the last state is a mask and not a clean token.

    Raises:
        TypeError: The schedule is not a schedule, or `rates` does not hold floats.
        ValueError: `rates` is not a rate matrix.

    Example:
        >>> process = m2s.RateMatrix.gaussian(256, m2s.GeometricRate(sigma_max=3.0))
    """

    def __init__(self, rates: Float[Tensor, "S S"], schedule: Schedule, mask: bool = False) -> None:
        validation.instance("schedule", schedule, Schedule, "a schedule such as m2s.Linear()")
        self.generator = _check_rates(rates)
        self._generators = {self.generator.device: self.generator}
        self._recent: list[tuple[Tensor, Tensor]] = []  # the last few sigmas and their transition matrices
        self._expm_tables: dict[torch.device, ExpmTable | None] = {}
        self.schedule = schedule
        self.states = self.generator.shape[0]
        self.vocab = self.states - 1 if mask else self.states
        self.mask = self.states - 1 if mask else None

    @property
    def tabulated(self) -> "RateMatrix":
        return self

    def _generator_on(self, device: torch.device) -> Tensor:
        """Return Q on a device. The copy stays there, since a recorded CUDA graph may read it."""
        if device not in self._generators:
            self._generators[device] = self.generator.to(device)
        return self._generators[device]

    def prepare(self, device: torch.device) -> bool:
        """Build tables on a device, so that a batch of different times takes a few matrix products.

        From then on transition matrices on that device come from the tables, and no time is read by the host.

        Args:
            device: The device.

        Returns:
            Whether there are tables. There are none for too many states, for a chain whose limit depends on its start or is
            reached too slowly, and on a device without float64 (see `ExpmTable.of`).
        """
        if device.type == "mps":  # has no float64
            return False
        device = torch.empty(0, device=device).device  # "cuda" with its index
        if device not in self._expm_tables:
            self._expm_tables[device] = ExpmTable.of(self._generator_on(device))
        return self._expm_tables[device] is not None

    def _expm(self, sigma: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        """Return expm(sigma Q), from the tables or from the last few results.

        The loss and the noise of a training step use the same times, and so do the micro-batches of a batch.
        """
        table = self._expm_tables.get(sigma.device)
        if table is not None:
            return table(sigma)
        for known, matrix in self._recent:
            if known.device == sigma.device and known.shape == sigma.shape and torch.equal(known, sigma):
                return matrix
        matrix = expm(self._generator_on(sigma.device), sigma)
        self._recent = [(sigma.clone(), matrix), *self._recent[: CACHED_MATRICES - 1]]
        return matrix

    def transition_matrix(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        # A copy, since a caller may write to the result and `_expm` returns it again.
        return self._expm(self.schedule.sigma(t.double())).to(t.dtype, copy=True)

    def step_transition_matrix(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        # sigma_t - sigma_s without cancellation for a short step
        sigma = -torch.log1p(-self.schedule.one_minus_alpha_ratio(s.double(), t.double()))
        return self._expm(sigma).to(t.dtype, copy=True)

    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        return (self.schedule.sigma_prime(t.double())[..., None, None] * self._generator_on(t.device)).to(t.dtype)

    @classmethod
    def uniform(cls, vocab: int, schedule: Schedule) -> "RateMatrix":
        """Build uniform noise, Q(y -> k) = 1/K: the same process as `m2s.Uniform`, tabulated.

        Args:
            vocab: Number K of tokens.
            schedule: sigma_t.

        Returns:
            The process, with K states.
        """
        validation.positive_int("vocab", vocab, low=2)
        return cls(torch.full((vocab, vocab), 1 / vocab, dtype=torch.float64) - torch.eye(vocab, dtype=torch.float64), schedule)

    @classmethod
    def absorbing(cls, vocab: int, schedule: Schedule) -> "RateMatrix":
        """Build masking noise, Q(y -> mask) = 1: the same process as `m2s.Absorbing`, tabulated.

        Args:
            vocab: Number K of clean tokens; the mask is one state more.
            schedule: sigma_t.

        Returns:
            The process, with K + 1 states.
        """
        validation.positive_int("vocab", vocab, low=2)
        rates = torch.zeros(vocab + 1, vocab + 1, dtype=torch.float64)
        rates[:vocab, vocab] = 1.0
        rates[:vocab, :vocab] = -torch.eye(vocab, dtype=torch.float64)
        return cls(rates, schedule, mask=True)

    @classmethod
    def birth_death(cls, birth: Float[Tensor, "n"], death: Float[Tensor, "n"], schedule: Schedule) -> "RateMatrix":
        """Build a birth-death chain on n + 1 levels: Q(i -> i+1) = birth[i], Q(i+1 -> i) = death[i].

        Args:
            birth: Rates upwards, [n].
            death: Rates downwards, [n].
            schedule: sigma_t.

        Returns:
            The process, with n + 1 states.

        Raises:
            ValueError: The vectors differ in length, or an entry is negative.
        """
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
        """Build the Gaussian rates of Campbell et al. (2022) for ordered levels, in Metropolis form.

            Q(i -> j) = exp(-(|i-j| - 1)^2 / jump_width^2) min(1, pi_j / pi_i)
            pi_i ∝ exp(-(i - (K-1)/2)^2 / (2 stationary_width^2))

        The chain is reversible, with stationary distribution pi. (The released code centers pi half a level below the middle.)

        Args:
            vocab: Number K of levels.
            schedule: sigma_t.
            jump_width: Scale of the jumps, in levels.
            stationary_width: Standard deviation of pi, in levels.

        Returns:
            The process, with K states.

        Raises:
            ValueError: A width is not positive.
        """
        validation.positive_int("vocab", vocab, low=2)
        for name, width in (("jump_width", jump_width), ("stationary_width", stationary_width)):
            if not width > 0:  # an infinite width is allowed: the stationary distribution is then uniform
                raise UserError(option=name, value=width, expected="positive")
        level = torch.arange(vocab, dtype=torch.float64)
        log_pi = -((level - (vocab - 1) / 2) ** 2) / (2 * stationary_width**2)
        distance = (level[:, None] - level[None, :]).abs()
        rates = torch.exp(-(((distance - 1) / jump_width) ** 2)) * torch.exp((log_pi[None, :] - log_pi[:, None]).clamp(max=0))
        rates.fill_diagonal_(0.0)
        rates[rates < SMALLEST_RATE] = 0.0
        return cls(rates - torch.diag(rates.sum(-1)), schedule)

    def __repr__(self) -> str:
        return f"RateMatrix({self.states} states, {self.schedule}, mask={self.mask is not None})"


def _check_rates(rates: Tensor) -> Tensor:
    """Return a rate matrix in float64, with a diagonal that makes its rows sum to zero exactly."""
    rates = validation.float_matrices("rates", rates)
    if rates.ndim != 2 or rates.shape[0] != rates.shape[1] or rates.shape[0] < 2:
        raise ValueError(f"rates must be a square matrix over at least two states, but its shape is {list(rates.shape)}")
    if not rates.dtype.is_floating_point:
        raise TypeError(f"rates must hold floats, but its dtype is {rates.dtype}")
    # A diagonal that was summed in the given dtype is off by up to `states` roundings of the row's size.
    tolerance = max(1e-9, min(1e-2, len(rates) * torch.finfo(rates.dtype).eps))
    rates = rates.double()
    if not rates.isfinite().all():
        raise ValueError(f"rates{list(validation.first_index(~rates.isfinite()))} is not finite")
    off = rates - torch.diag(rates.diagonal())
    if (off < 0).any():
        at = validation.first_index(off < 0)
        raise ValueError(f"rates{list(at)} is {float(rates[at]):g}, but off-diagonal rates must not be negative")
    total = off.sum(-1)
    wrong = (total + rates.diagonal()).abs() > tolerance * total.clamp(min=1e-300).maximum(rates.diagonal().abs())
    if wrong.any():
        row = int(validation.first_index(wrong)[0])
        raise ValueError(f"row {row} of rates sums to {float(rates[row].sum()):g}, but the rows of a rate matrix sum to zero")
    return off - torch.diag(total)
