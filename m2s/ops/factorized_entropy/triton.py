"""Score entropy of an exit rate and a jump distribution, and its gradient, as a Triton kernel: one program per row, two passes.

`cpu.py` has the mathematics. The first pass computes the normalizing sum of the jump distribution. The second one is that of
`m2s.ops.score_entropy.triton`, with J in place of s and J* in place of r. The entries at k, at the clean token x and at the
mask are taken out of the row for the duration of the passes. So the sum of the other weights is exact where one of them is
almost certain. Their terms are computed in float64.
"""

import functools
from typing import no_type_check

import triton
import triton.language as tl

from m2s.ops.row_kernels import LN2, LOG2E, LOWEST, TILE, launch, prepare, sum_of_weights
from m2s.ops.score_entropy.triton import entropy_of_columns, split


@no_type_check
@triton.jit
def _candidate(log_jump, log_wanted):
    """h(J, J*) = J - J* - J* (log J - log J*) and J - J* of one candidate in float64; J for both where J* = 0."""
    compared = log_wanted > -float("inf")
    log_wanted = tl.where(compared, log_wanted, 0.0)
    wanted = tl.where(compared, tl.exp(log_wanted), 0.0)
    difference = tl.exp(log_jump) - wanted
    return difference - tl.where(compared, wanted * (log_jump - log_wanted), 0.0), difference


@no_type_check
@triton.jit
def _factorized_entropy(
    logits,
    gradient,
    loss,
    current,
    clean_token,
    weight,
    row_scalars,
    row_scalars_stride,
    stride,
    gradient_stride,
    columns,
    vocab,
    MASK: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss and gradient of one row. Its five scalars are those of `row_scalars` in cpu.py."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    gradient += row * gradient_stride
    row_scalars += row * row_scalars_stride
    k, x = tl.load(current + row), tl.load(clean_token + row)
    exit_rate = tl.load(row_scalars + 3)
    scale = tl.where(exit_rate > 0, exit_rate * tl.load(weight + row), 0.0)
    value_k, value_x = tl.load(logits + k), tl.load(logits + x)
    value_mask = tl.load(logits + vocab) if MASK else value_k
    tl.debug_barrier()  # all threads must have read the values before they are overwritten
    tl.store(logits + k, LOWEST)
    tl.store(logits + x, LOWEST)
    tl.debug_barrier()
    top_rest, sum_rest = sum_of_weights(logits, vocab, vocab // (TILE * BLOCK) * (TILE * BLOCK), BLOCK)

    # the sum over all candidates in float64, with logarithms to the base 2
    top = tl.where(k == x, top_rest, tl.maximum(top_rest, value_x * LOG2E))
    if MASK:
        top = tl.where(k == vocab, top, tl.maximum(top, value_mask * LOG2E))
    top = top.to(tl.float64)
    log_x = value_x.to(tl.float64) * LOG2E - top
    log_mask = value_mask.to(tl.float64) * LOG2E - top
    total = sum_rest * tl.exp2(top_rest.to(tl.float64) - top) + tl.where(k == x, 0.0, tl.exp2(log_x))
    if MASK:
        total += tl.where(k == vocab, 0.0, tl.exp2(log_mask))
    log_total = tl.log(total)

    high, low, jump, compared = split(tl.load(row_scalars), top * LN2 + log_total)
    zero_loss = tl.where(compared > 0, high, LOWEST)  # log J equal to log J*, or J = 0 where J* = 0
    tl.debug_barrier()
    tl.store(logits + k, zero_loss)
    tl.store(logits + x, zero_loss)
    if MASK:
        tl.store(logits + vocab, zero_loss)
    tl.debug_barrier()
    states = vocab
    if MASK:
        states += 1
    sum_h = entropy_of_columns(
        logits,
        gradient,
        columns,
        vocab,
        states,
        high,
        low,
        jump,
        compared,
        scale.to(tl.float32),
        GRADIENT=GRADIENT,
        BLOCK=BLOCK,
    )

    # the clean token, the mask and the exit rate
    entropy, slope_x = _candidate(log_x * LN2 - log_total, tl.load(row_scalars + 1))
    sum_h += tl.where(k == x, 0.0, entropy)
    slope_mask = slope_x
    if MASK:
        entropy, slope_mask = _candidate(log_mask * LN2 - log_total, tl.load(row_scalars + 2))
        sum_h += tl.where(k == vocab, 0.0, entropy)
    d_exit = value_k.to(tl.float64) - tl.load(row_scalars + 4)
    slope_k = tl.exp(d_exit) - 1
    sum_h += slope_k - d_exit
    tl.store(loss + row, tl.where(exit_rate > 0, exit_rate * sum_h, 0.0))
    tl.debug_barrier()
    if GRADIENT:
        at_x = tl.where(scale == 0, 0.0, scale * slope_x).to(tl.float32)
        at_k = tl.where(scale == 0, 0.0, scale * slope_k).to(tl.float32)
        tl.store(gradient + x, at_x.to(gradient.dtype.element_ty))
        if MASK:
            at_mask = tl.where(scale == 0, 0.0, scale * slope_mask).to(tl.float32)
            tl.store(gradient + vocab, at_mask.to(gradient.dtype.element_ty))
        tl.debug_barrier()
        tl.store(gradient + k, at_k.to(gradient.dtype.element_ty))
    else:
        tl.store(logits + x, value_x)
        if MASK:
            tl.store(logits + vocab, value_mask)
        tl.store(logits + k, value_k)


__all__ = ["prepare", "row_losses"]
row_losses = functools.partial(launch, _factorized_entropy, 512, 4)
