"""Rotary positions as a Triton kernel: each program works on some heads of some positions of one example.

A thread has the same columns of both halves of a head, in q, k and v. So it can write its results where it read its inputs, the
cosines and sines serve both q and k, and all its loads are issued at once.
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor


@no_type_check
@triton.jit
def _rotate(
    q,
    k,
    v,
    cos,
    sin,
    new_q,
    new_k,
    new_v,
    length,
    q_example,
    q_position,
    q_head,
    k_example,
    k_position,
    k_head,
    v_example,
    v_position,
    v_head,
    new_position,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate ROWS (position, head) pairs; BACKWARD rotates back and copies the gradient of v too."""
    programs = tl.cdiv(length * HEADS, ROWS)  # per example
    example = (tl.program_id(0) // programs).to(tl.int64)
    row = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < length * HEADS) & (column < HALF)
    position, head = (row // HEADS).to(tl.int64), row % HEADS
    c = tl.load(cos + position * (2 * HALF) + column, mask=inside, other=0.0)
    s = tl.load(sin + position * (2 * HALF) + HALF + column, mask=inside, other=0.0)
    q += example * q_example + position * q_position + head.to(tl.int64) * q_head + column
    k += example * k_example + position * k_position + head.to(tl.int64) * k_head + column
    q_low, q_high = tl.load(q, mask=inside, other=0.0), tl.load(q + HALF, mask=inside, other=0.0)
    k_low, k_high = tl.load(k, mask=inside, other=0.0), tl.load(k + HALF, mask=inside, other=0.0)
    if BACKWARD:
        s = -s
        v += example * v_example + position * v_position + head.to(tl.int64) * v_head + column
        v_low, v_high = tl.load(v, mask=inside, other=0.0), tl.load(v + HALF, mask=inside, other=0.0)
    at = (example * length + position) * new_position + head * (2 * HALF) + column
    tl.store(new_q + at, (q_low * c - q_high * s).to(new_q.dtype.element_ty), mask=inside)
    tl.store(new_q + at + HALF, (q_high * c + q_low * s).to(new_q.dtype.element_ty), mask=inside)
    tl.store(new_k + at, (k_low * c - k_high * s).to(new_k.dtype.element_ty), mask=inside)
    tl.store(new_k + at + HALF, (k_high * c + k_low * s).to(new_k.dtype.element_ty), mask=inside)
    if BACKWARD:
        tl.store(new_v + at, v_low, mask=inside)
        tl.store(new_v + at + HALF, v_high, mask=inside)


def _launch(
    parts: list[Tensor], cos: Tensor, sin: Tensor, results: list[Tensor], backward: bool, block: int = 1024, warps: int = 4
) -> None:
    """Rotate q, k, v [B, L, H, D] into results of equal strides: heads contiguous, positions some stride apart.

    In the forward pass the results are the inputs themselves.
    """
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    batch, length, heads, head = parts[0].shape
    columns = triton.next_power_of_2(head // 2)
    rows = max(1, block // columns)
    _rotate[(batch * triton.cdiv(length * heads, rows),)](
        *parts,
        cos.contiguous(),
        sin.contiguous(),
        *results,
        length,
        *(stride for part in parts for stride in part.stride()[:3]),
        results[0].stride(1),
        HEADS=heads,
        HALF=head // 2,
        BACKWARD=backward,
        ROWS=rows,
        BLOCK=columns,
        num_warps=warps,
    )


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotate queries and keys in place.

    Args:
        qkv: Joint product `[B, L, 3 H D]`, contiguous; overwritten.
        cos: (cos, cos) of the angles `[L, D]`.
        sin: (-sin, sin) of the angles `[L, D]`.
        heads: Number of heads H.

    Returns:
        `qkv` as `[B, L, 3, H, D]`.
    """
    rotated = qkv.unflatten(-1, (3, heads, -1))
    parts = list(rotated.unbind(2))
    _launch(parts, cos, sin, parts, backward=False)
    return rotated


def backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the gradient of the joint product.

    Args:
        dq: Gradient of the queries `[B, L, H, D]`, with any strides.
        dk: Gradient of the keys, likewise.
        dv: Gradient of the values, likewise.
        cos: (cos, cos) of the angles `[L, D]`.
        sin: (-sin, sin) of the angles `[L, D]`.

    Returns:
        The gradient `[B, L, 3 H D]`.
    """
    batch, length, heads, head = dq.shape
    gradient = dq.new_empty(batch, length, 3, heads, head)
    _launch([dq, dk, dv], cos, sin, list(gradient.unbind(2)), backward=True)
    return gradient.flatten(2)
