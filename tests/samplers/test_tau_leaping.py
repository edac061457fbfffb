"""Tau-leaping between levels and Campbell's corrector: their order in the step, their laws, and what they refuse."""

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
LONG = Case(  # all but forgets where it came from, so that nothing but the steps is to blame
    m2s.RateMatrix.gaussian(LEVELS, m2s.Exponential(8.0), 2.0, 1.5),
    tabulated(gaussian_rates(LEVELS, 2.0, 1.5), exponential(8.0)),
    2,
)


def added(rates: np.ndarray, k: np.ndarray, step: float) -> np.ndarray:
    """The law of k plus a Poisson number of displacements, each y - k in proportion to its rate, cut off at the ends: its
    characteristic function is e^{E (phi - 1)}, phi that of one displacement, on a ring too wide to go around."""
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
    """The exact law in which a walk with exact beliefs ends."""

    def form(rates: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return FORMS[sampler](rates, k, t - s)

    return forms.terminal_distribution(
        LONG.process, 2, lambda x, t: exact_rates(t), form, forms.grid("linear", steps), True, 1e-6
    )


@lru_cache(maxsize=2000)
def exact_rates(t: float) -> np.ndarray:
    """The rates of the reverse process at every state."""
    oracle = LONG.oracle()
    return oracle.reverse_rates(oracle.score(oracle.noisy, t), oracle.noisy, t)


@pytest.mark.parametrize("sampler", FORMS)
def test_leaps_between_levels_are_of_order_one(sampler: str) -> None:
    """With exact beliefs the distance to the data law halves with the step, once there is hardly more than a jump in one."""
    distribution, steps = LONG.oracle().distribution, [256, 512, 1024]
    distance = [forms.total_variation(terminal(sampler, n), distribution) for n in steps]
    order = -np.diff(np.log2(distance))
    assert (np.abs(order - 1) < 0.1).all() and distance[-1] < 0.02, f"{sampler}: orders {order}, distances {distance}"


def test_a_leap_with_many_jumps_stays_where_it_is_unless_they_add_up() -> None:
    """Why so few steps are so far off where rates are high: of a Poisson number of mean E exactly one is left with probability
    E e^{-E}, and the rule for tokens without an order moves on that one alone."""
    rates = np.where(np.arange(LEVELS) == 1, 0.0, np.full((1, 1, LEVELS), 4.0))
    k, stays = np.array([[1]]), 1 - 12 * np.exp(-12)
    assert forms.tau_leap(rates, k, 1.0)[0, 0, 1] == pytest.approx(stays) and stays > 0.9999
    assert added(rates, k, 1.0)[0, 0, 1] < 0.2
    distribution = LONG.oracle().distribution
    few = [forms.total_variation(terminal("tau_leaping", n), distribution) for n in (4, 8)]
    assert few[1] > 0.95 * few[0] > 0.4  # twice the steps are worth nothing while E is well above one
    assert forms.total_variation(terminal("ordinal_tau_leaping", 64), distribution) < 0.85 * forms.total_variation(
        terminal("tau_leaping", 64), distribution
    )


def corrector(oracle: Oracle, x: np.ndarray, t: float) -> np.ndarray:
    """Forward and reverse rates of every site, 0 at its own token, by the oracle."""
    forward = oracle.noise.rates(t)[x]
    np.put_along_axis(forward, x[..., None], 0.0, -1)
    return forward + oracle.reverse_rates(oracle.score(x, t), x, t)


def whole(sampler: ForwardBackward, case: Case, oracle: Oracle, t: float, purposes: list) -> np.ndarray:
    """The matrix of one corrector's leap over all states, from the law of each site's step."""
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
def test_the_corrector_leaves_the_law_as_it_is(name: str, t: float) -> None:
    """p_t M(h) - p_t is of order h^2 where M(h) - 1 is of order h, M from the step itself: forward and reverse rates together
    have p_t for their stationary law."""
    case = CASES[name]
    oracle = Oracle(case.noise, 2)
    p, moved, changed = oracle.marginal(t), [], []
    for leap in (2e-3, 1e-3, 5e-4):
        matrix = whole(ForwardBackward(ordinal=False, leap=leap), case, oracle, t, ["route", "token"])
        moved.append(np.abs(p @ matrix - p).sum())
        changed.append(p @ (1 - np.diag(matrix)))
    np.testing.assert_allclose(np.log2(np.divide(moved[:-1], moved[1:])), 2, atol=0.1)
    np.testing.assert_allclose(np.log2(np.divide(changed[:-1], changed[1:])), 1, atol=0.1)


@pytest.mark.parametrize("name", ["gaussian", "uniform-linear"])
def test_the_corrector_jumps_at_both_rates(name: str) -> None:
    """One leap against the closed form: E e^{-E} of the sum of forward and reverse rates; and its ordinal form."""
    case, t, leap = CASES[name], 0.4, 0.05
    oracle = Oracle(case.noise, 2)
    x = oracle.noisy
    rates = corrector(oracle, x, t)
    found = whole(ForwardBackward(ordinal=False, leap=leap), case, oracle, t, ["route", "token"])
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


def test_its_calls_are_those_of_the_authors() -> None:
    """Corrections after every step that ends in (0, entry], at the time where it ends."""
    free, head = torch.tensor([3, 3]), m2s.Posterior(LONG.process)
    plan = ForwardBackward(corrections=2, entry=0.25).plan(10, "linear", free, head, m2s.samplers.CounterNoise(0, free, 3, 0))
    wanted = [(1 - i / 10, 0.9 - i / 10) for i in range(8)] + [(0.2, 0.2)] * 2
    wanted += [(0.2, 0.1)] + [(0.1, 0.1)] * 2 + [(0.1, 0.0)]
    torch.testing.assert_close(torch.stack([plan.t[:, 0], plan.s[:, 0]], -1), torch.tensor(wanted, dtype=torch.float64))


def test_correctors_bring_the_law_nearer() -> None:
    """The exact law of ordinal leaps down to 1/64, with and without ten leaps of the corrector at each time up to a half, and
    then of a draw from the belief."""
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


def test_the_loop_walks_as_it_is_planned() -> None:
    """Samples of the real loop, with exact beliefs, by both names."""
    oracle, head, count = LONG.oracle(), m2s.Posterior(LONG.process), 400

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        (time,) = t.double().unique().tolist()
        return torch.log(torch.from_numpy(oracle.posterior(x_t.numpy(), time)))

    def draws(sampler: str | m2s.samplers.Sampler) -> torch.Tensor:
        return m2s.sample(model, head, (count, 2), steps=12, sampler=sampler, grid="linear", micro_batch=count)

    assert torch.equal(draws("ordinal_tau_leaping"), draws(TauLeaping(ordinal=True)))
    found = draws("forward_backward")
    assert int(found.min()) >= 0 and int(found.max()) < LEVELS and not torch.equal(found, draws("ordinal_tau_leaping"))


def test_what_is_refused() -> None:
    for name, wrong in (("corrections", 0), ("leap", 0.0), ("leap", float("inf")), ("entry", 0.0), ("entry", 1.5)):
        with pytest.raises(ValueError, match=name):
            ForwardBackward(**{name: wrong})
    masks, chain = m2s.Absorbing(3, m2s.Linear()), m2s.Chain.uniform(3, torch.full((3,), 0.2))
    for sampler in ("ordinal_tau_leaping", ForwardBackward(ordinal=True)):
        with pytest.raises(TypeError, match="a mask has no place in an order"):
            m2s.sample(lambda x, t: torch.zeros(*x.shape, 4), m2s.Posterior(masks), (1, 2), sampler=sampler)
    for sampler in ("ordinal_tau_leaping", "forward_backward"):
        with pytest.raises(TypeError, match="does not draw from a finite chain"):
            m2s.sample(lambda x, t: torch.zeros(*x.shape, 3), m2s.Posterior(chain), (1, 2), sampler=sampler)


@pytest.mark.parametrize("name", ["absorbing-linear", "hybrid-0.2", "uniform-linear", "gaussian"])
def test_the_process_says_whether_jumps_add_up(name: str) -> None:
    """By its name the sampler walks with jumps that add up where there is no mask, and without where there is one; the two
    differ, so that it is no other's walk."""
    case = CASES[name]
    oracle, head = Oracle(case.noise, 2), m2s.Posterior(case.process)

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        (time,) = t.double().unique().tolist()
        return torch.from_numpy(log(oracle.posterior(x_t.numpy(), time)))

    def draws(sampler: str | m2s.samplers.Sampler) -> torch.Tensor:
        return m2s.sample(model, head, (256, 2), steps=6, sampler=sampler, micro_batch=256)

    found, one = draws("forward_backward"), draws(ForwardBackward(ordinal=False))
    assert int(found.max()) < case.process.vocab
    if case.process.mask is not None:
        assert torch.equal(found, one)
    else:
        assert torch.equal(found, draws(ForwardBackward(ordinal=True))) and not torch.equal(found, one)


def test_the_corrector_on_masks_by_its_name_jumps_at_both_rates() -> None:
    """One leap at a time where half is masked, against the closed form: what is masked is revealed at the reverse rate, what is
    not is masked at the forward one."""
    case, t, leap = CASES["absorbing-linear"], 0.5, 0.1
    oracle = Oracle(case.noise, 2)
    found = whole(ForwardBackward(leap=leap), case, oracle, t, ["route", "token"])
    rates = corrector(oracle, oracle.noisy, t)
    masked, wanted = oracle.noisy == case.process.mask, rates.sum(-1)
    np.testing.assert_allclose(wanted, np.where(masked, 1 / t, 1 / (1 - t)), rtol=1e-12)  # alpha = 1 - t
    np.testing.assert_allclose(found, forms.joint_step(forms.tau_leap(rates, oracle.noisy, leap)), atol=1e-11)


def test_hundreds_of_jumps_add_up() -> None:
    """A drift of many levels in one leap, as 256 grey levels have in few steps: mean and variance of the sum, E E[d] and E
    E[d^2], and the law of the number against its own closed form."""
    levels, count, span = 1001, 4000, 300.0
    weights = np.zeros(levels)
    weights[[499, 501, 502]] = 0.3, 0.5, 0.2  # from the middle: one down, one up, two up

    def rates(part: Prediction) -> torch.Tensor:
        return torch.from_numpy(weights).expand(*part.x_t.shape, levels)

    process = m2s.Uniform(levels, m2s.Linear())
    x, t = torch.full((count, 1), 500), torch.full((count,), 0.5, dtype=torch.float64)
    prediction = Prediction(m2s.Posterior(process), torch.zeros(count, 1, levels, dtype=torch.float64), x, t)
    noise = CounterNoise(0, torch.arange(count), 1, 0)
    found, jumps = leaps.poisson_jumps(prediction, rates, torch.full_like(t, span), True, noise)
    drift, spread = span * (0.5 + 0.4 - 0.3), span * (0.5 + 0.8 + 0.3)
    moved = found.double() - 500
    assert abs(float(moved.mean()) - drift) < 4 * np.sqrt(spread / count)
    assert abs(float(moved.var()) / spread - 1) < 5 * np.sqrt(2 / count)
    assert abs(float(jumps.double().mean()) - span) < 4 * np.sqrt(span / count) and int(jumps.max()) > 300
    u = torch.tensor([0.5, 1 - 2**-53, 0.0], dtype=torch.float64)
    most = leaps.poisson(torch.full_like(u, 300.0), u, 1024)
    assert most.tolist()[0] == scipy.stats.poisson.ppf(0.5, 300) and 430 < most[1] < 480 and most[2] == 0
