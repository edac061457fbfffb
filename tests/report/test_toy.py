"""Figure 1 against hand-derived forms, an independent ODE solver and brute force."""

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.optimize import minimize

from m2s.errors import UserError
from m2s.report.toy import DATA_DISTRIBUTION, TIME, ToyData, random_distribution, toy_data


@pytest.fixture(scope="module")
def data() -> ToyData:
    return toy_data(points=25, step=0.04)


def transition_matrix(t: float) -> np.ndarray:
    return (1 - t) * np.eye(3) + t / 3


def marginal(t: float) -> np.ndarray:
    return np.asarray(DATA_DISTRIBUTION) @ transition_matrix(t)


def bridge(t: float, k: int) -> np.ndarray:
    """B[y, z] = P(y|z) / P(k|z), from the transition matrix alone."""
    return (transition_matrix(t) / transition_matrix(t)[:, [k]]).T


def nearest(score: np.ndarray, t: float, k: int) -> np.ndarray:
    """argmin |B mu - s| over the simplex by scipy, over the candidates."""
    rows = [y for y in range(3) if y != k]
    matrix = bridge(t, k)[rows]
    scale = np.abs(matrix).max()
    solution = minimize(
        lambda mu: np.sum(((matrix @ mu - score[rows]) / scale) ** 2),
        np.full(3, 1 / 3),
        jac=lambda mu: 2 * matrix.T @ (matrix @ mu - score[rows]) / scale**2,
        bounds=[(0, 1)] * 3,
        constraints={"type": "eq", "fun": lambda mu: mu.sum() - 1, "jac": lambda mu: np.ones(3)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 300},
    )
    return bridge(t, k) @ solution.x


def terminal_tv(c: float, y1: int) -> float:
    """The reverse equation in t for rates c-perturbed at y1, by scipy's eighth-order method; it starts at sigma = 20."""

    def slope(sigma: float, q: np.ndarray) -> np.ndarray:
        p = marginal(-np.expm1(-sigma))
        rates = p[None, :] / p[:, None] / 3
        rates[:, y1] *= c
        np.fill_diagonal(rates, 0)
        return -(q @ rates - q * rates.sum(1))

    solved = solve_ivp(slope, (20.0, 0.0), np.full(3, 1 / 3), method="DOP853", rtol=1e-11, atol=1e-13)
    return 0.5 * float(np.abs(solved.y[:, -1] - np.asarray(DATA_DISTRIBUTION)).sum())


def test_exact_score_by_hand(data):
    p = marginal(TIME)
    assert (data.current, data.first, data.second) == (2, 1, 0)
    np.testing.assert_allclose(data.score, [p[1] / p[2], p[0] / p[2]], rtol=1e-14)
    posterior = np.asarray(DATA_DISTRIBUTION) * transition_matrix(TIME)[:, 2]
    np.testing.assert_allclose(data.posterior, posterior / posterior.sum(), rtol=1e-14)


