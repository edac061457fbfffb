"""Shift, group norm and SiLU in one kernel: values and gradients against float64, alone, in a network and in training."""

import pytest
import torch
from torch import Tensor

from compiled import passes
from m2s.models import UNet, UNetConfig
from m2s.ops import use_backend
from m2s.ops.group_norm import group_norm_silu, is_fused
from m2s.ops.group_norm.tiles import BACKWARD, CHANNELS, FORWARD, LARGEST, tile_of
from m2s.training import train
from small_runs import InMemorySource, losses, small

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
NAMES = ("x", "shift", "weight", "bias")
# [B, C, H, W] and groups: groups of 4, of 6 (not a power of two), of one channel, one group, several programs of an image,
# and more groups than a program's last tile has
CASES = [
    ((2, 1, 1, 1), 1),
    ((2, 8, 3, 5), 2),
    ((3, 12, 4, 4), 2),
    ((2, 5, 2, 3), 5),
    ((2, 6, 7, 1), 1),
    ((2, 64, 4, 4), 16),
    ((1, 36, 8, 8), 9),
]


def inputs(shape: tuple[int, ...], shifted: bool) -> dict[str, Tensor | None]:
    """Random arguments. Features have a mean that is large against their spread."""
    batch, channels = shape[:2]
    sizes = {"x": shape, "shift": (batch, channels), "weight": (channels,), "bias": (channels,)}
    given = {name: torch.randn(sizes[name], dtype=torch.float64) for name in NAMES}
    return {**given, "x": given["x"] + 5, "shift": given["shift"] if shifted else None}


def with_gradients(
    given: dict[str, Tensor | None], groups: int, upstream: Tensor, dtype: torch.dtype, fused: bool
) -> dict[str, Tensor]:
    """The result and the gradients of all arguments, by name."""
    leaves = {
        key: None if value is None else value.detach().clone().to(DEVICE, dtype).requires_grad_()
        for key, value in given.items()
    }
    y = group_norm_silu(*leaves.values(), groups, EPS, fused)
    (y * upstream.to(y)).sum().backward()
    return {"result": y.detach(), **{f"gradient of {key}": one.grad for key, one in leaves.items() if one is not None}}


def assert_near(found: Tensor, expected: Tensor, name: str, bound: float = 1e-5) -> None:
    """The error is below the bound, relative to the norm or to one: the shift of a group of one channel has the gradient 0."""
    assert found.shape == expected.shape, name
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1)
    assert error < bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("shape", "groups"), CASES, ids=str)
def test_values_and_gradients(shape, groups, shifted):
    given, upstream = inputs(shape, shifted), torch.randn(shape)
    exact = with_gradients(given, groups, upstream, torch.float64, fused=False)
    found = with_gradients(given, groups, upstream, torch.float32, fused=True)
    assert found["result"].is_contiguous(memory_format=torch.channels_last)
    for name, expected in exact.items():
        assert_near(found[name], expected, name)


def test_naive_is_the_formula():
    given = inputs((2, 6, 2, 3), True)
    x, shift, weight, bias = given.values()
    groups = (x + shift[:, :, None, None]).reshape(2, 3, 2, 2, 3)
    centered = groups - groups.mean((2, 3, 4), keepdim=True)
    h = (centered / (centered.square().mean((2, 3, 4), keepdim=True) + EPS).sqrt()).reshape(x.shape)
    z = h * weight[:, None, None] + bias[:, None, None]
    torch.testing.assert_close(group_norm_silu(x, shift, weight, bias, 3, EPS, False), z / (1 + (-z).exp()))
    leaves = [value.requires_grad_() for value in given.values()]
    assert torch.autograd.gradcheck(lambda *values: group_norm_silu(*values, 3, EPS, False), leaves)


def test_gradient_of_the_kernel_agrees_with_finite_differences():
    """In float32: central differences of a smooth function, with a step at which rounding and curvature are both small."""
    given = {key: value.float().to(DEVICE) for key, value in inputs((1, 4, 2, 2), True).items()}
    upstream = torch.randn(1, 4, 2, 2, device=DEVICE)
    found = with_gradients(given, 2, upstream, torch.float32, fused=True)
    for name, value in given.items():
        direction, step = torch.randn_like(value), 1e-2
        ends = [group_norm_silu(*{**given, name: value + sign * step * direction}.values(), 2, EPS, True) for sign in (1, -1)]
        slope = ((ends[0] - ends[1]) * upstream).sum() / (2 * step)
        assert float(slope) == pytest.approx(float((found[f"gradient of {name}"] * direction).sum()), rel=5e-3, abs=5e-3), name


def test_other_layouts_give_the_same_bits():
    given, upstream = inputs((2, 8, 3, 5), True), torch.randn(2, 8, 3, 5)
    plain = with_gradients(given, 2, upstream, torch.float32, fused=True)
    given["x"] = given["x"].contiguous(memory_format=torch.channels_last)
    given["shift"] = given["shift"].t().contiguous().t()
    strided = with_gradients(given, 2, upstream.contiguous(memory_format=torch.channels_last), torch.float32, fused=True)
    for name, found in strided.items():
        assert torch.equal(found, plain[name]), name


def test_which_features_the_kernels_take():
    x = torch.zeros(1, 4, 2, 2, device=DEVICE)
    with use_backend("reference"):
        assert not is_fused(x, 1)
    with use_backend("auto"):
        assert is_fused(x, 1) == x.is_cuda
    with use_backend("fused"):
        assert is_fused(x, 1) and is_fused(x.bfloat16(), 1)
        assert not is_fused(x.double(), 1)
        assert not is_fused(x[:0], 1)
        large = torch.zeros(1, 4, 128, 128, device=DEVICE)
        assert is_fused(large, 4) and not is_fused(large, 1)


