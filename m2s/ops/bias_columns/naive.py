"""Append the columns of the bias to the rows of an operand, and drop them from a gradient.

hidden weight^T + bias is one product of wider operands: [hidden, 1, 1] [weight, b, b']^T, where b is the bias rounded to the
dtype of the product and b' the rounding error. So the bias costs no pass over the logits, and its gradient is a column of the
weight's.
"""

import torch
from torch import Tensor


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


def drop_bias_columns(columns: Tensor, factor: Tensor) -> Tensor:
    """Multiply a slice of columns by a number and make it contiguous.

    Args:
        columns: Some columns of a wider matrix, `[N, D]`.
        factor: A number, the upstream gradient.

    Returns:
        columns times factor, contiguous.
    """
    return (columns * factor.to(columns.dtype)).contiguous()
