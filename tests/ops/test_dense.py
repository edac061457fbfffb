"""A layer whose weight is narrowed once: products of rounded factors, and a gradient of the weight that is not rounded."""

import pytest
import torch
from torch import Tensor

from compiled import passes
from m2s.ops.dense import _dense, dense, gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [((1,), 1, 1), ((3,), 5, 7), ((2, 9), 16, 24), ((4, 0), 3, 2), ((2, 3, 5), 8, 48)]  # rows, columns before and after


def given(shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype) -> list[Tensor]:
    """x, weight, bias, and the gradient above."""
    rows, width, after = shape
    sizes = [(*rows, width), (after, width), (after,), (*rows, after)]
    return [torch.randn(size, device=DEVICE, dtype=dtype) for size in sizes]


def with_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, above: Tensor, fused: bool) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in (x, weight, bias) if value is not None]
    result = dense(*(leaves if bias is not None else [*leaves, None]), fused)
    result.backward(above)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, bias):
    x, weight, at, above = given(shape, dtype)
    expected = with_gradients(x.double(), weight.double(), at.double() if bias else None, above.double(), fused=False)
    found = with_gradients(x, weight, at if bias else None, above, fused=True)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert (one.double() - other).norm() <= (1e-6 if dtype == torch.float32 else 1e-14) * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_autocast_rounds_the_factors_and_the_result_and_nothing_else(shape, dtype):
    x, weight, bias, above = given(shape, torch.float32)
    with torch.autocast(DEVICE, dtype):
        result, at_x, at_weight, at_bias = with_gradients(x, weight, bias, above.to(dtype), fused=True)
    assert result.dtype == dtype and at_x.dtype == at_weight.dtype == at_bias.dtype == torch.float32
    rounded = [value.to(dtype).double() for value in (x, weight, bias, above)]
    expected = with_gradients(*rounded, fused=False)
    rounding = torch.finfo(dtype).eps * (1 + 1e-3)  # of a result; a bias may be rounded before it is added
    for one, other, max_masked in zip((result, at_x), expected, (rounded[2].abs(), 0), strict=False):
        assert ((one.double() - other).abs() <= rounding * (other.abs() + max_masked) + 1e-6).all()
    for one, other in zip((at_weight, at_bias), expected[2:], strict=True):
        assert (one.double() - other).norm() <= 1e-6 * other.norm()


def test_a_narrow_weight_is_read_instead():
    """And the gradient is the weight's. One of another dtype than autocast's is not what is wanted."""
    x, weight, bias, above = given(SHAPES[2], torch.float32)
    leaf, narrow = weight.clone().requires_grad_(), weight.bfloat16()
    for autocast in (True, False):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            expected = with_gradients(x, weight, bias, above, fused=True)
            found = dense(x, leaf, bias, True, narrow)
            assert torch.equal(found, expected[0])
            found.backward(above.to(found.dtype))
            assert torch.equal(leaf.grad, expected[2])
            leaf.grad = None
            assert torch.equal(dense(x, leaf, bias, True, 2 * narrow), expected[0]) == (not autocast)


@pytest.mark.parametrize("frozen", range(3), ids=["x", "weight", "bias"])
def test_gradients_are_found_of_what_wants_them(frozen):
    x, weight, bias, above = given(SHAPES[2], torch.float32)
    expected = with_gradients(x, weight, bias, above, fused=False)[1:]
    leaves = [value.clone().requires_grad_(i != frozen) for i, value in enumerate((x, weight, bias))]
    dense(*leaves, True).backward(above)
    for i, (leaf, truth) in enumerate(zip(leaves, expected, strict=True)):
        assert leaf.grad is None if i == frozen else (leaf.grad - truth).norm() <= 1e-6 * truth.norm()


def test_a_single_row():
    x, weight, bias, _ = given(((), 5, 7), torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            found = dense(x.requires_grad_(), weight.requires_grad_(), bias, True)
        assert found.shape == (7,) and found.dtype == dtype
        found.float().sum().backward()
    assert x.grad.shape == (5,) and weight.grad.shape == (7, 5)


def test_float64_is_left_alone_by_autocast():
    x, weight, bias, above = given(SHAPES[1], torch.float64)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = with_gradients(x, weight, bias, above, fused=True)
    assert all(torch.equal(*pair) for pair in zip(found, with_gradients(x, weight, bias, above, fused=True), strict=True))


def test_what_compilers_are_told():
    x, weight, bias, above = given(SHAPES[2], torch.float32)
    for dtype, tensor in ((torch.float32, x), (torch.bfloat16, x.bfloat16())):
        for one, narrow in ((bias, None), (None, None), (bias, weight.to(dtype, copy=True))):
            torch.library.opcheck(_dense, (tensor.clone().requires_grad_(), weight.clone().requires_grad_(), narrow, one))
        for wanted in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(gradients, (above.to(dtype), tensor, weight.to(dtype), *wanted))


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


def test_compilers():
    passes(COMPILED)


MODULES = """
from m2s.models.dit import Dense
from m2s.training.bf16_weights import Narrow

network = torch.nn.ModuleList(Dense(8, 8) for _ in range(3)).to(device)
kept = Narrow(network)
kept.refresh()
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
assert len(graphs) == 2, graphs  # one forth and one back, for all layers
with torch.no_grad():
    for weight in kept.weights:
        weight.mul_(2)
assert loss() == first  # the narrow ones are what is read
kept.refresh()
second = loss()
assert second != first and len(graphs) == 2
assert all(torch.equal(narrow, weight.bfloat16()) for weight, narrow in kept.weights.items())
for narrow in kept.weights.values():
    narrow.zero_()
kept.refresh()  # no weight was changed
assert not any(narrow.any() for narrow in kept.weights.values())
"""


def test_modules_with_narrow_weights_are_compiled_once():
    passes(MODULES)
