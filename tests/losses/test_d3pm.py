"""D3PM: the NELBO of a finite chain against enumeration, its continuous-time limit, its times, and the ordinal head.

The enumeration uses numpy in float64 and one-step matrices defined here. It shares no formula with `m2s.losses.d3pm`.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import chisquare, logistic

import m2s
from m2s.cli import main
from m2s.distributed import World
from m2s.evaluation.bpd import dataset_nelbo
from m2s.losses import chain, chain_kl, d3pm
from m2s.losses.noise import sample_times
from m2s.process.chain import cosine_betas, even_betas, linear_betas, snap_times, time_interval
from m2s.training.build import make_objects, open_data
from m2s.training.config import Config, NetworkConfig, ProcessConfig, RunConfig, resolve
from m2s.training.trainer import Trainer
from oracle import Network, Oracle, linear, quadrature, tabulated, uniform_rates

VOCAB, LENGTH, STEPS = 3, 2, 5
KINDS = ("uniform", "absorbing", "gaussian")
EVERY = pytest.mark.parametrize("kind", KINDS)
BETAS = np.array([0.1, 0.3, 0.25, 0.5, 0.9])


def one_step(kind: str, beta: float, vocab: int = VOCAB) -> np.ndarray:
    """The transition matrix of one step, [state, next state], from the formulas of D3PM."""
    if kind == "uniform":
        return (1 - beta) * np.eye(vocab) + beta / vocab
    if kind == "absorbing":
        return (1 - beta) * np.eye(vocab + 1) + beta * np.eye(vocab + 1)[[vocab] * (vocab + 1)]
    weight = lambda n: math.exp(-4 * n**2 / ((vocab - 1) ** 2 * beta))  # noqa: E731
    norm = sum(weight(n) for n in range(1 - vocab, vocab))
    matrix = np.array([[weight(i - j) / norm if i != j else 0.0 for j in range(vocab)] for i in range(vocab)])
    return matrix + np.diag(1 - matrix.sum(1))


class Enumeration:
    """Compute every distribution in the NELBO of a chain by sums over all sequences."""

    def __init__(self, kind: str, betas: np.ndarray, vocab: int = VOCAB, length: int = LENGTH, seed: int = 0) -> None:
        self.steps, self.vocab, self.length = len(betas), vocab, length
        self.one = [one_step(kind, float(beta), vocab) for beta in betas]
        self.states = len(self.one[0])
        self.product = [np.eye(self.states)]
        for matrix in self.one:
            self.product.append(self.product[-1] @ matrix)
        self.process = getattr(m2s.Chain, kind)(vocab, torch.from_numpy(betas), dtype=torch.float64)
        self.clean = np.array(list(itertools.product(range(vocab), repeat=length)))
        self.noisy = np.array(list(itertools.product(range(self.states), repeat=length)))
        distribution = np.exp(1.5 * np.random.default_rng(seed).normal(size=len(self.clean)))
        self.distribution = distribution / distribution.sum()

    def likelihood(self, n: int) -> np.ndarray:
        """q(x_n | x_0) as [x_0, x_n]."""
        return self.product[n][self.clean[:, None, :], self.noisy[None, :, :]].prod(-1)

    def posterior(self, n: int) -> np.ndarray:
        """Pr(X_0^i = z | X_n = x) as [x, site, z]; uniform where x cannot occur."""
        joint = self.distribution[:, None] * self.likelihood(n)
        total = joint.sum(0)
        mu = np.einsum("cx,ciz->xiz", joint, np.eye(self.vocab)[self.clean])
        return np.where(total[:, None, None] > 0, mu / np.where(total > 0, total, 1)[:, None, None], 1 / self.vocab)

    def back(self, n: int, z: int, k: int) -> np.ndarray:
        """q(x_{n-1} | x_n = k, x_0 = z)."""
        joint = self.product[n - 1][z] * self.one[n - 1][:, k]
        return joint / joint.sum() if joint.sum() > 0 else np.zeros(self.states)

    def model(self, n: int, mu: np.ndarray, k: int) -> np.ndarray:
        """p(x_{n-1} | x_n) = sum_z q(x_{n-1} | x_n = k, z) mu_z at one site."""
        return sum(mu[z] * self.back(n, z, k) for z in range(self.vocab))

    def terms(self, n: int, mu: np.ndarray) -> np.ndarray:
        """sum over sites of KL(q(x_{n-1}|x_n, x_0) || p(x_{n-1}|x_n)), or at n = 1 of -log p(x_0|x_1), as [x_0, x_n]."""
        out = np.zeros((len(self.clean), len(self.noisy)))
        for (a, x_0), (b, x) in itertools.product(enumerate(self.clean), enumerate(self.noisy)):
            for i in range(self.length):
                q, p = self.back(n, x_0[i], x[i]), self.model(n, mu[b, i], x[i])
                if n == 1:
                    q = np.eye(self.states)[x_0[i]]
                if self.product[n][x_0[i], x[i]] > 0:
                    out[a, b] += (q[q > 0] * np.log(q[q > 0] / p[q > 0])).sum()
        return out

    def reference(self, predictions: list[np.ndarray]) -> np.ndarray:
        """The distribution of x_T at the start of sampling, [site, state].

        Without a mask it is q(x_T) for uniform x_0. With a mask it is sum_z mu_z P_T(.|z), where mu is the prediction for a
        fully masked sequence.
        """
        if self.states == self.vocab:
            return np.tile(self.product[-1].mean(0), (self.length, 1))
        return predictions[-1][-1] @ self.product[-1][: self.vocab]

    def prior(self, predictions: list[np.ndarray]) -> np.ndarray:
        """KL(q(x_T|x_0) || reference) for every x_0."""
        rows, reference = self.product[-1][self.clean], self.reference(predictions)
        return np.where(rows > 0, rows * np.log(np.where(rows > 0, rows, 1) / np.where(rows > 0, reference, 1)), 0).sum((1, 2))

    def nelbo(self, predictions: list[np.ndarray]) -> np.ndarray:
        """The NELBO of every x_0, with predictions[n - 1] at step n."""
        each = [(self.likelihood(n) * self.terms(n, predictions[n - 1])).sum(1) for n in range(1, self.steps + 1)]
        return self.prior(predictions) + np.sum(each, 0)

    def library(self, n: int, head: m2s.Head, output: np.ndarray, loss=chain, dtype: torch.dtype = torch.float64) -> np.ndarray:
        """The library's loss / T as [x_0, x_n]; 0 for pairs of probability 0."""
        possible = self.likelihood(n) > 0
        a, b = np.nonzero(possible)
        x_0, x_t, logits = (torch.from_numpy(value) for value in (self.clean[a], self.noisy[b], output[b]))
        found = loss(head, logits.to(dtype), x_0, x_t, torch.full((len(a),), n / self.steps, dtype=torch.float64))
        out = np.zeros(possible.shape)
        out[a, b] = found.sum(-1).numpy() / self.steps
        return out

    def logits(self, n: int, mu: np.ndarray, offset: str) -> np.ndarray:
        """The network output for which the head returns the posterior mu [x, site, z] at step n."""
        likelihood = self.product[n][: self.vocab][:, self.noisy].transpose(1, 2, 0) if offset == "exact" else 1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log(mu / likelihood)
        log = np.where(np.isfinite(log), log, -40.0)  # any value: the token has likelihood 0
        return np.concatenate([log, np.zeros((*log.shape[:-1], self.states - self.vocab))], -1)

    def random(self, n: int, seed: int) -> np.ndarray:
        """A random posterior [x, site, z], positive where q(x_n | z) is."""
        mu = np.exp(np.random.default_rng((seed, n)).normal(size=(len(self.noisy), self.length, self.vocab)))
        mu = mu * (self.product[n][: self.vocab][:, self.noisy].transpose(1, 2, 0) > 0)
        return mu / mu.sum(-1, keepdims=True)


