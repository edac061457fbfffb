"""Network and loss as one module: what DDP wraps and what is compiled."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s.belief import Head, Output, Unprojected
from m2s.objective.module import Loss


class Scored(nn.Module):
    """forward(x_0, x_t, t, label) -> nats per site [B, L]. `m2s.Objective` with the noise drawn outside."""

    def __init__(self, model: nn.Module, head: Head, loss: Loss, t_min: float) -> None:
        super().__init__()
        self.model, self.head, self.loss, self.t_min = model, head, loss, t_min
        self.compiled: Callable[..., Tensor] = self.score

    def forward(
        self,
        x_0: Int[Tensor, "B L"],
        x_t: Int[Tensor, "B L"],
        t: Float[Tensor, "B"],
        label: Int[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B L"]:
        seen = t.clamp(self.t_min, 1 - self.t_min).to(torch.get_default_dtype())
        output: Output = self.model(x_t, seen, label)
        parts = (output.hidden, output.weight, output.bias) if isinstance(output, Unprojected) else (output,)
        with torch.autocast(x_t.device.type, enabled=False):
            return self.compiled(x_0, x_t, t, *parts)

    def score(self, x_0: Tensor, x_t: Tensor, t: Tensor, *parts: Tensor) -> Tensor:
        """The loss of logits, or of hidden states and the last layer."""
        output = parts[0] if len(parts) == 1 else Unprojected(*parts)
        return self.loss(self.head, output, x_0, x_t, t)
