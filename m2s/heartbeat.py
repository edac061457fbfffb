"""Heartbeats between the processes of a run: when one stops, the others end with a message that names it.

A collective operation waits for every process. Without a limit, one process that is stopped or stuck makes all others wait
silently. So each process counts the places of the program that it reaches. A thread publishes that count, and a tick that shows
that the process runs at all, in the store of the process group, and reads those of the others. A second thread compares them:
the store itself may not answer.
"""

import contextlib
import math
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from m2s.errors import UserError

VARIABLE = "M2S_RANK_TIMEOUT"
DEFAULT = 600.0
NAME = "m2s-heartbeat"  # of the threads


def rank_timeout() -> float:
    """Return the seconds that a process waits for another one, from the environment variable M2S_RANK_TIMEOUT.

    Returns:
        The seconds; 600 where the variable is not set, infinity where it is 0.

    Raises:
        UserError: The variable is not a number, or negative.
    """
    text = os.environ.get(VARIABLE) or str(DEFAULT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise UserError(f"{VARIABLE} is {text!r}, but it must be a number of seconds from 0 on; 0 waits without a limit")
    return seconds or math.inf


@dataclass
class LastBeat:
    """The last heartbeat of a process.

    Args:
        text: What it published.
        changed: The time at which this process saw the text first.
    """

    text: str
    changed: float

    @property
    def count(self) -> int:
        """How many places of the program it has reached."""
        return int(self.text.split("|", 3)[1])

    @property
    def process(self) -> str:
        """Its process id and host."""
        return self.text.split("|", 3)[2]

    @property
    def place(self) -> str:
        """The last place that it reached."""
        return self.text.split("|", 3)[3]


class Heartbeat:
    """Publishes the heartbeats of this process, and ends it when another one stops.

    Args:
        store: The store of the process group. It is cloned, because a connection serves one thread.
        rank: The number of this process.
        size: The number of processes.
        seconds: How long to wait for another process.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self.store, self.rank, self.size, self.seconds = store.clone(), rank, size, seconds  # type: ignore[attr-defined]
        self.pause = min(5.0, seconds / 8)  # between two heartbeats, so a message names a place at most this old
        self._count, self._place, self._since = 0, "the start", time.monotonic()
        self._beats: dict[int, LastBeat] = {}
        self._started = time.monotonic()
        self._ticks, self._answered, self._stopped = 0, time.monotonic(), threading.Event()
        self._threads = [threading.Thread(target=work, name=NAME, daemon=True) for work in (self._exchange, self._watch)]

    def _announce(self) -> None:
        """Publish a heartbeat."""
        self._ticks += 1
        process = f"process {os.getpid()} on {socket.gethostname()}"
        self.store.set(f"heartbeat-{self.rank}", f"{self._ticks}|{self._count}|{process}|{self._place}")

    def start(self) -> None:
        """Start to publish and to watch. Other processes may start later, but within the seconds to wait."""
        self._since = self._answered = self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def reach(self, place: str | None = None) -> None:
        """Count a place of the program that every process reaches.

        Args:
            place: Its name in messages; None: that of the last one.
        """
        self._count, self._place, self._since = self._count + 1, place or self._place, time.monotonic()

    def stop(self) -> None:
        """End the threads."""
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(1.0)  # the store may not answer

    def _exchange(self) -> None:
        """Publish this process's heartbeat and read those of the others, in a loop."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        with contextlib.suppress(Exception):  # the process that holds the store has ended
            while True:
                self._announce()
                started = [rank for rank in others if rank in self._beats or self.store.check([f"heartbeat-{rank}"])]
                texts = [value.decode() for value in self.store.multi_get([f"heartbeat-{rank}" for rank in started])]
                now = time.monotonic()
                for rank, text in zip(started, texts, strict=True):
                    if rank not in self._beats or self._beats[rank].text != text:
                        self._beats[rank] = LastBeat(text, now)
                self._answered = now
                if self._stopped.wait(self.pause):
                    return

    def _watch(self) -> None:
        """Compare the heartbeats, and end this process where another one has stopped."""
        before = time.monotonic()
        while not self._stopped.wait(self.pause):
            now = time.monotonic()
            if now - before > 3 * self.pause + 1:  # this process itself was stopped: the others may have been, too
                for beat in list(self._beats.values()):
                    beat.changed = now
                self._since = self._answered = self._started = now
            before = now
            if (missing := self._missing(now)) is not None:
                self._end(missing)

    def _missing(self, now: float) -> str | None:
        """What does not answer, in words; None where every process does."""
        if now - self._answered > self.seconds:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                return "torchrun's store does not answer"
            return f"rank 0{self._describe(0)} does not answer"
        faults = []
        if now - self._started > self.seconds:
            absent = set(range(self.size)) - self._beats.keys() - {self.rank}
            faults += [f"rank {rank} has not started" for rank in sorted(absent)]
        for rank, beat in sorted(self._beats.items()):
            behind = beat.count < self._count and now - self._since > self.seconds
            if now - beat.changed > self.seconds:
                faults.append(f"rank {rank}{self._describe(rank)} does not answer")
            elif behind:
                faults.append(f"rank {rank}{self._describe(rank)} makes no progress")
        return ", ".join(faults) or None

    def _describe(self, rank: int) -> str:
        """The process and the last place of a rank, where they are known."""
        beat = self._beats.get(rank)
        return "" if beat is None else f" ({beat.process}, last seen at {beat.place})"

    def _end(self, missing: str) -> None:
        """Print what is missing, and end this process at once: its main thread waits in an operation without a way out."""
        sys.stderr.write(
            f"m2s: {missing}, and rank {self.rank} has waited for {self.seconds:g} s at {self._place}: it stops. States that "
            f"were saved are intact, and the same command resumes. {VARIABLE} sets the seconds, 0 waits without a limit\n"
        )
        sys.stderr.flush()
        os._exit(1)
