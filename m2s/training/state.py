"""The states of a run, from which it resumes: `state/step-00001000/`, each complete or not there at all.

A state is written through torch.distributed.checkpoint. Every process writes its shards of the weights, of their average and of
the optimizer's moments as one safetensors file, syncs it and computes its SHA-256. `state.json` holds the step, a few numbers
and those checksums. `manifest.json` holds the SHA-256 of every file, also of `state.json`. Everything is written under a
temporary name, synced, and renamed; older states are removed after that. Any number of processes can read a state. There is no
pickle, and no state of random generators: random numbers are functions of the step.

A state of version 0.1 has no manifest. It is used where its shards have their SHA-256 and its numbers are possible.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from m2s.errors import UserError
from m2s.io import fsync, open_regular, parse_json, read_regular

INFO, MANIFEST = "state.json", "manifest.json"
FORMAT = 2
DAMAGED = ".damaged"
READS = 3  # a state is set aside when so many attempts to read it have failed
PAUSE = 0.5  # seconds between them


@dataclass(frozen=True)
class State:
    """A state on the disk.

    Args:
        path: Its folder.
        info: The content of its state.json.
    """

    path: Path
    info: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of training steps made."""
        return int(self.info["step"])

    def describe(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return size and dtype of each tensor, by name."""
        found = HuggingFaceStorageReader(str(self.path)).read_metadata().state_dict_metadata
        return {name: (value.size, value.properties.dtype) for name, value in found.items()}  # type: ignore[union-attr]

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Fill `tensors` in place, sharded over the processes in any way. Every process must call this.

        Args:
            tensors: The tensors to fill, by name: full tensors, or this process's shards.
        """
        with _same_error_everywhere():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(self.path)))


class _Writer(StorageWriter):
    """Writes a state: each process its file, and the first process state.json when all have written.

    The files are like those of torch's HuggingFaceStorageWriter, so that its reader reads them. That writer itself is not used:
    it holds everything twice in memory, cannot write tensors that are not contiguous, and syncs a file before it flushes it.

    Args:
        folder: The folder of the states.
        step: The training step.
        info: What state.json holds besides the step and the checksums.
    """

    def __init__(self, folder: Path, step: int, info: Mapping[str, Any]) -> None:
        self.folder, self.step, self.info, self.first = folder, step, info, False
        self.target = place(folder, step)
        self.temporary = folder / f".writing-{self.target.name}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        self.first = is_coordinator
        if self.first:
            _check_no_link(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            fsync(self.folder.parent)
            _remove(self.temporary)
            self.temporary.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"shard-{i:05d}-of-{len(plans):05d}.safetensors" for i in range(1, len(plans) + 1)]
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's file. `storage_data` of a result is the file's name and SHA-256."""
        done: Future[list[WriteResult]] = Future()
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            value, name = planner.resolve_data(item), item.index.fqn
            assert isinstance(value, Tensor) and item.tensor_data is not None
            tensors[name] = value.detach().cpu().contiguous()
            offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        results = []
        if tensors:
            path = self.temporary / plan.storage_data
            metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
            try:
                save_file(tensors, path, metadata)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            fsync(path)
            written = (path.name, digest(path))
            results = [WriteResult(item.index, tensors[item.index.fqn].nbytes, written) for item in plan.items]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = dict(sorted(result.storage_data for part in results for result in part))
        info = {**self.info, "format": FORMAT, "step": self.step, "files": files, "manifest": MANIFEST}
        self._write_text(INFO, info)
        self._write_text(MANIFEST, {"step": self.step, "files": {**files, INFO: digest(self.temporary / INFO)}})
        fsync(self.temporary)
        os.replace(self.temporary, self.target)
        fsync(self.folder)

    def _write_text(self, name: str, value: dict[str, Any]) -> None:
        """Write and sync a JSON file of the state."""
        (self.temporary / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        fsync(self.temporary / name)


def place(folder: Path, step: int) -> Path:
    """Return the folder of the state of a step.

    Args:
        folder: The folder of the states.
        step: The training step.
    """
    return folder / f"step-{step:08d}"


def write(folder: Path, step: int, tensors: dict[str, Tensor], info: Mapping[str, Any], keep: int) -> Path:
    """Write a new state, and then remove all but the newest ones. Every process must call this.

    Args:
        folder: The folder of the states.
        step: The training step.
        tensors: The tensors by name: this process's shards, or full tensors.
        info: What state.json holds besides the step and the checksums.
        keep: The number of states to keep.

    Returns:
        The folder of the new state.

    Raises:
        OSError: A process could not write its file. All processes raise it, and older states are intact.
    """
    writer = _Writer(folder, step, info)
    try:
        with _same_error_everywhere():
            save(tensors, storage_writer=writer)
    except OSError as error:
        if writer.first:
            shutil.rmtree(writer.temporary, ignore_errors=True)
        left = steps(folder)
        last = f"the state of step {left[-1]} is intact" if left else "there is no earlier state"
        raise OSError(f"the state of step {step} cannot be written to {folder} ({error}); {last}") from error
    if writer.first:
        remove_old(folder, keep)
    return writer.target


def remove_old(folder: Path, keep: int) -> None:
    """Remove all states but the newest ones.

    Args:
        folder: The folder of the states.
        keep: The number of states to keep.

    Raises:
        UserError: The folder is a symbolic link.
    """
    _check_no_link(folder)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(place(folder, old), ignore_errors=True)


@contextlib.contextmanager
def _same_error_everywhere() -> Iterator[None]:
    """Raise the error of one process in all of them, around torch.distributed.checkpoint; and do not warn about one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        try:
            yield
        except CheckpointException as error:
            failures = [failure for failure, _ in error.failures.values()]
            raise next((failure for failure in failures if not isinstance(failure, OSError)), failures[0]) from None


