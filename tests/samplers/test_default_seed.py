"""Without a seed every call draws other numbers, `torch.manual_seed` repeats them, and the seed that was used is known."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import m2s
from m2s.evaluation import dataset_nelbo
from m2s.rng import draw_seed
from m2s.samplers import SamplingOptions

HEAD = m2s.Posterior(m2s.Uniform(5, m2s.Linear()))
UNCONSTRAINED = m2s.LogScore(m2s.Uniform(5, m2s.Linear()))
ROWS = torch.arange(24).reshape(4, 6) % 5


def network(x_t: Tensor, t: Tensor) -> Tensor:
    return torch.sin(torch.arange(5) * 1.7 + x_t.unsqueeze(-1))


def sampled(**options: Any) -> tuple[list[Any], int]:
    tokens, diagnostics = m2s.sample(network, HEAD, (4, 6), steps=4, diagnostics=True, **options)
    return tokens.tolist(), diagnostics.seed


def audited(**options: Any) -> tuple[list[Any], int]:
    found = m2s.audit(network, UNCONSTRAINED, (4, 6), steps=4, **options)
    return found.overall().before.classes, found.seed


def evaluated(**options: Any) -> tuple[list[Any], int]:
    found = dataset_nelbo(network, HEAD, ROWS, passes=1, **options)
    return found.t.tolist(), found.seed


CALLS: dict[str, Callable[..., tuple[list[Any], int]]] = {"sample": sampled, "audit": audited, "dataset_nelbo": evaluated}
EVERY_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@EVERY_CALL
def test_two_calls_differ_and_the_seed_repeats_each(call: Callable[..., tuple[list[Any], int]]) -> None:
    first, second = call(), call()
    assert first[1] != second[1] and first[0] != second[0]
    for values, seed in (first, second):
        assert call(seed=seed) == (values, seed)


@EVERY_CALL
def test_manual_seed_repeats_the_calls(call: Callable[..., tuple[list[Any], int]]) -> None:
    torch.manual_seed(12)
    before = [call(), call()]
    torch.manual_seed(12)
    assert [call(), call()] == before


@EVERY_CALL
def test_a_given_seed_leaves_the_global_generator_alone(call: Callable[..., tuple[list[Any], int]]) -> None:
    state = torch.get_rng_state()
    call(seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_elbo_draws_from_the_same_generator() -> None:
    torch.manual_seed(5)
    one, two = (m2s.elbo(network, HEAD, ROWS).nats for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(m2s.elbo(network, HEAD, ROWS).nats, one) and not torch.equal(one, two)


def test_a_drawn_seed_is_logged_and_a_given_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="m2s"):
        _, seed = sampled()
        sampled(seed=4)
    assert [record.getMessage() for record in caplog.records] == [f"m2s.sample uses seed={seed}, drawn from torch's generator"]


def test_drawn_seeds_are_exact_in_float64_and_spread() -> None:
    seeds = [draw_seed() for _ in range(1000)]
    assert len(set(seeds)) == 1000 and all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)
    assert min(seeds) < 2**48 < 2**52 < max(seeds)


def test_options_that_are_built_twice_have_two_seeds() -> None:
    one, two = SamplingOptions(HEAD, (1, 2)), SamplingOptions(HEAD, (1, 2))
    assert one.seed != two.seed


def test_a_difference_of_nelbos_needs_one_seed() -> None:
    one, two = (dataset_nelbo(network, HEAD, ROWS, passes=2) for _ in range(2))
    with pytest.raises(ValueError, match=f"the seeds are {one.seed} and {two.seed}"):
        one.minus(two)
    paired = dataset_nelbo(network, HEAD, ROWS, passes=2, seed=one.seed)
    assert torch.equal(one.minus(paired).term("nelbo"), torch.zeros(2, 4, dtype=torch.float64))


class Mode(nn.Module):
    """A network whose output depends on its mode, which it records."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.modes: set[bool] = set()

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        self.modes.add(self.dropout.training)
        return self.dropout(network(x_t, t))


@pytest.mark.parametrize(
    "call",
    [
        lambda model: m2s.elbo(model, HEAD, ROWS),
        lambda model: dataset_nelbo(model, HEAD, ROWS, passes=1),
        lambda model: m2s.audit(model, UNCONSTRAINED, (2, 3), steps=2),
        lambda model: m2s.sample(model, HEAD, (2, 3), steps=2),
    ],
    ids=["elbo", "dataset_nelbo", "audit", "sample"],
)
def test_the_network_is_called_in_evaluation_mode_which_is_restored(call: Callable[[nn.Module], Any]) -> None:
    model = Mode().train()
    call(model)
    assert model.modes == {False} and model.training and model.dropout.training
