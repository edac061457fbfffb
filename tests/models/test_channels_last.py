"""A U-Net keeps the layout channels-last: no convolution reads or writes another one, and the logits are no copy."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from m2s.distributed import World
from m2s.models import UNet, UNetConfig, unet
from m2s.ops import use_backend
from m2s.training import resolve, trainer
from m2s.training.build import make_objects
from m2s.training.loop import Stopper, finish_step, train
from m2s.training.trainer import Trainer
from small_runs import InMemorySource, die_before, outcome, small, tensors

NETWORKS = {
    "two resolutions": {},
    "one resolution, three channels": {"shape": (4, 4, 3), "multipliers": (1,), "layers": 2},
    "levels, labels": {"input": "level", "classes": 3, "mask": True},
}
LAYOUTS = {"contiguous weights": torch.contiguous_format, "channels-last weights": torch.channels_last}


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a pixel are neighbors in memory."""
    return x.is_contiguous(memory_format=torch.channels_last)


def network(**settings: object) -> UNet:
    """A small network with random weights."""
    model = UNet(UNetConfig(**{"states": 7, "shape": (4, 4), "width": 8, "multipliers": (1, 2), "layers": 1, **settings}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_convolution_and_its_gradient(name: str, layout: str, kernels: str, monkeypatch) -> None:
    if kernels == "fused":
        pytest.importorskip("triton")
    model = network(**NETWORKS[name]).to(memory_format=LAYOUTS[layout])
    seen: list[tuple[str, Tensor]] = []
    gradients: list[Tensor] = []

    def note(what: str, x: Tensor) -> None:
        seen.append((what, x))
        if x.requires_grad:
            x.register_hook(gradients.append)

    def hook(layer: nn.Module, given: tuple[Tensor], found: Tensor) -> None:
        note(f"{paths[layer]} in", given[0])
        note(f"{paths[layer]} out", found)

    paths = {layer: path for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and layer is not model.last}
    for layer in paths:
        layer.register_forward_hook(hook)
    last: list[Tensor] = []

    def conv2d(x: Tensor, *given: Tensor, **options: int) -> Tensor:
        last.append(torch.nn.functional.conv2d(x, *given, **options))
        note("last in", x)
        note("last out", last[0])
        return last[0]

    monkeypatch.setattr(unet, "conv2d", conv2d)
    x = torch.randint(7, (2, 16 * model.config.channels))
    with use_backend(kernels):
        logits = model(x, torch.rand(2))
    if model.config.states == logits.shape[-1]:
        assert logits.data_ptr() == last[0].data_ptr(), "the logits are a copy"
    logits.square().sum().backward()
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
    assert len(seen) == 2 * convolutions and len(gradients) >= 2 * convolutions - 1
    wrong = [what for what, x in seen if not is_channels_last(x)]
    assert not wrong, wrong
    # the gradient of one input of a concatenation is a slice of some channels, which are neighbors in memory all the same
    assert all(x.stride(1) == 1 or x.shape[1] == 1 for x in gradients)


def trainer_of(out: Path, source: InMemorySource, **changes: object) -> Trainer:
    """A trainer of a small U-Net."""
    config = resolve(settings(out, **changes))
    return Trainer(config, source, World.start("cpu"), *make_objects(config, source))


def settings(out: Path, **changes: object):
    """A short run of a small U-Net."""
    unet_of = {"network__kind": "unet", "network__depth": None, "network__heads": None, "network__multipliers": (1, 2)}
    return small(out, **{**unet_of, "network__width": 8, "method": "m2s-offset", "steps": 4, "save_every": 2, **changes})


def images() -> InMemorySource:
    """Random images of 4 x 4 pixels."""
    source = InMemorySource(torch.randint(5, (64, 16), generator=torch.Generator().manual_seed(0)), 5)
    source.shape = (4, 4)
    return source


def test_training_with_channels_last_weights(tmp_path, monkeypatch) -> None:
    """As on a GPU: gradients, moments and averages have the layout of the weights, the losses are those of contiguous weights,
    and a state is the same file in both layouts."""
    source, found, losses = images(), {}, {}
    for name in ("contiguous", "channels-last"):
        monkeypatch.setattr(trainer, "uses_channels_last", lambda *_, name=name: name == "channels-last")
        with trainer_of(tmp_path / name, source, network__dropout=0.0) as one:
            batch, losses[name] = one.local_batch(0), []
            while batch is not None:
                made = finish_step(one, *one.gradient(batch), Stopper())
                batch = made.next_batch
                losses[name].append(made.loss)
            weight = next(value for value in one.model.parameters() if value.ndim == 4 and value.shape[-1] == 3)
            moments = one.optimizer.adamw.state[weight]
            parts = (weight, weight.grad, moments["exp_avg"], moments["exp_avg_sq"], *one.average.values.values())
            assert is_channels_last(weight) == (name == "channels-last")
            assert all(is_channels_last(part) for part in parts if part.ndim == 4) == (name == "channels-last")
        train(settings(tmp_path / name / "run", network__dropout=0.0), source)
        found[name] = tensors(max((tmp_path / name / "run" / "state").glob("step-*")))
    assert losses["channels-last"] == pytest.approx(losses["contiguous"], rel=1e-5)
    for key, value in found["contiguous"].items():
        assert value.shape == found["channels-last"][key].shape
        torch.testing.assert_close(found["channels-last"][key], value, rtol=1e-3, atol=1e-3 * float(value.abs().max()))


def test_a_resumed_run_with_channels_last_weights_has_the_bits_of_one_that_was_not_interrupted(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trainer, "uses_channels_last", lambda *_: True)
    source = images()
    train(settings(tmp_path / "whole"), source)
    die_before(3, settings(tmp_path / "parts"), source)
    train(settings(tmp_path / "parts"), source)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")