def steps(folder: Path) -> list[int]:
    """Return the steps of the states in a folder, in ascending order.

    Args:
        folder: The folder of the states.
    """
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    found = (int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 19)
    return sorted(step for step in found if os.path.lexists(place(folder, step)))


def newest(folder: Path, say: Callable[[str], None], fields: Mapping[str, type] | None = None) -> State | None:
    """Return the newest intact state. Later ones that are damaged are renamed to `step-...damaged`, and never deleted.

    Args:
        folder: The folder of the states.
        say: Called with a message about each damaged state.
        fields: The names that state.json must have besides the step, with the types of their values.

    Returns:
        The state; None where there is none.

    Raises:
        UserError: There are states, but all are damaged; or the folder is a symbolic link.
    """
    _check_no_link(folder)
    for leftover in folder.glob(".writing-*"):
        _remove(leftover)
    damaged: dict[int, str] = {}
    for step in reversed(steps(folder)):
        found = _try_read(folder, step, fields or {})
        if isinstance(found, State):
            for bad, why in damaged.items():
                aside = _set_aside(place(folder, bad))
                say(
                    f"the state of step {bad} is damaged ({why}): using the state of step {step} instead. The damaged one is "
                    f"now {aside}"
                )
            return found
        damaged[step] = found
    if damaged:
        reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise UserError(
            f"no state in {folder} is intact ({reasons}): train into another folder, or remove {folder} to start again"
        )
    return None


def _check_no_link(folder: Path) -> None:
    """Raise UserError where the folder of the states is a link: states would be written and deleted elsewhere."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link, and nothing is read, written or deleted through links: put the folder there")


def _remove(path: Path) -> None:
    """Remove the folder of a state that was not finished, or a link of its name."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    """Rename the folder of a damaged state, so that the run can write the state again, and return the new path."""
    names = (path.name + DAMAGED + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    target = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    os.replace(path, target)
    fsync(path.parent)
    return target


def _try_read(folder: Path, step: int, fields: Mapping[str, type]) -> State | str:
    """Return a state, or what is wrong with it. A read error may be transient, so that it is tried again."""
    for attempt in range(READS):
        if attempt:
            time.sleep(PAUSE)
        try:
            return read(folder, step, fields)
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except OSError as error:
            fault = f"{type(error).__name__}: {error}"
        except ValueError as error:
            return str(error)
    return fault


def read(folder: Path, step: int, fields: Mapping[str, type] | None = None) -> State:
    """Return the state of a step, after its files have been compared with their checksums.

    Args:
        folder: The folder of the states.
        step: The training step.
        fields: The names that state.json must have besides the step, with the types of their values.

    Returns:
        The state.

    Raises:
        ValueError: It is damaged. The message says what is wrong.
        OSError: A file is missing or cannot be read.
    """
    path = place(folder, step)
    info = _read_object(path / INFO)
    if info.get("format") != FORMAT:
        raise ValueError(f"its format is {info.get('format')!r:.40}, expected {FORMAT}")
    files = _listed(info, INFO)
    has_manifest = info.get("manifest") is not None or os.path.lexists(path / MANIFEST)
    if has_manifest:
        manifest = _read_object(path / MANIFEST)
        shards, files = files, _listed(manifest, MANIFEST)
        if files != {**shards, INFO: files.get(INFO)}:
            raise ValueError(f"{INFO} and {MANIFEST} list different files")
        _check_step(manifest, MANIFEST, step)
    _check_files(path, files, "*" if has_manifest else "*.safetensors")
    _check_step(info, INFO, step)
    for name, kind in (fields or {}).items():
        if name not in info:
            raise ValueError(f"{INFO} has no {name!r}")
        if not _is_valid(info[name], kind):
            raise ValueError(f"{INFO} has the {name} {info[name]!r:.40}, expected {EXPECTED[kind]}")
    return State(path, info)


EXPECTED = {int: "a number from 0 on", list: "a list of numbers", dict: "an object of numbers"}


def _is_valid(value: Any, kind: type) -> bool:
    """Whether a value of state.json is a count, a list of finite numbers, or an object of numbers that may be NaN."""
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    if kind is list:
        return type(value) is list and all(type(number) in (int, float) and abs(number) <= 1e308 for number in value)
    return type(value) is dict and all(type(number) is float or type(number) is int for number in value.values())


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. NaN is allowed: the validation of an early network may not be finite."""
    try:
        return parse_json(read_regular(path), allow_nan=True)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _listed(value: Mapping[str, Any], name: str) -> dict[str, str]:
    """The SHA-256 of each file that state.json or the manifest lists."""
    files = value.get("files")
    if not isinstance(files, dict) or not files or not all(isinstance(sha256, str) for sha256 in files.values()):
        raise ValueError(f"{name} does not list files with their SHA-256")
    return files


def _check_step(value: Mapping[str, Any], name: str, step: int) -> None:
    """The step in a file of a state is that of its folder."""
    if type(value.get("step")) is not int or value["step"] != step:
        raise ValueError(f"{name} has the step {value.get('step')!r:.40}, but the folder is of step {step}")


def _check_files(path: Path, files: Mapping[str, str], pattern: str) -> None:
    """The files of a state are those that are listed, and they have their SHA-256."""
    there = {file.name for file in path.glob(pattern)} - {MANIFEST}
    if stray := there - files.keys():
        raise ValueError(f"{min(stray)!r} is not part of it")
    for name, sha256 in files.items():
        if name not in there:  # a name with a folder in it is never there
            raise ValueError(f"{name!r:.60} is missing")
        if digest(path / name) != sha256:
            raise ValueError(f"{name} does not have its SHA-256")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        path: The file.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
