"""Estimators of the likelihood: exact values by an independent enumeration, certificates, and unbiased draws."""

import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import binom
from test_elbo import ELBO, T_MIN, exact_terms

import m2s
from exact_steps import unchecked
from m2s.evaluation.likelihood import (
    ESTIMATORS,
    Certificate,
    Options,
    World,
    certify,
    exact_network,
    measure,
    random_network,
    reverse,
    supported,
)
from m2s.evaluation.likelihood.reverse import exact_nll
from m2s.process.schedule import Rescaled
from oracle import Network, Oracle

OPTIONS = Options(t_min=T_MIN, steps=4)


def world_of(name: str, seed: int = 11, length: int = 2) -> tuple[World, Oracle, Network]:
    """A world of the library and the oracle of the same problem, with one random network."""
    case = ELBO[name]
    oracle = Oracle(case.noise, length)
    network = Network(oracle, seed)
    return World(network, m2s.Posterior(case.process), length, OPTIONS), oracle, network


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-loglinear", "hybrid-0.6", "uniform-geometric"])
def test_exact_terms_agree_with_the_oracle(name: str) -> None:
    """Integral, prior and reconstruction by the library's enumeration are those of the oracle, which shares no formula."""
    world, oracle, network = world_of(name)
    terms: dict[str, np.ndarray] = {}
    for term in ESTIMATORS["nelbo"].build(world.head, OPTIONS):
        terms[term.name] = terms.get(term.name, 0.0) + world.expected(term).numpy()
    integral, prior, reconstruction = exact_terms(name, network, oracle, T_MIN)
    np.testing.assert_allclose(terms["integral"], integral, rtol=1e-8)
    np.testing.assert_allclose(terms["prior"], prior, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(terms["reconstruction"], reconstruction, rtol=1e-8)


def random_order_nll(oracle: Oracle, network: Network) -> np.ndarray:
    """-log of the mean over orders of the probability of each clean sequence, one mask at a time; t = n/L for n masks."""
    mask, length, found = oracle.noise.vocab, oracle.length, []
    for x in oracle.clean:
        each = []
        for order in itertools.permutations(range(length)):
            x_t, p = np.full(length, mask), 1.0
            for number, i in zip(range(length, 0, -1), order, strict=True):
                t = min(max(number / length, T_MIN), 1 - T_MIN)
                p *= network.posterior(x_t[None], t)[0, i, x[i]]
                x_t[i] = x[i]
            each.append(p)
        found.append(-math.log(np.mean(each)))
    return np.array(found)


def random_order_bound(oracle: Oracle, network: Network) -> np.ndarray:
    """The mean over orders of the NLL: the any-order NELBO."""
    mask, length, found = oracle.noise.vocab, oracle.length, []
    for x in oracle.clean:
        total = 0.0
        for order in itertools.permutations(range(length)):
            x_t = np.full(length, mask)
            for number, i in zip(range(length, 0, -1), order, strict=True):
                t = min(max(number / length, T_MIN), 1 - T_MIN)
                total -= math.log(network.posterior(x_t[None], t)[0, i, x[i]])
                x_t[i] = x[i]
        found.append(total / math.factorial(length))
    return np.array(found)


def test_any_order_agrees_with_permutations() -> None:
    """LLaDA's Monte Carlo has the mean of the any-order NELBO, and its reverse process draws one mask at a time."""
    world, oracle, network = world_of("absorbing-linear", length=3)
    found = world.nats(ESTIMATORS["llada"]).numpy()
    # Times reach a network in float32.
    np.testing.assert_allclose(found, random_order_bound(oracle, network), rtol=1e-7)
    nll, error = exact_nll(world, ESTIMATORS["llada"])
    np.testing.assert_allclose(nll, random_order_nll(oracle, network), rtol=1e-7)
    assert error == 0.0


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-loglinear", "hybrid-0.6"])
def test_reverse_process_agrees_with_the_oracle(name: str) -> None:
    """The NLL of the reverse process in continuous time, against an adaptive solver of the oracle's rates."""
    world, oracle, network = world_of(name)
    low, x = T_MIN, oracle.noisy

    def clipped(t: float) -> float:
        return min(max(t, T_MIN), 1 - T_MIN)

    reference, end = oracle.noise.transition_matrix(1 - 1e-15)[: oracle.noise.vocab].mean(0), 1 - T_MIN
    if name != "uniform-linear":
        end = 1 - 1e-9
    if name == "absorbing-loglinear":
        masks = np.full((1, oracle.length), oracle.noise.states - 1)
        vocab = oracle.noise.vocab
        reference = network.posterior(masks, 1 - T_MIN)[0, :, :vocab] @ oracle.noise.transition_matrix(1.0)[:vocab]
    start = oracle.terminal(lambda x, t: oracle.bridge(network.posterior(x, clipped(t)), x, t), reference, end, low)
    last = network.posterior(x, low)
    if "absorbing" in name:  # a token that is not masked stays
        clean = np.eye(oracle.noise.states)[x]
        last = np.where((x == oracle.noise.vocab)[..., None], last, clean)
    rows = np.stack([last[:, i, oracle.clean[:, i]] for i in range(oracle.length)]).prod(0)
    nll, error = exact_nll(world, ESTIMATORS["nelbo"])
    np.testing.assert_allclose(nll, -np.log(start @ rows), atol=1e-6 + error)
    assert error < 1e-4


@pytest.mark.parametrize("name", ["absorbing-loglinear", "uniform"])
def test_the_stated_error_bounds_the_error_of_the_reverse_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of -log p(x) is at most the stated one: the reference has four times as many intervals."""
    head = TIGHT[name]
    world = World(exact_network(head, 2) if name == "uniform" else random_network(head.process, 2), head, 2)
    found, error = exact_nll(world, ESTIMATORS["nelbo"])
    monkeypatch.setattr(reverse, "INTERVALS", 4 * reverse.INTERVALS)
    reference, finer = exact_nll(world, ESTIMATORS["nelbo"])
    assert float((found - reference).abs().max()) < error < 1e-5
    assert finer < error / 16


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-linear", "hybrid-0.6"])
def test_discrete_time_agrees_with_matrices(name: str) -> None:
    """The T-step NELBO and the NLL of T Bayes steps, with step matrices of the oracle and every path enumerated."""
    world, oracle, network = world_of(name)
    steps, x, vocab, states = OPTIONS.steps, oracle.noisy, oracle.noise.vocab, oracle.noise.states
    sites = np.arange(oracle.length)

    def reverse(n: int) -> np.ndarray:
        """p(x_{n-1}^i = y | x_n) as [x_n, site, y], by summing z."""
        t, s = n / steps, (n - 1) / steps
        mu = network.posterior(x, min(max(t, T_MIN), 1 - T_MIN))[..., :vocab]
        full, before = oracle.noise.transition_matrix(min(t, 1 - 1e-12)), oracle.noise.transition_matrix(s)
        step = np.linalg.solve(before, full) if n > 1 else full
        joint = before[:vocab, None, :] * step.T[None]  # [z, k, y]
        q = joint / full[:vocab, :, None].clip(1e-300)
        q = np.where(full[:vocab, :, None] > 0, q, 0.0)[:, x]  # [z, x, site, y]
        reached = full[:vocab, :, None][:, x] > 0
        mu = np.where(reached[..., 0].transpose(1, 2, 0), mu, 0.0)
        return np.einsum("nlz,znly->nly", mu / mu.sum(-1, keepdims=True), q)

    bound = np.zeros(len(oracle.clean))
    reference = oracle.noise.transition_matrix(1 - 1e-12)[:vocab].mean(0)
    p = reference[x].prod(-1)
    for n in range(steps, 0, -1):
        t, s = min(n / steps, 1 - 1e-12), (n - 1) / steps
        each, forward = reverse(n), oracle.likelihood(x, t)
        if n == 1:
            draw = np.stack([each[:, i, oracle.clean[:, i]] for i in sites]).prod(0)
            bound -= (forward * np.log(np.where(forward > 1e-300, draw.T, 1.0))).sum(1)
            p = p @ draw
            continue
        before = oracle.noise.transition_matrix(s)
        step = np.linalg.solve(before, oracle.noise.transition_matrix(t))
        for place, clean in enumerate(oracle.clean):
            q = before[clean][None] * step.T[x] / np.maximum(oracle.noise.transition_matrix(t)[clean, x], 1e-300)[..., None]
            terms = np.where(q > 1e-14, q * np.log(np.where(q > 1e-14, q, 1) / np.where(each > 0, each, 1)), 0.0)
            bound[place] += (forward[place] * np.where(forward[place] > 1e-13, terms.sum((1, 2)), 0.0)).sum()
        p = p @ each[:, sites[None], x].prod(-1)
    np.testing.assert_allclose(world.nats(ESTIMATORS["discrete-time"]), bound, rtol=1e-6)
    nll, _ = exact_nll(world, ESTIMATORS["discrete-time"])
    np.testing.assert_allclose(nll, -np.log(p), rtol=1e-6)
    assert (bound > -np.log(p)).all()
    assert states == world.head.process.states


CHAINS = {
    "gaussian": m2s.Chain.gaussian(3, torch.tensor([0.1, 0.4, 0.9, 1.0]), torch.float64),
    "masks": m2s.Chain.absorbing(2, torch.tensor([0.2, 0.5, 0.8]), torch.float64),
    "all masks": m2s.Chain.absorbing(2, torch.tensor([0.25, 0.4, 1.0]), torch.float64),
}


def sum_over_paths(process: m2s.Chain, model: Callable, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The bound and the NLL of every clean sequence by all paths x_1..x_T: D3PM's two Markov chains, without its formulas."""
    matrices, steps, vocab = process.matrices.numpy(), process.steps, process.vocab
    products = [np.eye(process.states), *itertools.accumulate(matrices, np.matmul)]
    noisy = list(itertools.product(range(process.states), repeat=length))

    def reverse(n: int) -> dict[tuple[int, ...], np.ndarray]:
        """p(x_{n-1}^i = y | x_n) by x_n, [site, y], the sum over z of mu_z q(y | x_n, z)."""
        found = {}
        for x in noisy:
            logits = model(torch.tensor([x]), torch.tensor([min(max(n / steps, 1e-3), 1 - 1e-3)]))[0].numpy()[:, :vocab]
            rows = np.zeros((length, process.states))
            for i, k in enumerate(x):
                mu = np.exp(logits[i]) * (products[n][:vocab, k] > 0)
                for z in np.flatnonzero(mu):
                    rows[i] += mu[z] / mu.sum() * products[n - 1][z] * matrices[n - 1][:, k] / products[n][z, k]
            found[x] = rows
        return found

    tables = {n: reverse(n) for n in range(1, steps + 1)}
    end = products[steps][-1] if process.mask is not None else products[steps][:vocab].mean(0)
    first = {x: float(np.prod([end[k] for k in x])) for x in noisy}
    if (
        process.mask is not None and end[process.mask] == 1 and products[steps][0, 0] > 0
    ):  # clean tokens are left, and are drawn from masks alone at the end of time
        masks = torch.full((1, length), vocab)
        mu = torch.softmax(model(masks, torch.tensor([1 - 1e-3]))[0, :, :vocab], -1).numpy()
        rows = mu @ products[steps][:vocab]
        first = {x: float(np.prod([rows[i, k] for i, k in enumerate(x)])) for x in noisy}
    bound, nll = [], []
    for clean in itertools.product(range(vocab), repeat=length):
        total = likelihood = 0.0
        for path in itertools.product(noisy, repeat=steps):
            places = (clean, *path)
            forward = np.prod([matrices[n][a, b] for n in range(steps) for a, b in zip(places[n], places[n + 1], strict=True)])
            back = first[path[-1]] if first[path[-1]] > 0 else 0.0
            for n in range(steps, 0, -1):
                back *= np.prod([tables[n][places[n]][i, places[n - 1][i]] for i in range(length)])
            likelihood += back
            total += forward * math.log(forward / back) if forward > 0 else 0.0
        bound.append(total)
        nll.append(-math.log(likelihood))
    return np.array(bound), np.array(nll)


@pytest.mark.parametrize(("name", "length"), [("gaussian", 1), ("masks", 2), ("all masks", 2)])
def test_a_finite_chain_agrees_with_the_sum_over_all_paths(name: str, length: int) -> None:
    """D3PM: both names of its NELBO are the divergence of the two chains, and both NLLs that of its own T steps."""
    process = CHAINS[name]
    head, model = m2s.Posterior(process), random_network(process, length)
    world = World(model, head, length, Options(steps=99))
    bound, nll = sum_over_paths(process, model, length)
    for estimator in ("nelbo", "discrete-time"):
        np.testing.assert_allclose(world.nats(ESTIMATORS[estimator]), bound, rtol=1e-6)
        found, error = exact_nll(world, ESTIMATORS[estimator])
        np.testing.assert_allclose(found, nll, rtol=1e-6)
        assert error == 0.0
    assert (bound > nll + 1e-6).all()
    assert set(supported(head)) == {"nelbo", "integral", "discrete-time", "discrete-kl"}


TIGHT = {
    "absorbing-linear": m2s.Posterior(m2s.Absorbing(2, m2s.Linear())),
    "absorbing-loglinear": m2s.Posterior(m2s.Absorbing(2, m2s.LogLinear(1e-2))),
    "absorbing-rescaled": m2s.Posterior(m2s.Absorbing(2, Rescaled(m2s.Linear(), 1e-2))),
    "uniform": m2s.Posterior(m2s.Uniform(2, m2s.LogLinear(1e-2))),
    "score": m2s.LogScore(m2s.Absorbing(2, m2s.LogLinear(1e-2))),
    "chain": m2s.Posterior(CHAINS["masks"]),
}


@functools.cache
def tight(name: str) -> list[Certificate]:
    """The certificates of a network that knows the distribution."""
    head = TIGHT[name]
    return certify(exact_network(head, 3), head, 3, options=Options(steps=4))


@pytest.mark.parametrize("name", TIGHT)
def test_certificates_agree_with_what_estimators_declare(name: str) -> None:
    """Where the network knows the distribution, an estimator passes if and only if it declares to lack nothing."""
    head, found = TIGHT[name], tight(name)
    assert {each.estimator for each in found} == set(supported(head))
    for each in found:
        assert each.passed == (not each.missing), each
        assert each.kraft < 1 + 1e-6 or each.missing


@pytest.mark.parametrize("name", ["absorbing-loglinear", "uniform", "chain"])
def test_upper_bounds_hold_for_a_random_network(name: str) -> None:
    """An estimator that declares to lack nothing is an upper bound for any network, by a clear margin for a random one."""
    head = TIGHT[name]
    for each in certify(random_network(head.process, 2), head, 2, options=Options(steps=4)):
        if not each.missing:
            assert each.passed and each.kraft < 1
            assert each.gap > 1e-4


def test_masking_is_the_same_in_both_processes() -> None:
    """GIDD without uniform noise is masking with alpha = 1 - t: every estimator of masks has the same value."""
    absorbing, hybrid = m2s.Absorbing(2, m2s.Linear()), m2s.Hybrid(2, p_uniform=0.0)
    model = random_network(absorbing, 2)
    worlds = [World(model, m2s.Posterior(process), 2, OPTIONS) for process in (absorbing, hybrid)]
    names = set(supported(worlds[0].head))
    assert names == set(supported(worlds[1].head)) and {"mdlm", "md4", "llada", "gidd"} <= names
    for name in names:
        one, other = (world.nats(ESTIMATORS[name]) for world in worlds)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=0)
        nll, other_nll = (exact_nll(world, ESTIMATORS[name])[0] for world in worlds)
        torch.testing.assert_close(nll, other_nll, rtol=1e-9, atol=0)
    missing = [{name: ESTIMATORS[name].missing(world.head, OPTIONS) for name in names} for world in worlds]
    assert missing[0] == missing[1]


