"""Finite chains: given one-step matrices and their stored products (D3PM).

D3PM's discretised Gaussian belongs here and not under `RateMatrix`: its steps do not commute, and the logarithm of their
product has negative rates, so that it is no expm(sigma Q).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import check
from m2s.process.base import Process


class Chain(Process):
    """`matrices[n]` takes x_n to x_{n+1}; time t in [0, 1] stands for step round(t T). There are no rates.

    Products are stored in the dtype of `matrices`: K = 256, T = 1000 in float32 take 262 MB.
    """

    def __init__(self, matrices: Float[Tensor, "T S S"], mask: bool = False) -> None:
        matrices = torch.as_tensor(matrices)
        if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or matrices.shape[1] < 2 or not len(matrices):
            raise ValueError(f"matrices must be [steps, states, states], but the shape is {list(matrices.shape)}")
        if not matrices.dtype.is_floating_point:
            raise TypeError(f"matrices must hold floats, but the dtype is {matrices.dtype}")
        check.not_negative("matrices", matrices)
        wrong = (matrices.double().sum(-1) - 1).abs() > 1e-5
        if wrong.any():
            at = check.first(wrong)
            raise ValueError(f"row {at[1]} of matrices[{at[0]}] sums to {float(matrices[at].sum()):g}, but it must sum to one")
        self.matrices = matrices
        self.steps, self.states = matrices.shape[:2]
        self.vocab = self.states - 1 if mask else self.states
        self.mask = self.states - 1 if mask else None
        products = torch.empty(self.steps + 1, self.states, self.states, dtype=matrices.dtype)
        running = torch.eye(self.states, dtype=torch.float64)
        products[0] = running
        for n in range(self.steps):
            running = running @ matrices[n].double()
            products[n + 1] = running
        self.products = products

    def index(self, t: Float[Tensor, "*b"]) -> Tensor:
        """The step that t stands for."""
        return torch.round(t.double() * self.steps).long()

    def _on(self, t: Tensor) -> None:
        if self.products.device != t.device:
            self.products, self.matrices = self.products.to(t.device), self.matrices.to(t.device)

    def kernel(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        self._on(t)
        return self.products[self.index(t)].to(t.dtype)

    def step_kernel(self, s: Float[Tensor, "*b"], t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        self._on(t)
        out = torch.empty(*t.shape, self.states, self.states, dtype=t.dtype, device=t.device)
        flat = out.reshape(-1, self.states, self.states)
        for i, (low, high) in enumerate(
            zip(self.index(s).reshape(-1).tolist(), self.index(t).reshape(-1).tolist(), strict=True)
        ):
            running = torch.eye(self.states, dtype=torch.float64, device=t.device)
            for n in range(low, high):
                running = running @ self.matrices[n].double()
            flat[i] = running
        return out

    def rates(self, t: Float[Tensor, "*b"]) -> Float[Tensor, "*b S S"]:
        raise ValueError(
            "a finite chain has no rates, so no score entropy in continuous time: use m2s.RateMatrix, Uniform or Absorbing"
        )

    @classmethod
    def uniform(cls, vocab: int, betas: Float[Tensor, "T"], dtype: torch.dtype = torch.float32) -> "Chain":
        """D3PM uniform: keep with probability 1 - beta_n, else any token."""
        betas = _probabilities(betas)[:, None, None]
        return cls(((1 - betas) * torch.eye(vocab, dtype=torch.float64) + betas / vocab).to(dtype))

    @classmethod
    def absorbing(cls, vocab: int, betas: Float[Tensor, "T"], dtype: torch.dtype = torch.float32) -> "Chain":
        """D3PM absorbing: keep with probability 1 - beta_n, else the mask."""
        betas = _probabilities(betas)[:, None, None]
        to_mask = torch.zeros(vocab + 1, vocab + 1, dtype=torch.float64)
        to_mask[:, vocab] = 1.0
        return cls(((1 - betas) * torch.eye(vocab + 1, dtype=torch.float64) + betas * to_mask).to(dtype), mask=True)

    @classmethod
    def gaussian(cls, vocab: int, betas: Float[Tensor, "T"], dtype: torch.dtype = torch.float32) -> "Chain":
        """D3PM's discretised Gaussian on ordered levels (Austin et al. 2021, appendix A.2.3).

        Q(i, j) = exp(-4 (i-j)^2 / ((K-1)^2 beta)) / sum_{n=-(K-1)}^{K-1} exp(-4 n^2 / ((K-1)^2 beta)) for i != j; the rest
        stays.
        """
        betas = _probabilities(betas)[:, None, None]
        level = torch.arange(vocab, dtype=torch.float64)
        spread = torch.arange(-(vocab - 1), vocab, dtype=torch.float64)
        norm = torch.exp(-4 * spread**2 / ((vocab - 1) ** 2 * betas)).sum(-1, keepdim=True)
        matrices = torch.exp(-4 * (level[:, None] - level[None, :]) ** 2 / ((vocab - 1) ** 2 * betas)) / norm
        matrices.diagonal(dim1=-2, dim2=-1).zero_()
        return cls((matrices + torch.diag_embed(1 - matrices.sum(-1))).to(dtype))

    def __repr__(self) -> str:
        return f"Chain({self.steps} steps, {self.states} states, mask={self.mask is not None})"


def _probabilities(betas: Tensor) -> Tensor:
    betas = torch.as_tensor(betas).double()
    if betas.ndim != 1 or not ((betas > 0) & (betas <= 1)).all():
        raise ValueError("betas must be a vector of probabilities in (0, 1], one for each step")
    return betas
