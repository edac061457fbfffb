"""`--plugin FILE`, which every command accepts: Python files that register a user's own parts before the command is parsed."""

from collections.abc import Sequence

from m2s.errors import UserError
from m2s.registry import load_entry_points, load_plugin

OPTION = "--plugin"


def take_plugins(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--plugin FILE`, which may be repeated and stand anywhere, from the rest of a command line.

    A leading "--" is dropped. In `torchrun -m m2s.cli -- sample RUN --n 4` it ends the options of torchrun, which would take
    --n for one of its own. Some versions of Python pass it on.

    Args:
        arguments: The command line, without the name of the program.

    Returns:
        The other arguments, and the files in the order in which they were given.

    Raises:
        UserError: `--plugin` is the last word, or another option follows it.
    """
    others: list[str] = []
    files: list[str] = []
    rest = list(arguments)[arguments[:1] in (["--"], ("--",)) :]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name != OPTION:
            others.append(word)
        elif equals:
            files.append(value)
        elif rest and not rest[0].startswith("-"):
            files.append(rest.pop(0))
        else:
            raise UserError(f"{OPTION} needs a value: a Python file that registers your own parts, such as my_sampler.py")
    return others, files


def load_plugins(files: Sequence[str]) -> None:
    """Import the plugins of installed packages, then run the given files.

    Args:
        files: Python files.

    Raises:
        UserError: A file does not exist, or fails when it is run.
    """
    load_entry_points()
    for file in files:
        load_plugin(file)
