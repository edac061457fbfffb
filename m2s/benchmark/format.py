"""The result of a part as text."""

from collections.abc import Iterator
from typing import Any

COLUMNS = {
    "median_ms": ("median ms", "{:.3f}"),
    "best_ms": ("best ms", "{:.3f}"),
    "peak_gib": ("extra GiB", "{:.3f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "images_per_second": ("images/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
}
FORMATTED = ("what", "contenders", "ratios", "bars", "skipped", "tables", "failed")


def format_part(part: dict[str, Any]) -> str:
    """Return the result of a part as text.

    Args:
        part: What `Comparison.result` returned.

    Returns:
        Its table, ratios, other numbers, bars, and what was skipped.
    """
    return "\n".join([part["what"], *(f"  {line}" for line in _lines(part))])


def _lines(part: dict[str, Any]) -> Iterator[str]:
    """Yield the lines below the heading."""
    tables = part.get("tables", {})
    if part["contenders"] and not tables:
        known = [name for name in COLUMNS if any(found.get(name) is not None for found in part["contenders"].values())]
        rows = [
            [name, *(_cell(found.get(key), COLUMNS[key][1]) for key in known)] for name, found in part["contenders"].items()
        ]
        yield from align_columns([["", *(COLUMNS[key][0] for key in known)], *rows])
    for name, table in tables.items():
        warps = list(next(iter(table.values())))
        yield f"{name}: median ms by block (rows) and warps (columns)"
        rows = [[str(block), *(_cell(ms, "{:.3f}") for ms in row.values())] for block, row in table.items()]
        yield from align_columns([["", *map(str, warps)], *rows])
    for name, value in part["ratios"].items():
        if value is not None:
            yield f"{value:8.2f}  {name}"
    for name, value in part.items():
        if name not in FORMATTED:
            yield from _numbers(name.replace("_", " "), value)
    for bar in part["bars"]:
        yield format_bar(bar)
    for line in part["skipped"]:
        yield f"skipped  {line}"


def format_bar(bar: dict[str, Any]) -> str:
    """Return a bar as one line.

    Args:
        bar: What `Comparison.bar` returned.

    Returns:
        met, MISSED or not checked, the claim, its number and the limit.
    """
    state = {True: "met        ", False: "MISSED     ", None: "not checked"}[bar["met"]]
    limit = f"at most {bar['at_most']:g}" if "at_most" in bar else f"at least {bar['at_least']:g}"
    return f"{state}  {bar['claim']}: {_cell(bar['measured'], '{:.4g}')} ({limit})"


def _numbers(name: str, value: Any) -> Iterator[str]:
    """Yield other numbers: a table for a dictionary of dictionaries, one line for a number."""
    if isinstance(value, dict) and value and all(isinstance(entry, dict) for entry in value.values()):
        known = list(next(iter(value.values())))
        rows = [[key, *(_cell(entry.get(column), "{:.2g}") for column in known)] for key, entry in value.items()]
        yield from align_columns([[name, *(column.replace("_", " ") for column in known)], *rows])
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _numbers(f"{name}, {str(key).replace('_', ' ')}", entry)
    elif value is not None:
        yield f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"


def _cell(value: float | None, style: str) -> str:
    """Format a number; a dash for None."""
    return "-" if value is None else style.format(value)


def align_columns(rows: list[list[str]]) -> list[str]:
    """Align the columns of a table.

    Args:
        rows: The cells, the head first.

    Returns:
        One line for each row, the first column to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]
