"""The choice of a device, checked before anything is computed."""

from typing import NoReturn

import torch

from m2s.errors import UserError


def resolve_device(device: str) -> str:
    """Check that a device can be used, and choose one if none is named.

    Args:
        device: A device such as "cpu", "cuda" or "cuda:1". The empty string stands for a GPU if there is one, else the CPU.

    Returns:
        The name of the device.

    Raises:
        UserError: The name is not that of a device, or torch cannot compute on it.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if why := _why_unusable(device):
        invalid_device(device, why)
    return device


def invalid_device(device: str, why: str) -> NoReturn:
    """Raise the error for a device that cannot be used.

    Args:
        device: Name of the device.
        why: The reason.

    Raises:
        UserError: Always.
    """
    raise UserError(f"device is {device!r}, but {why}: leave it out for the best there is, or give cpu", option="device")


def _why_unusable(device: str) -> str:
    """Return why torch cannot compute on a device; empty if it can."""
    try:
        kind = torch.device(device)
    except RuntimeError:
        return "it must be cpu, cuda, or one of several as in cuda:1"
    if kind.type == "meta":
        return "it has no values"
    if kind.type == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU"
    if kind.type == "mps" and not torch.backends.mps.is_available():
        return "torch sees no Apple GPU"
    try:
        # torch.device accepts indices of GPUs that do not exist and backends that are not built in: only an allocation tells.
        torch.zeros(1, device=kind)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).strip().split("\n")[0].rstrip(".")
    return ""
