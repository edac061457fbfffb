"""The states of a run, from which it resumes: `state/step-00001000/`, each complete or not there at all.

A state is written through torch.distributed.checkpoint. Every process writes its shards of the weights, of their average and of
the optimizer's moments as one safetensors file, syncs it and computes its SHA-256. `state.json` holds the step, a few numbers
and those checksums. Everything is written under a temporary name, synced, and renamed; older states are removed after that. Any
number of processes can read a state. There is no pickle, and no state of random generators: random numbers are functions of the
step.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
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
from m2s.io import fsync

INFO = "state.json"
FORMAT = 2


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
        """Fill `tensors` in place, sharded over the processes in any way. Every process must call this."""
        with _same_error_everywhere():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(self.path)))


class Writer(StorageWriter):
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
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(parents=True)

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
        text = json.dumps({**self.info, "format": FORMAT, "step": self.step, "files": files}, indent=1)
        (self.temporary / INFO).write_text(text + "\n", encoding="utf-8")
        fsync(self.temporary / INFO)
        fsync(self.temporary)
        os.replace(self.temporary, self.target)
        fsync(self.folder)


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
    writer = Writer(folder, step, info)
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
        for old in steps(folder)[:-keep]:
            shutil.rmtree(place(folder, old), ignore_errors=True)
    return writer.target


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
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.name[5:].isdigit())


def newest(folder: Path, say: Callable[[str], None]) -> State | None:
    """Return the newest intact state, and remove damaged ones after it.

    Args:
        folder: The folder of the states.
        say: Called with a message about each damaged state.

    Returns:
        The state; None where there is none.

    Raises:
        UserError: There are states, but all are damaged.
    """
    for leftover in folder.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    damaged: dict[int, str] = {}
    for step in reversed(steps(folder)):
        fault = inspect(place(folder, step))
        if fault is None:
            for bad, why in damaged.items():
                say(f"the state of step {bad} is damaged ({why}): using the state of step {step} instead")
                shutil.rmtree(place(folder, bad))
            return read(folder, step)
        damaged[step] = fault
    if damaged:
        found = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise UserError(
            f"no state in {folder} is intact ({found}): train into another folder, or remove {folder} to start again"
        )
    return None


def read(folder: Path, step: int) -> State:
    """Return the state of a step.

    Args:
        folder: The folder of the states.
        step: The training step.
    """
    path = place(folder, step)
    return State(path, json.loads((path / INFO).read_text(encoding="utf-8")))


def inspect(path: Path) -> str | None:
    """Check the files of a state against their checksums.

    Args:
        path: The folder of the state.

    Returns:
        What is wrong with it; None where it is intact.
    """
    try:
        info = json.loads((path / INFO).read_text(encoding="utf-8"))
        if info.get("format") != FORMAT:
            return f"its format is {info.get('format')!r}, expected {FORMAT}"
        stray = {file.name for file in path.glob("*.safetensors")} - info["files"].keys()
        if stray:
            return f"{min(stray)} is not part of it"
        return next(
            (f"{name} does not have its SHA-256" for name, sha in info["files"].items() if digest(path / name) != sha), None
        )
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
