"""The command line. One file per command, one line per command below.

A command is a dataclass whose fields are its arguments and whose `run` does the work; what is heavy is imported there.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

import m2s
from m2s.cli.cite import Cite
from m2s.cli.data import Data
from m2s.cli.demo import Demo
from m2s.cli.figure import Figure
from m2s.cli.sample import Sample
from m2s.cli.train import Train
from m2s.report import Refused

COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": Demo,
    "data": Data,
    "train": Train,
    "sample": Sample,
    "figure": Figure,
    "cite": Cite,
}

DESCRIPTION = """Mean-to-score discrete diffusion: draw samples, audit scores, draw the figures of the paper.

Start with `m2s demo`, which tells the story in numbers and a figure within a minute. `m2s COMMAND --help` explains one command;
`m2s --version` prints the version."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Bad input is one line on stderr and exit code 2, with nothing written."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"m2s {m2s.__version__}")
        return
    try:
        parse(given).run()
    except Refused as error:
        print(f"m2s: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def parse(arguments: list[str]) -> Any:
    """The command that was asked for; tyro's boxed complaint about anything else is put in one line."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="m2s", description=DESCRIPTION, args=arguments)
    except SystemExit as exit_:
        if exit_.code:
            raise Refused(f"{_one_line(complaint.getvalue())} (see m2s --help)") from None
        raise


def _one_line(boxed: str) -> str:
    """What tyro's box says, without the box, its title and its pointers to the help."""
    paragraphs = [""]
    for line in boxed.splitlines()[1:]:
        text = line.strip("│|╭╮╰╯+ ")
        if text.startswith(("For full helptext", "Argument helptext")):
            break
        if text and not text.strip("─-"):
            paragraphs.append("")
        else:
            paragraphs[-1] += f" {text}"
    said = [" ".join(paragraph.split()).rstrip(".") for paragraph in paragraphs]
    return "; ".join(filter(None, said)) or "the arguments could not be read"
