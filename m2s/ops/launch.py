"""How the kernels of a loss are started: one program for each row of logits."""

from typing import Any

import torch
import triton
from torch import Tensor


def launch(
    kernel: Any,
    block: int,
    warps: int,
    logits: Tensor,
    k: Tensor,
    x: Tensor,
    scalars: Tensor,
    masked: bool,
    vocab: int,
    weight: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """The loss [N], and where a weight is given the gradient of weight times loss [N, V] in `dtype`."""
    count, columns = logits.shape
    loss = torch.empty(count, dtype=torch.float64, device=logits.device)
    gradient = None if weight is None else torch.empty(count, columns, dtype=dtype, device=logits.device)
    kernel[(count,)](
        logits,
        loss if gradient is None else gradient,
        loss,
        k.int(),
        x.int(),
        loss if weight is None else weight.double(),
        scalars.contiguous(),
        count,
        logits.stride(0),
        columns,
        vocab,
        MASK=masked,
        GRADIENT=gradient is not None,
        BLOCK=min(block, max(32, triton.next_power_of_2(columns) // 16)),
        num_warps=warps,
    )
    return loss, gradient
