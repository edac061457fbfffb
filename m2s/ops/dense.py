"""A linear layer inside the network for mixed-precision training.

In a training step this replaces `torch.nn.functional.linear` in every block. Autocast converts the weight to bf16 in the
forward pass; torch.compile would rather convert it again in the backward pass than store it, and the gradient of the
converted weight is rounded to bf16. Here the weight is converted once per forward pass, and the gradient of the weight is
accumulated and returned in float32.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from m2s.ops.derivatives import first_derivative_only
from m2s.ops.last_layer import matmul_float32

__all__ = ["convert_input", "dense", "fake_multiply", "gradients", "gradients_for_autograd", "multiply", "saved_weight"]

HALF = (torch.bfloat16, torch.float16)


def dense(
    x: Float[Tensor, "*rows D"],
    weight: Float[Tensor, "W D"],
    bias: Float[Tensor, "W"] | None,
    fused: bool,
) -> Float[Tensor, "*rows W"]:
    """Compute x weight^T + bias.

    Args:
        x: Inputs.
        weight: Weight in float32 (or float64).
        bias: Bias, or None.
        fused: Whether the operation of this module runs; otherwise torch's.

    Returns:
        The outputs, in the dtype of autocast.
    """
    if not fused:
        return linear(x, weight, bias)
    return _dense(convert_input(x, weight), weight, bias)[0]


def convert_input(x: Tensor, weight: Tensor) -> Tensor:
    """Convert x to the dtype of autocast.

    Args:
        x: Inputs.
        weight: Weight in float32 or float64.

    Returns:
        x in the dtype of the product.
    """
    device = weight.device.type
    converts = torch.is_autocast_enabled(device) and weight.dtype == torch.float32  # autocast leaves float64 alone
    dtype = torch.get_autocast_dtype(device) if converts else weight.dtype
    return x.to(dtype)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute x weight^T + bias in the dtype of x.

    Args:
        x: Inputs `[*rows, D]`.
        weight: Weight `[W, D]`.
        bias: Bias `[W]`, or None.

    Returns:
        The product, and the weight as it was converted for it; the latter is empty if no conversion was necessary.
    """
    converted = weight.new_empty(0) if weight.dtype == x.dtype else weight.to(x.dtype)
    operand = saved_weight(weight, converted)
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype in HALF and not x.is_cuda:  # a CPU would accumulate in half precision
            result = matmul_float32(x.reshape(-1, x.shape[-1]), operand.t()).reshape(*x.shape[:-1], len(operand))
            return (result if bias is None else result + bias).to(x.dtype), converted
        return linear(x, operand, None if bias is None else bias.to(x.dtype)), converted


def saved_weight(weight: Tensor, converted: Tensor) -> Tensor:
    """Return the weight that was multiplied, for the backward pass.

    Args:
        weight: The weight.
        converted: The second result of `multiply`.

    Returns:
        One of the two, in the dtype of the product.
    """
    return converted if converted.numel() else weight


@torch.library.custom_op("m2s::dense", mutates_args=())
def _dense(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return multiply(x, weight, bias)


def fake_multiply(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors like the results of `multiply`, for torch.compile.

    Args:
        x: Inputs.
        weight: Weight.

    Returns:
        Tensors with the shapes and dtypes of the results.
    """
    converted = weight.new_empty(0 if weight.dtype == x.dtype else weight.shape, dtype=x.dtype)
    return x.new_empty(*x.shape[:-1], weight.shape[0]), converted


@_dense.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return fake_multiply(x, weight)


@torch.library.custom_op("m2s::dense_backward", mutates_args=())
def gradients(upstream: Tensor, x: Tensor, weight: Tensor, wants_x: bool, wants_weight: bool) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x weight^T.

    Args:
        upstream: Gradient of the product `[*rows, W]`.
        x: Inputs `[*rows, D]`.
        weight: The weight that was multiplied `[W, D]`.
        wants_x: Whether the gradient of x is needed.
        wants_weight: Whether the gradient of the weight is needed.

    Returns:
        The gradient of x in its dtype, and of the weight in float32 or float64; empty where not needed.
    """
    upstream, rows = upstream.reshape(-1, upstream.shape[-1]), x.reshape(-1, x.shape[-1])
    half, x_gradient = upstream.dtype in HALF, x.new_empty(0)
    weight_gradient = weight.new_empty(0, dtype=_gradient_dtype(weight))
    with torch.autocast(x.device.type, enabled=False):
        if wants_x:
            on_cpu = half and not upstream.is_cuda
            x_gradient = matmul_float32(upstream, weight).to(x.dtype) if on_cpu else upstream @ weight
            x_gradient = x_gradient.reshape(x.shape)
        if wants_weight:
            weight_gradient = matmul_float32(upstream.t(), rows) if half else upstream.t() @ rows
    return x_gradient, weight_gradient


def _gradient_dtype(weight: Tensor) -> torch.dtype:
    """float32 for half-precision weights, else their dtype."""
    return torch.float32 if weight.dtype in HALF else weight.dtype


@gradients.register_fake
def _(upstream: Tensor, x: Tensor, weight: Tensor, wants_x: bool, wants_weight: bool) -> tuple[Tensor, Tensor]:
    shape = weight.shape if wants_weight else 0
    return x.new_empty(x.shape if wants_x else 0), weight.new_empty(shape, dtype=_gradient_dtype(weight))


def gradients_for_autograd(ctx: Any, upstream: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients that autograd asks for, for an operation whose first two inputs are x and the weight.

    Args:
        ctx: Context of the backward pass.
        upstream: Gradient of the product.
        x: Inputs.
        weight: The weight that was multiplied.

    Returns:
        Gradients of x and the weight; None where not needed.
    """
    first_derivative_only("the linear layer for mixed precision")
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    if not (wants_x or wants_weight):
        return None, None
    x_gradient, weight_gradient = gradients(upstream, x, weight, wants_x, wants_weight)
    return x_gradient if wants_x else None, weight_gradient if wants_weight else None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, saved_weight(weight, output[1]))
    ctx.bias_dtype = bias if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return None, None, None
    wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
    rows = upstream.reshape(-1, upstream.shape[-1])
    wide = torch.promote_types(ctx.bias_dtype, torch.float32) if wants_bias else None
    bias_gradient = rows.sum(0, dtype=wide).to(ctx.bias_dtype) if wants_bias else None
    return *gradients_for_autograd(ctx, upstream, *ctx.saved_tensors), bias_gradient


_dense.register_autograd(_backward, setup_context=_setup)