@pytest.mark.parametrize("process", [m2s.Absorbing(2, m2s.Linear()), m2s.Hybrid(2, p_uniform=0.0)], ids=str)
def test_a_uniform_number_of_zero_is_a_time(process: m2s.Process) -> None:
    """The smallest random number is 0. Times are in (0, 1), so that a loss accepts them and its weight is finite."""
    head, zero = m2s.Posterior(process), torch.zeros(1, dtype=torch.float64)
    for term in ESTIMATORS["md4"].build(head, OPTIONS)[:1]:
        t, _ = term.levels.draw(process, zero, torch.tensor([2]))
        x = torch.tensor([[0, 2]])
        assert 0 < t < 1 and term.value(head, torch.zeros(1, 2, 3), torch.tensor([[0, 1]]), x, t).isfinite().all()


def test_counterexamples() -> None:
    """exp(-b) sums to more than 1 where terms are dropped: such numbers are the bound of no distribution at all."""
    kraft = {each.estimator: each.kraft for each in tight("uniform")}
    for name in ("integral", "discrete-kl", "sedd", "udlm", "duo", "gidd"):
        assert kraft[name] > 1 + 1e-5, name
    for name in ("nelbo", "discrete-time"):
        assert kraft[name] < 1 + 1e-6, name


def test_shares_of_masks_with_the_low_end_cut_are_below_the_nll() -> None:
    """Dream's mean over [1e-3, 1) satisfies the inequality of Kraft, and yet is below the exact NLL of some sequences."""
    head = TIGHT["absorbing-linear"]
    (found,) = certify(exact_network(head, 3), head, 3, ["dream"])
    assert found.satisfies_kraft
    assert not found.passed
    world = World(exact_network(head, 3), head, 3)
    nll, _ = exact_nll(world, ESTIMATORS["dream"])
    place = int((world.clean == torch.tensor(found.worst)).all(1).nonzero())
    assert float(world.nats(ESTIMATORS["dream"])[place]) < float(nll[place]) - 1e-4


