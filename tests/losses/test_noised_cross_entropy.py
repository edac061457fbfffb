"""The cross entropy of noised positions: its minimum by enumeration, its weight, and its fused form."""

import pytest
import torch

import m2s
from m2s.losses.noised_cross_entropy import noised_cross_entropy, noised_rows
from m2s.ops.cross_entropy.naive import cross_entropy as row_loss
from oracle import CASES

ORACLE = CASES["uniform-linear"].oracle()
HEAD = m2s.Posterior(CASES["uniform-linear"].process, offset="exact")
SEQUENCES = ORACLE.noisy


def expected_loss(log_nu: torch.Tensor, t: float) -> torch.Tensor:
    """E[loss | t] by enumeration of all clean and noisy sequences; log_nu [noisy, L, K] is the network's output."""
    clean = torch.from_numpy(ORACLE.clean)
    weight = torch.from_numpy(ORACLE.distribution[:, None] * ORACLE.likelihood(SEQUENCES, t))
    noisy = torch.from_numpy(SEQUENCES)
    shape = (len(clean), *noisy.shape)
    x_0, x_t = clean[:, None].expand(shape).flatten(0, 1), noisy.expand(shape).flatten(0, 1)
    output = log_nu.expand(len(clean), *log_nu.shape).flatten(0, 1)
    times = torch.full((len(x_0),), t, dtype=torch.float64)
    return (noised_cross_entropy(HEAD, output, x_0, x_t, times).sum(-1) * weight.flatten()).sum()


@pytest.mark.parametrize("t", [0.05, 0.5, 0.9])
def test_the_minimum_is_the_leave_one_out_distribution(t):
    nu = torch.from_numpy(ORACLE.leave_one_out(SEQUENCES, t))
    exact = nu.log().requires_grad_()
    (gradient,) = torch.autograd.grad(expected_loss(exact, t), exact)
    assert gradient.abs().max() < 1e-12
    other = (nu.log() + 0.1 * torch.randn(nu.shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
    (gradient,) = torch.autograd.grad(expected_loss(other, t), other)
    assert gradient.abs().max() > 1e-4
    assert expected_loss(other, t) > expected_loss(exact, t)


def test_the_weight_is_that_of_masked_cross_entropy_times_the_probability_of_a_replacement():
    head = m2s.Posterior(m2s.Uniform(4, m2s.Linear()), offset="exact")
    output, t = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([0.2, 0.7], dtype=torch.float64)
    x_0 = torch.tensor([[0, 1, 2], [3, 3, 0]])
    x_t = torch.tensor([[0, 3, 2], [3, 1, 2]])
    nll = -torch.log_softmax(output, -1).gather(-1, x_0[..., None]).squeeze(-1)
    same = (t / 4) / (1 - t + t / 4)  # Pr(replaced | the token is the same), alpha = 1 - t
    expected = nll / t[:, None] * torch.where(x_t == x_0, same[:, None], 1)
    torch.testing.assert_close(noised_cross_entropy(head, output, x_0, x_t, t), expected)
    (scalars,) = noised_rows(head, x_0, x_t, t).scalars
    rows = row_loss(output.flatten(0, 1), x_0.flatten(), scalars, 4)
    torch.testing.assert_close(rows, expected.flatten())


@pytest.mark.parametrize(
    "head",
    [
        m2s.Posterior(m2s.Uniform(4, m2s.Linear())),
        m2s.Posterior(m2s.Absorbing(4, m2s.Linear()), offset="exact"),
        m2s.LogScore(m2s.Uniform(4, m2s.Linear())),
    ],
    ids=repr,
)
def test_other_heads_are_errors(head):
    x = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(TypeError, match="noised"):
        noised_cross_entropy(head, torch.zeros(1, 2, head.process.states), x, x, torch.tensor([0.5]))
