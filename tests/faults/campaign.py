"""The campaign: suites of numbered cases, their results in a JSON file, and the table of the counts."""

import json
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0
MARKS = ("<!-- faults: written by make faults -->", "<!-- faults: end -->")
SHOWN = 2000  # characters of the start and of the end of an output that are stored with a failure


@dataclass(frozen=True)
class Suite:
    """Cases of one kind, numbered from 0. A case is a function of its number and of the seed.

    Args:
        name: The name. A case has the name "suite/number".
        title: What the cases check: the row of the table that counts them.
        run: Runs a case, given its number and its random numbers. It returns what is wrong; empty where nothing is.
        total: Returns the number of all cases; None where there is no end.
        target: The number of cases in the long version, where there is no end.
        short: The number of cases in the short version.
        skip: Returns why the suite cannot run here; empty where it can.
    """

    name: str
    title: str
    run: Callable[[int, random.Random], str]
    total: Callable[[], int] | None
    target: int
    short: int
    skip: Callable[[], str]

    def size(self) -> int:
        """Return the number of cases of the long version."""
        return self.target if self.total is None else self.total()

    def dice(self, number: int) -> random.Random:
        """Return the random numbers of a case."""
        return random.Random(f"{SEED}/{self.name}/{number}")

    def chosen(self) -> list[int]:
        """Return the cases of the short version: a fixed choice from all, or the first ones where there is no end."""
        if self.total is None:
            return list(range(self.short))
        size = self.total()
        return sorted(random.Random(f"{SEED}/{self.name}").sample(range(size), min(self.short, size)))


def suite(
    name: str,
    title: str,
    run: Callable[[int, random.Random], str],
    total: Callable[[], int] | None = None,
    target: int = 0,
    short: int = 0,
    skip: Callable[[], str] = str,
) -> Suite:
    """Make a suite; see `Suite`."""
    return Suite(name, title, run, total, target, short, skip)


def all_suites() -> dict[str, Suite]:
    """Return all suites by name."""
    from . import fuzz_api, fuzz_cli, fuzz_files, hostile, invariance, io_errors, kills, ranks

    modules = (kills, io_errors, fuzz_files, fuzz_api, fuzz_cli, invariance, ranks, hostile)
    return {one.name: one for module in modules for one in module.SUITES}


def run_case(one: Suite, number: int) -> dict[str, Any] | None:
    """Run one case.

    Args:
        one: Its suite.
        number: Its number.

    Returns:
        None where it passes, otherwise its name, its seed, the command that repeats it and what is wrong.
    """
    wrong = one.run(number, one.dice(number))
    if not wrong:
        return None
    name = f"{one.name}/{number}"
    shown = wrong if len(wrong) <= 2 * SHOWN else f"{wrong[:SHOWN]}\n...\n{wrong[-SHOWN:]}"
    return {"case": name, "seed": SEED, "repeat": f"python -m tests.faults --case {name}", "wrong": shown}


class Results:
    """The counts of a campaign, in a JSON file that is written after every few seconds.

    Args:
        path: The file.

    Attributes:
        suites: For each suite its title, the number of cases that ran, and the number of all cases.
        failures: The cases that fail, as `run_case` describes them.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.written = path, 0.0
        stored = json.loads(path.read_text()) if path.exists() else {}
        self.suites: dict[str, dict[str, Any]] = stored.get("suites", {})
        self.failures: list[dict[str, Any]] = stored.get("failures", [])
        self.minutes: float = stored.get("minutes", 0.0)

    def entry(self, one: Suite) -> dict[str, Any]:
        """Return the entry of a suite."""
        return self.suites.setdefault(one.name, {"title": one.title, "cases": 0, "of": 0})

    def add(self, one: Suite, failure: dict[str, Any] | None) -> None:
        """Count a case."""
        self.entry(one)["cases"] += 1
        if failure is not None:
            self.failures.append(failure)

    def write(self, every: float = 0.0) -> None:
        """Write the file, unless that was done less than `every` seconds ago."""
        if time.monotonic() - self.written < every:
            return
        order = sorted(self.suites)
        content = {
            "seed": SEED,
            "minutes": round(self.minutes, 1),
            "suites": {name: self.suites[name] for name in order},
            "failures": self.failures,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, self.path)
        self.written = time.monotonic()


def run_short(suites: Iterable[Suite], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run the short version.

    Args:
        suites: The suites.
        say: Called with a line for each suite.

    Returns:
        The failures.
    """
    failures = []
    for one in suites:
        if why := one.skip():
            say(f"{one.name}: skipped, {why}")
            continue
        started, numbers = time.monotonic(), one.chosen()
        found = [failure for number in numbers if (failure := run_case(one, number))]
        failures += found
        say(f"{one.name}: {len(numbers)} cases, {len(found)} failures, {time.monotonic() - started:.1f} s")
    return failures


