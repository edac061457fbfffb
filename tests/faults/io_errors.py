"""Suite 2: a file-system call that fails, and memory that ends. The command says so in one line, and can be given again."""

import functools
import os
import random
import resource
import shutil
from pathlib import Path

from .campaign import Suite, suite
from .commands import COMMANDS, check_completed, copy_inputs, differences, new_folder, reference, run_forked, snapshot
from .events import ERRORS, Events, Fault
from .fork import Ended

SIZES = 10  # limits of memory


def user_message(ended: Ended) -> str:
    """Check that a command ended as the command line promises: with success, or with one line that says what happened.

    Args:
        ended: How it ended.

    Returns:
        What is wrong; empty where nothing is.
    """
    if ended.code is None:
        return f"it hangs\n{ended.err}"
    if ended.traceback:
        return f"it ends with a traceback\n{ended.err}"
    if ended.code < 0:
        return f"it is killed by signal {-ended.code}\n{ended.err}"
    if ended.code != 0 and len(ended.messages) != 1:
        return f"it ends with code {ended.code} and {len(ended.messages)} messages\n{ended.err}"
    return ""


def _is_cache(path: str) -> bool:
    """Whether a file is a cache: a command succeeds without it, and the next one writes it."""
    return path.split("/")[0] == "data"


def _incomplete(folder: Path, name: str) -> str:
    """Which results of a command that ended with success are missing or differ. Leftovers are removed by the next run."""
    expected = {path: content for path, content in reference(name).files.items() if not _is_cache(path)}
    found = {path: content for path, content in snapshot(folder).items() if path in expected}
    return differences(found, expected)


@functools.cache
def failures(name: str) -> list[tuple[int, str]]:
    """All failing calls of a command: every event with every error. The error changes from one event to the next first.

    Args:
        name: The name of the command.

    Returns:
        Numbers of events and names of errors.
    """
    names, count = list(ERRORS), len(reference(name).events)
    return [(event, names[(event + shift) % len(names)]) for shift in range(len(names)) for event in range(count)]


def fail_at_event(name: str, number: int, dice: random.Random) -> str:
    """Let one call of a command fail, and run it again.

    Args:
        name: The name of the command.
        number: The number of the failure in `failures`.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    event, error = failures(name)[number]
    folder, at = new_folder(), reference(name).events[event]
    copy_inputs(COMMANDS[name], folder)
    mark = os.memfd_create("mark")
    try:
        fault = Fault(event, error, mark=mark)
        ended = run_forked(COMMANDS[name], folder, lambda: Events(str(folder), fault=fault).install())
        wrong = user_message(ended)
        if not wrong and os.fstat(mark).st_size == 0:
            wrong = "the event was not reached"
        if not wrong and ended.code == 0:  # success means that all files are complete, not that the next run completes them
            wrong = _incomplete(folder, name)
        wrong = wrong or check_completed(name, folder)
        return f"{error} at event {event} ({at.kind} {at.path}): {wrong}" if wrong else ""
    finally:
        os.close(mark)
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def memory_use(name: str) -> tuple[int, int]:
    """The address space of a fork before a command, and the most that the command needs, in bytes.

    Args:
        name: The name of the command.
    """
    folder = new_folder()
    copy_inputs(COMMANDS[name], folder)
    before = status("VmSize")
    ended = run_forked(COMMANDS[name], folder, finish=lambda: status("VmPeak"))
    assert ended.code == 0, ended.err
    shutil.rmtree(folder)
    return before, max(before, ended.value)


def status(field: str) -> int:
    """Return a size of this process, in bytes.

    Args:
        field: Its name in /proc/self/status.
    """
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def out_of_memory(name: str, number: int) -> str:
    """Run a command with less address space than it needs, and then again without a limit.

    Args:
        name: The name of the command.
        number: The limit, from 0 to `SIZES` - 1: from nothing more than at its start to almost enough.

    Returns:
        What is wrong; empty where nothing is.
    """
    start, most = memory_use(name)
    limit = start + 2**18 + (most - start) * number // SIZES
    folder = new_folder()
    copy_inputs(COMMANDS[name], folder)
    try:
        ended = run_forked(COMMANDS[name], folder, lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
        wrong = user_message(ended)
        if not wrong and ended.code == 0:
            wrong = _incomplete(folder, name)
        if not wrong and ended.code == 0 and number == 0 and most - start > 2**20:
            wrong = "it succeeds without memory: the limit has no effect"
        wrong = wrong or check_completed(name, folder)
        return f"with {(limit - start) / 2**20:.1f} MiB of memory: {wrong}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _suites() -> list[Suite]:
    """The suites of all commands."""
    found = []
    for name in COMMANDS:
        found.append(
            suite(
                f"error-{name}",
                "a file-system call fails with ENOSPC, EIO, EINTR or ENOLCK",
                lambda number, dice, name=name: fail_at_event(name, number, dice),
                total=lambda name=name: len(failures(name)),
                short=4 if name in ("train", "sample", "prepare") else 1,
            )
        )
        found.append(
            suite(
                f"memory-{name}",
                "an allocation fails under a limit of memory",
                lambda number, dice, name=name: out_of_memory(name, number),
                total=lambda: SIZES,
                short=1 if name in ("train", "sample") else 0,
            )
        )
    return found


SUITES = _suites()
