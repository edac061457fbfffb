"""The two files of a checkpoint, written so that a killed process leaves the old pair or the new one, never a mixture.

Both are first written as `*.new`, weights first, and then renamed, weights first. So if the new configuration exists and the
new weights do not, the weights have been renamed already, and the new configuration belongs to them: see `current`.

The configuration holds the SHA-256 of the other files, which `verify` compares.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from m2s.data.files import sha256
from m2s.data.tokenizer import KEPT
from m2s.io import create_file, fsync, replace

CONFIG, WEIGHTS = "config.json", "model.safetensors"
NEW = ".new"
MODEL = "model."  # prefix of the names of the network's tensors
CHECKSUMS = "sha256"  # the key of the checksums in config.json


def current(folder: Path) -> Path:
    """Return the configuration that belongs to `model.safetensors`.

    Args:
        folder: The folder of a checkpoint.

    Returns:
        `config.json`, or `config.json.new` where a save was interrupted between the two renames.
    """
    new = folder / (CONFIG + NEW)
    return new if new.exists() and not (folder / (WEIGHTS + NEW)).exists() else folder / CONFIG


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], others: Sequence[Path] = ()) -> None:
    """Write a checkpoint atomically. Other files in the folder are not changed, and no file is written through a link.

    Args:
        folder: The folder; created if it does not exist.
        config: The contents of `config.json`. The SHA-256 of the other files are added to it.
        tensors: The contents of `model.safetensors`.
        others: Further files of the checkpoint in the folder, which are written already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if current(folder) != folder / CONFIG:  # finish an interrupted save first
        replace(current(folder), folder / CONFIG)
    new_config, new_weights = folder / (CONFIG + NEW), folder / (WEIGHTS + NEW)
    # What is left of a save that was killed before any rename. The configuration first: alone, it would count as valid.
    new_config.unlink(missing_ok=True)
    new_weights.unlink(missing_ok=True)
    save_file(dict(tensors), new_weights, metadata={"format": "pt"})
    fsync(new_weights)
    checksums = {WEIGHTS: sha256(new_weights), **{path.name: sha256(path) for path in others}}
    create_file(new_config)
    new_config.write_text(json.dumps({**config, CHECKSUMS: checksums}, indent=2) + "\n", encoding="utf-8")
    shutil.copymode(new_config, new_weights)  # safetensors creates files that only the user can read
    fsync(new_config)
    replace(new_weights, folder / WEIGHTS)
    replace(new_config, folder / CONFIG)


def verify(folder: Path, config: Mapping[str, Any]) -> None:
    """Compare the files of a checkpoint with their checksums. A checkpoint of version 0.1 has none.

    Args:
        folder: The folder of a checkpoint.
        config: The contents of its `config.json`.

    Raises:
        ValueError: A file has another checksum, or the checksums cannot be read.
    """
    checksums = config.get(CHECKSUMS, {})
    if not isinstance(checksums, Mapping) or not set(checksums) <= {WEIGHTS, *KEPT}:
        raise ValueError(f"{folder / CONFIG} is damaged: its {CHECKSUMS!r} must name {WEIGHTS} and files of tokenizers only")
    for name, expected in checksums.items():
        if (found := sha256(folder / name)) != expected:
            raise ValueError(
                f"{folder / name} has SHA-256 {found}, but {CONFIG} says {expected}: it is damaged, or of another save. Copy "
                f"both files again. If you changed it on purpose, delete {CHECKSUMS!r} from {CONFIG}"
            )
