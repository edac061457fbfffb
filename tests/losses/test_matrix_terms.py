"""Losses of chains and tabulated processes in float32, against their definitions in float64, for 256 levels.

The definitions here use probabilities and logarithms of float64. They share no formula with `m2s.losses.matrix_terms`.
"""

import functools

import pytest
import torch
from torch import Tensor

import m2s
from m2s.losses import chain, ct_elbo
from m2s.losses.matrix_terms import sum_of_terms
from m2s.process.chain import cosine_betas, even_betas
from m2s.training import train
from small_runs import losses, random_rows, small

LEVELS, SITES = 256, 4


@functools.cache
def process_of(kind: str) -> m2s.Chain:
    """A chain of 256 levels. The first and the last step of the Gaussian are those of D3PM with 1000 steps."""
    betas = {"gaussian": torch.linspace(1e-4, 0.08, 250), "uniform": cosine_betas(60), "absorbing": even_betas(60)}[kind]
    return getattr(m2s.Chain, kind)(LEVELS, betas)


def chain_divergence(process: m2s.Chain, logits: Tensor, x_0: Tensor, x_t: Tensor, n: int) -> Tensor:
    """KL(q(x_{n-1}|x_n, x_0) || p(x_{n-1}|x_n)) at step n, with p = sum_z q(x_{n-1}, x_n|z) nu_z, normalized."""
    before, step = process.products[n - 1].double(), process.matrices[n - 1].double()
    nu = torch.nn.functional.pad(torch.softmax(logits, -1), (0, process.states - LEVELS))
    q, p = before[x_0] * step.t()[x_t], (nu @ before) * step.t()[x_t]
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    counted = q > 0
    return (q * (torch.log(q.where(counted, 1)) - torch.log(p.where(counted, 1)))).sum(-1)


