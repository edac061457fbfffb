"""Ordinal tau-leaping and Campbell's corrector: order of convergence, distributions, and errors."""

import itertools
from functools import lru_cache

import numpy as np
import pytest
import scipy.stats
import torch

import closed_forms as forms
import exact_steps
import m2s
from closed_forms import log
from exact_steps import Sites
from m2s.samplers import CounterNoise, ForwardBackward, Prediction, TauLeaping
from m2s.samplers import poisson_jumps as leaps
from oracle import CASES, Case, Oracle, exponential, gaussian_rates, tabulated

LEVELS = 4
LONG = Case(  # x_1 is almost independent of x_0, so that the steps are the only source of error
    m2s.RateMatrix.gaussian(LEVELS, m2s.Exponential(8.0), 2.0, 1.5),
    tabulated(gaussian_rates(LEVELS, 2.0, 1.5), exponential(8.0)),
    2,
)


def added(rates: np.ndarray, k: np.ndarray, step: float) -> np.ndarray:
    """The distribution of k plus a Poisson number of displacements y - k, in proportion to the rates, clipped to the levels.

    Its characteristic function is e^{E (phi - 1)}, phi that of one displacement, on a ring that is too large to wrap around.
    """
    levels, around = rates.shape[-1], 128
    out = np.zeros(rates.shape)
    for level in range(levels):
        ring = np.zeros((*k.shape, around))
        ring[..., (np.arange(levels) - level) % around] = step * rates
        distribution = np.fft.ifft(np.exp(np.fft.fft(ring, axis=-1) - ring.sum(-1, keepdims=True)), axis=-1).real
        displacement = (np.arange(around) + around // 2) % around - around // 2
        ends = forms.one_hot(np.clip(level + displacement, 0, levels - 1), levels)
        out = np.where((k == level)[..., None], distribution @ ends, out)
    return out


FORMS = {"tau_leaping": forms.tau_leap, "ordinal_tau_leaping": added, "euler": forms.euler}


def terminal(sampler: str, steps: int) -> np.ndarray:
    """The exact distribution of samples with exact predictions."""

    def closed_form(rates: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return FORMS[sampler](rates, k, t - s)

    return forms.terminal_distribution(
        LONG.process, 2, lambda x, t: exact_rates(t), closed_form, forms.grid("linear", steps), True, 1e-6
    )


@lru_cache(maxsize=2000)
def exact_rates(t: float) -> np.ndarray:
    """The rates of the reverse process at every state."""
    oracle = LONG.oracle()
    return oracle.reverse_rates(oracle.score(oracle.noisy, t), oracle.noisy, t)


@pytest.mark.parametrize("sampler", FORMS)
def test_ordinal_leaps_converge_with_order_one(sampler: str) -> None:
    """With exact predictions the distance to the data halves with the step, once steps rarely have more than one jump."""
    distribution, steps = LONG.oracle().distribution, [256, 512, 1024]
    distance = [forms.total_variation(terminal(sampler, n), distribution) for n in steps]
    order = -np.diff(np.log2(distance))
    assert (np.abs(order - 1) < 0.1).all() and distance[-1] < 0.02, f"{sampler}: orders {order}, distances {distance}"


def test_sites_with_many_jumps_stay_unless_jumps_add_up() -> None:
    """Why few steps are inaccurate at high rates: a Poisson number of mean E is one with probability E e^{-E}, and tokens
    without an order move with exactly one jump only."""
    rates = np.where(np.arange(LEVELS) == 1, 0.0, np.full((1, 1, LEVELS), 4.0))
    k, stays = np.array([[1]]), 1 - 12 * np.exp(-12)
    assert forms.tau_leap(rates, k, 1.0)[0, 0, 1] == pytest.approx(stays) and stays > 0.9999
    assert added(rates, k, 1.0)[0, 0, 1] < 0.2
    distribution = LONG.oracle().distribution
    few = [forms.total_variation(terminal("tau_leaping", n), distribution) for n in (4, 8)]
    assert few[1] > 0.95 * few[0] > 0.4  # twice the steps do not help while E is well above one
    assert forms.total_variation(terminal("ordinal_tau_leaping", 64), distribution) < 0.85 * forms.total_variation(
        terminal("tau_leaping", 64), distribution
    )


def corrector(oracle: Oracle, x: np.ndarray, t: float) -> np.ndarray:
    """Forward plus reverse rates of every site, 0 at the current token, by the oracle."""
    forward = oracle.noise.rates(t)[x]
    np.put_along_axis(forward, x[..., None], 0.0, -1)
    return forward + oracle.reverse_rates(oracle.score(x, t), x, t)


def leap_matrix(sampler: ForwardBackward, case: Case, oracle: Oracle, t: float, purposes: list) -> np.ndarray:
    """The transition matrix of one leap of the corrector over all states, from the exact distribution of the step."""
    x = oracle.noisy
    head = m2s.Posterior(case.process)
    flat, time = log(oracle.posterior(x, t)).reshape(-1, case.process.states), np.full(x.size, t)
    problem = Sites(head, flat, x.ravel(), time, time, time)
    mass = sampler.leap * corrector(oracle, x, t).sum(-1).reshape(-1, 1)
    hints = {"route": (np.exp(-mass) * (1 + mass * [[0.01, 0.5, 0.99]])).clip(0, exact_steps.LARGEST)}
    distributions = problem.distribution(sampler, purposes, hints)
    np.testing.assert_allclose(distributions.sum(-1), 1, atol=1e-12)
    return forms.joint_step(distributions.reshape(*x.shape, -1))


@pytest.mark.parametrize("name", ["gaussian", "birth-death", "uniform-linear", "hybrid-0.2", "absorbing-linear"])
@pytest.mark.parametrize("t", [0.3, 0.8])
def test_the_corrector_preserves_the_distribution(name: str, t: float) -> None:
    """p_t M(h) - p_t is of order h^2 and M(h) - 1 of order h, with M from the step: p_t is the stationary distribution of
    forward plus reverse rates."""
    case = CASES[name]
    oracle = Oracle(case.noise, 2)
    p, moved, changed = oracle.marginal(t), [], []
    for leap in (2e-3, 1e-3, 5e-4):
        matrix = leap_matrix(ForwardBackward(ordinal=False, leap=leap), case, oracle, t, ["route", "token"])
        moved.append(np.abs(p @ matrix - p).sum())
        changed.append(p @ (1 - np.diag(matrix)))
    np.testing.assert_allclose(np.log2(np.divide(moved[:-1], moved[1:])), 2, atol=0.1)
    np.testing.assert_allclose(np.log2(np.divide(changed[:-1], changed[1:])), 1, atol=0.1)


@pytest.mark.parametrize("name", ["gaussian", "uniform-linear"])
def test_the_corrector_uses_forward_plus_reverse_rates(name: str) -> None:
    """One leap against the closed form, for jumps that do not add up and for ordinal jumps."""
    case, t, leap = CASES[name], 0.4, 0.05
    oracle = Oracle(case.noise, 2)
    x = oracle.noisy
    rates = corrector(oracle, x, t)
    found = leap_matrix(ForwardBackward(ordinal=False, leap=leap), case, oracle, t, ["route", "token"])
    np.testing.assert_allclose(found, forms.joint_step(forms.tau_leap(rates, x, leap)), atol=1e-11)
    count = 20_000
    head = m2s.Posterior(case.process)
    rows = np.random.default_rng(0).integers(len(x), size=count)
    output, time = torch.from_numpy(log(oracle.posterior(x, t))[rows]), torch.full((count,), t, dtype=torch.float64)
    prediction = m2s.samplers.Prediction(head, output, torch.from_numpy(x[rows]), time)
    noise = m2s.samplers.CounterNoise(3, torch.arange(count), 2, 1)
    new = ForwardBackward(leap=leap).step(prediction, m2s.samplers.Move(time, time), noise).numpy()
    distribution = added(rates, x, leap)
    seen, wanted = np.zeros(distribution.shape), np.zeros(distribution.shape)
    np.add.at(seen, (rows[:, None], np.arange(2), new), 1.0)
    np.add.at(wanted, rows, distribution[rows])
    spread = np.sqrt(wanted * (1 - distribution)).clip(min=1.0)
    assert (np.abs(seen - wanted) < 5 * spread).all()


def test_the_plan_is_that_of_the_authors() -> None:
    """Corrections follow every step to s in (0, entry], at time s."""
    free, head = torch.tensor([3, 3]), m2s.Posterior(LONG.process)
    plan = ForwardBackward(corrections=2, entry=0.25).plan(10, "linear", free, head, m2s.samplers.CounterNoise(0, free, 3, 0))
    wanted = [(1 - i / 10, 0.9 - i / 10) for i in range(8)] + [(0.2, 0.2)] * 2
    wanted += [(0.2, 0.1)] + [(0.1, 0.1)] * 2 + [(0.1, 0.0)]
    torch.testing.assert_close(torch.stack([plan.t[:, 0], plan.s[:, 0]], -1), torch.tensor(wanted, dtype=torch.float64))


def test_the_corrector_reduces_the_error() -> None:
    """The exact distribution after ordinal leaps to 1/64, and after a draw from the prediction, with and without ten leaps of
    the corrector at each time up to 1/2."""
    process, oracle = LONG.process, LONG.oracle()
    x, ends = oracle.noisy, forms.grid("linear", 64)[:-1]
    plain = corrected = forms.joint_step(np.broadcast_to(process.reference().numpy(), (1, 2, LEVELS)))[0]
    for t, s in itertools.pairwise(ends):
        at = min(t, 1 - 1e-3)
        step = forms.joint_step(added(oracle.reverse_rates(oracle.score(x, at), x, at), x, t - s))
        plain, corrected = plain @ step, corrected @ step
        if s <= 0.5:
            corrected = corrected @ np.linalg.matrix_power(forms.joint_step(added(corrector(oracle, x, s), x, 0.003)), 10)
    draw = forms.joint_step(oracle.posterior(x, ends[-1]))
    before, after = (forms.total_variation(p, oracle.marginal(ends[-1])) for p in (plain, corrected))
    assert after < 0.5 * before
    before, after = (forms.total_variation(p @ draw, oracle.distribution) for p in (plain, corrected))
    assert after < before


def test_samples_by_name_and_by_object() -> None:
    """Through `m2s.sample`, with exact predictions."""
    oracle, head, count = LONG.oracle(), m2s.Posterior(LONG.process), 400

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        (time,) = t.double().unique().tolist()
        return torch.log(torch.from_numpy(oracle.posterior(x_t.numpy(), time)))

    def draws(sampler: str | m2s.samplers.Sampler) -> torch.Tensor:
        return m2s.sample(model, head, (count, 2), steps=12, sampler=sampler, grid="linear", micro_batch=count, seed=0)

    assert torch.equal(draws("ordinal_tau_leaping"), draws(TauLeaping(ordinal=True)))
    found = draws("forward_backward")
    assert int(found.min()) >= 0 and int(found.max()) < LEVELS and not torch.equal(found, draws("ordinal_tau_leaping"))


def test_invalid_options_and_heads_raise() -> None:
    for name, wrong in (("corrections", 0), ("leap", 0.0), ("leap", float("inf")), ("entry", 0.0), ("entry", 1.5)):
        with pytest.raises(ValueError, match=name):
            ForwardBackward(**{name: wrong})
    masks, chain = m2s.Absorbing(3, m2s.Linear()), m2s.Chain.uniform(3, torch.full((3,), 0.2))
    for sampler in ("ordinal_tau_leaping", ForwardBackward(ordinal=True)):
        with pytest.raises(TypeError, match="a mask has no place in an order"):
            m2s.sample(lambda x, t: torch.zeros(*x.shape, 4), m2s.Posterior(masks), (1, 2), sampler=sampler, seed=0)
    for sampler in ("ordinal_tau_leaping", "forward_backward"):
        with pytest.raises(TypeError, match=r"needs the rates of a process in continuous time.*use sampler='bayes'"):
            m2s.sample(lambda x, t: torch.zeros(*x.shape, 3), m2s.Posterior(chain), (1, 2), sampler=sampler, seed=0)


@pytest.mark.parametrize("name", ["absorbing-linear", "hybrid-0.2", "uniform-linear", "gaussian"])
def test_jumps_add_up_by_default_without_a_mask(name: str) -> None:
    """forward_backward by name is the ordinal sampler without a mask and the other one with a mask, and the two differ."""
    case = CASES[name]
    oracle, head = Oracle(case.noise, 2), m2s.Posterior(case.process)

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        (time,) = t.double().unique().tolist()
        return torch.from_numpy(log(oracle.posterior(x_t.numpy(), time)))

    def draws(sampler: str | m2s.samplers.Sampler) -> torch.Tensor:
        return m2s.sample(model, head, (256, 2), steps=6, sampler=sampler, micro_batch=256, seed=0)

    found, one = draws("forward_backward"), draws(ForwardBackward(ordinal=False))
    assert int(found.max()) < case.process.vocab
    if case.process.mask is not None:
        assert torch.equal(found, one)
    else:
        assert torch.equal(found, draws(ForwardBackward(ordinal=True))) and not torch.equal(found, one)


def test_the_corrector_with_masks_uses_forward_plus_reverse_rates() -> None:
    """One leap against the closed form: masked sites are revealed at the reverse rate, others masked at the forward rate."""
    case, t, leap = CASES["absorbing-linear"], 0.5, 0.1
    oracle = Oracle(case.noise, 2)
    found = leap_matrix(ForwardBackward(leap=leap), case, oracle, t, ["route", "token"])
    rates = corrector(oracle, oracle.noisy, t)
    masked, wanted = oracle.noisy == case.process.mask, rates.sum(-1)
    np.testing.assert_allclose(wanted, np.where(masked, 1 / t, 1 / (1 - t)), rtol=1e-12)  # alpha = 1 - t
    np.testing.assert_allclose(found, forms.joint_step(forms.tau_leap(rates, oracle.noisy, leap)), atol=1e-11)


def test_hundreds_of_jumps_add_up() -> None:
    """A drift of many levels in one leap, as for 256 gray levels and few steps. The sum has mean E E[d] and variance E E[d^2],
    and the number of jumps is Poisson."""
    levels, count, step_length = 1001, 4000, 300.0
    weights = np.zeros(levels)
    weights[[499, 501, 502]] = 0.3, 0.5, 0.2  # from the middle: one down, one up, two up

    def rates(part: Prediction) -> torch.Tensor:
        return torch.from_numpy(weights).expand(*part.x_t.shape, levels)

    process = m2s.Uniform(levels, m2s.Linear())
    x, t = torch.full((count, 1), 500), torch.full((count,), 0.5, dtype=torch.float64)
    prediction = Prediction(m2s.Posterior(process), torch.zeros(count, 1, levels, dtype=torch.float64), x, t)
    noise = CounterNoise(0, torch.arange(count), 1, 0)
    found, jumps = leaps.poisson_jumps(prediction, rates, torch.full_like(t, step_length), True, noise)
    drift, spread = step_length * (0.5 + 0.4 - 0.3), step_length * (0.5 + 0.8 + 0.3)
    moved = found.double() - 500
    assert abs(float(moved.mean()) - drift) < 4 * np.sqrt(spread / count)
    assert abs(float(moved.var()) / spread - 1) < 5 * np.sqrt(2 / count)
    assert abs(float(jumps.double().mean()) - step_length) < 4 * np.sqrt(step_length / count) and int(jumps.max()) > 300
    u = torch.tensor([0.5, 1 - 2**-53, 0.0], dtype=torch.float64)
    most = leaps.poisson(torch.full_like(u, 300.0), u, 1024)
    assert most.tolist()[0] == scipy.stats.poisson.ppf(0.5, 300) and 430 < most[1] < 480 and most[2] == 0
