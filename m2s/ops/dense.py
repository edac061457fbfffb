"""A layer inside the network: its weight is narrowed once for both passes, and its gradient is added up and left in float32.

Autocast narrows the weight, and a compiler does so again in the backward pass rather than keep it; the gradient of what was
narrowed is rounded on its way to the weight. Here neither happens.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from m2s.belief.output import product

__all__ = ["dense", "gradients", "kept", "multiplied", "operands", "shapes"]


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
        if x.dtype == torch.bfloat16 and not x.is_cuda:
            result = product(x.flatten(0, -2), factor.t()).unflatten(0, x.shape[:-1])
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
def gradients(above: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of x, in its dtype, and of the weight, in float32 at least."""
    above, rows = above.flatten(0, -2), x.flatten(0, -2)
    with torch.autocast(x.device.type, enabled=False):
        if above.dtype != torch.bfloat16:
            return (above @ weight).reshape(x.shape), above.t() @ rows
        at_x = above @ weight if above.is_cuda else product(above, weight).to(x.dtype)
        return at_x.reshape(x.shape), product(above.t(), rows)


@gradients.register_fake
def _(above: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if weight.dtype == torch.bfloat16 else weight.dtype
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=wide)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, narrow, bias = inputs
    ctx.save_for_backward(x, kept(weight, narrow, output[1]))
    ctx.bias = bias if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, above: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if above is None:
        return None, None, None, None
    wanted = ctx.bias is not None and ctx.needs_input_grad[3]
    at_bias = above.flatten(0, -2).sum(0, dtype=torch.promote_types(ctx.bias, torch.float32)).to(ctx.bias) if wanted else None
    return *gradients(above, *ctx.saved_tensors), None, at_bias


_dense.register_autograd(_gradients, setup_context=_setup)