def test_tiles_hold_whole_groups_and_at_most_their_limit():
    for channels, groups in ((128, 32), (256, 32), (192, 32), (32, 8), (6, 1)):
        for side in (1, 7, 8, 14, 28, 32):
            x = torch.empty(2, channels, side, side, device="meta")
            for elements in (FORWARD, BACKWARD):
                tile = tile_of(x, groups, elements)
                assert tile.width >= channels // groups and tile.rows >= side * side
                assert tile.groups == 1 or tile.groups * tile.width <= CHANNELS
                assert tile.groups * tile.width * tile.rows <= max(elements, tile.width * tile.rows) <= LARGEST


def test_result_has_the_dtype_of_autocast():
    given = {key: value.float().to(DEVICE) for key, value in inputs((1, 4, 2, 2), True).items()}
    for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            assert group_norm_silu(*given.values(), 2, EPS, True).dtype == dtype


def test_second_derivatives_name_the_backend_that_has_them():
    given = {key: value.float().to(DEVICE).requires_grad_() for key, value in inputs((1, 4, 2, 2), True).items()}
    y = group_norm_silu(*given.values(), 2, EPS, True)
    with pytest.raises(RuntimeError, match=r"group norm and SiLU has first derivatives only.*reference"):
        torch.autograd.grad(y.sum(), given["x"], create_graph=True)


# --- in a network ----------------------------------------------------------------------------------------------------------

NETWORKS = {
    "time": {},
    "time-free": {"time": False},
    "classes": {"classes": 3},
    "three channels": {"shape": (4, 4, 3)},
    "MD4's groups": {"groups": 4, "multipliers": (1,), "layers": 2},
}


def network(**settings: object) -> UNet:
    """A small network with random weights."""
    model = UNet(UNetConfig(**{"states": 7, "shape": (4, 4), "width": 8, "multipliers": (1, 2), "layers": 1, **settings}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(DEVICE)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_gradients_agree(name):
    model = network(**NETWORKS[name])
    x, t = torch.randint(7, (2, model.config.channels * 16), device=DEVICE), torch.rand(2, device=DEVICE)
    found = {}
    for kernels in ("reference", "fused"):
        model.zero_grad()
        with use_backend(kernels):
            loss = model(x, t).square().mean()
            loss.backward()
        found[kernels] = {"loss": loss.detach()} | {key: value.grad.clone() for key, value in model.named_parameters()}
    for key, expected in found["reference"].items():
        assert_near(found["fused"][key], expected, key, 5e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter gets bf16 wrong")
def test_network_gradients_agree_in_bf16():
    """Against float32, the fused backend must be no less accurate than the reference."""
    model = network(width=64)
    x, t = torch.randint(7, (8, 16), device=DEVICE), torch.rand(8, device=DEVICE)
    found: dict[str, dict[str, Tensor]] = {}
    for case, kernels, bf16 in (("exact", "reference", False), ("reference", "reference", True), ("fused", "fused", True)):
        model.zero_grad()
        with use_backend(kernels):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
                output = model(x, t)
            output.square().mean().backward()
        found[case] = {key: value.grad.clone() for key, value in model.named_parameters()}
    distance = {
        case: torch.stack([(found[case][key] - value).norm() / value.norm() for key, value in found["exact"].items()])
        for case in ("reference", "fused")
    }
    assert (distance["fused"] < 1.5 * distance["reference"] + 1e-3).all()


@pytest.mark.usefixtures("large_blocks")
def test_training_has_the_same_loss_curve(tmp_path):
    rows = torch.randint(5, (64, 16), generator=torch.Generator().manual_seed(0))
    source = InMemorySource(rows, 5)
    source.shape = (4, 4)
    unet = {"network__kind": "unet", "network__depth": None, "network__heads": None, "network__multipliers": (1, 2)}
    changes = {**unet, "network__width": 8, "network__dropout": 0.0, "steps": 5, "batch": 2, "micro_batch": 2, "log_every": 1}
    changes |= {
        "method": "m2s-offset",
        "device": DEVICE,
        "precision": "float32",
        "compile": "no",
        "validate_every": 0,
        "validation_samples": 2,
    }
    for kernels in ("reference", "fused"):
        train(small(tmp_path / kernels, kernels=kernels, **changes), source)
    assert losses(tmp_path / "fused") == pytest.approx(losses(tmp_path / "reference"), rel=1e-5)


COMPILED = """
from m2s.models import UNet, UNetConfig
from m2s.ops import use_backend

model = UNet(UNetConfig(states=7, shape=(4, 4), width=8, multipliers=(1, 2), layers=1)).to(device)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.2)
x, t = torch.randint(7, (2, 16), device=device), torch.rand(2, device=device)


def gradients(kernels):
    model.zero_grad()
    with use_backend(kernels):
        loss = model(x, t).square().mean()
        loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


torch._dynamo.config.recompile_limit = 64  # blocks of different shapes share the code of their forward
expected = gradients("reference")
for block in [*model.down, *model.middle, *model.up]:
    block.forward = torch.compile(block.forward, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=False)
for kernels in ("fused", "reference", "fused"):
    for one, other in zip(gradients(kernels), expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6, kernels
assert any("group_norm_silu" in name for names in graphs for name in names)
"""


def test_compiled_network():
    """Compiled blocks agree with eager ones, on both backends, and contain the kernel."""
    passes(COMPILED)
