"""Values of the record: floats, tensors, tokens, and the numbers of JSON files and arrays."""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"

PROVENANCE = {  # keys of JSON files and logs that hold provenance, speed or options
    *("command", "device", "versions", "checkpoint", "settings", "options", "data", "precision", "processes", "batch_size"),
    *("seconds", "tokens_per_second"),
    # Keys of a log that follow from loss, gradient norm, weights and validation_bits.
    *("step", "bits", "lr", "tokens", "skipped", "grad_norm_max", "validation_perplexity"),
}

Entry = tuple[str, Any]


def bits(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.".

    Args:
        dtype: The dtype.
    """
    return str(dtype).removeprefix("torch.")


def digest(value: Tensor) -> str:
    """Return the first 128 bits of the SHA-256 of a tensor's bytes.

    Args:
        value: The tensor.
    """
    return hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:32]


def tensor(value: Tensor) -> Any:
    """Return the entry of a tensor: its shape and all tokens, or the digest of floats with values to read.

    Args:
        value: The tensor.
    """
    value = value.detach().cpu()
    if value.dtype.is_floating_point:  # NaN has many bit patterns, which depend on the machine's instructions
        value = torch.where(value.isnan(), torch.full_like(value, torch.nan), value)
    shape = "x".join(map(str, value.shape))
    flat = value.flatten().tolist()
    if not value.dtype.is_floating_point:
        small = all(-1 <= token < len(DIGITS) for token in flat)
        return f"{shape} " + ("".join((DIGITS + "-")[token] for token in flat) if small else ",".join(map(str, flat)))
    finite = [number for number in flat if math.isfinite(number)]
    return {
        "tensor": f"{bits(value.dtype)} {shape}",
        "sha256": digest(value),
        "first": flat[:2],
        "sum": math.fsum(finite),
        "scale": float(f"{math.fsum(map(abs, finite)):.3g}"),  # of the rounding errors in the sum
    }


def attempt(function: Callable[..., Tensor], *arguments: Any) -> Any:
    """Return the entry of the result of a function, or the name of Python's exception that its error is a kind of.

    A finite chain has no rates, for example.

    Args:
        function: The function.
        *arguments: Its arguments.
    """
    try:
        return tensor(function(*arguments))
    except (TypeError, ValueError, RuntimeError) as error:
        return next(kind.__name__ for kind in (TypeError, ValueError, RuntimeError) if isinstance(error, kind))


def numbers(name: str, found: Any) -> Iterator[Entry]:
    """Yield the numbers of a JSON value by their path; a list of objects becomes one list for each path below it.

    Args:
        name: Path of the value.
        found: The value.
    """
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in PROVENANCE:
                yield from numbers(f"{name}/{key}", value)
    elif isinstance(found, list) and found and all(isinstance(value, dict) for value in found):
        columns: dict[str, list[Any]] = {}
        for value in found:
            for path, number in numbers(name, value):
                columns.setdefault(path, []).append(number)
        yield from columns.items()
    elif isinstance(found, list | int | float):
        yield name, found


def json_numbers(name: str, path: Path) -> Iterator[Entry]:
    """Yield the numbers of a JSON file.

    Args:
        name: Path of the entries.
        path: The file.
    """
    yield from numbers(name, json.loads(path.read_text(encoding="utf-8")))


def arrays(name: str, path: Path) -> Iterator[Entry]:
    """Yield the arrays of numbers of an .npz file.

    Args:
        name: Path of the entries.
        path: The file.
    """
    with np.load(path) as file:
        for key in file.files:
            if file[key].dtype.kind in "iuf":
                yield f"{name}/{key}", tensor(torch.from_numpy(file[key]))


def progress(line: str) -> None:
    """Print a line on stderr.

    Args:
        line: The line.
    """
    print(line, file=sys.stderr, flush=True)
