"""Read tensors from files, without running code that a file may contain."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a .safetensors file.

    Args:
        path: The file.

    Returns:
        Its tensors, by name.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}): copy it again, or save the checkpoint again") from None


def read_pickle(path: Path) -> Any:
    """Read a file that `torch.save` wrote. Tensors are memory-mapped: they are read when they are used.

    Args:
        path: The file.

    Returns:
        Tensors, numbers, strings, lists and dictionaries.

    Raises:
        ValueError: The file is damaged, or holds other objects, which could run code.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} is damaged, or holds objects other than tensors, which are not read: {reason}. Copy it again, or "
            "write its weights as .safetensors"
        ) from None
