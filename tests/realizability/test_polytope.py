"""Box, polytope, classes, projection and affine inverse, against linear programs and the enumeration of `oracle.py`."""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import m2s
from oracle import CASES
from theorem_tools import EVERY, UNIFORM, bridge_rows, case, tensor


def bridge_system(process: m2s.Uniform, t: float, k: int) -> np.ndarray:
    """B_{t,k} of Eq. 7 from rho alone: 1 off the diagonal, 1/rho at z = y, rho at z = k."""
    beta = t
    replaced = beta / process.vocab
    rho = replaced / (1 - beta + replaced)
    matrix = np.ones((process.vocab, process.vocab))
    np.fill_diagonal(matrix, 1 / rho)
    matrix[:, k] = rho
    return np.delete(matrix, k, 0)


def full_score(values: np.ndarray, k: int) -> torch.Tensor:
    """Candidate scores with the ignored entry put back, which may be any number."""
    return tensor(np.insert(values, k, 123.0))


@pytest.mark.parametrize("t", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("vocab", [2, 3, 7])
def test_box_and_polytope(vocab: int, t: float) -> None:
    """Eq. 12: the polytope lies in [rho, 1/rho]^{K-1}; it is the box for K = 2 and strictly smaller for K > 2."""
    process, k = m2s.Uniform(vocab, m2s.Linear()), vocab // 2
    time, x_t = torch.tensor(t, dtype=torch.float64), torch.tensor(k)
    matrix = bridge_system(process, t, k)
    rho = (t / vocab) / (1 - t + t / vocab)
    low, high = m2s.box(x_t, time, process)
    np.testing.assert_allclose(np.delete(low.numpy(), k), rho, rtol=1e-13)
    np.testing.assert_allclose(np.delete(high.numpy(), k), 1 / rho, rtol=1e-13)
    vertices = matrix.T
    assert (vertices >= rho * (1 - 1e-12)).all()
    assert (vertices <= (1 + 1e-12) / rho).all()

    corner = np.full(vocab - 1, 1 / rho)
    feasible = (
        linprog(np.zeros(vocab), A_eq=np.vstack([matrix * rho, np.ones(vocab)]), b_eq=np.append(corner * rho, 1)).status == 0
    )
    assert feasible == (vocab == 2)
    assert (int(m2s.classify(full_score(corner, k), x_t, time, process)) > 1) == feasible
    signed = m2s.affine_inverse(full_score(corner, k), x_t, time, process)
    assert float(signed.min()) == pytest.approx(0, abs=1e-12) if vocab == 2 else float(signed.min()) < -1e-3

    grid = np.linspace(rho, 1 / rho, 9)
    for value in grid[1:-1]:
        point = np.full(vocab - 1, value)
        exists = (
            linprog(np.zeros(vocab), A_eq=np.vstack([matrix * rho, np.ones(vocab)]), b_eq=np.append(point * rho, 1)).status == 0
        )
        assert (int(m2s.classify(full_score(point, k), x_t, time, process)) == 3) == exists


@pytest.mark.parametrize("vocab", [3, 5])
def test_box_and_polytope_classes(vocab: int) -> None:
    """The four classes of section 4 on points built to be in each, from a (signed) posterior or pushed out of the box."""
    process, k, t = m2s.Uniform(vocab, m2s.Linear()), 0, 0.6
    matrix = bridge_system(process, t, k)
    generator = np.random.default_rng(0)
    scores, expected = [], []
    for _ in range(50):
        mu = generator.dirichlet(np.ones(vocab))
        scores.append(matrix @ mu)
        expected.append(3)
        for depth, answer in ((1e-4, 1), (5e-7, 2)):
            signed = mu.copy()
            at = generator.integers(vocab)
            signed[at] = 0
            signed *= (1 + depth) / signed.sum()
            signed[at] = -depth
            if at == k or (signed[k] > 1e-2):
                scores.append(matrix @ signed)
                expected.append(answer)
        outside = matrix @ mu
        outside[generator.integers(vocab - 1)] = generator.choice([0.99 * matrix.min(), 1.01 * matrix.max()])
        scores.append(outside)
        expected.append(0)
    score = torch.stack([full_score(s, k) for s in scores])
    x_t = torch.full((len(scores),), k)
    found = m2s.classify(score, x_t, torch.tensor(t, dtype=torch.float64), process).numpy()
    # a signed posterior negative at k can also push a coordinate out of the box
    rho = (t / vocab) / (1 - t + t / vocab)
    beyond = np.array([(s < rho * (1 - 1e-6)).any() or (s > (1 + 1e-6) / rho).any() for s in scores])
    np.testing.assert_array_equal(found, np.where(beyond, 0, expected))
    assert set(found) == {0, 1, 2, 3}


@EVERY
@pytest.mark.parametrize("t", [0.05, 0.6])
def test_box_is_the_range_of_the_bridge(name: str, t: float) -> None:
    """The box of any process is [min_z, max_z] of P_t(y|z)/P_t(k|z)."""
    process, oracle = case(name)
    x, time = oracle.noisy[:: max(1, len(oracle.noisy) // 40)], torch.tensor(t, dtype=torch.float64)
    low, high = m2s.box(tensor(x), time, process)
    kernel, weight = oracle.noise.transition_matrix(t)[: oracle.noise.vocab], oracle.weights(x, t)
    for n, i, y in zip(*np.nonzero(weight), strict=True):
        ratio = kernel[:, y] / kernel[:, x[n, i]]
        assert float(low[n, i, y]) == pytest.approx(ratio.min(), rel=1e-11)
        assert float(high[n, i, y]) == pytest.approx(ratio.max(), rel=1e-11)


@EVERY
@pytest.mark.parametrize("t", [0.05, 0.6])
def test_exact_scores_are_realizable(name: str, t: float) -> None:
    """A score that a posterior does induce is never called outside or material, whether or not that posterior is unique."""
    process, oracle = case(name)
    x = oracle.noisy
    classes = m2s.classify(tensor(oracle.score(x, t)), tensor(x), torch.tensor(t, dtype=torch.float64), process).numpy()
    assert (classes[(oracle.weights(x, t) > 0).any(-1)] >= 2).all()


def test_realizable_scores_of_an_ill_conditioned_bridge_are_realizable() -> None:
    """Where rounding hides the signed posterior (a Gaussian chain near its end) the distance to the nearest one decides."""
    process = m2s.RateMatrix.gaussian(16, m2s.Linear())
    t = torch.full((8,), 0.999, dtype=torch.float64)
    x_t = process.corrupt(torch.randint(16, (8, 4)), t)
    mu = torch.softmax(torch.randn(8, 4, 16, dtype=torch.float64), -1)
    score = m2s.score_from_posterior(mu, x_t, t, process)
    assert m2s.affine_inverse(score, x_t, t, process).min() < -1
    assert (m2s.classify(score, x_t, t, process) >= 2).all()
    assert (m2s.classify(score * torch.exp(torch.randn_like(score)), x_t, t, process) < 2).all()


@pytest.mark.parametrize(
    "name", [*UNIFORM, "absorbing-linear", "absorbing-cosine", "hybrid-0.2", "hybrid-0.6", "gaussian", "tabulated-absorbing"]
)
@pytest.mark.parametrize("t", [0.02, 0.5, 0.95])
def test_projection_recovers_posterior(name: str, t: float) -> None:
    """Proposition 4.5: projection and affine inverse of the exact score are the exact posterior, wherever B_+ is injective."""
    process, oracle = case(name)
    x, time = oracle.noisy, torch.tensor(t, dtype=torch.float64)
    score, posterior = tensor(oracle.score(x, t)), oracle.posterior(x, t)
    scrambled = score.scatter(-1, tensor(x).unsqueeze(-1), -7.0)
    injective = np.array(
        [
            np.linalg.matrix_rank(np.vstack([bridge_rows(oracle, k, t), np.ones(oracle.noise.vocab)]), tol=1e-9)
            == oracle.noise.vocab
            if (oracle.weights(np.full((1, oracle.length), k), t) > 0).any()
            else False
            for k in range(oracle.noise.states)
        ]
    )[x]
    assert injective.any()
    precision = 1e-9 if process.tabulated is not None else 1e-11
    for inverse in (m2s.project, m2s.affine_inverse):
        np.testing.assert_allclose(
            inverse(score, tensor(x), time, process).numpy()[injective], posterior[injective], atol=precision
        )
        np.testing.assert_allclose(
            inverse(scrambled, tensor(x), time, process).numpy()[injective], posterior[injective], atol=precision
        )
    head = m2s.LogScore(process)
    np.testing.assert_allclose(
        head.posterior(torch.log(score), tensor(x), time).numpy()[injective], posterior[injective], atol=precision
    )


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("t", [0.05, 0.5, 0.9])
def test_projection_is_the_nearest(name: str, t: float) -> None:
    """Eq. 11 for any score: mu is in the simplex and meets the KKT conditions of min |B_+ mu - s|^2, which are enough."""
    process, oracle = case(name)
    vocab, states = oracle.noise.vocab, oracle.noise.states
    generator, time = np.random.default_rng(3), torch.tensor(t, dtype=torch.float64)
    moved = 0
    for k in range(states):
        if not (oracle.noise.rates(t)[np.arange(states) != k, k] > 0).any():
            continue
        counted = [y for y in range(states) if y != k and oracle.noise.rates(t)[y, k] > 0]
        rows = bridge_rows(oracle, k, t)
        center = rows @ np.full(vocab, 1 / vocab)
        score = np.ones((40, states))
        score[:, counted] = center * np.exp(generator.normal(size=(40, len(counted))) * np.linspace(0.05, 3, 40)[:, None])
        mu = m2s.project(tensor(score), torch.full((40,), k), time, process).numpy()
        assert (mu >= -1e-12).all()
        assert (mu[:, vocab:] == 0).all()
        np.testing.assert_allclose(mu.sum(-1), 1, atol=1e-12)
        gap = mu[:, :vocab] @ rows.T - score[:, counted]
        gradient = gap @ rows
        scale = (
            np.linalg.norm(rows, axis=0).max() * np.linalg.norm(score[:, counted], axis=-1)
            + np.linalg.norm(rows, axis=0).max() ** 2
        )
        multiplier = (mu[:, :vocab] * gradient).sum(-1, keepdims=True)
        assert ((gradient - multiplier) / scale[:, None] > -1e-8).all()
        moved += (np.linalg.norm(gap, axis=-1) > 1e-6).sum()
    assert moved > 10


@pytest.mark.parametrize(
    "process", [m2s.Uniform(257, m2s.Linear()), m2s.Absorbing(257, m2s.Linear()), m2s.Hybrid(257, 0.3)], ids=repr
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_projection_is_a_posterior(process: m2s.Process, dtype: torch.dtype) -> None:
    """Eq. 11: what comes back lies in the simplex, so that no entry is negative, not even by rounding."""
    generator = torch.Generator().manual_seed(0)
    score = torch.exp(2 * torch.randn(500, process.states, dtype=dtype, generator=generator))
    x_t = torch.randint(process.states, (500,), generator=generator)
    mu = m2s.project(score, x_t, torch.tensor(0.5, dtype=torch.float64), process)
    assert float(mu.min()) >= 0
    assert float((mu.sum(-1) - 1).abs().max()) < (1e-5 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("t", [1e-3, 0.5, 0.999])
def test_affine_inverse_is_the_closed_form(k: int, t: float) -> None:
    """Appendix D.1 for an arbitrary score: the closed form, which solves [B; 1] mu = [s; 1]."""
    process = m2s.Uniform(4, m2s.Linear())
    generator = np.random.default_rng(k)
    score = np.exp(2 * generator.normal(size=(20, 3)))
    rho = (t / 4) / (1 - t + t / 4)
    d, b = 1 - rho, (1 - rho) / rho
    m = (score - rho).sum(-1, keepdims=True) / (d * (3 + 1 / rho))
    expected = np.insert((score - rho - d * m) / b, k, 1 - m[:, 0], axis=-1)
    system = np.vstack([bridge_system(process, t, k), np.ones(4)])
    np.testing.assert_allclose(system @ expected.T, np.vstack([score.T, np.ones(20)]), rtol=1e-8, atol=1e-8)
    x_t, time = torch.full((20,), k), torch.tensor(t, dtype=torch.float64)
    found = m2s.affine_inverse(tensor(np.insert(score, k, 1.0, axis=-1)), x_t, time, process).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())
