"""The help page of commands that have subcommands: one summary and one example for each."""

import inspect
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 100


def overview(called: str, description: str, commands: Mapping[str, Any]) -> str:
    """Return the help page of a command that has subcommands.

    tyro would print the complete help of every subcommand. This page has the first paragraph and the first example of each.

    Args:
        called: What the user typed, such as "m2s evaluate".
        description: What the command does.
        commands: The dataclasses of the subcommands by name.

    Returns:
        The page.
    """
    width = min(WIDTH, shutil.get_terminal_size().columns)
    lines = [f"usage: {called} [-h] {{{','.join(commands)}}} ...", ""]
    for paragraph in _paragraphs(description):
        lines += [*textwrap.wrap(paragraph, width, break_on_hyphens=False), ""]
    indent = max(map(len, commands)) + 4
    for name, command in commands.items():
        paragraphs = _paragraphs(inspect.getdoc(command) or "")
        example = next((text for text in paragraphs if text.startswith("Example: ")), "")
        first, *rest = textwrap.wrap(paragraphs[0], width - indent, break_on_hyphens=False)
        lines += [f"  {name.ljust(indent - 2)}{first}", *(" " * indent + line for line in rest)]
        lines += [f"{' ' * indent}{example}", ""] if example else [""]
    return "\n".join([*lines, f"{called} COMMAND --help explains one of them."])


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, each on one line."""
    return [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n") if part.strip()]
