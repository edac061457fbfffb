"""Muon against its definition by singular values, against torch.optim.Muon, and in a run."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from m2s.errors import UserError
from m2s.training import state, train
from m2s.training.config import DataConfig, NetworkConfig, OptimizerConfig
from m2s.training.ema import EMA
from m2s.training.muon import COEFFICIENTS, ITERATIONS, Muon, orthogonalize
from m2s.training.optimizer import Optimizer
from small_runs import die_before, outcome, random_rows, small, tensors, together


class TwoLayers(nn.Module):
    """A network whose first layer has three stacked matrices for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 4)

    def block_matrices(self) -> dict[str, int]:
        return {"first.weight": 3}


def polynomial(s):
    """The singular values after all iterations, from those before."""
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_orthogonalize_maps_singular_values_and_keeps_singular_vectors(shape):
    torch.manual_seed(0)
    matrices = torch.randn(2, *shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    expected = u @ torch.diag_embed(polynomial(s / s.norm(dim=-1, keepdim=True))) @ v
    torch.testing.assert_close(orthogonalize(matrices, torch.float64), expected, rtol=1e-9, atol=1e-9)


def test_singular_values_of_updates_are_near_one():
    torch.manual_seed(0)
    updates = orthogonalize(torch.randn(3, 64, 128), torch.float32)
    values = torch.linalg.svdvals(updates)
    assert values.min() > 0.65
    assert values.max() < 1.2


def test_a_zero_gradient_changes_nothing():
    weight = nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.zeros(4, 6)
    Muon([(weight, 1)], lr=0.1).step()
    assert torch.equal(weight, torch.ones(4, 6))


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)])
def test_steps_are_those_of_torch_muon(shape):
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(4, *shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = (
        Muon([(ours, 1)], lr=0.01, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    change = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * change  # both round products to bfloat16, in another order


def test_stacked_matrices_are_orthogonalized_one_by_one():
    torch.manual_seed(0)
    stacked = nn.Parameter(torch.zeros(12, 8))
    stacked.grad = torch.randn(12, 8)
    single = [nn.Parameter(torch.zeros(4, 8)) for _ in range(3)]
    for weight, gradient in zip(single, stacked.grad.chunk(3), strict=True):
        weight.grad = gradient.clone()
    Muon([(stacked, 3)], lr=0.1, dtype=torch.float32).step()
    Muon([(weight, 1) for weight in single], lr=0.1, dtype=torch.float32).step()
    torch.testing.assert_close(stacked.detach(), torch.cat([weight.detach() for weight in single]))


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_step_of_a_run_clips_steps_and_averages(clip):
    """Against the gradient clipped by torch, a plain step, and the average by its definition."""
    torch.manual_seed(0)
    models = [TwoLayers(), TwoLayers()]
    models[1].load_state_dict(models[0].state_dict())
    (ours, plain), gradients = models, [torch.randn_like(weight) for weight in models[0].parameters()]
    for model in models:
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.grad = gradient.clone()
    average, start = EMA(ours, 0.9), plain.first.weight.detach().clone()
    optimizer, muon = Optimizer(ours, OptimizerConfig(kind="muon", lr=0.1), average), Muon([(plain.first.weight, 3)], lr=0.1)
    norm = torch.nn.utils.get_total_norm(gradients)
    optimizer.start(norm, clip, 0.25, torch.tensor([1.0], dtype=torch.float64))()
    if clip:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
    muon.step()
    assert not torch.equal(ours.first.weight, start)
    torch.testing.assert_close(ours.first.weight, plain.first.weight)
    torch.testing.assert_close(average.values["first.weight"], torch.lerp(start, plain.first.weight.detach(), 0.25))


def test_a_gradient_that_is_not_finite_changes_no_bit():
    torch.manual_seed(0)
    model = TwoLayers()
    optimizer = Optimizer(model, OptimizerConfig(kind="muon", lr=0.1, weight_decay=0.1), average := EMA(model, 0.9))
    for gradient, finite in ((1.0, True), (math.nan, False), (math.inf, False)):
        before = [weight.detach().clone() for weight in (model.first.weight, average.values["first.weight"])]
        before += [optimizer.state("first.weight")["momentum_buffer"].clone()] if not finite else []
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        model.first.weight.grad[0, 0] = gradient
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
        optimizer.start(norm, 1.0, 0.25, norm.double().reshape(1))  # the function for a finite step is not called
        after = [model.first.weight.detach(), average.values["first.weight"]]
        after += [optimizer.state("first.weight")["momentum_buffer"]] if not finite else []
        assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [not finite] * len(before)


def with_muon(out, **changes):
    """A small run with Muon."""
    config = small(out, **changes)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, kind="muon"))


def test_a_run_with_muon_resumes_with_the_same_bits(tmp_path):
    train(with_muon(tmp_path / "one"), random_rows())
    die_before(7, with_muon(tmp_path / "two"), random_rows())
    train(with_muon(tmp_path / "two"), random_rows())
    assert outcome(tmp_path / "two") == outcome(tmp_path / "one")


def test_a_state_of_adamw_is_not_a_state_of_muon(tmp_path):
    die_before(7, small(tmp_path / "run"), random_rows())
    with pytest.raises(UserError, match="optimizer"):
        train(with_muon(tmp_path / "run"), random_rows())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_make_the_steps_of_one(tmp_path, parallel):
    """With copies of the weights, and with rows of each matrix. The momentum in the state is that of one process too."""
    train(with_muon(tmp_path / "one"), random_rows())
    together(2, with_muon(tmp_path / "two", parallel=parallel), random_rows())
    expected, found = (tensors(state.place(tmp_path / name / "state", 12)) for name in ("one", "two"))
    assert expected.keys() == found.keys() and any("momentum_buffer" in name for name in expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_muon_needs_a_network_that_names_its_matrices(tmp_path):
    images = with_muon(tmp_path / "a", network=NetworkConfig(kind="unet", size="tiny"), data=DataConfig(name="digits"))
    with pytest.raises(UserError, match="block_matrices"):
        train(images)
    assert not (tmp_path / "a").exists()


def test_a_network_of_your_own_names_its_matrices():
    """The named matrices belong to Muon and all other parameters to AdamW, each to exactly one of them."""

    model = TwoLayers()
    optimizer = Optimizer(model, OptimizerConfig(kind="muon"), EMA(model, 0.9))
    owned = [[id(weight) for weight in one.param_groups[0]["params"]] for one in (optimizer.muon, optimizer.adamw)]
    assert owned[0] == [id(model.first.weight)]
    assert sorted(owned[0] + owned[1]) == sorted(map(id, model.parameters()))
