"""Provenance of results: the command, the code, the machine and the weights behind a number.

Every JSON file with numbers that a command of m2s writes has the fields of `provenance`:

| field | content | why |
|---|---|---|
| `command` | the words that were typed, without the path of the program | the result can be made again |
| `device` | the device and its name, such as "cuda:0 (NVIDIA H200)" | times and low-order digits depend on it |
| `versions.m2s` | version of the package | tells releases apart |
| `versions.git` | revision of the source, with + where files were changed; null where none tracks it | tells commits apart |
| `versions.torch`, `numpy`, `python` | versions | results may change with them |
| `versions.PACKAGE` | other packages that the result depends on, such as triton or transformers | the same |

Results that depend on a checkpoint also have `fingerprint(model)`, usually under the key `weights`: a checkpoint can be
overwritten by further training under the same path. No field holds the name of the host, the user or a working directory, so
that results can be published.
"""

import contextlib
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from m2s.io import read_regular
from m2s.version import __version__


def provenance(device: torch.device | str, *packages: str) -> dict[str, Any]:
    """Return the provenance of a result that is computed now.

    Args:
        device: The device that computes it.
        *packages: Names of other installed packages that it depends on.

    Returns:
        `command`, `device` and `versions`, as in the table above.

    Raises:
        importlib.metadata.PackageNotFoundError: One of `packages` is not installed.
    """
    return {
        "command": command(),
        "device": f"{device} ({_device_name(torch.device(device))})",
        "versions": {
            "m2s": __version__,
            "git": revision(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
    }


_RUNNING: ContextVar[tuple[str, ...] | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def recorded_command(words: Sequence[str]) -> Iterator[None]:
    """Let results record another command, for a command such as `m2s demo` that runs others.

    Args:
        words: The words of the command that makes the result by itself, the program first.
    """
    token = _RUNNING.set(tuple(words))
    try:
        yield
    finally:
        _RUNNING.reset(token)


def is_rerun(result: Path) -> bool:
    """Return whether a file is the result of this same command, inside `recorded_command`.

    A command that runs others, such as `m2s demo`, may replace its own results when it is given again.

    Args:
        result: A .json of a result.
    """
    if _RUNNING.get() is None or not result.is_file():
        return False
    try:
        return json.loads(read_regular(result))["command"] == command()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def command() -> list[str]:
    """Return the words of the command line, with the name of the program in the place of its path.

    Inside `recorded_command` they are the words given there.
    """
    if (running := _RUNNING.get()) is not None:
        return list(running)
    program = Path(sys.argv[0])
    return ["m2s" if program.name == "__main__.py" else program.name, *sys.argv[1:]]


def _device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the architecture of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def revision() -> str | None:
    """Return the git revision of the source of m2s.

    Returns:
        The hash, with + where files of the package were changed; None where no repository tracks the package. An environment
        inside a repository of the user, such as .venv, is not tracked by it.
    """
    package = Path(__file__).parent
    try:
        tracked = ["git", "ls-files", "--error-unmatch", "__init__.py"]
        subprocess.run(tracked, cwd=package, capture_output=True, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=package, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain", "."], cwd=package, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the names and values of all weights.

    Args:
        model: The network.

    Returns:
        The hash in hexadecimal digits. It does not depend on the device.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        # As bytes, because numpy has no bfloat16.
        digest.update(name.encode() + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
