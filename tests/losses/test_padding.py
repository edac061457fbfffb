"""Padding: the loss, its gradient, the NELBO and samples of a padded sequence are those of the sequence alone."""

import pytest
import torch
from torch import Tensor, nn

import m2s
from m2s.data import collate
from m2s.errors import UserError
from m2s.heads.output import without_padding
from m2s.losses import score_entropy
from m2s.losses.elbo import NelboTerms
from m2s.losses.objective import TrainingObjective
from m2s.models import DiT, DiTConfig

K, L = 5, 9
PROCESSES = {
    "uniform": m2s.Uniform(K, m2s.Linear()),
    "absorbing": m2s.Absorbing(K, m2s.LogLinear()),  # clean tokens remain at t = 1, so the prior calls the network
    "hybrid": m2s.Hybrid(K, 0.2),
    "tabulated": m2s.RateMatrix.gaussian(K, m2s.Exponential(3.0)),
}
EVERY_PROCESS = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
LENGTHS = (9, 4, 1, 6)


@pytest.fixture(autouse=True)
def _float64() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network(states: int, padding: bool = True, **options: object) -> DiT:
    torch.manual_seed(2)
    model = DiT(DiTConfig(states=states, width=16, depth=2, heads=2, condition_width=8, padding=padding, **options)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def examples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(K, (length,), generator=generator) for length in LENGTHS]


