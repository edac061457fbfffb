"""The exact distribution of one step of every sampler, by integrating over its uniforms.

The network's output is exact (the enumeration of `oracle.py`), random, or has a spike. `exact_steps.py` has the integral and
`closed_forms.py` the closed forms.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import closed_forms as forms
import exact_steps
import m2s
from closed_forms import log
from exact_steps import LARGEST, GivenNoise, Sites, tensor
from m2s.process import RankOne
from m2s.samplers import (
    Analytic,
    Bayes,
    CounterNoise,
    Euler,
    Move,
    Prediction,
    TauLeaping,
)
from m2s.samplers.predictor_corrector import gibbs
from oracle import Oracle
from step_cases import (
    EXACT,
    HEADS,
    PLACES,
    PURPOSES,
    RANK_ONE,
    SHORT,
    STEPS,
    TABULATED,
    WITH_RATES,
    expected,
    permutations,
    rates_of,
    routes,
    same,
    score_of,
    sites,
    use_blocks_of,
)

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("other", [False, True])
def test_draw_over_blocks_of_256(other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 tokens in three blocks, the last not full. Every token has its probability, also in tails of 1e-9."""
    use_blocks_of(256, monkeypatch)
    vocab, rng = 600, np.random.default_rng(0)
    process = m2s.Uniform(vocab, m2s.Linear())
    k = np.array([0, 255, 256, 599])
    output = rng.normal(size=(4, vocab)) * 3
    output[1, 300:] -= 20
    output[2, 256] += 15
    output[3, :256] = -np.inf
    half = np.full(4, 0.5)
    problem = Sites(m2s.Posterior(process), output, k, half, half, half)

    def token(rows: np.ndarray, u: dict) -> np.ndarray:
        return problem.prediction(rows).draw_token(tensor(u["token"][:, None]), other).token.squeeze(-1).numpy()

    wanted = np.where((forms.one_hot(k, vocab) > 0) & other, 0.0, forms.softmax(output))
    found = exact_steps.exact_distribution(token, 4, vocab, ["token"])
    np.testing.assert_allclose(found, wanted / wanted.sum(-1, keepdims=True), rtol=0, atol=EXACT)
    assert (found[wanted == 0] == 0).all()


@pytest.mark.parametrize("offset", ["none", "exact"])
@pytest.mark.parametrize("name", RANK_ONE + TABULATED)
def test_bayes_step(name: str, offset: str) -> None:
    """Eq. 19, by three routes (rank-one) or by its K-vector (tabulated); at s = 0 a draw from mu."""
    process = PLACES[name].process
    steps = STEPS if name in RANK_ONE else [STEPS[i] for i in (0, 4, 5)]
    problem = sites(name, m2s.Posterior(process, offset=offset), steps)

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        mu = forms.posterior(process, output, k, at, offset == "exact")
        return mu if s == 0 else forms.bayes(process, mu, k, at, s)

    if name in TABULATED:
        same(problem.distribution(Bayes(), ["token"]), expected(closed_form, problem), problem)
        return
    hints = {"route": expected(lambda *site: routes(process, offset == "exact", *site), problem)}
    same(problem.distribution(Bayes(), ["route", "token", "jump"], hints), expected(closed_form, problem), problem)


@pytest.mark.parametrize(("name", "kind"), [*WITH_RATES, ("uniform-linear", "offset"), ("hybrid-0.2", "offset")])
def test_euler_step(name: str, kind: str) -> None:
    """(t - s) Q_t(y -> k) s_y, normalized where it exceeds one, by one draw from a posterior or by K-vectors of rates."""
    process = PLACES[name].process
    head = HEADS[kind](process)
    problem = sites(name, head, SHORT, excludes_t_one=True)
    streamed = kind != "score" and name in RANK_ONE

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.euler(rates_of(head, output, k, at), k, t - s)

    found = problem.distribution(Euler(), ["route", "token", "jump"] if streamed else ["route", "token"])
    same(found, expected(closed_form, problem), problem)
    if process.mask is not None and name.startswith("hybrid"):
        assert (found[problem.k != process.mask][:, process.mask] > 1e-6).any()  # the mask is a target too
    # The diagnostics count exit masses above one.
    rows = np.arange(len(problem.k))
    prediction, half = problem.prediction(rows), exact_steps.tensor(np.full((len(rows), 1), 0.5))
    Euler().step(
        prediction,
        Move(exact_steps.tensor(problem.t), exact_steps.tensor(problem.s)),
        exact_steps.GivenNoise(dict.fromkeys(PURPOSES, half)),
    )
    mass = expected(lambda output, k, t, s, at: (t - s) * rates_of(head, output, k, at), problem).sum(-1)
    clear = np.abs(mass - 1) > 1e-9
    assert (prediction.notes["exit_above_one"].squeeze(-1).numpy() == (mass > 1))[clear].all()
    assert (mass > 1).any() or (name.startswith("absorbing") and kind == "posterior")


