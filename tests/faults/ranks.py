"""Suite 5: two processes, of which one is killed, stopped or out of memory. The other one ends, and the run resumes."""

import contextlib
import functools
import os
import random
import resource
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

from .campaign import Suite, suite
from .commands import TRAIN, differences, new_folder, run_command, snapshot, words
from .fork import Ended, exit_code
from .io_errors import status

TIMEOUT = float(os.environ.get("FAULTS_RANK_TIMEOUT", "4"))
"""Seconds that a process waits for another one (M2S_RANK_TIMEOUT)."""
LIMIT = float(os.environ.get("FAULTS_RANK_LIMIT", "60"))
"""Seconds after which the process that is left hangs."""
ARGUMENTS = ("train", "digits", "--out", "run", *TRAIN, *words("--steps 6 --micro-batch 2"))
WAYS = ("killed", "stopped", "out of memory")


class Pair:
    """Two processes of one run, with the environment that torchrun sets.

    Args:
        folder: The folder of the case.
        starved: The process that gets no more memory, None for none.
        after: When the memory of that process ends, in seconds.
    """

    def __init__(self, folder: Path, starved: int | None = None, after: float = 0.0) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.starved, self.after = folder, starved, after
        self.processes = [self._fork(rank) for rank in range(2)]
        self.started = time.monotonic()

    def _fork(self, rank: int) -> int:
        """Start a process."""
        process = os.fork()
        if process:
            return process
        output = os.open(self.folder / f"rank-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)

        def work() -> None:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "M2S_RANK_TIMEOUT": str(TIMEOUT)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
            if rank == self.starved:
                threading.Timer(self.after, _end_memory).start()
            run_command(ARGUMENTS)

        os.setsid()
        os.chdir(self.folder)
        code, _ = exit_code(work)
        os._exit(code & 0xFF)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank], number)

    def wait(self, rank: int, limit: float) -> int | None:
        """Return the exit code of a process; None where it has not ended after a time."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            process, found = os.waitpid(self.processes[rank], os.WNOHANG)
            if process:
                self.processes[rank] = -1
                return os.waitstatus_to_exitcode(found)
            time.sleep(0.01)
        return None

    def output(self, rank: int) -> str:
        """Return what a process printed."""
        return (self.folder / f"rank-{rank}.txt").read_text(errors="replace")

    def close(self) -> None:
        """Kill what is left."""
        for process in filter(lambda process: process > 0, self.processes):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        self.processes = [-1, -1]
        for rank in range(2):
            (self.folder / f"rank-{rank}.txt").unlink(missing_ok=True)


def _end_memory() -> None:
    """Let every further allocation of memory fail."""
    limit = status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_pair(folder: Path) -> str:
    """Run both processes to their end.

    Args:
        folder: The folder of the case.

    Returns:
        What is wrong; empty where both end with success.
    """
    pair = Pair(folder)
    codes = [pair.wait(rank, LIMIT) for rank in range(2)]
    said = [pair.output(rank) for rank in range(2)]
    pair.close()
    return "" if codes == [0, 0] else f"exit codes {codes}\n{said[0]}\n{said[1]}"


@functools.cache
def uninterrupted() -> tuple[dict[str, bytes], float]:
    """The files of a run on two processes, and the seconds it takes."""
    folder, started = new_folder(), time.monotonic()
    wrong = run_pair(folder)
    assert not wrong, wrong
    return snapshot(folder), time.monotonic() - started


def lose_a_process(number: int, dice: random.Random) -> str:
    """Lose one of two processes at a random moment, and run both again.

    Args:
        number: The number of the case; it chooses the way.
        dice: The random numbers of the case.

    Returns:
        What is wrong; empty where nothing is.
    """
    expected, seconds = uninterrupted()
    way, failed_rank, folder = WAYS[number % len(WAYS)], dice.randrange(2), new_folder()
    moment = dice.uniform(0, seconds)
    pair = Pair(folder, failed_rank if way == "out of memory" else None, moment)
    try:
        time.sleep(moment)
        if way != "out of memory":
            pair.signal(failed_rank, signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        other = 1 - failed_rank
        code = pair.wait(other, LIMIT)
        said, failed_output = Ended(code, "", pair.output(other)), pair.output(failed_rank)
        pair.close()
        at = f"process {failed_rank} {way} after {moment:.2f} s: process {other}"
        if code is None:
            return f"{at} hangs\n{said.err}"
        if said.traceback:
            return f"{at} ends with a traceback\n{said.err}"
        if code != 0 and not said.messages:
            return f"{at} ends with code {code} and without a message\n{said.err}"
        named = (f"rank {failed_rank}", "not all 2 processes have started")
        if way == "stopped" and code != 0 and not any(text in line for line in said.messages for text in named):
            return f"{at} does not name rank {failed_rank}\n{said.err}"
        if way == "out of memory" and Ended(None, "", failed_output).traceback:
            return f"process {failed_rank} {way} after {moment:.2f} s ends with a traceback\n{failed_output}"
        wrong = run_pair(folder) or differences(snapshot(folder), expected)
        return f"{at} ended with code {code}; the second run: {wrong}" if wrong else ""
    finally:
        pair.close()
        shutil.rmtree(folder, ignore_errors=True)


SUITES: list[Suite] = [
    suite("ranks", "one of two processes is killed, stopped or out of memory", lose_a_process, target=60, short=2)
]
