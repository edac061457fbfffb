"""Run a case in a forked process: with a time limit, with its output caught, and killed from outside where asked for."""

import faulthandler
import os
import pickle
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = float(os.environ.get("FAULTS_LIMIT", "60"))
"""Seconds after which a case hangs. The machine may be busy, so this is far above what a case takes."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Args:
        code: The exit code; minus the number of the signal that killed it; None where it did not end within the limit.
        out: What it wrote to stdout.
        err: What it wrote to stderr; with the stacks of its threads where it did not end.
        value: What the function returned; None where the process did not get so far.
    """

    code: int | None
    out: str
    err: str
    value: Any = None

    @property
    def traceback(self) -> bool:
        """Whether Python printed a traceback."""
        return "Traceback (most recent call last)" in self.err

    @property
    def messages(self) -> list[str]:
        """The lines of stderr that are messages of m2s. A progress bar may stand before one on its line."""
        return [line.rpartition("\r")[2] for line in self.err.splitlines() if line.rpartition("\r")[2].startswith("m2s: ")]


def forked(work: Callable[[], Any], folder: Path, limit: float = LIMIT, kill_after: float | None = None) -> Ended:
    """Run a function in a forked process.

    Args:
        work: The function. Its result must be picklable.
        folder: The working directory of the process.
        limit: Seconds until the process counts as hanging. It is killed then.
        kill_after: Seconds until it is killed by SIGKILL; None: it is not.

    Returns:
        How it ended.
    """
    channels = [os.memfd_create(name) for name in ("out", "err", "value")]
    process = os.fork()
    if process == 0:
        _child(work, folder, channels)
    handle = os.pidfd_open(process)
    try:
        hung = not _wait(handle, limit if kill_after is None else kill_after)
        if hung and kill_after is None:
            os.kill(process, signal.SIGABRT)  # faulthandler prints the stacks
            _wait(handle, 5)
        if hung:
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        out, err, value = (_read(channel) for channel in channels)
    finally:
        for channel in (handle, *channels):
            os.close(channel)
    code = None if hung and kill_after is None else os.waitstatus_to_exitcode(status)
    return Ended(code, out.decode(errors="replace"), err.decode(errors="replace"), pickle.loads(value) if value else None)


def exit_code(work: Callable[[], Any]) -> tuple[int, Any]:
    """Call a function as the interpreter runs a program.

    Args:
        work: The function.

    Returns:
        The exit code and the function's result. A traceback has been printed where Python would print one.
    """
    try:
        return 0, work()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0, None
        print(error.code, file=sys.stderr)
        return 1, None
    except BaseException:
        traceback.print_exc()
        return 1, None


def _child(work: Callable[[], Any], folder: Path, channels: list[int]) -> None:
    """The life of the forked process."""
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, channel in enumerate(channels[:2], 1):
            os.dup2(channel, number)
        # A test runner may have replaced these.
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        faulthandler.enable(file=2, all_threads=True)
        os.chdir(folder)
        code, value = exit_code(work)
        sys.stdout.flush()
        sys.stderr.flush()
        if value is not None:
            os.write(channels[2], pickle.dumps(value))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def _wait(handle: int, seconds: float) -> bool:
    """Whether the process of a handle ended within some seconds."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _read(channel: int) -> bytes:
    """Everything that was written to a memory file."""
    return os.pread(channel, os.fstat(channel).st_size, 0)
