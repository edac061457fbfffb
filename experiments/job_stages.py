"""Stages of a job on a machine with a time limit: commands of m2s whose results are not computed again."""

import gc
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from m2s.cli import run as run_m2s
from m2s.io import output_folder
from m2s.provenance import recorded_command

LEVELS = 3  # of importance of stages


@dataclass(frozen=True)
class Stage:
    """One result of a row.

    Args:
        name: What it is, for messages.
        result: The file that exists when the stage is finished.
        run: Computes it. An interrupted stage resumes.
        level: 1 for the most important stages, at most LEVELS.
    """

    name: str
    result: Path
    run: Callable[[], object]
    level: int = 1


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


def run_stages(stages: Iterable[Stage], started: float) -> list[str]:
    """Run the stages that are not finished. A stage that fails does not end the others.

    Args:
        stages: The stages.
        started: `time.monotonic()` at the start of the process.

    Returns:
        The names of those that failed.
    """
    failed = []
    for stage in stages:
        if not stage.result.exists():
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print(f"at {time.monotonic() - started:.0f} s: {stage.name}", flush=True)
            try:
                stage.run()
            except Exception as error:
                failed.append(stage.name)
                print(f"failed: {stage.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return failed
