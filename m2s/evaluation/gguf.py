"""Read the header of a .gguf file."""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from m2s.errors import UserError

# Type codes of the format, as codes of the module struct
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def gguf_values(path: Path) -> dict[str, Any]:
    """Read the numbers and strings in the header of a .gguf file.

    Args:
        path: The file.

    Returns:
        Values by key. Lists, such as all tokens, are skipped.

    Raises:
        UserError: The file is no .gguf file, damaged, or of an old version.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{path} is not a GGUF file: it does not start with the bytes GGUF")
            version, _, count = struct.unpack("<IQQ", file.read(20))
            if version < 2:
                raise UserError(f"{path} is GGUF of version {version}, but versions from 2 on can be read: convert it again")
            return {key: value for key, value in (_pair(file) for _ in range(count)) if value is not None}
    except (struct.error, KeyError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise UserError(f"{path} is damaged or cut short: get it again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _pair(file: BinaryIO) -> tuple[str, Any]:
    """Read a key and its value; None for a list."""
    key = _string(file)
    (kind,) = struct.unpack("<I", file.read(4))
    if kind == STRING:
        return key, _string(file)
    if kind != ARRAY:
        return key, _number(file, kind)
    item_kind, length = struct.unpack("<IQ", file.read(12))
    if item_kind == STRING:
        for _ in range(length):
            (size,) = struct.unpack("<Q", file.read(8))
            file.seek(size, 1)
    else:
        file.seek(length * struct.calcsize(SCALARS[item_kind]), 1)
    return key, None


def _string(file: BinaryIO) -> str:
    """Read a string."""
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode()


def _number(file: BinaryIO, kind: int) -> Any:
    """Read a number of type code `kind`."""
    code = f"<{SCALARS[kind]}"
    return struct.unpack(code, file.read(struct.calcsize(code)))[0]
