"""Conditions in training and likelihood: the third argument of the network, one condition per example."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import m2s
from m2s.evaluation.bpd import dataset_nelbo

pytestmark = pytest.mark.usefixtures("without_shape_hook")

K, B, L = 5, 12, 4
HEADS = {
    "uniform": m2s.Posterior(m2s.Uniform(K, m2s.Linear()), offset="exact"),
    "absorbing": m2s.Posterior(m2s.Absorbing(K, m2s.Linear())),
    "score": m2s.LogScore(m2s.Uniform(K, m2s.Linear())),
}
EVERY = pytest.mark.parametrize("name", HEADS)


class Labeled(nn.Module):
    """Logits from the noisy token and the label; without a condition, from label K, which no example has."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.tokens, self.label = nn.Embedding(states, states), nn.Embedding(K + 1, states)

    def forward(self, x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        label = torch.full((len(x_t),), K) if condition is None else condition
        return self.tokens(x_t) + self.label(label)[:, None] + t[:, None, None]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def data() -> tuple[Tensor, Tensor]:
    """Examples whose tokens all equal the label."""
    labels = torch.arange(B) % K
    return labels[:, None].expand(B, L).contiguous(), labels


@EVERY
def test_loss_equals_that_of_a_network_with_a_fixed_condition(name: str) -> None:
    head, (x_0, labels) = HEADS[name], data()
    net, t = Labeled(head.process.states), m2s.stratified_times(B, 0.1, 0.9, seeded())
    given = m2s.Objective(net, head, generator=seeded())(x_0, t, condition=labels)
    inside = m2s.Objective(lambda x_t, t: net(x_t, t, labels), head, generator=seeded())(x_0, t)
    assert torch.equal(given, inside)
    assert not torch.allclose(given, m2s.Objective(net, head, generator=seeded())(x_0, t))
    given.sum().backward()
    assert (net.label.weight.grad[:K].abs().sum(-1) > 0).all() and (net.label.weight.grad[K] == 0).all()
    weight = torch.rand(B, L)
    both = m2s.Objective(net, head, generator=seeded())(x_0, t, weight, labels)
    torch.testing.assert_close(both, weight * given)


@EVERY
def test_nelbo_equals_that_of_a_network_with_a_fixed_condition(name: str) -> None:
    head, (x_0, labels) = HEADS[name], data()
    net = Labeled(head.process.states)
    given = m2s.elbo(net, head, x_0, passes=3, generator=seeded(), condition=labels)
    inside = m2s.elbo(lambda x_t, t: net(x_t, t, labels), head, x_0, passes=3, generator=seeded())
    without = m2s.elbo(net, head, x_0, passes=3, generator=seeded())
    for term in ("passes", "integral", "prior", "reconstruction", "standard_error"):
        assert torch.equal(getattr(given, term), getattr(inside, term)), term
    for term in ("integral", "reconstruction"):
        assert not torch.allclose(getattr(given, term), getattr(without, term)), term


def test_nelbo_is_zero_if_the_label_determines_the_example() -> None:
    """With the exact posterior: -log p(x_0 | label) = 0, and without the label the NELBO is log K."""

    def exact(x_t: Tensor, t: Tensor, condition: Tensor | None = None) -> Tensor:
        seen = x_t.clone()
        seen[x_t == K] = -1
        known = seen.max(-1).values if condition is None else condition  # any unmasked token is the label
        logits = torch.zeros(*x_t.shape, K + 1, dtype=torch.float64)
        logits[known >= 0] = torch.where(torch.arange(K + 1) == known[known >= 0, None, None], 40.0, -40.0).double()
        return logits

    x_0, labels = data()
    head, copies = HEADS["absorbing"], 200
    given = m2s.elbo(exact, head, x_0.repeat(copies, 1), generator=seeded(), condition=labels.repeat(copies))
    assert float(given.nats.abs().max()) < 1e-9
    mean, error = m2s.elbo(exact, head, x_0.repeat(copies, 1), generator=seeded()).mean()
    assert mean == pytest.approx(math.log(K), abs=4 * error)
    assert error < 0.2


def loss(net: Any, head: m2s.Head, x_0: Tensor, labels: Tensor) -> None:
    m2s.Objective(net, head)(x_0, m2s.stratified_times(len(x_0), 0.1, 0.9), condition=labels)


CALLS: dict[str, Callable[..., Any]] = {
    "objective": loss,
    "elbo": lambda net, head, x_0, labels: m2s.elbo(net, head, x_0, passes=3, condition=labels),
    "dataset, in one batch": lambda net, head, x_0, labels: dataset_nelbo(net, head, x_0, passes=2, labels=labels, seed=0),
    "dataset, in batches": lambda net, head, x_0, labels: dataset_nelbo(
        net, head, x_0, passes=2, labels=labels, batch_size=7, seed=0
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_example_gets_its_condition(call: str) -> None:
    """Unmasked tokens equal the label of their example. A condition may have further dimensions."""
    seen = []

    def checking_network(x_t: Tensor, t: Tensor, condition: Tensor) -> Tensor:
        assert condition.shape == (len(x_t), 2)
        unmasked = x_t != K
        assert torch.equal(x_t[unmasked], condition[:, :1].expand_as(x_t)[unmasked])
        assert torch.equal(condition[:, 1], -condition[:, 0])
        seen.append(int(unmasked.sum()))
        return torch.zeros(*x_t.shape, K + 1)

    x_0, labels = data()
    CALLS[call](checking_network, HEADS["absorbing"], x_0, torch.stack([labels, -labels], -1))
    assert sum(seen) > B


def test_condition_of_wrong_type_or_length_raises() -> None:
    head, (x_0, labels) = HEADS["uniform"], data()
    net, t = Labeled(K), torch.full((B,), 0.5)
    for call in (lambda c: m2s.Objective(net, head)(x_0, t, condition=c), lambda c: m2s.elbo(net, head, x_0, condition=c)):
        with pytest.raises(ValueError, match=r"condition has 11 rows, but x_0 has 12"):
            call(labels[1:])
        for wrong in (3, [1, 2], torch.tensor(3)):
            with pytest.raises(TypeError, match=r"condition must be a torch\.Tensor with a row for each of x_0"):
                call(wrong)


def test_standard_error_of_one_pass_is_nan() -> None:
    """NaN for each example, as documented. The mean over examples still has a standard error."""
    head, (x_0, _) = HEADS["uniform"], data()
    once, twice = (m2s.elbo(Labeled(K), head, x_0, passes=passes) for passes in (1, 2))
    assert once.standard_error.isnan().all() and twice.standard_error.isfinite().all()
    assert all(math.isfinite(value) for value in once.mean())
    assert m2s.elbo.__doc__ is not None and "is NaN" in m2s.elbo.__doc__
