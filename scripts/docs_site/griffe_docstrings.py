"""Extension of griffe, which reads the docstrings for mkdocstrings: named tuples have a signature, and examples are code."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """What griffe does not know of the docstrings of m2s."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Let sections `Example:`, which griffe takes for notes, be sections of code.

        Args:
            obj: A module, class, function or attribute.
            **kwargs: What griffe passes to other extensions.
        """
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Add the constructor of a named tuple.

        Args:
            cls: A class.
            **kwargs: What griffe passes to other extensions.
        """
        if not any(str(base) == "NamedTuple" for base in cls.bases):
            return
        fields = [each for each in cls.members.values() if each.is_attribute and "instance-attribute" in each.labels]
        parameters = [
            griffe.Parameter(
                each.name, kind=griffe.ParameterKind.positional_or_keyword, annotation=each.annotation, default=each.value
            )
            for each in fields
        ]
        me = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        cls.set_member(
            "__init__", griffe.Function("__init__", parameters=griffe.Parameters(me, *parameters), lineno=cls.lineno)
        )
