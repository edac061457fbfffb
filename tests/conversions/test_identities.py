"""Exact identities between predictions, objectives of other methods, reverse steps and rates, each computed in two ways."""

import mpmath
import numpy as np
import pytest
import torch

import m2s
from m2s.heads import exit_and_jump
from oracle import CASES, Network, Oracle, h

TIMES = [1e-3, 0.3, 0.97]
RANK_ONE = [name for name, case in CASES.items() if case.process.rank_one is not None]
EVERY = pytest.mark.parametrize("name", CASES)
EVERY_RANK_ONE = pytest.mark.parametrize("name", RANK_ONE)
AT = pytest.mark.parametrize("t", TIMES)


def tensor(value: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(value))


def at(t: float) -> torch.Tensor:
    return torch.tensor(t, dtype=torch.float64)


def case(name: str) -> tuple[m2s.Process, Oracle, np.ndarray]:
    oracle = CASES[name].oracle()
    return CASES[name].process, oracle, oracle.noisy


def log(p: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(p)


def likelihood_of_current(oracle: Oracle, x: np.ndarray, t: float) -> np.ndarray:
    """P_t(x^i | z) as [N, L, z]."""
    return oracle.noise.transition_matrix(t)[:, x].transpose(1, 2, 0)


def reachable(oracle: Oracle, x: np.ndarray, t: float) -> np.ndarray:
    """Sites whose token every clean token can become."""
    return (likelihood_of_current(oracle, x, t)[..., : oracle.noise.vocab] > 0).all(-1)


# predictions


@EVERY_RANK_ONE
@AT
def test_offset_is_log1p_alpha_over_m(name: str, t: float) -> None:
    """Posterior logits are leave-one-out logits plus log1p(alpha/m_t(k)) at a clean k, and nothing at the mask."""
    process, oracle, x = case(name)
    transition, output = oracle.noise.transition_matrix(t), Network(oracle, 0).logits(x, t)
    alpha = transition[0, 0] - transition[1, 0]
    found = m2s.Posterior(process, offset="exact").posterior(tensor(output), tensor(x), at(t)).numpy()
    logits = output[..., : process.vocab].copy()
    for k in range(process.vocab):
        m = transition[(k + 1) % process.vocab, k]
        logits[..., k] += np.where(x == k, np.log1p(alpha / m) if m > 0 else np.inf, 0.0)
    certain = np.isinf(logits)
    expected = np.where(certain.any(-1, keepdims=True), certain, np.exp(np.minimum(logits, 700)))
    expected = expected / expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(found[..., : process.vocab], expected, rtol=1e-10, atol=1e-300)


@EVERY
@AT
def test_exact_leave_one_out_gives_the_exact_posterior_and_score(name: str, t: float) -> None:
    """mu ∝ nu P_t(k|.), s_y = (nu P)_y/(nu P)_k, by the head with its offset and by the maps."""
    process, oracle, x = case(name)
    nu, posterior, score = oracle.leave_one_out(x, t), oracle.posterior(x, t), oracle.score(x, t)
    head = m2s.Posterior(process, offset="exact")
    np.testing.assert_allclose(head.posterior(tensor(log(nu)), tensor(x), at(t)), posterior, rtol=1e-10, atol=1e-300)
    log_score = head.log_score(tensor(log(nu)), tensor(x), at(t)).numpy()
    weighted = oracle.weights(x, t) > 0
    np.testing.assert_allclose(np.exp(log_score[weighted]), score[weighted], rtol=1e-10)
    mapped = m2s.posterior_from_leave_one_out(tensor(nu), tensor(x), at(t), process)
    np.testing.assert_allclose(mapped, posterior, rtol=1e-10, atol=1e-300)
    np.testing.assert_allclose(m2s.score_from_leave_one_out(tensor(nu), tensor(x), at(t), process), score, rtol=1e-10)
    seen = reachable(oracle, x, t)
    back = m2s.leave_one_out_from_posterior(tensor(posterior), tensor(x), at(t), process).numpy()
    np.testing.assert_allclose(back[seen], nu[seen], rtol=1e-10, atol=1e-300)


# objectives of other methods


def losses(head: m2s.Head, output: np.ndarray, x: np.ndarray, t: float) -> np.ndarray:
    """The library's score entropy for every sequence, site and clean token."""
    vocab = head.process.vocab
    x_0 = torch.arange(vocab).expand(*x.shape, vocab)
    wide = tensor(output).unsqueeze(-2).expand(*x_0.shape, output.shape[-1])
    return m2s.score_entropy(head, wide, x_0, tensor(x).unsqueeze(-1).expand_as(x_0), at(t)).numpy()


@EVERY_RANK_ONE
@AT
def test_gidd_elbo(name: str, t: float) -> None:
    """GIDD: n_t(z_t)/q_t(z_t|x) times KL(q_t(.|x) || q_t(.|x_theta)) + Itakura-Saito(q_t(z_t|x), q_t(z_t|x_theta))."""
    process, oracle, x = case(name)
    network, vocab, transition = Network(oracle, 1), oracle.noise.vocab, oracle.noise.transition_matrix(t)
    plugged = network.posterior(x, t) @ transition  # q_t(. | x_theta)
    rate = oracle.noise.rates(t)
    into = np.array([rate[(k + 1) % oracle.noise.states, k] if k < vocab else rate[0, k] for k in range(oracle.noise.states)])
    expected = np.zeros((*x.shape, vocab))
    for z in range(vocab):
        q = np.broadcast_to(transition[z], plugged.shape)
        divergence = np.where(q > 0, q * (log(np.where(q > 0, q, 1)) - log(np.where(q > 0, plugged, 1))), 0.0).sum(-1)
        here, there = transition[z][x], np.take_along_axis(plugged, x[..., None], -1)[..., 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = here / there
            expected[..., z] = into[x] / here * (divergence + ratio - np.log(ratio) - 1)
    possible = likelihood_of_current(oracle, x, t)[..., :vocab] > 0
    expected = np.where((into[x] > 0)[..., None], expected, 0.0)
    found = losses(m2s.Posterior(process, offset="exact"), network.logits(x, t), x, t)
    np.testing.assert_allclose(found[possible], expected[possible], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["uniform-linear", "uniform-exponential"])
@AT
def test_udlm_nelbo(name: str, t: float) -> None:
    """UDLM: alpha'/(N alpha) [N/xbar_i - N/xbar^theta_i - sum_j xbar_j/xbar_i log(...)], xbar = N alpha x + 1 - alpha."""
    process, oracle, x = case(name)
    network, n = Network(oracle, 2), oracle.noise.vocab
    transition = oracle.noise.transition_matrix(t)
    alpha = transition[0, 0] - transition[0, 1]
    slope = oracle.noise.rates(t)[0, 1]  # -alpha' / (N alpha)
    model = n * alpha * network.posterior(x, t) + (1 - alpha)
    model_i = np.take_along_axis(model, x[..., None], -1)
    expected = np.zeros((*x.shape, n))
    for z in range(n):
        clean = n * alpha * np.eye(n)[z] + (1 - alpha)
        clean_i = clean[x][..., None]
        inner = (clean / clean_i * np.log(model_i * clean / (model * clean_i))).sum(-1)
        expected[..., z] = -slope * (n / clean_i[..., 0] - n / model_i[..., 0] - inner)
    found = losses(m2s.Posterior(process, offset="exact"), network.logits(x, t), x, t)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-9)


# score entropy at extremes


def exact_loss(process: m2s.Process, logits: np.ndarray, x: int, k: int, t: float, unconstrained: bool) -> mpmath.mpf:
    """n(k) sum_y h(s_y, r_y) of a uniform or hybrid site in sixty digits, straight from the definitions."""
    vocab, states, time = process.vocab, process.states, mpmath.mpf(t)
    if process.mask is None:
        alpha, m, m_rate = 1 - time, [time / vocab] * vocab, [1 / (1 - time) / vocab] * vocab
    else:
        b = mpmath.mpf(2 * process.p_uniform) / (1 - process.p_uniform)

        def mixing(y: int, t: mpmath.mpf) -> mpmath.mpf:
            c = b * mpmath.sqrt(t * (1 - t))
            return (t if y == vocab else c / vocab) / (1 + c)

        def untouched(t: mpmath.mpf) -> mpmath.mpf:
            return (1 - t) / (1 + b * mpmath.sqrt(t * (1 - t)))

        alpha, m, step = untouched(time), [mixing(y, time) for y in range(states)], time * (1 - time) * mpmath.mpf(10) ** -20
        log_slope = (mpmath.log(untouched(time + step)) - mpmath.log(untouched(time - step))) / (2 * step)
        m_rate = [(mixing(y, time + step) - mixing(y, time - step)) / (2 * step) - log_slope * m[y] for y in range(states)]

    def transition(z: int, y: int) -> mpmath.mpf:
        return alpha * (z == y) + m[y]

    values = [mpmath.mpf(v) for v in logits]
    if unconstrained:
        score = [mpmath.exp(v) for v in values]
    else:
        weight = [mpmath.exp(v) for v in values[:vocab]]
        total = mpmath.fsum(weight)
        mu = [w / total for w in weight]
        score = [mpmath.fsum(mu[z] * transition(z, y) / transition(z, k) for z in range(vocab)) for y in range(states)]
    terms = []
    for y in range(states):
        if y != k:
            s, r = score[y], transition(x, y) / transition(x, k)
            terms.append(s - r * mpmath.log(s) + r * mpmath.log(r) - r)
    return m_rate[k] * mpmath.fsum(terms)


@pytest.mark.parametrize("process", [m2s.Uniform(5, m2s.Linear()), m2s.Hybrid(4, p_uniform=0.2)], ids=repr)
@pytest.mark.parametrize("unconstrained", [False, True], ids=["m2s", "unconstrained"])
@pytest.mark.parametrize("t", [1e-9, 1e-3, 0.5, 1 - 1e-6])
def test_score_entropy_in_sixty_digits(process: m2s.Process, unconstrained: bool, t: float) -> None:
    """Float64 keeps ten digits of the loss for flat, sharp, right and wrong predictions at both ends of time."""
    head = m2s.LogScore(process) if unconstrained else m2s.Posterior(process)
    generator = np.random.default_rng(0)
    with mpmath.workdps(60):
        for k in range(process.states):
            for x in (0, 1):
                for scale in (0.1, 3.0, 25.0):
                    logits = scale * generator.normal(size=process.states)
                    expected = exact_loss(process, logits, x, k, t, unconstrained)
                    found = m2s.score_entropy(head, tensor(logits), torch.tensor(x), torch.tensor(k), at(t))
                    assert float(found) == pytest.approx(float(expected), rel=1e-10)


@EVERY
@pytest.mark.parametrize("kind", ["none", "exact", "unconstrained", "rate"])
def test_score_entropy_gradient(name: str, kind: str) -> None:
    """Autograd through the library is autograd through the bare definition sum Q (s - r log s), for every head."""
    process, oracle, x = case(name)
    x, t = x[:: len(x) // 20], 0.35
    output = tensor(Network(oracle, 3).logits(x, t)).requires_grad_()
    x_0 = tensor(np.random.default_rng(0).integers(process.vocab, size=x.shape))
    transition, weight = tensor(oracle.noise.transition_matrix(t)), tensor(oracle.weights(x, t))
    likelihood = transition[:, tensor(x)].permute(1, 2, 0)
    ratio = transition[x_0] / transition[x_0, tensor(x)].unsqueeze(-1)
    if kind in ("none", "exact"):
        head = m2s.Posterior(process, offset=kind)
        clean = torch.softmax(output[..., : process.vocab], -1)
        mu = torch.nn.functional.pad(clean, (0, process.states - process.vocab))
        if kind == "exact":
            mu = mu * likelihood / (mu * likelihood).sum(-1, keepdim=True)
        score = torch.where(likelihood > 0, mu / likelihood.where(likelihood > 0, 1), 0) @ transition
    elif kind == "unconstrained":
        head, score = m2s.LogScore(process), output.exp()
    else:
        head = m2s.FactorizedRate(process)
        current = torch.nn.functional.one_hot(tensor(x), process.states).bool()
        barred = current | (weight == 0)
        jump = torch.softmax(output.masked_fill(barred, -1e300), -1)
        score = (
            output.gather(-1, tensor(x).unsqueeze(-1)).exp() * weight.sum(-1, keepdim=True) * jump / weight.where(weight > 0, 1)
        )
    counted = (weight > 0) & (transition[x_0, tensor(x)] > 0).unsqueeze(-1)
    safe, r = score.where(counted, 1), ratio.where(counted, 0)
    direct = torch.where(counted, weight * (safe - r * torch.log(safe)), 0).sum(-1)
    possible = transition[x_0, tensor(x)] > 0
    (expected,) = torch.autograd.grad(direct[possible].sum(), output)
    (found,) = torch.autograd.grad(m2s.score_entropy(head, output, x_0, tensor(x), at(t))[possible].sum(), output)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10 * float(expected.abs().max()))


# reverse steps


@EVERY
@pytest.mark.parametrize(("s", "t"), [(0.0, 1e-3), (0.0, 0.5), (0.2, 0.3), (0.5, 0.97)])
def test_bayes_probabilities(name: str, s: float, t: float) -> None:
    """With the exact posterior it is Pr(X_s^i = y | X_t = x), enumerated; it always sums to one, and at s = 0 is mu."""
    process, oracle, x = case(name)
    early, step, factors = oracle.noise.transition_matrix(s), oracle.noise.step(s, t), oracle.factors(x, t)
    expected = np.empty((*x.shape, process.states))
    for i in range(oracle.length):
        others = oracle.distribution[:, None] * np.delete(factors, i, axis=-1).prod(-1)
        for y in range(process.states):
            expected[:, i, y] = (early[oracle.clean[:, i], y] @ others) * step[y, x[:, i]]
    expected /= oracle.marginal(t)[:, None, None]
    found = m2s.bayes_probabilities(tensor(oracle.posterior(x, t)), tensor(x), at(s), at(t), process).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    mu = m2s.Posterior(process).posterior(tensor(Network(oracle, 4).logits(x, t)), tensor(x), at(t))
    distribution = m2s.bayes_probabilities(mu, tensor(x), at(s), at(t), process).numpy()
    np.testing.assert_allclose(distribution.sum(-1), 1, rtol=1e-10)
    assert (distribution >= 0).all()
    if s == 0:
        np.testing.assert_allclose(distribution, mu, rtol=1e-10, atol=1e-14)


@EVERY_RANK_ONE
@pytest.mark.parametrize(("s", "t"), [(0.0, 0.5), (0.2, 0.3), (0.5, 0.97)])
def test_bayes_step_is_a_mixture_of_three_routes(name: str, s: float, t: float) -> None:
    """To z ~ mu with weight q(k) alpha_s/m_t(k), to y by m_s with weight q(k) N, else stay."""
    process, oracle, x = case(name)
    mu = Network(oracle, 5).posterior(x, t)
    late, early, step = oracle.noise.transition_matrix(t), oracle.noise.transition_matrix(s), oracle.noise.step(s, t)
    other = (np.arange(process.states) + 1) % process.vocab  # a clean token that differs from the column
    m_t, m_s, q = (matrix[other, np.arange(process.states)] for matrix in (late, early, step))
    alpha_s = early[0, 0] - early[1, 0]
    counted = m_t[x] > 1e-14
    k, mu = x[counted], mu[counted]
    n = (mu / late[:, k].T).sum(-1)
    to_z = (q[k] * alpha_s / m_t[k])[:, None] * mu
    to_y = (q[k] * n)[:, None] * m_s
    stay = 1 - to_z.sum(-1) - to_y.sum(-1)
    assert (stay > -1e-12).all()
    expected = to_z + to_y + stay[:, None] * np.eye(process.states)[k]
    found = m2s.bayes_probabilities(tensor(mu), tensor(k), at(s), at(t), process)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def released_weights(score: np.ndarray, x: np.ndarray, difference: float, absorbing: bool) -> np.ndarray:
    """SEDD's released `staggered_score` times `transp_transition`, for a step of length `difference` in sigma."""
    states, grow, current = score.shape[-1], np.exp(difference), np.eye(score.shape[-1])[x]
    if absorbing:
        staggered = grow * score
        staggered[..., -1] += (1 - grow) * score.sum(-1)
        move = np.exp(-difference) * current + np.where(x == states - 1, 1 - np.exp(-difference), 0)[..., None]
    else:
        staggered = grow * score - (grow - 1) * score.mean(-1, keepdims=True)
        move = np.exp(-difference) * current + (1 - np.exp(-difference)) / states
    return staggered * move


@pytest.mark.parametrize("name", ["uniform-linear", "uniform-exponential", "absorbing-linear", "absorbing-cosine"])
@pytest.mark.parametrize(("s", "t"), [(1e-5, 1e-3), (0.2, 0.3), (0.5, 0.97)])
def test_analytic_weights_are_the_released_ones(name: str, s: float, t: float) -> None:
    """SEDD's formulas on any score; they sum to one, and for uniform are negative iff s_y < (1 - e^-D) mean(s)."""
    process, oracle, x = case(name)
    score = np.exp(2 * Network(oracle, 6).logits(x, t))
    np.put_along_axis(score, x[..., None], 1.0, -1)
    absorbing = process.mask is not None
    late, early = oracle.noise.transition_matrix(t), oracle.noise.transition_matrix(s)
    difference = np.log((early[0, 0] - early[1, 0]) / (late[0, 0] - late[1, 0]))
    expected = released_weights(score, x, difference, absorbing)
    found = m2s.analytic_weights(tensor(score), tensor(x), at(s), at(t), process).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10 * np.abs(expected).max())
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-10 * np.abs(found).max())
    if not absorbing:
        threshold = -np.expm1(-difference) * score.mean(-1, keepdims=True)
        clear = np.abs(score / threshold - 1) > 1e-9
        assert ((found < 0) == (score < threshold))[clear].all()
        if difference > 0.1:
            assert (found < 0).any()


