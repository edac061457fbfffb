"""The distribution of times and noise in training, weights of positions, validation, and the learning rate."""

import dataclasses
import json
import math

import pytest
import torch

import m2s
from m2s.data.source import Batch
from m2s.distributed import World
from m2s.losses.noise import corrupt_by_counter, sample_times
from m2s.training import OptimizerConfig, resolve, train
from m2s.training.build import make_objects
from m2s.training.trainer import Trainer, learning_rate
from m2s.training.validate import validate
from small_runs import InMemorySource, losses, random_rows, small


def test_times_are_stratified_over_the_global_batch():
    t, weight = sample_times(torch.arange(64), 64, 0, 5, 0.1, 0.9)
    assert torch.equal(((t - 0.1) / 0.8 * 64).long().sort().values, torch.arange(64))
    assert torch.allclose(weight, torch.full_like(t, 0.8))


@pytest.mark.parametrize("importance", [None, 0.01, 0.1, 1.0])
def test_weighted_times_have_the_integral_as_their_mean(importance):
    """integral of f over [low, high] for functions that are steep where the density is, and where it is not."""
    low, high = 1e-3, 1 - 1e-3
    for f, exact in (
        (lambda t: 1 / t, math.log(high / low)),
        (lambda t: t**3, (high**4 - low**4) / 4),
        (lambda t: torch.ones_like(t), high - low),
    ):
        means = [
            (w * f(t)).mean()
            for t, w in (sample_times(torch.arange(256), 256, 1, s, low, high, importance) for s in range(200))
        ]
        means = torch.stack(means)
        error = float(means.std() / len(means) ** 0.5)
        assert float(means.mean()) == pytest.approx(exact, abs=5 * error + 1e-9)
        assert (sample_times(torch.arange(256), 256, 1, 0, low, high, importance)[0] < high).all()


def test_importance_does_not_change_the_expected_gradient(tmp_path):
    """Mean gradients over many steps of a fixed network, with and without, agree within their standard errors."""
    source, gradients = random_rows(), {}
    for importance in (None, 0.1):
        config = resolve(small(tmp_path, importance=importance, batch=64, micro_batch=None, method="m2s-offset", steps=1000))
        trainer = Trainer(config, source, World(0, 1, torch.device("cpu")), *make_objects(config, source))
        with torch.no_grad():
            for i, parameter in enumerate(trainer.model.parameters()):
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(i))
        trainer.model.eval()
        found = []
        for step in range(60):
            trainer.progress.step = step
            losses_, _ = trainer.gradient(trainer.local_batch(step))
            found.append(torch.stack([losses_.mean(), *(p.grad.double().sum() for p in trainer.model.parameters())]))
        gradients[importance] = torch.stack(found)
    (one, other) = gradients.values()
    error = ((one.var(0) + other.var(0)) / len(one)).sqrt()
    assert ((one.mean(0) - other.mean(0)).abs() < 4.5 * error + 1e-9).all()


def test_corruption_has_the_distribution_of_the_process():
    rates = torch.rand(4, 4, dtype=torch.float64)
    rates -= torch.diag(rates.sum(-1))
    n = 20_000
    for process in (
        m2s.Uniform(4, m2s.Linear()),
        m2s.Absorbing(4, m2s.Linear()),
        m2s.Hybrid(4, 0.3),
        m2s.RateMatrix(rates, m2s.Linear()),
    ):
        x_0, t = torch.full((n, 2), 1), torch.full((n,), 0.6, dtype=torch.float64)
        x_t = corrupt_by_counter(process, x_0, t, torch.arange(n), 0, 7)
        probabilities = process.rows(x_0[:1, 0], t[:1])[0]
        counts = torch.bincount(x_t.flatten(), minlength=process.states) / (2 * n)
        assert ((counts - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / (2 * n)).sqrt() + 1e-12).all()


