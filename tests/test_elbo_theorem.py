"""Theorem 4.2, the objective is an ELBO: NELBO and NLL of enumerated reverse processes, in float64."""

import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.special import expit, logit

import m2s
from m2s.losses import path_kl
from oracle import Network, Oracle, quadrature
from theorem_tools import EVERY, UNIFORM, case, log, site_losses, tensor


def reference(oracle: Oracle) -> np.ndarray:
    """The distribution at t = 1 of a uniformly drawn clean token; just before t = 1, where the rates can diverge."""
    vocab = oracle.noise.vocab
    return oracle.noise.transition_matrix(1 - 1e-15)[:vocab].mean(0)


def prior(oracle: Oracle, t: float) -> np.ndarray:
    """KL(q_t(. | x_0) || reference) of every clean sequence."""
    rows, ref = oracle.noise.transition_matrix(t)[: oracle.noise.vocab], reference(oracle)
    terms = np.where(rows > 0, rows * np.log(np.where(rows > 0, rows, 1) / np.where(ref > 0, ref, 1)), 0.0).sum(-1)
    return terms[oracle.clean].sum(-1)


def integral(head: m2s.Head, network, oracle: Oracle, low: float, high: float) -> np.ndarray:
    """The library's objective for every clean sequence, x_t enumerated and t by quadrature."""
    x, total = oracle.noisy, 0.0
    for t, weight in quadrature(low, high):
        total = total + weight * oracle.expected(site_losses(head, network(x, t), oracle, x, t).numpy(), t)
    return total


def exit_rate_and_jump(oracle: Oracle, output: np.ndarray, x: np.ndarray, t: float) -> tuple[np.ndarray, np.ndarray]:
    """Neural CTMC's lambda [N, L] and pi [N, L, S] of a network's output, by definition.

    The output at k is log lambda in units of the forward rates into k; the rest, where there is such a rate, are logits of pi.
    """
    weight = oracle.weights(x, t)
    exit_rate = np.exp(np.take_along_axis(output, x[..., None], -1)[..., 0]) * weight.sum(-1)
    jump = np.where(weight > 0, np.exp(output), 0.0)
    total = jump.sum(-1, keepdims=True)
    return exit_rate, jump / np.where(total > 0, total, 1.0)


def factorized(oracle: Oracle, score: np.ndarray, x: np.ndarray, t: float, seed: int = 11) -> np.ndarray:
    """An output of Neural CTMC that has this score; entries without a meaning, and the level of the logits, are random."""
    weight, noise = oracle.weights(x, t), np.random.default_rng(seed).normal(size=(*score.shape[:-1], score.shape[-1] + 1))
    rate = np.where(weight > 0, weight * score, 0.0)
    exit_rate, unit = rate.sum(-1, keepdims=True), weight.sum(-1, keepdims=True)
    jump = np.divide(rate, exit_rate, out=np.ones_like(rate), where=weight > 0)
    output = np.where(weight > 0, np.log(jump) + noise[..., :1], noise[..., 1:])
    log_exit = np.log(np.divide(exit_rate, unit, out=np.ones_like(exit_rate), where=unit > 0))
    return np.where(np.arange(score.shape[-1]) == x[..., None], log_exit, output)


