"""Randomness by counter: every number is a pure function of (seed, sample, step, site, purpose).

So a sample does not depend on the batch it was drawn in, on the process that drew it or on a restart, and two models can be
run on the same noise. The bits agree on every device.
"""

from jaxtyping import Float, Int
from torch import Tensor

from m2s.ops.philox import uniforms
from m2s.ops.philox.naive import LOW
from m2s.ops.reverse_step import Counter

PURPOSES = ("start", "route", "token", "jump", "order", "site", "time", "last")


class CounterNoise:
    """The uniforms of one step of some samples: one for each (sample, site, purpose), or one for each (sample, purpose)."""

    def __init__(self, seed: int, samples: Int[Tensor, "B"], length: int, step: int | Tensor, window: int = 0) -> None:
        self.key = (seed & LOW, (seed >> 32) & LOW)
        self.samples, self.length, self.step, self.window = samples, length, step, window

    def __call__(self, purpose: str | int) -> Float[Tensor, "B L"]:
        """One number in [0, 1) for each site. A sampler of your own may number its purposes from 0 to 9,999."""
        return uniforms(self.samples, self.step, 0, self.length, self._word(purpose), self.key)

    def once(self, purpose: str | int) -> Float[Tensor, "B"]:
        """One number in [0, 1) for each sample."""
        return uniforms(self.samples, self.step, LOW, 1, self._word(purpose), self.key).squeeze(-1)

    def counter(self, *purposes: str | int) -> Counter | None:
        """Of what all these numbers are a function, where samples share the step."""
        if isinstance(self.step, Tensor):
            return None
        return Counter(self.samples, self.length, self.key, self.step, tuple(map(self._word, purposes)))

    def _word(self, purpose: str | int) -> int:
        number = 10_000 + PURPOSES.index(purpose) if isinstance(purpose, str) else purpose
        return number | self.window << 16
