"""Floating-point dtypes: the one place where tensors are widened."""

import torch
from torch import Tensor


def to_float64(t: Tensor) -> Tensor:
    """`t` in float64, where the device has it."""
    return t if t.device.type == "mps" else t.double()


def float64_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.device.type == "mps" else torch.float64


def at_least_float32(x: Tensor) -> Tensor:
    """float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def promote_to(t: Tensor, prediction: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, prediction.dtype))
