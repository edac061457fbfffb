"""Clipping, AdamW and moving average in one pass, against torch in float32 and, as the exact result, in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn

from m2s.ops import use_backend
from m2s.ops.adamw import OptimizerStep, naive
from m2s.training import loop, train
from small_runs import outcome, random_rows, small

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(), (1,), (7,), (33, 31), (512,), (3, 512), (1025,), (2, 5, 257)]
SETTINGS = {
    "clipped": {"clip": 1.0, "decay": 0.1, "average_weight": 1e-4, "beta": 0.9},
    "not clipped": {"clip": 1e6, "decay": 0.0, "average_weight": 0.9, "beta": 0.5},
    "no clip, no momentum": {"clip": 0.0, "decay": 0.01, "average_weight": 0.5, "beta": 0.0},
}


def start(dtype: torch.dtype, decay: float = 0.1, beta: float = 0.9) -> tuple[torch.optim.AdamW, list[Tensor]]:
    """An optimizer with weights of all sizes, and their moving averages."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)) for shape in SHAPES]
    optimizer = torch.optim.AdamW(
        weights, lr=1e-2, betas=(beta, 0.99), weight_decay=decay, fused=dtype == torch.float32, foreach=False
    )
    return optimizer, [weight.detach().clone() for weight in weights]


def gradients(optimizer: torch.optim.AdamW, step: int) -> Tensor:
    """Set new gradients, small ones in the first step, each time at another address; return their norm."""
    generator = torch.Generator().manual_seed(step + 1)
    weights = optimizer.param_groups[0]["params"]
    for weight in weights:
        scale = 1e-4 if step == 0 else 3.0
        gradient = (scale * torch.randn(weight.shape, generator=generator)).to(weight)
        weight.grad = torch.empty_like(weight).copy_(gradient)  # with the strides of the weight, as autograd sets them
    return torch.nn.utils.get_total_norm([weight.grad for weight in weights])


def make_step(
    step: OptimizerStep, averages: list[Tensor], norm: Tensor, clip: float = 1.0, average_weight: float = 1e-3, numbers=(1.0,)
) -> None:
    """Make a step as the training loop does."""
    weights = [weight.detach() for weight in step.optimizer.param_groups[0]["params"]]
    finite = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
    finish = step.start(weights, averages, norm, clip, average_weight, finite)
    if finite.isfinite().all():
        finish()


def full_state(optimizer: torch.optim.AdamW, averages: list[Tensor]) -> dict[str, Tensor]:
    """Copies of weights, averages and optimizer state, by name."""
    found = {}
    for i, (weight, average) in enumerate(zip(optimizer.param_groups[0]["params"], averages, strict=True)):
        found |= {f"weight {i}": weight.detach(), f"average {i}": average}
        found |= {f"{key} {i}": value for key, value in optimizer.state[weight].items()}
    return {key: value.clone() for key, value in found.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_five_steps_against_float64(name):
    """Weights and moments agree with float64.

    Each weight and moment is rounded up to three times per step, by 2^-24 of the greatest: below 1e-6 of it after five steps.
    torch's kernel for GPUs rounds beta_2 = 0.99 before it subtracts it from 1, which adds 2^-25 / 0.01 to the second moment.
    """
    setting = SETTINGS[name]
    found = {}
    for kind, dtype in (("fused", torch.float32), ("reference", torch.float32), ("exact", torch.float64)):
        optimizer, averages = start(dtype, setting["decay"], setting["beta"])
        step = OptimizerStep(optimizer)
        for i in range(5):
            optimizer.param_groups[0]["lr"] = 1e-2 * (i + 1) / 5
            norm = gradients(optimizer, i)
            with use_backend("fused" if kind == "fused" else "reference"):
                make_step(step, averages, norm, setting["clip"], setting["average_weight"])
        assert bool(step.tables and step.tables.addresses) == (kind == "fused")
        found[kind] = full_state(optimizer, averages)
    for key, truth in found["exact"].items():
        assert found["fused"][key].dtype == torch.float32
        torchs = 1e-6 + (2**-25 / 0.01 if DEVICE == "cuda" and key.startswith("exp_avg_sq") else 0)
        for kind, most in (("fused", 1e-6), ("reference", torchs)):
            bound = most * float(truth.abs().max())
            assert float((found[kind][key].double() - truth).abs().max()) <= bound, (kind, key)
        assert key.startswith("step") == bool((truth == 5).all())


def test_backends_can_alternate():
    """torch continues from the state of the kernel, and the kernel from the state of torch."""
    states = []
    for order in ("rrrr", "ffrr", "rrff"):
        optimizer, averages = start(torch.float32)
        step = OptimizerStep(optimizer)
        for i, kind in enumerate(order):
            with use_backend("fused" if kind == "f" else "reference"):
                make_step(step, averages, gradients(optimizer, i))
        states.append(full_state(optimizer, averages))
    first = states[0]
    for other in states[1:]:
        assert other.keys() == first.keys()
        for key, value in first.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=2e-6 * float(value.abs().max()))


