"""Suite 3: extreme words on the command line. The command runs, or says in one line what is wrong."""

import random
import resource
import shutil
from typing import Any

import m2s.cli
from m2s.cli.options import Option, command_options, find_command

from .campaign import Suite, suite
from .commands import COMMANDS, Command, copy_inputs, new_folder, run_command
from .fork import forked
from .fuzz_api import MEMORY
from .io_errors import status, user_message

WORDS = ("", "x", "-", "--", "-1", "é", "a" * 3000, "\x1b[2J", "../x", "None", "\udcff", "a b", "{}", "'", "$HOME", "*", "\n")
NUMBERS = ("0", "-1", "1", "2", "3", "1.5", "nan", "inf", "-inf", "1e400", "1e-320", "x", "", "1_0", "٣", "0x10", "1e3", "None")
HUGE = ("9223372036854775808", "-9223372036854775809", "1" + 30 * "0")
LONG = (
    "steps",
    "--n",
    "batch",
    "width",
    "depth",
    "length",
    "passes",
    "limit",
    "bins",
    "samples",
    "every",
    "tokens",
    "resamples",
)
"""Words in the names of options whose large values are valid and take forever."""
OTHERS = {
    "figure": Command(("figure", "toy", "--out", "toy.png")),
    "cite": Command(("cite", "m2s")),
    "list": Command(("data", "list")),
    "check": Command(("data", "check", "packed")),
    "genppl": Command(("evaluate", "genppl", "drawn.npz"), ("drawn.npz",)),
}


def extreme_command(dice: random.Random) -> str:
    """Change one to three words of a command line, or add some.

    Args:
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    command = dice.choice(list((COMMANDS | OTHERS).values()))
    given = list(command.arguments)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        given = _change(given, dice)
    folder = new_folder()
    copy_inputs(command, folder)

    def work() -> None:
        limit = status("VmSize") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        run_command(tuple(given))

    try:
        ended = forked(work, folder)
        wrong = user_message(ended)
        if not wrong and "\x1b" in ended.err + ended.out and any("\x1b" in word for word in given):
            wrong = f"control characters reach the terminal\n{ended.err!r}"
        return f"m2s {' '.join(word if len(word) < 80 else word[:80] + '...' for word in given)!r}: {wrong}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _change(given: list[str], dice: random.Random) -> list[str]:
    """Change a command line at one place."""
    how, at = dice.randrange(10), dice.randrange(len(given))
    if how == 0:
        return given[:at] + given[at + 1 :]
    if how == 1:
        return [*given[:at], dice.choice(WORDS), *given[at:]]
    if how == 2:
        return [*given[:at], dice.choice(WORDS), *given[at + 1 :]]
    if how == 3:
        return [*given, given[at]]
    if how == 4:
        return [*given, "--" + dice.choice(("x", "resume", "epochs", "outt", "-out", "out=", "help-me"))]
    return _with_option(given, dice)


def _with_option(given: list[str], dice: random.Random) -> list[str]:
    """Give an option of the command an extreme value, in the place of its value or at the end."""
    _, kind = find_command(given, m2s.cli.commands())
    options = [] if kind is None else [one for one in command_options(kind).values() if not one.positional]
    if not options:
        return [*given, dice.choice(WORDS)]
    option = dice.choice(options)
    values = _values(option, dice)
    if option.name in given:
        at = given.index(option.name)
        return [*given[: at + 1], *values, *given[at + 1 + (0 if option.is_flag else 1) :]]
    return [*given, option.name, *values]


def _values(option: Option, dice: random.Random) -> list[str]:
    """Values for an option."""
    if option.is_flag:
        return []
    numbers: tuple[Any, ...] = NUMBERS if any(part in option.name for part in LONG) else NUMBERS + HUGE
    known: tuple[Any, ...] = numbers if option.kind in (int, float) else WORDS
    if option.choices:
        known = (*option.choices, *WORDS)
    if option.name in ("--device",):
        known = ("cpu", "cuda", "cuda:7", "x", "", "meta", "mps")
    return [dice.choice(known) for _ in range(dice.choice((1, 2)) if option.many else 1)]


SUITES: list[Suite] = [
    suite("cli", "extreme words on the command line", lambda number, dice: extreme_command(dice), target=1500, short=8)
]
