"""Suite 1: a command that is killed anywhere, and given again, ends with the files of an uninterrupted run."""

import functools
import random
import shutil
import signal
from pathlib import PurePath

from .campaign import Suite, suite
from .commands import COMMANDS, check_completed, copy_inputs, new_folder, reference, run_forked
from .events import CHANGING, Events, Fault

RANDOM_KILLS = {"train": 400, "sample": 200, "prepare": 200, "audit": 100, "repair": 100, "bpd": 60}
RANDOM_KILLS |= {"ngrams": 20, "fid": 20, "report": 20}
"""Commands, and the number of times that each is killed at random moments in the long version."""


@functools.cache
def kill_points(name: str) -> list[tuple[int, str]]:
    """All kills of a command: before and after each event that changes files, and in the middle of each write.

    Args:
        name: The name of the command.

    Returns:
        Numbers of events and ways to be killed there.
    """
    kinds = [event.kind for event in reference(name).events if event.kind in CHANGING]
    points = [(number, how) for number in range(len(kinds)) for how in ("before", "after")]
    return points + [(number, "torn") for number, kind in enumerate(kinds) if kind in ("write", "save")]


def kill_at_event(name: str, number: int, dice: random.Random) -> str:
    """Kill a command at one event and run it again.

    Args:
        name: The name of the command.
        number: The number of the kill in `kill_points`.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    event, how = kill_points(name)[number]
    folder, fault = new_folder(), Fault(event, how, dice.random())
    copy_inputs(COMMANDS[name], folder)
    try:
        ended = run_forked(COMMANDS[name], folder, lambda: Events(str(folder), CHANGING, fault).install())
        at = [one for one in reference(name).events if one.kind in CHANGING][event]
        if ended.code != -signal.SIGKILL:
            return f"the kill {how} event {event} ({at.kind} {at.path}) was not reached: exit code {ended.code}\n{ended.err}"
        wrong = check_completed(name, folder)
        return f"killed {how} event {event} ({at.kind} {at.path}): {wrong}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kill_at_random(name: str, dice: random.Random) -> str:
    """Kill a command from outside at random moments, up to three times, and run it again.

    Args:
        name: The name of the command.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    folder, moment = new_folder(), 1.1 * reference(name).seconds
    copy_inputs(COMMANDS[name], folder)
    try:
        for kill in range(dice.randint(1, 3)):
            moment = dice.uniform(0, 1.1 * reference(name).seconds)
            # A command that ends before it is killed is no case: the next moment is earlier, in a new folder.
            while run_forked(COMMANDS[name], folder, kill_after=moment).code != -signal.SIGKILL:
                if kill > 0:
                    break
                shutil.rmtree(folder)
                folder, moment = new_folder(), moment / 2
                copy_inputs(COMMANDS[name], folder)
        wrong = check_completed(name, folder)
        return f"killed after {moment:.3f} s: {wrong}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync_order(name: str) -> str:
    """Check the order of syncs, on which the state of the disk after a power cut depends.

    Every file is synced after its last write and before it gets its final name, and its folder is synced after that.

    Args:
        name: The name of the command.

    Returns:
        The renames that are not followed or preceded by a sync; empty where there are none.
    """
    events, wrong = reference(name).events, []
    for number, event in enumerate(events):
        if event.kind != "rename":
            continue
        for path in {one.path for one in events[:number] if one.kind in ("write", "save", "truncate")}:
            if path == event.source or path.startswith(event.source + "/"):
                last = [one.kind for one in events[:number] if one.path == path and one.kind in ("write", "save", "fsync")]
                if last[-1] != "fsync":
                    wrong.append(f"{path} is renamed to {event.path} before it is synced")
        folder = str(PurePath(event.path).parent)
        if not any(one.kind == "fsync" and one.path == folder for one in events[number:]):
            wrong.append(f"{event.path} is renamed and its folder is not synced")
    return "; ".join(wrong)


def _suites() -> list[Suite]:
    """The suites of all commands."""
    found = []
    for name in COMMANDS:
        found.append(
            suite(
                f"kill-{name}",
                "kill at every file-system event",
                lambda number, dice, name=name: kill_at_event(name, number, dice),
                total=lambda name=name: len(kill_points(name)),
                short=6 if name in ("train", "sample", "prepare") else 2,
            )
        )
    for name, count in RANDOM_KILLS.items():
        found.append(
            suite(
                f"random-kill-{name}",
                "kill from outside at a random moment",
                lambda number, dice, name=name: kill_at_random(name, dice),
                target=count,
                short=1 if name in ("train", "sample") else 0,
            )
        )
    found.append(
        suite(
            "sync-order",
            "order of writes, syncs and renames",
            lambda number, dice: sync_order(list(COMMANDS)[number]),
            total=lambda: len(COMMANDS),
            short=len(COMMANDS),
        )
    )
    return found


SUITES = _suites()