@EVERY_RANK_ONE
@pytest.mark.parametrize(("s", "t"), [(1e-5, 1e-3), (0.2, 0.3), (0.5, 0.97)])
def test_analytic_weights_are_bayes_on_an_exact_score(name: str, s: float, t: float) -> None:
    """On the exact score, at sites whose candidates all count, the analytic step is Pr(X_s^i = y | X_t = x)."""
    process, oracle, x = case(name)
    early, step, mu = oracle.noise.transition_matrix(s), oracle.noise.step(s, t), oracle.posterior(x, t)
    likelihood = likelihood_of_current(oracle, x, t)
    expected = np.divide(mu, likelihood, out=np.zeros_like(mu), where=likelihood > 0) @ early * step[:, x].transpose(1, 2, 0)
    found = m2s.analytic_weights(tensor(oracle.score(x, t)), tensor(x), at(s), at(t), process).numpy()
    seen = reachable(oracle, x, t)
    np.testing.assert_allclose(found[seen], expected[seen], rtol=1e-8, atol=1e-10)


# rates


@EVERY
@AT
def test_rates_and_scores(name: str, t: float) -> None:
    """Eq. 4: reverse rate = Q_t(y -> k) s_y; exit rate and jump distribution give it back, and so does FactorizedRate."""
    process, oracle, x = case(name)
    score, weight = oracle.score(x, t), oracle.weights(x, t)
    expected = oracle.reverse_rates(score, x, t)
    rate = m2s.rate_from_score(tensor(score), tensor(x), at(t), process)
    np.testing.assert_allclose(rate, expected, rtol=1e-11)
    back = m2s.score_from_rate(rate, tensor(x), at(t), process).numpy()
    np.testing.assert_allclose(back[weight > 0], score[weight > 0], rtol=1e-11)
    total, jump = exit_and_jump(rate)
    np.testing.assert_allclose(total, expected.sum(-1), rtol=1e-11)
    np.testing.assert_allclose(total.unsqueeze(-1) * jump, expected, rtol=1e-11)
    leaves = (weight > 0).any(-1)
    np.testing.assert_allclose(jump.sum(-1).numpy()[leaves], 1, rtol=1e-12)
    output = np.where(weight > 0, np.log(np.where(weight > 0, expected, 1)), 0.0) + 3.0
    relative = expected.sum(-1)[leaves] / weight.sum(-1)[leaves]
    values = output[leaves]
    np.put_along_axis(values, x[leaves][:, None], np.log(relative)[:, None], -1)
    found = m2s.FactorizedRate(process).log_score(tensor(values), tensor(x[leaves]), at(t)).exp().numpy()
    np.testing.assert_allclose(found[weight[leaves] > 0], score[leaves][weight[leaves] > 0], rtol=1e-10)


