"""Help texts of options, from the strings that follow the fields of a command's dataclass."""

import ast
import functools
import inspect
import itertools
import textwrap
from typing import Annotated, TypeVar

from typing_extensions import Doc

Command = TypeVar("Command", bound=type)


def help_from_source(command: Command) -> Command:
    """Attach the string after each field to its type, as one paragraph. Apply it below `@dataclass`.

    tyro reads these strings too, but it keeps the line breaks of the source in its help pages.

    Args:
        command: The class of a command.

    Returns:
        The same class.
    """
    for name, text in field_docs(command).items():
        command.__annotations__[name] = Annotated[command.__annotations__[name], Doc(text)]
    return command


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """Return the string that follows each field in the source of a dataclass, which Python does not keep.

    Args:
        kind: The dataclass.

    Returns:
        The strings by the name of the field, without line breaks; empty where there is no source.
    """
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, ValueError):  # a class made in an interactive session has no source
        return {}
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
