"""The small results of a job, packed in parts for one transfer."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import transfer

from m2s.errors import UserError

RUN_FILES = ("train.json", "log.jsonl", "config.json")  # of a run that figures and reports read
PART_MIB, FILES, TOTAL_MIB = 15.5, 8, 63.5  # of one transfer


def pack(out: Path, files: Iterable[Path], rows: list[str], target: Path) -> None:
    """Pack files in parts for one transfer.

    Args:
        out: The folder of all results.
        files: Files in it.
        rows: The rows that they belong to, for the message.
        target: The folder of the parts.

    Raises:
        UserError: They do not fit into one transfer.
    """
    collected = out / "bundle" / "results"
    shutil.rmtree(collected, ignore_errors=True)
    collected.mkdir(parents=True)
    for file in files:
        place = collected / file.relative_to(out)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    transfer.split(collected, out / "bundle" / "parts", int(PART_MIB * transfer.MIB))
    count, transfers = transfer.copy_group(out / "bundle" / "parts", target, 0, FILES, int(TOTAL_MIB * transfer.MIB))
    print(f"{count} parts of results in {target}", flush=True)
    if transfers > 1:
        raise UserError(f"the results of {', '.join(rows)} need {transfers} transfers: bundle fewer rows at once (--rows)")
