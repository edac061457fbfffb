"""Heads of sites, some of one sample to a program; a thread has the same columns of both halves of a head, in q, k and v.

So what it turns is all its own and can be written where it was read, the cosines and sines serve q and k, and all its loads are
under way at once.
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor


@no_type_check
@triton.jit
def _turn(
    q,
    k,
    v,
    cos,
    sin,
    new_q,
    new_k,
    new_v,
    length,
    q_sample,
    q_site,
    q_head,
    k_sample,
    k_site,
    k_head,
    v_sample,
    v_site,
    v_head,
    new_site,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    programs = tl.cdiv(length * HEADS, ROWS)  # of a sample
    sample = (tl.program_id(0) // programs).to(tl.int64)
    row = tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < length * HEADS) & (column < HALF)
    site, head = (row // HEADS).to(tl.int64), row % HEADS
    c = tl.load(cos + site * (2 * HALF) + column, mask=inside, other=0.0)
    s = tl.load(sin + site * (2 * HALF) + HALF + column, mask=inside, other=0.0)
    q += sample * q_sample + site * q_site + head.to(tl.int64) * q_head + column
    k += sample * k_sample + site * k_site + head.to(tl.int64) * k_head + column
    q_low, q_high = tl.load(q, mask=inside, other=0.0), tl.load(q + HALF, mask=inside, other=0.0)
    k_low, k_high = tl.load(k, mask=inside, other=0.0), tl.load(k + HALF, mask=inside, other=0.0)
    if BACK:
        s = -s
        v += sample * v_sample + site * v_site + head.to(tl.int64) * v_head + column
        v_low, v_high = tl.load(v, mask=inside, other=0.0), tl.load(v + HALF, mask=inside, other=0.0)
    at = (sample * length + site) * new_site + head * (2 * HALF) + column
    tl.store(new_q + at, (q_low * c - q_high * s).to(new_q.dtype.element_ty), mask=inside)
    tl.store(new_q + at + HALF, (q_high * c + q_low * s).to(new_q.dtype.element_ty), mask=inside)
    tl.store(new_k + at, (k_low * c - k_high * s).to(new_k.dtype.element_ty), mask=inside)
    tl.store(new_k + at + HALF, (k_high * c + k_low * s).to(new_k.dtype.element_ty), mask=inside)
    if BACK:
        tl.store(new_v + at, v_low, mask=inside)
        tl.store(new_v + at + HALF, v_high, mask=inside)


def _launch(
    parts: list[Tensor], cos: Tensor, sin: Tensor, results: list[Tensor], back: bool, block: int = 1024, warps: int = 4
) -> None:
    """q, k, v [B, L, H, D] into results that are alike in memory: heads side by side, and sites some way apart. Back, that is:
    forth, q and k are turned where they lie."""
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in parts]
    batch, length, heads, head = parts[0].shape
    columns = triton.next_power_of_2(head // 2)
    rows = max(1, block // columns)
    _turn[(batch * triton.cdiv(length * heads, rows),)](
        *parts,
        cos.contiguous(),
        sin.contiguous(),
        *results,
        length,
        *(stride for part in parts for stride in part.stride()[:3]),
        results[0].stride(1),
        HEADS=heads,
        HALF=head // 2,
        BACK=back,
        ROWS=rows,
        BLOCK=columns,
        num_warps=warps,
    )


def turn(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """qkv [B, L, 3 H D], contiguous, with queries and keys turned in place: [B, L, 3, H, D]."""
    turned = qkv.unflatten(-1, (3, heads, -1))
    parts = list(turned.unbind(2))
    _launch(parts, cos, sin, parts, back=False)
    return turned


def backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the joint product, [B, L, 3 H D]."""
    batch, length, heads, head = dq.shape
    gradient = dq.new_empty(batch, length, 3, heads, head)
    _launch([dq, dk, dv], cos, sin, list(gradient.unbind(2)), back=True)
    return gradient.flatten(2)
