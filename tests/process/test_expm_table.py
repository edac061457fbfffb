"""Kernels of many times by tables: as exact as one by one, and without a look at the times."""

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
    """sigma: none, next to none, whole jumps, a rounding below them, the highest digits, past the limit, and between."""
    fastest = float(-process.generator.diagonal().min())
    whole = torch.tensor([1.0, 2.0, BASE - 1, BASE, BASE + 1, BASE**2 - 1, BASE**2], dtype=torch.float64)
    ends = torch.tensor([0.0, 1e-300, 1e-12, 1e-3, 1e4, 1e30, torch.inf], dtype=torch.float64)
    between = 10 ** torch.linspace(-5, 3, 40, dtype=torch.float64)
    return torch.cat([ends, torch.cat([whole, torch.nextafter(whole, torch.zeros(())), between]) / fastest])


@pytest.mark.parametrize("states", [2, 5, 17, 40])
def test_every_entry_is_that_of_the_doubled_step(states: int) -> None:
    process = gaussian(states)
    sigma = times(process)
    found, wanted = ExpmTable.of(process.generator)(sigma), expm(process.generator, sigma)
    assert (found >= 0).all() and found.isfinite().all()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("t", [1e-6, 0.01, 0.5, 1.0])
def test_every_entry_in_eighty_digits(t: float) -> None:
    process = gaussian(7, 1.5, 2.0)
    with mpmath.workdps(80):
        rates = mpmath.matrix(process.generator.tolist())
        for i in range(7):  # rows that sum to zero in these digits
            rates[i, i] = -sum(rates[i, j] for j in range(7) if j != i)
        exact = mpmath.expm(rates * mpmath.mpf(8) * mpmath.mpf(t), method="taylor")
        wanted = np.array([[float(exact[i, j]) for j in range(7)] for i in range(7)])
    np.testing.assert_allclose(process.kernel(torch.tensor(t, dtype=torch.float64)), wanted, rtol=1e-12)


def test_a_kernel_does_not_depend_on_the_others_of_its_batch() -> None:
    process = gaussian(17)
    sigma = times(process)
    ladder = ExpmTable.of(process.generator)
    whole = ladder(sigma)
    for part in (slice(0, 1), slice(3, 20), slice(20, None)):
        np.testing.assert_allclose(ladder(sigma[part]), whole[part], rtol=1e-14, atol=1e-300)
    np.testing.assert_allclose(ladder(sigma[:12].view(3, 4)), whole[:12].view(3, 4, 17, 17), rtol=1e-14, atol=1e-300)
    np.testing.assert_allclose(ladder(sigma[2]), whole[2], rtol=1e-14, atol=1e-300)


@pytest.mark.parametrize(
    "process",
    [
        m2s.RateMatrix.absorbing(5, m2s.Linear()),
        m2s.RateMatrix.birth_death(torch.ones(9), torch.zeros(9), m2s.Linear()),
        m2s.RateMatrix.birth_death(torch.ones(150), torch.ones(150), m2s.Linear()),
        m2s.RateMatrix(torch.zeros(3, 3), m2s.Linear()),
    ],
    ids=["a mask stays", "only upwards", "many jumps from end to end", "nothing moves"],
)
def test_chains_without_tables_keep_their_kernels(process: m2s.RateMatrix) -> None:
    t = torch.tensor([0.1, 0.5], dtype=torch.float64)
    before = process.kernel(t)
    assert not process.prepare(CPU)
    assert torch.equal(process.kernel(t), before)


def test_no_tables_without_float64() -> None:
    assert not m2s.RateMatrix.gaussian(5, m2s.Linear()).prepare(torch.device("mps"))


def test_the_losses_are_one_graph() -> None:
    """Traced whole, with no look at a number on the way, and then called at times that double more and less often."""
    passes(LOSSES)
