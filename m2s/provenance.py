"""What a result came from: the command, the code, the machine and the weights. Part of every JSON file that holds numbers."""

import hashlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import m2s


def provenance(device: torch.device | str, *packages: str) -> dict[str, Any]:
    """The command, the device, and the versions of m2s, what it stands on and `packages`."""
    return {
        "command": command(),
        "device": f"{device} ({_kind(torch.device(device))})",
        "versions": {
            "m2s": m2s.__version__,
            "git": revision(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
    }


def command() -> list[str]:
    """What was typed, with the name of the program and not where it lies."""
    program = Path(sys.argv[0])
    return ["m2s" if program.name == "__main__.py" else program.name, *sys.argv[1:]]


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def revision() -> str | None:
    """The revision of the source of m2s, with + where files were changed; None where it is not in a repository."""
    package = Path(m2s.__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=package, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain", "."], cwd=package, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def fingerprint(model: nn.Module) -> str:
    """Of the names and values of all weights (SHA-256)."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
