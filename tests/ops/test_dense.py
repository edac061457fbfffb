"""The linear layer for mixed precision: one conversion of the weight, and a weight gradient that is not rounded."""

import pytest
import torch
from torch import Tensor

from compiled import passes
from m2s.ops.dense import _dense, dense, gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [((1,), 1, 1), ((3,), 5, 7), ((2, 9), 16, 24), ((4, 0), 3, 2), ((2, 3, 5), 8, 48)]  # rows, columns before and after


def given(shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype) -> list[Tensor]:
    """x, weight, bias, and the upstream gradient."""
    rows, width, after = shape
    sizes = [(*rows, width), (after, width), (after,), (*rows, after)]
    return [torch.randn(size, device=DEVICE, dtype=dtype) for size in sizes]


def with_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, upstream: Tensor, fused: bool) -> list[Tensor]:
    """The result, and the gradients of x, weight and bias."""
    leaves = [value.detach().clone().requires_grad_() for value in (x, weight, bias) if value is not None]
    result = dense(*(leaves if bias is not None else [*leaves, None]), fused)
    result.backward(upstream)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, bias):
    x, weight, at, upstream = given(shape, dtype)
    expected = with_gradients(x.double(), weight.double(), at.double() if bias else None, upstream.double(), fused=False)
    found = with_gradients(x, weight, at if bias else None, upstream, fused=True)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert (one.double() - other).norm() <= (1e-6 if dtype == torch.float32 else 1e-14) * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_autocast_rounds_only_operands_and_result(shape, dtype):
    x, weight, bias, upstream = given(shape, torch.float32)
    with torch.autocast(DEVICE, dtype):
        result, at_x, at_weight, at_bias = with_gradients(x, weight, bias, upstream.to(dtype), fused=True)
    assert result.dtype == dtype and at_x.dtype == at_weight.dtype == at_bias.dtype == torch.float32
    rounded = [value.to(dtype).double() for value in (x, weight, bias, upstream)]
    expected = with_gradients(*rounded, fused=False)
    rounding = torch.finfo(dtype).eps * (1 + 1e-3)  # of a result; a bias may be rounded before it is added
    for one, other, bias_size in zip((result, at_x), expected, (rounded[2].abs(), 0), strict=False):
        assert ((one.double() - other).abs() <= rounding * (other.abs() + bias_size) + 1e-6).all()
    for one, other in zip((at_weight, at_bias), expected[2:], strict=True):
        assert (one.double() - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("frozen", range(3), ids=["x", "weight", "bias"])
def test_gradients_of_frozen_inputs_are_not_computed(frozen):
    x, weight, bias, upstream = given(SHAPES[2], torch.float32)
    expected = with_gradients(x, weight, bias, upstream, fused=False)[1:]
    leaves = [value.clone().requires_grad_(i != frozen) for i, value in enumerate((x, weight, bias))]
    dense(*leaves, True).backward(upstream)
    for i, (leaf, truth) in enumerate(zip(leaves, expected, strict=True)):
        assert leaf.grad is None if i == frozen else (leaf.grad - truth).norm() <= 1e-6 * truth.norm()


def test_single_row():
    x, weight, bias, _ = given(((), 5, 7), torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            found = dense(x.requires_grad_(), weight.requires_grad_(), bias, True)
        assert found.shape == (7,) and found.dtype == dtype
        found.float().sum().backward()
    assert x.grad.shape == (5,) and weight.grad.shape == (7, 5)


def test_autocast_leaves_float64_alone():
    x, weight, bias, upstream = given(SHAPES[1], torch.float64)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = with_gradients(x, weight, bias, upstream, fused=True)
    assert all(torch.equal(*pair) for pair in zip(found, with_gradients(x, weight, bias, upstream, fused=True), strict=True))


def test_fake_implementations():
    """Shapes, dtypes and gradients as torch.compile assumes them (torch.library.opcheck)."""
    x, weight, bias, upstream = given(SHAPES[2], torch.float32)
    for dtype, tensor in ((torch.float32, x), (torch.bfloat16, x.bfloat16())):
        for one in (bias, None):
            torch.library.opcheck(_dense, (tensor.clone().requires_grad_(), weight.clone().requires_grad_(), one))
        for wanted in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(gradients, (upstream.to(dtype), tensor, weight.to(dtype), *wanted))


COMPILED = """
from functools import partial

from torch.utils.checkpoint import checkpoint

from m2s.ops.dense import dense


def layers(x, first, second, bias, fused):
    return dense(torch.sin(dense(x, first, None, fused)), second, bias, fused)


shapes = [(2, 5, 16), (24, 16), (8, 24), (8,)]
values = [torch.randn(shape, device=device) for shape in shapes]


def gradients(function, fused):
    leaves = [value.clone().requires_grad_() for value in values]
    with torch.autocast(device, torch.bfloat16):
        result = function(*leaves, fused)
    result.float().square().sum().backward()
    return [result.detach().float(), *(leaf.grad for leaf in leaves)]


def compiled(function):
    return torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True, dynamic=False)


expected = gradients(layers, True)
functions = [compiled(layers), compiled(partial(checkpoint, layers, use_reentrant=False))]
for function in functions + ([torch.compile(layers)] if device == "cuda" else []):
    for one, other in zip(gradients(function, True), expected, strict=True):
        assert (one - other).norm() <= 0.01 * other.norm(), function
forward, backward = graphs[:2]
assert forward.count("m2s.dense.default") == 2 and backward.count("m2s.dense_backward.default") == 2, graphs
assert forward.count("prims.convert_element_type.default") + forward.count("aten._to_copy.default") <= 1, forward  # of x alone
"""


def test_compiled_layers():
    """Compiled, recomputed or not: the same results, one op each way, and no conversion of a weight."""
    passes(COMPILED)


MODULES = """
from m2s.models.dit import Dense

network = torch.nn.ModuleList(Dense(8, 8) for _ in range(3)).to(device)
backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
for layer in network:
    layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)


def loss():
    x = torch.ones(4, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        for layer in network:
            x = layer(x, True)
    result = x.float().sum()
    result.backward()
    return result.item()


first = loss()
assert len(graphs) == 2, graphs  # one forward and one backward graph, for all layers
with torch.no_grad():
    for layer in network:
        layer.weight.mul_(2)
assert loss() != first and len(graphs) == 2  # the weights are converted again
assert all(layer.weight.grad.dtype == torch.float32 for layer in network)
"""


def test_modules_are_compiled_once():
    """All layers share one graph each way, which reads the current weights."""
    passes(MODULES)
