"""A network prepared for many calls: in bf16, compiled, or with its last layer left to the draw."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s.ops.last_layer import Output

LARGE = 4096  # states from which on the last layer is left to the draw, which multiplies it out for a few sites at a time


class InferenceModel(nn.Module):
    """A network as a sampler calls it. It shares the weights of `model` and changes none of its attributes for good.

    Args:
        model: The network.
        states: The number of states of the process. From 4,096 on the network returns `m2s.Unprojected`, if it can.
        bf16: Call it under autocast to bfloat16. Logits are float32 in any case.
        compiled: Compile its forward with `torch.compile`.
    """

    def __init__(self, model: nn.Module, states: int, bf16: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.bf16 = model, bf16
        self.unprojects = hasattr(model, "unprojected") and states >= LARGE
        call: Callable[..., Output] = torch.compile(model.forward, dynamic=False) if compiled else model
        self._call = [call]  # in a list, so that a module is not registered as a second copy of the weights

    def new_cache(self, samples: int, length: int) -> Tensor | None:
        """Return an empty key-value cache of the model, in the dtype in which it is called; None where it has none.

        Args:
            samples: Rows of every call.
            length: The length of the sequence.

        Returns:
            The cache, [layers, 2, samples, ...], or None.
        """
        new_cache: Callable[[int, int], Tensor | None] | None = getattr(self.model, "new_cache", None)
        with torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16, enabled=self.bf16):
            return None if new_cache is None else new_cache(samples, length)

    def forward(
        self, x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"], condition: Int[Tensor, "B"] | None = None, **cached: Tensor
    ) -> Output:
        """Call the network.

        Args:
            x_t: Tokens, [B, L].
            t: Times, [B].
            condition: Conditions, [B], or None.
            cached: `cache` and `at` of a network with a key-value cache.

        Returns:
            Logits, [B, L, >= S], or `m2s.Unprojected`.
        """
        given = (x_t, t) if condition is None else (x_t, t, condition)
        with self._last_layer(), torch.autocast(x_t.device.type, torch.bfloat16, enabled=self.bf16):
            return self._call[0](*given, **cached)

    @contextlib.contextmanager
    def _last_layer(self) -> Iterator[None]:
        """Leave out the last layer for the duration of a call."""
        if not self.unprojects:
            yield
            return
        before = self.model.unprojected
        self.model.unprojected = True  # type: ignore[assignment]
        try:
            yield
        finally:
            self.model.unprojected = before
