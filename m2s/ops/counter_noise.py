"""Counter-based random numbers: each is a pure function of (seed, sample, step, position, purpose).

So a sample does not depend on its batch, on the process that draws it or on a restart, and two models can be run on the same
noise. The bits agree on every device.
"""

from jaxtyping import Float, Int
from torch import Tensor

from m2s.errors import UserError
from m2s.ops.philox import uniforms
from m2s.ops.philox.naive import LOW
from m2s.ops.reverse_step import Counter

PURPOSES = ("start", "route", "token", "jump", "order", "site", "time", "last")


class CounterNoise:
    """The uniform random numbers of one sampling step, one per (sample, position, purpose) or per (sample, purpose).

    Args:
        seed: Seed of the run, 64 bits.
        samples: Numbers of the samples in this batch `[B]`; their low 32 bits count.
        length: Positions of each sample.
        step: Number of the step: an integer, or a tensor on the device, [] or `[B, 1]`.
        window: Number of the window, for samplers that generate a sequence in windows.

    Example:
        >>> noise = CounterNoise(seed=0, samples=torch.arange(4), length=128, step=3)
        >>> noise("token").shape
        torch.Size([4, 128])
    """

    def __init__(self, seed: int, samples: Int[Tensor, "B"], length: int, step: int | Tensor, window: int = 0) -> None:
        self.key = (seed & LOW, (seed >> 32) & LOW)
        self.samples, self.length, self.step, self.window = samples, length, step, window

    def __call__(self, purpose: str | int) -> Float[Tensor, "B L"]:
        """Return one number in [0, 1) per position.

        Args:
            purpose: One of `PURPOSES`. A custom sampler may use the numbers 0 to 9,999.

        Raises:
            UserError: There is no such purpose.
        """
        return uniforms(self.samples, self.step, 0, self.length, self._word(purpose), self.key)

    def once(self, purpose: str | int) -> Float[Tensor, "B"]:
        """Return one number in [0, 1) per sample.

        Args:
            purpose: One of `PURPOSES`, or a number from 0 to 9,999 in a custom sampler.

        Returns:
            Uniform numbers, `[B]`.
        """
        # LOW stands for "no position": no sequence is that long
        return uniforms(self.samples, self.step, LOW, 1, self._word(purpose), self.key).squeeze(-1)

    def counter(self, *purposes: str | int) -> Counter | None:
        """Return the counter of these purposes, for a kernel that draws the numbers itself; None if samples differ in step.

        Args:
            *purposes: The purposes, as in `once`, in the order in which the kernel draws them.
        """
        if isinstance(self.step, Tensor):
            return None
        return Counter(self.samples, self.length, self.key, self.step, tuple(map(self._word, purposes)))

    def _word(self, purpose: str | int) -> int:
        """The last word of the counter: the purpose, and above its 16 bits the window."""
        if isinstance(purpose, str) and purpose not in PURPOSES:
            names = ", ".join(PURPOSES)
            raise UserError(f"the purpose is {purpose!r}, but it must be one of {names}, or a number from 0 to 9,999")
        number = 10_000 + PURPOSES.index(purpose) if isinstance(purpose, str) else purpose
        return number | self.window << 16