EVERY = [
    (key, estimator)
    for key in ("absorbing-loglinear", "absorbing-rescaled", "uniform", "score", "chain")
    for estimator in supported(TIGHT[key])
]


@pytest.mark.parametrize(("key", "name"), EVERY)
def test_draws_are_unbiased(key: str, name: str) -> None:
    """The mean of many draws is the exact expectation, for each clean sequence and each registered estimator."""
    head, copies = TIGHT[key], 1000
    model, options = random_network(head.process, 2, scale=0.5), Options(t_min=0.05, steps=4)
    world = World(model, head, 2, options)
    exact = world.nats(ESTIMATORS[name])
    with unchecked():
        found = measure(model, head, world.clean.repeat(copies, 1), name, 1, 3, 10_000, options)
    each = found.total[0].reshape(copies, -1)
    error = each.std(0) / copies**0.5
    rare = 0.5 if name == "gidd" and key == "uniform" else 0.02  # times of 1e-4, or a mask at t = 0, may not occur
    assert ((each.mean(0) - exact).abs() < 5 * error + rare).all()
    assert abs(float((each.mean(0) - exact).mean())) < 5 * float(error.square().sum().sqrt()) / len(error) + rare / 2


def test_upper_limit_covers_the_exact_value() -> None:
    """The one-sided 95 % limit over independent sequences exceeds the exact mean of the bound in about 95 % of data sets."""
    head, sequences, runs = TIGHT["uniform"], 24, 300
    model = random_network(head.process, 2, scale=0.5)
    world = World(model, head, 2)
    oracle = np.random.default_rng(0)
    p = np.exp(oracle.normal(size=len(world.clean)))
    p /= p.sum()
    exact = float(torch.from_numpy(p) @ world.nats(ESTIMATORS["nelbo"]))
    chosen = torch.from_numpy(oracle.choice(len(p), size=sequences * runs, p=p))
    with unchecked():
        found = measure(model, head, world.clean[chosen], "nelbo", 8, 5, 10_000)
    covered = 0
    for run in range(runs):
        rows = slice(run * sequences, (run + 1) * sequences)
        part = type(found)({name: values[:, rows] for name, values in found.terms.items()}, found.calls)
        covered += part.upper_limit() >= exact
    assert binom.cdf(covered, runs, 0.93) > 1e-3  # a skewed estimate costs up to 2 %
    assert binom.sf(covered - 1, runs, 0.98) > 1e-3


def test_batches_do_not_change_draws() -> None:
    """Noise belongs to the sequence and the pass."""
    head = TIGHT["absorbing-loglinear"]
    model, x_0 = random_network(head.process, 3), torch.randint(2, (7, 3), generator=torch.Generator().manual_seed(0))
    one, other = (measure(model, head, x_0, "nelbo", 2, 1, size) for size in (2, 7))
    torch.testing.assert_close(one.total, other.total, rtol=1e-12, atol=0)
    rest = measure(model, head, x_0, "nelbo", 2, 1, 3, first=4)
    torch.testing.assert_close(rest.total, other.total[:, 4:], rtol=1e-12, atol=0)


def test_a_problem_too_large_to_enumerate_is_an_error() -> None:
    head = TIGHT["uniform"]
    with pytest.raises(ValueError, match="too many to enumerate"):
        certify(random_network(head.process, 2), head, 12)
    with pytest.raises(ValueError, match="it needs masking noise"):
        certify(random_network(head.process, 2), head, 2, ["llada"])
    with pytest.raises(ValueError, match="no estimator of that name"):
        certify(random_network(head.process, 2), head, 2, ["lada"])
