"""Transition matrices of many times by tables: as accurate as one by one, without reading the times on the host."""

import mpmath
import numpy as np
import pytest
import torch

import m2s
from compiled import passes
from m2s.process.expm import expm
from m2s.process.expm_table import BASE, ExpmTable

CPU = torch.device("cpu")
LOSSES = """
import m2s
from m2s.losses import ct_elbo, score_entropy

process = m2s.RateMatrix.gaussian(9, m2s.Geometric(1e-3, 7.0), 2.0, 9.0)
assert process.prepare(torch.device(device))
head = m2s.Posterior(process, "exact")
generator = torch.Generator().manual_seed(0)
for loss in (ct_elbo, score_entropy):
    traced = torch.compile(lambda *given: loss(head, *given), fullgraph=True, dynamic=False, backend="aot_eager")
    for scale in (1e-3, 0.1, 0.9):
        t = scale * (0.1 + torch.rand(6, generator=generator, dtype=torch.float64)).to(device)
        x_0, x_t = torch.randint(9, (2, 6, 4), generator=generator).to(device)
        output = torch.randn(6, 4, 9, generator=generator).to(device)
        torch.testing.assert_close(traced(output, x_0, x_t, t), loss(head, output, x_0, x_t, t))
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
"""


def gaussian(states: int, jump: float = 2.0, stationary: float = 9.0) -> m2s.RateMatrix:
    process = m2s.RateMatrix.gaussian(states, m2s.Exponential(8.0), jump, stationary)
    assert process.prepare(CPU)
    return process


def times(process: m2s.RateMatrix) -> torch.Tensor:
    """sigma of 0, tiny, integer numbers of jumps, a rounding below them, beyond the limit, and in between."""
    fastest = float(-process.generator.diagonal().min())
    integers = torch.tensor([1.0, 2.0, BASE - 1, BASE, BASE + 1, BASE**2 - 1, BASE**2], dtype=torch.float64)
    ends = torch.tensor([0.0, 1e-300, 1e-12, 1e-3, 1e4, 1e30, torch.inf], dtype=torch.float64)
    between = 10 ** torch.linspace(-5, 3, 40, dtype=torch.float64)
    return torch.cat([ends, torch.cat([integers, torch.nextafter(integers, torch.zeros(())), between]) / fastest])


@pytest.mark.parametrize("states", [2, 5, 17, 40])
def test_every_entry_agrees_with_doubling(states: int) -> None:
    process = gaussian(states)
    sigma = times(process)
    found, expected = ExpmTable.of(process.generator)(sigma), expm(process.generator, sigma)
    assert (found >= 0).all() and found.isfinite().all()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("t", [1e-6, 0.01, 0.5, 1.0])
def test_every_entry_in_eighty_digits(t: float) -> None:
    process = gaussian(7, 1.5, 2.0)
    with mpmath.workdps(80):
        rates = mpmath.matrix(process.generator.tolist())
        for i in range(7):  # rows that sum to zero in these digits
            rates[i, i] = -sum(rates[i, j] for j in range(7) if j != i)
        exact = mpmath.expm(rates * mpmath.mpf(8) * mpmath.mpf(t), method="taylor")
        expected = np.array([[float(exact[i, j]) for j in range(7)] for i in range(7)])
    np.testing.assert_allclose(process.kernel(torch.tensor(t, dtype=torch.float64)), expected, rtol=1e-12)


def test_a_matrix_does_not_depend_on_its_batch() -> None:
    process = gaussian(17)
    sigma = times(process)
    table = ExpmTable.of(process.generator)
    everything = table(sigma)
    for part in (slice(0, 1), slice(3, 20), slice(20, None)):
        np.testing.assert_allclose(table(sigma[part]), everything[part], rtol=1e-14, atol=1e-300)
    np.testing.assert_allclose(table(sigma[:12].view(3, 4)), everything[:12].view(3, 4, 17, 17), rtol=1e-14, atol=1e-300)
    np.testing.assert_allclose(table(sigma[2]), everything[2], rtol=1e-14, atol=1e-300)


@pytest.mark.parametrize(
    "process",
    [
        m2s.RateMatrix.absorbing(5, m2s.Linear()),
        m2s.RateMatrix.birth_death(torch.ones(9), torch.zeros(9), m2s.Linear()),
        m2s.RateMatrix.birth_death(torch.ones(150), torch.ones(150), m2s.Linear()),
        m2s.RateMatrix(torch.zeros(3, 3), m2s.Linear()),
    ],
    ids=["absorbing mask", "pure birth", "slow mixing", "no rates"],
)
def test_chains_without_tables_are_unchanged(process: m2s.RateMatrix) -> None:
    t = torch.tensor([0.1, 0.5], dtype=torch.float64)
    before = process.kernel(t)
    assert not process.prepare(CPU)
    assert torch.equal(process.kernel(t), before)


def test_no_tables_without_float64() -> None:
    assert not m2s.RateMatrix.gaussian(5, m2s.Linear()).prepare(torch.device("mps"))


def test_losses_compile_to_one_graph() -> None:
    """The losses compile to one graph, and it is right for times that need different numbers of doublings."""
    passes(LOSSES)
