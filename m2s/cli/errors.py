"""What tyro says of bad arguments, and the library of bad values, in words of the command line."""

import ast
import re
from collections.abc import Collection

from m2s.errors import suggestion
from m2s.training.config import CLASSES, rename

KINDS = {"INT": "whole number", "FLOAT": "number"}


def one_line(boxed: str) -> str:
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
    return _plain("; ".join(filter(None, said)), boxed) or "the arguments could not be read"


def _plain(said: str, boxed: str) -> str:
    """The commonest complaints without Python in them; others as they are."""
    if missing := re.fullmatch(r"Missing value for argument '(\S+)'\. Expected \d+ values", said):
        return f"{missing[1]} needs a value"
    if choice := re.fullmatch(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of (\(.*\))", said):
        known = [str(value) for value in ast.literal_eval(choice[3])]
        hint = suggestion(choice[1], known)
        return f"{choice[2]} is {choice[1]!r}, but it must be one of {', '.join(known)}" + (f": {hint}" if hint else "")
    if wrong := re.match(r"Error parsing (\S+): ", said):
        kind = re.search(rf"{re.escape(wrong[1])} \[?(INT|FLOAT)", boxed)
        if kind and (one := re.search(r"(?:with base 10|string to float): ('.*')", said)):
            return f"{wrong[1]} is {one[1]}, but it must be a {KINDS[kind[1]]}"
        if kind and (some := re.search(r"valid parse for arguments: (\[.*\])", said)):
            return f"{wrong[1]} is {' '.join(ast.literal_eval(some[1]))!r}, but it must be {KINDS[kind[1]]}s"
    return said


def typed(said: str, options: Collection[str]) -> str:
    """What the library says of its arguments, as who typed a command with these options must type it.

    sampler='bayes' or 'euler' is --sampler bayes or euler, m2s.Projected(head) is --project, a condition is --labels,
    m2s.Hybrid or m2s.Uniform is m2s train --process.kind hybrid or uniform, and a bare LogScore is log-score.
    """
    said = re.sub(r"m2s\.Projected\((?:head\)|.*\)$)", "--project" if "project" in options else "m2s sample --project", said)
    if "labels" in options:
        said = said.replace("there is no condition", "there are no --labels")
    said = rename(said, lambda _, option: f"m2s train {option}")
    said = re.sub(r"(,| or) m2s train --(?:process|head)\.kind", r"\1", said)
    said = re.sub(r"(?<![\w.])([A-Z]\w+)\b(?!\()", lambda found: CLASSES.get(found[1], found[1]).rpartition(" ")[2], said)
    if "sampler" in options:
        said = re.sub(r"\buse '(\w+)'", r"use --sampler \1", said)

    def given(found: re.Match[str]) -> str:
        return f"{_option(found[1])} {found[2].replace(chr(39), '')}" if found[1] in options else found[0]

    said = re.sub(r"\b(\w+)=('\w+'(?:(?:, | or )'\w+')*|[\w.]+)", given, said)
    for name in options:
        said = re.sub(rf"^{name} is ", f"{_option(name)} is ", said)
        if "_" in name:
            said = re.sub(rf"(?<!')\b{name}\b(?!')", _option(name), said)
    return said


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
