"""The command line. One file per command, one line per command below.

A command is a dataclass whose fields are its arguments and whose `run` does the work; what is heavy is imported there.
"""

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

import m2s
from m2s.cli.audit import Audit
from m2s.cli.benchmark import Benchmark
from m2s.cli.cite import Cite
from m2s.cli.data import Data
from m2s.cli.demo import Demo
from m2s.cli.errors import one_line
from m2s.cli.evaluate import Evaluate
from m2s.cli.figure import Figure
from m2s.cli.repair import Repair
from m2s.cli.report import Report
from m2s.cli.sample import Sample
from m2s.cli.train import Train
from m2s.errors import UserError, suggest, suggestion

COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": Demo,
    "data": Data,
    "train": Train,
    "sample": Sample,
    "evaluate": Evaluate,
    "audit": Audit,
    "repair": Repair,
    "figure": Figure,
    "report": Report,
    "benchmark": Benchmark,
    "cite": Cite,
}

# What others call it, where, and what to do here.
HABITS = {
    "--resume": (
        ("train", "sample", "audit", "repair", "demo", "data"),
        "what was interrupted goes on by itself when the same command is given again",
    ),
    "--epochs": (("train", "demo"), "the length of a run is given as --steps, updates of the weights"),
    **dict.fromkeys(
        ("ppl", "perplexity", "ppl_eval"),
        (("evaluate",), "the perplexity of a model on text is in m2s evaluate bpd, that of its samples by a judge in genppl"),
    ),
}

DESCRIPTION = """Mean-to-score discrete diffusion: train, sample, evaluate, audit and repair; the figures of the paper.

Start with `m2s demo`: two models trained, measured and on one page in a few minutes on two cores. `m2s COMMAND --help` explains
one command; `m2s --version` prints the version."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Bad input is one line on stderr and exit code 2, with nothing written."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"m2s {m2s.__version__}")
        return
    try:
        parse(given).run()
    except UserError as error:
        print(f"m2s: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # who reads has seen enough, as `m2s cite | head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def parse(arguments: list[str]) -> Any:
    """The command that was asked for, or one line about what was wrong: the nearest names to one that nobody knows."""
    command, complaint = _ask(arguments)
    if command is None:
        raise UserError(_explained(arguments, complaint))
    return command


def _ask(arguments: list[str]) -> tuple[Any, str]:
    """What tyro makes of `arguments`: a command, or None and its boxed complaint in one line. Help ends the program."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="m2s", description=DESCRIPTION, args=arguments), ""
    except SystemExit as exit_:
        if exit_.code:
            return None, one_line(complaint.getvalue())
        raise


def _explained(arguments: list[str], complaint: str) -> str:
    """What to say of the first of `arguments` that is no command, preset or option; else the complaint, and where to look."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    _, said = _ask(words)
    if missing := re.search(r"Expected one of \{(.+?)\}", said):
        return f"{' '.join(['m2s', *words])} needs one of these before any option: {missing[1]}"
    if wrong := re.search(r"options: ([^,; ]+).*Available subcommands: ([^;]+)", said):
        return _unknown(wrong[1], words, wrong[2].split(", "))
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        _ask([*words, "--help"])
    called = re.search(r"usage: (m2s(?: [a-z][\w-]*)*)", page.getvalue())
    help_ = f"{called[1] if called else 'm2s'} --help"
    known = sorted(set(re.findall(r"--[\w.-]*\w", page.getvalue())))
    given = (word.partition("=")[0] for word in arguments if word.startswith("--"))
    option = next((name for name in given if name.replace("_", "-") not in known), None)
    if option is None:
        return f"{complaint} (see {help_})"
    return f"there is no option {option}: {_habit(option, words[0]) or suggestion(option, known) or f'see {help_}'}"


def _unknown(word: str, words: list[str], known: list[str]) -> str:
    """What to say of a word that is no command, measure or preset."""
    before = words[: words.index(word)]
    advice = _habit(word, words[0]) or suggest(word, known)
    if before == ["train"] and (Path(word) / "meta.json").is_file():
        advice = f"choose from {', '.join(known)}; {word} is a prepared text: m2s train owt --data.folder {word}"
    return f"{' '.join(['m2s', *before])} knows no {word!r}: {advice}"


def _habit(word: str, command: str) -> str:
    commands, habit = HABITS.get(word, ((), ""))
    return habit if command in commands else ""
