"""The command line. One file per command, one line per command below.

A command is a dataclass. Its fields are its options, and its `run` does the work. Heavy packages are imported there, so that
`m2s --help` starts fast.
"""

import signal
import sys
from collections.abc import Collection, Sequence

import m2s
from m2s.cli.audit import Audit
from m2s.cli.benchmark import Benchmark
from m2s.cli.certify import Certify
from m2s.cli.cite import Cite
from m2s.cli.compare import Compare
from m2s.cli.convert import Convert
from m2s.cli.data import Data
from m2s.cli.demo import Demo
from m2s.cli.errors import message
from m2s.cli.evaluate import Evaluate
from m2s.cli.failures import INVALID, Interrupts, exit_after, how_to_resume
from m2s.cli.figure import Figure
from m2s.cli.lab import Lab
from m2s.cli.options import command_options, find_command
from m2s.cli.parsing import COMMANDS, asks_for_help, commands, parse
from m2s.cli.plugins import take_plugins
from m2s.cli.repair import Repair
from m2s.cli.report import Report
from m2s.cli.reproduce import Reproduce
from m2s.cli.sample import Sample
from m2s.cli.train import Train
from m2s.errors import UserError
from m2s.startup import finish as finish_startup

__all__ = ["COMMANDS", "commands", "main", "parse", "run"]

COMMANDS |= {
    "demo": Demo,
    "data": Data,
    "train": Train,
    "sample": Sample,
    "evaluate": Evaluate,
    "audit": Audit,
    "repair": Repair,
    "certify": Certify,
    "compare": Compare,
    "figure": Figure,
    "report": Report,
    "lab": Lab,
    "convert": Convert,
    "reproduce": Reproduce,
    "benchmark": Benchmark,
    "cite": Cite,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Invalid input prints one line on stderr and exits with code 2; nothing is written.

    Other failures (a full disk, too little memory, a damaged file, Ctrl-C) print one line too: see `m2s.cli.failures`.

    Args:
        arguments: The command line, without the name of the program. By default that of this process.

    Raises:
        SystemExit: With the exit code, unless the command finished.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        finish_startup()
        with Interrupts(how_to_resume(take_plugins(given)[0][:2])):
            _run_and_report(given)
    finally:
        if arguments is None:  # nothing is left to save: Ctrl-C while the interpreter exits ends the process without a message
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run_and_report(given: list[str]) -> None:
    """Run one command, and report what fails."""
    try:
        try:
            run(given)
        finally:
            if sys.stdout is not None:  # None: the file was closed before the start
                sys.stdout.flush()  # here, and not when the interpreter exits: it may fail
    except UserError as error:
        print(f"m2s: {error}", file=sys.stderr)
        raise SystemExit(INVALID) from None
    except (Exception, KeyboardInterrupt) as error:
        path, options, plugins = _described(given)
        if asks_for_help(take_plugins(given)[0]):
            path = []  # nothing was started that resumes: `m2s train digits --help | head` ends without a message
        raise SystemExit(exit_after(error, path, options, plugins)) from None


def run(arguments: list[str]) -> None:
    """Parse and run one command.

    Args:
        arguments: The command line, without the name of the program.

    Raises:
        UserError: The input is invalid. The message names options as they are typed.
    """
    if arguments == ["--version"]:
        print(f"m2s {m2s.__version__}")
        return
    command = parse(arguments)
    try:
        command.run()
    except UserError as error:
        raise UserError(message(error, _described(arguments)[1])) from error


def _described(arguments: list[str]) -> tuple[list[str], Collection[str], list[str]]:
    """The words of the command that a command line names, its options, and the plugins."""
    words, plugins = take_plugins(arguments)
    path, kind = find_command(words, commands())
    return path, [] if kind is None else command_options(kind), plugins
