"""Seeded damage to files: bytes, JSON values, safetensors headers and arrays."""

import copy
import io
import json
import random
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2,
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "x",
    "-1",
    "../../outside",
    "/etc/passwd",
    "\x1b[2J\x1b]0;title\x07",
    "\ud800",
    "<script>",
    "a" * 5000,
    [],
    [[]],
    [1, "x", None],
    {},
    {"kind": "x"},
)
"""Values that stand where others are expected."""


def damage_bytes(data: bytes, dice: random.Random) -> bytes:
    """Change some bytes.

    Args:
        data: The bytes.
        dice: The random numbers.

    Returns:
        Other bytes, or by chance the same.
    """
    at = dice.randrange(len(data) + 1)
    length = min(len(data) - at, dice.choice((1, 1, 2, 8, 100)))
    how = dice.randrange(9)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + dice.randbytes(dice.choice((1, 4, 64))) + data[at:]
    if how == 2:
        return data[:at] + data[at + length :]
    if how == 3:
        return data[:at] + bytes(length) + data[at + length :]
    if how == 4:
        return dice.choice((b"", b"\0", b"\xff\xfe", b"{}", b"[]", b"null", b"[" * 100_000, b"\x80\x02."))
    if how == 5:
        return data[:at] + dice.choice((b"\xff", b"\xed\xa0\x80", b"\0", b"\r", b"\x1b[31m")) + data[at:]
    if how == 6:
        return data + data[at:]
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 5)) if data else 0):
        changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def damage_json(data: bytes, dice: random.Random) -> bytes:
    """Change one to three values of a JSON text.

    Args:
        data: The text.
        dice: The random numbers.

    Returns:
        Another JSON text, which may hold NaN, infinities and lone surrogates.
    """
    value = json.loads(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        value = _damage_value(value, dice)
    return json.dumps(value, indent=dice.choice((None, 1))).encode()


def _damage_value(value: Any, dice: random.Random) -> Any:
    """Change one place of a JSON value."""
    places = list(_places(value))
    if not places:
        return dice.choice(VALUES)
    container, key = dice.choice(places)
    how = dice.randrange(10)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[dice.choice(("", "x", "__class__", str(key) + " "))] = container.pop(key)
    elif how == 2 and isinstance(container[key], int | float):
        container[key] = container[key] * dice.choice((-1, 2, 1000)) + dice.choice((0, 1))
    elif how == 3:
        other, place = dice.choice(places)
        container[key] = (
            copy.deepcopy(other[place]) if place in (other if isinstance(other, dict) else range(len(other))) else 0
        )
    elif how == 4 and isinstance(container[key], str):
        container[key] += dice.choice(("x", "\0", " ", "/.."))
    elif how == 5:
        for _ in range(dice.choice((3, 300))):
            container[key] = [container[key]]
    else:
        container[key] = copy.deepcopy(dice.choice(VALUES))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers and keys in a JSON value."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def damage_text_or_json(data: bytes, dice: random.Random) -> bytes:
    """Change values or bytes of a JSON text, values more often.

    Args:
        data: The text.
        dice: The random numbers.
    """
    return damage_bytes(data, dice) if dice.random() < 0.3 else damage_json(data, dice)


def damage_lines(data: bytes, dice: random.Random) -> bytes:
    """Change one line of a file with one JSON value per line.

    Args:
        data: The file.
        dice: The random numbers.
    """
    lines = data.splitlines(keepends=True)
    at = dice.randrange(len(lines))
    lines[at] = damage_text_or_json(lines[at].rstrip(b"\n"), dice).replace(b"\n", b" ") + b"\n"
    return b"".join(lines)


def damage_safetensors(data: bytes, dice: random.Random) -> bytes:
    """Change the header of a safetensors file, its length, or bytes anywhere.

    Args:
        data: The file.
        dice: The random numbers.
    """
    how, end = dice.random(), 8 + int.from_bytes(data[:8], "little")
    if how < 0.3:
        return damage_bytes(data, dice)
    if how < 0.4:
        length = dice.choice((0, 1, end - 9, end - 7, len(data), 2**32, 2**63, 2**64 - 1))
        return length.to_bytes(8, "little") + data[8:]
    if how < 0.6:
        return _damage_weights(data, end, dice)
    header = damage_json(data[8:end], dice) if how < 0.9 else damage_bytes(data[8:end], dice)
    return len(header).to_bytes(8, "little") + header + data[end:]


def _damage_weights(data: bytes, end: int, dice: random.Random) -> bytes:
    """Replace some weights, the file being well-formed: NaN, infinity, zero or another number."""
    count = (len(data) - end) // 4
    weights = np.frombuffer(data[end : end + 4 * count], "<f4").copy()
    at = dice.randrange(count)
    weights[at : at + dice.choice((1, 1, 64))] = dice.choice((np.nan, np.inf, -np.inf, 0.0, 1e38, weights[at] + 1))
    return data[:end] + weights.tobytes() + data[end + 4 * count :]


def damage_arrays(data: bytes, dice: random.Random) -> bytes:
    """Change the bytes of an .npz, or replace one of its arrays.

    Args:
        data: The file.
        dice: The random numbers.
    """
    if dice.random() < 0.4:
        return damage_bytes(data, dice)
    with np.load(io.BytesIO(data)) as file:
        arrays = dict(file)
    name = dice.choice(sorted(arrays))
    tokens, changed = arrays[name], {**arrays}
    other: tuple[Any, ...] = (
        np.zeros((0, 64), np.int32),
        np.zeros((4,), np.int32),
        np.zeros((2, 2, 2, 2), np.int32),
        np.full((4, 64), -1, np.int32),
        np.full((4, 64), 10**6, np.int32),
        np.full((4, 64), 2**63, np.uint64),
        np.full((4, 64), np.nan),
        np.full((4, 64), 1e300),
        np.ones((4, 64), np.complex64),
        np.ones((4, 64), bool),
        np.ones((4, 63), np.int32),
        np.full((4, 64), "x"),
        np.zeros((4, 64), "datetime64[s]"),
        np.zeros((4, 64), [("a", "i4")]),
        np.array("[[]]"),
        np.array('{"data": 3}'),
        np.array(b"\xff"),
        np.float64(3),
        tokens[..., :1] if tokens.ndim else tokens,
        tokens.astype(">i4") if tokens.dtype.kind == "i" else tokens,
    )
    how = dice.randrange(12)
    if how == 0:
        del changed[name]
    elif how == 1:
        return _huge_array(data, dice)
    else:
        changed[name] = dice.choice(other)
    made = io.BytesIO()
    np.savez_compressed(made, **changed)
    return made.getvalue()


def _huge_array(data: bytes, dice: random.Random) -> bytes:
    """An .npz whose header declares far more numbers than the file has, or that are compressed to almost nothing."""
    made = io.BytesIO()
    shape = dice.choice(((10**12,), (2**40, 64), (10**6, 10**6)))
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("tokens.npy", head + bytes(dice.choice((0, 64, 50_000_000))))
    return made.getvalue()
