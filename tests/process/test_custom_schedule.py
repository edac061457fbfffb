"""A schedule that implements `alpha` alone: everything else follows from it, with a warning about precision."""

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import m2s
from m2s.errors import UserError
from m2s.models import DiT, DiTConfig
from m2s.process import schedule as module

TIMES = torch.linspace(1e-3, 1 - 1e-3, 101, dtype=torch.float64)


class Like(m2s.Schedule):
    """alpha of a built-in schedule, and nothing else."""

    def __init__(self, schedule: m2s.Schedule) -> None:
        self.schedule = schedule

    def alpha(self, t: Tensor) -> Tensor:
        return self.schedule.alpha(t)


BUILT_IN = {
    "linear": m2s.Linear(),
    "cosine": m2s.Cosine(),
    "exponential": m2s.Exponential(5.0),
    "log-linear": m2s.LogLinear(1e-3),
    "geometric": m2s.Geometric(1e-3, 8.0),
}
EVERY = pytest.mark.parametrize("known", BUILT_IN.values(), ids=BUILT_IN)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    module._warned.add(Like)
    yield
    module._warned.discard(Like)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_derived_functions_are_those_of_the_closed_forms(known: m2s.Schedule, dtype: torch.dtype) -> None:
    derived, t = Like(known), TIMES.to(dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for name in ("alpha", "beta", "sigma", "sigma_prime", "alpha_prime"):
        found, expected = getattr(derived, name)(t), getattr(known, name)(t)
        assert found.dtype == dtype and torch.allclose(found, expected, rtol=tolerance, atol=0), name
    s = t * 0.9
    found, expected = derived.one_minus_alpha_ratio(s, t), known.one_minus_alpha_ratio(s, t)
    assert torch.allclose(found, expected, rtol=tolerance, atol=0)


@EVERY
def test_ends_of_time(known: m2s.Schedule) -> None:
    derived, ends = Like(known), torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert torch.allclose(derived.beta(ends), known.beta(ends), atol=1e-15)
    assert torch.allclose(derived.sigma(ends), known.sigma(ends), atol=1e-12)
    assert torch.allclose(derived.alpha_prime(ends), known.alpha_prime(ends), atol=1e-12)
    assert float(derived.one_minus_alpha_ratio(ends[1:], ends[1:])) == 0


def test_derivatives_without_and_inside_other_transforms() -> None:
    derived = Like(m2s.Cosine())
    expected = m2s.Cosine().sigma_prime(TIMES)
    with torch.no_grad():
        assert torch.allclose(derived.sigma_prime(TIMES), expected)
    assert torch.allclose(torch.func.vmap(derived.sigma_prime)(TIMES), expected)
    t = TIMES.clone().requires_grad_()
    (second,) = torch.autograd.grad(derived.alpha_prime(t).sum(), t)
    assert torch.allclose(second, math.pi**2 / 4 * torch.cos(math.pi / 2 * (1 - TIMES)))


@pytest.mark.parametrize("kind", [m2s.Uniform, m2s.Absorbing])
def test_nelbo_and_samples_are_those_of_the_built_in_schedule(kind: type[m2s.Process]) -> None:
    torch.manual_seed(0)
    processes = [kind(6, schedule) for schedule in (m2s.Cosine(), Like(m2s.Cosine()))]
    model = DiT(DiTConfig(states=processes[0].states, width=16, depth=1, heads=2, condition_width=8)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_0 = torch.randint(6, (8, 5))
    nats, tokens = [], []
    torch.set_default_dtype(torch.float64)
    try:
        for process in processes:
            head = m2s.Posterior(process, offset="exact")
            nats.append(m2s.elbo(model, head, x_0, passes=2, generator=torch.Generator().manual_seed(1)).nats)
            tokens.append(m2s.sample(model, head, (16, 5), steps=6, seed=2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(*nats, rtol=1e-9) and torch.equal(*tokens)


def test_one_warning_for_each_class() -> None:
    class Square(m2s.Schedule):
        def alpha(self, t: Tensor) -> Tensor:
            return (1 - t) ** 2

    with pytest.warns(UserWarning, match="Square leaves beta, sigma or a derivative.*near t = 0 and t = 1"):
        assert torch.allclose(Square().sigma_prime(TIMES), 2 / (1 - TIMES))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Square().beta(TIMES)
        for known in BUILT_IN.values():  # complete schedules never warn
            known.alpha_prime(TIMES)


def detached(t: Tensor) -> Tensor:
    """(1 - t)^2 by a loop over floats, in which the derivative is lost."""
    return torch.tensor([(1 - float(time)) ** 2 for time in t.flatten()], dtype=t.dtype).reshape(t.shape)


@pytest.mark.parametrize(
    ("alpha", "error"),
    [
        (detached, r"Mine.alpha cannot be differentiated: it falls by 0.9 .* but the integral of its derivative is .?0\. "),
        (lambda t: 1 - (4 * t).floor() / 4, "Mine.alpha cannot be differentiated"),
        (lambda t: t, "Mine.alpha must lie in .0, 1. and decrease in t, but .* it goes from 0.05 to 0.95"),
        (lambda t: 1 - 2 * t, "with values between -0.9 and 0.9"),
        (lambda t: torch.ones_like(t), "must lie in .0, 1. and decrease"),
        (lambda t: 0.5, "Mine.alpha must return a tensor of the shape of t"),
        (lambda t: 1 - t.numpy(), "Mine.alpha must return a tensor"),
    ],
)
@pytest.mark.usefixtures("without_shape_hook")
def test_an_alpha_that_gives_wrong_losses_is_an_error(alpha, error) -> None:
    """A derivative of 0 would make every loss 0."""

    class Mine(m2s.Schedule):
        def alpha(self, t: Tensor) -> Tensor:
            return alpha(t)

    head = m2s.Posterior(m2s.Uniform(4, Mine()))
    network = lambda x_t, t: torch.zeros(*x_t.shape, 4)  # noqa: E731
    for _ in range(2):  # it stays an error
        with pytest.raises(UserError, match=error):
            m2s.elbo(network, head, torch.zeros(4, 3, dtype=torch.long))


def test_a_schedule_with_kinks_or_its_own_rate_is_none() -> None:
    class Kinked(m2s.Schedule):
        def alpha(self, t: Tensor) -> Tensor:
            return torch.where(t < 0.5, 1 - 1.5 * t, 0.5 - 0.5 * t)

    class Own(m2s.Schedule):
        def alpha(self, t: Tensor) -> Tensor:
            return detached(t)

        def sigma_prime(self, t: Tensor) -> Tensor:
            return 2 / (1 - t)

    with pytest.warns(UserWarning, match="Kinked leaves"):
        assert float(Kinked().alpha_prime(TIMES[:1])) == -1.5
    with pytest.warns(UserWarning, match="Own leaves"):
        assert torch.allclose(Own().beta(TIMES), 1 - (1 - TIMES) ** 2)


def test_a_schedule_is_printed_with_its_arguments() -> None:
    """An address in memory would differ in every run, and is printed with every head and checkpoint."""

    class Power(m2s.Schedule):
        def __init__(self, exponent: float) -> None:
            self.exponent = exponent

        def alpha(self, t: torch.Tensor) -> torch.Tensor:
            return (1 - t) ** self.exponent

    assert repr(m2s.Posterior(m2s.Uniform(3, Power(2.0)))) == "Posterior(Uniform(3, Power(exponent=2.0)), offset='none')"
    assert repr(m2s.LogLinear(1e-3)) == "LogLinear(eps=0.001)"
