"""The last layer of a network: logits in float32 from hidden states, with bf16 operands on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from m2s import validation
from m2s.dtypes import at_least_float32
from m2s.ops.bias_columns import naive


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

    def wide_enough(self, states: int) -> Float[Tensor, "V D"]:
        """The weight, which must have a row for every state."""
        if self.weight.shape[0] < states:
            lacking = validation.missing_mask_hint(self.weight.shape[0], states)
            raise ValueError(f"weight has {self.weight.shape[0]} rows, but the process has {states} states{lacking}")
        return self.weight

    def project(self) -> Float[Tensor, "*site V"]:
        """The logits of all columns, in float32 or better, whatever autocast says."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            return last_layer(self.hidden, self.weight, self.bias)


# Opaque to a compiler, which may not know a product of bf16 that is returned in float32.
@torch.library.custom_op("m2s::product", mutates_args=())
def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """a b of matrices in bf16 or float16, added up and returned in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@matmul_float32.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


BIAS_COLUMNS = 8  # columns beside a weight in bf16 for the bias: two, and six that keep the width a multiple of eight
AppendColumns = Callable[[Tensor, Tensor | None, int, torch.dtype], Tensor]


def bf16_operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, beside: AppendColumns = naive.append_bias_columns
) -> tuple[Tensor, Tensor]:
    """The factors of hidden weight^T + bias as one product in the dtype of hidden states that are bf16.

    The bias goes in as two more columns of the weight (it and what rounding leaves of it) beside ones in hidden. So its
    gradient comes out of the product that gives the weight's.
    """
    if bias is None:
        return hidden, weight.to(hidden.dtype)
    return beside(hidden, None, BIAS_COLUMNS, hidden.dtype), beside(weight, bias, BIAS_COLUMNS, hidden.dtype)


class _BF16LastLayer(torch.autograd.Function):
    """hidden weight^T + bias for hidden states in bf16: weight rounded to bf16, sums and result in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.width, ctx.dtype = hidden.shape[-1], weight.dtype
        hidden, columns = bf16_operands(hidden, weight, bias)
        ctx.save_for_backward(hidden, columns)
        return matmul_float32(hidden, columns.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, columns = ctx.saved_tensors
        width, rounded = ctx.width, upstream.to(hidden.dtype)
        weight = matmul_float32(rounded.t(), hidden).to(ctx.dtype)
        bias = weight[:, width] if ctx.needs_input_grad[2] else None
        return matmul_float32(rounded, columns[:, :width]).to(hidden.dtype), weight[:, :width], bias


def last_layer(hidden: Float[Tensor, "*site D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, "V"] | None) -> Tensor:
    """The logits [*site, V] of a last layer, in float32 at least. Hidden states in bf16 keep the operands in bf16 on a GPU."""
    if hidden.dtype == torch.bfloat16 and hidden.is_cuda:
        flat = _BF16LastLayer.apply(hidden.reshape(-1, hidden.shape[-1]), weight, None if bias is None else bias.float())
        return flat.reshape(*hidden.shape[:-1], -1)
    return torch.nn.functional.linear(
        at_least_float32(hidden), at_least_float32(weight), None if bias is None else at_least_float32(bias)
    )


Output = Tensor | Unprojected
