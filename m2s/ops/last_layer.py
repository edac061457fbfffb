"""The last layer of a network: logits in float32 from hidden states.

It connects the network body and the loss. A network returns `Unprojected`, its hidden states together
with the weights of the last layer, so that a fused loss can compute logits in chunks (`m2s.ops.linear_loss`). Everything else
calls `Unprojected.project`. Hidden states in bf16 on a GPU are multiplied as bf16 operands with float32 accumulation.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from m2s import validation
from m2s.dtypes import at_least_float32
from m2s.ops.derivatives import wants_graph
from m2s.transforms import is_transformed


@dataclass(frozen=True)
class Unprojected:
    """Hidden states and the last layer, in place of logits: accepted wherever a network output is.

    A fused operation reads them directly and never holds all logits; everything else multiplies them out in float32.

    Args:
        hidden: Hidden states `[*site, D]`.
        weight: Weight of the last layer `[V, D]`; V may exceed the number of states (padding).
        bias: Bias of the last layer `[V]`, or None.

    Raises:
        ValueError: If the shapes do not fit together.

    Example:
        >>> hidden, last = torch.randn(2, 4, 64), torch.nn.Linear(64, 256)
        >>> output = m2s.Unprojected(hidden, last.weight, last.bias)
        >>> loss = m2s.score_entropy(head, output, x_0, x_t, t)
    """

    hidden: Float[Tensor, "*site D"]
    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, "V"] | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "weight", *(["bias"] if self.bias is not None else [])):
            validation.tensor(name, getattr(self, name))
        if not self.hidden.ndim or self.weight.ndim != 2 or self.weight.shape[-1] != self.hidden.shape[-1]:
            raise ValueError(
                f"weight has shape {list(self.weight.shape)}, but hidden has shape {list(self.hidden.shape)}: "
                "expected [columns, features]"
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"bias has shape {list(self.bias.shape)}, but weight has {self.weight.shape[0]} rows")

    def wide_enough(self, states: int) -> Float[Tensor, "V D"]:
        """Return the weight, after checking that it has a row for every state.

        Args:
            states: Number of states of the process, the mask included.

        Returns:
            The weight `[V, D]`.

        Raises:
            ValueError: If V is less than `states`.
        """
        if self.weight.shape[0] < states:
            rows = self.weight.shape[0]
            hint = validation.missing_mask_hint(rows, states)
            raise ValueError(
                f"weight has {rows} rows, but the process has {states} states: the network has too few outputs, "
                f"its last layer needs {states}{hint}"
            )
        return self.weight

    def project(self) -> Float[Tensor, "*site V"]:
        """Return the logits of all columns `[*site, V]`, in float32 or float64 also under autocast."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            return last_layer(self.hidden, self.weight, self.bias)


# A custom op, because torch.compile does not know a bf16 product with a float32 result.
@torch.library.custom_op("m2s::matmul_float32", mutates_args=())
def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices in bf16 or float16, with accumulation and result in float32.

    Args:
        a: Matrix `[N, D]`.
        b: Matrix `[D, M]`.

    Returns:
        a b `[N, M]` in float32.
    """
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@matmul_float32.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


# Columns that a bf16 operand gains for the bias: two are used, six more keep the width a multiple of eight (16 bytes), which
# the fast matrix kernels require.
BIAS_COLUMNS = 8


def append_bias_columns(rows: Tensor, bias: Tensor | None, extra: int, dtype: torch.dtype) -> Tensor:
    """Append `extra` columns to an operand.

    Args:
        rows: The operand `[N, D]`.
        bias: Bias of each row `[N]`: the new columns are its rounded value, the rounding error, and zeros. None for the other
            operand: the new columns are two ones, and zeros.
        extra: Number of new columns, at least 2.
        dtype: Dtype of the result.

    Returns:
        `[N, D + extra]` in `dtype`.
    """
    width = rows.shape[1]
    result = torch.zeros(len(rows), width + extra, dtype=dtype, device=rows.device)
    result[:, :width] = rows
    if bias is None:
        result[:, width : width + 2] = 1
    else:
        result[:, width] = bias
        result[:, width + 1] = bias.float() - result[:, width].float()
    return result


def bf16_operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Build the operands of hidden weight^T + bias as a single bf16 product.

    The bias becomes two more columns of the weight (its bf16 value and the rounding error), against columns of ones in hidden.
    So its gradient comes out of the same product as the gradient of the weight.

    Args:
        hidden: Hidden states `[N, D]` in bf16.
        weight: Weight `[V, D]` in any dtype.
        bias: Bias `[V]`, or None.

    Returns:
        hidden and weight in bf16, `[N, D + BIAS_COLUMNS]` and `[V, D + BIAS_COLUMNS]`, or of width D without a bias.
    """
    if bias is None:
        return hidden, weight.to(hidden.dtype)
    ones = append_bias_columns(hidden, None, BIAS_COLUMNS, hidden.dtype)
    return ones, append_bias_columns(weight, bias, BIAS_COLUMNS, hidden.dtype)


class _BF16LastLayer(torch.autograd.Function):
    """hidden weight^T + bias for bf16 hidden states: weight rounded to bf16, accumulation and result in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.width, ctx.dtype = hidden.shape[-1], weight.dtype
        hidden, columns = bf16_operands(hidden, weight, bias)
        ctx.save_for_backward(hidden, columns)
        return matmul_float32(hidden, columns.t())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if wants_graph():
            raise RuntimeError(
                "the last layer has first derivatives only for bfloat16 hidden states, but create_graph=True asks for second "
                "ones: run the network without autocast"
            )
        hidden, columns = ctx.saved_tensors
        width, rounded = ctx.width, upstream.to(hidden.dtype)
        weight = matmul_float32(rounded.t(), hidden).to(ctx.dtype)
        bias = weight[:, width] if ctx.needs_input_grad[2] else None
        return matmul_float32(rounded, columns[:, :width]).to(hidden.dtype), weight[:, :width], bias


def last_layer(hidden: Float[Tensor, "*site D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, "V"] | None) -> Tensor:
    """Compute logits = hidden weight^T + bias in float32 or float64.

    Args:
        hidden: Hidden states `[*site, D]`. In bf16 on a GPU the operands stay in bf16 and only the sums are float32.
        weight: Weight `[V, D]`.
        bias: Bias `[V]`, or None.

    Returns:
        Logits `[*site, V]`.
    """
    if hidden.dtype == torch.bfloat16 and hidden.is_cuda and not is_transformed():
        flat = _BF16LastLayer.apply(hidden.reshape(-1, hidden.shape[-1]), weight, None if bias is None else bias.float())
        return flat.reshape(*hidden.shape[:-1], -1)
    return torch.nn.functional.linear(
        at_least_float32(hidden), at_least_float32(weight), None if bias is None else at_least_float32(bias)
    )


Output = Tensor | Unprojected
