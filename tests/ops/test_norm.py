"""Residual, norm and modulation in one kernel: values and gradients against float64, alone and in a network."""

import pytest
import torch
from torch import Tensor

from compiled import passes
from m2s.models import DiT, DiTConfig
from m2s.models.rotary import angles
from m2s.ops import use_backend
from m2s.ops.norm import ROWS, add_norm, is_fused
from m2s.ops.rotary.naive import rotate

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
NAMES = ("x", "branch", "gate", "weight", "shift", "scale", "bias")
KINDS = {  # the arguments besides x and the weight
    "all": ("branch", "gate", "shift", "scale"),
    "no gate": ("branch", "shift", "scale"),
    "no branch": ("shift", "scale"),
    "no modulation": ("branch",),
    "norm alone": (),
    "all and a bias": ("branch", "gate", "shift", "scale", "bias"),
    "no modulation, a bias": ("branch", "bias"),
    "norm with a bias": ("bias",),
}
SHAPES = [(1, 1, 1), (2, 3, 5), (3, ROWS + 1, 7), (1, 2 * ROWS, 32), (2, ROWS - 1, 130), (2, 5, 768), (1, 3, 1025)]


def inputs(kind: str, shape: tuple[int, int, int]) -> dict[str, Tensor | None]:
    """Random arguments of one kind, None for the missing ones."""
    batch, _, width = shape
    sizes = {"x": shape, "branch": shape, "weight": (width,), "bias": (width,)}
    here = ("x", "weight", *KINDS[kind])
    return {name: torch.randn(sizes.get(name, (batch, 1, width))) if name in here else None for name in NAMES}


def call(given: dict[str, Tensor | None], fused: bool) -> tuple[Tensor, Tensor]:
    """`add_norm` of named arguments."""
    x, branch, gate, weight, shift, scale, bias = given.values()
    return add_norm(x, branch, gate, weight, EPS, shift, scale, fused, bias)


def with_gradients(
    given: dict[str, Tensor | None], upstream: tuple[Tensor, Tensor], dtype: torch.dtype, fused: bool
) -> dict[str, Tensor]:
    """Both results and the gradients of all arguments, by name."""
    given = {key: None if value is None else value.detach().to(DEVICE, dtype).requires_grad_() for key, value in given.items()}
    total, y = call(given, fused)
    sum((one * weight.to(one)).sum() for one, weight in zip((total, y), upstream, strict=True)).backward()
    gradients = {f"gradient of {key}": value.grad for key, value in given.items() if value is not None}
    return {"sum": total.detach(), "norm": y.detach(), **gradients}


def assert_near(found: Tensor, expected: Tensor, name: str, bound: float = 1e-5) -> None:
    """The relative error in norm is below the bound."""
    assert found.shape == expected.shape, name
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-3)
    assert error < bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, shape):
    given, upstream = inputs(kind, shape), (torch.randn(shape), torch.randn(shape))
    exact = with_gradients(given, upstream, torch.float64, fused=False)
    found = with_gradients(given, upstream, torch.float32, fused=True)
    for name, expected in exact.items():
        assert_near(found[name], expected, name)


def test_naive_is_the_formula():
    given = {key: None if value is None else value.double() for key, value in inputs("all and a bias", (2, 4, 6)).items()}
    total, y = call(given, fused=False)
    expected = given["x"] + given["gate"] * given["branch"]
    torch.testing.assert_close(total, expected)
    centered = expected - expected.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * given["weight"] + given["bias"]
    torch.testing.assert_close(y, normed * (1 + given["scale"]) + given["shift"])
    leaves = [value.requires_grad_() for value in given.values()]
    assert torch.autograd.gradcheck(lambda *values: call(dict(zip(NAMES, values, strict=True)), fused=False), leaves)


@pytest.mark.parametrize("used", ["sum", "norm"])
def test_only_one_result_is_used(used):
    """The last norm of a network does not use the sum; a missing gradient is a gradient of zero."""
    given, shape = inputs("all and a bias", (2, 3, 5)), (2, 3, 5)
    upstream = tuple(torch.randn(shape) * (name == used) for name in ("sum", "norm"))
    exact = with_gradients(given, upstream, torch.float64, fused=False)
    leaves = {key: value.to(DEVICE).requires_grad_() for key, value in given.items()}
    results = dict(zip(("sum", "norm"), call(leaves, fused=True), strict=True))
    results[used].backward(sum(upstream).to(DEVICE))
    for key, value in leaves.items():
        assert_near(value.grad, exact[f"gradient of {key}"], key)


def test_strided_arguments():
    """Shift, scale and gate as slices of one tensor, and rows with permuted strides."""
    given, upstream = inputs("all", (3, 4, 6)), (torch.randn(3, 4, 6), torch.randn(3, 4, 6))
    plain = with_gradients(given, upstream, torch.float32, fused=True)
    joint = torch.cat([given[key] for key in ("gate", "shift", "scale")], -1)
    given |= dict(zip(("gate", "shift", "scale"), joint.chunk(3, -1), strict=True))
    given |= {key: given[key].transpose(0, 1).contiguous().transpose(0, 1) for key in ("x", "branch")}
    for name, found in with_gradients(given, upstream, torch.float32, fused=True).items():
        assert torch.equal(found, plain[name]), name