def test_excess_and_gradient_are_h_and_its_derivative(data):
    s = data.score[0]
    np.testing.assert_allclose(data.excess, s * (data.c - 1 - np.log(data.c)), rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(data.gradient, s * (data.c - 1), rtol=1e-12, atol=1e-14)


def test_band_and_box_ends_by_hand(data):
    """mu~_{y1} >= 0: (1 + 1/rho) z1 >= z2;  mu~_{y2} >= 0: (1 + 1/rho) z2 >= z1;  mu~_k >= 0: z1 + z2 <= (1-rho)(2 + 1/rho)."""
    rho = (TIME / 3) / (1 - TIME + TIME / 3)
    s1, s2 = data.score
    z2 = s2 - rho
    low = z2 / (1 + 1 / rho)
    high = min((1 + 1 / rho) * z2, (1 - rho) * (2 + 1 / rho) - z2)
    np.testing.assert_allclose(data.band, [(rho + low) / s1, (rho + high) / s1], rtol=1e-13)
    np.testing.assert_allclose(data.box, [rho / s1, 1 / (rho * s1)], rtol=1e-13)
    assert data.box[0] < data.band[0] < 1 < data.band[1] < data.box[1]
    inside = (data.c > data.band[0] * (1 + 1e-9)) & (data.c < data.band[1] * (1 - 1e-9))
    outside = (data.c < data.band[0] * (1 - 1e-9)) | (data.c > data.band[1] * (1 + 1e-9))
    assert (data.signed[inside].min(1) > 0).all() and (data.signed[outside].min(1) < 0).all()


def test_tv_is_zero_at_the_optimum_only(data):
    error = data.integrator_error
    assert error < 2e-5
    for tv in (data.tv, data.tv_projected):
        assert data.at(tv, 1.0) < 1e-8
        away = np.abs(np.log(data.c)) > 0.01
        assert (tv[away] > 100 * error).all()
        assert (np.diff(tv[data.c <= 1]) < error).all() and (np.diff(tv[data.c >= 1]) > -error).all()
    assert (data.tv_projected <= data.tv + error).all()


@pytest.mark.parametrize("name", ["lowest", "c_-", "c_a", "highest"])
def test_tv_against_an_independent_solver(data, name):
    c = {"lowest": data.c[0], "c_-": data.box[0], "c_a": data.c_a, "highest": data.c[-1]}[name]
    assert data.at(data.tv, c) == pytest.approx(terminal_tv(c, data.first), abs=2e-6)


def test_projected_rates_against_a_general_optimizer(data):
    """The second generator at a few times: rates of the nearest realizable score, found by scipy for every state."""
    from m2s import Linear, Uniform
    from m2s.report.toy import reverse_generators

    times, factors = [0.2, 0.5, 0.8], [0.2, 1.0, 3.0]
    wide = torch.float64
    generators = reverse_generators(
        torch.tensor(DATA_DISTRIBUTION, dtype=wide),
        torch.tensor(factors, dtype=wide),
        data.first,
        torch.tensor(times, dtype=wide),
        Uniform(3, Linear()),
    )
    for i, t in enumerate(times):
        for j, c in enumerate(factors):
            for x in range(3):
                score = marginal(t) / marginal(t)[x]
                score[data.first] *= c if x != data.first else 1
                expected = np.where(np.arange(3) == x, 0, nearest(score, t, x) / 3)
                expected[x] = -expected.sum()
                np.testing.assert_allclose(generators[i, 1, j, x], expected, atol=2e-6)


def test_point_a_is_in_the_box_without_a_posterior(data):
    rho = data.rho
    assert all(rho < s < 1 / rho for s in data.a)
    full = np.ones(3)
    full[[data.first, data.second]] = data.a
    system = np.vstack([np.delete(bridge(TIME, data.current), data.current, 0), np.ones(3)])
    signed = np.linalg.solve(system, [*np.delete(full, data.current), 1.0])
    np.testing.assert_allclose(data.a_signed, signed, rtol=1e-11)
    assert signed.min() < -0.01


def test_point_b_is_the_nearest_on_the_boundary(data):
    assert min(data.b_posterior) == 0 and sum(data.b_posterior) == pytest.approx(1)
    steps = 1000
    i, j = np.meshgrid(np.arange(steps + 1), np.arange(steps + 1), indexing="ij")
    inside = i + j <= steps
    simplex = np.stack([i[inside], j[inside], steps - i[inside] - j[inside]], 1) / steps
    scores = simplex @ bridge(TIME, data.current).T
    distances = np.hypot(scores[:, data.first] - data.a[0], scores[:, data.second] - data.a[1])
    distance = np.hypot(data.b[0] - data.a[0], data.b[1] - data.a[1])
    assert distance <= distances.min() + 1e-12
    assert distance == pytest.approx(distances.min(), abs=1e-4)
    best = scores[distances.argmin()]
    np.testing.assert_allclose([best[data.first], best[data.second]], data.b, atol=0.01)


def test_triangle_corners_by_hand(data):
    rho = data.rho
    np.testing.assert_allclose(data.triangle, [(rho, rho), (1 / rho, 1), (1, 1 / rho)], rtol=1e-14)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_distributions_give_the_same_picture(seed):
    other = toy_data(random_distribution(seed), points=5, step=0.2)
    assert sum(other.distribution) == pytest.approx(1) and min(other.distribution) >= 0.05
    assert other.box[0] < other.band[0] < 1 < other.band[1] < other.box[1]
    assert min(other.a_signed) < 0 and min(other.b_posterior) == 0


@pytest.mark.parametrize("distribution", [(0.5, 0.5), (0.5, 0.5, 0.0), (0.5, 0.4, 0.3)])
def test_invalid_distribution_is_an_error(distribution):
    with pytest.raises(UserError, match="distribution"):
        toy_data(distribution)


def test_invalid_time_is_an_error():
    with pytest.raises(UserError, match="time"):
        toy_data(time=1.0)
