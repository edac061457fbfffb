"""Network and loss as one module: what DDP wraps and what is compiled."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from m2s.heads import Head
from m2s.losses import weighted_sum
from m2s.losses.objective import Loss
from m2s.ops import uses_triton
from m2s.ops.last_layer import Output, Unprojected


class TrainingLoss(nn.Module):
    """forward(x_0, x_t, t, weight, label, room) -> the weighted sum of the loss over all sites, and its terms [B, L], which
    carry no gradient. `m2s.Objective` with the noise drawn, and the weights known, beforehand; `room` is that of `total`."""

    def __init__(self, model: nn.Module, head: Head, loss: Loss, t_min: float) -> None:
        super().__init__()
        self.model, self.head, self.loss, self.t_min = model, head, loss, t_min
        self.compiled: Callable[..., tuple[Tensor, Tensor]] = self.score

    def forward(
        self,
        x_0: Int[Tensor, "B L"],
        x_t: Int[Tensor, "B L"],
        t: Float[Tensor, "B"],
        weight: Float[Tensor, "B L"],
        label: Int[Tensor, "B"] | None = None,
        max_masked: int | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B L"]]:
        seen = t.clamp(self.t_min, 1 - self.t_min).to(torch.get_default_dtype())
        output: Output = self.model(x_t, seen, label)
        parts = (output.hidden, output.weight, output.bias) if isinstance(output, Unprojected) else (output,)
        score = self.score if len(parts) > 1 and uses_triton(parts[0]) else self.compiled
        with torch.autocast(x_t.device.type, enabled=False):
            return score(x_0, x_t, t, weight, max_masked, *parts)

    def score(
        self, x_0: Tensor, x_t: Tensor, t: Tensor, weight: Tensor, max_masked: int | None, *parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of logits, or of hidden states and the last layer."""
        output = parts[0] if len(parts) == 1 else Unprojected(*parts)
        return weighted_sum(self.loss, self.head, output, x_0, x_t, t, weight, max_masked)
