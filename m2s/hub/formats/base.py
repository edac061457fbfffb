"""What a checkpoint format is, and the registry of formats.

A format is one file in this package and one registration. It recognizes a folder, or a file, by its contents:

    FORMATS.add("mine", CheckpointFormat("mine", title="...", recognize=recognize, load=load, ...))

`recognize(place)` returns the settings that the place holds, or None where it is of another format. `load(place, settings)`
returns the network, its head, a description of its data and its tokenizer.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from m2s.data.tokenizer import Tokenizer
from m2s.heads import Head
from m2s.hub.folder import CONFIG
from m2s.hub.pickles import plain
from m2s.io import read_regular
from m2s.registry import Registry

MAX_CONFIG = 10_000_000  # bytes of a configuration


class Loaded(NamedTuple):
    """What a format loads.

    Args:
        model: The network.
        head: What its output means, with its process.
        data: A description of its data, such as {"kind": "text", "length": 1024}.
        tokenizer: Its tokenizer; None where its file is not on this machine.
    """

    model: nn.Module
    head: Head
    data: dict[str, Any]
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class CheckpointFormat:
    """A layout of checkpoints of another project.

    Args:
        name: Its name, which the checkpoint's `config["extra"]` records.
        title: The project and the kind of its files, in a few words.
        layout: The files, and what they are recognized by.
        process: The process and the head that the checkpoint becomes, in words.
        time: What the network is given in place of the time.
        tokenizer: The tokenizer, and where it comes from.
        recognize: Returns the settings of a folder or file; None where it is of another format.
        load: Loads it.
        files: Files of a repository of the hub, besides config.json, model.safetensors and those of tokenizers.
        suffixes: The suffixes of single files that it loads, such as ".ckpt".
    """

    name: str
    title: str
    layout: str
    process: str
    time: str
    tokenizer: str
    recognize: Callable[[Path], dict[str, Any] | None]
    load: Callable[[Path, Mapping[str, Any]], Loaded]
    files: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()


FORMATS: Registry[CheckpointFormat] = Registry("checkpoint format")


def recognize(place: Path) -> tuple[CheckpointFormat, dict[str, Any]] | None:
    """Find the format of a checkpoint of another project.

    Args:
        place: A folder or a file.

    Returns:
        The format and its settings; None where no format recognizes it.
    """
    for layout in FORMATS.values():
        settings = layout.recognize(place)
        if settings is not None:
            return layout, settings
    return None


def read_config(place: Path, name: str = CONFIG) -> dict[str, Any] | None:
    """Read a JSON configuration of another project.

    Args:
        place: The folder.
        name: The name of the file.

    Returns:
        Its contents; None where there is none, where it is damaged, or where m2s wrote it.
    """
    path = place / name
    if not path.is_file() or path.stat().st_size > MAX_CONFIG:
        return None
    try:
        settings = json.loads(read_regular(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return settings if isinstance(settings, dict) and "format" not in settings else None


def read_yaml(path: Path) -> Any:
    """Read a YAML file. PyYAML is optional.

    Args:
        path: The file.

    Returns:
        Its contents: dictionaries, lists, numbers and strings.

    Raises:
        ImportError: PyYAML is not installed.
        ValueError: The file is damaged.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(f"reading {path} needs PyYAML: pip install pyyaml") from None
    if path.stat().st_size > MAX_CONFIG:
        raise ValueError(f"{path} has more than {MAX_CONFIG:,} bytes: it is not a configuration")
    try:
        return plain(yaml.safe_load(read_regular(path).decode("utf-8")))  # without the size that aliases could give it
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is damaged: {reason}. Copy the file again") from None


@dataclass(frozen=True)
class Settings:
    """The configuration of another project, read with errors that name the project and the key.

    Args:
        values: The configuration.
        project: Whose it is, such as "SEDD".
    """

    values: Mapping[str, Any]
    project: str

    def get(self, key: str, *default: Any) -> Any:
        """Return the value of a dotted key.

        Args:
            key: The key, such as "model.n_heads".
            *default: What is returned where there is no such key.

        Raises:
            ValueError: There is no such key, and no default.
        """
        value: Any = self.values
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                if default:
                    return default[0]
                raise ValueError(f"{self.project}'s configuration has no {key}: copy or download the file again")
            value = value[name]
        return value

    def integer(self, key: str) -> int:
        """Return a whole number.

        Args:
            key: The dotted key.

        Raises:
            ValueError: It is another value.
        """
        value = self.get(key)
        if type(value) is not int:
            raise ValueError(f"{key} of {self.project}'s configuration is {value!r}, but it must be a whole number")
        return value

    def choice(self, key: str, choices: Mapping[Any, Any], *default: Any) -> Any:
        """Return what stands for a value.

        Args:
            key: The dotted key.
            choices: What stands for each value that is supported.
            *default: The value where there is no such key.

        Raises:
            ValueError: The value is not among the choices.
        """
        value = self.get(key, *default)
        try:
            return choices[value]
        except (KeyError, TypeError):
            raise ValueError(f"{key} is {value!r}, but it must be {' or '.join(map(str, choices))}") from None
