"""Every sampler's law, exactly: one step by integrating over its uniforms, a walk by multiplying matrices over all states.

The network is the enumeration of `oracle.py`, or any logits at all, spikes included; `walk.py` has the integral and the closed
forms.
"""

import importlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import m2s
import walk
from m2s.process import RankOne
from m2s.samplers import (
    Analytic,
    Ancestral,
    Bayes,
    Confidence,
    Euler,
    FirstHitting,
    LogitsProcessor,
    Move,
    Prediction,
    Remasking,
    Sampler,
    TauLeaping,
)
from m2s.samplers.predictor_corrector import gibbs
from oracle import CASES, Case, Oracle, absorbing_rates, hybrid, linear, tabulated, uniform_rates
from walk import LAST, Given, Sites, kernel, log, tensor

EXACT = 1e-12
PLACES = {**CASES, "uniform-2": Case(m2s.Uniform(2, m2s.Linear()), tabulated(uniform_rates(2), linear), 3)}
RANK_ONE = [
    "uniform-2",
    "uniform-linear",
    "uniform-exponential",
    "absorbing-linear",
    "absorbing-cosine",
    "hybrid-0.2",
    "hybrid-0.6",
]
TABULATED = ["gaussian", "birth-death", "tabulated-absorbing"]
STEPS = [(1.0, 0.5), (1.0, 0.0), (0.999, 0.9), (0.5, 0.5 - 1e-9), (0.7, 0.1), (0.5, 0.0), (1e-3, 5e-4), (1e-3, 0.0), (0.3, 0.3)]


def predictions(name: str, t: float, k: int, kind: int, score: bool, offset: bool) -> np.ndarray:
    """One row of output for a site with token k: the exact belief of some sequence, random logits, or a spike at k."""
    case = PLACES[name]
    states = case.process.states
    rng = np.random.default_rng([kind, k, int(1e9 * t)])
    if kind == 0:
        oracle = case.oracle()
        have = oracle.noisy[oracle.noisy[:, 0] == k]
        x = have[rng.integers(len(have))][None]
        at = min(t, 1 - 1e-3)
        if score:
            return log(oracle.score(x, at))[0, 0]
        return log((oracle.leave_one_out if offset else oracle.posterior)(x, at))[0, 0]
    row = rng.normal(size=states) * 2
    row[k] += {1: 0.0, 2: 60.0, 3: -60.0}[kind]
    return row


def sites(
    name: str, head: m2s.Head, steps: list[tuple[float, float]], open_start: bool = False, kinds: tuple[int, ...] = (0, 1, 2, 3)
) -> Sites:
    """Every token at every step with one kind of belief after another; at t = 1 only what the reference law can draw."""
    process = PLACES[name].process
    score, offset = not isinstance(head, m2s.Posterior), isinstance(head, m2s.Posterior) and head.offset == "exact"
    rows = []
    for turn, ((t, s), k) in enumerate(itertools.product(steps, range(process.states))):
        at = min(t, 1 - 1e-3) if open_start else t
        if t == 1 and process.reference()[k] == 0:
            continue
        for kind in {kinds[turn % len(kinds)], kinds[(turn + 1) % len(kinds)]}:
            rows.append((predictions(name, at, k, kind, score, offset), k, t, min(s, at), at))
    output, *columns = zip(*rows, strict=True)
    return Sites(head, np.array(output), *(np.array(column) for column in columns))


def expected(form: Callable[..., np.ndarray], problem: Sites) -> np.ndarray:
    """A closed form `form(output, k, t, s, at)` at all sites, one group of equal times after another."""
    out = np.empty((len(problem.k), problem.head.process.states))
    for rows, t, s, at in problem.groups():
        out[rows] = form(problem.output[rows], problem.k[rows], t, s, at)
    return out


def same(found: np.ndarray, wanted: np.ndarray, problem: Sites, tolerance: float = EXACT) -> None:
    worst = np.abs(found - wanted).max(-1).argmax()
    at = f"k = {problem.k[worst]}, t = {problem.t[worst]}, s = {problem.s[worst]}, output = {problem.output[worst]}"
    np.testing.assert_allclose(wanted.sum(-1), 1, atol=1e-10)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance, err_msg=at)


