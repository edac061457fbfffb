"""The exact distribution of one step of the samplers for masks."""

import itertools

import numpy as np
import pytest

import closed_forms as forms
import exact_steps
import m2s
from closed_forms import log
from exact_steps import LARGEST, GivenNoise, Sites, tensor
from m2s.samplers import (
    Ancestral,
    Confidence,
    FirstHitting,
    LogitsProcessor,
    Move,
    Prediction,
    Remasking,
    Sampler,
)
from step_cases import EXACT, MASKS, SHARP, STEPS, expected, permutations, same, sharpened, sites

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("name", MASKS)
def test_ancestral_step(name: str) -> None:
    """A masked site is revealed with probability (alpha_s - alpha_t)/(1 - alpha_t), by mu; a revealed one stays."""
    process = MASKS[name].process
    problem = sites(name, m2s.Posterior(process), STEPS)

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.remasking(process, forms.posterior(process, output, k, t), k, t, s, 0.0)

    same(problem.distribution(Ancestral(), ["route", "token", "jump"]), expected(closed_form, problem), problem)


@pytest.mark.parametrize("strength", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", MASKS)
def test_remasking_step(name: str, strength: float) -> None:
    """The step of ReMDM. With an exact prediction the marginal of every site at s is exact, for any strength."""
    process, oracle = MASKS[name].process, MASKS[name].oracle()
    problem = sites(name, m2s.Posterior(process), STEPS)

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.remasking(process, forms.posterior(process, output, k, t), k, t, s, strength)

    same(problem.distribution(Remasking(strength=strength), ["route", "token"]), expected(closed_form, problem), problem)
    for t, s in ((0.999, 0.9), (0.7, 0.1), (0.5, 0.4), (0.3, 0.0)):
        distributions = forms.remasking(process, oracle.posterior(oracle.noisy, t), oracle.noisy, t, s, strength)
        found = np.einsum("n,nly->ly", oracle.marginal(t), distributions)
        wanted = np.einsum("n,nly->ly", oracle.marginal(s), forms.one_hot(oracle.noisy, process.states))
        np.testing.assert_allclose(found, wanted, atol=EXACT)


@pytest.mark.parametrize("reveal", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_first_hitting_step(name: str, reveal: int) -> None:
    """Masked sites are chosen uniformly, tokens are drawn from mu, and nothing else changes."""
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
        noise = GivenNoise({"order": tensor(order), "token": tensor(np.full(batch.shape, 0.4))})
        new = FirstHitting().step(prediction, move, noise).numpy()
        masked = x == mask
        changed = new != x
        assert (changed.sum(1) == min(reveal, masked.sum())).all()
        assert not changed[:, ~masked].any()
        assert (new < mask)[changed].all()
        share = changed.mean(0)[masked]
        np.testing.assert_allclose(share, min(reveal, masked.sum()) / max(masked.sum(), 1), atol=EXACT)
    problem = sites(name, head, [(0.999, 0.999), (0.6, 0.6), (1e-3, 1e-3)])
    found = exact_steps.exact_distribution(revealing(problem, FirstHitting()), len(problem.k), process.states, ["token"])
    same(found, expected(lambda output, k, t, s, at: forms.posterior(process, output, k, t), problem), problem)


def revealing(problem: Sites, sampler: Sampler) -> exact_steps.Outcome:
    """A step of samples with one site, which is revealed if it is masked."""

    def step(rows: np.ndarray, u: dict) -> np.ndarray:
        half = tensor(np.full((len(rows), 1), 0.5))
        noise = GivenNoise({"token": tensor(u["token"][:, None]), "order": half, "site": half})
        move = Move(tensor(problem.t[rows]), tensor(problem.s[rows]), tensor(np.ones(len(rows), dtype=int)))
        return sampler.step(problem.prediction(rows), move, noise).squeeze(-1).numpy()

    return step


@pytest.mark.parametrize("name", MASKS)
def test_first_hitting_times(name: str) -> None:
    """With n masks left the next is revealed at beta(tau) = beta(t) u^(1/n). With fewer calls, several at the last time."""
    process = MASKS[name].process
    rng, free = np.random.default_rng(0), np.array([4, 3, 1, 0, 4])
    u = rng.random((4, len(free)))
    u[:, 4] = [1e-12, LARGEST, 0.5, 1e-3]
    noise = GivenNoise({}, {number: tensor(row) for number, row in enumerate(u)})
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


def test_first_hitting_time_is_the_first_of_n() -> None:
    """P(beta(tau) <= b) = b^n: n sites are masked independently, each with probability beta."""
    process = MASKS["absorbing-cosine"].process
    u = (np.arange(1000) + 0.5) / 1000
    for n in (1, 2, 5):
        noise = GivenNoise({}, {number: tensor(u) for number in range(n)})
        plan = FirstHitting().plan(n, "linear", tensor(np.full(1000, n)), m2s.Posterior(process), noise)
        beta = process.mixing(plan.t[0]).mask.numpy()
        np.testing.assert_allclose(beta**n, u, rtol=1e-9)


@pytest.mark.parametrize("name", MASKS)
def test_confidence_step(name: str) -> None:
    """Every masked site draws from mu, sharpened or not. The scheduled number of sites with the greatest unsharpened
    probability is revealed. Between equal sites the smallest uniform "site" decides."""
    process, oracle = MASKS[name].process, MASKS[name].oracle()
    head, rng, mask = m2s.Posterior(process), np.random.default_rng(0), process.mask
    problem = sites(name, head, [(0.999, 0.5), (0.6, 0.3), (1e-3, 0.0)])
    found = exact_steps.exact_distribution(revealing(problem, Confidence()), len(problem.k), process.states, ["token"])
    same(found, expected(lambda output, k, t, s, at: forms.posterior(process, output, k, t), problem), problem)
    x = oracle.noisy
    logits = rng.normal(size=(len(x), oracle.length, process.states)) * 2
    u = rng.random(x.shape)
    tied = np.arange(len(x)) % 2 == 0  # the sites of every other sequence are equal, but for the uniform "site"
    logits[tied], u[tied] = logits[tied, :1], u[tied, :1]
    mu = forms.posterior(process, logits, x, 0.6)
    for sharp, strength, reveal in itertools.product([(1.0, None, 1.0), *SHARP], (0.0, 0.7), (0, 1, 2, oracle.length)):
        drawn = (np.cumsum(sharpened(mu.reshape(-1, process.states), *sharp).reshape(mu.shape), -1) <= u[..., None]).sum(-1)
        sure = np.take_along_axis(mu, drawn[..., None], -1).squeeze(-1)
        gumbel, ties = rng.random((2, *x.shape))
        gumbel[tied] = gumbel[tied, :1]
        prediction = Prediction(head, tensor(logits), tensor(x), tensor(np.full(len(x), 0.6)), LogitsProcessor(*sharp))
        move = Move(*(tensor(np.full(len(x), value)) for value in (0.6, 0.3, reveal)))
        noise = GivenNoise({"token": tensor(u), "order": tensor(gumbel), "site": tensor(ties)})
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
        _, s, counts = Confidence().plan(steps, grid, tensor(free), head, GivenNoise({}))
        assert counts is not None and (counts >= 0).all()
        left = free - np.cumsum(counts.numpy(), 0)
        wanted = np.round(free * process.mixing(s).mask.numpy())
        np.testing.assert_array_equal(left[:-1], wanted[:-1])
        np.testing.assert_array_equal(left[-1], 0)
