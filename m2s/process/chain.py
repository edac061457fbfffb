"""Finite chains: given one-step matrices and their stored products (D3PM).

D3PM's discretized Gaussian is a chain and not a `RateMatrix`: its steps do not commute, and the logarithm of their product has
negative off-diagonal entries. So no rate matrix Q gives it as expm(sigma Q).
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s import validation
from m2s.dtypes import to_float64
from m2s.errors import UserError
from m2s.process.base import Process

ROUNDING = 1e-7  # rounding error of a time n/T in float32


class Chain(Process):
    """A process with T steps: `matrices[n - 1]` is Q_n, which takes x_{n-1} to x_n, and P_n = Q_1 ... Q_n.

    There are no rates. A time t in ((n-1)/T, n/T] stands for step n, and t = 0 for the clean data. So times that are uniform on
    (0, 1] stand for every step equally often, and the integral of T f(n) over t is the sum of f over all steps.

    Products are stored in the dtype of `matrices`: K = 256 and T = 1000 take 262 MB in float32.

    Args:
        matrices: One-step transition matrices, [T, S, S]. Rows sum to one.
        mask: Whether the last state is a mask and not a clean token.

    Raises:
        ValueError: The shape is wrong, an entry is negative, or a row does not sum to one.
        TypeError: The dtype is not floating-point.

    Example:
        >>> process = m2s.Chain.gaussian(256, m2s.process.chain.linear_betas(1000))
    """

    def __init__(self, matrices: Float[Tensor, "T S S"], mask: bool = False) -> None:
        matrices = validation.float_matrices("matrices", matrices)
        if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or matrices.shape[1] < 2 or not len(matrices):
            raise ValueError(f"matrices must be [steps, states, states], but the shape is {list(matrices.shape)}")
        if not matrices.dtype.is_floating_point:
            raise TypeError(f"matrices must hold floats, but the dtype is {matrices.dtype}")
        validation.not_negative("matrices", matrices)
        wrong = (matrices.double().sum(-1) - 1).abs() > 1e-5
        if wrong.any():
            at = validation.first_index(wrong)
            raise ValueError(f"row {at[1]} of matrices[{at[0]}] sums to {float(matrices[at].sum()):g}, but it must sum to one")
        self.matrices = matrices
        self.steps, self.states = matrices.shape[:2]
        self.vocab = self.states - 1 if mask else self.states
        self.mask = self.states - 1 if mask else None
        # The running product stays in float64; only the stored copy is rounded.
        products = torch.empty(self.steps + 1, self.states, self.states, dtype=matrices.dtype)
        running = torch.eye(self.states, dtype=torch.float64)
        products[0] = running
        for n in range(self.steps):
            running = running @ matrices[n].double()
            products[n + 1] = running
        self.products = products
        self._tables = {products.device: (products, matrices.to(products.device))}

    @property
    def chain(self) -> "Chain":
        return self

    def index(self, t: Float[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Return the step n that each time stands for: ceil(t T), with a tolerance for the rounding of n/T.

        Args:
            t: Times, [*b].

        Returns:
            Integers from 0 to T, [*b].
        """
        return torch.ceil((to_float64(t) - ROUNDING) * self.steps).long()

    def previous_time(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Return the time (n-1)/T of the step before that of t.

        Args:
            t: Times above 0, [*b].

        Returns:
            Times, [*b].
        """
        return (self.index(t) - 1) / to_float64(t).new_full((), self.steps)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return products [T+1, S, S] and one-step matrices [T, S, S] on a device.

        Copies are never freed: a recorded CUDA graph reads their memory for as long as it lives.

        Args:
            device: The device.
        """
        if device not in self._tables:
            self._tables[device] = (self.products.to(device), self.matrices.to(device))
        return self._tables[device]

    def transition_matrix(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        products, _ = self.tables(t.device)
        return products[self.index(t)].to(t.dtype)

    def rows(self, x_0: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        products, _ = self.tables(t.device)
        return products[validation.align("t", self.index(t), x_0), x_0.long()].to(t.dtype)

    def columns(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        products, _ = self.tables(t.device)
        return products.transpose(1, 2)[validation.align("t", self.index(t), x_t), x_t.long()].to(t.dtype)

    def last_step_columns(self, x_t: Int[Tensor, "*site"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*site S"]:
        """Return the column Q_n(x_t | .) of the last step before t: the likelihood of each token at step n - 1.

        Args:
            x_t: Current tokens at step n, [*site].
            t: Times above 0, [*b].

        Returns:
            Q_n(x_t | z) of every state z, [*site, S], in the dtype of `t`.
        """
        _, matrices = self.tables(t.device)
        return matrices.transpose(1, 2)[validation.align("t", self.index(t), x_t) - 1, x_t.long()].to(t.dtype)

    def step_transition_matrix(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        _, matrices = self.tables(t.device)
        # A batch has few different pairs of steps, often one: multiply each pair's matrices once.
        pairs, place = torch.unique(torch.stack([self.index(s), self.index(t)]).reshape(2, -1), dim=1, return_inverse=True)
        out = torch.empty(pairs.shape[1], self.states, self.states, dtype=t.dtype, device=t.device)
        for i, (low, high) in enumerate(pairs.t().tolist()):
            running = torch.eye(self.states, dtype=torch.float64, device=t.device)
            for n in range(low, high):
                running = running @ matrices[n].double()
            out[i] = running
        return out[place].reshape(*t.shape, self.states, self.states)

    def last_time(self, t_min: float) -> float:
        """Return 1: the sum over the steps of a chain is complete.

        Raises:
            ValueError: `t_min` lies after the first step, where the NELBO has its reconstruction term.
        """
        if t_min > 1 / self.steps + ROUNDING:
            raise ValueError(
                f"t_min is {t_min}, but the first of {self.steps} steps ends at {1 / self.steps:g}: give a t_min of at most "
                "that"
            )
        return 1.0

    @classmethod
    def uniform(cls, vocab: int, betas: Float[Tensor, "T"], dtype: torch.dtype = torch.float32) -> "Chain":
        """Build D3PM's uniform noise: Q_n = (1 - beta_n) I + beta_n 1 1^T / K.

        Args:
            vocab: Number K of tokens.
            betas: Probability of replacement in each step, [T], such as `cosine_betas(1000)`.
            dtype: Dtype of the stored matrices.

        Returns:
            A chain of T = `len(betas)` steps with K states.
        """
        betas = _check_betas(betas)[:, None, None]
        return cls(((1 - betas) * torch.eye(vocab, dtype=torch.float64) + betas / vocab).to(dtype))

    @classmethod
    def absorbing(cls, vocab: int, betas: Float[Tensor, "T"], dtype: torch.dtype = torch.float32) -> "Chain":
        """Build D3PM's masking noise: Q_n = (1 - beta_n) I + beta_n 1 e_mask^T.

        Args:
            vocab: Number K of clean tokens; the mask is one state more.
            betas: Probability of masking in each step, [T], such as `even_betas(1000)`.
            dtype: Dtype of the stored matrices.

        Returns:
            A chain of T = `len(betas)` steps with K + 1 states.
        """
        betas = _check_betas(betas)[:, None, None]
        to_mask = torch.zeros(vocab + 1, vocab + 1, dtype=torch.float64)
        to_mask[:, vocab] = 1.0
        return cls(((1 - betas) * torch.eye(vocab + 1, dtype=torch.float64) + betas * to_mask).to(dtype), mask=True)

    @classmethod
    def gaussian(cls, vocab: int, betas: Float[Tensor, "T"], dtype: torch.dtype = torch.float32) -> "Chain":
        """Build D3PM's discretized Gaussian on ordered levels (Austin et al. 2021, appendix A.2.3).

            Q(i, j) = exp(-4 (i-j)^2 / ((K-1)^2 beta)) / sum_{n=-(K-1)}^{K-1} exp(-4 n^2 / ((K-1)^2 beta)) for i != j

        The diagonal takes the rest, so that rows sum to one.

        Args:
            vocab: Number K of levels.
            betas: Variance of each step, [T], such as `linear_betas(1000)`.
            dtype: Dtype of the stored matrices.

        Returns:
            A chain of T = `len(betas)` steps with K states.
        """
        betas = _check_betas(betas)[:, None, None]
        level = torch.arange(vocab, dtype=torch.float64)
        spread = torch.arange(-(vocab - 1), vocab, dtype=torch.float64)
        norm = torch.exp(-4 * spread**2 / ((vocab - 1) ** 2 * betas)).sum(-1, keepdim=True)
        matrices = torch.exp(-4 * (level[:, None] - level[None, :]) ** 2 / ((vocab - 1) ** 2 * betas)) / norm
        matrices.diagonal(dim1=-2, dim2=-1).zero_()
        return cls((matrices + torch.diag_embed(1 - matrices.sum(-1))).to(dtype))

    def __repr__(self) -> str:
        return f"Chain({self.steps} steps, {self.states} states, mask={self.mask is not None})"


def _check_betas(betas: Tensor) -> Tensor:
    """Return betas in float64 after checking that they are probabilities above 0."""
    betas = torch.as_tensor(betas).double()
    if betas.ndim != 1 or not ((betas > 0) & (betas <= 1)).all():
        raise ValueError("betas must be a vector of probabilities in (0, 1], one for each step")
    return betas


def cosine_betas(steps: int) -> Float[Tensor, "T"]:
    """Return D3PM's betas for uniform noise.

        beta_n = min(1 - a_n / a_{n-1}, 0.999),    a_n = cos(pi/2 (n/T + 0.008) / 1.008)

    Args:
        steps: Number T of steps.

    Returns:
        Betas, [T], float64.
    """
    validation.positive_int("steps", steps)
    survival = torch.cos(math.pi / 2 * (torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008)
    return (1 - survival[1:] / survival[:-1]).clamp(max=0.999)


def even_betas(steps: int) -> Float[Tensor, "T"]:
    """Return D3PM's betas for masking noise: beta_n = 1 / (T - n + 1).

    Then alpha_n = 1 - n/T, the linear schedule at t = n/T.

    Args:
        steps: Number T of steps.

    Returns:
        Betas, [T], float64.
    """
    validation.positive_int("steps", steps)
    return 1 / torch.arange(steps, 0, -1, dtype=torch.float64)


def linear_betas(steps: int) -> Float[Tensor, "T"]:
    """Return D3PM's betas for the discretized Gaussian: 1e-4 to 0.02 evenly at T = 1000, times 1000/T for another T.

    Args:
        steps: Number T of steps, at least 20.

    Returns:
        Betas, [T], float64.

    Raises:
        UserError: `steps` is below 20.
    """
    if steps < 20:
        hint = "the last beta, 20/steps, is a probability"
        raise UserError(option="steps", value=steps, expected="at least 20", hint=hint)
    return torch.linspace(1e-4, 0.02, steps, dtype=torch.float64) * (1000 / steps)


def time_interval(process: Process, t_min: float) -> tuple[float, float]:
    """Return the interval from which training and evaluation draw times.

    Args:
        process: The forward process.
        t_min: Lower end for a process in continuous time.

    Returns:
        (t_min, process.last_time(t_min)), and (0, 1) for a chain.
    """
    return (0.0, 1.0) if process.chain is not None else (t_min, process.last_time(t_min))


def snap_times(process: Process, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Move drawn times to the ends of a chain's steps.

    Args:
        process: The forward process.
        t: Drawn times, [*b].

    Returns:
        For a chain the end n/T of the step into which t falls (the first step for t = 0); otherwise `t`.
    """
    if process.chain is None:
        return t
    steps = process.chain.steps
    return torch.ceil(t * steps).clamp(1, steps) / steps
