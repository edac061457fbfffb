"""The convergence experiment: its distributions are those of `m2s.sample` and of closed forms, and its file is current."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import closed_forms as forms
import m2s
from closed_forms import log
from m2s.evaluation.likelihood import exact_network
from m2s.samplers import ForwardBackward, Psi, Sampler
from oracle import Noise, Oracle, absorbing_rates, gaussian_rates, linear, tabulated, uniform_rates

ROOT = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("convergence", ROOT / "experiments" / "convergence.py")
convergence = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(convergence)
ROWS = json.loads(convergence.RESULTS.read_text(encoding="utf-8"))["rows"]
SAMPLES, CALLS, T_MIN = 5_000, 6, 1e-3
# With the default options the correctors of these two hardly act in six steps.
STRONGER: dict[str, Sampler] = {
    "psi": Psi(kappa=0.5, low=0.0, high=1.0),
    "forward_backward": ForwardBackward(entry=1.0, corrections=2),
}


def geometric_rate(t: complex) -> complex:
    """sigma of `m2s.GeometricRate(8)`."""
    return 8 * (100.0**t - 1) / 99


NOISES: dict[str, Noise] = {
    "uniform": tabulated(uniform_rates(3), linear),
    "absorbing": tabulated(absorbing_rates(3), linear, 3),
    "gaussian": tabulated(gaussian_rates(3, 2.0, 1.5), geometric_rate),
}


@pytest.mark.parametrize("name", convergence.CASES)
def test_distributions_are_those_of_samples(name: str) -> None:
    """Pearson's test of 5,000 samples of `m2s.sample` with the exact network; cells with few expected samples are merged."""
    process = convergence.PROCESSES[convergence.CASES[name][0]]
    sampler = STRONGER.get(name, convergence.CASES[name][1])
    p, calls = convergence.generated(sampler, process, CALLS, "cosine", T_MIN)
    assert float(p.sum()) == pytest.approx(1, abs=1e-9)
    head = m2s.Posterior(process)
    network = exact_network(head, convergence.LENGTH, convergence.SEED, convergence.SPREAD)
    x = convergence.enumerate_sequences(process.states, convergence.LENGTH)
    power = process.states ** torch.arange(convergence.LENGTH - 1, -1, -1)
    seen = []

    def table(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The network at all sequences, once. Samples of a call have one time; under masks the time does not matter."""
        seen.append(float(t[0]))
        return network(x, t[:1].expand(len(x)))[(x_t * power).sum(-1)]

    shape = (SAMPLES, convergence.LENGTH)
    samples = m2s.sample(table, head, shape, CALLS, sampler, "cosine", seed=3, micro_batch=SAMPLES)
    assert len(seen) == calls
    counts = np.bincount(samples.numpy() @ np.array([9, 3, 1]), minlength=27)
    wanted = SAMPLES * p.numpy()
    rare = wanted < 5
    counts, wanted = (np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (counts, wanted))
    assert chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue > 1e-4


@pytest.mark.parametrize("name", NOISES)
def test_network_is_the_posterior_of_the_oracle(name: str) -> None:
    process, oracle = convergence.PROCESSES[name], Oracle(NOISES[name], convergence.LENGTH)
    oracle.distribution = convergence.data_distribution().numpy()
    network = exact_network(m2s.Posterior(process), convergence.LENGTH, convergence.SEED, convergence.SPREAD)
    for t in (0.05, 0.6):
        x = torch.from_numpy(oracle.noisy)
        time = torch.full((len(x),), t, dtype=torch.float64)
        found = m2s.Posterior(process).posterior(network(x, time), x, time)
        np.testing.assert_allclose(found, oracle.posterior(oracle.noisy, t), atol=1e-12)


FORMS = {
    "bayes": ("uniform", forms.bayes),
    "ancestral": ("absorbing", forms.bayes),
    "euler": ("uniform", forms.euler),
    "tau_leaping, masks": ("absorbing", forms.tau_leap),
}


@pytest.mark.parametrize("name", FORMS)
def test_distributions_are_those_of_closed_forms(name: str) -> None:
    """The products of the closed forms of the sampler tests, with the posteriors of the oracle."""
    noise, closed_form = FORMS[name]
    process, oracle = convergence.PROCESSES[noise], Oracle(NOISES[noise], convergence.LENGTH)
    oracle.distribution = convergence.data_distribution().numpy()

    def step(output: np.ndarray, k: np.ndarray, t: float, s: float, at: float) -> np.ndarray:
        mu = forms.posterior(process, output, k, at)
        if s == 0:
            return mu
        if closed_form is forms.bayes:
            return closed_form(process, mu, k, at, s)
        return closed_form(forms.reverse_rates(process, forms.score_from_posterior(process, mu, k, at), k, at), k, t - s)

    sampler = convergence.CASES[name][1]
    wanted = forms.terminal_distribution(
        process,
        convergence.LENGTH,
        lambda x, t: log(oracle.posterior(x, t)),
        step,
        forms.grid("linear", 5),
        sampler.excludes_t_one,
        T_MIN,
    )
    found, _ = convergence.generated(sampler, process, 5, "linear", T_MIN)
    np.testing.assert_allclose(found, wanted[(oracle.noisy < 3).all(1)], atol=1e-9)


def test_the_file_has_every_row() -> None:
    assert [(row["name"], row["grid"]) for row in ROWS] == [
        (name, grid) for name in convergence.CASES for grid in ("cosine", "linear")
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}-{row['grid']}")
def test_the_file_has_what_the_experiment_measures(row: dict) -> None:
    found = convergence.measure(row["name"], row["grid"], (4,))
    assert (found["sampler"], found["process"]) == (row["sampler"], row["process"])
    assert found["calls"] == row["calls"][:1]
    np.testing.assert_allclose(found["total_variation"], row["total_variation"][:1], rtol=1e-7, atol=1e-12)
    fitted = convergence.order(row["steps"], row["total_variation"])
    assert fitted == (None if row["order"] is None else pytest.approx(row["order"]))


def test_order_of_a_power() -> None:
    steps = list(convergence.STEPS)
    assert convergence.order(steps, [step**-1.5 for step in steps]) == pytest.approx(1.5)
    assert convergence.order(steps, [0.0 for _ in steps]) is None
    assert math.isfinite(convergence.order(steps, [0.3 for _ in steps]))
