"""Exact step distributions of `psi`, `absorbing_uniform`, `entropy_bound` and `informed`."""

import itertools

import numpy as np
import pytest
import torch

import closed_forms as forms
import exact_steps
import m2s
from closed_forms import log
from exact_steps import LARGEST, GivenNoise, Sites, tensor
from m2s.samplers import AbsorbingUniform, EntropyBound, Informed, LogitsProcessor, Move, Prediction, Psi
from m2s.samplers.entropy_bound import accepted_sites
from oracle import CASES, Oracle, hybrid, linear, tabulated, uniform_rates
from step_cases import EXACT, PLACES, SHARP, TABULATED, expected, routes, same, sharpened, sites

pytestmark = pytest.mark.usefixtures("small_blocks")
STEPS = [(1.0, 0.5), (0.999, 0.9), (0.5, 0.5 - 1e-9), (0.7, 0.1), (0.3, 0.3)]


@pytest.mark.parametrize("kappa", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-cosine", "hybrid-0.6", *TABULATED])
def test_psi_step(name: str, kappa: float) -> None:
    """kappa times the Bayes step plus 1 - kappa times mu P_s, by routes (rank-one) or by a K-vector (tabulated)."""
    process = PLACES[name].process
    streamed = name not in TABULATED
    problem = sites(name, m2s.Posterior(process), STEPS if streamed else STEPS[3:], kinds=(0, 1))

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.psi(process, forms.posterior(process, output, k, at), k, at, s, kappa)

    sampler, purposes, hints = Psi(kappa, 0.0, 1.0), ["token"], {}
    if streamed:
        alpha_s = expected(lambda output, k, t, s, at: alpha(process, s) + np.zeros((len(k), process.states)), problem)[:, :1]
        around = [np.full_like(alpha_s, kappa / 2), kappa + (1 - kappa) * alpha_s / 2, kappa + (1 - kappa) * (1 + alpha_s) / 2]
        hints = {
            "route": expected(lambda *site: routes(process, False, *site), problem),
            "order": np.concatenate(around, 1).clip(0, LARGEST),
        }
        purposes = ["order", "route", "token", "jump"]
    found = exact_steps.exact_distribution(problem.outcome(sampler), len(problem.k), process.states, purposes, hints, ways=60)
    same(found, expected(closed_form, problem), problem)


def alpha(process: m2s.Process, t: float) -> float:
    """The probability that a token is untouched, from two rows of the transition matrix."""
    p = forms.transition(process, t)
    return float(p[0, 0] - p[1, 0])


def test_psi_is_bayes_outside_its_interval() -> None:
    """The corrector is used at low <= t <= high, and the numbers drawn by the Bayes step are those of `Bayes`."""
    process, rng = m2s.Uniform(5, m2s.Linear()), np.random.default_rng(0)
    head, output = m2s.Posterior(process), tensor(rng.normal(size=(300, 4, 5)))
    x, noise = tensor(rng.integers(5, size=(300, 4))), m2s.samplers.CounterNoise(0, torch.arange(300), 4, 1)
    for t, changes in ((0.09, False), (0.1, True), (0.5, True), (0.51, False)):
        time = tensor(np.full(300, t))
        prediction, move = Prediction(head, output, x, time), Move(time, time - 0.05)
        mixed, bayes = (s.step(prediction, move, noise) for s in (Psi(kappa=0.5), m2s.samplers.Bayes()))
        assert torch.equal(mixed, bayes) != changes


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["uniform-2", "uniform-linear", "uniform-exponential"])
def test_absorbing_uniform_step(name: str, strength: float) -> None:
    """The step of a site that becomes its noise token once, by enumeration of that token and of its time."""
    process = PLACES[name].process
    problem = sites(name, m2s.Posterior(process), STEPS)

    def closed_form(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        return forms.absorbing_uniform(process, forms.posterior(process, output, k, at), k, at, s, strength)

    wanted = expected(closed_form, problem)
    hints = {"route": np.tile(np.linspace(0.02, 0.98, 25), (len(problem.k), 1))}
    tiny = np.isclose(problem.t - problem.s, 1e-9)  # a route of 1e-9 at the start of the interval
    hints["route"][tiny, 0] = 1e-10
    same(problem.distribution(AbsorbingUniform(strength), ["route", "token", "jump"], hints), wanted, problem, 1e-11)


@pytest.mark.parametrize("sampler", [Psi(0.6, 0.0, 1.0), AbsorbingUniform(0.3)], ids=["psi", "absorbing_uniform"])
def test_guided_steps_combine_the_distributions_of_both_predictions(sampler: m2s.samplers.Sampler) -> None:
    """p_c^g p_u^(1-g) of the two closed forms."""
    process, rng, t, s, strength = m2s.Uniform(4, m2s.Linear()), np.random.default_rng(1), 0.6, 0.35, 2.0
    k, outputs = np.arange(4), rng.normal(size=(2, 4, 4))
    times = (np.full(4, t), np.full(4, s), np.full(4, t))
    processor = LogitsProcessor(guidance=strength, guide="step")
    problem = Sites(m2s.Posterior(process), outputs[0], k, *times, processor, outputs[1])

    def one(output: np.ndarray) -> np.ndarray:
        mu = forms.posterior(process, output, k, t)
        if isinstance(sampler, Psi):
            return forms.psi(process, mu, k, t, s, sampler.kappa)
        return forms.absorbing_uniform(process, mu, k, t, s, sampler.strength)

    weights = one(outputs[0]) ** strength * one(outputs[1]) ** (1 - strength)
    wanted = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(problem.distribution(sampler, ["token"]), wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SHARP)
@pytest.mark.parametrize("sampler", [Psi(0.0, 0.0, 1.0), AbsorbingUniform()], ids=["psi", "absorbing_uniform"])
def test_the_posterior_is_sharpened(sampler: m2s.samplers.Sampler, temperature: float, top_k: int | None, top_p: float) -> None:
    """Temperature, top-k and top-p act on mu, and the rest of the step is unchanged."""
    process, rng, t, s = m2s.Uniform(4, m2s.Linear()), np.random.default_rng(2), 0.7, 0.2
    k, output = np.arange(4), rng.normal(size=(4, 4))
    processor = LogitsProcessor(temperature, top_k, top_p)
    problem = Sites(m2s.Posterior(process), output, k, *(np.full(4, v) for v in (t, s, t)), processor)
    mu = sharpened(forms.posterior(process, output, k, t), temperature, top_k, top_p)
    wanted = forms.psi(process, mu, k, t, s, 0.0) if isinstance(sampler, Psi) else forms.absorbing_uniform(process, mu, k, t, s)
    purposes = ["order", "route", "token", "jump"] if isinstance(sampler, Psi) else ["route", "token", "jump"]
    found = exact_steps.exact_distribution(problem.outcome(sampler), 4, 4, purposes, ways=60)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=EXACT)


