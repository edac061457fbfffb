"""The uniforms in one kernel, a program for some sites of one sample. Numbers of the host are arguments of 64 bits that no
kernel is made for: a step or a key that changes compiles nothing and copies nothing.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 128, 4  # sites of a program, one to a thread
# no kernel of its own for a value of these, nor for where they begin in memory
HOST = ["samples", "steps", "row_stride", "site_stride", "step", "first", "count", "word", "low_key", "high_key"]


@no_type_check
@triton.jit
def uniform(sample, step, site, word, low_key, high_key):
    """53 bits of Philox4x32-10 as a float64 in [0, 1); every word is 32 bits in uint64."""
    a, b, c, d = sample, step, site, word
    for _ in tl.static_range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ low_key, second & 0xFFFFFFFF, (first >> 32) ^ d ^ high_key, first & 0xFFFFFFFF
        low_key, high_key = (low_key + 0x9E3779B9) & 0xFFFFFFFF, (high_key + 0xBB67AE85) & 0xFFFFFFFF
    return ((a >> 5) * 67108864 + (b >> 6)).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@no_type_check
@triton.jit(do_not_specialize=HOST)
def _uniforms(
    samples,
    steps,
    result,
    row_stride: tl.int64,
    site_stride: tl.int64,
    step: tl.int64,
    first: tl.int64,
    count: tl.int64,
    word: tl.int64,
    low_key: tl.int64,
    high_key: tl.int64,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.load(samples + row).to(tl.uint64) & 0xFFFFFFFF
    if STEPS:
        moment = tl.load(steps + row * row_stride + at * site_stride, mask=at < count, other=0).to(tl.uint64)
    else:
        moment = step.to(tl.uint64)
    low, high = low_key.to(tl.uint64), high_key.to(tl.uint64)
    u = uniform(sample, moment, (first + at).to(tl.uint64), word.to(tl.uint64), low, high)
    tl.store(result + row * count + at, u, mask=at < count)


def uniforms(
    samples: Tensor,
    steps: Tensor | None,
    step: int,
    first: int,
    count: int,
    word: int,
    low_key: int,
    high_key: int,
    block: int = BLOCK,
    warps: int = WARPS,
) -> Tensor:
    """`reference.uniforms`, with `steps` where they are a tensor, else with `step`."""
    result = samples.new_empty((len(samples), count), dtype=torch.float64)
    if not result.numel():
        return result
    given = (samples[:1] if steps is None else steps.to(samples.device)).expand(result.shape)
    _uniforms[(len(samples), triton.cdiv(count, block))](
        samples.contiguous(),
        given,
        result,
        *given.stride(),
        step,
        first,
        count,
        word,
        low_key,
        high_key,
        STEPS=steps is not None,
        BLOCK=block,
        num_warps=warps,
    )
    return result
