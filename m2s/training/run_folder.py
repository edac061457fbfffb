"""The folder of a run: locked while in use, with train.json, which records configuration, code and machine."""

import fcntl
import json
import os
import platform
import socket
import time
from typing import Any

import torch

from m2s.data.source import Source
from m2s.errors import UserError
from m2s.io import output_folder, write_json
from m2s.provenance import command, revision
from m2s.training.config import RECORD, Config, plain
from m2s.version import __version__

__all__ = ["MUTABLE_ON_RESUME", "RECORD", "RunFolder", "environment"]
# The options that may change when a run is resumed: none of them changes the result.
MUTABLE_ON_RESUME = {
    "run": {"out", "log_every", "validate_every", "validation_samples", "validation_passes", "save_every", "keep", "on_nan"}
    | {"device", "compile", "recompute", "parallel", "tensorboard", "wandb"},
    "data": {"folder", "hub"},
}


class RunFolder:
    """A context that locks the folder of a run and records a start of the run in its train.json.

    The lock is the operating system's: it is released when the process ends, in whatever way.

    Args:
        config: The resolved configuration.
        source: The data.

    Raises:
        UserError: The folder is in use, holds another run, or holds files of something else.
    """

    def __init__(self, config: Config, source: Source) -> None:
        self.path = config.run.out
        self.config = plain(config)
        self.data = {"rows": source.size, "length": source.length, "vocab": source.vocab}

    def __enter__(self) -> "RunFolder":
        files = sorted(p.name for p in self.path.glob("*")) if self.path.is_dir() else []
        if files and not (self.path / RECORD).exists():
            raise UserError(f"{self.path} holds {files[0]} but no {RECORD}, so it is not a run: give another --out")
        output_folder(self.path)
        self._lock = (self.path / ".lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise UserError(f"{self.path} is in use by {owner}: wait for it, or give another --out") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock.flush()
        try:
            self._record()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _record(self) -> None:
        """Check that train.json holds the same run, and append this start to it."""
        path = self.path / RECORD
        record: dict[str, Any] = {"config": self.config, "data": self.data, "starts": []}
        if path.exists():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                self._check_same(record)
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, UserError):
                    raise
                raise UserError(f"{path} is damaged ({error}): give another --out") from error
        record["starts"].append(environment())
        write_json(path, record)

    def _check_same(self, record: dict[str, Any]) -> None:
        """Raise an error where the folder holds another run."""
        # A run of an older version has no entry for a newer option: it had the default.
        before, now = _flat(plain(Config())) | _flat(record["config"]), _flat(self.config)
        different = [key for key in {**before, **now} if before.get(key) != now.get(key) and not _is_mutable(key)]
        if different:
            shown = "; ".join(f"{_option(key)} was {before.get(key)} and is now {now.get(key)}" for key in different[:4])
            raise UserError(
                f"{self.path} holds another run: {shown}. Give another --out, with --init {self.path} to start from its weights"
            )
        if record["data"] != self.data:
            raise UserError(f"{self.path} was trained on other data: {record['data']} then, {self.data} now")


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