@EVERY
@AT
def test_factorized_rate_score_entropy(name: str, t: float) -> None:
    """The loss of an exit rate and a jump distribution is sum_y h(R_y, Q r_y) over their reverse rates."""
    process, oracle, x = case(name)
    output, weight = Network(oracle, 7).logits(x, t), oracle.weights(x, t)
    current = np.arange(process.states) == x[..., None]
    jump = np.where((weight > 0) & ~current, np.exp(output), 0.0)
    total = jump.sum(-1, keepdims=True)
    jump = np.divide(jump, total, out=np.zeros_like(jump), where=total > 0)
    rate = np.exp(np.take_along_axis(output, x[..., None], -1)) * weight.sum(-1, keepdims=True) * jump
    transition = oracle.noise.transition_matrix(t)[: process.vocab]
    likelihood = likelihood_of_current(oracle, x, t)[..., : process.vocab, None]
    target = weight[:, :, None, :] * np.divide(
        transition, likelihood, out=np.zeros((*likelihood.shape[:-1], process.states)), where=likelihood > 0
    )
    counted = (weight[:, :, None, :] > 0) & (likelihood > 0)
    expected = np.where(counted, h(np.where(counted, rate[:, :, None, :], 1), np.where(counted, target, 1)), 0.0).sum(-1)
    found = losses(m2s.FactorizedRate(process), output, x, t)
    possible = likelihood[..., 0] > 0
    np.testing.assert_allclose(found[possible], expected[possible], rtol=1e-8, atol=1e-10)