@EVERY
@pytest.mark.parametrize("offset", ["none", "exact"])
@pytest.mark.parametrize("prediction", ["exact", "random"])
def test_every_term_equals_its_enumeration(kind: str, offset: str, prediction: str) -> None:
    """The KL of each step, the reconstruction term of step 1, and the loss `d3pm` with its auxiliary term."""
    case = Enumeration(kind, BETAS)
    head = m2s.Posterior(case.process, offset)
    for n in range(1, STEPS + 1):
        mu = case.posterior(n) if prediction == "exact" else case.random(n, 1)
        output, possible = case.logits(n, mu, offset), case.likelihood(n) > 0
        expected = np.where(possible, case.terms(n, mu), 0)
        np.testing.assert_allclose(case.library(n, head, output), expected, atol=1e-12)
        without_reconstruction = case.library(n, head, output, chain_kl)
        np.testing.assert_allclose(without_reconstruction, expected if n > 1 else 0, atol=1e-12)
        # The auxiliary term is 0.001 times the cross entropy of the network's softmax, at known tokens too.
        logits = output[..., : case.vocab]
        if offset == "none":
            reachable = case.product[n][: case.vocab][:, case.noisy].transpose(1, 2, 0) > 0
            logits = np.where(reachable, logits, -np.inf)
        softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        auxiliary = np.array([[sum(-np.log(softmax[b, i, z]) if softmax[b, i, z] > 0 else 0 for i, z in enumerate(x_0))
                               for b in range(len(case.noisy))] for x_0 in case.clean])  # fmt: skip
        np.testing.assert_allclose(
            case.library(n, head, output, d3pm), np.where(possible, expected + 1e-3 * auxiliary, 0), atol=1e-12
        )