def test_kernels_are_for_training_in_float32():
    x = torch.zeros(1, 1, 2, device=DEVICE)
    with use_backend("reference"):
        assert not is_fused(x)
    with use_backend("auto"):
        assert is_fused(x) == x.is_cuda
    with use_backend("fused"):
        assert is_fused(x)
        assert not is_fused(x.double())
        with torch.no_grad():
            assert not is_fused(x)


def test_result_has_the_dtype_of_autocast():
    given = {key: value.to(DEVICE) for key, value in inputs("all and a bias", (1, 2, 4)).items()}
    for enabled, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            total, y = call(given, fused=True)
        assert (total.dtype, y.dtype) == (torch.float32, dtype)


# --- in a network ----------------------------------------------------------------------------------------------------------

NETWORKS = {
    "time": {},
    "time-free": {"time": False},
    "causal": {"time": False, "causal": True},
    "classes": {"classes": 3},
    "classes after SiLU": {"classes": 3, "label_after_silu": True},
    "norm biases": {"norm_bias": True},
    "time-free, norm biases": {"time": False, "norm_bias": True},
    "dropout": {"dropout": 0.2},
    "normalized queries and keys": {"qk_norm": True},
    "gates of one": {"gates": "one"},
}


def network(**settings: object) -> DiT:
    """A small network with random weights."""
    model = DiT(DiTConfig(11, **{"width": 12, "depth": 2, "heads": 2, "condition_width": 8, **settings}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(DEVICE)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_gradients_agree(name):
    model, x, t = network(**NETWORKS[name]), torch.randint(11, (2, 9), device=DEVICE), torch.rand(2, device=DEVICE)
    found = {}
    for kernels in ("reference", "fused"):
        torch.manual_seed(1)
        model.zero_grad()
        with use_backend(kernels):
            loss = model(x, t).square().mean()
            loss.backward()
        found[kernels] = {"loss": loss.detach()} | {key: value.grad.clone() for key, value in model.named_parameters()}
    for key, expected in found["reference"].items():
        assert_near(found["fused"][key], expected, key, 2e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter gets bf16 wrong")
@pytest.mark.parametrize("name", NETWORKS)
def test_network_gradients_agree_in_bf16(name):
    """Against float32, the fused backend must be no less accurate than the reference."""
    model, x, t = network(width=64, **NETWORKS[name]), torch.randint(11, (8, 64), device=DEVICE), torch.rand(8, device=DEVICE)
    found: dict[str, dict[str, Tensor]] = {}
    for case, kernels, bf16 in (("exact", "reference", False), ("reference", "reference", True), ("fused", "fused", True)):
        torch.manual_seed(1)
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


# --- rotary tables ---------------------------------------------------------------------------------------------------------


def test_rotation_is_a_complex_product():
    x, half = torch.randn(2, 9, 3, 10), 5
    cos, sin = angles(9, 10)
    angle = torch.arange(9.0).double()[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(rotate(x, cos, sin).double(), torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)


def test_rotary_tables_on_the_meta_device():
    cos, sin = angles(4, 6, torch.device("meta"))
    assert cos.shape == sin.shape == (4, 6)
    assert cos.is_meta


COMPILED = """
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from m2s.models import DiT, DiTConfig
from m2s.ops import use_backend


def network(**settings):
    model = DiT(DiTConfig(11, width=12, depth=2, heads=2, condition_width=8, **settings))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(device)


x, t = torch.randint(11, (2, 6), device=device), torch.rand(2, device=device)

# a compiled network: its rotary tables are not computed inside the graph, for any length
model = network(time=False)
compiled = torch.compile(model.forward, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=False)
with torch.no_grad():
    for length in (6, 3, 6):
        torch.testing.assert_close(compiled(x[:, :length]), model(x[:, :length]))
assert len(graphs) == 2, len(graphs)
for names in graphs:
    assert any("m2s.angles" in name for name in names), names
    assert not any(part in name for name in names for part in ("cos", "sin", "arange", "pow")), names
    if device == "cpu":  # joining the heads copies nothing; a GPU has no fused attention for heads of six
        assert not any("clone" in name for name in names), names


def gradients(model, kernels):
    model.zero_grad()
    with use_backend(kernels):
        loss = model(x, t).square().mean()
        loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


# blocks compiled one by one, on both backends with the same compiled blocks, recomputed or not
for recompute, biased in ((False, False), (True, False), (False, True)):
    model = network(norm_bias=biased)
    expected = gradients(model, "reference")
    for block in model.blocks:
        forward = partial(checkpoint, block.forward, use_reentrant=False) if recompute else block.forward
        block.forward = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=False)
    for kernels in ("fused", "reference", "fused"):
        for one, other in zip(gradients(model, kernels), expected, strict=True):
            assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6, (recompute, kernels)
"""


def test_compiled_network():
    """Compiled networks and blocks agree with eager ones, on both backends."""
    passes(COMPILED)
