"""Commands and options as data, and the check of a command line against them.

The dataclasses of the commands say which subcommands, options, choices and types there are. `check_arguments` compares what a
user typed with them, before tyro parses it: an unknown option, a wrong choice or a missing value then gets one line in words
of the command line. tyro still does the parsing, and prints whatever this check does not cover.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from m2s.errors import UserError, suggestion

POSITIONAL = typing.get_args(tyro.conf.Positional[str])[1]  # the marker that tyro.conf.Positional attaches to a type
NUMBERS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers")}


@dataclass(frozen=True)
class Option:
    """One option or positional argument of a command.

    Args:
        name: What the user types, such as "--top-k", or the placeholder of a positional argument, such as "CHECKPOINT".
        kind: The type of a value: int, float, bool, str, Path, or another that is not checked here.
        choices: The allowed values; empty where there is no fixed list.
        many: Whether it takes any number of values.
        positional: Whether it is given without a name.
        required: Whether it has no default.
        optional: Whether the value may be None.
        default_word: The word that is typed for None.
    """

    name: str
    kind: Any
    choices: tuple[str, ...] = ()
    many: bool = False
    positional: bool = False
    required: bool = False
    optional: bool = False
    default_word: str = "None"

    @property
    def is_flag(self) -> bool:
        """Whether it is given without a value, as --compile and --no-compile are."""
        return self.kind is bool and not self.optional and not self.required

    def check(self, values: Sequence[str]) -> None:
        """Check values that were typed for this option.

        Args:
            values: The words after the option.

        Raises:
            UserError: There is no value, or one is not among the choices, or is not a number.
        """
        if not values and not self.many:
            raise UserError(f"{self.name} needs a value")
        for value in values:
            if self.optional and value == self.default_word:
                continue
            if self.choices and value not in self.choices:
                raise UserError(
                    option=self.name,
                    value=value,
                    expected=f"one of {', '.join(self.choices)}",
                    hint=suggestion(value, list(self.choices)) or None,
                )
            if self.kind in NUMBERS and not _is_number(value, self.kind):
                raise UserError(option=self.name, value=" ".join(values), expected=NUMBERS[self.kind][self.many])


def flag(name: str) -> str:
    """Return an argument's name as it is typed: "top_k" is "--top-k", "optimizer.weight_decay" is "--optimizer.weight-decay".

    Args:
        name: The name in Python.
    """
    return f"--{name.replace('_', '-')}"


def command_options(command: Any) -> dict[str, Option]:
    """Return the options and positional arguments of a command, in the order of its fields.

    Args:
        command: The dataclass of the command. A field that is a dataclass contributes its own fields, with its name in front.

    Returns:
        The options by the name that is typed. A flag has a second entry, --no-NAME.
    """
    options: dict[str, Option] = {}
    for option in _walk(command, ""):
        options[option.name] = option
        if option.is_flag:
            head, dot, last = option.name.removeprefix("--").rpartition(".")
            negative = f"--{head}{dot}no-{last}"
            options[negative] = dataclasses.replace(option, name=negative)
    return options


def subcommands(command: Any) -> dict[str, Any]:
    """Return the subcommands of a command by name, empty where it has none.

    Args:
        command: The dataclass of the command. Subcommands are a field whose type is a union of dataclasses, each with
            tyro.conf.subcommand.
    """
    for _, annotation in _fields(command):
        inner, _ = _unwrap(annotation)
        found: dict[str, Any] = {}
        for member in typing.get_args(inner) if _is_union(inner) else ():
            kind, metadata = _unwrap(member)
            name = next((mark.name for mark in metadata if hasattr(mark, "is_default")), None)  # that of tyro.conf.subcommand
            if name and dataclasses.is_dataclass(kind):
                found[name] = kind
        if found:
            return found
    return {}


def find_command(words: Sequence[str], commands: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Follow the words of a command line to the command that they name.

    Args:
        words: The command line, without the name of the program.
        commands: The commands by name.

    Returns:
        The words that name the command, such as ["evaluate", "bpd"], and its dataclass. The dataclass is None where a word is
        missing or unknown; the words then end before it.
    """
    path: list[str] = []
    known, command = dict(commands), None
    while known:
        if len(path) == len(words) or words[len(path)] not in known:
            return path, None
        command = known[words[len(path)]]
        path.append(words[len(path)])
        known = subcommands(command)
    return path, command


