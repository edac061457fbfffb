"""Names in result files of earlier versions."""

from typing import Any

EARLIER_NAMES = {
    "bound": "nelbo",
    "free": "unprojected",
    "distinct_free": "distinct_unprojected",
    "who": "description",
    "retokenise": "retokenize",
}
"""Keys of bpd.json, repair.json, genppl.json and the rows of experiments in earlier versions, and their names now."""


def with_current_names(value: Any) -> Any:
    """Rename the keys of a result that an earlier version wrote.

    Args:
        value: The content of a JSON file, or a part of it.

    Returns:
        The same content with the current keys. A result of this version is returned as it is.
    """
    if isinstance(value, dict):
        return {EARLIER_NAMES.get(key, key): with_current_names(part) for key, part in value.items()}
    return [with_current_names(part) for part in value] if isinstance(value, list) else value
