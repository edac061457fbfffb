"""The comparison of two records."""

import json
from typing import Any

TOLERANCE = 1e-5  # relative, of floats under another torch or CPU
CHANGED_TOKENS = 0.1  # fraction of tokens of an entry that may differ under another torch or CPU


def same(a: Any, b: Any) -> bool:
    """Return whether two entries are equal, bit for bit; NaN equals NaN, and 0.0 differs from -0.0.

    Args:
        a: The recorded entry.
        b: The computed entry.
    """
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def near(a: Any, b: Any, scale: float = 0.0) -> bool:
    """Return whether two entries are equal up to rounding.

    Args:
        a: The recorded entry.
        b: The computed entry.
        scale: Floats may differ by TOLERANCE times this too.
    """
    if both_tokens(a, b):
        wrong, count = token_difference(a, b)
        return wrong <= CHANGED_TOKENS * count
    if isinstance(a, dict) and isinstance(b, dict) and a["tensor"] == b["tensor"]:
        # Terms of a sum that cancel leave an error relative to the sum of absolute values.
        return all(near(a[key], b[key], a["scale"] if key == "sum" else 0.0) for key in a if key not in ("sha256", "scale"))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(near(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return same(a, b) or abs(a - b) <= TOLERANCE * max(abs(a), abs(b), scale)
    return same(a, b)


def both_tokens(a: Any, b: Any) -> bool:
    """Return whether both entries are tokens of one shape.

    Args:
        a: The recorded entry.
        b: The computed entry.
    """
    return isinstance(a, str) and isinstance(b, str) and " " in a and " " in b and a.split()[0] == b.split()[0]


def token_difference(a: str, b: str) -> tuple[int, int]:
    """Return how many tokens differ, and how many there are.

    Args:
        a: The recorded entry.
        b: The computed entry.
    """
    x, y = (entry.partition(" ")[2] for entry in (a, b))
    pairs = list(zip(*((text.split(",") if "," in text else text) for text in (x, y)), strict=False))
    return sum(one != other for one, other in pairs), len(pairs)


def shown(a: Any, b: Any) -> str:
    """Return both values of an entry that differs.

    Args:
        a: The recorded entry.
        b: The computed entry.
    """
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        wrong = [i for i, pair in enumerate(zip(a, b, strict=True)) if not same(*pair)]
        where = f"{len(wrong)} of {len(a)} values differ, the first at [{wrong[0]}]"
        return f"{where}\n    recorded {a[wrong[0]]!r}\n    computed {b[wrong[0]]!r}"
    if both_tokens(a, b):
        changed, count = token_difference(a, b)
        return f"{changed} of {count} tokens differ\n    recorded {a}\n    computed {b}"
    return f"values differ\n    recorded {json.dumps(a)}\n    computed {json.dumps(b)}"


def renamed(missing: list[str], new: list[str], recorded: dict[str, Any], computed: dict[str, Any]) -> dict[str, str]:
    """Pair recorded entries with computed ones of another name and an equal value.

    Keys of JSON files and fields of results may be renamed; their values and their run or process may not change.

    Args:
        missing: Names of recorded entries that were not computed.
        new: Names of computed entries that were not recorded.
        recorded: Entries of the file.
        computed: Entries of this version of the library.

    Returns:
        New names by old names.
    """
    pairs: dict[str, str] = {}
    for old in missing:
        group = old.split("/")[:2]
        for name in new:
            if name not in pairs.values() and name.split("/")[:2] == group and same(recorded[old], computed[name]):
                pairs[old] = name
                break
    return pairs


def compare(recorded: dict[str, Any], computed: dict[str, Any], exact: bool) -> int:
    """Print all differences.

    Args:
        recorded: Entries of the file.
        computed: Entries of this version of the library.
        exact: Ask for equality of every bit; else for equality up to rounding.

    Returns:
        How many entries differ.
    """
    missing = [name for name in recorded if name not in computed]
    new = [name for name in computed if name not in recorded]
    pairs = renamed(missing, new, recorded, computed)
    for old, name in pairs.items():
        print(f"renamed, with the same value: {old} -> {name}")
    lines = [f"{name}: recorded, but not computed" for name in missing if name not in pairs]
    lines += [f"{name}: computed, but not recorded" for name in new if name not in pairs.values()]
    rounded = tokens = 0
    for name in recorded:
        if name not in computed or same(recorded[name], computed[name]):
            continue
        a, b = recorded[name], computed[name]
        if not exact and near(a, b):
            rounded += 1
            tokens += token_difference(a, b)[0] if both_tokens(a, b) else 0
            continue
        lines.append(f"{name}: {shown(a, b)}")
    print("\n".join(lines), end="\n" if lines else "")
    equal = len(recorded) - len(missing) - rounded - (len(lines) - len(missing) - len(new) + 2 * len(pairs))
    print(f"{equal} entries are equal bit for bit, {len(pairs)} renamed with equal values, {len(lines)} differ", end="")
    print("." if exact else f"; {rounded} are equal up to rounding ({tokens} of their tokens differ).")
    return len(lines)
