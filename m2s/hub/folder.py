"""The two files of a checkpoint, written so that a killed process leaves the old pair or the new one, never a mixture.

Both are first written as `*.new`, weights first, and then renamed, weights first. So if the new configuration exists and the
new weights do not, the weights have been renamed already, and the new configuration belongs to them: see `current`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from m2s.io import fsync

CONFIG, WEIGHTS = "config.json", "model.safetensors"
NEW = ".new"


def current(folder: Path) -> Path:
    """Return the configuration that belongs to `model.safetensors`.

    Args:
        folder: The folder of a checkpoint.

    Returns:
        `config.json`, or `config.json.new` where a save was interrupted between the two renames.
    """
    new = folder / (CONFIG + NEW)
    return new if new.exists() and not (folder / (WEIGHTS + NEW)).exists() else folder / CONFIG


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint atomically. Other files in the folder are not changed.

    Args:
        folder: The folder; created if it does not exist.
        config: The contents of `config.json`.
        tensors: The contents of `model.safetensors`.
    """
    text = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    if current(folder) != folder / CONFIG:  # finish an interrupted save first
        os.replace(current(folder), folder / CONFIG)
    new_config, new_weights = folder / (CONFIG + NEW), folder / (WEIGHTS + NEW)
    save_file(dict(tensors), new_weights, metadata={"format": "pt"})
    fsync(new_weights)
    new_config.write_text(text, encoding="utf-8")
    shutil.copymode(new_config, new_weights)  # safetensors creates files that only the user can read
    fsync(new_config)
    os.replace(new_weights, folder / WEIGHTS)
    os.replace(new_config, folder / CONFIG)
    fsync(folder)
