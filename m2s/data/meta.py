"""meta.json of a prepared text: what it must hold, checked before anything uses it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2s.data.files import BadData
from m2s.data.pack import SPLITS
from m2s.data.shards import DTYPES
from m2s.io import parse_json, read_regular

FORMAT = "m2s tokens 1"
SHA256 = re.compile("[0-9a-f]{64}")


def read_object(path: Path, hint: str) -> dict[str, Any]:
    """Read a JSON object of a prepared text.

    Args:
        path: The file.
        hint: What to do if it is damaged, as the end of the message.

    Returns:
        The object.

    Raises:
        BadData: The file cannot be read or is damaged.
    """
    try:
        return parse_json(read_regular(path))
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror or error}): {hint}") from error
    except ValueError as error:
        raise BadData(f"{path} is damaged ({error}): {hint}") from error


def check_meta(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Check the contents of meta.json.

    Args:
        path: The file, for messages.
        meta: Its contents.

    Returns:
        The contents. "dtype" is "uint16" where an older file does not name it.

    Raises:
        BadData: A value is missing, of another type, or impossible.
    """
    if meta.get("format") != FORMAT:
        raise BadData(f"{path} has format {meta.get('format')!r:.60}, expected {FORMAT!r}: prepare the text again")
    meta = {"dtype": "uint16", **meta}
    if not isinstance(meta["dtype"], str) or meta["dtype"] not in DTYPES:
        raise BadData(f"{path} has tokens of type {meta['dtype']!r:.60}, expected {' or '.join(DTYPES)}: install a newer m2s")
    if (fault := _fault(meta)) is not None:
        raise BadData(f"{path} is damaged ({fault}): prepare the text again")
    return meta


def is_count(value: Any, least: int = 0) -> bool:
    """Return whether a value of a JSON file is a count.

    Args:
        value: The value.
        least: The least count that is possible.
    """
    return type(value) is int and least <= value < 2**63


def is_file_name(value: Any) -> bool:
    """Return whether a value of a JSON file names a file in the same folder.

    Args:
        value: The value.
    """
    return isinstance(value, str) and value not in ("", ".", "..") and len(value) < 200 and not set(value) & {"/", "\\", "\0"}


def _fault(meta: Mapping[str, Any]) -> str | None:
    """The first thing that is wrong with meta.json; None where it can be used."""
    checks = {
        "vocab": is_count(meta.get("vocab"), 1),
        "end": "end" in meta and (meta["end"] is None or is_count(meta["end"])),
        "validation_fraction": _is_fraction(meta.get("validation_fraction", 0)),
        "tokenizer": _is_tokenizer(meta.get("tokenizer")),
        "sources": isinstance(meta.get("sources"), list),
        "counts": _is_table(meta.get("counts")),
        "tokenizer_file": meta.get("tokenizer_file") is None or _is_file(meta["tokenizer_file"]),
        "splits": isinstance(meta.get("splits"), dict),
    }
    if wrong := next((name for name, valid in checks.items() if not valid), None):
        return f"it has no valid {wrong!r}"
    for name, split in meta["splits"].items():
        if not isinstance(split, dict) or not is_count(split.get("tokens")) or not is_count(split.get("documents")):
            return f"the counts of the split {name!r:.40} are missing"
        shards = split.get("shards")
        if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
            return f"the files of the split {name!r:.40} are missing"
        for shard in shards:
            if not is_file_name(shard.get("file")):
                return f"the split {name!r:.40} names the file {shard.get('file')!r:.60}, expected a name without folders"
            if not _is_file(shard) or not is_count(shard.get("tokens"), 1):
                return f"the file {shard['file']!r:.60} has no valid SHA-256 or number of tokens"
    if unknown := meta["splits"].keys() - set(SPLITS):
        return f"the split {min(unknown)!r:.40} is none of {', '.join(SPLITS)}"
    if missing := {"train", "validation"} - meta["splits"].keys():
        return f"it has no split {min(missing)!r}"
    return None


def _is_tokenizer(value: Any) -> bool:
    """Whether a value describes a tokenizer by the name of its class. It may be the user's own class."""
    return isinstance(value, dict) and isinstance(value.get("kind"), str) and value["kind"].isidentifier()


def _is_fraction(value: Any) -> bool:
    """Whether a value is a fraction of the tokens that can be held out."""
    return type(value) in (int, float) and 0 <= value < 1


def _is_table(value: Any) -> bool:
    """Whether a value holds the counts of each source."""
    rows = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(row, dict) and is_count(row.get("blank")) for row in rows)


def _is_file(value: Any) -> bool:
    """Whether a value names a file in the same folder, with its SHA-256."""
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in ("file", "sha256")):
        return False
    return is_file_name(value["file"]) and SHA256.fullmatch(value["sha256"]) is not None
