"""From a command line to the command that it asks for."""

from pathlib import Path
from typing import Any

import tyro

from m2s.cli.evaluate import with_metrics
from m2s.cli.options import UnknownOptionError, check_arguments, find_command, subcommands
from m2s.cli.overview import overview
from m2s.cli.plugins import load_plugins, take_plugins
from m2s.cli.sampler_options import with_sampler_options
from m2s.errors import UserError, suggest, suggestion

COMMANDS: dict[str, Any] = {}
"""The commands by name. `m2s.cli` fills it: `m2s demo` parses other commands, so this module must not import the commands."""

# Names that other projects use: the commands where a user may type them, and what to do here.
OTHER_COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "--resume": (
        ("train", "sample", "audit", "repair", "compare", "demo", "data"),
        "the same command, given again, resumes an interrupted run",
    ),
    "--epochs": (("train", "demo"), "give the length of a run as --steps, the number of training steps"),
    **dict.fromkeys(
        ("ppl", "perplexity", "ppl_eval"),
        (
            ("evaluate",),
            "the perplexity of a model on text is in m2s evaluate bpd, that of its samples under a judge in genppl",
        ),
    ),
}

CHOICES = {"train": "preset", "evaluate": "metric"}  # what follows a command that has subcommands; else a "command"

DESCRIPTION = """Mean-to-score discrete diffusion: train, sample, evaluate, audit and repair models; draw the paper's figures.

Start with `m2s demo`: it trains and measures three models and writes one page, in a few minutes on two cores. `m2s COMMAND
--help` explains one command. `m2s --version` prints the version.

Every command accepts `--plugin FILE`, also more than once. FILE is a Python file that registers your own samplers, networks,
methods, data sets or metrics. It runs before the command is parsed, so that the command knows their names.

Example: m2s train digits --plugin my_method.py --method my-method

Exit codes: 0 finished; 1 failed (disk, memory, a damaged file, a bug); 2 invalid input; 130 interrupted by Ctrl-C (a second
Ctrl-C stops at once). Set M2S_TRACEBACK=1 to see the traceback of a failure.
"""


def parse(arguments: list[str]) -> Any:
    """Load the plugins of a command line and return the command that it asks for, ready to run.

    Args:
        arguments: The command line, without the name of the program.

    Returns:
        An instance of one of the dataclasses in `COMMANDS`.

    Raises:
        UserError: A command or option does not exist, or a value is not of its type. The message offers similar names.
        SystemExit: A help page was printed, or tyro found an error that the check of `m2s.cli.options` does not cover.
    """
    words, plugins = take_plugins(arguments)
    load_plugins(plugins)
    known = commands()
    if asks_for_help(words):
        words = [*words[words[:1] == ["help"] :], "--help"]
        _print_overview(words, known)
    else:
        _check(words, known)
    return tyro.extras.subcommand_cli_from_dict(known, prog="m2s", description=DESCRIPTION, args=words)


def asks_for_help(words: list[str]) -> bool:
    """Return whether a command line asks for a help page, which needs no command to run.

    Args:
        words: The command line without plugins. `m2s` alone and `m2s help COMMAND` ask for help, too.
    """
    return words[:1] in ([], ["help"]) or bool({"-h", "--help"} & set(words))


def commands() -> dict[str, Any]:
    """Return the commands by name, with the options and subcommands that registered samplers and metrics add."""
    extended = {name: with_sampler_options(COMMANDS[name]) for name in ("sample", "audit", "repair")}
    return {**COMMANDS, **extended, "evaluate": with_metrics(COMMANDS["evaluate"])}


def _print_overview(words: list[str], known: dict[str, Any]) -> None:
    """Print the help of a command that has subcommands, and exit. Return where tyro has the better help page."""
    path, command = find_command(words, known)
    if command is not None or path == ["train"]:  # presets differ in their defaults only
        return
    description = DESCRIPTION if not path else str(known[path[0]].__doc__)
    print(overview(" ".join(["m2s", *path]), description, _choices(path, known)))
    raise SystemExit(0)


def _check(words: list[str], known: dict[str, Any]) -> None:
    """Raise UserError where a command line names no command, or does not fit the options of its command."""
    path, command = find_command(words, known)
    called = " ".join(["m2s", *path])
    if command is None:
        choices = list(_choices(path, known))
        kind = CHOICES.get(path[0] if path else "", "command")
        word = words[len(path)] if len(words) > len(path) else "-"
        if word.startswith("-"):
            raise UserError(f"{called} needs a {kind}{' before any option' * bool(word[1:])}: {', '.join(choices)}")
        of = f" of {called}" if path and kind == "command" else ""
        raise UserError(f"unknown {kind} {word!r}{of}; {_advice(word, path, choices)}")
    try:
        check_arguments(command, words[len(path) :])
    except UnknownOptionError as error:
        section = error.name.partition(".")[0]  # --data.folder of m2s train is --data of m2s evaluate bpd
        closest = f"did you mean {section}?" if section in error.known else ""
        advice = _elsewhere(error.name, path[0]) or closest or suggestion(error.name, error.known) or f"see {called} --help"
        raise UserError(f"{error}: {advice}") from None
    except UserError as error:
        raise UserError(f"{error} (see {called} --help)") from None


def _choices(path: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """The commands that may follow those of `path`."""
    for name in path:
        known = subcommands(known[name])
    return known


def _advice(word: str, path: list[str], choices: list[str]) -> str:
    """What to type in place of an unknown command, metric or preset."""
    if path == ["train"] and (Path(word) / "meta.json").is_file():
        return f"choose from {', '.join(choices)}; {word} is a prepared text: m2s train owt --data.folder {word}"
    return _elsewhere(word, path[0] if path else "") or suggest(word, choices)


def _elsewhere(word: str, command: str) -> str:
    """What to do about a name that other projects use, or the empty string."""
    where, advice = OTHER_COMMANDS.get(word, ((), ""))
    return advice if command in where else ""
