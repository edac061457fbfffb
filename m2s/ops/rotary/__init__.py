"""Rotary positions in one pass from the joint product of an attention layer to queries, keys and values, and in one pass back.

The gradient of a turn is the turn by the opposite angle, so that one kernel works both ways. Values are copied: then the three
gradients meet in one place, written once, and the joint product need not be kept.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from m2s.ops.rotary import reference

__all__ = ["rotary"]


def rotary(
    qkv: Float[Tensor, "B L W"], cos: Float[Tensor, "L D"], sin: Float[Tensor, "L D"], heads: int, fused: bool
) -> tuple[Float[Tensor, "B H L D"], Float[Tensor, "B H L D"], Float[Tensor, "B H L D"]]:
    """`reference.rotary`; a fused one takes the tables for (cos, cos) and (-sin, sin) and reads one half of each."""
    if not fused:
        return reference.rotary(qkv, cos, sin, heads)
    q, k, v = _rotary(qkv, cos, sin, heads)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@torch.library.custom_op("m2s::rotary", mutates_args=())
def _rotary(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Turned queries, turned keys, values: [B, L, H, D] each."""
    from m2s.ops.rotary import triton

    return triton.forward(qkv, cos, sin, heads)


@_rotary.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, width = qkv.shape
    q = qkv.new_empty(batch, length, heads, width // (3 * heads))
    return q, torch.empty_like(q), torch.empty_like(q)


@torch.library.custom_op("m2s::rotary_backward", mutates_args=())
def _backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the joint product, of gradients [B, L, H, D] that may lie in memory in any order."""
    from m2s.ops.rotary import triton

    return triton.backward(dq, dk, dv, cos, sin)


@_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, head = dq.shape
    return dq.new_empty(batch, length, 3 * heads * head)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, cos, sin, _ = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:
    return _backward(dq, dk, dv, *ctx.saved_tensors), None, None, None


_rotary.register_autograd(_gradients, setup_context=_setup)
