"""Definition of counter-based uniform numbers: Philox4x32-10 of (sample, step, position, word)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10 (Salmon et al. 2011).

    Args:
        counter: Four words of 32 bits, in int64 tensors of one shape.
        key: Two words of 32 bits.

    Returns:
        Four random words of 32 bits for each counter, in int64.
    """
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # int64 wraps modulo 2^64: all bits are exact
        a, b, c, d = ((second >> 32) & LOW) ^ b ^ low_key, second & LOW, ((first >> 32) & LOW) ^ d ^ high_key, first & LOW
        low_key, high_key = (low_key + 0x9E3779B9) & LOW, (high_key + 0xBB67AE85) & LOW
    return a, b, c, d


def uniform(high: Tensor, low: Tensor) -> Tensor:
    """Convert two random words to a number in [0, 1).

    Args:
        high: Words of 32 bits.
        low: Words of 32 bits.

    Returns:
        53 random bits as float64, or 24 bits as float32 on devices without float64.
    """
    if high.device.type == "mps":
        return (high >> 8).to(torch.float32) / (1 << 24)
    return ((high >> 5) * (1 << 26) + (low >> 6)).to(torch.float64) / (1 << 53)


def uniforms(
    samples: Int[Tensor, "B"], step: int | Tensor, first: int, count: int, word: int, key: tuple[int, int]
) -> Float[Tensor, "B L"]:
    """Return one number in [0, 1) per sample and position, [B, count].

    Args:
        samples, step, first, count, word, key: As in `m2s.ops.philox.uniforms`.
    """
    sites = torch.arange(first, first + count, device=samples.device).expand(len(samples), -1)
    samples = samples.long().unsqueeze(-1).expand_as(sites)
    step, extra = torch.zeros_like(sites) + step, torch.full_like(sites, word)
    high, low, *_ = philox((samples & LOW, step, sites, extra), key)
    return uniform(high, low)
