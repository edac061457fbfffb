"""The estimator of the NELBO, term by term, against quadrature over t and enumeration of x_t."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy.stats import binom
from scipy.stats import t as student

import m2s
from exact_steps import unchecked
from oracle import CASES, Case, Network, Oracle, absorbing_rates, geometric, log_linear, quadrature, tabulated, uniform_rates

T_MIN = 0.05
ELBO = {
    **{name: CASES[name] for name in ("uniform-linear", "absorbing-linear", "hybrid-0.6", "gaussian", "birth-death")},
    "uniform-geometric": Case(m2s.Uniform(3, m2s.Geometric(0.05, 6.0)), tabulated(uniform_rates(3), geometric(0.05, 6.0)), 4),
    "absorbing-loglinear": Case(m2s.Absorbing(4, m2s.LogLinear(1e-2)), tabulated(absorbing_rates(4), log_linear(1e-2), 4), 3),
    "tabulated-absorbing": Case(
        m2s.RateMatrix.absorbing(3, m2s.LogLinear(0.1)), tabulated(absorbing_rates(3), log_linear(0.1), 3), 3
    ),
}
SURVIVING = (
    "absorbing-loglinear",
    "tabulated-absorbing",
)  # unmasked tokens remain at t = 1, although sampling starts from masks
PURE_MASK = ("absorbing-linear", "hybrid-0.6", *SURVIVING)  # the KL to the reference is infinite before t = 1
EVERY = pytest.mark.parametrize("name", ELBO)


class Exact:
    """A network with the exact posterior: log Pr(X_0^i = . | X_t = x) at the time of each example."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def posterior(self, x: np.ndarray, t: float) -> np.ndarray:
        return self.oracle.posterior(x, t)

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        rows = [self.oracle.posterior(x[None], time) for x, time in zip(x_t.numpy(), t.double().tolist(), strict=True)]
        return torch.log(torch.from_numpy(np.concatenate(rows)))


def network(kind: str, oracle: Oracle) -> Exact | Network:
    return Exact(oracle) if kind == "exact" else Network(oracle, 11)


def clipped(t: float, t_min: float) -> float:
    """The time that the network gets as input."""
    return min(max(t, t_min), 1 - t_min)


