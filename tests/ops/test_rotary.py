"""Rotated queries and keys from the joint product: values and gradients against float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compiled import passes
from m2s.models.rotary import angles
from m2s.ops.rotary import _backward, _joint, joint
from m2s.ops.rotary.naive import rotary

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Examples, positions, heads, columns of a head: one of each, odd lengths, halves of a head that are no power of two or odd,
# more rows than one program has, a head as wide as a program.
SHAPES = [(1, 1, 1, 2), (2, 3, 1, 4), (3, 7, 5, 6), (2, 257, 3, 10), (1, 33, 12, 64), (2, 5, 2, 48), (1, 3, 1, 2050)]
EPSILON = {
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-51,
}  # two products and a sum are rounded; in float64 also the exact result


def identity(x: Tensor) -> Tensor:
    """The identity matrix as weight."""
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def with_gradients(
    qkv: Tensor, upstream: list[Tensor], tables: tuple[Tensor, Tensor], heads: int, fused: bool
) -> tuple[list[Tensor], Tensor]:
    """Results and gradient of a given joint product: the weight of the layer is the identity."""
    qkv = qkv.detach().requires_grad_()
    results = joint(qkv, identity(qkv), *tables, heads, fused)
    torch.autograd.backward(results, upstream)
    return [result.detach() for result in results], qkv.grad


def given(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor], tuple[Tensor, Tensor]]:
    """Joint product, upstream gradients, and tables of cosines and sines."""
    batch, length, heads, head = shape
    qkv = torch.randn(batch, length, 3 * heads * head, device=DEVICE, dtype=dtype)
    upstream = [torch.randn(batch, heads, length, head, device=DEVICE, dtype=dtype) for _ in range(3)]
    return qkv, upstream, angles(length, head, torch.device(DEVICE))


def exact(qkv: Tensor, upstream: list[Tensor], tables: tuple[Tensor, Tensor], heads: int) -> list[list[Tensor]]:
    """Results and gradient in float64; and the same with absolute values, which rounding errors are relative to."""
    terms = (qkv.abs(), [one.abs() for one in upstream], (tables[0].abs(), tables[1].abs()))
    found = []
    for inputs, gradients, factors in ((qkv, upstream, tables), terms):
        results, gradient = with_gradients(inputs.double(), [one.double() for one in gradients], factors, heads, fused=False)
        found.append([*results, gradient])
    return found


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_values_and_gradients(shape, dtype):
    qkv, upstream, tables = given(shape, dtype)
    results, gradient = with_gradients(qkv, upstream, tables, shape[2], fused=True)
    for found, truth, terms in zip([*results, gradient], *exact(qkv, upstream, tables, shape[2]), strict=True):
        assert found.dtype == dtype
        assert found.shape == truth.shape
        assert ((found.double() - truth).abs() <= 1.0001 * EPSILON[dtype] * terms).all()
    values = qkv.unflatten(-1, (3, shape[2], -1))[:, :, 2].transpose(1, 2)
    assert torch.equal(results[2], values)
    assert torch.equal(gradient.unflatten(-1, (3, shape[2], -1))[:, :, 2].transpose(1, 2), upstream[2])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter gets bf16 wrong")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_bf16_is_rounded_once(shape):
    qkv, upstream, tables = given(shape, torch.bfloat16)
    results, gradient = with_gradients(qkv, upstream, tables, shape[2], fused=True)
    for found, truth, terms in zip([*results, gradient], *exact(qkv, upstream, tables, shape[2]), strict=True):
        assert found.dtype == torch.bfloat16
        assert ((found.double() - truth).abs() <= 2.0**-8 * truth.abs() + 2.0**-22 * terms).all()


def test_naive_is_a_complex_product():
    shape = batch, length, heads, head = 2, 9, 3, 10
    qkv, _, tables = given(shape, torch.float64)
    parts = qkv.view(batch, length, 3, heads, head).cpu()
    angle = torch.arange(length).double()[:, None] * 10_000.0 ** (-torch.arange(head // 2).double() / (head // 2))
    pairs = torch.complex(parts[..., : head // 2], parts[..., head // 2 :])
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    rotated = torch.cat([pairs.real, pairs.imag], -1)
    q, k, v = (part.transpose(1, 2).cpu() for part in rotary(qkv, *tables, heads))
    torch.testing.assert_close(q, rotated[:, :, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(k, rotated[:, :, 1], rtol=1e-5, atol=1e-6)
    assert torch.equal(v, parts[:, :, 2])


def with_strides(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same numbers with permuted strides."""
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.ndim)])


