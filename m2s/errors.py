"""Errors that say what was wrong, what was expected and what to do."""

import difflib
import itertools
from collections.abc import Mapping
from typing import Any


class UserError(ValueError):
    """An option, argument or file that cannot be used. Raised before anything is computed or written.

    The message is either given or built from the parts. The parts stay on the exception, so that a command line can print the
    option as its user typed it (`describe`) without parsing the message.

    Args:
        message: The complete message. Leave it out to build it from the parts.
        option: Name of the option or argument, as in Python: "steps", "optimizer.warmup".
        value: The value that was given. None means that the message does not state it.
        expected: What the value must be, as the end of "it must be ...".
        hint: What to do about it.

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
        hint: str | None = None,
    ) -> None:
        if not message and option is None:
            raise TypeError("UserError needs a message or an option")
        self.option, self.value, self.expected, self.hint = option, value, expected, hint
        self._message = message
        # `args` holds the finished text alone: pickle calls the class with it and then restores the attributes.
        super().__init__(message or self.describe())

    def describe(self, option: str | None = None) -> str:
        """Return the message with another spelling of the option.

        Args:
            option: The option as it is typed, such as "--optimizer.warmup". None keeps `self.option`.

        Returns:
            The message, rebuilt from the parts. A message that was given as text is returned as it is.
        """
        if self._message:
            return self._message
        text = str(option or self.option)
        if self.value is not None:
            text += f" is {self.value!r}"
        if self.expected is not None:
            text += f"{'' if self.value is None else ', but it'} must be {self.expected}"
        if self.value is None and self.expected is None:
            text += " cannot be used"
        return f"{text}: {self.hint}" if self.hint else text


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
