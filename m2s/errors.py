"""Errors that say what was wrong, what was expected and what to do."""

import difflib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# C0 and C1 control characters, DEL, separators of lines, marks that reverse the direction of text, lone surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


class UserError(ValueError):
    """An option, argument or file that cannot be used. Raised before anything is computed or written.

    The message is either given or built from the parts. It is one line: control characters, which a file may hold, are
    escaped. The parts stay on the exception, so that a command line can print the option as its user typed it (`describe`)
    without parsing the message.

    Args:
        message: The complete message, for example about the shape of a tensor. Leave it out to build it from the parts.
        option: Name of the option or argument, as in Python: "steps", "optimizer.warmup".
        value: The value that was given. None means that the message does not state it.
        expected: What the value must be, as the end of "it must be ...".
        reason: Why the value cannot be used, as the end of "..., but ...", where `expected` does not say it.
        hint: What to do about it.

    Raises:
        TypeError: There is neither a message nor an option.

    Example:
        >>> raise UserError(option="steps", value=0, expected="at least 1", hint="a run has one training step or more")
        m2s.errors.UserError: steps is 0, but it must be at least 1: a run has one training step or more
    """

    def __init__(
        self,
        message: str = "",
        *,
        option: str | None = None,
        value: object = None,
        expected: str | None = None,
        reason: str | None = None,
        hint: str | None = None,
    ) -> None:
        if not message and option is None:
            raise TypeError("UserError needs a message or an option")
        self.option, self.value, self.expected, self.reason, self.hint = option, value, expected, reason, hint
        self._message = message
        # `args` holds the finished text alone: pickle calls the class with it and then restores the attributes.
        super().__init__(printable(message) or self.describe())

    def describe(self, option: str | None = None) -> str:
        """Return the message with another spelling of the option.

        Args:
            option: The option as it is typed, such as "--optimizer.warmup". None keeps `self.option`.

        Returns:
            The message, rebuilt from the parts. A message that was given as text is returned as it is.
        """
        if self._message:
            return printable(self._message)
        text = str(option or self.option)
        if self.value is not None:
            text += f" is {self.value!r}"
        if self.expected is not None:
            text += f"{'' if self.value is None else ', but it'} must be {self.expected}"
        elif self.reason is not None:
            text += f"{' cannot be used:' if self.value is None else ', but'} {self.reason}"
        elif self.value is None:
            text += " cannot be used"
        return printable(f"{text}: {self.hint}" if self.hint else text)

    def within(self, section: str) -> "UserError":
        """Return the same error for an option of a section: "width" within "network" is "network.width".

        Args:
            section: The section of a configuration.

        Returns:
            An error of the same class. A message that was given as text has the section before it. An option that is already
            named with its section stays as it is.
        """
        if self.option is None:
            return type(self)(f"{section}: {self}")
        if self.option.startswith(f"{section}."):
            return self
        parts = {name: getattr(self, name) for name in ("value", "expected", "reason", "hint")}
        return type(self)(option=f"{section}.{self.option}", **parts)


class UserTypeError(UserError, TypeError):
    """An argument of the wrong type. It is a `UserError` and also Python's TypeError."""


class UnsupportedError(TypeError):
    """A head or a process that a loss, a head or a curriculum does not support.

    The classes that are supported stay on the exception, so that a command line can name the options that choose them.

    Args:
        what: What does not support it, such as "the masked objective".
        given: The head or process that was given.
        head: The class of heads that is supported, or a description; None: every head.
        process: The class of processes that is supported, or a description; None: every process.
        hint: What to do about it.

    Example:
        >>> raise UnsupportedError("UDLM's loss", head, head=Posterior, process=Uniform)
        m2s.errors.UnsupportedError: UDLM's loss is for m2s.Posterior over m2s.Uniform, not for LogScore(...)
    """

    def __init__(
        self,
        what: str,
        given: object,
        head: type | str | None = None,
        process: type | str | None = None,
        hint: str = "",
    ) -> None:
        self.what, self.given, self.head, self.process, self.hint = what, given, head, process, hint
        super().__init__(self.describe({}))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.given, self.head, self.process, self.hint)

    def describe(self, options: Mapping[type, str]) -> str:
        """Return the message with the option that chooses each supported class.

        Args:
            options: The option by class, such as {Uniform: "--process.kind uniform"}. Other classes have none.

        Returns:
            The message.
        """
        supported = []
        for one in (self.head, self.process):
            if isinstance(one, type):
                supported.append(f"{public_name(one)} ({options[one]})" if one in options else public_name(one))
            elif one is not None:
                supported.append(one)
        text = f"{self.what} is for {' over '.join(supported)}, not for {self.given}"
        return f"{text}: {self.hint}" if self.hint else text


