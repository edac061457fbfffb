"""Stages of a job on a machine with a time limit: commands of m2s whose results are not computed again."""

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from m2s.cli import run as run_m2s
from m2s.io import output_folder
from m2s.ops import use_backend
from m2s.provenance import recorded_command

LEVELS = 3  # of importance of stages
MARGIN = 30.0  # seconds before the end of a call in which a run saves its state and results are packed
WATCH_SECONDS = 2.0  # between looks for a part of a stage


@dataclass(frozen=True)
class Stage:
    """One result of a row.

    Args:
        name: What it is, for messages.
        result: The file that exists when the stage is finished.
        run: Computes it. An interrupted stage resumes.
        level: 1 for the most important stages, at most LEVELS.
        part: A file that the stage finishes earlier, and that is packed at once; None: there is none.
    """

    name: str
    result: Path
    run: Callable[[], object]
    level: int = 1
    part: Path | None = None


def command_stage(words: list[str], out: Path, result: Path, level: int = 1) -> Stage:
    """Return the stage of a command of m2s.

    Args:
        words: The command.
        out: What it writes.
        result: The file that it writes last.
        level: That of the stage.
    """

    def run() -> None:
        output_folder(out.parent)
        with recorded_command(["m2s", *words]):
            run_m2s(words)

    return Stage(" ".join(["m2s", *words]), result, run, level)


@dataclass(frozen=True)
class Clock:
    """The time of a call.

    Args:
        started: `time.monotonic()` at the start of the process.
        seconds: Those after which the call ends.
    """

    started: float
    seconds: float

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def log(self, message: str) -> None:
        """Print a message with the seconds that have passed.

        Args:
            message: The message.
        """
        print(f"at {self.passed:.0f} s: {message}", flush=True)

    def log_end(self, message: str) -> None:
        """Print that something has ended, with the seconds that are left.

        Args:
            message: What was packed since.
        """
        left = "" if self.seconds == float("inf") else f", {self.seconds - self.passed:.0f} s left of this call"
        self.log(f"ended{left}; {message}")


@contextlib.contextmanager
def packed_early(part: Path | None, pack: Callable[[], str]) -> Iterator[None]:
    """Pack results while a block runs, as soon as a file exists.

    Args:
        part: The file; None: nothing is packed.
        pack: Packs all results.
    """
    ended = threading.Event()

    def watch() -> None:
        while part is not None and not ended.wait(WATCH_SECONDS):
            if part.exists():
                print(f"{part} is finished; {pack()}", flush=True)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def succeeds(stage: Stage, with_kernels: bool = True) -> bool:
    """Run a stage, and return whether it raised no error. Errors are printed.

    Args:
        stage: The stage.
        with_kernels: Whether Triton kernels and compilation are used. Without them the results are the same up to rounding.
    """
    try:
        with contextlib.nullcontext() if with_kernels else without_kernels():
            stage.run()
    except Exception as error:
        how = "" if with_kernels else " without kernels"
        print(f"failed{how}: {stage.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return False
    return True


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Compute in plain torch. What cannot be compiled runs without compilation."""
    before = torch._dynamo.config.suppress_errors
    torch._dynamo.config.suppress_errors = True
    torch.compiler.reset()
    try:
        with use_backend("reference"):
            yield
    finally:
        torch._dynamo.config.suppress_errors = before


def run_stages(stages: Iterable[Stage], clock: Clock, pack: Callable[[], str]) -> list[str]:
    """Run the stages that are not finished, and pack results after each.

    A stage that fails is tried once more without kernels: a machine may have another version of Triton or torch than the one
    that the kernels were tried with. A stage that fails again does not end the others.

    Args:
        stages: The stages.
        clock: The time of the call.
        pack: Packs all results, and returns what was packed.

    Returns:
        The names of those that failed.
    """
    failed = []
    for stage in stages:
        if not stage.result.exists():
            gc.collect()
            torch.compiler.reset()  # each stage compiles a network of its own, and torch counts them as recompilations
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            clock.log(stage.name)
            with packed_early(stage.part, pack):
                if not (succeeds(stage) or succeeds(stage, with_kernels=False)):
                    failed.append(stage.name)
            clock.log_end(pack())
    return failed