@EVERY
def test_auxiliary_term_is_the_cross_entropy_of_the_softmax(kind: str) -> None:
    """With random logits, also for tokens of posterior 0. As in the paper's code, unmasked sites contribute too."""
    case = Enumeration(kind, BETAS)
    head = m2s.Posterior(case.process, "exact")
    for n in range(1, STEPS + 1):
        output = np.random.default_rng(n).normal(size=(len(case.noisy), case.length, case.states))
        weights = np.exp(output[..., : case.vocab])
        entropy = -np.log(weights / weights.sum(-1, keepdims=True))  # [x_n, site, z]
        sites = np.arange(case.length)
        auxiliary = np.array([[entropy[b, sites, x_0].sum() for b in range(len(case.noisy))] for x_0 in case.clean])
        added = case.library(n, head, output, d3pm) - case.library(n, head, output, chain)
        np.testing.assert_allclose(added, np.where(case.likelihood(n) > 0, 1e-3 * auxiliary, 0), atol=1e-12)


@EVERY
def test_float32_logits_give_the_float64_loss(kind: str) -> None:
    """To a few rounding errors. `test_matrix_terms.py` has 256 levels and all steps."""
    case = Enumeration(kind, BETAS)
    for n in range(1, STEPS + 1):
        output = case.logits(n, case.random(n, 2), "exact")
        exact = case.library(n, m2s.Posterior(case.process, "exact"), output)
        rounded = case.library(n, m2s.Posterior(case.process, "exact"), output, dtype=torch.float32)
        np.testing.assert_allclose(rounded, exact, rtol=1e-6, atol=2e-6)


@EVERY
def test_nelbo_is_above_the_exact_nll(kind: str) -> None:
    """For every sequence, with random and with exact predictions, the NELBO exceeds the NLL of the distribution that the
    sampler draws from. With exact predictions its mean exceeds the entropy of the data."""
    case = Enumeration(kind, BETAS)
    for exact in (False, True):
        predictions = [case.posterior(n) if exact else case.random(n, 3) for n in range(1, STEPS + 1)]
        start = case.reference(predictions)
        sampled = np.prod([start[i, case.noisy[:, i]] for i in range(case.length)], 0)
        for n in range(STEPS, 0, -1):
            step = np.array(
                [
                    np.prod([case.model(n, predictions[n - 1][b, i], k)[case.noisy[:, i]] for i, k in enumerate(x)], 0)
                    for b, x in enumerate(case.noisy)
                ]
            )
            sampled = sampled @ step
        place = {tuple(x): i for i, x in enumerate(case.noisy)}
        nll = -np.log(sampled[[place[tuple(x)] for x in case.clean]])
        found = case.nelbo(predictions)
        assert sampled.sum() == pytest.approx(1, abs=1e-12)
        assert (found > nll).all()
        if exact:
            assert case.distribution @ found > -case.distribution @ np.log(case.distribution)


