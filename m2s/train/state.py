"""The states of a run, from which it can go on: `state/step-00001000/`, each whole or not there at all.

A state is `state.safetensors` (weights, their average, the optimizer's moments) and `state.json` (the step, a few numbers and
the SHA-256 of the tensors). It is written in full under a temporary name, synced, and renamed; older ones are removed after
that. No pickle, and nothing about randomness, which is a function of the step.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from m2s.report import Refused

TENSORS, INFO = "state.safetensors", "state.json"
FORMAT = 1


@dataclass(frozen=True)
class State:
    path: Path
    info: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.info["step"])

    def tensors(self) -> dict[str, Tensor]:
        with safe_open(self.path / TENSORS, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def write(folder: Path, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any], keep: int) -> Path:
    """A new state, after which all but the newest `keep` are removed. A failure leaves the older ones as they were."""
    target = place(folder, step)
    temporary = folder / f".writing-{target.name}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        save_file(dict(tensors), temporary / TENSORS, metadata={"format": "pt"})
        sync(temporary / TENSORS)
        text = json.dumps({**info, "format": FORMAT, "step": step, "sha256": digest(temporary / TENSORS)}, indent=1)
        (temporary / INFO).write_text(text + "\n", encoding="utf-8")
        sync(temporary / INFO)
        sync(temporary)
        shutil.rmtree(target, ignore_errors=True)  # a state of this step that was found damaged, or that is repeated
        os.replace(temporary, target)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        left = steps(folder)
        last = f"the state of step {left[-1]} is whole" if left else "there is no earlier state"
        raise OSError(f"the state of step {step} cannot be written to {folder} ({error}); {last}") from error
    for old in steps(folder)[:-keep]:
        shutil.rmtree(place(folder, old), ignore_errors=True)
    return target


def steps(folder: Path) -> list[int]:
    """The steps of the states there, rising."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*") if path.name[5:].isdigit())


def newest(folder: Path, say: Callable[[str], None]) -> State | None:
    """The newest state that is whole; damaged ones after it are removed, and it is said so. None where there is none."""
    for leftover in folder.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    damaged: dict[int, str] = {}
    for step in reversed(steps(folder)):
        fault = inspect(place(folder, step))
        if fault is None:
            for bad, why in damaged.items():
                say(f"the state of step {bad} is damaged ({why}): taking that of step {step}, the one before")
                shutil.rmtree(place(folder, bad))
            return read(folder, step)
        damaged[step] = fault
    if damaged:
        found = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise Refused(f"no state in {folder} is whole ({found}): train into another folder, or remove {folder} to start again")
    return None


def read(folder: Path, step: int) -> State:
    path = place(folder, step)
    return State(path, json.loads((path / INFO).read_text(encoding="utf-8")))


def inspect(path: Path) -> str | None:
    """What is wrong with a state; None if it is whole."""
    try:
        info = json.loads((path / INFO).read_text(encoding="utf-8"))
        found = digest(path / TENSORS)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if info.get("format") != FORMAT:
        return f"its format is {info.get('format')!r}, expected {FORMAT}"
    return None if info.get("sha256") == found else f"{TENSORS} does not have its SHA-256"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """What was written to `path` is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
