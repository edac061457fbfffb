"""A sampler that implements `step` alone, and an objective that draws its own times."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import m2s
from m2s.ops.counter_noise import CounterNoise
from m2s.samplers import Bayes, Move, Prediction, Sampler, StepSampler

HEAD = m2s.Posterior(m2s.Uniform(4, m2s.Linear()))


class KeepOrRedraw(Sampler):
    """Keep a token with probability s/t, otherwise draw it from the posterior."""

    def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Tensor:
        x_0 = prediction.draw_token(noise("token")).token
        return torch.where(noise("route") < (move.s / move.t)[:, None], prediction.x_t, x_0)


def perfect(x_t: Tensor, t: Tensor) -> Tensor:
    """The posterior of data that is always token 2."""
    return torch.tensor([0.0, 0.0, 1.0, 0.0]).log().expand(*x_t.shape, 4)


def test_step_is_all_that_a_sampler_needs() -> None:
    assert bool((m2s.sample(perfect, HEAD, (5, 6), steps=4, sampler=KeepOrRedraw()) == 2).all())
    one, two = (
        m2s.sample(lambda x, t: x.unsqueeze(-1) * torch.ones(4), HEAD, (5, 6), steps=4, sampler=KeepOrRedraw(), seed=1)
        for _ in range(2)
    )
    assert torch.equal(one, two)


def test_names() -> None:
    @dataclass(frozen=True)
    class WithOption(Sampler):
        strength: float = 0.5

        def step(self, prediction: Prediction, move: Move, noise: CounterNoise) -> Tensor:
            return prediction.x_t

    class MyBayes(Bayes):
        pass

    class Named(StepSampler):
        name: ClassVar[str] = "another"

    assert KeepOrRedraw.name == "keep_or_redraw" and WithOption.name == "with_option" and WithOption(0.7).strength == 0.7
    assert Bayes.name == MyBayes.name == "bayes" and Named.name == "another"


def test_an_error_names_the_sampler() -> None:
    class Masked(KeepOrRedraw):
        needs = Bayes.needs

    with pytest.raises(TypeError, match="masked"):
        m2s.sample(perfect, m2s.LogScore(m2s.Uniform(4, m2s.Linear())), (1, 2), sampler=Masked())


@pytest.mark.parametrize("process", [m2s.Uniform(4, m2s.Linear()), m2s.Absorbing(4, m2s.Linear())])
def test_the_objective_draws_stratified_times(process: m2s.Process) -> None:
    """One in each of B equal parts of the interval, up to t = 1 where the mask is the reference, as in `m2s.elbo`."""
    seen: list[Tensor] = []

    def watched(head: m2s.Head, output: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        seen.append(t)
        return torch.zeros(x_0.shape)

    objective = m2s.Objective(lambda x, t: torch.zeros(*x.shape, process.states), m2s.Posterior(process), watched, t_min=0.01)
    assert objective(torch.zeros(50, 3, dtype=torch.long)).shape == (50, 3)
    end = 1.0 if process.mask is not None else 0.99
    place = ((seen[0] - 0.01) / (end - 0.01) * 50).floor().long()
    assert sorted(place.tolist()) == list(range(50))


def test_the_mean_of_the_objective_estimates_the_integral() -> None:
    """With the length of the interval: the first term of the NELBO, on the same times and noise."""
    torch.manual_seed(0)
    table = torch.randn(4, 4, dtype=torch.float64)
    x_0 = torch.randint(4, (64, 3))
    model = lambda x_t, t: table[x_t]  # noqa: E731
    integral = m2s.elbo(model, HEAD, x_0, generator=torch.Generator().manual_seed(5)).integral
    loss = m2s.Objective(model, HEAD, generator=torch.Generator().manual_seed(5))(x_0)
    assert torch.allclose(loss.sum(-1).double() * (1 - 2e-3), integral, rtol=1e-12)
