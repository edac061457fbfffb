"""Which devices can be used here."""

from typing import NoReturn

import torch

from m2s.errors import UserError


def resolve_device(device: str) -> str:
    """The device that was named, or the best there is; refused, with the reason, where nothing can be computed on it."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if why := _lacking(device):
        invalid_device(device, why)
    return device


def invalid_device(device: str, why: str) -> NoReturn:
    raise UserError(f"device is {device!r}, but {why}: leave it out for the best there is, or give cpu")


def _lacking(device: str) -> str:
    try:
        kind = torch.device(device)
    except RuntimeError:
        return "it must be cpu, cuda, or one of several as in cuda:1"
    if kind.type == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU"
    if kind.type == "mps" and not torch.backends.mps.is_available():
        return "torch sees no Apple GPU"
    try:
        torch.zeros(1, device=kind)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return str(error).strip().split("\n")[0].rstrip(".")
    return ""
