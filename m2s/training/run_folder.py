"""The folder of a run: locked while in use, with train.json, which records configuration, code and machine."""

import contextlib
import fcntl
import os
import platform
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from m2s.data.source import Source, TextSource, fingerprint
from m2s.errors import UserError, print_escaped
from m2s.io import open_file, output_folder, read_json, write_json
from m2s.provenance import command, revision
from m2s.training.config import RECORD, Config, plain
from m2s.version import __version__

__all__ = ["MUTABLE_ON_RESUME", "RECORD", "RunFolder", "environment", "read_record"]
LOCK, LOG, STATE = ".lock", "log.jsonl", "state"
# The options that may change when a run is resumed: none of them changes the result.
MUTABLE_ON_RESUME = {
    "run": {"out", "log_every", "validate_every", "validation_samples", "validation_passes", "save_every", "keep", "on_nan"}
    | {"on_low_memory"}
    | {"device", "compile", "recompute", "parallel", "tensorboard", "wandb", "other_data"},
    "data": {"folder", "hub"},
}


SIZES = ("rows", "length", "vocab")  # what every record says about the data
# Files that a process may leave when it is killed before it has written train.json, besides the lock.
# Temporary files that killed processes leave: those of m2s.io, and those in which safetensors writes before it renames.
LEFTOVER = re.compile(
    r"\.m2s-([0-9a-f]+-)?[0-9]+\.tmp|\.(train|log|nan|config)-([0-9a-f]+-)?[0-9]+\.jsonl?|\.tmp[0-9A-Za-z]{6}"
)


def _is_leftover(path: Path) -> bool:
    """Whether a killed process left a file or folder: a temporary file, or an empty one of a run, as after a full disk."""
    if LEFTOVER.fullmatch(path.name):
        return True
    if path.name not in (RECORD, LOG, STATE) or path.is_symlink():
        return False
    return not any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size == 0


class RunFolder:
    """A context that locks the folder of a run and records a start of the run in its train.json.

    The lock is the operating system's: it is released when the process ends, in whatever way. A folder that is empty, or holds
    only what a process leaves that was killed before it wrote train.json, becomes a new run.

    Args:
        config: The resolved configuration.
        source: The data.

    Raises:
        UserError: The folder is in use, holds another run, was trained on other data, or holds files of something else.
    """

    def __init__(self, config: Config, source: Source) -> None:
        self.path = config.run.out
        self.config = plain(config)
        self.other_data = config.run.other_data
        self.data: dict[str, Any] = {"rows": source.size, "length": source.length, "vocab": source.vocab}
        if isinstance(source, TextSource):  # its fingerprint is what meta.json says: compare that with the files
            source.verify()
        if (sha256 := fingerprint(source)) is not None:
            self.data["sha256"] = sha256

    def __enter__(self) -> "RunFolder":
        files = sorted(self.path.iterdir()) if self.path.is_dir() else []
        foreign = [path.name for path in files if path.name != LOCK and not _is_leftover(path)]
        if foreign and RECORD not in foreign:
            raise UserError(f"{self.path} holds {foreign[0]} but no {RECORD}, so it is not a run: give another --out")
        output_folder(self.path)
        self._lock = os.fdopen(open_file(self.path / LOCK, os.O_RDWR), "r+", encoding="utf-8", errors="replace")
        try:
            self._acquire()
            for path in self.path.iterdir():
                if _is_leftover(path) and not path.is_dir():
                    path.unlink(missing_ok=True)
            self._record()
        except BaseException:
            # Closing flushes, which fails again on a full disk.
            with contextlib.suppress(OSError):
                self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _acquire(self) -> None:
        """Lock the folder, and write the name of this process to the lock."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = "".join(filter(str.isprintable, self._lock.read(200))).strip() or "another process"
            raise UserError(f"{self.path} is in use by {owner}: wait for it, or give another --out") from None
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be locked ({error.strerror or error}): set --out to a folder on a file system with locks"
            ) from error
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()

    def _record(self) -> None:
        """Check that train.json holds the same run, and append this start to it."""
        path = self.path / RECORD
        record: dict[str, Any] = {"config": self.config, "data": self.data, "starts": []}
        start = environment()
        if os.path.lexists(path):
            record = read_record(self.path, "give another --out")
            self._check_same(record)
            if self._is_other_data(record["data"]):
                print_escaped(f"resuming {self.path} on other data than before, as --other-data asks for", file=sys.stderr)
                start["data_before"] = record["data"]
            record["data"] = {**record["data"], **self.data}  # a run of an older version has no fingerprint: it gets one now
        record["starts"].append(start)
        write_json(path, record)

    def _check_same(self, record: dict[str, Any]) -> None:
        """Raise an error where the folder holds another run."""
        # A run of an older version has no entry for a newer option: it had the default.
        before, now = _flat(plain(Config())) | _flat(record["config"]), _flat(self.config)
        different = [key for key in {**before, **now} if before.get(key) != now.get(key) and not _is_mutable(key)]
        if different:
            shown = "; ".join(
                f"{_shown(_option(key))} was {_shown(before.get(key))} and is now {_shown(now.get(key))}"
                for key in different[:4]
            )
            raise UserError(
                f"{self.path} holds another run: {shown}. Give another --out, with --init {self.path} to start from its weights"
            )

    def _is_other_data(self, before: dict[str, Any]) -> bool:
        """Whether the data is not that of earlier starts; raise an error where that was not asked for, or cannot work."""
        different = [name for name, value in self.data.items() if before.get(name, value) != value]
        if not different:
            return False
        shown = ", ".join(f"{name} {_shown(before[name])} then and {self.data[name]} now" for name in different)
        if not self.other_data or {"length", "vocab"} & set(different):
            hint = "" if {"length", "vocab"} & set(different) else ", or --other-data to continue on this data"
            raise UserError(
                f"{self.path} was trained on other data ({shown}): give the data of its first start, another --out{hint}"
            )
        return True


def read_record(folder: Path, hint: str) -> dict[str, Any]:
    """Read the train.json of a run, and check that it has what every record has.

    Args:
        folder: The folder of the run.
        hint: What the user can do if it is damaged, as the end of the message.

    Returns:
        The record: "config" (sections by name), "data" (sizes and fingerprint) and "starts" (one entry for each start).

    Raises:
        UserError: The file is missing or damaged.
    """
    path = folder / RECORD
    record = read_json(path, hint)
    config, data, starts = (record.get(name) for name in ("config", "data", "starts"))
    fault = None
    if not isinstance(config, dict) or not all(isinstance(value, dict | str) for value in config.values()):
        fault = "its configuration is missing"
    elif not isinstance(data, dict) or not all(type(data.get(name)) is int and data[name] > 0 for name in SIZES):
        fault = "the sizes of its data are missing"
    elif not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        fault = "its starts are missing"
    if fault is not None:
        raise UserError(f"{path} is damaged ({fault}): {hint}")
    return record


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one key, such as "head.offset", for each value."""
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in config.items()}
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def _is_mutable(key: str) -> bool:
    """Whether a value may change when a run is resumed."""
    section, _, name = key.partition(".")
    return name in MUTABLE_ON_RESUME.get(section, ())


def _option(key: str) -> str:
    """The name of a value as the command line has it."""
    return key.removeprefix("run.").rstrip(".")


def _shown(value: Any) -> str:
    """A value of a file that may be damaged, for a message: short, and in one line."""
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def environment() -> dict[str, Any]:
    """Return the time, the command, the versions and the machine of this start of a run."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command(),
        "m2s": __version__,
        "git": revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
    }