def tabulated_entropy(process: m2s.RateMatrix, logits: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """sum_y Q_t(y -> k) h(s_y, r_y) with s_y = (nu P)_y / (nu P)_k, for one time."""
    transition, rates = process.transition_matrix(t)[0], process.rates(t)[0]
    marginal, k = torch.softmax(logits, -1) @ transition, x_t.unsqueeze(-1)
    s, r = marginal / marginal.gather(-1, k), transition[x_0] / transition[x_0].gather(-1, k)
    terms = rates.t()[x_t] * (s - r - r * torch.log(s / r))
    return terms.scatter(-1, k, 0.0).sum(-1)


def random_logits(x_0: Tensor, states: int, scale: float) -> Tensor:
    """Random logits, of which every second site is nearly right about x_0."""
    logits = scale * torch.randn(*x_0.shape, states)
    right = torch.where(torch.arange(x_0.shape[-1]) % 2 == 0, 3 * scale, 0.0).expand(x_0.shape).unsqueeze(-1)
    return logits.scatter_add(-1, x_0.unsqueeze(-1), right)


def assert_close(found: Tensor, expected: Tensor, absolute: Tensor | float, relative: float, about: object) -> None:
    """The error is below `relative` of the value plus `absolute`."""
    excess = (found.double() - expected).abs() - relative * expected.abs() - absolute
    assert float(excess.detach().max()) <= 0, f"{about}: {float(excess.detach().max()):.1e} beyond the bound"


@pytest.mark.parametrize("scale", [0.0, 2.0, 10.0])
@pytest.mark.parametrize("kind", ["gaussian", "uniform", "absorbing"])
def test_every_step_of_a_chain(kind: str, scale: float) -> None:
    process = process_of(kind)
    head = m2s.Posterior(process, offset="exact")
    n = torch.arange(1, process.steps + 1)
    t = n / process.steps
    x_0 = torch.randint(LEVELS, (process.steps, SITES))
    x_t = process.corrupt(x_0, t)
    output = random_logits(x_0, process.states, scale).requires_grad_()
    found = torch.cat([chain(head, output[i], x_0[i], x_t[i], t[i]) for i in n.split(10) for i in [i - 1]]) / process.steps
    assert found.dtype == torch.float32 and (found >= 0).all()
    logits = output.detach()[..., :LEVELS].double().requires_grad_()
    expected = torch.stack([chain_divergence(process, logits[i - 1], x_0[i - 1], x_t[i - 1], i) for i in n.tolist()])
    assert_close(found, expected, 2e-9, 2e-5, kind)
    gradients = [torch.autograd.grad(value.sum(), x)[0][..., :LEVELS] for value, x in ((found, output), (expected, logits))]
    assert_close(gradients[0], gradients[1], 1e-6, 1e-4, "gradient")


@pytest.mark.parametrize("scale", [0.0, 2.0, 10.0])
def test_every_time_of_gaussian_rates(scale: float) -> None:
    process = m2s.RateMatrix.gaussian(LEVELS, m2s.GeometricRate(3.0))
    process.prepare(torch.device("cpu"))
    head = m2s.Posterior(process, offset="exact")
    for time in (1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.999):
        t = torch.tensor([time], dtype=torch.float64)
        x_0 = torch.randint(LEVELS, (1, 8))
        x_t = process.corrupt(x_0, t)
        output = random_logits(x_0, LEVELS, scale).requires_grad_()
        found = m2s.score_entropy(head, output, x_0, x_t, t)
        assert found.dtype == torch.float32 and (found >= 0).all()
        logits = output.detach().double().requires_grad_()
        expected = tabulated_entropy(process, logits[0], x_0[0], x_t[0], t).unsqueeze(0)
        rate = process.rates_into(x_t, t).sum(-1)
        assert_close(found, expected, 1e-8 * rate, 2e-5, time)
        assert torch.equal(ct_elbo(head, output, x_0, x_t, t), found)
        gradients = [torch.autograd.grad(value.sum(), x)[0] for value, x in ((found, output), (expected, logits))]
        size = (rate + expected.detach()).unsqueeze(-1)
        assert_close(gradients[0], gradients[1], 1e-6 * size, 1e-4, f"gradient at {time}")


def test_sum_of_terms_is_zero_for_a_true_model_and_where_nothing_else_is_possible() -> None:
    others, one = torch.rand(5, 7), torch.ones(5, 1)
    total = others.sum(-1, keepdim=True)
    equal = sum_of_terms(others, total, others / total, one, one, torch.ones(5, 7))
    assert float(equal.max()) < 1e-12
    nothing = sum_of_terms(torch.zeros(5, 7), 0 * one, others / total, one, -50 * one, torch.ones(5, 7))
    assert float(nothing.max()) < 1e-12


@pytest.mark.parametrize("kind", ["chain", "rates"])
def test_autocast_does_not_change_the_loss(kind: str) -> None:
    """Autocast leaves products in float64 alone, but would round those in float32 to bf16."""
    process = process_of("uniform") if kind == "chain" else m2s.RateMatrix.gaussian(LEVELS, m2s.GeometricRate(3.0))
    head, loss = m2s.Posterior(process, offset="exact"), chain if kind == "chain" else m2s.score_entropy
    x_0, t = torch.randint(LEVELS, (2, 3)), torch.tensor([0.25, 0.5])
    x_t, output = process.corrupt(x_0, t), torch.randn(2, 3, LEVELS)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(head, output, x_0, x_t, t)
    assert torch.equal(found, loss(head, output, x_0, x_t, t))


@pytest.mark.parametrize("method", ["d3pm-gaussian", "d3pm-absorbing", "m2s-gaussian"])
def test_training_has_the_loss_curve_of_float64(method: str, tmp_path, monkeypatch) -> None:
    """The losses of 20 steps agree to 1e-5, though each step starts from weights that the steps before have changed."""
    chain_steps = {"process__chain_steps": 20} if method.startswith("d3pm") else {}
    for name in ("float32", "float64"):
        if name == "float64":
            monkeypatch.setattr(m2s.Posterior, "softmax_is_leave_one_out", False)
        options = {"steps": 20, "log_every": 1, "validate_every": 0, "network__dropout": 0.0, **chain_steps}
        train(small(tmp_path / name, method=method, **options), random_rows())
    assert losses(tmp_path / "float32") == pytest.approx(losses(tmp_path / "float64"), rel=1e-5)
