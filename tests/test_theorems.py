"""Every statement of the paper, checked against the enumeration of `oracle.py` in float64."""

import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.optimize import linprog
from scipy.special import expit, logit

import m2s
from m2s.losses import path_kl
from oracle import CASES, Network, Oracle, h, quadrature

TIMES = [1e-3, 0.1, 0.5, 0.9, 0.999]
UNIFORM = ["uniform-linear", "uniform-exponential"]
EVERY = pytest.mark.parametrize("name", CASES)


def tensor(value: np.ndarray | float) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(value))


def log(p: np.ndarray) -> torch.Tensor:
    return torch.log(tensor(p))


def case(name: str) -> tuple[m2s.Process, Oracle]:
    return CASES[name].process, CASES[name].oracle()


def site_losses(
    head: m2s.Head, output: np.ndarray | torch.Tensor, oracle: Oracle, x: np.ndarray, t: float, loss=m2s.score_entropy
) -> torch.Tensor:
    """The library's score entropy, or another loss, at every site of every sequence for every clean token: [N, L, z]."""
    vocab = oracle.noise.vocab
    x_0 = torch.arange(vocab).expand(*x.shape, vocab)
    x_t = tensor(x).unsqueeze(-1).expand_as(x_0)
    output = torch.as_tensor(output).unsqueeze(-2)
    return loss(head, output.expand(*x_0.shape, output.shape[-1]), x_0, x_t, torch.tensor(t, dtype=torch.float64))


def conditional_risk(losses: np.ndarray, posterior: np.ndarray) -> np.ndarray:
    """E[loss | X_t = x] at every site; a clean token that cannot have led to x counts for nothing."""
    posterior = posterior[..., : losses.shape[-1]]
    return np.where(posterior > 0, posterior * np.where(posterior > 0, losses, 0.0), 0.0).sum(-1)


def bridge_rows(oracle: Oracle, k: int, t: float) -> np.ndarray:
    """B_+: the rows P_t(y|z)/P_t(k|z) of the candidates y with a forward rate into k, over clean z."""
    kernel, rates = oracle.noise.kernel(t)[: oracle.noise.vocab], oracle.noise.rates(t)
    counted = [y for y in range(oracle.noise.states) if y != k and rates[y, k] > 0]
    return (kernel / kernel[:, [k]]).T[counted]


@EVERY
@pytest.mark.parametrize("t", TIMES)
def test_bridge_theorem(name: str, t: float) -> None:
    """Theorem 4.1: the exact posterior gives the exact score, through the map and through the heads' logits."""
    process, oracle = case(name)
    x, time = oracle.noisy, torch.tensor(t, dtype=torch.float64)
    weighted = oracle.weights(x, t) > 0
    exact, posterior = oracle.score(x, t), oracle.posterior(x, t)
    score = m2s.score_from_posterior(tensor(posterior), tensor(x), time, process).numpy()
    assert weighted.any()
    np.testing.assert_allclose(score[weighted], exact[weighted], rtol=1e-11)
    head = m2s.Posterior(process)
    np.testing.assert_allclose(head.posterior(log(posterior), tensor(x), time), posterior, rtol=1e-11, atol=1e-300)
    log_score = head.log_score(log(posterior), tensor(x), time).numpy()
    np.testing.assert_allclose(np.exp(log_score[weighted]), exact[weighted], rtol=1e-11)
    own = np.take_along_axis(score, x[..., None], -1)
    assert (own == 1).all()


@pytest.mark.parametrize("name", ["absorbing-linear", "tabulated-absorbing"])
def test_bridge_theorem_needs_its_support_condition(name: str) -> None:
    """Assumption A.1: at an unmasked site the ratio to the mask is no function of the posterior, and it carries no weight."""
    process, oracle = case(name)
    x, t = oracle.noisy, 0.4
    posterior, exact = oracle.posterior(x, t), oracle.score(x, t)
    score = m2s.score_from_posterior(tensor(posterior), tensor(x), torch.tensor(t, dtype=torch.float64), process).numpy()
    unmasked = x != process.mask
    assert (oracle.weights(x, t)[unmasked] == 0).all()
    assert (exact[unmasked][:, -1] > 1.01 * score[unmasked][:, -1]).any()