def test_strided_upstream_gradients():
    """Attention returns gradients with heads before or after positions; a sum returns an expanded number."""
    qkv, upstream, tables = given((2, 5, 3, 8), torch.float32)
    _, expected = with_gradients(qkv, upstream, tables, 3, fused=True)
    wide = torch.randn(2, 3, 5, 20, device=DEVICE)
    wide[..., 4:12] = upstream[2]
    for orders in ([(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], [(0, 1, 3, 2), (3, 2, 1, 0), (1, 0, 2, 3)]):
        changed = [with_strides(one, order) for one, order in zip(upstream, orders, strict=True)]
        assert torch.equal(with_gradients(qkv, changed, tables, 3, fused=True)[1], expected)
    assert torch.equal(with_gradients(qkv, [upstream[0], upstream[1], wide[..., 4:12]], tables, 3, fused=True)[1], expected)
    one = torch.ones((), device=DEVICE).expand_as(upstream[0])
    _, expected = with_gradients(qkv, [one.contiguous()] * 3, tables, 3, fused=True)
    assert torch.equal(with_gradients(qkv, [one] * 3, tables, 3, fused=True)[1], expected)


def test_layer():
    """The product of the layer and its gradients, for inputs of any strides."""
    x, weight = torch.randn(2, 5, 7, device=DEVICE), torch.randn(72, 7, device=DEVICE)
    _, upstream, tables = given((2, 5, 3, 8), torch.float32)
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
    expected = rotary(torch.nn.functional.linear(*leaves), *tables, 3)
    torch.autograd.backward(expected, [one.double() for one in upstream])
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        mine = [with_strides(x, order).requires_grad_(), weight.clone().requires_grad_()]
        found = joint(*mine, *tables, 3, fused=True)
        torch.autograd.backward(found, upstream)
        for one, other in zip(
            [*found, *(leaf.grad for leaf in mine)], [*expected, *(leaf.grad for leaf in leaves)], strict=True
        ):
            assert (one.double() - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["x", "weight"])
def test_gradients_of_frozen_inputs_are_not_computed(wanted):
    x, weight = torch.randn(2, 5, 7, device=DEVICE), torch.randn(72, 7, device=DEVICE)
    _, upstream, tables = given((2, 5, 3, 8), torch.float32)
    leaves, others = (
        [value.clone().requires_grad_(want) for value, want in zip((x, weight), wanted, strict=True)] for _ in "12"
    )
    torch.autograd.backward(joint(*leaves, *tables, 3, fused=True), upstream)
    torch.autograd.backward(joint(*others, *tables, 3, fused=False), upstream)
    for leaf, other, want in zip(leaves, others, wanted, strict=True):
        assert (leaf.grad - other.grad).norm() <= 1e-6 * other.grad.norm() if want else leaf.grad is None


def test_unused_results_have_zero_gradients():
    qkv, upstream, tables = given((1, 4, 2, 6), torch.float32)
    leaf = qkv.requires_grad_()
    joint(leaf, identity(qkv), *tables, 2, fused=True)[1].backward(upstream[1])
    zeros = torch.zeros_like(upstream[0])
    assert torch.equal(leaf.grad, with_gradients(qkv, [zeros, upstream[1], zeros], tables, 2, fused=True)[1])


def test_positions_come_before_heads_in_memory():
    qkv, _, tables = given((2, 5, 3, 8), torch.float32)
    results = joint(qkv, identity(qkv), *tables, 3, fused=True)
    mixed = scaled_dot_product_attention(*results)
    assert mixed.transpose(1, 2).flatten(-2).data_ptr() == mixed.data_ptr()  # joining the heads copies nothing


def test_fake_implementations():
    """Shapes, dtypes and gradients as torch.compile assumes them (torch.library.opcheck)."""
    qkv, upstream, tables = given((2, 5, 3, 8), torch.float32)
    torch.library.opcheck(_joint, (qkv, identity(qkv), *tables, 3))
    torch.library.opcheck(_backward, (*(one.transpose(1, 2) for one in upstream), *tables))


COMPILED = """
from functools import partial

from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from m2s.models.rotary import angles
from m2s.ops.rotary import joint


def attention(x, weight, cos, sin, fused):
    q, k, v = joint(x, weight, cos, sin, 2, fused)
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


x, weight = torch.randn(2, 5, 16, device=device), torch.randn(48, 16, device=device) / 4
tables = angles(5, 8, torch.device(device))


def gradients(function, fused, dtype):
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = function(*leaves, *tables, fused)
    result.float().square().sum().backward()
    return [result.detach().float(), *(leaf.grad for leaf in leaves)]


def compiled(function):
    return torch.compile(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True, dynamic=False)


# one kernel forward and one backward, and no other operation that copies their tensors
for one, other in zip(*(gradients(f, True, torch.float32) for f in (compiled(attention), attention)), strict=True):
    torch.testing.assert_close(one, other)
forward, backward = graphs
assert forward.count("m2s.joint.default") == 1, forward
assert backward.count("m2s.joint_backward.default") == 1, backward
assert not any(part in name for name in forward + backward for part in ("clone", "copy", "stack", "cat", "add")), graphs

# recomputed for the backward pass, and under autocast (which the interpreter cannot run)
functions = [attention, compiled(attention), compiled(partial(checkpoint, attention, use_reentrant=False))]
if device == "cuda":
    functions.append(torch.compile(attention, fullgraph=True, dynamic=False))
for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.03))[: 2 if device == "cuda" else 1]:
    expected = gradients(attention, False, dtype)
    for function in functions:
        for one, other in zip(gradients(function, True, dtype), expected, strict=True):
            assert (one - other).norm() <= bound * other.norm(), (dtype, function)
"""


def test_compiled_attention():
    passes(COMPILED)
