"""Read tensors from files, without running code that a file may contain, and without trusting the sizes that it states."""

import math
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from m2s.hub.pickles import check_keys
from m2s.io import parse_json

LISTED = 8  # faults of each kind in an error message
HEADER_BYTES = 100_000_000  # the longest header that the format allows
POINTER = b"version "  # the first bytes of a file of which Git LFS has the contents
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that are read, by their names in a safetensors file."""


class TensorInfo(NamedTuple):
    """What the header of a file says about a tensor.

    Args:
        dtype: Its dtype.
        shape: Its shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class TensorFaults:
    """How the tensors of a file differ from those of a network.

    Args:
        missing: Names of tensors that the file does not have.
        unexpected: Names of tensors that the network does not have.
        other: Other faults in words, such as another shape.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.missing or self.unexpected or self.other)

    def __str__(self) -> str:
        """List up to eight faults of each kind, and the number of the others. Names of a file from others may be long."""
        parts = []
        for kind, faults in ((" is missing", self.missing), (" is unexpected", self.unexpected), ("", self.other)):
            each = [fault + kind for fault in faults]
            parts += [fault if len(fault) <= 160 else f"{fault[:80]} ... {fault[-60:]}" for fault in each[:LISTED]]
            if len(faults) > LISTED:
                parts.append(f"and {len(faults) - LISTED} more{kind.replace(' is', ' are')}")
        return "; ".join(parts)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of a .safetensors file. The tensors themselves are not read.

    Args:
        path: The file.

    Returns:
        Dtype and shape of every tensor, by name. They fit the size of the file.

    Raises:
        ValueError: The file is damaged, or is of another format.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is not an ordinary file")
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == POINTER:
                raise ValueError("it is a pointer of Git LFS and not the weights: run git lfs pull in its folder")
            if len(start) < 8 or length > min(size - 8, HEADER_BYTES):
                if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
                    raise ValueError("it is a pickle or TorchScript, which can run code: write its weights as .safetensors")
                raise ValueError(f"its header should have {length:,} bytes, and the file has {size:,}")
            header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        spans = sorted(_span(name, entry) for name, entry in header.items())
        end = 0
        for begin, stop, name in spans:
            if begin != end:
                raise ValueError(f"{_quoted(name)} begins at byte {begin}, expected {end}")
            end = stop
        if end != size - 8 - length:
            raise ValueError(f"its tensors have {end:,} bytes, and the file has {size - 8 - length:,} for them")
    except ValueError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}): copy it again, or save the checkpoint again") from None
    return {name: TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}


def _span(name: str, entry: Any) -> tuple[int, int, str]:
    """Where the bytes of a tensor begin and end, checked against its dtype and shape."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{_quoted(name)} has no dtype, shape and offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{_quoted(name)} has dtype {_quoted(str(dtype))}, expected one of {', '.join(DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{_quoted(name)} has a shape or offsets that are not whole numbers")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{_quoted(name)} has {end - begin:,} bytes, which its shape does not fit")
    return begin, end, name


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of whole numbers that a size can have."""
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)


def _quoted(name: str) -> str:
    """A name in an error message, not longer than a line."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def read_safetensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read a .safetensors file.

    Args:
        path: The file.
        names: The tensors to read; None: all.

    Returns:
        Its tensors, by name.

    Raises:
        ValueError: The file is damaged.
    """
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in (header if names is None else names)}
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
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
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise ValueError("it is a pointer of Git LFS and not the weights: run git lfs pull in its folder")
        _check_stored(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except (pickle.UnpicklingError, Exception) as error:  # a damaged pickle can raise anything
        named = re.search(r"GLOBAL (\S+)", str(error))
        # torch's own message advises to load the file with everything that it names.
        lines = [f"it names {named[1][:80]}"] if named else str(error).strip().splitlines()
        reason = next(iter(lines), type(error).__name__)
        raise ValueError(
            f"{path} is damaged, or holds objects other than tensors, which are not read: {reason}. Copy it again, or "
            "write its weights as .safetensors"
        ) from None


def _check_stored(path: Path) -> None:
    """Reject a zip file with compressed entries, which could expand to more than the memory holds, or with nested keys."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        packed = next((info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise ValueError(f"{_quoted(packed)} is compressed, which torch.save never writes")
    check_keys(path)


def tensors_by_name(found: Any, path: Path) -> dict[str, Tensor]:
    """Return what was read from a file, where it is tensors by name, each of which is stored completely.

    A pickle can state a tensor whose strides repeat a few stored values. It would need memory that the file does not have.

    Args:
        found: What was read.
        path: The file, for the message of an error.

    Returns:
        Tensors by name.

    Raises:
        ValueError: It is something else, or a tensor has more values than are stored.
    """
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} does not hold tensors by name: copy it again")
    for name, value in found.items():
        if value.layout != torch.strided or value.numel() * value.itemsize > value.untyped_storage().nbytes():
            raise ValueError(
                f"{path}: {_quoted(str(name))} has {value.numel():,} values, which are not all stored: it was not written by "
                "the authors' code"
            )
    return dict(found)


def uniform_precision(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in one floating-point dtype, because a network cannot be called with several.

    Args:
        weights: Tensors by name.

    Returns:
        The tensors. Where the floating-point ones have several dtypes, or one of 8 bits, they are converted to float32.
    """
    kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
    if len(kinds) < 2 and all(kind.itemsize > 1 for kind in kinds):
        return dict(weights)
    return {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors hold neither NaN nor infinity.

    Args:
        tensors: Tensors by name.

    Raises:
        ValueError: One of them does.
    """
    bad = [name for name, value in tensors.items() if value.is_floating_point() and not bool(value.isfinite().all())]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ValueError(
            f"{', '.join(map(_quoted, bad[:3]))}{more} of {len(tensors)} tensors hold NaN or infinity: the training diverged, "
            "or the file is damaged. Use an earlier checkpoint"
        )