@EVERY
def test_bridge_theorem_for_a_law_with_holes(name: str) -> None:
    """Theorem 4.1 where most sequences have probability zero, and so some tokens at some sites."""
    process, oracle = case(name)
    oracle.distribution = np.where(np.random.default_rng(1).random(len(oracle.distribution)) < 0.1, oracle.distribution, 0.0)
    oracle.distribution[oracle.clean[:, 0] == 0] = 0.0
    oracle.distribution /= oracle.distribution.sum()
    t = 0.3
    x = oracle.noisy[oracle.marginal(t) > 0]
    weighted = oracle.weights(x, t) > 0
    posterior = oracle.posterior(x, t)
    score = m2s.score_from_posterior(tensor(posterior), tensor(x), torch.tensor(t, dtype=torch.float64), process).numpy()
    assert (posterior[:, 0, 0] == 0).all()
    np.testing.assert_allclose(score[weighted], oracle.score(x, t)[weighted], rtol=1e-11, atol=1e-300)


def reference(oracle: Oracle) -> np.ndarray:
    """The law at t = 1 of a uniformly drawn clean token; the last instant before it where the rates diverge at t = 1."""
    vocab = oracle.noise.vocab
    return oracle.noise.kernel(1 - 1e-15)[:vocab].mean(0)


def prior(oracle: Oracle, t: float) -> np.ndarray:
    """KL(q_t(. | x_0) || reference) of every clean sequence."""
    rows, ref = oracle.noise.kernel(t)[: oracle.noise.vocab], reference(oracle)
    terms = np.where(rows > 0, rows * np.log(np.where(rows > 0, rows, 1) / np.where(ref > 0, ref, 1)), 0.0).sum(-1)
    return terms[oracle.clean].sum(-1)


def integral(head: m2s.Head, network, oracle: Oracle, low: float, high: float) -> np.ndarray:
    """The library's objective for every clean sequence, x_t enumerated and t by quadrature."""
    x, total = oracle.noisy, 0.0
    for t, weight in quadrature(low, high):
        total = total + weight * oracle.expected(site_losses(head, network(x, t), oracle, x, t).numpy(), t)
    return total


def leaving_and_jumping(oracle: Oracle, output: np.ndarray, x: np.ndarray, t: float) -> tuple[np.ndarray, np.ndarray]:
    """Neural CTMC's lambda [N, L] and pi [N, L, S] of a network's output, by hand.

    The output at k is log lambda in units of the forward rates into k; the rest, where there is such a rate, are logits of pi.
    """
    weight = oracle.weights(x, t)
    leave = np.exp(np.take_along_axis(output, x[..., None], -1)[..., 0]) * weight.sum(-1)
    distribution = np.where(weight > 0, np.exp(output), 0.0)
    total = distribution.sum(-1, keepdims=True)
    return leave, distribution / np.where(total > 0, total, 1.0)


def factorized(oracle: Oracle, score: np.ndarray, x: np.ndarray, t: float, seed: int = 11) -> np.ndarray:
    """An output of Neural CTMC's that says this score; what it may not look at, and the level of the logits, is noise."""
    weight, noise = oracle.weights(x, t), np.random.default_rng(seed).normal(size=(*score.shape[:-1], score.shape[-1] + 1))
    rate = np.where(weight > 0, weight * score, 0.0)
    leave, unit = rate.sum(-1, keepdims=True), weight.sum(-1, keepdims=True)
    distribution = np.divide(rate, leave, out=np.ones_like(rate), where=weight > 0)
    output = np.where(weight > 0, np.log(distribution) + noise[..., :1], noise[..., 1:])
    own = np.log(np.divide(leave, unit, out=np.ones_like(leave), where=unit > 0))
    return np.where(np.arange(score.shape[-1]) == x[..., None], own, output)


