"""Randomness by counter: every number is a pure function of (seed, sample, step, site, purpose).

So a sample does not depend on the batch it was drawn in, on the process that drew it or on a restart, and two models can be
run on the same noise. The bits agree on every device.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.draw import Counter

LOW = 0xFFFFFFFF
PURPOSES = ("start", "route", "token", "jump", "order", "site", "time", "last")


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


class Noise:
    """The uniforms of one step of some samples: one for each (sample, site, purpose), or one for each (sample, purpose)."""

    def __init__(self, seed: int, samples: Int[Tensor, "B"], length: int, step: int | Tensor, window: int = 0) -> None:
        self.key = (seed & LOW, (seed >> 32) & LOW)
        self.samples, self.length, self.step, self.window = samples, length, step, window

    def __call__(self, purpose: str | int) -> Float[Tensor, "B L"]:
        """One number in [0, 1) for each site. A sampler of your own may number its purposes from 0 to 9,999."""
        sites = torch.arange(self.length, device=self.samples.device)
        return self._draw(sites.expand(len(self.samples), -1), purpose)

    def once(self, purpose: str | int) -> Float[Tensor, "B"]:
        """One number in [0, 1) for each sample."""
        sites = torch.full_like(self.samples, LOW).unsqueeze(-1)
        return self._draw(sites, purpose).squeeze(-1)

    def counter(self, *purposes: str | int) -> Counter | None:
        """Of what all these numbers are a function, where samples share the step."""
        if isinstance(self.step, Tensor):
            return None
        return Counter(self.samples, self.length, self.key, self.step, tuple(map(self._word, purposes)))

    def _word(self, purpose: str | int) -> int:
        number = 10_000 + PURPOSES.index(purpose) if isinstance(purpose, str) else purpose
        return number | self.window << 16

    def _draw(self, sites: Tensor, purpose: str | int) -> Tensor:
        samples = self.samples.unsqueeze(-1).expand_as(sites)
        step, extra = torch.zeros_like(sites) + self.step, torch.full_like(sites, self._word(purpose))
        high, low, *_ = philox((samples & LOW, step, sites, extra), self.key)
        return uniform(high, low)