def exact_terms(name: str, model: Exact | Network, oracle: Oracle, t_min: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integral, prior and reconstruction of every clean sequence."""
    x, vocab = oracle.noisy, oracle.noise.vocab
    nodes = quadrature(t_min, 1 - t_min)
    if name in PURE_MASK:
        nodes += quadrature(1 - t_min, 1 - 1e-11)
    integral = 0.0
    for t, weight in nodes:
        score = oracle.bridge(model.posterior(x, clipped(t, t_min)), x, t)
        integral = integral + weight * oracle.expected(oracle.losses(score, x, t), t)
    prior = np.zeros(len(oracle.clean))
    if name in SURVIVING:
        start = oracle.noise.transition_matrix(1.0)[:vocab]
        predicted = predicted_end(model, oracle, t_min)
        terms = np.where(start > 0, start * np.log(np.where(start > 0, start, 1) / predicted[:, None]), 0.0).sum(-1)
        prior = np.stack([terms[i, oracle.clean[:, i]] for i in range(oracle.length)]).sum(0)
    elif name not in PURE_MASK:
        start, reference = (
            oracle.noise.transition_matrix(1 - t_min)[:vocab],
            oracle.noise.transition_matrix(1 - 1e-15)[:vocab].mean(0),
        )
        safe = np.where(start > 0, start, 1)
        prior = (
            np.where(start > 0, start * np.log(safe / np.where(reference > 0, reference, 1)), 0.0).sum(-1)[oracle.clean].sum(-1)
        )
    with np.errstate(divide="ignore"):
        surprise = -np.log(known(model.posterior(x, t_min), oracle, t_min))
    surprise = np.where(np.isfinite(surprise), surprise, 0.0)  # such pairs have probability 0
    return integral, prior, oracle.expected(surprise[..., :vocab], t_min)


def predicted_end(model: Exact | Network, oracle: Oracle, t_min: float) -> np.ndarray:
    """The distribution of x_1 that the model predicts for a fully masked sequence: sum_z mu_z P_1(.|z), [L, S]."""
    vocab, masks = oracle.noise.vocab, np.full((1, oracle.length), oracle.noise.states - 1)
    return model.posterior(masks, 1 - t_min)[0, :, :vocab] @ oracle.noise.transition_matrix(1.0)[:vocab]


def known(posterior: np.ndarray, oracle: Oracle, t: float) -> np.ndarray:
    """A posterior restricted to the tokens from which x_t can be reached."""
    likelihood = oracle.noise.transition_matrix(t)[:, oracle.noisy].transpose(1, 2, 0)
    joint = np.where(likelihood > 0, posterior, 0.0)
    return joint / joint.sum(-1, keepdims=True)


def clean_batch(oracle: Oracle, copies: int) -> tuple[torch.Tensor, np.ndarray]:
    """`copies` of six clean sequences, and their indices."""
    chosen = np.random.default_rng(0).choice(len(oracle.clean), size=6, replace=False, p=oracle.distribution)
    return torch.from_numpy(oracle.clean[chosen]).repeat(copies, 1), chosen


@EVERY
@pytest.mark.parametrize("kind", ["exact", "random"])
def test_elbo_terms(name: str, kind: str) -> None:
    """SPEC 3: integral, prior and reconstruction each estimate their exact value, for each sequence of the batch."""
    process, oracle = ELBO[name].process, ELBO[name].oracle()
    model, copies, passes = network(kind, oracle), 100 if kind == "exact" else 800, 12
    x_0, chosen = clean_batch(oracle, copies)
    found = m2s.elbo(model, m2s.Posterior(process), x_0, passes=passes, t_min=T_MIN, generator=torch.Generator().manual_seed(0))
    integral, prior, reconstruction = (term[chosen] for term in exact_terms(name, model, oracle, T_MIN))
    np.testing.assert_allclose(found.prior.reshape(copies, -1), np.broadcast_to(prior, (copies, 6)), rtol=1e-6, atol=1e-12)
    assert found.passes.shape == (passes, len(x_0))
    np.testing.assert_allclose(found.passes.mean(0), found.nats, rtol=1e-12)
    np.testing.assert_allclose(found.nats, found.integral + found.prior + found.reconstruction, rtol=1e-12)
    for term, exact in ((found.integral, integral), (found.reconstruction, reconstruction)):
        each = term.reshape(copies, 6).numpy()
        error = each.std(0, ddof=1) / copies**0.5
        assert (np.abs(each.mean(0) - exact) < 4 * error + 1e-9).all()
        assert error.mean() < 0.2 * exact.mean() + 1e-9
    nats, error = found
    assert nats is found.nats
    np.testing.assert_allclose(error, found.passes.std(0) / passes**0.5, rtol=1e-12)


@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-linear", "hybrid-0.6"])
def test_elbo_interval_coverage(name: str) -> None:
    """The mean of a batch lies within Student's 95% interval of its standard error about 95% of the time."""
    process, oracle = ELBO[name].process, ELBO[name].oracle()
    model, head, runs, passes = Network(oracle, 11), m2s.Posterior(process), 120, 6
    x_0, chosen = clean_batch(oracle, 4)
    exact = float(sum(exact_terms(name, model, oracle, T_MIN))[chosen].mean())
    width, inside, total = student.ppf(0.975, passes - 1), 0, 0.0
    for seed in range(runs):
        with unchecked() if seed else nullcontext():
            mean, error = m2s.elbo(
                model, head, x_0, passes=passes, t_min=T_MIN, generator=torch.Generator().manual_seed(seed)
            ).mean()
        inside += abs(mean - exact) < width * error
        total += mean / runs
    assert binom.cdf(inside, runs, 0.95) > 1e-3
    assert binom.sf(inside - 1, runs, 0.95) > 1e-3
    assert total == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("name", ["uniform-linear", "uniform-geometric", "gaussian", *SURVIVING])
@pytest.mark.parametrize("kind", ["exact", "random"])
def test_elbo_is_above_the_exact_nll(name: str, kind: str) -> None:
    """For every clean sequence the exact NELBO exceeds the NLL of the model, and the estimate agrees with it."""
    process, oracle = ELBO[name].process, ELBO[name].oracle()
    model, x = network(kind, oracle), oracle.noisy
    reference, end = oracle.noise.transition_matrix(1 - 1e-15)[: process.vocab].mean(0), 1 - T_MIN
    if name in SURVIVING:  # sampling starts from the prediction for a fully masked sequence
        reference, end = predicted_end(model, oracle, T_MIN), 1 - 1e-9
    start = oracle.terminal(lambda x, t: oracle.bridge(model.posterior(x, clipped(t, T_MIN)), x, t), reference, end, T_MIN)
    last = known(model.posterior(x, T_MIN), oracle, T_MIN)
    nll = -np.log(start @ np.stack([last[:, i, oracle.clean[:, i]] for i in range(oracle.length)]).prod(0))
    found = m2s.elbo(
        model,
        m2s.Posterior(process),
        torch.from_numpy(oracle.clean),
        passes=30,
        t_min=T_MIN,
        generator=torch.Generator().manual_seed(0),
    )
    bound, noise = (
        oracle.distribution @ found.nats.numpy(),
        float(np.sqrt((oracle.distribution**2) @ found.standard_error.numpy() ** 2)),
    )
    exact = sum(exact_terms(name, model, oracle, T_MIN))
    assert (nll < exact).all()
    assert abs(bound - oracle.distribution @ exact) < 5 * noise < 0.3 * bound


def test_elbo_of_masking_processes_integrates_to_one() -> None:
    """SPEC 3: absorbing and hybrid have no prior term and integrate to t = 1; the others stop at 1 - t_min."""
    x_0 = torch.zeros(1, dtype=torch.long)
    for name, case in ELBO.items():
        assert case.process.last_time(T_MIN) == (1.0 if name in PURE_MASK else 1 - T_MIN)
        end = torch.tensor([case.process.last_time(T_MIN)], dtype=torch.float64)
        prior = float(case.process.prior_kl(x_0, end))
        assert case.process.has_clean_tokens_at_end == (name in SURVIVING)
        assert math.isinf(prior) if name in SURVIVING else prior == 0 if name in PURE_MASK else 0 < prior < math.inf
    for process in (m2s.Absorbing(5, m2s.Cosine()), m2s.Hybrid(5, p_uniform=0.1)):
        assert math.isinf(float(process.prior_kl(x_0, torch.tensor([0.999]))))


def test_elbo_of_absorbing_gives_the_entropy() -> None:
    """Absorbing with the exact network, over [t_min, 1] and with no prior: the integral is H(X_0) - H(X_0 | X_tmin)."""
    name = "absorbing-linear"
    oracle = ELBO[name].oracle()
    terms = exact_terms(name, Exact(oracle), oracle, T_MIN)
    joint = oracle.distribution[:, None] * oracle.likelihood(oracle.noisy, T_MIN)
    entropy = -(oracle.distribution * np.log(oracle.distribution)).sum()
    marginal = joint.sum(0)
    left = -(joint[joint > 0] * np.log(joint[joint > 0])).sum() + (marginal * np.log(marginal)).sum()
    assert oracle.distribution @ terms[0] == pytest.approx(entropy - left, abs=1e-8)
    x_0 = torch.from_numpy(oracle.clean)
    found = m2s.elbo(
        Exact(oracle), m2s.Posterior(ELBO[name].process), x_0, 20, T_MIN, generator=torch.Generator().manual_seed(3)
    )
    noise = float(np.sqrt((oracle.distribution**2) @ found.standard_error.numpy() ** 2))
    assert oracle.distribution @ found.nats.numpy() == pytest.approx(
        entropy - left + oracle.distribution @ terms[2], abs=5 * noise
    )
    assert noise < 0.05 * entropy


def test_elbo_of_a_geometric_schedule_needs_reconstruction() -> None:
    """SPEC 1, 3: alpha_0 is below 1, so the integral and the prior alone are below the entropy of the data."""
    name = "uniform-geometric"
    oracle = ELBO[name].oracle()
    entropy = -(oracle.distribution * np.log(oracle.distribution)).sum()
    integral, prior, reconstruction = (oracle.distribution @ term for term in exact_terms(name, Exact(oracle), oracle, 1e-3))
    assert integral + prior < entropy - 0.2
    assert entropy <= integral + prior + reconstruction < entropy + 0.2
    found = m2s.elbo(
        Exact(oracle),
        m2s.Posterior(ELBO[name].process),
        torch.from_numpy(oracle.clean),
        passes=10,
        generator=torch.Generator().manual_seed(0),
    )
    assert oracle.distribution @ (found.integral + found.prior).numpy() < entropy
    assert oracle.distribution @ found.reconstruction.numpy() == pytest.approx(reconstruction, rel=0.2)


def test_elbo_of_a_projected_score_where_clean_tokens_remain_at_the_end() -> None:
    """A log-linear schedule asks for t = 1, which has no projection. A realizable score has the NELBO of its posterior."""
    process, x_0 = m2s.Absorbing(5, m2s.LogLinear(eps=0.05)), torch.tensor([[0, 1, 2], [4, 3, 4]])
    posterior = m2s.Posterior(process)

    def logits(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 1, 6).expand(*x_t.shape, 6)

    def log_score(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return posterior.log_score(logits(x_t, t), x_t, t)

    def terms(network, head: m2s.Head) -> m2s.losses.Elbo:
        return m2s.elbo(network, head, x_0, passes=20, generator=torch.Generator().manual_seed(0))

    found, expected = terms(log_score, m2s.Projected(m2s.LogScore(process))), terms(logits, posterior)
    assert (expected.prior > 0.1).all()
    for name in ("integral", "prior", "reconstruction"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-3, atol=1e-5)


def test_prior_decreases_with_the_horizon_of_an_exponential_schedule() -> None:
    """SPEC 1: at horizon 1 and K = 256 the prior KL is 1.40 nats, 2.0 bits a site; it falls as the horizon grows."""
    x_0, end, values = torch.arange(256), torch.tensor(1.0), []
    for horizon in (1.0, 3.0, 10.0):
        alpha = math.exp(-horizon)
        other = (1 - alpha) / 256
        expected = (alpha + other) * math.log((alpha + other) * 256) + 255 * other * math.log(other * 256)
        found = m2s.Uniform(256, m2s.Exponential(horizon)).prior_kl(x_0, end)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)
        values.append(float(found[0]))
    assert values[0] == pytest.approx(1.40, abs=0.005)
    assert values[0] / math.log(2) == pytest.approx(2.0, abs=0.05)
    assert values[2] < 1e-5


@EVERY
@pytest.mark.parametrize("t", [0.1, 0.6])
def test_prior_kl_equals_its_enumeration(name: str, t: float) -> None:
    """KL(q_t(.|x_0) || reference) by enumeration, for every clean token; infinite where the reference is a pure mask."""
    process, noise = ELBO[name].process, ELBO[name].noise
    found = process.prior_kl(torch.arange(process.vocab), torch.tensor(t, dtype=torch.float64)).numpy()
    if name in PURE_MASK:
        assert np.isinf(found).all()
        return
    rows, reference = noise.transition_matrix(t)[: process.vocab], noise.transition_matrix(1 - 1e-15)[: process.vocab].mean(0)
    expected = [sum(p * math.log(p / r) for p, r in zip(row, reference, strict=True) if p > 0) for row in rows]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@EVERY
@pytest.mark.parametrize("t", [0.1, 0.7])
def test_objective_estimates_the_integrand(name: str, t: float) -> None:
    """`m2s.Objective` at a time t is, on average, the exact integrand of each clean sequence, weighted or not."""
    process, oracle = ELBO[name].process, ELBO[name].oracle()
    model, copies = Network(oracle, 12), 4000
    x_0, chosen = clean_batch(oracle, copies)
    objective = m2s.Objective(model, m2s.Posterior(process), t_min=T_MIN, generator=torch.Generator().manual_seed(0))
    time = torch.full((len(x_0),), t, dtype=torch.float64)
    weight = torch.ones(x_0.shape, dtype=torch.float64)
    weight[:, 0], weight[:, 1] = 0.0, 2.0
    losses = oracle.losses(oracle.bridge(model.posterior(oracle.noisy, t), oracle.noisy, t), oracle.noisy, t)
    factor = weight[0].numpy()[None, :, None]
    for found, expected in (
        (objective(x_0, time), oracle.expected(losses, t)[chosen]),
        (objective(x_0, time, weight), oracle.expected(losses * factor, t)[chosen]),
    ):
        each = found.sum(-1).reshape(copies, 6).numpy()
        error = each.std(0, ddof=1) / copies**0.5
        assert (np.abs(each.mean(0) - expected) < 4.5 * error + 1e-12).all()


def test_objective_clips_the_time_of_the_network() -> None:
    """The network sees t inside [t_min, 1 - t_min]; the process sees t itself."""
    seen = []

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return torch.zeros(*x_t.shape, 3, dtype=torch.float64)

    process = m2s.Uniform(3, m2s.Linear())
    x_0, t = torch.zeros(3, 400, dtype=torch.long), torch.tensor([1e-6, 0.5, 1 - 1e-6], dtype=torch.float64)
    loss = m2s.Objective(model, m2s.Posterior(process), t_min=0.1, generator=torch.Generator().manual_seed(0))(x_0, t)
    torch.testing.assert_close(seen[0], torch.tensor([0.1, 0.5, 0.9]))
    rho = (1e-6 / 3) / (1 - 1e-6 + 1e-6 / 3)  # almost every site of the first example keeps its token
    s = 1 + (rho - 1) / 3 + (1 / rho - 1) / 3
    expected = 2 / 3 / (1 - 1e-6) * (s - rho * math.log(s) + rho * math.log(rho) - rho)
    assert float(loss[0].median()) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1e-3, 1 - 1e-3), (0.2, 0.3)])
