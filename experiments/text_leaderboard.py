"""Rows of experiments/text_job.py as entries of the leaderboard: their wall clock, and the folder that is verified.

The wall clock of a row is that of rule 2 in docs/leaderboard.md: all processes that trained it, from their start, with
imports, the run that measures the speed, compilation, validations and the final NELBO. The last is after the weights are on
the disk, so the number is too large by half a minute.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import leaderboard
import text_results

from m2s.data.tokenizer import KEPT
from m2s.errors import UserError
from m2s.hub.folder import CONFIG, WEIGHTS
from m2s.io import output_folder, write_json
from m2s.provenance import revision
from m2s.training.config import RECORD
from m2s.training.log import NAME as LOG

FOLDER, CLOCK = "leaderboard", "clock"
REPOSITORY = "this repository"


def process_seconds() -> float:
    """Return the seconds since this process started; 0 where the system does not say it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


@contextlib.contextmanager
def wall_clock(out: Path, row: str, imports: float) -> Iterator[None]:
    """Add the seconds of a block, and those before it, to the wall clock of a row that is not finished.

    Args:
        out: The folder of all results.
        row: The row.
        imports: Seconds of the process until its work began.
    """
    path, begin, finished = out / CLOCK / f"{row}.json", time.monotonic(), (out / f"{row}.json").exists()
    try:
        yield
    finally:
        if not finished:
            before = json.loads(path.read_text(encoding="utf-8"))["seconds"] if path.exists() else 0.0
            output_folder(path.parent)
            write_json(path, {"seconds": before + imports + time.monotonic() - begin})


def verify(out: Path, row: str, data: Path) -> None:
    """Make the folder of an entry from a trained row, with links to the files of its run, and verify it.

    Args:
        out: The folder of all results.
        row: The row.
        data: Folder that `m2s data prepare` wrote.

    Raises:
        UserError: The row is no valid entry.
    """
    folder, run = output_folder(out / FOLDER / row), out / "runs" / row
    result = text_results.read(out / f"{row}.json")
    seed = int(text_results.read(run / RECORD)["config"]["run"]["seed"])
    target = output_folder(folder / f"seed-{seed}")
    for name in (CONFIG, WEIGHTS, RECORD, LOG, *KEPT):
        if (run / name).exists() and not (target / name).exists():
            os.link(run / name, target / name)
    seconds = text_results.read(out / CLOCK / f"{row}.json")["seconds"]
    entry = {
        "name": f"{row} of {REPOSITORY}",
        "method": text_results.read(run / RECORD)["config"]["method"],
        "code": f"{REPOSITORY}, commit {revision()}",
        "runs": [{"folder": target.name, "seed": seed, "seconds": round(seconds, 1), "command": result["train"]}],
    }
    write_json(folder / leaderboard.ENTRY, entry)
    if leaderboard.main(["verify", str(folder), "--data", str(data)]):
        raise UserError(f"{folder} is no valid entry: see the message above")