def test_unaligned_tensors():
    """Tensors at unaligned addresses are updated, and the memory around them is not touched."""
    sizes, junk = [5, 512, 700], 1e30
    buffers = [torch.full((size + 8,), junk, device=DEVICE) for size in sizes]
    generator = torch.Generator().manual_seed(0)
    weights = []
    for buffer, size in zip(buffers, sizes, strict=True):
        buffer[3 : 3 + size] = torch.randn(size, generator=generator).to(DEVICE)
        weights.append(nn.Parameter(buffer[3 : 3 + size]))
    assert any(weight.data_ptr() % 16 for weight in weights)
    plain = [nn.Parameter(weight.detach().clone()) for weight in weights]
    for kind, mine in (("fused", weights), ("reference", plain)):
        optimizer = torch.optim.AdamW(mine, lr=1e-2, fused=True)
        averages = [weight.detach().clone() for weight in mine]
        with use_backend(kind):
            make_step(OptimizerStep(optimizer), averages, gradients(optimizer, 1))
    for buffer, weight, other in zip(buffers, weights, plain, strict=True):
        torch.testing.assert_close(weight.detach(), other.detach(), rtol=0, atol=1e-6 * float(other.detach().abs().max()))
        assert (buffer[:3] == junk).all() and (buffer[3 + len(weight) :] == junk).all()


@pytest.mark.parametrize("shape", [(5, 3, 3, 3), (6, 4, 1, 1), (4, 1, 3, 3)])
def test_channels_last_weights(shape):
    """Weights of convolutions in the layout channels-last: the same step as for contiguous ones, by the kernel."""
    states = []
    for layout in (torch.contiguous_format, torch.channels_last):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE).contiguous(memory_format=layout)
        optimizer = torch.optim.AdamW([nn.Parameter(weight)], lr=1e-2, fused=True)
        averages = [weight.detach().clone()]
        step = OptimizerStep(optimizer)
        with use_backend("fused"):
            for i in range(2):
                make_step(step, averages, gradients(optimizer, i))
        assert step.tables.addresses
        states.append(full_state(optimizer, averages))
    for key, value in states[0].items():
        assert torch.equal(states[1][key], value), key


def test_a_gradient_in_another_layout_is_left_to_torch():
    """The kernel reads memory in order, so that all tensors of a parameter must have the same order."""
    states = []
    for kind in ("fused", "reference"):
        weight = nn.Parameter(torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)
        averages, norm = [weight.detach().clone()], gradients(optimizer, 1)
        weight.grad = weight.grad.contiguous(memory_format=torch.channels_last)
        step = OptimizerStep(optimizer)
        with use_backend(kind):
            make_step(step, averages, norm)
        states.append(full_state(optimizer, averages))
    assert not step.tables
    for key, value in states[0].items():
        assert torch.equal(states[1][key], value), key


@pytest.mark.parametrize("kind", ["fused", "reference"])
@pytest.mark.parametrize("numbers", [(float("nan"), 1.0), (1.0, float("inf")), (float("-inf"),)])
def test_non_finite_number_skips_the_step(kind, numbers):
    """NaN or infinity in loss or gradient norm leaves everything unchanged."""
    optimizer, averages = start(torch.float32)
    step = OptimizerStep(optimizer)
    with use_backend(kind):
        make_step(step, averages, gradients(optimizer, 0))
        before = full_state(optimizer, averages)
        make_step(step, averages, gradients(optimizer, 1) * float("nan"), numbers=numbers)
        assert all(torch.equal(value, before[key]) for key, value in full_state(optimizer, averages).items())
        make_step(step, averages, gradients(optimizer, 1))
    assert all(float(state["step"]) == 2 for state in optimizer.state.values())


