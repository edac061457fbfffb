"""The two files of a checkpoint, written so that a killed process leaves the old pair or the new one, never a mixture.

Both are written in full beside the old ones, weights first, and then renamed, weights first. A new configuration whose weights
are no longer beside it is therefore the mate of the weights in place: `current` reads it as such.
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
    """The configuration that belongs to the weights in place."""
    new = folder / (CONFIG + NEW)
    return new if new.exists() and not (folder / (WEIGHTS + NEW)).exists() else folder / CONFIG


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """`config` and `tensors` as the new contents of the folder; other files in it are left alone."""
    text = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    if current(folder) != folder / CONFIG:
        os.replace(current(folder), folder / CONFIG)
    new_config, new_weights = folder / (CONFIG + NEW), folder / (WEIGHTS + NEW)
    save_file(dict(tensors), new_weights, metadata={"format": "pt"})
    fsync(new_weights)
    new_config.write_text(text, encoding="utf-8")
    shutil.copymode(new_config, new_weights)  # safetensors makes files that only their owner reads
    fsync(new_config)
    os.replace(new_weights, folder / WEIGHTS)
    os.replace(new_config, folder / CONFIG)
    fsync(folder)