def rate_score(oracle: Oracle, output: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
    """lambda pi_y / Q_t(y -> k), the score with which the oracle's reverse process has these rates."""
    weight, (exit_rate, jump) = oracle.weights(x, t), exit_rate_and_jump(oracle, output, x, t)
    return np.divide(exit_rate[..., None] * jump, weight, out=np.ones_like(jump), where=weight > 0)


def path_divergence(oracle: Oracle, output: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
    """l - l* + l* log(l*/l) + l* KL(pi* || pi) as [N, L, z], by definition; 0 for a z from which k cannot be reached.

    l and pi are the network's, l* and pi* those of the reverse process that ends in z.
    """
    transition, weight = oracle.noise.transition_matrix(t)[: oracle.noise.vocab], oracle.weights(x, t)[:, :, None, :]
    likelihood = transition[:, x].transpose(1, 2, 0)[..., None]
    exit_rate, jump = (value[:, :, None] for value in exit_rate_and_jump(oracle, output, x, t))
    exact_rate = weight * np.divide(
        transition, likelihood, out=np.zeros(likelihood.shape[:-1] + transition.shape[-1:]), where=likelihood > 0
    )
    total = exact_rate.sum(-1)
    exact_jump = np.divide(exact_rate, total[..., None], out=np.zeros_like(exact_rate), where=total[..., None] > 0)
    possible = exact_jump > 0
    log_ratio = np.log(np.where(possible, exact_jump, 1) / np.where(possible, jump, 1))
    jump_kl = np.where(possible, exact_jump * log_ratio, 0.0).sum(-1)
    moves = total > 0
    waits = np.where(moves, total * np.log(np.where(moves, total, 1) / np.where(moves, exit_rate, 1)), 0.0)
    return np.where(likelihood[..., 0] > 0, exit_rate - total + waits + total * jump_kl, 0.0)


def path_integrals(process: m2s.Process, oracle: Oracle, network, low: float, high: float) -> dict[str, np.ndarray]:
    """The expected path KL over [low, high] of every clean sequence: by definition, and by the library's two losses."""
    x, head = oracle.noisy, m2s.FactorizedRate(process)
    total = {"definition": 0.0, "path_kl": 0.0, "score_entropy": 0.0}
    for t, weight in quadrature(low, high):
        output = network(x, t)
        losses = {"definition": path_divergence(oracle, output, x, t)}
        reached = oracle.noise.transition_matrix(t)[: oracle.noise.vocab][:, x].transpose(1, 2, 0) > 0
        for name, loss in (("path_kl", path_kl), ("score_entropy", m2s.score_entropy)):
            losses[name] = np.where(reached, site_losses(head, output, oracle, x, t, loss).numpy(), 0.0)
        for name, each in losses.items():
            total[name] = total[name] + weight * oracle.expected(each, t)
    return total


def entropy(p: np.ndarray) -> float:
    """H(p) in nats."""
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


LOW, HIGH = 1e-9, 1 - 1e-9
BOUNDED = ["uniform-linear", "uniform-exponential", "absorbing-cosine", "hybrid-0.6", "gaussian", "birth-death"]


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("seed", [1, 2])
def test_elbo_theorem(name: str, seed: int) -> None:
    """Theorem 4.2: the reverse process with any M2S score has NLL <= objective + prior KL, for each sequence and so on average.

    The network's distribution is taken as leave-one-out. Then its posterior tends to the current token as t tends to 0, and the
    objective is finite.
    """
    process, oracle = case(name)
    network = Network(oracle, seed)

    def score(x: np.ndarray, t: float) -> np.ndarray:
        joint = network.posterior(x, t) * oracle.noise.transition_matrix(t)[:, x].transpose(1, 2, 0)
        return oracle.bridge(joint / joint.sum(-1, keepdims=True), x, t)

    nll = -np.log(oracle.terminal(score, reference(oracle), HIGH, LOW)[oracle.index(oracle.clean)])
    bound = integral(m2s.Posterior(process, offset="exact"), network.logits, oracle, LOW, HIGH) + prior(oracle, HIGH)
    assert (nll < bound).all()
    assert (
        entropy(oracle.distribution)
        < oracle.distribution @ nll
        < oracle.distribution @ bound
        < oracle.distribution @ nll + oracle.length
    )


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-cosine", "hybrid-0.6", "gaussian"])
def test_elbo_theorem_for_an_unconstrained_score(name: str) -> None:
    """Theorem 4.2 holds for any positive score: here the exact one times noise that vanishes where rates diverge."""
    process, oracle = case(name)
    noise = Network(oracle, 3, scale=0.3)

    def log_score(x: np.ndarray, t: float) -> np.ndarray:
        return np.log(oracle.score(x, t)) + 4 * t * (1 - t) * noise.logits(x, t)

    distribution = oracle.terminal(lambda x, t: np.exp(log_score(x, t)), reference(oracle), HIGH, LOW)
    nll = oracle.distribution @ -np.log(distribution[oracle.index(oracle.clean)])
    bound = oracle.distribution @ (integral(m2s.LogScore(process), log_score, oracle, LOW, HIGH) + prior(oracle, HIGH))
    assert entropy(oracle.distribution) < nll < bound < nll + oracle.length


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-cosine", "hybrid-0.6", "gaussian", "birth-death"])
def test_elbo_theorem_for_exit_rates_and_jumps(name: str) -> None:
    """Theorem 4.2 for Neural CTMC: the divergence of paths + prior KL bounds the exact NLL of its reverse process.

    lambda and pi are the exact ones disturbed, as in the test above. The library's two losses integrate to the same bound.
    """
    process, oracle = case(name)
    noise = Network(oracle, 3, scale=0.3)

    def output(x: np.ndarray, t: float) -> np.ndarray:
        score = oracle.score(x, t) * np.exp(4 * t * (1 - t) * noise.logits(x, t))
        return factorized(oracle, score, x, t)

    distribution = oracle.terminal(lambda x, t: rate_score(oracle, output(x, t), x, t), reference(oracle), HIGH, LOW)
    nll = -np.log(distribution[oracle.index(oracle.clean)])
    found = path_integrals(process, oracle, output, LOW, HIGH)
    bound = found["definition"] + prior(oracle, HIGH)
    assert (nll < bound).all()
    assert (
        entropy(oracle.distribution)
        < oracle.distribution @ nll
        < oracle.distribution @ bound
        < oracle.distribution @ nll + oracle.length
    )
    np.testing.assert_allclose(found["path_kl"], found["definition"], rtol=1e-10)
    np.testing.assert_allclose(found["score_entropy"], found["definition"], rtol=1e-10)


@pytest.mark.parametrize("name", UNIFORM)
def test_elbo_theorem_is_tight_at_the_exact_rates_and_jumps(name: str) -> None:
    """With the exact lambda and pi over all of [0, 1] the bound is H(X_0) + KL(p_1 || reference); the NLL lies between."""
    process, oracle = case(name)

    def output(x: np.ndarray, t: float) -> np.ndarray:
        return factorized(oracle, oracle.score(x, t), x, t)

    end, ref = oracle.marginal(HIGH), reference(oracle)[oracle.noisy].prod(1)
    least = entropy(oracle.distribution) + np.sum(end * np.log(end / ref))
    for value in path_integrals(process, oracle, output, LOW, HIGH).values():
        assert oracle.distribution @ (value + prior(oracle, HIGH)) == pytest.approx(least, abs=1e-6)
    distribution = oracle.terminal(lambda x, t: rate_score(oracle, output(x, t), x, t), reference(oracle), HIGH, LOW)
    nll = oracle.distribution @ -np.log(distribution[oracle.index(oracle.clean)])
    assert entropy(oracle.distribution) - 1e-6 < nll < least + 1e-6
    if name == "uniform-linear":  # then p_1 is the reference, and all three numbers agree
        assert least == pytest.approx(entropy(oracle.distribution), abs=1e-6)


@pytest.mark.parametrize("name", UNIFORM)
def test_elbo_theorem_is_tight_at_the_exact_score(name: str) -> None:
    """Theorem 4.2 with the exact posterior over all of [0, 1]: the bound is H(X_0) + KL(p_1 || reference)."""
    process, oracle = case(name)
    found = integral(m2s.Posterior(process), lambda x, t: log(oracle.posterior(x, t)), oracle, LOW, HIGH) + prior(oracle, HIGH)
    end, ref = oracle.marginal(HIGH), reference(oracle)[oracle.noisy].prod(1)
    assert oracle.distribution @ found == pytest.approx(
        entropy(oracle.distribution) + np.sum(end * np.log(end / ref)), abs=1e-6
    )


@EVERY
def test_objective_of_the_exact_score_is_the_lost_information(name: str) -> None:
    """Theorem 4.2 at its optimum, on any interval and for any process: the objective is I(X_0; X_low) - I(X_0; X_high)."""
    process, oracle = case(name)
    low, high = 1e-3, 1 - 1e-3

    def information(t: float) -> float:
        joint = oracle.distribution[:, None] * oracle.likelihood(oracle.noisy, t)
        return entropy(oracle.distribution) + entropy(joint.sum(0)) - entropy(joint.ravel())

    for head, network in (
        (m2s.Posterior(process), lambda x, t: log(oracle.posterior(x, t))),
        (m2s.LogScore(process), lambda x, t: log(oracle.score(x, t))),
        (m2s.FactorizedRate(process), lambda x, t: factorized(oracle, oracle.score(x, t), x, t)),
    ):
        found = oracle.distribution @ integral(head, network, oracle, low, high)
        assert found == pytest.approx(information(low) - information(high), abs=1e-9)


@pytest.mark.parametrize("name", ["uniform-linear", "hybrid-0.6", "gaussian", "birth-death", "tabulated-absorbing"])
@pytest.mark.parametrize("kind", ["m2s", "unconstrained", "rate"])
def test_elbo_theorem_gap_is_a_path_space_divergence(name: str, kind: str) -> None:
    """Over [t_min, T]: objective + E prior = H(X_0) - H(X_0|X_tmin) + KL(p_T||ref) + integral of E sum Q h(s, s*)."""
    process, oracle = case(name)
    low, high = 1e-2, 1 - 1e-2
    network = Network(oracle, 5)
    head = {"m2s": m2s.Posterior, "unconstrained": m2s.LogScore, "rate": m2s.FactorizedRate}[kind](process)
    score = {
        "m2s": lambda x, t: oracle.bridge(network.posterior(x, t), x, t),
        "unconstrained": lambda x, t: np.exp(network.logits(x, t)),
        "rate": lambda x, t: rate_score(oracle, network.logits(x, t), x, t),
    }[kind]
    found = oracle.distribution @ (integral(head, network.logits, oracle, low, high) + prior(oracle, high))
    path = 0.0
    for t, weight in quadrature(low, high):
        path += weight * oracle.path_rate(score(oracle.noisy, t), t)
    joint = oracle.distribution[:, None] * oracle.likelihood(oracle.noisy, low)
    left = entropy(joint.ravel()) - entropy(joint.sum(0))
    end, ref = oracle.marginal(high), reference(oracle)[oracle.noisy].prod(1)
    assert found == pytest.approx(entropy(oracle.distribution) - left + np.sum(end * np.log(end / ref)) + path, abs=1e-8)


@pytest.mark.parametrize("name", ["uniform-linear", "gaussian", "birth-death"])
@pytest.mark.parametrize("unconstrained", [False, True], ids=["m2s", "unconstrained"])
@pytest.mark.parametrize("t_min", [0.02, 0.2])
def test_elbo_theorem_with_its_ends_cut(name: str, unconstrained: bool, t_min: float) -> None:
    """Integral + KL(q_{1-t_min}||ref) + E -log p(x_0|x_tmin) bounds the NLL of a process that ends in one draw."""
    process, oracle = case(name)
    low, high, x = t_min, 1 - t_min, oracle.noisy
    network = Network(oracle, 7)
    head = m2s.LogScore(process) if unconstrained else m2s.Posterior(process)

    def score(x: np.ndarray, t: float) -> np.ndarray:
        return np.exp(network.logits(x, t)) if unconstrained else oracle.bridge(network.posterior(x, t), x, t)

    last = network.posterior(x, low)
    if unconstrained:
        s = np.where(np.arange(oracle.noise.states) == x[..., None], 1.0, score(x, low))
        last = s * oracle.noise.transition_matrix(low)[:, x].transpose(1, 2, 0)
        last /= last.sum(-1, keepdims=True)
    found = head.last_step(tensor(network.logits(x, low)), tensor(x), torch.tensor(low, dtype=torch.float64)).exp().numpy()
    np.testing.assert_allclose(found, last, rtol=1e-11)
    draw = np.stack([found[:, i, oracle.clean[:, i]] for i in range(oracle.length)])  # [site, x, x_0]
    nll = -np.log(oracle.terminal(score, reference(oracle), high, low) @ draw.prod(0))
    reconstruction = -(oracle.likelihood(x, low) * np.log(draw).sum(0).T).sum(1)
    bound = integral(head, network.logits, oracle, low, high) + prior(oracle, high) + reconstruction
    assert (nll < bound).all()


def h_transform(oracle: Oracle, rate, last: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Of a reverse process that ends in a draw `last` [x, x_0] at time `low`: Pr(X_0 = x_0 | X_high = x), and for every x_0
    the divergence over [low, high] of the noising process from this one on the condition that it ends in x_0.

    The backward equation d/dt H_t(x) = sum_y rate(x -> y) (H_t(y) - H_t(x)); on that condition the rates are rate(x -> y)
    H_t(y)/H_t(x) (Doob).
    """
    x, to, size = oracle.noisy, oracle.neighbors(oracle.noisy), last.size

    def slope(u: float, state: np.ndarray) -> np.ndarray:
        t = expit(u)
        chance, rates, transition = state[:size].reshape(last.shape), rate(x, t), oracle.noise.transition_matrix(t)
        weight, likelihood = oracle.weights(x, t), oracle.likelihood(x, t).T
        change, excess = np.zeros_like(chance), np.zeros(last.shape[1])
        for i, y in itertools.product(range(oracle.length), range(oracle.noise.states)):
            at = np.flatnonzero(weight[:, i, y])  # the sequences that go to y at site i
            before, after, likely = chance[at], chance[to[at, i, y]], likelihood[at]
            change[at] += rates[at, i, y, None] * (after - before)
            counted = likely > 0
            there = np.where(counted, rates[at, i, y, None] * after / np.where(counted, before, 1), 0.0)
            ratio = transition[oracle.clean[:, i], y] / np.where(counted, transition[oracle.clean[:, i]][:, x[at, i]].T, 1)
            wanted = np.where(counted, weight[at, i, y, None] * ratio, 0.0)
            moves = wanted > 0
            logs = np.log(np.where(moves, wanted, 1) / np.where(moves, there, 1))
            excess += (likely * (there - wanted + wanted * logs)).sum(0)
        return t * (1 - t) * np.concatenate([change.ravel(), excess])

    start = np.concatenate([last.ravel(), np.zeros(last.shape[1])])
    end = solve_ivp(slope, (logit(low), logit(high)), start, method="DOP853", rtol=1e-10, atol=1e-13).y[:, -1]
    return end[:size].reshape(last.shape), end[size:]


@pytest.mark.parametrize("name", ["uniform-linear", "hybrid-0.6", "gaussian", "birth-death", "absorbing-cosine"])
def test_nelbo_of_exit_rates_and_jumps_exceeds_the_nll_by_a_path_kl(name: str) -> None:
    """For a random output of Neural CTMC's, and for every sequence by itself: bound = NLL + KL(noising process given x_0 ||
    the model's process given that it ends in x_0). The NLL is found twice, forward and backward in time."""
    process, oracle = case(name)
    low, high, x = 0.02, 0.98, oracle.noisy
    network = Network(oracle, 7, scale=0.5)

    def rate(x: np.ndarray, t: float) -> np.ndarray:
        exit_rate, jump = exit_rate_and_jump(oracle, network.logits(x, t), x, t)
        return exit_rate[..., None] * jump

    # the last draw: s_y P_t(k|y), over clean y, with s_k = 1, and 1 too for a token without a rate into k
    score = np.where(np.arange(oracle.noise.states) == x[..., None], 1.0, rate_score(oracle, network.logits(x, low), x, low))
    last = (score * oracle.noise.transition_matrix(low)[:, x].transpose(1, 2, 0))[..., : oracle.noise.vocab]
    last /= last.sum(-1, keepdims=True)
    time = torch.tensor(low, dtype=torch.float64)
    found = m2s.FactorizedRate(process).last_step(tensor(network.logits(x, low)), tensor(x), time).exp().numpy()
    if name != "birth-death":  # there the head has no score for a token two levels away
        np.testing.assert_allclose(found[..., : oracle.noise.vocab], last, rtol=1e-11)
    draw = np.stack([last[:, i, oracle.clean[:, i]] for i in range(oracle.length)]).prod(0)  # [x, x_0]

    chance, gap = h_transform(oracle, rate, draw, low, high)
    first = reference(oracle)[x].prod(1)
    likelihood = first @ chance
    distribution = oracle.terminal(lambda x, t: rate_score(oracle, network.logits(x, t), x, t), reference(oracle), high, low)
    np.testing.assert_allclose(distribution @ draw, likelihood, rtol=1e-10)

    noised, end = oracle.likelihood(x, low), oracle.likelihood(x, high)
    counted = end > 0
    start = np.where(counted, end * np.log(np.where(counted, end * likelihood[:, None], 1)), 0.0)
    start -= np.where(counted, end * np.log(np.where(counted, (first[:, None] * chance).T, 1)), 0.0)
    reconstruction = -np.where(noised > 0, noised * np.log(np.where(noised > 0, draw.T, 1)), 0.0).sum(1)
    for value in path_integrals(process, oracle, network.logits, low, high).values():
        bound = value + prior(oracle, high) + reconstruction
        assert (bound > -np.log(likelihood)).all()
        np.testing.assert_allclose(bound, -np.log(likelihood) + start.sum(1) + gap, rtol=0, atol=1e-8)
