"""How the kernels of a loss are started: one program for each row of logits.

They read what they are told of a row, `told` numbers, from one place: `prepare` lays them there for all rows at once.
"""

from typing import Any

import torch
import triton
from torch import Tensor


def prepare(k: Tensor, x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and scalars [C, N] as the kernels read them; some rows of all three are [..., rows]."""
    return k.int(), x.int(), scalars.t().contiguous().t()


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
    """The loss [N], and where a weight is given the gradient of weight times loss [N, V] in `dtype`; of what `prepare` made.

    The gradient takes the place of the logits, which are gone then: in the first half of each row's memory if it is bf16.
    """
    count, columns = logits.shape
    loss = torch.empty(count, dtype=torch.float64, device=logits.device)
    gradient = None if weight is None else logits.view(dtype)[:, :columns]
    kernel[(count,)](
        logits,
        loss if gradient is None else gradient,
        loss,
        k,
        x,
        loss if weight is None else weight.double(),
        scalars,
        scalars.stride(1),
        logits.stride(0),
        0 if gradient is None else gradient.stride(0),
        columns,
        vocab,
        MASK=masked,
        GRADIENT=gradient is not None,
        BLOCK=min(block, max(32, triton.next_power_of_2(columns) // 16)),
        num_warps=warps,
    )
    return loss, gradient
