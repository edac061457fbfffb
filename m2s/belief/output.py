"""What a network hands over: logits, or hidden states with the last layer not yet applied."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import check


@dataclass(frozen=True)
class Unprojected:
    """Hidden states [*sites, D] and the last layer's weight [columns, D] and bias: accepted wherever `output` is.

    A fused operation reads them directly and never multiplies them out; everything else does so in float32.
    """

    hidden: Float[Tensor, "*site D"]
    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, "V"] | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.shape[-1] != self.hidden.shape[-1]:
            raise ValueError(
                f"weight has shape {list(self.weight.shape)}, but hidden has {self.hidden.shape[-1]} features: "
                "expected [columns, features]"
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"bias has shape {list(self.bias.shape)}, but weight has {self.weight.shape[0]} rows")

    def project(self, columns: int) -> Float[Tensor, "*site {columns}"]:
        """The first `columns` logits, in float32 or better, whatever autocast says."""
        if self.weight.shape[0] < columns:
            raise ValueError(f"weight has {self.weight.shape[0]} rows, but the process has {columns} states")
        with torch.autocast(self.hidden.device.type, enabled=False):
            bias = None if self.bias is None else full(self.bias[:columns])
            return torch.nn.functional.linear(full(self.hidden), full(self.weight[:columns]), bias)


Output = Tensor | Unprojected


def full(x: Tensor) -> Tensor:
    """float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def logits(output: Output, x_t: Tensor, states: int) -> Float[Tensor, "*site {states}"]:
    """The columns that mean something, in float32 at least. The one place where padding is cut off."""
    if isinstance(output, Unprojected):
        output = output.project(states)
    check.belief("output", output, x_t, states, wider=True)
    return full(output[..., :states])