def routes(process: m2s.Process, offset: bool, output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
    """Where the Bayes step's three routes meet, roughly, and the middle of the second: places to look at, no more."""
    mu, p_s, p_t = walk.posterior(process, output, k, at, offset), kernel(process, s), kernel(process, at)
    step = walk.between(process, s, at)
    into = np.where(k == 0, step[1, k], step[0, k])  # from any other token
    alpha = p_s[0, 0] - p_s[1, 0]
    own = np.where(k == 0, p_t[1, k], p_t[0, k])
    divisor = np.where(own > 0, own, 1.0)
    column = np.moveaxis(p_t[:, k], 0, -1)
    go = into * alpha / divisor
    jump = into * (1 - alpha) * np.divide(mu, column, out=np.zeros_like(mu), where=column > 0).sum(-1)
    hints = np.stack([go, go + jump / 2, go + jump], -1).clip(0, walk.LAST)
    return np.concatenate([hints, np.ones((len(k), process.states))], 1)[:, : process.states].clip(0, walk.LAST)


def in_blocks_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws walk over blocks of that many tokens; `choose` is unwrapped, for its signature knows only the usual size."""
    for name in ("sampler.belief", "sampler.categorical", "ops.draw.reference"):
        monkeypatch.setattr(importlib.import_module(f"m2s.{name}"), "BLOCK", size)
    for name in ("sampler.categorical", "ops.draw.reference"):
        module = importlib.import_module(f"m2s.{name}")
        monkeypatch.setattr(module, "choose", inspect.unwrap(module.choose))


@pytest.fixture(autouse=True)
def _small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two tokens, so that there are several even here and none of 256 is filled up; but for two tests as they are."""
    if request.node.name not in ("test_samples_have_the_chained_law[uniform-bayes]", "test_samples_with_nowhere_to_go"):
        in_blocks_of(2, monkeypatch)


@pytest.mark.parametrize("other", [False, True])
def test_draw_over_blocks_of_256(other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One uniform, 600 tokens, three blocks, the last not full: every token by its own probability, tails of 1e-9 included."""
    in_blocks_of(256, monkeypatch)
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
        return problem.prediction(rows).draw(tensor(u["token"][:, None]), other).token.squeeze(-1).numpy()

    wanted = np.where((walk.one_hot(k, vocab) > 0) & other, 0.0, walk.softmax(output))
    found = walk.distribution(token, 4, vocab, ["token"])
    np.testing.assert_allclose(found, wanted / wanted.sum(-1, keepdims=True), rtol=0, atol=EXACT)
    assert (found[wanted == 0] == 0).all()


@pytest.mark.parametrize("offset", ["none", "exact"])
@pytest.mark.parametrize("name", RANK_ONE + TABULATED)
def test_bayes_step(name: str, offset: str) -> None:
    """Eq. 19 by three routes (rank-one) or by its K-vector (tabulated); at s = 0 a draw from mu."""
    process = PLACES[name].process
    steps = STEPS if name in RANK_ONE else [STEPS[i] for i in (0, 4, 5)]
    problem = sites(name, m2s.Posterior(process, offset=offset), steps)

    def form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        mu = walk.posterior(process, output, k, at, offset == "exact")
        return mu if s == 0 else walk.bayes(process, mu, k, at, s)

    if name in TABULATED:
        same(problem.distribution(Bayes(), ["token"]), expected(form, problem), problem)
        return
    hints = {"route": expected(lambda *site: routes(process, offset == "exact", *site), problem)}
    same(problem.distribution(Bayes(), ["route", "token", "jump"], hints), expected(form, problem), problem)


def score_of(head: m2s.Head, output: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
    """The score that an output means, by matrices."""
    if isinstance(head, m2s.LogScore):
        return np.exp(output)
    return walk.bridge(head.process, walk.posterior(head.process, output, k, t, head.offset == "exact"), k, t)


def rates_of(head: m2s.Head, output: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
    return walk.reverse_rates(head.process, score_of(head, output, k, t), k, t)


HEADS = {
    "posterior": lambda process: m2s.Posterior(process),
    "offset": lambda process: m2s.Posterior(process, offset="exact"),
    "score": lambda process: m2s.LogScore(process),
}
SHORT = [(1.0, 0.5), (0.999, 0.9), (0.5, 0.5 - 1e-9), (0.7, 0.1), (0.5, 0.0), (1e-3, 0.0)]  # from 1 - t_min where t = 1
WITH_RATES = [(name, kind) for name in [*RANK_ONE, "gaussian", "birth-death"] for kind in ("posterior", "score")]


@pytest.mark.parametrize(("name", "kind"), [*WITH_RATES, ("uniform-linear", "offset"), ("hybrid-0.2", "offset")])
def test_euler_step(name: str, kind: str) -> None:
    """(t - s) Q_t(y -> k) s_y, normalised where it exceeds one; streamed from a posterior, or from K-vectors of rates."""
    process = PLACES[name].process
    head = HEADS[kind](process)
    problem = sites(name, head, SHORT, open_start=True)
    streamed = kind != "score" and name in RANK_ONE

    def form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return walk.euler(rates_of(head, output, k, at), k, t - s)

    found = problem.distribution(Euler(), ["route", "token", "jump"] if streamed else ["route", "token"])
    same(found, expected(form, problem), problem)
    if process.mask is not None and name.startswith("hybrid"):
        assert (found[problem.k != process.mask][:, process.mask] > 1e-6).any()  # the mask is a target too
    # what is counted
    rows = np.arange(len(problem.k))
    prediction, half = problem.prediction(rows), walk.tensor(np.full((len(rows), 1), 0.5))
    Euler().step(
        prediction, walk.Move(walk.tensor(problem.t), walk.tensor(problem.s)), walk.Given(dict.fromkeys(PURPOSES, half))
    )
    mass = expected(lambda output, k, t, s, at: (t - s) * rates_of(head, output, k, at), problem).sum(-1)
    clear = np.abs(mass - 1) > 1e-9
    assert (prediction.notes["exit_above_one"].squeeze(-1).numpy() == (mass > 1))[clear].all()
    assert (mass > 1).any() or (name.startswith("absorbing") and kind == "posterior")


PURPOSES = ("route", "token", "jump", "order")


@pytest.mark.parametrize(("name", "kind"), [*WITH_RATES[::3], *WITH_RATES[1::3]])
def test_tau_leaping_step(name: str, kind: str) -> None:
    """Exactly one jump, with probability E e^{-E}, moves, in proportion to the rates; more of them do not."""
    process = PLACES[name].process
    head = HEADS[kind](process)
    problem = sites(name, head, SHORT[::2] if name in TABULATED else SHORT, open_start=True)
    mass = expected(lambda output, k, t, s, at: (t - s) * rates_of(head, output, k, at), problem).sum(-1, keepdims=True)
    hints = {"route": (np.exp(-mass) * (1 + mass * [[0.01, 0.5, 0.99]])).clip(0, walk.LAST)}

    def form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return walk.tau_leap(rates_of(head, output, k, at), k, t - s)

    same(problem.distribution(TauLeaping(), ["route", "token"], hints), expected(form, problem), problem)


@pytest.mark.parametrize("kind", ["posterior", "score"])
def test_ordinal_tau_leaping_step(kind: str) -> None:
    """The number of jumps is Poisson, and given it the displacements add up and are cut off at the ends once."""
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
    # where every jump leads one level up, the level counts the jumps, for as long as there are levels
    up = np.array([jump[i, :i].sum() + jump[i, (i + 1) % levels] / 2 for i in k])

    def counted(rows: np.ndarray, u: dict) -> np.ndarray:
        return step(rows, {**u, **dict.fromkeys(range(128), up[rows])})

    found = walk.distribution(counted, levels, levels, ["route"])
    counts = np.arange(64)
    poisson = np.exp(-mean[:, None] + counts * np.log(mean)[:, None] - np.cumsum(np.log(np.maximum(counts, 1))))
    for i in range(levels - 1):
        wanted = np.zeros(levels)
        np.add.at(wanted, np.minimum(i + counts, levels - 1), poisson[i])
        np.testing.assert_allclose(found[i], wanted, rtol=0, atol=EXACT)
    # given none to three jumps
    below = np.cumsum(poisson, 1)
    for number in (0, 1, 2, 3):
        middle = (below[:, number] + (below[:, number - 1] if number else 0)) / 2

        def given(rows: np.ndarray, u: dict, middle: np.ndarray = middle) -> np.ndarray:
            return step(rows, {**u, "route": middle[rows]})

        if number == 0:
            assert (step(k, {"route": middle}) == k).all()
            continue
        found = walk.distribution(given, levels, levels, list(range(number)), ways=64)
        for i in range(levels):
            wanted = np.zeros(levels)
            for targets in itertools.product(range(levels), repeat=number):
                end = i + sum(y - i for y in targets)
                wanted[min(max(end, 0), levels - 1)] += np.prod(jump[i, list(targets)])
            np.testing.assert_allclose(found[i], wanted, rtol=0, atol=EXACT)


class InTheLoop(Analytic):
    """The analytic sampler as the loop calls it: its last step where s = 0."""

    def step(self, prediction: Prediction, move: Move, noise: walk.CounterNoise) -> torch.Tensor:
        ends = (move.s <= 0).unsqueeze(-1)
        return torch.where(ends, self.last_step(prediction, noise), super().step(prediction, move, noise))


@pytest.mark.parametrize("kind", ["posterior", "score"])
@pytest.mark.parametrize("name", RANK_ONE)
def test_analytic_step(name: str, kind: str) -> None:
    """The positive part of (s P_{t|s}^{-1})_y P_{t|s}(k|y); the last step never leads to the mask."""
    process = PLACES[name].process
    head = HEADS[kind](process)
    problem = sites(name, head, [*SHORT, (0.3, 0.3), (1e-5, 0.0)], open_start=True)

    def form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return walk.analytic(process, score_of(head, output, k, at), k, at, s)

    found, wanted = problem.distribution(InTheLoop(), ["token"]), expected(form, problem)
    some = ~np.isnan(wanted).any(-1)  # see `test_analytic_last_step_with_nowhere_to_go`
    assert some.mean() > 0.9
    found = np.where(some[:, None], found, 0.0)
    same(found[some], wanted[some], problem, 1e-11)  # the inverse of P_{t|s} magnifies rounding, here up to 1e5 times
    if process.mask is not None:
        assert (found[problem.s == 0][:, process.mask] == 0).all()


@pytest.mark.parametrize("blocks", [2, 256])
def test_analytic_last_step_with_nowhere_to_go(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free score under the hybrid process can have no positive weight but the mask's: the token is a clean one even so."""
    in_blocks_of(blocks, monkeypatch)
    process = PLACES["hybrid-0.2"].process
    output = np.array([-4.0, -4.0, -4.0, 4.0])
    weights = walk.analytic_weights(process, np.exp(output)[None], np.array([0]), 0.5, 0.0)
    assert (weights[:, :3] < 0).all() and abs(weights.sum() - 1) < EXACT
    problem = Sites(m2s.LogScore(process), output[None], np.array([0]), *np.full((3, 1), 0.5))
    problem.s = np.zeros(1)
    for u in (0.0, 0.5, LAST):
        token = problem.outcome(InTheLoop())(np.array([0]), {"token": np.array([u])})
        assert token[0] < process.vocab


def test_samples_with_nowhere_to_go() -> None:
    """The same in the real loop, whose last step is from 1e-5: what is returned holds only ids below the vocabulary."""
    output = torch.tensor([-10.0, -10.0, -10.0, 10.0])
    head = m2s.LogScore(m2s.Hybrid(3, p_uniform=0.2))
    x = m2s.sample(lambda x_t, t: output.expand(*x_t.shape, 4), head, (16, 4), 4, "analytic", "linear")
    assert int(x.max()) < 3


MASKS = {
    "absorbing-linear": PLACES["absorbing-linear"],
    "absorbing-cosine": PLACES["absorbing-cosine"],
    "hybrid-0": Case(m2s.Hybrid(3, p_uniform=0.0), hybrid(3, 0.0), 3),
}
PLACES |= MASKS


@pytest.mark.parametrize("name", MASKS)
def test_ancestral_step(name: str) -> None:
    """A masked site is revealed with probability (alpha_s - alpha_t)/(1 - alpha_t), by mu; a revealed one stays."""
    process = MASKS[name].process
    problem = sites(name, m2s.Posterior(process), STEPS)

    def form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return walk.remasking(process, walk.posterior(process, output, k, t), k, t, s, 0.0)

    same(problem.distribution(Ancestral(), ["route", "token", "jump"]), expected(form, problem), problem)


@pytest.mark.parametrize("strength", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", MASKS)
def test_remasking_step(name: str, strength: float) -> None:
    """ReMDM's law; and whatever the strength, every site's own law at s is the exact one where the belief at t is exact."""
    process, oracle = MASKS[name].process, MASKS[name].oracle()
    problem = sites(name, m2s.Posterior(process), STEPS)

    def form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return walk.remasking(process, walk.posterior(process, output, k, t), k, t, s, strength)

    same(problem.distribution(Remasking(strength=strength), ["route", "token"]), expected(form, problem), problem)
    for t, s in ((0.999, 0.9), (0.7, 0.1), (0.5, 0.4), (0.3, 0.0)):
        distributions = walk.remasking(process, oracle.posterior(oracle.noisy, t), oracle.noisy, t, s, strength)
        found = np.einsum("n,nly->ly", oracle.marginal(t), distributions)
        wanted = np.einsum("n,nly->ly", oracle.marginal(s), walk.one_hot(oracle.noisy, process.states))
        np.testing.assert_allclose(found, wanted, atol=EXACT)


def permutations(length: int) -> np.ndarray:
    """Every order of the sites, as numbers in [0, 1): they are equally likely under independent uniforms."""
    return (np.array(list(itertools.permutations(range(length)))) + 0.5) / length


@pytest.mark.parametrize("reveal", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_first_hitting_step(name: str, reveal: int) -> None:
    """The sites are chosen evenly among the masked, the token by mu, and nothing else changes."""
    process, oracle = MASKS[name].process, MASKS[name].oracle()
    length, mask, t = oracle.length, process.mask, 0.6
    order = permutations(length)
    output = log(oracle.posterior(oracle.noisy, t))
    head = m2s.Posterior(process)
    for x, logits in zip(oracle.noisy[::5], output[::5], strict=True):
        batch = np.tile(x, (len(order), 1))
        prediction = Prediction(
            head, tensor(np.tile(logits, (len(order), 1, 1))), tensor(batch), tensor(np.full(len(order), t))
        )
        move = Move(tensor(np.full(len(order), t)), tensor(np.full(len(order), t)), tensor(np.full(len(order), reveal)))
        noise = Given({"order": tensor(order), "token": tensor(np.full(batch.shape, 0.4))})
        new = FirstHitting().step(prediction, move, noise).numpy()
        masked = x == mask
        changed = new != x
        assert (changed.sum(1) == min(reveal, masked.sum())).all()
        assert not changed[:, ~masked].any()
        assert (new < mask)[changed].all()
        share = changed.mean(0)[masked]
        np.testing.assert_allclose(share, min(reveal, masked.sum()) / max(masked.sum(), 1), atol=EXACT)
    problem = sites(name, head, [(0.999, 0.999), (0.6, 0.6), (1e-3, 1e-3)])
    found = walk.distribution(revealing(problem, FirstHitting()), len(problem.k), process.states, ["token"])
    same(found, expected(lambda output, k, t, s, at: walk.posterior(process, output, k, t), problem), problem)


def revealing(problem: Sites, sampler: Sampler) -> walk.Outcome:
    """One site to a row, and that one is to be revealed if it is masked."""

    def step(rows: np.ndarray, u: dict) -> np.ndarray:
        half = tensor(np.full((len(rows), 1), 0.5))
        noise = Given({"token": tensor(u["token"][:, None]), "order": half, "site": half})
        move = Move(tensor(problem.t[rows]), tensor(problem.s[rows]), tensor(np.ones(len(rows), dtype=int)))
        return sampler.step(problem.prediction(rows), move, noise).squeeze(-1).numpy()

    return step


@pytest.mark.parametrize("name", MASKS)
def test_first_hitting_times(name: str) -> None:
    """With n masks left the next is revealed at beta(tau) = beta(t) u^(1/n); with fewer calls, several at their last time."""
    process = MASKS[name].process
    rng, free = np.random.default_rng(0), np.array([4, 3, 1, 0, 4])
    u = rng.random((4, len(free)))
    u[:, 4] = [1e-12, LAST, 0.5, 1e-3]
    noise = Given({}, {number: tensor(row) for number, row in enumerate(u)})
    for steps in (1, 2, 3, 4, 9):
        t, s, reveal = FirstHitting().plan(steps, "cosine", tensor(free), m2s.Posterior(process), noise)
        assert reveal is not None and t.shape == s.shape == reveal.shape == (min(steps, 4), len(free))
        np.testing.assert_array_equal(t, s)
        np.testing.assert_array_equal(reveal.sum(0), free)
        done = np.cumsum(reveal.numpy(), 0)
        for sample, n in enumerate(free):
            assert int((reveal[:, sample] > 0).sum()) == min(steps, n)
            assert steps < n or int(reveal[:, sample].max()) <= 1
            beta = np.cumprod([1.0] + [u[j, sample] ** (1 / (n - j)) for j in range(n)])
            mixed = process.mixing(t[:, sample]).mask.numpy()
            np.testing.assert_allclose(mixed, beta[done[:, sample]], rtol=1e-9, atol=1e-15)


def test_first_hitting_time_has_the_law_of_the_first_of_n() -> None:
    """P(beta(tau) <= b) = b^n: each of n sites was, independently, masked by then with probability beta."""
    process = MASKS["absorbing-cosine"].process
    u = (np.arange(1000) + 0.5) / 1000
    for n in (1, 2, 5):
        noise = Given({}, {number: tensor(u) for number in range(n)})
        plan = FirstHitting().plan(n, "linear", tensor(np.full(1000, n)), m2s.Posterior(process), noise)
        beta = process.mixing(plan.t[0]).mask.numpy()
        np.testing.assert_allclose(beta**n, u, rtol=1e-9)


@pytest.mark.parametrize("name", MASKS)
def test_confidence_step(name: str) -> None:
    """Every masked site draws by mu, sharpened or not, and those whose tokens have the greatest unsharpened probability are
    kept, in the scheduled number. Between equal sites the least uniform "site" decides."""
    process, oracle = MASKS[name].process, MASKS[name].oracle()
    head, rng, mask = m2s.Posterior(process), np.random.default_rng(0), process.mask
    problem = sites(name, head, [(0.999, 0.5), (0.6, 0.3), (1e-3, 0.0)])
    found = walk.distribution(revealing(problem, Confidence()), len(problem.k), process.states, ["token"])
    same(found, expected(lambda output, k, t, s, at: walk.posterior(process, output, k, t), problem), problem)
    x = oracle.noisy
    logits = rng.normal(size=(len(x), oracle.length, process.states)) * 2
    u = rng.random(x.shape)
    tied = np.arange(len(x)) % 2 == 0  # the sites of every other sequence are equal, but for the uniform "site"
    logits[tied], u[tied] = logits[tied, :1], u[tied, :1]
    mu = walk.posterior(process, logits, x, 0.6)
    for sharp, strength, reveal in itertools.product([(1.0, None, 1.0), *SHARP], (0.0, 0.7), (0, 1, 2, oracle.length)):
        drawn = (np.cumsum(sharpened(mu.reshape(-1, process.states), *sharp).reshape(mu.shape), -1) <= u[..., None]).sum(-1)
        sure = np.take_along_axis(mu, drawn[..., None], -1).squeeze(-1)
        gumbel, ties = rng.random((2, *x.shape))
        gumbel[tied] = gumbel[tied, :1]
        prediction = Prediction(head, tensor(logits), tensor(x), tensor(np.full(len(x), 0.6)), LogitsProcessor(*sharp))
        move = Move(*(tensor(np.full(len(x), value)) for value in (0.6, 0.3, reveal)))
        noise = Given({"token": tensor(u), "order": tensor(gumbel), "site": tensor(ties)})
        new = Confidence(noise=strength).step(prediction, move, noise).numpy()
        value = np.log(sure) - strength * np.log(-np.log(gumbel))
        chosen = np.zeros(x.shape, dtype=bool)
        for row in range(len(x)):
            masked = np.flatnonzero(x[row] == mask)
            ranked = masked[np.lexsort((ties[row, masked], -np.round(value[row, masked], 12)))]
            chosen[row, ranked[:reveal]] = True
        np.testing.assert_array_equal(new, np.where(chosen, drawn, x))
    for steps, grid in itertools.product((1, 3, 8), ("linear", "cosine")):
        free = np.array([0, 1, 5, 64])
        _, s, counts = Confidence().plan(steps, grid, tensor(free), head, Given({}))
        assert counts is not None and (counts >= 0).all()
        left = free - np.cumsum(counts.numpy(), 0)
        wanted = np.round(free * process.mixing(s).mask.numpy())
        np.testing.assert_array_equal(left[:-1], wanted[:-1])
        np.testing.assert_array_equal(left[-1], 0)


# ------------------------------------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-cosine", "hybrid-0.6"])
def test_three_routes_analytic_and_projection_are_one_law(name: str) -> None:
    """On a realizable score: the mixture of three routes, the K-vector, the analytic predictor, and the projected score."""
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
    """Their laws differ by O((t - s)^2)."""
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
    """What the analytic predictor drops off the polytope is what SPEC 4 says, and none of it is left after the projection."""
    process = PLACES[name].process
    free = m2s.LogScore(process)
    problem = sites(name, free, [(0.9, 0.5), (0.5, 0.4), (0.2, 0.1)], kinds=(1, 3))
    rows = np.arange(len(problem.k))
    move = Move(tensor(problem.t), tensor(problem.s))
    half = Given({"token": tensor(np.full((len(rows), 1), 0.5))})
    prediction = problem.prediction(rows)
    Analytic().step(prediction, move, half)
    found = prediction.notes["negative_mass"].squeeze(-1).numpy()
    weights = expected(lambda output, k, t, s, at: walk.analytic_weights(process, np.exp(output), k, t, s), problem)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-11)
    np.testing.assert_allclose(found, np.maximum(-weights, 0).sum(-1), atol=1e-11)
    if name != "absorbing-linear" and name != "uniform-2":
        assert (found > 1e-3).any()
    if isinstance(process, m2s.Uniform):
        score = np.where(walk.one_hot(problem.k, process.states) > 0, 1.0, np.exp(problem.output))
        growth = ((1 - problem.s) / (1 - problem.t))[:, None]  # e^D for alpha = 1 - t
        mean = score.mean(-1, keepdims=True)
        np.testing.assert_array_equal(weights < 0, score < (1 - 1 / growth) * mean)
        arrive = (1 - 1 / growth) / process.vocab + walk.one_hot(problem.k, process.states) / growth
        np.testing.assert_allclose(weights, (growth * score - (growth - 1) * mean) * arrive, atol=1e-11)
    projected = replace(problem, head=m2s.Projected(free)).prediction(rows)
    Analytic().step(projected, move, half)
    assert float(projected.notes["negative_mass"].max()) < EXACT


# -------------------------------------------------------------------------------------------------------------- terminal laws


SMALL = {
    "uniform": Case(m2s.Uniform(3, m2s.Linear()), tabulated(uniform_rates(3), linear), 3),
    "absorbing": Case(m2s.Absorbing(3, m2s.Linear()), tabulated(absorbing_rates(3), linear, 3), 3),
}


def walker(case: Case, sampler: str, head: m2s.Head, strength: float) -> tuple[walk.Form, bool]:
    """The closed form of one parallel step from raw output, and whether it starts at 1 - t_min."""
    process = case.process

    def form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        mu = walk.posterior(process, output, k, at, head.offset == "exact")
        if s == 0:  # the last step of every sampler
            return mu
        if sampler in ("euler", "tau_leaping"):
            rates = rates_of(head, output, k, at)
            return (walk.euler if sampler == "euler" else walk.tau_leap)(rates, k, t - s)
        if sampler == "analytic":
            return walk.analytic(process, score_of(head, output, k, at), k, at, s)
        if sampler == "remasking":
            return walk.remasking(process, mu, k, at, s, strength)
        return walk.bayes(process, mu, k, at, s)

    return form, sampler in ("euler", "tau_leaping", "analytic")


def chained(
    case: Case,
    network: walk.Beliefs,
    sampler: str,
    head: m2s.Head,
    grid: str,
    steps: int,
    t_min: float,
    strength: float = 0.1,
) -> np.ndarray:
    """The exact terminal law over clean sequences."""
    form, open_start = walker(case, sampler, head, strength)
    ends = walk.grid(grid, steps, 1e-5 if sampler == "analytic" else None)
    p = walk.terminal(case.process, case.length, network, form, ends, open_start, t_min)
    oracle = case.oracle()
    assert abs(p.sum() - 1) < 1e-9
    assert p[(oracle.noisy >= case.process.vocab).any(1)].sum() < EXACT
    return p[(oracle.noisy < case.process.vocab).all(1)]


@pytest.mark.parametrize("grid", ["linear", "cosine"])
@pytest.mark.parametrize("sampler", ["bayes", "euler", "analytic", "tau_leaping"])
@pytest.mark.parametrize("name", SMALL)
def test_terminal_law_converges(name: str, sampler: str, grid: str) -> None:
    """With the exact posterior, the distance to the data law falls like 1/steps; the last doubling does what the others say."""
    distance, order, message = falling(name, sampler, grid, [8, 16, 32, 64])
    assert order > 0.8, message
    assert distance[3] < 1.05 * distance[2] * 2**-order, message


def falling(name: str, sampler: str, grid: str, steps: list[int], strength: float = 0.1) -> tuple[list[float], float, str]:
    """Distances to the data law, and their order of decrease but for the last, as a message too."""
    case = SMALL[name]
    head, distribution = m2s.Posterior(case.process), case.oracle().distribution

    def network(x: np.ndarray, t: float) -> np.ndarray:
        return exact_logits(name, t)

    each = [chained(case, network, sampler, head, grid, n, 1e-6, strength) for n in steps]
    distance = [walk.total_variation(p, distribution) for p in each]
    order = -np.polyfit(np.log2(steps[:-1]), np.log2(distance[:-1]), 1)[0]
    return distance, order, f"{name} {sampler} {grid}: order {order:.3f}, distances {distance} after {steps} steps"


@lru_cache(maxsize=1000)
def exact_logits(name: str, t: float) -> np.ndarray:
    """log mu of every sequence."""
    oracle = SMALL[name].oracle()
    return log(oracle.posterior(oracle.noisy, t))


@pytest.mark.parametrize("grid", ["linear", "cosine"])
def test_remasking_converges_slower_the_stronger_it_is(grid: str) -> None:
    """Its strength is a share of all that may be masked again, not a rate, so that it is as much in a short step as in a long
    one: two sites are revealed at once in a share of steps that does not shrink, and the error falls like steps^(-1/2) only.
    Without it, this is the ancestral sampler, of order one."""
    strong, order, message = falling("absorbing", "remasking", grid, [16, 32, 64, 128], strength=1.0)
    assert 0.5 < order < 0.65, message
    assert strong[3] < 1.05 * strong[2] * 2**-0.5, message
    none, order, message = falling("absorbing", "remasking", grid, [8, 16, 32, 64], strength=0.0)
    assert order > 0.8 and none[3] < 1.05 * none[2] * 2**-order, message
    ancestral, _, _ = falling("absorbing", "bayes", grid, [8, 16, 32, 64])
    np.testing.assert_allclose(none, ancestral, atol=1e-11)
    assert strong[1] > 2 * none[2]


@pytest.mark.parametrize("name", MASKS)
def test_first_hitting_has_no_discretisation_error(name: str) -> None:
    """One token a call, at the exact posterior, which is the same at every time: the data law itself, over all orders."""
    oracle, process = MASKS[name].oracle(), MASKS[name].process
    early, late = (oracle.posterior(oracle.noisy, t) for t in (0.2, 0.8))
    np.testing.assert_allclose(early, late, atol=1e-11)
    x, masked = oracle.noisy, oracle.noisy == process.mask
    left = masked.sum(1)
    matrix = np.diag((left == 0).astype(float))
    into = oracle.neighbours(x)
    for i, y in itertools.product(range(oracle.length), range(process.vocab)):
        rows = np.flatnonzero(masked[:, i])
        matrix[rows, into[rows, i, y]] += early[rows, i, y] / left[rows]
    p = (left == oracle.length).astype(float)
    for _ in range(oracle.length):
        p = p @ matrix
    np.testing.assert_allclose(p[left == 0], oracle.distribution, atol=1e-10)
    assert walk.total_variation(p[left == 0], oracle.distribution) < 1e-10


# ------------------------------------------------------------------------------------------------------------------- corrector


@pytest.mark.parametrize("kind", ["posterior", "score"])
@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-linear", "hybrid-0.2", "birth-death"])
def test_gibbs_corrector_leaves_the_law_as_it_is(name: str, kind: str) -> None:
    """p_t G = p_t, with G over all states from the step itself: a site chosen evenly, then the law of its token."""
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
                new = gibbs(prediction, 1, Given({"order": tensor(order), "token": tensor(token)})).numpy()
                others = np.arange(length) != i
                assert (new[:, others] == x[rows][:, others]).all()
                return new[:, i]

            distributions = walk.distribution(step, len(x), process.states, ["token"])
            np.add.at(matrix, (np.arange(len(x))[:, None], oracle.neighbours(x)[:, i]), distributions / length)
        p = oracle.marginal(t)
        np.testing.assert_allclose(matrix.sum(1), 1, atol=EXACT)
        np.testing.assert_allclose(p @ matrix, p, rtol=0, atol=EXACT)
        assert np.abs(matrix - np.eye(len(x))).max() > 0.01


def test_gibbs_corrector_chooses_evenly_among_free_sites() -> None:
    """Whatever the order of the uniforms, one free site is drawn; each as often as any other, and a clamped one never."""
    process = m2s.Uniform(3, m2s.Linear())
    order = permutations(4)
    x = np.zeros(order.shape, dtype=int)
    free = np.tile([True, False, True, True], (len(order), 1))
    logits = np.tile([-50.0, 50.0, -50.0], (*order.shape, 1))  # a drawn site becomes 1
    for count, share in ((1, 1 / 3), (2, 2 / 3), (3, 1.0), (9, 1.0)):
        prediction = Prediction(
            m2s.LogScore(process), tensor(logits), tensor(x), tensor(np.full(len(x), 0.5)), free=tensor(free)
        )
        new = gibbs(prediction, count, Given({"order": tensor(order), "token": tensor(np.full(x.shape, 0.5))})).numpy()
        np.testing.assert_allclose(new.mean(0), np.where(free[0], share, 0.0))
        assert (new.sum(1) == min(count, 3)).all()


# --------------------------------------------------------------------------------------------------------- guidance, sharpening


def guided(c: np.ndarray, u: np.ndarray, g: float) -> np.ndarray:
    """c^g u^(1-g), 0 where either is."""
    inside = (c > 0) & (u > 0)
    c, u = np.where(inside, c, 1.0), np.where(inside, u, 1.0)
    return np.where(inside, np.exp(g * np.log(c) + (1 - g) * np.log(u)), 0.0)


@pytest.mark.parametrize("g", [0.0, 0.5, 2.0, 3.0])
@pytest.mark.parametrize(
    ("name", "kind"), [("uniform-linear", "posterior"), ("hybrid-0.2", "offset"), ("absorbing-linear", "posterior")]
)
def test_guidance(name: str, kind: str, g: float) -> None:
    """mu ∝ mu_c^g mu_u^(1-g) in Bayes and Euler steps, or R = R_c^g R_u^(1-g) in Euler steps of a posterior and of a score."""
    process = PLACES[name].process
    head, steps = HEADS[kind](process), [(0.9, 0.7), (0.5, 0.0)]
    offset = kind == "offset"
    problem = sites(name, head, steps, kinds=(0, 2))
    problem.without = sites(name, head, steps, kinds=(1, 3)).output
    problem.logits_processor = LogitsProcessor(guidance=g)
    with_without = replace(problem, output=np.stack([problem.output, problem.without], 1))

    def both(output: np.ndarray, k: np.ndarray, t: float) -> np.ndarray:
        mu = guided(*(walk.posterior(process, output[:, i], k, t, offset) for i in (0, 1)), g)
        return mu / mu.sum(-1, keepdims=True)

    def bayes(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return walk.bayes(process, both(output, k, t), k, t, s)

    def euler(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        score = walk.bridge(process, both(output, k, t), k, t)
        return walk.euler(walk.reverse_rates(process, score, k, t), k, t - s)

    def on_rates(head: m2s.Head, output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return walk.euler(guided(*(rates_of(head, output[:, i], k, t) for i in (0, 1)), g), k, t - s)

    hints = {"route": routes_of(process, both, with_without)}
    same(problem.distribution(Bayes(), ["route", "token", "jump"], hints), expected(bayes, with_without), problem)
    same(problem.distribution(Euler(), ["route", "token", "jump"]), expected(euler, with_without), problem)
    problem.logits_processor = LogitsProcessor(guidance=g, guide="rates")
    same(problem.distribution(Euler(), ["route", "token"]), expected(partial(on_rates, head), with_without), problem)
    free = m2s.LogScore(process)
    problem = replace(sites(name, free, steps, kinds=(0, 2)), logits_processor=LogitsProcessor(guidance=g, guide="rates"))
    problem.without = sites(name, free, steps, kinds=(1, 3)).output
    with_without = replace(problem, output=np.stack([problem.output, problem.without], 1))
    same(problem.distribution(Euler(), ["route", "token"]), expected(partial(on_rates, free), with_without), problem)


@pytest.mark.parametrize("g", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("uniform-linear", "posterior"), ("hybrid-0.2", "offset"), ("absorbing-linear", "posterior"), ("gaussian", "posterior")],
)
def test_guidance_of_steps(name: str, kind: str, g: float) -> None:
    """p(x_s) ∝ p_c(x_s)^g p_u(x_s)^(1-g) of the one-step distributions (UDLM's D-CFG), for Bayes and for analytic steps."""
    process = PLACES[name].process
    steps = [(0.9, 0.7), (0.5, 0.1)]

    def expected_of(form: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def both(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
            conditional, unconditional = (form(output[:, i], k, t, s) for i in (0, 1))
            combined = unconditional if g == 0 else guided(conditional, unconditional, g)
            combined = np.where(combined.sum(-1, keepdims=True) > 0, combined, conditional)  # nothing has weight in both
            return combined / combined.sum(-1, keepdims=True)

        return both

    def check(head: m2s.Head, sampler: Sampler, form: Callable[..., np.ndarray]) -> None:
        problem = replace(sites(name, head, steps, kinds=(0, 2)), logits_processor=LogitsProcessor(guidance=g, guide="step"))
        problem.without = sites(name, head, steps, kinds=(1, 0)).output
        with_without = replace(problem, output=np.stack([problem.output, problem.without], 1))
        same(problem.distribution(sampler, ["token"]), expected(expected_of(form), with_without), problem)

    def bayes(output: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
        return walk.bayes(process, walk.posterior(process, output, k, t, kind == "offset"), k, t, s)

    def analytic(output: np.ndarray, k: np.ndarray, t: float, s: float) -> np.ndarray:
        score = np.exp(output)
        score[np.arange(len(k)), k] = 1.0
        return walk.analytic(process, score, k, t, s).clip(0)

    check(HEADS[kind](process), Bayes(), bayes)
    if isinstance(process, RankOne):
        check(m2s.LogScore(process), Analytic(), analytic)


def routes_of(process: m2s.Process, prediction: Callable[..., np.ndarray], problem: Sites) -> np.ndarray:
    """`routes` where the posterior is some function of the output."""
    return expected(lambda output, k, t, s, at: routes(process, False, log(prediction(output, k, t)), k, t, s, at), problem)


def sharpened(p: np.ndarray, temperature: float, top_k: int | None, top_p: float) -> np.ndarray:
    """Temperature, then the k likeliest, then the fewest that hold top_p; one row after another, by sorting."""
    out = np.zeros_like(p)
    for row, distribution in zip(out, p, strict=True):
        powered = np.where(distribution > 0, np.exp(log(distribution) / temperature), 0.0)
        powered /= powered.sum()
        order = sorted(range(len(distribution)), key=lambda z: -powered[z])
        if top_k is not None:
            order = [z for z in order if powered[z] >= powered[order[min(top_k, len(order)) - 1]]]
        total, mass = powered[order].sum(), 0.0
        for z in order:
            if mass / total >= top_p:
                break
            row[z] = powered[z]
            mass += powered[z]
        row /= row.sum()
    return out


SHARP = [(0.5, None, 1.0), (1.0, 1, 1.0), (1.0, None, 0.6), (0.7, 2, 0.8), (3.0, 99, 0.999)]


@pytest.mark.parametrize("on", ["posterior", "leave_one_out"])
@pytest.mark.parametrize("name", ["uniform-exponential", "absorbing-cosine", "hybrid-0.6", "gaussian"])
def test_sharpening(name: str, on: str) -> None:
    """Temperature, top-k and top-p on the posterior or on the leave-one-out law, as the law of the last step; and an Euler step
    of the sharpened belief."""
    process = PLACES[name].process
    head, streamed = m2s.Posterior(process, offset="exact"), name in RANK_ONE
    problem = sites(name, head, [(0.9, 0.0), (0.3, 0.0)] if streamed else [(0.3, 0.0)], kinds=(0, 1))
    for number, (temperature, top_k, top_p) in enumerate(SHARP):
        problem.logits_processor = LogitsProcessor(temperature, top_k, top_p, on)

        def prediction(output: np.ndarray, k: np.ndarray, t: float, sharp: tuple = SHARP[number]) -> np.ndarray:
            mu = walk.posterior(process, output, k, t, True)
            column = np.moveaxis(kernel(process, t)[:, k], 0, -1)
            if on == "posterior":
                return sharpened(mu, *sharp)
            nu = np.divide(mu, column, out=np.zeros_like(mu), where=column > 0)
            mu = sharpened(nu / nu.sum(-1, keepdims=True), *sharp) * column
            return mu / mu.sum(-1, keepdims=True)

        def bayes(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float, mu: Callable = prediction) -> np.ndarray:
            return mu(output, k, t)

        def euler(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float, mu: Callable = prediction) -> np.ndarray:
            rates = walk.reverse_rates(process, walk.bridge(process, mu(output, k, t), k, t), k, t)
            return walk.euler(rates, k, t - s)

        same(
            problem.distribution(Bayes(), ["route", "token", "jump"] if streamed else ["token"]),
            expected(bayes, problem),
            problem,
        )
        if number in (1, 3):
            found = problem.distribution(Euler(), ["route", "token", "jump"] if streamed else ["route", "token"])
            same(found, expected(euler, problem), problem)


# ---------------------------------------------------------------------------------------------------------------- the real loop


def agrees(samples: np.ndarray, case: Case, distribution: np.ndarray) -> None:
    """Pearson's chi-square of samples against a law over clean sequences, cells of less than five expected put together."""
    oracle = case.oracle()
    counts = np.bincount(samples @ case.process.vocab ** np.arange(case.length)[::-1], minlength=len(oracle.clean))
    wanted = len(samples) * distribution
    rare = wanted < 5
    counts, wanted = (np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (counts, wanted))
    assert chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue > 1e-4
    assert (counts[wanted == 0] == 0).all()


SAMPLES, CALLS = 20_000, 6
LOOP = [("uniform", "bayes"), ("uniform", "euler"), ("uniform", "analytic"), ("uniform", "tau_leaping")]
LOOP += [("absorbing", "bayes"), ("absorbing", "euler"), ("absorbing", "tau_leaping"), ("absorbing", "remasking")]


@pytest.mark.parametrize(("name", "sampler"), [*LOOP, ("absorbing", "first_hitting"), ("uniform", "predictor_corrector")])
def test_samples_have_the_chained_law(name: str, sampler: str) -> None:
    """`m2s.sample` with the exact network, 20,000 samples, against the exact law of its own walk."""
    case = SMALL[name]
    oracle, head = case.oracle(), m2s.Posterior(case.process)

    def table(t: float) -> np.ndarray:
        return exact_logits(name, float(np.float32(t)))  # what a network is told

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        assert (t.dtype == torch.float32 and (t == t[0]).all()) or sampler == "first_hitting"
        return tensor(table(0.5 if sampler == "first_hitting" else float(t[0]))[oracle.index(x_t.numpy())])

    samples = m2s.sample(model, head, (SAMPLES, case.length), CALLS, sampler, "cosine", seed=3, micro_batch=5000).numpy()
    if sampler == "first_hitting":
        distribution = oracle.distribution  # the posterior under a mask does not depend on time
    elif sampler == "predictor_corrector":
        distribution = corrected(case, table)
    else:
        distribution = chained(case, lambda x, t: table(t), sampler, head, "cosine", CALLS, 1e-3)
        assert walk.total_variation(distribution, oracle.distribution) > 0.002
    agrees(samples, case, distribution)


def corrected(case: Case, table: Callable[[float], np.ndarray]) -> np.ndarray:
    """The terminal law of Bayes steps, each but the last followed by one Gibbs move at one site."""
    process, oracle, t_min = case.process, case.oracle(), 1e-3
    x, ends = oracle.noisy, walk.grid("cosine", CALLS)
    p = np.full(len(x), 1 / len(x))
    for t, s in itertools.pairwise(ends):
        at = min(t, 1 - t_min)
        mu = walk.posterior(process, table(walk.seen(t, t_min)), x, at)
        p = p @ walk.parallel(mu if s == 0 else walk.bayes(process, mu, x, at, s))
        if s > 0:
            score = walk.bridge(process, walk.posterior(process, table(s), x, s), x, s)
            matrix = np.zeros((len(x), len(x)))
            gibbs_law = score / score.sum(-1, keepdims=True) / case.length
            np.add.at(matrix, (np.arange(len(x))[:, None, None], oracle.neighbours(x)), gibbs_law)
            p = p @ matrix
    return p


class Tiny(torch.nn.Module):
    """A small network over all sites at once."""

    def __init__(self, states: int, length: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(states, 16)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16 * length + 2, 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU()
        )
        self.last = torch.nn.Linear(64, length * states)
        self.shape = (length, states)

    def forward(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        time = torch.stack([t, torch.log(t)], -1)
        return self.last(self.body(torch.cat([self.embed(x_t).flatten(1), time], -1))).unflatten(-1, self.shape)


@pytest.mark.parametrize(("name", "offset"), [("uniform", "exact"), ("absorbing", "none")])
def test_samples_of_a_trained_network_have_its_chained_law(name: str, offset: str) -> None:
    """A network trained here on the data law: what the loop draws is the exact walk of that same network, not of the data."""
    case = SMALL[name]
    oracle, head = case.oracle(), m2s.Posterior(case.process, offset=offset)
    model = Tiny(case.process.states, case.length)
    objective = m2s.Objective(model, head)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(100):
        x_0 = tensor(oracle.clean[rng.choice(len(oracle.clean), 256, p=oracle.distribution)])
        loss = objective(x_0, m2s.stratified_times(256, 1e-3, 1 - 1e-3)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-20:]) < np.mean(losses[:10])

    def network(x: np.ndarray, t: float) -> np.ndarray:
        with torch.no_grad():
            return model(tensor(x), torch.full((len(x),), t)).double().numpy()

    for sampler in ("bayes", "euler"):
        distribution = chained(case, network, sampler, head, "cosine", CALLS, 1e-3)
        samples = m2s.sample(model, head, (SAMPLES, case.length), CALLS, sampler, "cosine", seed=5, micro_batch=5000)
        agrees(samples.numpy(), case, distribution)
        assert 0.01 < walk.total_variation(distribution, oracle.distribution) < 0.5
