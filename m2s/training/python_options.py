"""Options of `m2s train` as `m2s.fit` spells them: an argument, or an entry of `options`."""

import dataclasses
import re
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from m2s.errors import UserError, UserTypeError
from m2s.training.config import Config

ARGUMENTS = {"optimizer.lr": "lr", "network.size": "size"} | {
    name: name for name in ("out", "steps", "batch", "seed", "device", "method")
}
"""The arguments of `m2s.fit` that are options of `m2s train`, by the name of the option."""
OPTION = re.compile(r"--([a-z][a-z0-9_-]*(?:\.[a-z][a-z0-9_-]*)?)(?: (?!--)([^\s,;:()]+))?")


def option_kinds() -> dict[str, Any]:
    """Return the type of each option of `m2s train`, by its name in Python such as "network.width" or "steps"."""
    sections = {field.name: hint for field, hint in _fields(Config) if dataclasses.is_dataclass(hint)}
    found = {field.name: hint for field, hint in _fields(Config) if field.name not in sections}
    for section, settings in sections.items():
        prefix = "" if section == "run" else f"{section}."
        found |= {prefix + field.name: hint for field, hint in _fields(settings)}
    return found


def _fields(settings: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a dataclass with their types."""
    hints = typing.get_type_hints(settings)
    return [(field, hints[field.name]) for field in dataclasses.fields(settings)]


def for_python(error: UserError, given: Collection[str] = ()) -> UserError:
    """Return an error of the trainer in the words of `m2s.fit`.

    Args:
        error: The error, whose texts name options as a command line has them.
        given: The names in the argument `options`. An argument of `m2s.fit` is named unless the value was given there.

    Returns:
        An error of the same class. One of another class than `UserError` and `UserTypeError` is returned as it is.
    """
    if type(error) not in (UserError, UserTypeError):
        return error
    if error.option is None or str(error) != UserError.describe(error) or error.expected is error.reason is error.hint is None:
        return type(error)(rewrite_options(str(error)), option=error.option)
    option = error.option if error.option in given else ARGUMENTS.get(error.option, error.option)
    parts = {name: getattr(error, name) for name in ("expected", "reason", "hint")}
    texts: dict[str, Any] = {name: None if text is None else rewrite_options(text) for name, text in parts.items()}
    return type(error)(option=option, value=error.value, **texts)


def rewrite_options(text: str) -> str:
    """Replace options of a command line in a message: "--micro-batch 8" becomes options={"micro_batch": 8}.

    Args:
        text: The message. Names that `m2s train` does not have stay as they are.

    Returns:
        The new message.
    """
    kinds = option_kinds()

    def spell(found: re.Match[str]) -> str:
        name, word = found[1].replace("-", "_"), found[2]
        if name not in kinds:
            return found[0]
        value = _value(kinds[name], word)
        rest = "" if word is None or (value is not None and kinds[name] is not bool) else f" {word}"
        if name in ARGUMENTS:
            return (ARGUMENTS[name] if value is None else f"{ARGUMENTS[name]}={value!r}") + rest
        return (f'options["{name}"]' if value is None else f"options={{{name!r}: {value!r}}}".replace("'", '"')) + rest

    return OPTION.sub(spell, text).replace("} options={", ", ")  # one dictionary for several options


def _value(kind: Any, word: str | None) -> Any:
    """The value that a word after an option stands for; None where the word is not its value."""
    if kind is bool:
        return True
    if word is None or kind is Path:
        return None
    word = word.rstrip(".")
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union else (kind,)
    for each in kinds:
        if typing.get_origin(each) is Literal and word in typing.get_args(each):
            return word
        if each in (int, float):
            try:
                return each(word)
            except ValueError:
                continue
        if each is str and word not in ("of", "on", "or", "and", "with", "starts"):
            return word
    return None
