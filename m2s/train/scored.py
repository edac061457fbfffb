"""Network and loss as one module: what DDP wraps and what is compiled."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s.belief import Head
from m2s.objective.module import Loss


class Scored(nn.Module):
    """forward(x_0, x_t, t, label) -> nats per site [B, L]. `m2s.Objective` with the noise drawn outside."""

    def __init__(self, model: nn.Module, head: Head, loss: Loss, t_min: float) -> None:
        super().__init__()
        self.model, self.head, self.loss, self.t_min = model, head, loss, t_min

    def forward(
        self,
        x_0: Int[Tensor, "B L"],
        x_t: Int[Tensor, "B L"],
        t: Float[Tensor, "B"],
        label: Int[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B L"]:
        seen = t.clamp(self.t_min, 1 - self.t_min).to(torch.get_default_dtype())
        output = self.model(x_t, seen, label)
        with torch.autocast(x_t.device.type, enabled=False):
            return self.loss(self.head, output, x_0, x_t, t)
