"""Errors that tell a user what was wrong, what was expected and what to do."""

import difflib
import itertools
from collections.abc import Mapping
from typing import Any


class UserError(ValueError):
    """What was asked cannot be done as asked. Raised before anything is computed or written."""


def suggestion(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The known names that are near an unknown one (clip is near optimizer.clip, model.kind near network.kind), as a question;
    empty where there are none."""

    def likeness(key: str) -> float:
        given, there = ({each.lstrip("-").lower(), each.lstrip("-").lower().rpartition(".")[2]} for each in (name, key))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in itertools.product(given, there))

    ranked = sorted(known, key=likeness, reverse=True)
    close = [key for key in ranked[:3] if likeness(key) >= max(0.6, likeness(ranked[0]) - 0.2)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def suggest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The end of a complaint about an unknown name: the near ones, or all."""
    return suggestion(name, known) or f"choose from {', '.join(known)}"
