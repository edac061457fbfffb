"""Read arrays of an orbax checkpoint without JAX, through the package tensorstore."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MANIFEST = "manifest.ocdbt"
EXPANSION = 64  # the greatest ratio of values to bytes on the disk: more is no compression of weights


def read_orbax(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Read the arrays of an item of an orbax checkpoint, such as `checkpoints/1000/train_state`.

    Args:
        folder: The folder of the item: one with manifest.ocdbt, or one with a folder for each array.
        prefix: Only arrays whose names begin so, such as "ema_params.".

    Returns:
        Arrays by name, without the prefix, in float32.

    Raises:
        ImportError: tensorstore is not installed.
        ValueError: The checkpoint is damaged.
    """
    try:
        import tensorstore
    except ImportError:
        raise ImportError(f"reading {folder} needs tensorstore (JAX is not needed): pip install tensorstore") from None
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found: dict[str, Tensor] = {}
    try:
        for name in _names(tensorstore, folder):
            if not name.startswith(prefix):
                continue
            array = tensorstore.open({"driver": "zarr", "kvstore": _store(folder, f"{name}/")}, read=True).result()
            if math.prod(array.shape) > EXPANSION * on_disk:
                raise ValueError(f"{name} would have {math.prod(array.shape):,} values, and the files {on_disk:,} bytes")
            values = np.asarray(array.read().result())
            if values.dtype.kind != "f" and str(values.dtype) != "bfloat16":
                raise ValueError(f"{name} has dtype {values.dtype}, expected floating-point numbers")
            found[name.removeprefix(prefix)] = torch.from_numpy(values.astype(np.float32))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is damaged, or no orbax checkpoint: {str(error)[:300]}. Copy it again") from None
    return found


def _store(folder: Path, path: str) -> dict[str, Any]:
    """The description of a place in the checkpoint."""
    files = f"{folder.resolve()}/"
    if (folder / MANIFEST).exists():
        return {"driver": "ocdbt", "base": {"driver": "file", "path": files}, "path": path}
    return {"driver": "file", "path": files + path}


def _names(tensorstore: Any, folder: Path) -> list[str]:
    """The names of the arrays."""
    keys = tensorstore.KvStore.open(_store(folder, "")).result().list().result()
    names = [key.decode("utf-8") for key in keys]
    return sorted(name.removesuffix("/.zarray") for name in names if name.endswith("/.zarray"))