def public_name(cls: type) -> str:
    """Return the name by which users of the library import a class.

    Args:
        cls: The class.

    Returns:
        "m2s.Uniform" where the library exports it at the top, otherwise the name in its package, as in "m2s.heads.NextToken".
    """
    if vars(sys.modules.get("m2s", object)).get(cls.__name__) is cls:
        return f"m2s.{cls.__name__}"
    return f"{cls.__module__.rpartition('.')[0] or cls.__module__}.{cls.__name__}"


def explain_arguments(cls: type) -> None:
    """Let the constructor of a class explain arguments that it does not have.

    Python's message names the class that defines `__init__`, which may be an internal base class. This one names the class that
    was called, the closest argument and all of them. Call it in `__init_subclass__`.

    Args:
        cls: The class. Its `__init__` is replaced unless it is inherited.

    Raises:
        UserTypeError: From the constructor, not from this function: an argument does not exist or is missing.
    """
    if "__init__" not in vars(cls):
        return
    construct = vars(cls)["__init__"]

    @functools.wraps(construct)
    def explained(self: object, *given: Any, **named: Any) -> None:
        try:
            construct(self, *given, **named)
        except TypeError:
            signature = inspect.signature(construct)
            try:
                signature.bind(self, *given, **named)
            except TypeError:
                raise UserTypeError(_explain(type(self), signature, given, named)) from None
            raise

    cls.__init__ = explained  # type: ignore[misc]


def _explain(cls: type, signature: inspect.Signature, given: Sequence[Any], named: Mapping[str, Any]) -> str:
    """The message for arguments that do not fit the signature of a constructor."""
    parameters = dict(list(signature.parameters.items())[1:])
    name, usage = public_name(cls), f"it is {public_name(cls)}({', '.join(parameters)})"
    unknown = next((key for key in named if key not in parameters), None)
    if unknown is not None:
        closest = suggestion(unknown, list(parameters))
        return f"{name} has no argument {unknown}: {closest + ' ' if closest else ''}{usage}"
    places = [key for key, parameter in parameters.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    missing = [key for key in parameters if key not in named and key not in places[: len(given)]]
    missing = [key for key in missing if parameters[key].default is inspect.Parameter.empty]
    if missing:
        return f"{name} needs {' and '.join(missing)}: {usage}"
    return f"{name} takes {len(parameters)} arguments, each of them once: {usage}"


def suggestion(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """Return a question that offers the known names closest to an unknown one.

    Dashes, case and the part before the last dot count for little: "clip" is close to "optimizer.clip", and "model.kind" to
    "network.kind".

    Args:
        name: The unknown name.
        known: The names that exist.

    Returns:
        "did you mean ...?" with up to three names, or the empty string when no name is close.
    """

    def likeness(key: str) -> float:
        ours, theirs = ({each.lstrip("-").lower(), each.lstrip("-").lower().rpartition(".")[2]} for each in (name, key))
        return max(difflib.SequenceMatcher(None, a, b).ratio() for a, b in itertools.product(ours, theirs))

    ranked = sorted(known, key=likeness, reverse=True)
    close = [key for key in ranked[:3] if likeness(key) >= max(0.6, likeness(ranked[0]) - 0.2)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def suggest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """Return the end of an error message about an unknown name: the closest names, or all of them.

    Args:
        name: The unknown name.
        known: The names that exist.

    Returns:
        "did you mean ...?" or "choose from ...".
    """
    return suggestion(name, known) or f"choose from {', '.join(known)}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 pass", "2,000 passes".

    Args:
        count: The number.
        noun: The noun in the singular.
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def printable(text: str, newlines: bool = False) -> str:
    """Escape control characters, so that text from a file cannot move the cursor, change colors or hide other output.

    Args:
        text: Any text, such as the name of a tensor or an error message that quotes a file.
        newlines: Leave newlines and tabs as they are.

    Returns:
        The text with every control character as an escape sequence of Python, such as \\x1b.
    """

    def escape(found: re.Match[str]) -> str:
        character = found[0]
        if newlines and character in "\n\t":
            return character
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")

    return _CONTROL.sub(escape, text)


def print_escaped(text: str, file: Any = None) -> None:
    """Print text that quotes names of files, with control characters escaped.

    Args:
        text: One line or several.
        file: A text file such as `sys.stderr`; None: stdout.
    """
    print(printable(text, newlines=True), file=file, flush=True)
