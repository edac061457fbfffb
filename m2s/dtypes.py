"""Floating-point dtypes: the one place where tensors are widened."""

import torch
from torch import Tensor


def to_float64(t: Tensor) -> Tensor:
    """Return `t` in float64, or unchanged on a device without float64.

    Args:
        t: Any tensor.

    Returns:
        The same values in float64; on Apple's "mps" device, which has no float64, `t` itself.
    """
    return t if t.device.type == "mps" else t.double()


def float64_dtype(x: Tensor) -> torch.dtype:
    """Return the widest dtype on the device of `x`: float64, or the dtype of `x` on a device without float64.

    Args:
        x: A tensor on the device in question.
    """
    return x.dtype if x.device.type == "mps" else torch.float64


def at_least_float32(x: Tensor) -> Tensor:
    """Widen float16 and bfloat16 to float32; leave other dtypes alone.

    Args:
        x: A floating-point tensor.

    Returns:
        `x` in float32, or `x` itself.
    """
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def promote_to(t: Tensor, prediction: Tensor) -> Tensor:
    """Widen `t` to the wider of its dtype and that of `prediction`.

    Args:
        t: Times.
        prediction: A posterior or a score.

    Returns:
        `t`, never in a narrower dtype than before.
    """
    return t.to(torch.promote_types(t.dtype, prediction.dtype))
