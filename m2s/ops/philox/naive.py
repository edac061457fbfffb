"""Philox4x32-10, and the uniforms of counters (sample, step, site, word)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011): four words of 32 bits, held in int64, for each counter of four words."""
    a, b, c, d = counter
    low_key, high_key = key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # modulo 2^64, so that both halves of the product are right
        a, b, c, d = ((second >> 32) & LOW) ^ b ^ low_key, second & LOW, ((first >> 32) & LOW) ^ d ^ high_key, first & LOW
        low_key, high_key = (low_key + 0x9E3779B9) & LOW, (high_key + 0xBB67AE85) & LOW
    return a, b, c, d


def uniform(high: Tensor, low: Tensor) -> Tensor:
    """53 random bits as a float64 in [0, 1); 24 as a float32 where the device has no float64."""
    if high.device.type == "mps":
        return (high >> 8).to(torch.float32) / (1 << 24)
    return ((high >> 5) * (1 << 26) + (low >> 6)).to(torch.float64) / (1 << 53)


def uniforms(
    samples: Int[Tensor, "B"], step: int | Tensor, first: int, count: int, word: int, key: tuple[int, int]
) -> Float[Tensor, "B L"]:
    """One number in [0, 1) for each sample and each of the sites first, ..., first + count - 1. A tensor of steps is one for
    all, or one for each sample, [B, 1]."""
    sites = torch.arange(first, first + count, device=samples.device).expand(len(samples), -1)
    samples = samples.long().unsqueeze(-1).expand_as(sites)
    step, extra = torch.zeros_like(sites) + step, torch.full_like(sites, word)
    high, low, *_ = philox((samples & LOW, step, sites, extra), key)
    return uniform(high, low)
