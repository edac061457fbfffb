"""A network made ready for a long walk: in bf16, compiled, its last layer left to the draw."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s.ops.last_layer import Output

LARGE = 4096  # tokens from which on a last layer is worth leaving out: the draw multiplies it out for some sites at a time


class InferenceModel(nn.Module):
    """`model` as a sampler calls it. `bf16`: under autocast; its logits are float32 all the same."""

    def __init__(self, model: nn.Module, states: int, bf16: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.bf16 = model, bf16
        if hasattr(model, "unprojected") and states >= LARGE:
            model.unprojected = True  # type: ignore[assignment]
        call: Callable[..., Output] = torch.compile(model.forward, dynamic=False) if compiled else model
        self._call = [call]  # not a second copy of the weights

    def new_cache(self, samples: int, length: int) -> Tensor | None:
        """The model's own, in the dtype in which it is called; None where it has none."""
        new_cache: Callable[[int, int], Tensor | None] | None = getattr(self.model, "new_cache", None)
        with torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16, enabled=self.bf16):
            return None if new_cache is None else new_cache(samples, length)

    def forward(
        self, x_t: Int[Tensor, "B L"], t: Float[Tensor, "B"], condition: Int[Tensor, "B"] | None = None, **cached: Tensor
    ) -> Output:
        given = (x_t, t) if condition is None else (x_t, t, condition)
        with torch.autocast(x_t.device.type, torch.bfloat16, enabled=self.bf16):
            return self._call[0](*given, **cached)