def test_stratified_times(low: float, high: float) -> None:
    """One time in each of n equal intervals, in random order; the time of each example is uniform over [low, high)."""
    generator, n = torch.Generator().manual_seed(0), 16
    draws = torch.stack([m2s.stratified_times(n, low, high, generator) for _ in range(4000)])
    assert draws.dtype == torch.float64
    scaled = (draws - low) / (high - low)
    assert (scaled.sort(-1).values * n).floor().eq(torch.arange(n)).all()
    assert (draws >= low).all()
    assert (draws < high).all()
    for column in (0, 7, 15):
        for power in (1, 2, 3):
            moment = (scaled[:, column] ** power).mean()
            assert float(moment) == pytest.approx(1 / (power + 1), abs=5 / math.sqrt(4000) / 2)
    variance = scaled.mean(-1).var() * 12 * n**3
    assert float(variance) == pytest.approx(1, rel=0.1)


def test_an_infinite_nelbo_has_an_infinite_standard_error() -> None:
    """It was NaN, which is the documented value for a single pass."""
    passes = torch.tensor([[torch.inf, 1.0], [1.0, 3.0]])
    estimate = m2s.Elbo(*[torch.zeros(2)] * 5, passes=passes, sites=torch.ones(2))
    assert estimate.mean() == (torch.inf, torch.inf)
    process = m2s.Absorbing(2, m2s.Geometric(1e-3, 20.0))

    def certain(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:  # never predicts token 1
        return torch.tensor([1e4, -1e4, 0.0]).expand(*x_t.shape, 3)

    found = m2s.elbo(certain, m2s.Projected(m2s.LogScore(process)), torch.ones(1, 4, dtype=torch.long), passes=3)
    assert found.nats.isinf().all() and found.standard_error.isinf().all()


def test_a_nelbo_prints_its_means_in_one_line() -> None:
    ones = torch.ones(3)
    estimate = m2s.Elbo(6 * ones, ones, 3 * ones, 2 * ones, 1 * ones, passes=torch.ones(4, 3), sites=ones)
    assert repr(estimate) == (
        "Elbo(6.0000 nats per example: integral 3.0000, prior 2.0000, reconstruction 1.0000; 3 examples, passes 4)"
    )
