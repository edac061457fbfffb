"""A layer inside the network: its weight is narrowed once for both passes, and its gradient is added up and left in float32.

Autocast narrows the weight, and a compiler does so again in the backward pass rather than keep it; the gradient of what was
narrowed is rounded on its way to the weight. Here neither happens.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from m2s.ops.last_layer import matmul_float32

__all__ = ["dense", "for_autograd", "gradients", "kept", "multiplied", "operands", "shapes"]

HALF = (torch.bfloat16, torch.float16)


def dense(
    x: Float[Tensor, "*rows D"],
    weight: Float[Tensor, "W D"],
    bias: Float[Tensor, "W"] | None,
    fused: bool,
    narrow: Float[Tensor, "W D"] | None = None,
) -> Float[Tensor, "*rows W"]:
    """x weight^T + bias. `narrow` is the weight in fewer bits, where somebody keeps it so."""
    if not fused:
        return linear(x, weight, bias)
    x, narrow = operands(x, weight, narrow)
    return _dense(x, weight, narrow, bias)[0]


def operands(x: Tensor, weight: Tensor, narrow: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The factors of a product: x in the dtype that autocast wants, and the narrow weight if it has that dtype."""
    kind = weight.device.type
    narrows = torch.is_autocast_enabled(kind) and weight.dtype == torch.float32
    dtype = torch.get_autocast_dtype(kind) if narrows else weight.dtype
    return x.to(dtype), narrow if narrow is not None and narrow.dtype == dtype else None


def multiplied(x: Tensor, weight: Tensor, narrow: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x weight^T + bias in the dtype of x; and the weight in it, empty if there was one."""
    made = weight.new_empty(0) if _is_there(x, weight, narrow) else weight.to(x.dtype)
    factor = kept(weight, narrow, made)
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype in HALF and not x.is_cuda:
            result = matmul_float32(x.reshape(-1, x.shape[-1]), factor.t()).reshape(*x.shape[:-1], len(factor))
            return (result if bias is None else result + bias).to(x.dtype), made
        return linear(x, factor, None if bias is None else bias.to(x.dtype)), made


def _is_there(x: Tensor, weight: Tensor, narrow: Tensor | None) -> bool:
    return narrow is not None or weight.dtype == x.dtype


def kept(weight: Tensor, narrow: Tensor | None, made: Tensor) -> Tensor:
    """What the backward pass multiplies by."""
    return made if made.numel() else weight if narrow is None else narrow


@torch.library.custom_op("m2s::dense", mutates_args=())
def _dense(x: Tensor, weight: Tensor, narrow: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return multiplied(x, weight, narrow, bias)


def shapes(x: Tensor, weight: Tensor, narrow: Tensor | None) -> tuple[Tensor, Tensor]:
    """What `multiplied` gives, as a compiler is told."""
    made = weight.new_empty(0) if _is_there(x, weight, narrow) else weight.new_empty(weight.shape, dtype=x.dtype)
    return x.new_empty(*x.shape[:-1], weight.shape[0]), made


@_dense.register_fake
def _(x: Tensor, weight: Tensor, narrow: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return shapes(x, weight, narrow)


@torch.library.custom_op("m2s::dense_backward", mutates_args=())
def gradients(above: Tensor, x: Tensor, weight: Tensor, at_x: bool, at_weight: bool) -> tuple[Tensor, Tensor]:
    """Of x, in its dtype, and of the weight, in float32 at least; empty where it is not wanted."""
    above, rows = above.reshape(-1, above.shape[-1]), x.reshape(-1, x.shape[-1])
    half, first, second = above.dtype in HALF, x.new_empty(0), weight.new_empty(0, dtype=_wide(weight))
    with torch.autocast(x.device.type, enabled=False):
        if at_x:
            first = matmul_float32(above, weight).to(x.dtype) if half and not above.is_cuda else above @ weight
            first = first.reshape(x.shape)
        if at_weight:
            second = matmul_float32(above.t(), rows) if half else above.t() @ rows
    return first, second


def _wide(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.dtype in HALF else weight.dtype


@gradients.register_fake
def _(above: Tensor, x: Tensor, weight: Tensor, at_x: bool, at_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if at_x else 0), weight.new_empty(weight.shape if at_weight else 0, dtype=_wide(weight))


def for_autograd(ctx: Any, above: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """`gradients` of an operation whose first inputs are x and the weight, as autograd wants them."""
    at_x, at_weight = ctx.needs_input_grad[:2]
    if not (at_x or at_weight):
        return None, None
    first, second = gradients(above, x, weight, at_x, at_weight)
    return first if at_x else None, second if at_weight else None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, narrow, bias = inputs
    ctx.save_for_backward(x, kept(weight, narrow, output[1]))
    ctx.bias = bias if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, above: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if above is None:
        return None, None, None, None
    wanted = ctx.bias is not None and ctx.needs_input_grad[3]
    rows = above.reshape(-1, above.shape[-1])
    at_bias = rows.sum(0, dtype=torch.promote_types(ctx.bias, torch.float32)).to(ctx.bias) if wanted else None
    return *for_autograd(ctx, above, *ctx.saved_tensors), None, at_bias


_dense.register_autograd(_gradients, setup_context=_setup)
