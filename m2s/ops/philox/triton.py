"""Counter-based uniform numbers as a Triton kernel: each program computes some positions of one sample.

Numbers from the host are 64-bit arguments that the kernel is not specialized for. So a step or a key that changes compiles
nothing and copies nothing to the device.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 128, 4  # positions per program, one per thread
# Triton would compile another kernel for some values (1, multiples of 16, above 31 bits) and alignments of these arguments
NOT_SPECIALIZED = ["samples", "steps", "row_stride", "site_stride", "step", "first", "count", "word", "low_key", "high_key"]


@no_type_check
@triton.jit
def uniform(sample, step, site, word, low_key, high_key):
    """Philox4x32-10 of a counter as a number in [0, 1) with 53 bits, in float64.

    Args:
        sample: First word of the counter; every word is 32 bits in uint64.
        step: Second word.
        site: Third word, the position.
        word: Fourth word, the purpose.
        low_key: First word of the seed.
        high_key: Second word of the seed.
    """
    a, b, c, d = sample, step, site, word
    for _ in tl.static_range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ low_key, second & 0xFFFFFFFF, (first >> 32) ^ d ^ high_key, first & 0xFFFFFFFF
        low_key, high_key = (low_key + 0x9E3779B9) & 0xFFFFFFFF, (high_key + 0xBB67AE85) & 0xFFFFFFFF
    return ((a >> 5) * 67108864 + (b >> 6)).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@no_type_check
@triton.jit(do_not_specialize=NOT_SPECIALIZED)
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
    """The numbers of BLOCK positions of one sample."""
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
    """Run `naive.uniforms` as a kernel.

    Args:
        samples: Numbers of the samples `[B]`.
        steps: Numbers of the steps on the device, [] or `[B, 1]`, or None.
        step: Number of the step, where `steps` is None.
        first: The first position.
        count: Number of positions L.
        word: Last word of the counter.
        low_key: First word of the seed.
        high_key: Second word of the seed.
        block: Positions per program.
        warps: Warps per program.

    Returns:
        Numbers in [0, 1) in float64, `[B, L]`.
    """
    result = samples.new_empty((len(samples), count), dtype=torch.float64)
    if not result.numel():
        return result
    step_table = (samples[:1] if steps is None else steps.to(samples.device)).expand(result.shape)
    _uniforms[(len(samples), triton.cdiv(count, block))](
        samples.contiguous(),
        step_table,
        result,
        *step_table.stride(),
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
