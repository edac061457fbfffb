"""Options of single samplers, such as --corrections, made from the fields of the samplers' dataclasses."""

import dataclasses
import functools
import types
import typing
from typing import Annotated, Any

import tyro

from m2s.cli.help_text import field_docs
from m2s.samplers.registry import SAMPLERS

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: "True|False"}


def with_sampler_options(command: type) -> type:
    """Return a command with one more option for every field of a registered sampler.

    A field becomes an option where a command line can hold its value (a number, a text, yes or no, a choice), and where the
    command has no option of that name. Samplers share an option when their fields have the same name. The default None stands
    for the sampler's own default.

    Args:
        command: The dataclass of a command that draws samples.

    Returns:
        A subclass of it. Its attribute `sampler_options` names the new options.
    """
    return _extended(command, tuple(SAMPLERS.items()))


@functools.cache
def _extended(command: type, samplers: tuple[tuple[str, type], ...]) -> type:
    """A command with the options of these samplers. The source of every sampler is parsed for them."""
    taken = {field.name for field in dataclasses.fields(command)}
    found: dict[str, tuple[Any, list[str]]] = {}
    for sampler, kind in samplers:
        docs = field_docs(kind)
        for field, annotation in option_fields(kind):
            if field.name not in taken:
                default = "required" if field.default is dataclasses.MISSING else f"default {field.default}"
                explained = f"{docs.get(field.name, '').rstrip('.')} ({default})".strip()
                found.setdefault(field.name, (annotation, []))[1].append(f"{sampler}: {explained}")
    fields = [
        (name, Annotated[annotation | None, _argument(annotation, f"{'; '.join(helps)}.")], None)
        for name, (annotation, helps) in found.items()
    ]
    namespace = {"__doc__": command.__doc__, "__module__": command.__module__, "sampler_options": tuple(found)}
    return dataclasses.make_dataclass(command.__name__, fields, bases=(command,), frozen=True, namespace=namespace)


def _argument(annotation: Any, explained: str) -> Any:
    """How tyro shows an option. The help has the default of each sampler, in place of None."""
    if annotation not in METAVARS:
        return tyro.conf.arg(help=explained, help_behavior_hint="")
    return tyro.conf.arg(metavar=METAVARS[annotation], help=explained, help_behavior_hint="")


def option_fields(kind: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Return the fields of a sampler whose value a command line can hold, each with its type without None.

    Args:
        kind: The dataclass of a sampler.
    """
    hints = typing.get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        annotation = hints[field.name]
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
            annotation = members[0] if len(members) == 1 else None
        if annotation in METAVARS or typing.get_origin(annotation) is typing.Literal:
            found.append((field, annotation))
    return found