# ------------------------------------------------------------------------------------------------------------- entropy bound


def accepted(entropy: np.ndarray, bound: float) -> np.ndarray:
    """The largest m whose entropies, without the greatest, sum to at most the bound, by trying every m."""
    order = np.argsort(entropy, kind="stable")
    count = max(m for m in range(1, len(entropy) + 1) if entropy[order[:m]].sum() - entropy[order[m - 1]] <= bound + 1e-12)
    return np.isin(np.arange(len(entropy)), order[:count])


@pytest.mark.parametrize("bound", [0.0, 0.95, 50.0])
@pytest.mark.parametrize("name", ["uniform-linear", "absorbing-linear", "hybrid-0.2", "gaussian"])
def test_entropy_bound_step(name: str, bound: float) -> None:
    """Accepted sites are drawn from mu, and all others from the reference distribution."""
    case, t = CASES[name], 0.6
    oracle, process = Oracle(case.noise, 3), case.process
    x = oracle.noisy[:: max(1, len(oracle.noisy) // 16)]
    mu = oracle.posterior(x, t)
    entropy = -(mu * log(np.where(mu > 1e-14, mu, 1.0))).sum(-1)
    chosen = np.stack([accepted(row, bound) for row in entropy])
    head, sampler = m2s.Posterior(process), EntropyBound(bound)
    wanted = np.where(chosen[..., None], mu, process.reference().numpy())
    for i in range(3):

        def step(rows: np.ndarray, u: dict, i: int = i) -> np.ndarray:
            given = {"site": np.tile([0.2, 0.5, 0.8], (len(rows), 1))}  # ties: the first site
            for purpose in ("token", "jump"):
                given[purpose] = np.full((len(rows), 3), 0.5)
                given[purpose][:, i] = u[purpose]
            time = tensor(np.full(len(rows), t))
            prediction = Prediction(head, tensor(log(mu[rows])), tensor(x[rows]), time)
            noise = GivenNoise({purpose: tensor(value) for purpose, value in given.items()})
            return sampler.step(prediction, Move(time, time - 0.1), noise).numpy()[:, i]

        found = exact_steps.exact_distribution(step, len(x), process.states, ["token", "jump"])
        np.testing.assert_allclose(found, wanted[:, i], rtol=0, atol=EXACT)
    if bound == 0.95 and name == "uniform-linear":
        assert 1 < chosen.sum(-1).mean() < 3
    if process.mask is not None and process.rank_one is not None and process.rank_one.is_pure_mask:
        assert (chosen | (x == process.mask)).all()  # an unmasked site has entropy 0


def test_entropy_bound_counts_free_sites_only_and_breaks_ties_at_random() -> None:
    entropy = torch.tensor([[0.3, 0.1, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    free = torch.tensor([[True, True, True, False], [True, True, True, True]])
    ties = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 2, dtype=torch.float64)
    assert accepted_sites(entropy, free, 0.0, ties).tolist() == [[False, True, False, False], [True] * 4]
    assert accepted_sites(entropy, free, 0.1, ties).tolist()[0] == [False, True, True, False]
    assert accepted_sites(entropy, free, 0.31, ties).tolist()[0] == [True, True, True, False]
    same_entropy = torch.full((1, 4), 0.5, dtype=torch.float64)
    for site in range(4):
        first = (torch.arange(4) != site).double().unsqueeze(0) * 0.5
        assert accepted_sites(same_entropy, free[1:], 0.1, first).nonzero().tolist() == [[0, site]]


def test_the_entropy_is_that_of_the_sharpened_posterior() -> None:
    """With top_k=1 every entropy is 0, so that every site is accepted."""
    process, x = m2s.Uniform(3, m2s.Linear()), torch.zeros(2, 5, dtype=torch.long)
    output, half = torch.arange(30.0).reshape(2, 5, 3).sin(), torch.full((2,), 0.5, dtype=torch.float64)
    noise = m2s.samplers.CounterNoise(0, torch.arange(2), 5, 1)
    greedy = Prediction(m2s.Posterior(process), output, x, half, LogitsProcessor(top_k=1))
    assert torch.equal(EntropyBound(0.0).step(greedy, Move(half, half), noise), output.argmax(-1))


# --------------------------------------------------------------------------------------------------------- informed corrector


def confidence(p: np.ndarray, x: np.ndarray, selection: str) -> np.ndarray:
    """The confidence of each site from the distribution of its token given all others, [N, L, S]."""
    now = np.take_along_axis(p, x[..., None], -1).squeeze(-1)
    others = np.where(forms.one_hot(x, p.shape[-1]) > 0, -1.0, p).max(-1)
    if selection == "margin":
        return log(now) - log(others)
    return log(now if selection == "current_probability" else p.max(-1))


def choice(conf: np.ndarray, temperature: float) -> np.ndarray:
    """The probability of choosing each site first."""
    return forms.softmax(-conf / temperature)


def corrector(selection: str, temperature: float = 0.7, sites: int = 1) -> Informed:
    return Informed(sites=sites, selection=selection, selection_temperature=temperature)


INFORMED = {"uniform": (m2s.Uniform(3, m2s.Linear()), tabulated(uniform_rates(3), linear))}
INFORMED["hybrid"] = (m2s.Hybrid(3, p_uniform=0.6), hybrid(3, 0.6))
SELECTIONS = ["margin", "current_probability", "greatest_probability"]


@pytest.mark.parametrize("kind", ["posterior", "score"])
@pytest.mark.parametrize("name", INFORMED)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_informed_move(selection: str, name: str, kind: str) -> None:
    """The chosen site is the greatest of -confidence/temperature plus Gumbel noise. It is drawn from its conditional."""
    process, noise = INFORMED[name]
    oracle, t, rng = Oracle(noise, 3), 0.4, np.random.default_rng(0)
    x = oracle.noisy
    score = oracle.score(x, t)
    p = score / score.sum(-1, keepdims=True)
    head = m2s.Posterior(process) if kind == "posterior" else m2s.LogScore(process)
    output = log(oracle.posterior(x, t) if kind == "posterior" else score)
    order, token, time = rng.random(x.shape), rng.random(x.shape), tensor(np.full(len(x), t))
    keys = -confidence(p, x, selection) / 0.7 - np.log(-np.log(order))
    for count in (1, 2):
        given = GivenNoise({"order": tensor(order), "token": tensor(token)})
        prediction = Prediction(head, tensor(output), tensor(x), time)
        new = corrector(selection, sites=count).step(prediction, Move(time, time), given).numpy()
        chosen = np.argsort(np.argsort(-keys, -1), -1) < count
        drawn = (np.cumsum(p, -1) <= token[..., None]).sum(-1)
        np.testing.assert_array_equal(new, np.where(chosen, drawn, x))


def test_informed_choice_has_the_stated_probabilities() -> None:
    """Two sites: the probability of the first, by integrating the uniforms, is that of exp(-confidence/temperature)."""
    process, noise = INFORMED["uniform"]
    oracle, t = Oracle(noise, 2), 0.4
    x = oracle.noisy
    score = oracle.score(x, t)
    conf = confidence(score / score.sum(-1, keepdims=True), x, "margin")
    nodes, weights = np.polynomial.legendre.leggauss(60)
    second = (nodes + 1) / 2
    head, output = m2s.LogScore(process), log(score)

    def first_is_chosen(rows: np.ndarray, u: dict) -> np.ndarray:
        order = np.stack([u["order"], second[rows % 60]], -1)
        time = tensor(np.full(len(rows), t))
        prediction = Prediction(head, tensor(output[rows // 60]), tensor(x[rows // 60]), time)
        ranking = corrector("margin").order(prediction, GivenNoise({"order": tensor(order)})).numpy()
        return (ranking[:, 0] < ranking[:, 1]).astype(int)

    found = exact_steps.exact_distribution(first_is_chosen, 60 * len(x), 2, ["order"])[:, 1].reshape(len(x), 60)
    np.testing.assert_allclose(found @ (weights / 2), choice(conf, 0.7)[:, 0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("selection", [*SELECTIONS, "uniform"])
def test_only_a_uniform_choice_of_the_site_preserves_the_distribution(selection: str) -> None:
    """p_s K against p_s for one site at a time: equal where the site is chosen uniformly, and not where it is informed."""
    _, noise = INFORMED["uniform"]
    oracle, t = Oracle(noise, 2), 0.4
    x, p = oracle.noisy, oracle.marginal(t)
    score = oracle.score(x, t)
    conditional = score / score.sum(-1, keepdims=True)
    chosen = np.full(x.shape, 0.5) if selection == "uniform" else choice(confidence(conditional, x, selection), 0.7)
    matrix = np.zeros((len(x), len(x)))
    np.add.at(matrix, (np.arange(len(x))[:, None, None], oracle.neighbors(x)), chosen[..., None] * conditional)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=EXACT)
    distance = forms.total_variation(p @ matrix, p)
    assert distance < EXACT if selection == "uniform" else distance > 0.005, distance


def test_invalid_options_and_heads_raise() -> None:
    for sampler, name, values in (
        (Psi, "kappa", (-0.1, 1.1, float("nan"))),
        (Psi, "low", (-1.0,)),
        (Psi, "high", (2.0,)),
        (AbsorbingUniform, "strength", (-0.1, 1.5)),
        (EntropyBound, "bound", (-1.0, float("nan"), "much")),
        (Informed, "selection_temperature", (0.0, -1.0)),
        (Informed, "selection", ("entropy",)),
    ):
        for value in values:
            with pytest.raises((ValueError, TypeError), match=name):
                sampler(**{name: value})
    absorbing, mixed = m2s.Posterior(m2s.Absorbing(3, m2s.Linear())), m2s.Posterior(m2s.Hybrid(3, 0.2))
    free = m2s.LogScore(m2s.Uniform(3, m2s.Linear()))
    for sampler, head, message in (
        (AbsorbingUniform(), absorbing, "remasking"),
        (AbsorbingUniform(), mixed, "bayes"),
        (Informed(), absorbing, "predictor_corrector"),
        *itertools.product((Psi(), AbsorbingUniform(), EntropyBound()), (free,), ("draws from a posterior",)),
    ):
        with pytest.raises(TypeError, match=message):
            m2s.sample(lambda x, t: torch.zeros(*x.shape, 4), head, (1, 2), sampler=sampler, seed=0)
