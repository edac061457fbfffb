"""The temperature of each step of `M2SScheduler`."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from m2s.errors import UserError, UserTypeError
from m2s.heads import Head
from m2s.samplers.prediction import LogitsProcessor


@dataclass(frozen=True)
class Temperatures:
    """A temperature that decreases linearly over the steps, or that of each call.

    Args:
        first: The temperature at the first step; None: that of each call.
        last: The temperature that it would have after the last step; None: that of each call.
        steps: Calls of the network.
        on: The distribution that temperature, top-k and top-p sharpen.
    """

    first: float | None
    last: float | None
    steps: int
    on: Literal["posterior", "leave_one_out"]

    def at(self, index: int) -> float | None:
        """Return the temperature of a step, last + (first - last) (steps - index) / steps; None: that of each call.

        Args:
            index: The number of the step.
        """
        if self.first is None or self.last is None:
            return None
        return float(self.last + (self.first - self.last) * (self.steps - index) / self.steps)

    def processor(self, head: Head, index: int, temperature: float, top_k: int | None, top_p: float | None) -> LogitsProcessor:
        """Return temperature, top-k and top-p of a step.

        Args:
            head: The head.
            index: The number of the step.
            temperature: The temperature of the call, which `first` replaces; 0 takes the most likely token.
            top_k: The number of most likely tokens that are kept; None: all.
            top_p: The probability of the set of tokens that is kept; None: 1.

        Raises:
            UserError: The temperature is negative.
            UserTypeError: The head has no posterior to sharpen.
        """
        annealed = self.at(index)
        temperature = temperature if annealed is None else annealed
        if temperature < 0:
            raise UserError(option="temperature", value=temperature, expected="at least 0")
        greedy = temperature == 0
        processor = LogitsProcessor(1.0 if greedy else temperature, 1 if greedy else top_k, top_p or 1.0, self.on)
        if processor.sharpens and not head.has_posterior:
            reason = "an unconstrained score has no posterior to sharpen"
            raise UserTypeError(
                option="temperature", value=temperature, reason=reason, hint="give 1, or use m2s.Projected(head)"
            )
        return processor

    def scaled(self, output: Tensor, index: int) -> Tensor:
        """Return the logits of the distribution that the temperature of the configuration gives; else those of the network.

        Args:
            output: The output of the network, [B, L, V].
            index: The number of the step.

        Returns:
            Logits, [B, L, V].
        """
        annealed = self.at(index)
        return output if annealed is None or self.on != "posterior" or annealed <= 0 else output / annealed
