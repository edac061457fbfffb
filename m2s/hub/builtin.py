"""Weights that ship with the package: `m2s.load("builtin:digits-m2s")` reads them without a network.

Each is a checkpoint in a folder of `m2s/hub/weights`, in bf16, with a model card, README.md, and the numbers that the card
quotes, figures.json. `scripts/make_weights.py` makes and checks them.
"""

import json
from importlib.resources import files
from pathlib import Path

from m2s.hub.folder import CONFIG

PREFIX = "builtin:"
"""The start of a place that is a name of built-in weights."""


def folder() -> Path:
    """Return the folder in the package that holds a folder for each name."""
    return Path(str(files("m2s.hub"))) / "weights"


def names() -> list[str]:
    """Return the names of all built-in weights, in alphabetical order.

    Example:
        >>> "digits-m2s" in m2s.hub.builtin.names()
        True
    """
    return sorted(path.parent.name for path in folder().glob(f"*/{CONFIG}"))


def summary(name: str) -> str:
    """Return one line about built-in weights.

    Args:
        name: One of `names()`.

    Raises:
        FileNotFoundError: There are no weights of that name.
    """
    config = json.loads((locate(PREFIX + name) / CONFIG).read_text(encoding="utf-8"))
    return str(config["extra"]["summary"])


def is_builtin(place: object) -> bool:
    """Return whether a place is a name of built-in weights, such as "builtin:digits-m2s", and not a folder or a repository.

    Args:
        place: What the user gave.
    """
    return isinstance(place, str | Path) and str(place).startswith(PREFIX)


def locate(place: str | Path) -> Path:
    """Return the folder of a checkpoint that is given by name or by path.

    Args:
        place: "builtin:NAME", or anything else.

    Returns:
        The folder in the package; for anything else the given path, with ~ replaced.

    Raises:
        FileNotFoundError: There are no built-in weights of that name.
    """
    if not is_builtin(place):
        return Path(place).expanduser()
    name = str(place).removeprefix(PREFIX)
    if name not in names():
        known = ", ".join(PREFIX + each for each in names())
        raise FileNotFoundError(f"there are no built-in weights {PREFIX}{name}: choose from {known}")
    return folder() / name


def short_name(place: str | Path) -> str:
    """Return the last part of a place, which names results: NAME of "builtin:NAME", of a folder, or of a repository.

    Args:
        place: A checkpoint, as the user gave it.
    """
    return Path(str(place).removeprefix(PREFIX)).name