def test_nan_spreads_as_in_torch():
    """A NaN in one gradient entry reaches exactly the entries that it reaches in torch."""
    states = {}
    for kind in ("fused", "reference"):
        optimizer, averages = start(torch.float32)
        step = OptimizerStep(optimizer)
        with use_backend(kind):
            make_step(step, averages, gradients(optimizer, 0))
            gradients(optimizer, 1)
            optimizer.param_groups[0]["params"][3].grad[2, 5] = torch.nan
            make_step(step, averages, torch.tensor(1.0, device=DEVICE))
        states[kind] = full_state(optimizer, averages)
    for key, value in states["reference"].items():
        assert int(value.isnan().sum()) == (key in ("weight 3", "average 3", "exp_avg 3", "exp_avg_sq 3"))
        assert torch.equal(states["fused"][key].isnan(), value.isnan())


@pytest.mark.parametrize("case", ["float64", "transposed", "no gradient"])
def test_unsupported_tensors_fall_back_to_torch(case):
    """Tensors that the kernel does not support give the bits of torch."""
    states = []
    for kind in ("fused", "reference"):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator).to(DEVICE) for shape in ((4, 6), (3, 2))]
        values = [value.double() if case == "float64" else value for value in values]
        weights = [nn.Parameter(value.T if case == "transposed" else value) for value in values]
        optimizer = torch.optim.AdamW(weights, lr=1e-2, fused=True)
        averages = [weight.detach().clone() for weight in weights]
        norm = gradients(optimizer, 1)
        if case == "no gradient":
            weights[1].grad = None
        with use_backend(kind):
            make_step(OptimizerStep(optimizer), averages, norm)
        states.append(full_state(optimizer, averages))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_state_is_that_of_the_optimizer():
    """The kernel stores its moments in the optimizer's state, with torch's keys, shapes and dtypes."""
    optimizer, averages = start(torch.float32)
    with use_backend("fused"):
        make_step(OptimizerStep(optimizer), averages, gradients(optimizer, 0))
    kept = copy.deepcopy(optimizer.state_dict())
    other, _ = start(torch.float32)
    gradients(other, 0)
    other.step()
    assert kept["state"].keys() == other.state_dict()["state"].keys()
    for mine, torchs in zip(kept["state"].values(), other.state_dict()["state"].values(), strict=True):
        assert {key: (value.shape, value.dtype, value.device) for key, value in mine.items()} == {
            key: (value.shape, value.dtype, value.device) for key, value in torchs.items()
        }


def test_naive_is_clip_step_and_lerp():
    """`naive.step` gives the bits of torch's clipping, AdamW and lerp."""
    optimizer, averages = start(torch.float32)
    other, others = start(torch.float32)
    for i in range(3):
        norm = gradients(optimizer, i)
        naive.step(optimizer, [w.detach() for w in optimizer.param_groups[0]["params"]], averages, norm, 1.0, 0.3)
        gradients(other, i)
        torch.nn.utils.clip_grad_norm_(other.param_groups[0]["params"], 1.0)
        other.step()
        for average, weight in zip(others, other.param_groups[0]["params"], strict=True):
            average.lerp_(weight.detach(), 0.3)
    mine, torchs = full_state(optimizer, averages), full_state(other, others)
    assert all(torch.equal(value, torchs[key]) for key, value in mine.items())


class Stop(Exception):
    """Interrupts a run."""


def test_resumed_fused_run_has_the_same_bits(tmp_path, monkeypatch):
    """A fused run that is interrupted and resumed ends with the bits of an uninterrupted one."""

    def config(name: str):
        few = {"steps": 3, "batch": 2, "micro_batch": None, "save_every": 1, "validate_every": 0, "log_every": 1}
        return small(tmp_path / name, kernels="fused", device=DEVICE, precision="float32", compile="no", **few)

    rows, gradient = random_rows(length=2), loop.Trainer.gradient

    def dying(learner, share):
        if learner.progress.step == 2:
            raise Stop
        return gradient(learner, share)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "gradient", dying)
        with pytest.raises(Stop):
            train(config("one"), rows)
    for name in ("one", "two"):
        train(config(name), rows)
    one, two = outcome(tmp_path / "one"), outcome(tmp_path / "two")
    if DEVICE == "cpu":
        assert one == two
    assert one["tensors"].keys() == two["tensors"].keys() and one["log"][-1]["step"] == two["log"][-1]["step"] == 3
