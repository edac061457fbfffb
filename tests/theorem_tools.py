"""Helpers of the theorems' tests: cases, losses at every site, and the bridge by its definition."""

import numpy as np
import pytest
import torch

import m2s
from oracle import CASES, Oracle

TIMES = [1e-3, 0.1, 0.5, 0.9, 0.999]
UNIFORM = ["uniform-linear", "uniform-exponential"]
EVERY = pytest.mark.parametrize("name", CASES)


def tensor(value: np.ndarray | float) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(value))


def log(p: np.ndarray) -> torch.Tensor:
    return torch.log(tensor(p))


def case(name: str) -> tuple[m2s.Process, Oracle]:
    return CASES[name].process, CASES[name].oracle()


def site_losses(
    head: m2s.Head, output: np.ndarray | torch.Tensor, oracle: Oracle, x: np.ndarray, t: float, loss=m2s.score_entropy
) -> torch.Tensor:
    """The library's score entropy, or another loss, at every site of every sequence for every clean token: [N, L, z]."""
    vocab = oracle.noise.vocab
    x_0 = torch.arange(vocab).expand(*x.shape, vocab)
    x_t = tensor(x).unsqueeze(-1).expand_as(x_0)
    output = torch.as_tensor(output).unsqueeze(-2)
    return loss(head, output.expand(*x_0.shape, output.shape[-1]), x_0, x_t, torch.tensor(t, dtype=torch.float64))


def conditional_risk(losses: np.ndarray, posterior: np.ndarray) -> np.ndarray:
    """E[loss | X_t = x] at every site; a clean token that cannot have led to x counts for nothing."""
    posterior = posterior[..., : losses.shape[-1]]
    return np.where(posterior > 0, posterior * np.where(posterior > 0, losses, 0.0), 0.0).sum(-1)


def bridge_rows(oracle: Oracle, k: int, t: float) -> np.ndarray:
    """B_+: the rows P_t(y|z)/P_t(k|z) of the candidates y with a forward rate into k, over clean z."""
    transition, rates = oracle.noise.transition_matrix(t)[: oracle.noise.vocab], oracle.noise.rates(t)
    counted = [y for y in range(oracle.noise.states) if y != k and rates[y, k] > 0]
    return (transition / transition[:, [k]]).T[counted]
