"""Schedules: relative accuracy at both ends of time, and the same process in closed form and tabulated."""

import mpmath
import numpy as np
import pytest
import torch

import m2s

SCHEDULES = [m2s.Linear(), m2s.Exponential(4.0), m2s.LogLinear(1e-3), m2s.Geometric(1e-3, 8.0), m2s.Cosine()]
SCHEDULES += [m2s.GeometricRate(7.0)]
SCHEDULES += [m2s.Rescaled(m2s.Linear(), 1e-4), m2s.Rescaled(m2s.Cosine(), 1e-4), m2s.Rescaled(m2s.Geometric(1e-3, 8.0), 0.2)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_tabulated_agrees_with_rank_one(schedule: m2s.Schedule) -> None:
    """`RateMatrix.uniform` and `.absorbing` are `Uniform` and `Absorbing` to 1e-12, also between two times."""
    t = torch.tensor([0.0, 1e-6, 0.01, 0.5, 0.99, 1.0], dtype=torch.float64)
    s = t * 0.7
    for table, closed in (
        (m2s.RateMatrix.uniform(7, schedule), m2s.Uniform(7, schedule)),
        (m2s.RateMatrix.absorbing(7, schedule), m2s.Absorbing(7, schedule)),
    ):
        np.testing.assert_allclose(table.kernel(t), closed.kernel(t), atol=1e-12)
        np.testing.assert_allclose(table.step_kernel(s, t), closed.step_kernel(s, t), atol=1e-12)
        np.testing.assert_allclose(table.rates(t[:-1]), closed.rates(t[:-1]), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(table.reference(), closed.reference(), atol=1e-12)


def at(t: float) -> torch.Tensor:
    return torch.tensor(t, dtype=torch.float64)


def survival(schedule: m2s.Schedule, t: mpmath.mpf) -> mpmath.mpf:
    """alpha_t by its definition, in the working precision."""
    if isinstance(schedule, m2s.Rescaled):
        eps = mpmath.mpf(schedule.eps)
        return eps + (1 - 2 * eps) * survival(schedule.schedule, t)
    return {
        m2s.Linear: lambda: 1 - t,
        m2s.Exponential: lambda: mpmath.exp(-4 * t),
        m2s.LogLinear: lambda: 1 - (1 - mpmath.mpf(1e-3)) * t,
        m2s.Geometric: lambda: mpmath.exp(-(mpmath.mpf(1e-3) ** (1 - t)) * mpmath.mpf(8) ** t),
        m2s.GeometricRate: lambda: mpmath.exp(-7 * (mpmath.mpf(100) ** t - 1) / 99),
        m2s.Cosine: lambda: 1 - mpmath.cos(mpmath.pi / 2 * (1 - t)),
    }[type(schedule)]()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_in_eighty_digits(schedule: m2s.Schedule) -> None:
    """alpha, beta, sigma, their slopes and 1 - alpha_t/alpha_s keep their relative accuracy at both ends of time."""
    with mpmath.workdps(80):
        for t in (1e-12, 1e-3, 0.4, 0.75, 1 - 1e-3, 1 - 1e-12):
            exact = mpmath.mpf(t)
            alpha = survival(schedule, exact)
            step = exact * (1 - exact) * mpmath.mpf(10) ** -12
            slope = (survival(schedule, exact + step) - survival(schedule, exact - step)) / (2 * step)
            early = t * 0.999999
            one_minus_ratio = 1 - alpha / survival(schedule, mpmath.mpf(early))
            for found, expected in (
                (schedule.alpha(at(t)), alpha),
                (schedule.beta(at(t)), 1 - alpha),
                (schedule.sigma(at(t)), -mpmath.log(alpha)),
                (schedule.alpha_prime(at(t)), slope),
                (schedule.sigma_prime(at(t)), -slope / alpha),
                (schedule.one_minus_alpha_ratio(at(early), at(t)), one_minus_ratio),
            ):
                assert float(found) == pytest.approx(float(expected), rel=1e-13)
