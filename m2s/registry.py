"""Registries: every extensible kind of thing (process, loss, sampler, method, ...) by its name.

A plugin, a Python file given as `--plugin my_file.py` or an entry point of the group "m2s.plugins", registers its own entries
when it is imported.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from m2s.errors import UserError, suggest

T = TypeVar("T")
ENTRY_POINTS = "m2s.plugins"


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to entries of one kind.

    Example:
        >>> SCHEDULES: Registry[type] = Registry("schedule")
        >>> @SCHEDULES.register("constant")
        ... class Constant: ...
        >>> SCHEDULES["constant"]
        <class 'Constant'>

    Args:
        kind: What an entry is, in one or two words. It appears in error messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Add an entry.

        Args:
            name: The name that a command line or a configuration file uses.
            entry: The entry.

        Returns:
            The entry.

        Raises:
            ValueError: Another entry has this name.
        """
        if self._entries.get(name, entry) is not entry:
            raise ValueError(f"there is already a {self.kind} named {name!r}: choose another name")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds what it decorates under `name`."""
        return lambda entry: self.add(name, entry)

    def remove(self, name: str) -> None:
        """Remove an entry, so that a test or a notebook can register it again."""
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        """Return the entry of that name. An unknown name is a KeyError; `find` explains it to a user."""
        return self._entries[name]

    def find(self, name: str, option: str = "") -> T:
        """Return the entry of that name.

        Args:
            name: The name.
            option: The option or argument that held the name, for the error message.

        Raises:
            UserError: There is no such entry. The message suggests similar names.
        """
        if name not in self._entries:
            at = f"{option} is {name!r}: " if option else ""
            raise UserError(f"{at}there is no {self.kind} {name!r}: {suggest(name, list(self._entries))}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self._entries)})"


_loaded: dict[str, Any] = {}


def load_plugin(path: Path | str) -> None:
    """Run a user's Python file, which registers its own processes, losses, networks, samplers, methods, data sets or metrics.

    A file is run once per process, whatever the number of calls.

    Args:
        path: The file.

    Raises:
        UserError: There is no such file, or it fails when it is run.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"there is no plugin {file}: --plugin takes a Python file that registers your own parts")
    key = str(file.resolve())
    if key in _loaded:
        return
    # A real module in sys.modules: dataclasses and pickle look their classes up there.
    name = f"m2s_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, key)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"plugin {file} failed: {type(error).__name__}: {error}") from error
    _loaded[key] = module


def load_entry_points() -> None:
    """Import the plugins that installed packages declare under the entry point group "m2s.plugins"."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.value not in _loaded:
            _loaded[point.value] = point.load()