@pytest.mark.parametrize(("name", "kind"), [*WITH_RATES[::3], *WITH_RATES[1::3]])
def test_tau_leaping_step(name: str, kind: str) -> None:
    """A site moves with exactly one jump, which has probability E e^{-E}, in proportion to the rates."""
    process = PLACES[name].process
    head = HEADS[kind](process)
    problem = sites(name, head, SHORT[::2] if name in TABULATED else SHORT, excludes_t_one=True)
    mass = expected(lambda output, k, t, s, at: (t - s) * rates_of(head, output, k, at), problem).sum(-1, keepdims=True)
    hints = {"route": (np.exp(-mass) * (1 + mass * [[0.01, 0.5, 0.99]])).clip(0, exact_steps.LARGEST)}

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.tau_leap(rates_of(head, output, k, at), k, t - s)

    same(problem.distribution(TauLeaping(), ["route", "token"], hints), expected(closed_form, problem), problem)


@pytest.mark.parametrize("kind", ["posterior", "score"])
def test_ordinal_tau_leaping_step(kind: str) -> None:
    """The number of jumps is Poisson. Displacements add up, and the sum is clipped once."""
    levels = 4
    process = m2s.Uniform(levels, m2s.Linear())
    head, t, s, rng = HEADS[kind](process), 0.6, 0.45, np.random.default_rng(0)
    k = np.arange(levels)
    output = rng.normal(size=(levels, levels))
    problem = Sites(head, output, k, np.full(levels, t), np.full(levels, s), np.full(levels, t))
    rates = rates_of(head, output, k, t)
    mean = (t - s) * rates.sum(-1)
    jump = rates / rates.sum(-1, keepdims=True)
    assert 0.1 < mean.min() < mean.max() < 20
    step = problem.outcome(TauLeaping(ordinal=True))
    # Where every jump goes one level up, the level is the number of jumps, up to the highest level.
    up = np.array([jump[i, :i].sum() + jump[i, (i + 1) % levels] / 2 for i in k])

    def counted(rows: np.ndarray, u: dict) -> np.ndarray:
        return step(rows, {**u, **dict.fromkeys(range(128), up[rows])})

    found = exact_steps.exact_distribution(counted, levels, levels, ["route"])
    counts = np.arange(64)
    poisson = np.exp(-mean[:, None] + counts * np.log(mean)[:, None] - np.cumsum(np.log(np.maximum(counts, 1))))
    for i in range(levels - 1):
        wanted = np.zeros(levels)
        np.add.at(wanted, np.minimum(i + counts, levels - 1), poisson[i])
        np.testing.assert_allclose(found[i], wanted, rtol=0, atol=EXACT)
    # The distribution given 0 to 3 jumps.
    below = np.cumsum(poisson, 1)
    for number in (0, 1, 2, 3):
        middle = (below[:, number] + (below[:, number - 1] if number else 0)) / 2

        def given(rows: np.ndarray, u: dict, middle: np.ndarray = middle) -> np.ndarray:
            return step(rows, {**u, "route": middle[rows]})

        if number == 0:
            assert (step(k, {"route": middle}) == k).all()
            continue
        found = exact_steps.exact_distribution(given, levels, levels, list(range(number)), ways=64)
        for i in range(levels):
            wanted = np.zeros(levels)
            for targets in itertools.product(range(levels), repeat=number):
                end = i + sum(y - i for y in targets)
                wanted[min(max(end, 0), levels - 1)] += np.prod(jump[i, list(targets)])
            np.testing.assert_allclose(found[i], wanted, rtol=0, atol=EXACT)


class AnalyticInLoop(Analytic):
    """The analytic sampler as the loop calls it: its last step where s = 0."""

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> torch.Tensor:
        ends = (move.s <= 0).unsqueeze(-1)
        return torch.where(ends, self.last_step(prediction, noise), super().step(prediction, move, noise))


@pytest.mark.parametrize("kind", ["posterior", "score"])
@pytest.mark.parametrize("name", RANK_ONE)
def test_analytic_step(name: str, kind: str) -> None:
    """The positive part of (s P_{t|s}^{-1})_y P_{t|s}(k|y); the last step never gives the mask."""
    process = PLACES[name].process
    head = HEADS[kind](process)
    problem = sites(name, head, [*SHORT, (0.3, 0.3), (1e-5, 0.0)], excludes_t_one=True)

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.analytic(process, score_of(head, output, k, at), k, at, s)

    found, wanted = problem.distribution(AnalyticInLoop(), ["token"]), expected(closed_form, problem)
    some = ~np.isnan(wanted).any(-1)  # see `test_analytic_last_step_without_positive_weights`
    assert some.mean() > 0.9
    found = np.where(some[:, None], found, 0.0)
    same(found[some], wanted[some], problem, 1e-11)  # the inverse of P_{t|s} magnifies rounding, here up to 1e5 times
    if process.mask is not None:
        assert (found[problem.s == 0][:, process.mask] == 0).all()


