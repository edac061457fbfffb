"""Rows of a factor with columns for the bias beside them, and the gradient of the rows alone."""

import torch
from torch import Tensor


def append_bias_columns(rows: Tensor, bias: Tensor | None, extra: int, dtype: torch.dtype) -> Tensor:
    """[N, D + extra] in `dtype`, extra at least 2: the rows; the bias of each and what rounding leaves of it, or without a bias
    two ones; zeros."""
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
    """Some columns of a wider matrix times a number, contiguous."""
    return (columns * factor.to(columns.dtype)).contiguous()