def padded_inputs(process: m2s.Process, fill: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_0, x_t, t and weight, with any value at padding."""
    batch = collate(examples())
    assert batch.weight is not None
    t = torch.tensor([0.2, 0.5, 0.7, 0.9])
    x_t = process.corrupt(batch.x_0, t, torch.Generator().manual_seed(4))
    hidden = batch.weight == 0
    return batch.x_0.masked_fill(hidden, fill), x_t.masked_fill(hidden, fill), t, batch.weight.double()


@EVERY_PROCESS
def test_loss_and_gradient_are_those_of_the_sequences_alone(process: m2s.Process) -> None:
    """`TrainingObjective`, which `m2s train` and `m2s.fit` call, against one call for each sequence without padding."""
    model, head = network(process.states), m2s.Posterior(process)
    x_0, x_t, t, weight = padded_inputs(process)
    objective = TrainingObjective(model, head, score_entropy, 1e-3)
    value, terms = objective(x_0, x_t, t, weight)
    value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    alone = network(process.states, padding=False)
    total = 0.0
    for row, length in enumerate(LENGTHS):
        part, at = slice(row, row + 1), slice(0, length)
        output = alone(x_t[part, at], t[part].clamp(1e-3, 1 - 1e-3))
        each = score_entropy(head, output, x_0[part, at], x_t[part, at], t[part])
        assert torch.allclose(terms[part, at], each, rtol=1e-10, atol=1e-13)
        total = total + each.sum()
    assert torch.allclose(value, total, rtol=1e-11) and bool((terms[weight == 0] == 0).all())
    total.backward()
    for name, parameter in alone.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.allclose(gradients[name], expected, rtol=1e-8, atol=1e-11), name


@EVERY_PROCESS
def test_nothing_of_the_padding_reaches_the_loss(process: m2s.Process) -> None:
    """Other tokens at padding, clean and noisy, give the same bits."""
    model, head = network(process.states), m2s.Posterior(process)
    objective = TrainingObjective(model, head, score_entropy, 1e-3)
    values = []
    for fill in range(K):
        x_0, x_t, t, weight = padded_inputs(process, fill)
        values.append(objective(x_0, x_t, t, weight)[1])
    assert all(torch.equal(value, values[0]) for value in values)


@EVERY_PROCESS
def test_terms_of_the_nelbo(process: m2s.Process) -> None:
    """All three terms at given noise, against the sequences alone; then `m2s.elbo` with other tokens at padding."""
    model, head = network(process.states).eval(), m2s.Posterior(process)
    x_0, x_t, t, weight = padded_inputs(process)
    together = NelboTerms(without_padding(model, weight), head)
    with torch.no_grad():
        found = [together.integrand(x_0, x_t, t), together.log_likelihood(x_0, x_t, t), together.prior(x_0)]
        for row, length in enumerate(LENGTHS):
            part, at = slice(row, row + 1), slice(0, length)
            alone = NelboTerms(network(process.states, padding=False).eval(), head)
            cut = (x_0[part, at], x_t[part, at], t[part])
            wanted = [alone.integrand(*cut), alone.log_likelihood(*cut), alone.prior(x_0[part, at])]
            for one, other in zip(found, wanted, strict=True):
                assert torch.allclose(one[part, at].double(), other.double(), rtol=1e-9, atol=1e-12)
    nats = []
    for fill in (0, 3):
        generator = torch.Generator().manual_seed(7)
        x_0 = padded_inputs(process, fill)[0]
        # The noise of padding depends on its tokens, that of other positions does not.
        nats.append(m2s.elbo(model, head, x_0, passes=2, generator=generator, weight=weight))
    assert torch.equal(nats[0].nats, nats[1].nats)
    assert nats[0].sites.tolist() == list(LENGTHS)


def test_objective_of_a_loop_of_ones_own() -> None:
    process = PROCESSES["uniform"]
    model = network(process.states)
    x_0, _, t, weight = padded_inputs(process)
    loss = m2s.Objective(model, m2s.Posterior(process), generator=torch.Generator().manual_seed(3))(x_0, t, weight)
    x_t = process.corrupt(x_0, t, torch.Generator().manual_seed(3))
    _, expected = TrainingObjective(model, m2s.Posterior(process), score_entropy, 1e-3)(x_0, x_t, t, weight)
    assert torch.allclose(loss, expected, rtol=1e-12)


def test_a_network_without_padding_reads_all_tokens() -> None:
    """Weights alone do not hide positions from attention: this is what `padding` is for."""
    process = PROCESSES["uniform"]
    model, head = network(process.states, padding=False), m2s.Posterior(process)
    values = []
    for fill in (0, 1):
        x_0, x_t, t, weight = padded_inputs(process, fill)
        values.append(TrainingObjective(model, head, score_entropy, 1e-3)(x_0, x_t, t, weight)[1])
    assert not torch.allclose(*values)


def test_an_example_of_padding_alone_is_finite() -> None:
    model = network(K)
    assert torch.isfinite(model(torch.full((2, 3), K), torch.tensor([0.5, 0.5]))).all()


def test_a_causal_network_needs_no_padding() -> None:
    with pytest.raises(UserError, match="causal network does not see"):
        DiTConfig(states=K, width=16, depth=1, heads=2, causal=True, padding=True)


@EVERY_PROCESS
def test_samples_of_given_lengths(process: m2s.Process) -> None:
    """They are the samples of that length alone: same noise, and padding unseen."""
    model, head = network(process.states).eval(), m2s.Posterior(process)
    lengths = torch.tensor([9, 4, 1, 6])
    found = m2s.sample(model, head, (4, L), steps=3, seed=5, lengths=lengths, micro_batch=4)
    for row, length in enumerate(lengths.tolist()):
        alone = m2s.sample(model, head, (1, length), steps=3, seed=5, start=row, micro_batch=4)
        assert torch.equal(found[row, :length], alone[0]) and bool((found[row, length:] == -1).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": torch.tensor([0, 3])}, "between 1 and 9"),
        ({"lengths": torch.tensor([1, 10])}, "between 1 and 9"),
        ({"lengths": torch.tensor([1])}, "2 integers"),
        ({"lengths": torch.tensor([1.0, 2.0])}, "2 integers"),
        ({"lengths": torch.tensor([1, 2]), "window": 4}, "windows have one length"),
    ],
)
@pytest.mark.usefixtures("without_shape_hook")
def test_invalid_lengths(options: dict, message: str) -> None:
    with pytest.raises((UserError, TypeError), match=message):
        m2s.sample(network(K), m2s.Posterior(PROCESSES["uniform"]), (2, L), steps=2, **options)


def test_lengths_need_a_network_that_knows_padding() -> None:
    with pytest.raises(UserError, match="has no padding_id"):
        m2s.sample(network(K, padding=False), m2s.Posterior(PROCESSES["uniform"]), (1, L), lengths=torch.tensor([3]))