def run_long(suites: Iterable[Suite], results: Results, minutes: float, say: Callable[[str], None]) -> None:
    """Run the long version: first the cases that failed before, then the next ones of every suite, in turn.

    Suites that have no end continue after their target, until the time is over.

    Args:
        suites: The suites.
        results: The counts so far. They are changed in place, and written.
        minutes: The time.
        say: Called with a line for each failure.
    """
    suites = list(suites)
    usable = [one for one in suites if not one.skip()]
    by_name = {one.name: one for one in usable}
    before, started = results.minutes, time.monotonic()
    for failure in list(results.failures):
        name, _, number = failure["case"].rpartition("/")
        if name in by_name:
            results.failures.remove(failure)
            if again := run_case(by_name[name], int(number)):
                results.failures.append(again)
                say(f"still fails: {again['case']}: {again['wrong'].splitlines()[0]}")
    for one in suites:
        entry = results.entry(one)
        entry["title"] = one.title
        entry["skipped"] = one.skip()
        entry["of"] = None if one.total is None or entry["skipped"] else one.size()
    while time.monotonic() - started < 60 * minutes:
        following = _next(usable, results)
        if following is None:
            break
        failure = run_case(following, results.entry(following)["cases"])
        results.add(following, failure)
        if failure is not None:
            say(f"fails: {failure['case']}: {failure['wrong'].splitlines()[0]}")
        results.minutes = before + (time.monotonic() - started) / 60
        results.write(every=5)
    results.minutes = before + (time.monotonic() - started) / 60
    results.write()


def _next(suites: list[Suite], results: Results) -> Suite | None:
    """The suite whose next case runs: the one that has done the smallest part of its cases."""

    def done(one: Suite) -> float:
        return results.entry(one)["cases"] / max(1, one.size())

    open_ = [one for one in suites if done(one) < 1 or (one.total is None and one.target > 0)]
    return min(open_, key=done, default=None)


def table(results: Results) -> str:
    """Return the counts as a table in Markdown, with one row for each title.

    Args:
        results: The counts.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for entry in results.suites.values():
        rows.setdefault(entry["title"], []).append(entry)
    failed = dict.fromkeys(rows, 0)
    for failure in results.failures:
        failed[results.suites[failure["case"].rpartition("/")[0]]["title"]] += 1
    lines = ["| cases | of | number | failures |", "|---|---|---|---|"]
    for title, entries in rows.items():
        known = [entry["of"] for entry in entries]
        of = "no end" if None in known else f"{sum(known):,}"
        why = next((entry["skipped"] for entry in entries if entry.get("skipped") and not entry["cases"]), "")
        result = f"not run: {why}" if why else failed[title]
        lines.append(f"| {title} | {of} | {sum(entry['cases'] for entry in entries):,} | {result} |")
    total = sum(entry["cases"] for entry in results.suites.values())
    return "\n".join([*lines, f"| all | | {total:,} | {len(results.failures)} |"])


def write_table(page: Path, results: Results) -> None:
    """Replace the table of a page, between its two marks.

    Args:
        page: The page.
        results: The counts.
    """
    text = page.read_text(encoding="utf-8")
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    page.write_text(f"{text[:start]}\n{table(results)}\n{text[end:]}", encoding="utf-8")