def check_arguments(command: Any, words: Sequence[str]) -> None:
    """Check the options and positional arguments of a command.

    Args:
        command: The dataclass of the command.
        words: What was typed after the name of the command.

    Raises:
        UserError: An option is unknown or has a wrong value, or an argument is missing or one too many.
    """
    options = command_options(command)
    named, loose = _split(words, options)
    for name, values in named:
        options[name].check(values)
    for option in options.values():
        if not option.positional:
            continue
        taken = loose if option.many else loose[:1]
        loose = loose[len(taken) :]
        if taken:
            option.check(taken)
        elif option.required:
            raise UserError(f"{option.name} is missing")
    if loose:
        raise UserError(f"unexpected argument {' '.join(loose)}")
    given = {name for name, _ in named}
    for option in options.values():
        if option.required and not option.positional and option.name not in given:
            raise UserError(f"{option.name} is missing")


class UnknownOptionError(UserError):
    """An option that a command does not have.

    Args:
        name: The option as it was typed.
        known: The options that there are.
    """

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"there is no option {name}")
        self.name, self.known = name, known


def is_option(word: str) -> bool:
    """Return whether a word of a command line is an option, not a value such as -1.

    Args:
        word: The word.
    """
    return word.startswith("--") and len(word) > 2


def _split(words: Sequence[str], options: Mapping[str, Option]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return the options with their values, and the words that belong to none."""
    named: list[tuple[str, list[str]]] = []
    loose: list[str] = []
    rest, follows_option = list(words), False
    while rest:
        word = rest.pop(0)
        if word == "--":
            raise UserError('unexpected argument "--"')  # argparse would drop it
        if not is_option(word):
            if loose and follows_option and any(option.many and option.positional for option in options.values()):
                raise UserError(f"unexpected argument {word}: give arguments without a name side by side")
            loose.append(word)
            follows_option = False
            continue
        follows_option = True
        typed, equals, value = word.partition("=")
        name = typed.replace("_", "-")
        option = options.get(name)
        if option is None or option.positional:
            raise UnknownOptionError(typed, sorted(known for known, one in options.items() if not one.positional))
        values = [value] if equals else []
        while rest and rest[0] != "--" and not (equals or option.is_flag or is_option(rest[0])) and (option.many or not values):
            values.append(rest.pop(0))
        if not option.is_flag:
            named.append((name, values))
    return named, loose


def _walk(command: Any, prefix: str) -> Iterator[Option]:
    """The options of a dataclass, each with a prefix."""
    defaults = {
        field.name: field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        for field in dataclasses.fields(command)
    }
    for name, annotation in _fields(command):
        inner, metadata = _unwrap(annotation)
        renamed = next((mark.name for mark in metadata if getattr(mark, "name", None) is not None), name)
        if dataclasses.is_dataclass(inner):
            yield from _walk(inner, f"{prefix}{renamed}." if renamed else prefix)
            continue
        positional = POSITIONAL in metadata
        metavar = next((mark.metavar for mark in metadata if getattr(mark, "metavar", None)), name.upper())
        option = _option(metavar if positional else flag(f"{prefix}{renamed}"), inner)
        # m2s.methods.config.AutoInt and AutoFloat have a constructor of their own, which reads "auto" as None.
        automatic = any(isinstance(mark, tyro.constructors.PrimitiveConstructorSpec) for mark in metadata)
        word = "auto" if automatic else "None"
        yield dataclasses.replace(option, positional=positional, required=defaults[name], default_word=word)


def _option(name: str, annotation: Any) -> Option:
    """The option of that name and type."""
    optional = many = False
    if _is_union(annotation):
        members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
        optional = len(members) < len(typing.get_args(annotation))
        annotation = _unwrap(members[0])[0] if len(members) == 1 else str
    if typing.get_origin(annotation) is tuple:
        many, annotation = True, typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return Option(name, str, tuple(map(str, typing.get_args(annotation))), many, optional=optional)
    kind = annotation if annotation in (int, float, bool, str, Path) else str
    choices = ("True", "False") if kind is bool and optional else ()  # an optional bool takes a value: it is no flag
    return Option(name, kind, choices, many, optional=optional)


def _fields(command: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass with their types."""
    hints = typing.get_type_hints(command, include_extras=True)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(command)]


def _unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without Annotated, and what Annotated says of it."""
    metadata: tuple[Any, ...] = ()
    while typing.get_origin(annotation) is typing.Annotated:
        annotation, *more = typing.get_args(annotation)
        metadata += tuple(more)
    return annotation, metadata


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _is_number(text: str, kind: Any) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True
