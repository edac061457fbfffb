"""From what attention reads to queries, keys and values: the joint product, with rotary positions turned in where it lies, and
one pass back.

The gradient of a turn is the turn by the opposite angle, so that one kernel works both ways. Forth, the values stay as they
are. Back, the three gradients meet in one place, written once.
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
    narrow: Float[Tensor, "W E"] | None = None,
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L D"], Float[Tensor, "B H L D"]]:
    """`reference.rotary` of x weight^T. A fused one takes the tables for (cos, cos) and (-sin, sin): it reads half of each."""
    if not fused:
        return naive.rotary(linear(x, weight), cos, sin, heads)
    x, narrow = dense.operands(x, weight, narrow)
    q, k, v = _Joint.apply(x, weight, narrow, cos, sin, heads)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@torch.library.custom_op("m2s::joint", mutates_args=())
def _joint(x: Tensor, weight: Tensor, narrow: Tensor | None, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Turned queries, turned keys, values, [B, L, 3, H, D]; and the weight in the dtype of x, empty if there was one."""
    from m2s.ops.rotary import triton

    qkv, made = dense.multiplied(x, weight, narrow, None)
    return triton.turn(qkv, cos, sin, heads), made


@_joint.register_fake
def _(x: Tensor, weight: Tensor, narrow: Tensor | None, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    qkv, made = dense.shapes(x, weight, narrow)
    return qkv.unflatten(-1, (3, heads, -1)), made


@torch.library.custom_op("m2s::joint_backward", mutates_args=())
def _backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the joint product, of gradients [B, L, H, D] that may lie in memory in any order."""
    from m2s.ops.rotary import triton

    return triton.backward(dq, dk, dv, cos, sin)


@_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, head = dq.shape
    return dq.new_empty(batch, length, 3 * heads * head)


class _Joint(torch.autograd.Function):
    """Not the operation's own gradient: the three results are one tensor to it, whose gradient would be joined first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, narrow: Tensor | None, cos: Tensor, sin: Tensor, heads: int
    ) -> tuple[Tensor, ...]:
        turned, made = _joint(x, weight, narrow, cos, sin, heads)
        ctx.save_for_backward(x, dense.kept(weight, narrow, made), cos, sin)
        return turned.unbind(2)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        return *dense.for_autograd(ctx, _backward(dq, dk, dv, cos, sin), x, weight), None, None, None, None