@pytest.mark.parametrize("blocks", [2, 256])
def test_analytic_last_step_without_positive_weights(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unconstrained score under hybrid noise may have a positive weight at the mask only. The token is a clean one."""
    use_blocks_of(blocks, monkeypatch)
    process = PLACES["hybrid-0.2"].process
    output = np.array([-4.0, -4.0, -4.0, 4.0])
    weights = forms.analytic_weights(process, np.exp(output)[None], np.array([0]), 0.5, 0.0)
    assert (weights[:, :3] < 0).all() and abs(weights.sum() - 1) < EXACT
    problem = Sites(m2s.LogScore(process), output[None], np.array([0]), *np.full((3, 1), 0.5))
    problem.s = np.zeros(1)
    for u in (0.0, 0.5, LARGEST):
        token = problem.outcome(AnalyticInLoop())(np.array([0]), {"token": np.array([u])})
        assert token[0] < process.vocab


def test_samples_without_positive_weights() -> None:
    """The same through `m2s.sample`, whose last step starts at 1e-5: all tokens are below the vocabulary."""
    output = torch.tensor([-10.0, -10.0, -10.0, 10.0])
    head = m2s.LogScore(m2s.Hybrid(3, p_uniform=0.2))
    x = m2s.sample(lambda x_t, t: output.expand(*x_t.shape, 4), head, (16, 4), 4, "analytic", "linear")
    assert int(x.max()) < 3


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-cosine", "hybrid-0.6"])
def test_three_routes_analytic_and_projection_agree(name: str) -> None:
    """For a realizable score: three routes, K-vector, analytic predictor and projected score have the same distribution."""
    process = PLACES[name].process
    head, free = m2s.Posterior(process), m2s.LogScore(process)
    steps = [(0.95, 0.6), (0.02, 0.01)]
    problem = sites(name, head, steps, kinds=(0, 1))
    scores = expected(lambda output, k, t, s, at: score_of(head, output, k, at), problem)
    as_scores = replace(problem, head=free, output=log(scores))
    projected = replace(as_scores, head=m2s.Projected(free))
    hints = {"route": expected(lambda *site: routes(process, False, *site), problem)}
    bayes = problem.distribution(Bayes(), ["route", "token", "jump"], hints)

    def vector(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        time = tensor(np.full(len(k), t)), tensor(np.full(len(k), s))
        mu = head.posterior(tensor(output), tensor(k), time[0])
        return m2s.bayes_probabilities(mu, tensor(k), time[1], time[0], process).numpy()

    same(bayes, expected(vector, problem), problem)
    for other, sampler in ((problem, Analytic()), (as_scores, Analytic()), (projected, Analytic())):
        same(other.distribution(sampler, ["token"]), bayes, other, 1e-11)
    same(projected.distribution(Bayes(), ["route", "token", "jump"], hints), bayes, projected, 1e-11)
    same(
        projected.distribution(Euler(), ["route", "token", "jump"]),
        problem.distribution(Euler(), ["route", "token", "jump"]),
        problem,
        1e-11,
    )


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-cosine", "hybrid-0.2", "gaussian"])
def test_euler_is_bayes_to_second_order(name: str) -> None:
    """The distributions differ by O((t - s)^2)."""
    process = PLACES[name].process
    head, t = m2s.Posterior(process), 0.6
    streamed = name in RANK_ONE
    gaps = []
    for halving in range(3):
        s = t - 2e-3 / 2**halving
        problem = sites(name, head, [(t, s)], kinds=(0,))
        hints = {"route": expected(lambda *site: routes(process, False, *site), problem)} if streamed else None
        euler = problem.distribution(Euler(), ["route", "token", "jump"] if streamed else ["route", "token"])
        bayes = problem.distribution(Bayes(), ["route", "token", "jump"] if streamed else ["token"], hints)
        gaps.append(np.abs(euler - bayes).max())
    orders = np.log2(np.array(gaps[:-1]) / gaps[1:])
    assert np.abs(orders - 2).max() < 0.1, f"orders {orders}, gaps {gaps}"


@pytest.mark.parametrize("name", ["uniform-2", "uniform-linear", "absorbing-linear", "hybrid-0.2"])
def test_negative_mass(name: str) -> None:
    """The mass that the analytic predictor drops is that of the formula, and zero after projection."""
    process = PLACES[name].process
    free = m2s.LogScore(process)
    problem = sites(name, free, [(0.9, 0.5), (0.5, 0.4), (0.2, 0.1)], kinds=(1, 3))
    rows = np.arange(len(problem.k))
    move = Move(tensor(problem.t), tensor(problem.s))
    half = GivenNoise({"token": tensor(np.full((len(rows), 1), 0.5))})
    prediction = problem.prediction(rows)
    Analytic().step(prediction, move, half)
    found = prediction.notes["negative_mass"].squeeze(-1).numpy()
    weights = expected(lambda output, k, t, s, at: forms.analytic_weights(process, np.exp(output), k, t, s), problem)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-11)
    np.testing.assert_allclose(found, np.maximum(-weights, 0).sum(-1), atol=1e-11)
    if name != "absorbing-linear" and name != "uniform-2":
        assert (found > 1e-3).any()
    if isinstance(process, m2s.Uniform):
        score = np.where(forms.one_hot(problem.k, process.states) > 0, 1.0, np.exp(problem.output))
        growth = ((1 - problem.s) / (1 - problem.t))[:, None]  # e^D for alpha = 1 - t
        mean = score.mean(-1, keepdims=True)
        np.testing.assert_array_equal(weights < 0, score < (1 - 1 / growth) * mean)
        arrive = (1 - 1 / growth) / process.vocab + forms.one_hot(problem.k, process.states) / growth
        np.testing.assert_allclose(weights, (growth * score - (growth - 1) * mean) * arrive, atol=1e-11)
    projected = replace(problem, head=m2s.Projected(free)).prediction(rows)
    Analytic().step(projected, move, half)
    assert float(projected.notes["negative_mass"].max()) < EXACT


@pytest.mark.parametrize("kind", ["posterior", "score"])
@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-linear", "hybrid-0.2", "birth-death"])
def test_gibbs_corrector_preserves_the_distribution(name: str, kind: str) -> None:
    """p_t G = p_t, where G over all states is computed from the step: a uniform site, then the distribution of its token."""
    case = PLACES[name]
    process = case.process
    oracle = Oracle(case.noise, 3 if isinstance(process, RankOne) and process.states < 5 else 2)
    head, x, length = HEADS[kind](process), oracle.noisy, oracle.length
    for t in (0.2, 0.9):
        output = log(oracle.score(x, t) if kind == "score" else oracle.posterior(x, t))
        matrix = np.zeros((len(x), len(x)))
        for i in range(length):

            def step(rows: np.ndarray, u: dict, i: int = i, t: float = t, output: np.ndarray = output) -> np.ndarray:
                order, token = np.full((2, len(rows), length), 0.5)
                order[:, i], token[:, i] = 0.25, u["token"]
                prediction = Prediction(head, tensor(output[rows]), tensor(x[rows]), tensor(np.full(len(rows), t)))
                new = gibbs(prediction, 1, GivenNoise({"order": tensor(order), "token": tensor(token)})).numpy()
                others = np.arange(length) != i
                assert (new[:, others] == x[rows][:, others]).all()
                return new[:, i]

            distributions = exact_steps.exact_distribution(step, len(x), process.states, ["token"])
            np.add.at(matrix, (np.arange(len(x))[:, None], oracle.neighbors(x)[:, i]), distributions / length)
        p = oracle.marginal(t)
        np.testing.assert_allclose(matrix.sum(1), 1, atol=EXACT)
        np.testing.assert_allclose(p @ matrix, p, rtol=0, atol=EXACT)
        assert np.abs(matrix - np.eye(len(x))).max() > 0.01


def test_gibbs_corrector_chooses_uniformly_among_free_sites() -> None:
    """For all orders of the uniforms, each free site is drawn equally often, and a clamped one never."""
    process = m2s.Uniform(3, m2s.Linear())
    order = permutations(4)
    x = np.zeros(order.shape, dtype=int)
    free = np.tile([True, False, True, True], (len(order), 1))
    logits = np.tile([-50.0, 50.0, -50.0], (*order.shape, 1))  # a drawn site becomes 1
    for count, share in ((1, 1 / 3), (2, 2 / 3), (3, 1.0), (9, 1.0)):
        prediction = Prediction(
            m2s.LogScore(process), tensor(logits), tensor(x), tensor(np.full(len(x), 0.5)), free=tensor(free)
        )
        new = gibbs(prediction, count, GivenNoise({"order": tensor(order), "token": tensor(np.full(x.shape, 0.5))})).numpy()
        np.testing.assert_allclose(new.mean(0), np.where(free[0], share, 0.0))
        assert (new.sum(1) == min(count, 3)).all()
