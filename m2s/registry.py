"""Registries: every extensible kind of thing (process, loss, sampler, method, ...) by its name.

A plugin, a Python file given as `--plugin my_file.py` or an entry point of the group "m2s.plugins", registers its own entries
when it is imported.
"""

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

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
        """Return a decorator that adds what it decorates under `name`.

        Args:
            name: The name that a command line or a configuration file uses.
        """
        return lambda entry: self.add(name, entry)

    def remove(self, name: str) -> None:
        """Remove an entry, so that a test or a notebook can register it again.

        Args:
            name: The name of the entry.

        Raises:
            KeyError: There is no such entry.
        """
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
            reason, hint = f"there is no {self.kind} of that name", suggest(str(name), list(self._entries))
            if option:
                raise UserError(option=option, value=name, reason=reason, hint=hint)
            raise UserError(f"there is no {self.kind} {name!r}: {hint}")
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
    """Import the plugins that installed packages declare under the entry point group "m2s.plugins".

    Raises:
        UserError: A plugin fails when it is imported.
    """
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.value not in _loaded:
            try:
                _loaded[point.value] = point.load()
            except Exception as error:
                raise UserError(
                    f"plugin {point.name} ({point.value}) of an installed package failed: {type(error).__name__}: {error}"
                ) from error


def option_types(builder: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that a builder reads, with their types.

    Args:
        builder: A function, whose options are its arguments that have a default or are keyword-only, or a dataclass, whose
            options are its fields.

    Returns:
        The annotation of each option by its name. An option without an annotation is a string.
    """
    if isinstance(builder, type) and dataclasses.is_dataclass(builder):
        hints = typing.get_type_hints(builder)
        return {field.name: hints[field.name] for field in dataclasses.fields(builder) if field.init}
    empty, keyword_only = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(builder, eval_str=True).parameters.values()
    options = [one for one in parameters if one.kind is keyword_only or one.default is not empty]
    return {one.name: str if one.annotation is empty else one.annotation for one in options}


def parse_options(given: Sequence[str], known: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Read options of the form KEY=VALUE.

    Args:
        given: The options, such as ("width=3", "bias=yes").
        known: The type of each option, from `option_types`.
        section: The section of the configuration that holds the options, such as "process", for error messages.

    Returns:
        The value of each option by its name.

    Raises:
        UserError: An option has no "=", is unknown, or its value does not have the type.
    """
    values: dict[str, Any] = {}
    for option in given:
        name, equals, text = option.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise UserError(option=f"{section}.options", value=option, reason="it has no value", hint="write KEY=VALUE")
        if name not in known:
            hint = suggest(name, list(known)) if known else "this choice reads no options"
            raise UserError(option=f"{section}.options", value=option, reason=f"there is no option {name!r}", hint=hint)
        try:
            values[name] = _convert(text, known[name])
        except ValueError:
            reason = f"{name} must be {_type_name(known[name])}"
            raise UserError(option=f"{section}.options", value=option, reason=reason) from None
    return values


def _convert(text: str, kind: Any) -> Any:
    """Return `text` as a value of the annotated type `kind`. ValueError where it is none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _convert(text, arguments[0])
    if origin in (typing.Union, types.UnionType):
        if types.NoneType in arguments and text.lower() == "none":
            return None
        for argument in arguments:
            try:
                return _convert(text, argument)
            except ValueError:
                continue
        raise ValueError(text)
    if origin is tuple:
        return tuple(_convert(part, arguments[0]) for part in text.split(",") if part)
    if kind in (int, float, str, Path):
        return kind(text)
    choices = {str(argument): argument for argument in arguments} if origin is Literal else {}
    if kind is bool:
        choices = {"yes": True, "true": True, "no": False, "false": False}
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def _type_name(kind: Any) -> str:
    """Return the type in words."""
    names = {int: "a whole number", float: "a number", bool: "yes or no", str: "a text", Path: "a path"}
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    return names.get(kind, str(kind).removeprefix("typing."))