def test_padding_is_in_no_loss_and_no_average(tmp_path):
    """Scaling all weights changes nothing that is logged, and padding is not counted."""
    rows = random_rows().rows
    weight = torch.ones(rows.shape)
    weight[:, 3] = 0

    class Reweighted(InMemorySource):
        """The same data with all weights three times as large."""

        def train(self, indices):
            batch = super().train(indices)
            return Batch(batch.x_0, batch.weight * 3.0)

    train(small(tmp_path / "one", steps=3, log_every=1), InMemorySource(rows, 5, weight))
    train(small(tmp_path / "three", steps=3, log_every=1), Reweighted(rows, 5, weight))
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "one" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["tokens"] == 8 * 3


def test_validation_leaves_padding_out_and_averages_over_the_weight(tmp_path, monkeypatch):
    """The loss is the token itself, infinite on padding, and the network is uniform: every term is known exactly."""
    rows, weight = random_rows().rows, torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    weight[rows == 0] = 0
    monkeypatch.setattr("m2s.training.validate.ROWS", 24)

    def found(given: torch.Tensor | None) -> dict[str, float]:
        config, source = resolve(small(tmp_path, method="m2s")), InMemorySource(rows, 5, given)
        trainer = Trainer(config, source, World(0, 1, torch.device("cpu")), *make_objects(config, source))
        trainer.nelbo_loss = lambda head, output, x_0, x_t, t: torch.where(
            x_0 == 0, 0 if given is None else torch.inf, x_0.float()
        )
        return validate(trainer)

    t_min, nats = 1e-3, rows.double()
    prior = m2s.Uniform(5, m2s.Linear()).prior_kl(rows[:1, :1], torch.tensor([1 - t_min], dtype=torch.float64)).item()
    terms = (1 - 2 * t_min) * nats + prior + math.log(5)
    mean = (weight * terms).sum() / weight.sum()
    residual = (weight * (terms - mean)).sum(-1)
    expected = {
        "validation_bits": float(mean) / math.log(2),
        "validation_error": float((residual**2).sum().mul(64 / 63).sqrt() / weight.sum()) / math.log(2),
        "validation_perplexity": math.exp(mean),
        "validation_integral": float((1 - 2 * t_min) * (weight * nats).sum() / weight.sum()) / math.log(2),
        "validation_prior": prior / math.log(2),
        "validation_reconstruction": math.log2(5),
    }
    assert found(weight) == pytest.approx(expected, rel=1e-6)
    assert found(weight * 3) == pytest.approx(expected, rel=1e-6)
    weight = torch.ones(64, 4)
    rows[rows == 0] = 1
    assert found(weight) == found(None)


def test_the_nelbo_is_the_sum_over_positions():
    """With weight one at a single position and zero elsewhere, `m2s.elbo` gives the terms of that position."""
    x_0, head = random_rows(8).rows, m2s.Posterior(m2s.Absorbing(5, m2s.Linear()))

    def model(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.sin(7.0 * torch.arange(6) + x_t.unsqueeze(-1))

    def bound(weight: torch.Tensor | None) -> m2s.Elbo:
        generator = torch.Generator().manual_seed(3)
        return m2s.elbo(model, head, x_0, passes=2, t_min=0.3, generator=generator, weight=weight)

    sites = [bound(torch.nn.functional.one_hot(torch.tensor(i), 4).float().expand(8, 4)) for i in range(4)]
    for name in ("passes", "integral", "prior", "reconstruction"):
        together = torch.stack([getattr(site, name) for site in sites])
        torch.testing.assert_close(together.sum(0), getattr(bound(None), name))
    assert all((site.reconstruction > 0).any() for site in sites)


def test_gradient_accumulation_equals_one_call(tmp_path):
    for name, micro in (("whole", None), ("parts", 2)):
        train(small(tmp_path / name, micro_batch=micro, network__dropout=0.0, log_every=1), random_rows())
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_the_learning_rate_warms_up_and_falls_along_a_cosine():
    config = OptimizerConfig(lr=2.0, warmup=4)
    rates = [learning_rate(config, step, 12) for step in range(12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0
    assert rates[8] == pytest.approx(1.0) and rates[11] == pytest.approx(1 + math.cos(math.pi * 7 / 8))
    assert learning_rate(dataclasses.replace(config, decay="constant"), 11, 12) == 2.0
