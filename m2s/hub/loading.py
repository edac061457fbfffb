"""Read a checkpoint, and check it against the network that it describes before the weights are read. No code of it is run."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from m2s import remote, validation
from m2s.data import tokenizer as tokenizers
from m2s.data.tokenizer import Tokenizer
from m2s.heads import Head
from m2s.hub import builtin, formats
from m2s.hub.config import PREFIX as PROCESS
from m2s.hub.config import from_dict, limit_parameters, network_from_dict
from m2s.hub.description import check_data, check_vocabulary, describe_parts, read_config
from m2s.hub.folder import CONFIG, MODEL, NEW, WEIGHTS, verify
from m2s.hub.tensors import TensorFaults, TensorInfo, check_finite, read_header, read_safetensors, uniform_precision


class Contents(NamedTuple):
    """What a checkpoint holds, in the order of the fields of `m2s.hub.Checkpoint`.

    Args:
        model: The network, in evaluation mode.
        head: Its head.
        tokenizer: The tokenizer of a text model, or None.
        data: A description of the data, or None.
        config: The contents of `config.json`.
    """

    model: nn.Module
    head: Head
    tokenizer: Tokenizer | None
    data: dict[str, Any] | None
    config: dict[str, Any]


def read_checkpoint(path_or_repo: str | Path, device: torch.device | str = "cpu", verified: bool = False) -> Contents:
    """Read a checkpoint of m2s, or of another project, as `m2s.load` does.

    Args:
        path_or_repo: A folder or a file, a repository of the Hugging Face hub, or "builtin:NAME".
        device: Where the network is put.
        verified: Compare the SHA-256 of the files with those in `config.json`.

    Returns:
        What it holds.

    Raises:
        FileNotFoundError: There is no such checkpoint, or a file is missing.
        ValueError: A file is damaged, holds NaN or infinity, or was written by a newer version of m2s.
        ImportError: `huggingface_hub` is needed and not installed.
    """
    if builtin.is_builtin(path_or_repo):
        contents = read_folder(builtin.locate(path_or_repo), device, verified)
        contents.model.float()  # the files are in bf16 to be small
        return contents
    place = remote.locate(path_or_repo, hub_files(), _suffixes())
    _check_ordinary(place)
    with _within(place):
        found = formats.recognize(place)
    if found is None:
        return read_folder(place, device, verified)
    layout, settings = found
    with _within(place):
        model, head, data, tokenizer = layout.load(place, settings)
        check_finite(dict(model.named_parameters()))
        config = describe_parts(model, head, data, tokenizer, {layout.name: settings}, {})
    return Contents(model.to(device).eval(), head, tokenizer, data, config)


def read_folder(folder: Path, device: torch.device | str = "cpu", verified: bool = False) -> Contents:
    """Read a folder that `m2s.hub.save` wrote.

    Args:
        folder: The folder.
        device: Where the network is put.
        verified: Compare the SHA-256 of the files with those in `config.json`.

    Returns:
        What it holds.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, holds NaN or infinity, or was written by a newer version of m2s.
    """
    config = read_config(folder)
    path = folder / WEIGHTS
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds {CONFIG} but no {WEIGHTS}: copy that file too, or save the checkpoint again")
    if verified:
        verify(folder, config)
    header = read_header(path)
    with _within(folder):
        matrices = read_safetensors(path, [name for name in header if name.startswith(PROCESS)])
        check_finite(matrices)
        head = from_dict(config["head"], matrices)
        validation.instance("head", head, Head, 'the description of a head such as {"kind": "Posterior", ...}')
        tokenizer = None if config.get("tokenizer") is None else tokenizers.from_dict(config["tokenizer"], folder)
        check_vocabulary(config["model"], head, tokenizer)
        check_data(config.get("data"), config["model"], head)
        present = {name.removeprefix(MODEL): info for name, info in header.items() if name.startswith(MODEL)}
        # Initial weights are replaced below and must not use up random numbers.
        with torch.random.fork_rng(devices=[]), limit_parameters([info.shape for info in present.values()]):
            model = network_from_dict(config["model"])
        _check_tensors(model, present, [name for name in header if not name.startswith((MODEL, PROCESS))])
        found = read_safetensors(path, [MODEL + name for name in present])
        weights = uniform_precision({name.removeprefix(MODEL): value for name, value in found.items()})
        model.load_state_dict(weights, assign=True)
        check_finite(dict(model.named_parameters()))
        return Contents(model.to(device).eval(), head, tokenizer, config.get("data"), config)


def hub_files() -> tuple[str, ...]:
    """Return the names of the files of a checkpoint, which are downloaded from a repository."""
    others = [name for layout in formats.FORMATS.values() for name in layout.files]
    return tuple(dict.fromkeys((CONFIG, WEIGHTS, *tokenizers.KEPT, *others)))


def _suffixes() -> tuple[str, ...]:
    """The suffixes of files that are a checkpoint by themselves."""
    return tuple(suffix for layout in formats.FORMATS.values() for suffix in layout.suffixes)


def _check_ordinary(place: Path) -> None:
    """Raise ValueError where a file of the checkpoint is a pipe or a device: reading it could wait forever."""
    files = [place / name for name in (*hub_files(), CONFIG + NEW)] if place.is_dir() else [place]
    for path in files + [path for suffix in _suffixes() for path in place.glob(f"*{suffix}")]:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not an ordinary file: take it from a copy, or save the checkpoint again")


def _check_tensors(model: nn.Module, weights: Mapping[str, TensorInfo], unexpected: list[str]) -> None:
    """The weights are those of the network, with the same names and shapes, and floats where it has floats."""
    expected = model.state_dict()
    both = [name for name in expected if name in weights]
    shapes = [
        f"{name} has shape {list(weights[name].shape)}, expected {list(expected[name].shape)}"
        for name in both
        if weights[name].shape != tuple(expected[name].shape)
    ]
    dtypes = [
        f"{name} has dtype {weights[name].dtype}, expected {expected[name].dtype}"
        for name in both
        if weights[name].dtype.is_floating_point != expected[name].is_floating_point()
    ]
    missing = [name for name in expected if name not in weights]
    faults = TensorFaults(missing, [*(name for name in weights if name not in expected), *unexpected], shapes + dtypes)
    if faults:
        raise ValueError(f"{WEIGHTS} does not fit the network that {CONFIG} describes: {faults}")


# What constructors may raise for values of the wrong type or size, which a configuration from others can hold.
_UNUSABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, AssertionError)


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[None]:
    """Add the folder to the message of errors raised inside."""
    try:
        yield
    except _UNUSABLE as error:
        reason = str(error) or type(error).__name__
        raise ValueError(reason if str(folder) in reason else f"{folder}: {reason}") from error