def exact_network(case: Enumeration, predictions: list[np.ndarray], offset: str):
    """A network with the given predictions at every step n, for all times in ((n - 1)/T, n/T]."""
    power = case.states ** np.arange(case.length)[::-1]
    table = np.stack([case.logits(n, predictions[n - 1], offset) for n in range(1, case.steps + 1)])

    def network(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        n = case.process.index(t).clamp(min=1).numpy()
        return torch.from_numpy(table[n - 1, x_t.numpy() @ power])

    return network


@EVERY
def test_elbo_and_bpd_estimate_the_enumerated_nelbo(kind: str) -> None:
    """Each term of m2s.elbo and of `m2s evaluate bpd` is within five standard errors of the enumerated sum."""
    case = Enumeration(kind, BETAS)
    predictions = [case.random(n, 4) for n in range(1, STEPS + 1)]
    head, network = m2s.Posterior(case.process), exact_network(case, predictions, "none")
    each = [(case.likelihood(n) * case.terms(n, predictions[n - 1])).sum(1).mean() for n in range(1, STEPS + 1)]
    expected = {"prior": case.prior(predictions).mean(), "reconstruction": each[0], "integral": sum(each[1:])}
    x_0 = torch.from_numpy(case.clean).repeat(200, 1)
    generator = torch.Generator().manual_seed(0)
    first = m2s.elbo(network, head, x_0, passes=4, generator=generator)  # the loss of the chain by default
    second = dataset_nelbo(network, head, x_0, passes=4, batch_size=600, seed=0)
    assert float(first.prior.mean()) == pytest.approx(expected["prior"], abs=1e-12)
    assert float(second.prior.mean()) == pytest.approx(expected["prior"], abs=1e-12)
    for name in ("integral", "reconstruction"):
        for values in (getattr(first, name), getattr(second, name).mean(0)):
            error = float(values.std()) / math.sqrt(len(values))
            assert abs(float(values.mean()) - expected[name]) < 5 * error + 1e-12, name


def test_times_map_to_steps() -> None:
    """Stratified times hit every step with equal weight: with as many examples as steps, each step once. The integral over t
    of T f(n) is the sum of f(n), also with importance sampling of t."""
    process = m2s.Chain.uniform(2, cosine_betas(40))
    low, high = time_interval(process, 1e-3)
    t, weight = sample_times(torch.arange(40), 40, 0, 0, low, high)
    steps = process.index(snap_times(process, t))
    assert sorted(steps.tolist()) == list(range(1, 41))
    assert float((weight / 40).sum()) == 1.0
    value = torch.arange(41, dtype=torch.float64) ** 2
    t, weight = sample_times(torch.arange(40_000), 40_000, 0, 0, low, high, 0.1)
    total = float((weight * 40 * value[process.index(snap_times(process, t))]).mean())
    assert total == pytest.approx(float(value.sum()), rel=1e-3)
    for steps in (1, 3, 7, 49, 100, 1000, 4000):
        chain_of = m2s.Chain(torch.eye(2).expand(steps, 2, 2))
        n = torch.arange(steps + 1)
        assert (chain_of.index(n.double() / steps) == n).all()
        assert (chain_of.index((n.double() / steps).float()) == n).all()
        assert (chain_of.index(snap_times(chain_of, n[1:].double() / steps - 0.5 / steps)) == n[1:]).all()
        assert float(snap_times(chain_of, torch.zeros((), dtype=torch.float64))) == pytest.approx(1 / steps)
    assert time_interval(m2s.Uniform(3, m2s.Linear()), 1e-3) == (1e-3, 1 - 1e-3)
    assert float(snap_times(m2s.Uniform(3, m2s.Linear()), torch.tensor(0.123))) == pytest.approx(0.123)


def test_trainer_draws_every_step_once() -> None:
    """With as many examples as chain steps, each batch contains every n once, at t = n/T and weight 1."""
    run, network = RunConfig(batch=8, device="cpu"), NetworkConfig("unet")
    config = resolve(Config(run, "d3pm-uniform", network, ProcessConfig(chain_steps=8)))
    source = open_data(config.data)
    trainer = Trainer(config, source, World(0, 1, torch.device("cpu")), *make_objects(config, source))
    for step in range(3):
        batch = trainer.local_batch(step)
        assert sorted((batch.t * 8).tolist()) == list(range(1, 9))
        assert (batch.weight == 1).all()


def test_beta_schedules_are_those_of_the_papers() -> None:
    cosine = np.cos(np.pi / 2 * (np.arange(51) / 50 + 0.008) / 1.008)
    np.testing.assert_allclose(cosine_betas(50), np.minimum(1 - cosine[1:] / cosine[:-1], 0.999), rtol=1e-12)
    np.testing.assert_allclose((1 - even_betas(50)).cumprod(0), 1 - np.arange(1, 51) / 50, atol=1e-12)
    betas = linear_betas(1000)
    assert (float(betas[0]), float(betas[-1])) == (pytest.approx(1e-4), pytest.approx(0.02))
    assert float(linear_betas(100).sum()) == pytest.approx(float(betas.sum()), rel=1e-9)
    for kind, schedule in zip(KINDS, (cosine_betas, even_betas, linear_betas), strict=True):
        process = getattr(m2s.Chain, kind)(17, schedule(100))
        x_0 = torch.arange(17)
        assert float(process.prior_kl(x_0, torch.ones(17)).max()) < 1e-3


def even_chain(steps: int, length: int) -> Enumeration:
    """alpha_n = 1 - n/T: m2s.Uniform with the linear schedule at t = n/T."""
    return Enumeration("uniform", 1 / np.arange(steps, 0, -1.0), length=length)


def test_nelbo_converges_to_continuous_time() -> None:
    """With the exact posterior the continuous-time NELBO is the entropy of the data. A step of length 1/T treats sites as
    independent. Its error is O(1/T^2), so over T steps the gap is c/T (1 + O(1/T)).
    Measured orders: .987, .996, .999, .9997. Each is about three times nearer to 1 than the previous one."""
    noise = tabulated(uniform_rates(VOCAB), linear)
    oracle, process = Oracle(noise, LENGTH), m2s.Uniform(VOCAB, m2s.Linear())
    low = 1e-7
    continuous = 0.0
    for t, weight in quadrature(low, 1 - 1e-9):
        x_0 = torch.arange(VOCAB).expand(*oracle.noisy.shape, VOCAB)
        x_t = torch.from_numpy(oracle.noisy).unsqueeze(-1).expand_as(x_0)
        output = torch.log(torch.from_numpy(oracle.posterior(oracle.noisy, t))).unsqueeze(-2).expand(*x_0.shape, VOCAB)
        losses = m2s.score_entropy(m2s.Posterior(process), output, x_0, x_t, torch.tensor(t, dtype=torch.float64))
        continuous += weight * float(oracle.distribution @ oracle.expected(losses.numpy(), t))
    entropy = float(-oracle.distribution @ np.log(oracle.distribution))
    assert continuous == pytest.approx(entropy, abs=1e-4)

    gaps = []
    for steps in (8, 16, 32, 64, 128):
        case = even_chain(steps, LENGTH)
        np.testing.assert_allclose(case.distribution, oracle.distribution)
        head = m2s.Posterior(case.process)
        predictions = [case.posterior(n) for n in range(1, steps + 1)]
        total = case.distribution @ case.prior(predictions)
        for n, mu in enumerate(predictions, 1):
            found = case.library(n, head, case.logits(n, mu, "none"))
            total += case.distribution @ (case.likelihood(n) * found).sum(1)
        gaps.append(float(total) - entropy)
    orders = np.log2(np.array(gaps[:-1]) / np.array(gaps[1:]))
    assert (np.array(gaps) > 0).all()
    assert (np.abs(orders - 1) < 0.15 / np.array([8, 16, 32, 64])).all()
    assert 2 * gaps[-1] - gaps[-2] == pytest.approx(0, abs=2e-6)  # Richardson: without the 1/T term


def test_integrand_converges_to_score_entropy() -> None:
    """T KL at step n = tT converges to the score entropy at t, for all x_0, x_t and random predictions, with order one
    (measured: 1.010, 1.002, 1.0006)."""
    t, errors = 0.5, []
    network = Network(Oracle(tabulated(uniform_rates(VOCAB), linear), LENGTH), 5)
    for steps in (16, 64, 256, 1024):
        case = even_chain(steps, LENGTH)
        output = network.logits(case.noisy, t)
        found = case.library(steps // 2, m2s.Posterior(case.process), output) * steps
        process = m2s.Uniform(VOCAB, m2s.Linear())
        a, b = np.divmod(np.arange(found.size), found.shape[1])
        limit = m2s.score_entropy(
            m2s.Posterior(process),
            torch.from_numpy(output[b]),
            torch.from_numpy(case.clean[a]),
            torch.from_numpy(case.noisy[b]),
            torch.tensor(t, dtype=torch.float64),
        )
        errors.append(np.abs(found.ravel() - limit.sum(-1).numpy()).max())
    orders = np.log2(np.array(errors[:-1]) / np.array(errors[1:])) / 2
    assert (np.abs(orders - 1) < 0.2 / np.array([16, 64, 256])).all()


@EVERY
def test_sampler_reproduces_the_data_distribution(kind: str) -> None:
    """With one site and the exact posterior, reverse steps compose to the data distribution, also two steps at a time.
    Samples of m2s.sample, which starts from the reference distribution, pass a chi-square test."""
    case = Enumeration(kind, np.append(BETAS, 1.0) if kind != "gaussian" else np.append(BETAS, [0.9] * 30), length=1)
    x = torch.arange(case.states).unsqueeze(-1)
    for stride in (1, 2):
        distribution = case.distribution @ case.product[-1][: case.vocab]
        for n in range(case.steps, 0, -stride):
            mu = np.pad(case.posterior(n), ((0, 0), (0, 0), (0, case.states - case.vocab)))
            s, t = (torch.full((case.states,), max(step, 0) / case.steps, dtype=torch.float64) for step in (n - stride, n))
            distribution = distribution @ m2s.bayes_probabilities(torch.from_numpy(mu), x, s, t, case.process)[:, 0].numpy()
        np.testing.assert_allclose(distribution[: case.vocab], case.distribution, atol=1e-12)
    network = exact_network(case, [case.posterior(n) for n in range(1, case.steps + 1)], "exact")
    drawn = m2s.sample(
        network, m2s.Posterior(case.process, "exact"), (4000, 1), steps=case.steps, grid="linear", micro_batch=4000, seed=0
    )
    counts = np.bincount(drawn.numpy().ravel(), minlength=case.vocab)
    assert chisquare(counts, 4000 * case.distribution).pvalue > 1e-4


# --- the ordinal head


def mean_and_scale(mean: float, r: float, states: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A network output of which the head reads the first two columns."""
    return torch.tensor([[mean, r] + [7.0] * (states - 2)], dtype=dtype)


TOKEN, HALF = torch.zeros(1, dtype=torch.long), torch.tensor([0.5], dtype=torch.float64)


@pytest.mark.parametrize("vocab", [2, 3, 17, 256])
@pytest.mark.parametrize(("mean", "r"), [(0.0, 0.0), (0.3, -1.0), (-1.2, 2.0), (0.9, 5.0), (2.5, 0.5)])
def test_ordinal_probabilities_integrate_the_logistic_density(vocab: int, mean: float, r: float) -> None:
    """Each bin equals the numerical integral of the density; the end bins include the tails. Masses below 1e-17 are skipped."""
    head = m2s.Ordinal(m2s.Uniform(vocab, m2s.Linear()))
    log_probabilities = head.log_probabilities(mean_and_scale(mean, r, vocab), TOKEN, HALF)[0].numpy()
    distribution, scale = np.exp(log_probabilities), math.exp(-2 + 7 * math.tanh(r / 7))
    assert distribution.sum() == pytest.approx(1, abs=1e-12)
    edges = [-np.inf, *((2 * np.arange(1, vocab) - 1) / (vocab - 1) - 1), np.inf]
    for z in range(0, vocab, max(1, vocab // 16)):
        a, b = ((edge - mean) / scale for edge in edges[z : z + 2])
        mass = quad(logistic.pdf, a, b, epsabs=0, epsrel=1e-11)[0]
        if mass > 1e-17:
            assert distribution[z] == pytest.approx(mass, rel=1e-8)


@pytest.mark.parametrize("mean", [-1e4, -3.0, 0.0, 0.25, 1e4, 1e9])
@pytest.mark.parametrize("r", [-1e6, -30.0, 0.0, 30.0, 1e6])
def test_ordinal_at_extremes_in_float32(mean: float, r: float) -> None:
    """Log probabilities are finite and agree with float64. Gradients are finite, and 0 for unused columns."""
    head = m2s.Ordinal(m2s.Uniform(256, m2s.Linear()))
    output = mean_and_scale(mean, r, 256, torch.float32).requires_grad_()
    log_probabilities = head.log_probabilities(output, TOKEN, HALF)
    assert log_probabilities.isfinite().all()
    assert float(log_probabilities.detach().exp().sum()) == pytest.approx(1, abs=1e-4)
    exact = head.log_probabilities(output.detach().double(), TOKEN, HALF)
    torch.testing.assert_close(log_probabilities.double(), exact, rtol=2e-5, atol=2e-4)
    for z in (0, 1, 128, 255):
        (gradient,) = torch.autograd.grad(log_probabilities[0, z], output, retain_graph=True)
        assert gradient.isfinite().all()
        assert (gradient[0, 2:] == 0).all()


def test_ordinal_tails_are_accurate_in_float32() -> None:
    """Far from the mean F(b) - F(a) is about e^b - e^a. Subtracting the CDFs in float32 would give 0."""
    head = m2s.Ordinal(m2s.Uniform(256, m2s.Linear()))
    scale = math.exp(-2 - 7 * math.tanh(3 / 7))
    for sign in (1, -1):
        log_probabilities = head.log_probabilities(mean_and_scale(sign * 1.0, -3.0, 256, torch.float32), TOKEN, HALF)[0]
        for distance in (100, 200):
            z = 255 - distance if sign == 1 else distance
            a = (distance - 0.5) * 2 / 255 / scale
            assert float(log_probabilities[z]) == pytest.approx(-a + math.log(-math.expm1(-2 / 255 / scale)), rel=1e-5)


@pytest.mark.parametrize("offset", ["none", "exact"])
@pytest.mark.parametrize(
    "process",
    [m2s.Uniform(5, m2s.Linear()), m2s.Absorbing(5, m2s.Linear()), m2s.Hybrid(5, 0.2), m2s.Chain.gaussian(5, linear_betas(20))],
    ids=repr,
)
def test_ordinal_equals_posterior_of_its_log_probabilities(process: m2s.Process, offset: str) -> None:
    """Methods and losses of Ordinal equal those of Posterior whose logits are the log probabilities of Ordinal."""
    generator = torch.Generator().manual_seed(0)
    x_0, t = torch.randint(5, (40, 3), generator=generator), torch.linspace(0.05, 0.95, 40, dtype=torch.float64)
    x_t = process.corrupt(x_0, t, generator)
    output = torch.randn(40, 3, process.states + 2, generator=generator, dtype=torch.float64)  # wider than the states
    head, plain = m2s.Ordinal(process, offset), m2s.Posterior(process, offset)
    logits = head.log_probabilities(output, x_t, t)
    for name in ("posterior", "last_step", "posterior_logits"):
        torch.testing.assert_close(getattr(head, name)(output, x_t, t), getattr(plain, name)(logits, x_t, t))
    if isinstance(process, m2s.Chain):
        torch.testing.assert_close(chain(head, output, x_0, x_t, t), chain(plain, logits, x_0, x_t, t))
        return
    losses = m2s.score_entropy(head, output, x_0, x_t, t)
    logits = logits.where(logits > -torch.inf, 0)
    torch.testing.assert_close(losses, m2s.score_entropy(plain, logits, x_0, x_t, t), rtol=1e-9, atol=1e-10)
    rounded = m2s.score_entropy(head, output.float(), x_0, x_t, t)
    torch.testing.assert_close(rounded.double(), losses, rtol=1e-4, atol=1e-4)
    assert m2s.hub.from_dict(m2s.hub.to_dict(head)).offset == offset
    assert type(m2s.hub.from_dict(m2s.hub.to_dict(head))) is m2s.Ordinal


@EVERY
@pytest.mark.parametrize("head", [m2s.Posterior, m2s.Ordinal])
def test_gradients_are_finite(kind: str, head: type) -> None:
    """In float32, at every step: where most of the transition matrix is 0, and where logits of scale 3000 give the correct
    token a probability that underflows float64."""
    process = getattr(m2s.Chain, kind)(17, {"absorbing": even_betas, "uniform": cosine_betas}.get(kind, linear_betas)(50))
    generator = torch.Generator().manual_seed(0)
    x_0, t = torch.randint(17, (50, 8), generator=generator), torch.arange(1, 51, dtype=torch.float64) / 50
    x_t = process.corrupt(x_0, t, generator)
    for scale in (0.0, 1.0, 3000.0):
        output = (scale * torch.randn(50, 8, process.states, generator=generator)).requires_grad_()
        loss = d3pm(head(process, "exact"), output, x_0, x_t, t)
        (gradient,) = torch.autograd.grad(loss.sum(), output)
        assert loss.isfinite().all()
        assert (loss > -1e-5).all()
        assert gradient.isfinite().all()
        assert scale == 0 or float(gradient.abs().max()) > 0


def test_gradient_agrees_with_finite_differences() -> None:
    for kind in KINDS:
        case = Enumeration(kind, BETAS)
        generator = torch.Generator().manual_seed(0)
        x_0 = torch.from_numpy(case.clean)
        t = torch.arange(len(x_0), dtype=torch.float64) % STEPS / STEPS + 0.1
        x_t = case.process.corrupt(x_0, t, generator)
        output = torch.randn(*x_0.shape, case.states, dtype=torch.float64, generator=generator).requires_grad_()
        for head in (m2s.Posterior(case.process), m2s.Ordinal(case.process)):
            assert torch.autograd.gradcheck(lambda z, h=head, a=x_0, b=x_t, s=t: d3pm(h, z, a, b, s), output)


# --- errors, and runs of the command line


def test_invalid_heads_times_and_schedules_raise() -> None:
    process = m2s.Chain.uniform(3, even_betas(4))
    x, t, output = torch.zeros(1, 2, dtype=torch.long), torch.tensor([0.5]), torch.zeros(1, 2, 3)
    for head in (m2s.LogScore(process), m2s.Posterior(m2s.Uniform(3, m2s.Linear()))):
        with pytest.raises(TypeError, match=r"a posterior over m2s\.Chain"):
            chain(head, output, x, x, t)
    with pytest.raises(ValueError, match=r"t\[0\] is 0"):
        chain(m2s.Posterior(process), output, x, x, torch.tensor([0.0]))
    with pytest.raises(ValueError, match=r"the first of 4 steps ends at 0\.25"):
        process.last_time(0.4)
    with pytest.raises(ValueError, match="must be at least 20"):
        linear_betas(10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "d3pm-uniform", "--process.chain-steps", "2000"), "the first of 2000 steps"),
        (("--method", "d3pm-gaussian", "--process.chain-steps", "10"), "--process.chain-steps is 10, but"),
        (("--method", "m2s", "--process.kind", "chain-uniform"), "a finite chain has no rates"),
        (("--method", "d3pm-uniform", "--head.kind", "log-score"), "a posterior over m2s.Chain"),
    ],
)
def test_train_rejects_invalid_options(options, words, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "digits", "--device", "cpu", "--out", str(tmp_path / "run"), *options])
    assert stopped.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "head"), [("d3pm-uniform", "posterior"), ("d3pm-absorbing", "posterior"), ("d3pm-gaussian", "ordinal")]
)
def test_train_sample_and_evaluate(method: str, head: str, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    small = (
        "--batch",
        "8",
        "--network.width",
        "16",
        "--validation-samples",
        "8",
        "--process.chain-steps",
        "25",
        "--head.kind",
        head,
    )
    main(["train", "digits", "--method", method, "--steps", "3", "--device", "cpu", "--out", str(out), *small])
    checkpoint = m2s.load(str(out))
    process = checkpoint.head.process
    assert isinstance(process, m2s.Chain)
    kind, betas = {
        "d3pm-uniform": (m2s.Chain.uniform, cosine_betas),
        "d3pm-absorbing": (m2s.Chain.absorbing, even_betas),
        "d3pm-gaussian": (m2s.Chain.gaussian, linear_betas),
    }[method]
    assert torch.equal(process.matrices, kind(17, betas(25)).matrices)
    assert type(checkpoint.head) is {"ordinal": m2s.Ordinal, "posterior": m2s.Posterior}[head]
    assert checkpoint.head.offset == "exact"
    main(
        [
            "sample",
            str(out),
            "--n",
            "2",
            "--steps",
            "25",
            "--grid",
            "linear",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "a.png"),
        ]
    )
    assert (tmp_path / "a.png").exists()
    main(["evaluate", "bpd", str(out), "--limit", "8", "--passes", "2", "--device", "cpu", "--out", str(tmp_path / "b.json")])
    assert "NELBO" in capsys.readouterr().out


def test_m2s_trains_with_an_ordinal_head(tmp_path) -> None:
    small = ("--batch", "8", "--network.width", "16", "--validation-samples", "8", "--steps", "3", "--device", "cpu")
    main(["train", "digits", "--method", "m2s-offset", "--head.kind", "ordinal", "--out", str(tmp_path / "run"), *small])
    assert type(m2s.load(str(tmp_path / "run")).head) is m2s.Ordinal


def test_tables_keep_their_address_when_used_on_another_device() -> None:
    """A captured CUDA graph reads the tables by address, so validation on the host must not move them."""
    process = m2s.Chain.uniform(5, torch.full((4,), 0.1))
    t, other = torch.tensor([0.5]), torch.tensor([0.5], device="meta")
    addresses = [table.data_ptr() for table in process.tables(t.device)]
    before = process.transition_matrix(t)
    for call in (process.transition_matrix, lambda t: process.rows(torch.zeros(1, dtype=torch.long, device=t.device), t)):
        assert call(other).device.type == "meta"
    assert [table.data_ptr() for table in process.tables(t.device)] == addresses and torch.equal(
        process.transition_matrix(t), before
    )