def rate_score(oracle: Oracle, output: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
    """lambda pi_y / Q_t(y -> k), the score with which the oracle's reverse process has these rates."""
    weight, (leave, distribution) = oracle.weights(x, t), leaving_and_jumping(oracle, output, x, t)
    return np.divide(leave[..., None] * distribution, weight, out=np.ones_like(distribution), where=weight > 0)


def path_divergence(oracle: Oracle, output: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
    """l - l* + l* log(l*/l) + l* KL(pi* || pi) as [N, L, z], by hand; 0 for a z from which k cannot be reached.

    l and pi are the network's, l* and pi* those of the reverse process that ends in z.
    """
    kernel, weight = oracle.noise.kernel(t)[: oracle.noise.vocab], oracle.weights(x, t)[:, :, None, :]
    own = kernel[:, x].transpose(1, 2, 0)[..., None]
    leave, distribution = (value[:, :, None] for value in leaving_and_jumping(oracle, output, x, t))
    wanted = weight * np.divide(kernel, own, out=np.zeros(own.shape[:-1] + kernel.shape[-1:]), where=own > 0)
    total = wanted.sum(-1)
    share = np.divide(wanted, total[..., None], out=np.zeros_like(wanted), where=total[..., None] > 0)
    moves = share > 0
    jumps = np.where(moves, share * np.log(np.where(moves, share, 1) / np.where(moves, distribution, 1)), 0.0).sum(-1)
    goes = total > 0
    waits = np.where(goes, total * np.log(np.where(goes, total, 1) / np.where(goes, leave, 1)), 0.0)
    return np.where(own[..., 0] > 0, leave - total + waits + total * jumps, 0.0)


def path_integrals(process: m2s.Process, oracle: Oracle, network, low: float, high: float) -> dict[str, np.ndarray]:
    """E of the divergence of paths over [low, high] for every clean sequence: by hand, and by the library's two losses."""
    x, head = oracle.noisy, m2s.FactorizedRate(process)
    total = {"hand": 0.0, "path_kl": 0.0, "score_entropy": 0.0}
    for t, weight in quadrature(low, high):
        output = network(x, t)
        losses = {"hand": path_divergence(oracle, output, x, t)}
        reached = oracle.noise.kernel(t)[: oracle.noise.vocab][:, x].transpose(1, 2, 0) > 0
        for name, loss in (("path_kl", path_kl), ("score_entropy", m2s.score_entropy)):
            losses[name] = np.where(reached, site_losses(head, output, oracle, x, t, loss).numpy(), 0.0)
        for name, each in losses.items():
            total[name] = total[name] + weight * oracle.expected(each, t)
    return total


def entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


LOW, HIGH = 1e-9, 1 - 1e-9
BOUNDED = ["uniform-linear", "uniform-exponential", "absorbing-cosine", "hybrid-0.6", "gaussian", "birth-death"]


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("seed", [1, 2])
def test_elbo_theorem(name: str, seed: int) -> None:
    """Theorem 4.2: the reverse process with any M2S score has NLL <= objective + prior KL, for each sequence and so on average.

    The network's law is taken as leave-one-out, so that its posterior tends to the token it sees and the objective is finite.
    """
    process, oracle = case(name)
    network = Network(oracle, seed)

    def score(x: np.ndarray, t: float) -> np.ndarray:
        joint = network.posterior(x, t) * oracle.noise.kernel(t)[:, x].transpose(1, 2, 0)
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
def test_elbo_theorem_for_a_free_score(name: str) -> None:
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
def test_elbo_theorem_for_leaving_and_jumping(name: str) -> None:
    """Theorem 4.2 for Neural CTMC: the divergence of paths + prior KL bounds the exact NLL of its own reverse process.

    lambda and pi are the exact ones disturbed, as in the test above. By hand, and the library's two losses integrate to it.
    """
    process, oracle = case(name)
    noise = Network(oracle, 3, scale=0.3)

    def output(x: np.ndarray, t: float) -> np.ndarray:
        score = oracle.score(x, t) * np.exp(4 * t * (1 - t) * noise.logits(x, t))
        return factorized(oracle, score, x, t)

    distribution = oracle.terminal(lambda x, t: rate_score(oracle, output(x, t), x, t), reference(oracle), HIGH, LOW)
    nll = -np.log(distribution[oracle.index(oracle.clean)])
    found = path_integrals(process, oracle, output, LOW, HIGH)
    bound = found["hand"] + prior(oracle, HIGH)
    assert (nll < bound).all()
    assert (
        entropy(oracle.distribution)
        < oracle.distribution @ nll
        < oracle.distribution @ bound
        < oracle.distribution @ nll + oracle.length
    )
    np.testing.assert_allclose(found["path_kl"], found["hand"], rtol=1e-10)
    np.testing.assert_allclose(found["score_entropy"], found["hand"], rtol=1e-10)


@pytest.mark.parametrize("name", UNIFORM)
def test_elbo_theorem_is_tight_at_the_exact_leaving_and_jumping(name: str) -> None:
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
    if name == "uniform-linear":  # then nothing is left of the data at t = 1, and all three are one number
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
def test_objective_of_the_exact_score_is_the_information_lost(name: str) -> None:
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
@pytest.mark.parametrize("kind", ["m2s", "free score", "rate"])
def test_elbo_theorem_gap_is_a_path_space_divergence(name: str, kind: str) -> None:
    """Over [t_min, T]: objective + E prior = H(X_0) - H(X_0|X_tmin) + KL(p_T||ref) + integral of E sum Q h(s, s*)."""
    process, oracle = case(name)
    low, high = 1e-2, 1 - 1e-2
    network = Network(oracle, 5)
    head = {"m2s": m2s.Posterior, "free score": m2s.LogScore, "rate": m2s.FactorizedRate}[kind](process)
    score = {
        "m2s": lambda x, t: oracle.bridge(network.posterior(x, t), x, t),
        "free score": lambda x, t: np.exp(network.logits(x, t)),
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
@pytest.mark.parametrize("free", [False, True], ids=["m2s", "free score"])
@pytest.mark.parametrize("t_min", [0.02, 0.2])
def test_elbo_theorem_with_its_ends_cut(name: str, free: bool, t_min: float) -> None:
    """SPEC 3: integral + KL(q_{1-t_min}||ref) + E -log p(x_0|x_tmin) bounds the NLL of a process that ends in one draw."""
    process, oracle = case(name)
    low, high, x = t_min, 1 - t_min, oracle.noisy
    network = Network(oracle, 7)
    head = m2s.LogScore(process) if free else m2s.Posterior(process)

    def score(x: np.ndarray, t: float) -> np.ndarray:
        return np.exp(network.logits(x, t)) if free else oracle.bridge(network.posterior(x, t), x, t)

    last = network.posterior(x, low)
    if free:
        s = np.where(np.arange(oracle.noise.states) == x[..., None], 1.0, score(x, low))
        last = s * oracle.noise.kernel(low)[:, x].transpose(1, 2, 0)
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
    x, to, size = oracle.noisy, oracle.neighbours(oracle.noisy), last.size

    def slope(u: float, state: np.ndarray) -> np.ndarray:
        t = expit(u)
        chance, rates, kernel = state[:size].reshape(last.shape), rate(x, t), oracle.noise.kernel(t)
        weight, likelihood = oracle.weights(x, t), oracle.likelihood(x, t).T
        change, excess = np.zeros_like(chance), np.zeros(last.shape[1])
        for i, y in itertools.product(range(oracle.length), range(oracle.noise.states)):
            at = np.flatnonzero(weight[:, i, y])  # the sequences that go to y at site i
            before, after, likely = chance[at], chance[to[at, i, y]], likelihood[at]
            change[at] += rates[at, i, y, None] * (after - before)
            counted = likely > 0
            there = np.where(counted, rates[at, i, y, None] * after / np.where(counted, before, 1), 0.0)
            ratio = kernel[oracle.clean[:, i], y] / np.where(counted, kernel[oracle.clean[:, i]][:, x[at, i]].T, 1)
            wanted = np.where(counted, weight[at, i, y, None] * ratio, 0.0)
            moves = wanted > 0
            logs = np.log(np.where(moves, wanted, 1) / np.where(moves, there, 1))
            excess += (likely * (there - wanted + wanted * logs)).sum(0)
        return t * (1 - t) * np.concatenate([change.ravel(), excess])

    start = np.concatenate([last.ravel(), np.zeros(last.shape[1])])
    end = solve_ivp(slope, (logit(low), logit(high)), start, method="DOP853", rtol=1e-10, atol=1e-13).y[:, -1]
    return end[:size].reshape(last.shape), end[size:]


@pytest.mark.parametrize("name", ["uniform-linear", "hybrid-0.6", "gaussian", "birth-death", "absorbing-cosine"])
def test_bound_of_leaving_and_jumping_exceeds_the_exact_nll_by_a_divergence_of_paths(name: str) -> None:
    """For a random output of Neural CTMC's, and for every sequence by itself: bound = NLL + KL(noising process given x_0 ||
    the model's own process given that it ends in x_0). The NLL is found twice, forward and backward in time."""
    process, oracle = case(name)
    low, high, x = 0.02, 0.98, oracle.noisy
    network = Network(oracle, 7, scale=0.5)

    def rate(x: np.ndarray, t: float) -> np.ndarray:
        leave, distribution = leaving_and_jumping(oracle, network.logits(x, t), x, t)
        return leave[..., None] * distribution

    # the last draw: s_y P_t(k|y), over clean y, with s_k = 1, and 1 too for a token without a rate into k
    score = np.where(np.arange(oracle.noise.states) == x[..., None], 1.0, rate_score(oracle, network.logits(x, low), x, low))
    last = (score * oracle.noise.kernel(low)[:, x].transpose(1, 2, 0))[..., : oracle.noise.vocab]
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


@EVERY
@pytest.mark.parametrize("t", [0.02, 0.5, 0.98])
def test_consistency(name: str, t: float) -> None:
    """Proposition 4.3: the excess conditional risk of a score is sum_y Q h(s_y, s*_y), at every site of every sequence."""
    process, oracle = case(name)
    x = oracle.noisy
    weight, exact, posterior = oracle.weights(x, t), oracle.score(x, t), oracle.posterior(x, t)
    log_score = np.log(exact) + Network(oracle, 2).logits(x, t)
    head = m2s.LogScore(process)
    risk = conditional_risk(site_losses(head, log_score, oracle, x, t).numpy(), posterior)
    least = conditional_risk(site_losses(head, np.log(exact), oracle, x, t).numpy(), posterior)
    counted = weight > 0
    excess = np.where(counted, weight * h(np.where(counted, np.exp(log_score), 1), np.where(counted, exact, 1)), 0.0).sum(-1)
    np.testing.assert_allclose(risk - least, excess, rtol=1e-9, atol=1e-11 * max(1, np.abs(risk).max()))
    assert (excess[counted.any(-1)] > 0).all()


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


@EVERY
@pytest.mark.parametrize("head", ["m2s", "free"])
@pytest.mark.parametrize("t", TIMES)
def test_score_entropy_is_its_definition(name: str, head: str, t: float) -> None:
    """The integrand of Eq. 8, weight and constant included, for every clean token, sequence and site."""
    process, oracle = case(name)
    x, network = oracle.noisy, Network(oracle, 4)
    score = np.exp(network.logits(x, t)) if head == "free" else oracle.bridge(network.posterior(x, t), x, t)
    chosen = m2s.LogScore(process) if head == "free" else m2s.Posterior(process)
    expected = oracle.losses(score, x, t)
    found = site_losses(chosen, network.logits(x, t), oracle, x, t).numpy()
    possible = oracle.noise.kernel(t)[: oracle.noise.vocab, x].transpose(1, 2, 0) > 0
    np.testing.assert_allclose(found[possible], expected[possible], rtol=1e-9, atol=1e-13)
    assert (found[possible & (oracle.weights(x, t).sum(-1)[..., None] == 0)] == 0).all()


@pytest.mark.parametrize("name", [*UNIFORM, "hybrid-0.2", "gaussian"])
@pytest.mark.parametrize("t", TIMES)
def test_rank_condition(name: str, t: float) -> None:
    """Theorem 4.4: rank [B_+; 1] = K, and the library's bridge is that matrix, column by column."""
    process, oracle = case(name)
    vocab = oracle.noise.vocab
    for k in range(oracle.noise.states):
        rows = bridge_rows(oracle, k, t)
        augmented = np.vstack([rows / np.abs(rows).max(1, keepdims=True), np.ones(vocab)])
        assert np.linalg.matrix_rank(augmented, tol=1e-9) == vocab
        eye = torch.eye(oracle.noise.states, dtype=torch.float64)[:vocab]
        score = m2s.score_from_posterior(eye, torch.full((vocab,), k), torch.tensor(t, dtype=torch.float64), process).numpy()
        counted = [y for y in range(oracle.noise.states) if y != k and oracle.noise.rates(t)[y, k] > 0]
        np.testing.assert_allclose(score[:, counted].T, rows, rtol=1e-11)


@pytest.mark.parametrize(
    ("name", "k"), [("uniform-linear", 1), ("hybrid-0.2", 0), ("hybrid-0.2", 3), ("absorbing-linear", 3), ("gaussian", 2)]
)
def test_posterior_recovery_by_risk(name: str, k: int) -> None:
    """Theorem 4.4: the conditional M2S risk has one minimum, the true posterior: no gradient there, and descent finds it."""
    process, oracle = case(name)
    t, head = 0.4, m2s.Posterior(process)
    x = oracle.noisy[oracle.noisy[:, 0] == k][7:8]
    target = tensor(oracle.posterior(x, t)[0, :1, : oracle.noise.vocab])

    def risk(logits: torch.Tensor) -> torch.Tensor:
        return (target * site_losses(head, logits[None], oracle, x[:, :1], t)[0]).sum()

    padding = torch.zeros(1, oracle.noise.states - oracle.noise.vocab, dtype=torch.float64)
    at_truth = torch.log(target).requires_grad_()
    least = risk(torch.cat([at_truth, padding], -1))
    (gradient,) = torch.autograd.grad(least, at_truth)
    assert gradient.abs().max() < 1e-13 * max(1.0, least.item())
    for seed in range(3):
        logits = torch.tensor(np.random.default_rng(seed).normal(size=target.shape), requires_grad=True)
        assert float(risk(torch.cat([logits.detach(), padding], -1))) > least.item()
        solver = torch.optim.LBFGS(
            [logits], max_iter=300, tolerance_grad=1e-13, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure(solver=solver, logits=logits) -> torch.Tensor:
            solver.zero_grad()
            loss = risk(torch.cat([logits, padding], -1))
            loss.backward()
            return loss

        solver.step(closure)
        assert (torch.softmax(logits, -1) - target).abs().max() < 1e-6


def test_posterior_recovery_fails_without_the_rank_condition() -> None:
    """Theorem 4.4, converse: one candidate leads into the end of a birth-death chain, and two posteriors have least risk."""
    process, oracle = case("birth-death")
    t, k = 0.3, 0
    rows = bridge_rows(oracle, k, t)
    augmented = np.vstack([rows, np.ones(4)])
    assert np.linalg.matrix_rank(augmented) == 2
    x = oracle.noisy[oracle.noisy[:, 0] == k][5:6]
    truth = oracle.posterior(x, t)[0, 0]
    null = np.linalg.svd(augmented)[2][-1]
    other = truth + 0.9 * null * np.min(truth / np.abs(null))
    risks = []
    for mu in (truth, other, np.full(4, 0.25)):
        losses = site_losses(m2s.Posterior(process), log(mu[None, None]), oracle, x[:, :1], t).numpy()
        risks.append(float(conditional_risk(losses, truth[None, None])[0, 0]))
    assert np.abs(truth - other).max() > 1e-2
    assert other.min() > 0
    assert risks[1] == pytest.approx(risks[0], rel=1e-12)
    assert risks[2] > risks[0] * (1 + 1e-3)


def bridge_system(process: m2s.Uniform, t: float, k: int) -> np.ndarray:
    """B_{t,k} of Eq. 7 from rho alone: 1 off the diagonal, 1/rho at z = y, rho at z = k."""
    beta = t
    own = beta / process.vocab
    rho = own / (1 - beta + own)
    matrix = np.ones((process.vocab, process.vocab))
    np.fill_diagonal(matrix, 1 / rho)
    matrix[:, k] = rho
    return np.delete(matrix, k, 0)


def full_score(values: np.ndarray, k: int) -> torch.Tensor:
    """Candidate scores with the ignored entry put back, as NaN would be unfair: any number will do."""
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
def test_box_holds_every_bridged_score(name: str, t: float) -> None:
    """The box of any process is [min_z, max_z] of P_t(y|z)/P_t(k|z)."""
    process, oracle = case(name)
    x, time = oracle.noisy[:: max(1, len(oracle.noisy) // 40)], torch.tensor(t, dtype=torch.float64)
    low, high = m2s.box(tensor(x), time, process)
    kernel, weight = oracle.noise.kernel(t)[: oracle.noise.vocab], oracle.weights(x, t)
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
    precision = 1e-9 if isinstance(process, m2s.RateMatrix) else 1e-11
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
        centre = rows @ np.full(vocab, 1 / vocab)
        score = np.ones((40, states))
        score[:, counted] = centre * np.exp(generator.normal(size=(40, len(counted))) * np.linspace(0.05, 3, 40)[:, None])
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


@pytest.mark.parametrize("name", ["absorbing-linear", "absorbing-cosine", "tabulated-absorbing"])
@pytest.mark.parametrize("t", TIMES)
def test_md4_reduction(name: str, t: float) -> None:
    """Theorem 4.6: under a mask the objective is (-alpha'/(1-alpha)) (-log mu_{x_0}) at masked sites and 0 elsewhere."""
    process, oracle = case(name)
    x, network = oracle.noisy, Network(oracle, 6)
    alpha = oracle.noise.kernel(t)[0, 0]
    slope = oracle.noise.rates(t)[0, oracle.noise.states - 1] * alpha
    expected = np.where(
        (x == oracle.noise.vocab)[..., None],
        slope / (1 - alpha) * -np.log(network.posterior(x, t)[..., : oracle.noise.vocab]),
        0,
    )
    head, output = m2s.Posterior(process), network.logits(x, t)
    found = site_losses(head, output, oracle, x, t).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-11)
    assert (found[x != oracle.noise.vocab] == 0).all()
    if isinstance(process, m2s.Absorbing):
        x_0 = torch.arange(process.vocab).expand(*x.shape, process.vocab)
        x_t, wide = tensor(x).unsqueeze(-1).expand_as(x_0), tensor(output).unsqueeze(-2).expand(*x_0.shape, process.states)
        masked = m2s.masked_cross_entropy(head, wide, x_0, x_t, torch.tensor(t, dtype=torch.float64))
        np.testing.assert_allclose(masked, expected, rtol=1e-11)
        exact = m2s.masked_cross_entropy(
            m2s.Posterior(process, offset="exact"), wide, x_0, x_t, torch.tensor(t, dtype=torch.float64)
        )
        np.testing.assert_allclose(exact, expected, rtol=1e-11)
