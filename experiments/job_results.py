"""Pack the small results of a job while it runs, so that they can be copied away at any time.

What is packed is a folder of parts and a manifest (experiments/transfer.py), and never more than one transfer. A new version is
written beside the previous one. Then `back`, a symbolic link to the newest version, is replaced in one step. A reader that
enters the folder once (`cd back`) reads one complete version, also where the next one appears meanwhile: versions stay for
two minutes. experiments/copy_results.sh does so.

Results that need several transfers are packed in back, back-2, back-3 and so on, each complete in itself and with the oldest
results first. Stages run in the order of their importance, so back has the most important ones.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import transfer

from m2s.errors import UserError

RUN_FILES = ("train.json", "log.jsonl", "config.json")  # of a run that figures and reports read
# Of one transfer. It takes 8 files and 64 MiB, and what judges found needs two small files of these.
PART_MIB, FILES, TOTAL_MIB = 15.5, 5, 60.0
VERSION_SECONDS = 120.0  # that an older version stays, for a reader that is still copying it
HEADERS = 4096  # bytes of a file in an archive beside its content, at most: its name and those of its folders
VERSIONS = ".versions"
SMALL = (".json", ".jsonl", ".txt")


@dataclass
class Packer:
    """Packs the results of a job. A call returns what it did, for the log, and does not fail.

    Args:
        out: The folder of all results.
        files: Returns the files that exist now.
        target: The link to the newest version; None: nothing is packed.
    """

    out: Path
    files: Callable[[], Sequence[Path]]
    target: Path | None

    def __call__(self) -> str:
        """Pack what there is, and return what was packed."""
        if self.target is None:
            return "nothing is packed"
        try:
            return pack(self.out, self.files(), self.target)
        except (UserError, OSError) as error:
            print(f"not packed: {error}", file=sys.stderr, flush=True)
            return "not packed"

    def finish(self) -> None:
        """Pack what there is at the end of a call, where an error ends the call.

        Raises:
            UserError: Nothing can be packed, or a file alone is larger than a transfer.
        """
        if self.target is not None:
            print(pack(self.out, self.files(), self.target), flush=True)
            if large := transfers(self.files())[1]:
                raise UserError(f"{large[0]} is larger than a transfer of {TOTAL_MIB:g} MiB: use transfer.py split and copy")


def pack(out: Path, files: Sequence[Path], target: Path) -> str:
    """Pack files, in as many transfers as they need.

    Args:
        out: The folder of all results.
        files: Files in it.
        target: The link to the newest version of the first transfer. Those of the others have its name and a number.

    Returns:
        What was packed where, and what was left out.

    Raises:
        UserError: Something that is no link has the name of a link.
    """
    groups, large = transfers(files)
    collected = out / "bundle" / "results"
    lines = []
    for number, group in enumerate(groups, 1):
        shutil.rmtree(collected, ignore_errors=True)
        collected.mkdir(parents=True)
        for file in group:
            place = collected / file.relative_to(out)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        place = numbered(target, number)
        lines.append(f"{len(group)} files, {publish(collected, place) / transfer.MIB:.1f} MiB in {place}")
    for path in large:
        lines.append(f"left out, larger than a transfer: {path}")
    unused = len(groups) + 1
    while numbered(target, unused).is_symlink():  # results were removed since
        numbered(target, unused).unlink()
        unused += 1
    return "; ".join(lines)


def numbered(target: Path, number: int) -> Path:
    """Return the link of a transfer.

    Args:
        target: The link of the first one.
        number: The number of the transfer, from 1.
    """
    return target if number == 1 else target.with_name(f"{target.name}-{number}")


def transfers(files: Iterable[Path]) -> tuple[list[list[Path]], list[Path]]:
    """Return the files of each transfer, and those that are larger than one.

    Logs and tables are first, then the others from the oldest to the newest one.

    Args:
        files: All files.
    """
    # Room of an archive: half a MiB is for the manifest, the folders and the end of the archive.
    limit = min(TOTAL_MIB - 0.5, (FILES - 1) * PART_MIB) * transfer.MIB - (1 << 16)
    groups: list[list[Path]] = [[]]
    used, large = 0, []
    described = [(path.suffix not in SMALL, path.stat().st_mtime_ns, path, path.stat().st_size) for path in files]
    for _, _, path, size in sorted(described):
        size = 512 * math.ceil(size / 512) + HEADERS
        if size > limit:
            large.append(path)
            continue
        if used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(path)
        used += size
    return groups, large


def publish(source: Path, target: Path, xz: bool = False) -> int:
    """Split a folder into parts, and make a link to them in one step.

    Args:
        source: The folder.
        target: The link. Versions are in a folder beside it, TARGET.versions.
        xz: Compress the parts.

    Returns:
        The bytes of all parts.

    Raises:
        UserError: Something that is no link has the name of the link.
    """
    check_target(target)
    versions = target.with_name(target.name + VERSIONS)
    versions.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) for path in versions.iterdir() if path.name.isdecimal()]
    new = versions / f"{max(numbers, default=0) + 1:06d}"
    manifest = transfer.split(source, new, int(PART_MIB * transfer.MIB), xz)
    link = versions / "next"
    link.unlink(missing_ok=True)
    link.symlink_to(new.relative_to(target.parent), target_is_directory=True)
    os.replace(link, target)
    for one in versions.iterdir():
        if one != new and time.time() - one.stat().st_mtime > VERSION_SECONDS:
            shutil.rmtree(one)
    return int(manifest["bytes"])


def check_target(target: Path) -> None:
    """Check that a link can be made.

    Args:
        target: The link.

    Raises:
        UserError: Something else has its name.
    """
    if target.exists() and not target.is_symlink():
        raise UserError(f"{target} exists and is no link to packed results: remove it, or give another --bundle")
