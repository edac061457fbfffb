"""tauLDR: the NELBO of its paper by enumeration; its loss against score entropy; its rates and its corrector."""

import numpy as np
import pytest
import torch

import m2s
from m2s.cli import main
from m2s.losses import ct_elbo
from m2s.methods import METHODS
from m2s.process import rate_matrix
from m2s.samplers import PredictorCorrector, Sampler, TauLeaping
from m2s.training.build import make_process
from m2s.training.config import ProcessConfig
from oracle import CASES, Case, Network, Oracle, absorbing_rates, log_linear, quadrature, tabulated

MASKS = Case(m2s.Absorbing(3, m2s.LogLinear(1e-2)), tabulated(absorbing_rates(3), log_linear(1e-2), 3), 3)
BOTH = {"gaussian": CASES["gaussian"], "masks": MASKS}
T_MIN = 0.02


def jumps(oracle: Oracle, posterior: np.ndarray, t: float) -> np.ndarray:
    """The integrand of Campbell et al., Proposition 2, for every clean sequence: the reverse rates out of x, minus the sum over
    forward jumps from x of the logarithm of the reverse rate back. The constant is that of the reverse process given x_0."""
    x, each, place = oracle.noisy, oracle.noise.rates(t), oracle.neighbors(oracle.noisy)
    back = oracle.reverse_rates(oracle.bridge(posterior, x, t), x, t)  # x -> x^{i->y}
    forward = each[x]  # x^i -> y
    np.put_along_axis(forward, x[..., None], 0.0, -1)
    site = np.arange(oracle.length)[:, None]
    returns = back[place, site, x[..., None]]  # x^{i->y} -> x
    likelihood = oracle.likelihood(x, t)
    value = np.zeros(len(oracle.clean))
    for number, distribution in enumerate(likelihood):
        reached = (distribution > 0)[:, None, None] & (forward > 0)
        weight = np.where(reached, distribution[:, None, None] * forward, 0.0)
        # The reverse rate given x_0: Q(x -> x~) q(x|x_0) / q(x~|x_0)
        known = forward * distribution[:, None, None] / np.where(distribution[place] > 0, distribution[place], 1.0)
        surprise = np.log(np.where(reached, known, 1.0)) - np.log(np.where(reached, returns, 1.0))
        value[number] = distribution @ back.sum((1, 2)) + (weight * (surprise - 1)).sum()
    return value


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("kind", ["exact", "random"])
def test_published_nelbo_is_above_the_exact_nll(name: str, kind: str) -> None:
    """Without losses of the library: integral of `jumps`, prior and reconstruction, against the terminal distribution of the
    model's reverse process, from its master equation."""
    oracle = BOTH[name].oracle()
    vocab, x = oracle.noise.vocab, oracle.noisy
    posterior = oracle.posterior if kind == "exact" else Network(oracle, 5).posterior

    def prediction(x: np.ndarray, t: float) -> np.ndarray:
        """Restricted to the tokens from which x can be reached."""
        joint = np.where(oracle.noise.transition_matrix(t)[:, x].transpose(1, 2, 0) > 0, posterior(x, t), 0.0)
        return joint / joint.sum(-1, keepdims=True)

    integral = sum(weight * jumps(oracle, prediction(x, t), t) for t, weight in quadrature(T_MIN, 1 - T_MIN))
    reference, start = oracle.noise.transition_matrix(1.0)[:vocab].mean(0), oracle.noise.transition_matrix(1 - T_MIN)[:vocab]
    safe = np.where(start > 0, start, 1.0)
    prior = (start * np.log(safe / np.where(reference > 0, reference, 1.0))).sum(-1)[oracle.clean].sum(-1)
    last = prediction(x, T_MIN)
    chosen = np.stack([last[:, i, oracle.clean[:, i]] for i in range(oracle.length)]).prod(0)  # [x, x_0]
    likelihood = oracle.likelihood(x, T_MIN)
    reconstruction = -(likelihood * np.log(np.where(likelihood > 0, chosen.T, 1.0))).sum(1)
    end = oracle.terminal(lambda x, t: oracle.bridge(prediction(x, t), x, t), reference, 1 - T_MIN, T_MIN)
    nll = -np.log(end @ chosen)
    bound = integral + prior + reconstruction
    assert (bound > nll - 1e-7).all()
    if kind == "exact":  # the gap: sites are independent in the last step, and x_1 differs from the reference
        entropy = -(oracle.distribution * np.log(oracle.distribution)).sum()
        assert entropy - 1e-7 < oracle.distribution @ bound < 1.1 * entropy


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("t", [0.03, 0.5, 0.97])
def test_expected_loss_equals_the_published_integrand(name: str, t: float) -> None:
    process, oracle = BOTH[name].process, BOTH[name].oracle()
    network, x = Network(oracle, 7), oracle.noisy
    clean, noisy = np.repeat(oracle.clean, len(x), 0), np.tile(x, (len(oracle.clean), 1))
    likelihood = oracle.likelihood(x, t).ravel()
    reached = likelihood > 0
    time = torch.full((int(reached.sum()),), t, dtype=torch.float64)
    x_0, x_t = (torch.from_numpy(value[reached]) for value in (clean, noisy))
    loss = np.zeros(len(likelihood))
    loss[reached] = ct_elbo(m2s.Posterior(process), network(x_t, time), x_0, x_t, time).sum(-1).numpy()
    found = (likelihood * loss).reshape(len(oracle.clean), -1).sum(1)
    kernel = oracle.noise.transition_matrix(t)[:, x].transpose(1, 2, 0)
    prediction = np.where(kernel > 0, network.posterior(x, t), 0.0)
    np.testing.assert_allclose(found, jumps(oracle, prediction / prediction.sum(-1, keepdims=True), t), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "process",
    [
        m2s.RateMatrix.gaussian(7, m2s.Linear()),
        m2s.RateMatrix.gaussian(40, m2s.Geometric(1e-3, 7.0), 1.5, 30.0),
        m2s.Absorbing(7, m2s.Linear()),
        m2s.Absorbing(7, m2s.LogLinear()),
        m2s.RateMatrix.absorbing(7, m2s.Cosine()),
        m2s.Uniform(7, m2s.Linear()),
        m2s.Hybrid(7, 0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("offset", ["none", "exact"])
def test_loss_equals_score_entropy(process: m2s.Process, offset: str) -> None:
    """Value, including the constant, and gradient in float64; value in float32."""
    rng = torch.Generator().manual_seed(0)
    x_0 = torch.randint(process.vocab, (9, 5), generator=rng)
    t = torch.linspace(0.004, 0.996, 9, dtype=torch.float64)
    x_t = process.corrupt(x_0, t, rng)
    output = 2 * torch.randn(9, 5, process.states + 3, generator=rng, dtype=torch.float64)  # wider than the states
    output.requires_grad_()
    head = m2s.Posterior(process, offset)
    found, wanted = (loss(head, output, x_0, x_t, t) for loss in (ct_elbo, m2s.score_entropy))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    slopes = [torch.autograd.grad(value.sum(), output)[0] for value in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-10)
    rounded = ct_elbo(head, output.float(), x_0, x_t, t)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "head", [m2s.LogScore(MASKS.process), m2s.Posterior(m2s.Chain.uniform(4, torch.full((3,), 0.2)))], ids=["score", "chain"]
)
def test_unsupported_heads_raise(head: m2s.Head) -> None:
    x = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(TypeError, match=r"is for m2s\.Posterior over a process with rates"):
        ct_elbo(head, torch.zeros(1, 1, head.process.states), x, x, torch.tensor([0.5]))


@pytest.mark.parametrize("vocab", [3, 17, 256])
def test_slowest_mode_of_gaussian_rates_decays_as_uniform_noise(vocab: int) -> None:
    """For any number of levels, the distance between two starting states decays as exp(-sigma) at late times."""
    process = make_process(ProcessConfig(kind="gaussian", schedule="linear"), vocab)
    assert isinstance(process, m2s.RateMatrix)
    late = torch.tensor([0.999, 0.9999], dtype=torch.float64)
    rows = process.transition_matrix(late)
    distance = (rows[:, 0] - rows[:, -1]).abs().sum(-1)
    assert float(distance[1] / distance[0]) == pytest.approx(0.1, rel=1e-3)
    level = torch.arange(vocab, dtype=torch.float64)
    distribution = torch.softmax(-((level - (vocab - 1) / 2) ** 2) / (2 * (2 * vocab) ** 2), -1)
    torch.testing.assert_close(process.reference(), distribution)


def test_gaussian_rates_take_widths_in_levels() -> None:
    process = make_process(ProcessConfig(kind="gaussian", schedule="linear", jump_width=2.0, stationary_width=5.0), 9)
    rates = process.rates(torch.zeros((), dtype=torch.float64))
    plain = m2s.RateMatrix.gaussian(9, m2s.Linear(), 2.0, 5.0).generator
    torch.testing.assert_close(rates * (plain[0, 1] / rates[0, 1]), plain)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--process.jump-width", "0"], "must be positive"),
        (["--process.stationary-width", "-1"], "must be positive"),
        (["--head.kind", "log-score"], "is for m2s.Posterior"),
    ],
)
def test_train_rejects_invalid_options(tmp_path, options, word, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(["train", "digits", "--method", "tauldr", "--steps", "1", "--out", str(tmp_path / "run"), *options])
    assert error.value.code == 2 and word in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_too_many_levels_raise() -> None:
    with pytest.raises(ValueError, match=r"at most 512 levels, and the data has 50257"):
        make_process(ProcessConfig(kind="gaussian", schedule="linear"), 50_257)


def test_correctors_and_more_steps_approach_the_data_distribution() -> None:
    """With the exact posterior, a corrector lowers the distance of samples from the data, and twice the steps halve it."""
    case, count = CASES["gaussian"], 8000
    oracle, head = Oracle(case.noise, 2), m2s.Posterior(case.process)

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        (time,) = t.double().unique().tolist()
        return torch.log(torch.from_numpy(oracle.posterior(x_t.numpy(), time)))

    def distance(sampler: Sampler, steps: int) -> float:
        found = m2s.sample(model, head, (count, 2), steps=steps, sampler=sampler, grid="linear", micro_batch=count, seed=0)
        seen = np.bincount(oracle.index(found.numpy()), minlength=len(oracle.distribution))
        return float(np.abs(seen / count - oracle.distribution).sum() / 2)

    corrected = PredictorCorrector(predictor=TauLeaping())
    plain, few, many = distance(TauLeaping(), 32), distance(corrected, 32), distance(corrected, 64)
    noise = float(np.sqrt(oracle.distribution * (1 - oracle.distribution) / count).sum() / 2)
    assert few < plain - noise
    assert many < 0.5 * few + noise


@pytest.mark.parametrize("method", ["tauldr", "tauldr-absorb", "m2s-gaussian"])
def test_train_sample_and_evaluate(tmp_path, method, capsys) -> None:
    run, quick = tmp_path / "run", ["--device", "cpu"]
    small = ["--batch", "8", "--network.width", "8", "--validation-samples", "4", *quick]
    main(["train", "digits", "--method", method, "--steps", "2", "--out", str(run), *small])
    head = m2s.load(run).head
    assert head.has_posterior and head.offset == METHODS[method].head.offset
    if method != "tauldr-absorb":
        t = torch.tensor([0.3], dtype=torch.float64)
        made = make_process(ProcessConfig(kind="gaussian", schedule=METHODS[method].process.schedule), 17)
        torch.testing.assert_close(head.process.transition_matrix(t), made.transition_matrix(t))
    for sampler in (METHODS[method].sampler, "predictor_corrector"):
        out = tmp_path / f"{sampler}.npz"
        main(["sample", str(run), "--n", "2", "--steps", "3", "--sampler", sampler, "--out", str(out), *quick])
        tokens = np.load(out)["tokens"]
        assert tokens.shape == (2, 64) and 0 <= tokens.min() <= tokens.max() < 17
    capsys.readouterr()
    main(["evaluate", "bpd", str(run), "--limit", "4", "--passes", "1", *quick])
    assert "NELBO" in capsys.readouterr().out


def test_transition_matrices_are_cached_by_time(monkeypatch) -> None:
    """Repeated times compute one matrix exponential. Writing into the result does not change the cache."""
    process, asked = m2s.RateMatrix.gaussian(6, m2s.Linear(), 2.0, 5.0), []
    exact = rate_matrix.expm
    monkeypatch.setattr(rate_matrix, "expm", lambda rates, sigma: asked.append(sigma) or exact(rates, sigma))
    times = [torch.tensor(values, dtype=torch.float64) for values in ([0.1, 0.7], [0.7, 0.1], [[0.1, 0.7]], [0.3, 0.4])]
    wanted = [exact(process.generator, process.schedule.sigma(t)) for t in times]
    for _ in range(2):
        for t, kernel in zip(times, wanted, strict=True):
            for _ in range(3):
                assert torch.equal(process.transition_matrix(t).fill_(0.0), torch.zeros_like(kernel))
                assert torch.equal(process.transition_matrix(t), kernel)
    assert len(asked) == 2 * len(times)
    assert process.transition_matrix(times[0].float()).dtype == torch.float32
