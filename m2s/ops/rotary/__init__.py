"""Queries, keys and values of an attention layer: the joint product with rotary positions, and its gradient.

In a training step it stands in front of attention. Queries and keys are rotated in place in the result of the product; values
stay as they are. The gradient of a rotation is the rotation by the opposite angle, so one kernel serves both passes. The
backward kernel writes the three gradients into one tensor, the gradient of the product.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from m2s.ops import dense
from m2s.ops.rotary import naive

__all__ = ["joint"]


def joint(
    x: Float[Tensor, "B L E"],
    weight: Float[Tensor, "W E"],
    cos: Float[Tensor, "L D"],
    sin: Float[Tensor, "L D"],
    heads: int,
    fused: bool,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L D"], Float[Tensor, "B H L D"]]:
    """Compute rotated queries, rotated keys and values from x weight^T.

    Args:
        x: Inputs of the attention layer.
        weight: Joint weight of queries, keys and values, W = 3 H D.
        cos: Cosines of the angles, (cos, cos) over the two halves of a head. The kernel reads one half.
        sin: Sines of the angles, (-sin, sin). The kernel reads one half.
        heads: Number of heads H.
        fused: Whether the Triton kernels run.

    Returns:
        Queries, keys and values.
    """
    if not fused:
        return naive.rotary(linear(x, weight), cos, sin, heads)
    q, k, v = _Joint.apply(dense.convert_input(x, weight), weight, cos, sin, heads)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@torch.library.custom_op("m2s::joint", mutates_args=())
def _joint(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Rotated queries, rotated keys and values, [B, L, 3, H, D]; and the weight as it was converted (see `dense.multiply`)."""
    from m2s.ops.rotary import triton

    qkv, converted = dense.multiply(x, weight, None)
    return triton.rotate(qkv, cos, sin, heads), converted


@_joint.register_fake
def _(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    qkv, converted = dense.fake_multiply(x, weight)
    return qkv.unflatten(-1, (3, heads, -1)), converted


@torch.library.custom_op("m2s::joint_backward", mutates_args=())
def _backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the joint product from gradients [B, L, H, D], which may have any strides."""
    from m2s.ops.rotary import triton

    return triton.backward(dq, dk, dv, cos, sin)


@_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, head = dq.shape
    return dq.new_empty(batch, length, 3 * heads * head)


class _Joint(torch.autograd.Function):
    """An autograd.Function with three results.

    The gradient registered for the custom op would be that of one tensor: autograd would first concatenate the three gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, ...]:
        rotated, converted = _joint(x, weight, cos, sin, heads)
        ctx.save_for_backward(x, dense.saved_weight(weight, converted), cos, sin)
        return rotated.unbind(2)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        return *dense.gradients_for_autograd(ctx, _backward(dq, dk, dv, cos, sin), x, weight), None, None, None
