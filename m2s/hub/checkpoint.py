"""A trained network in a folder: `config.json` says what it is, `model.safetensors` holds its weights. Nothing is pickled.

SEDD's folders are read too; see `m2s.hub.sedd`.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from m2s import validation
from m2s.data import tokenizer as tokenizers
from m2s.data.encode import named
from m2s.data.tokenizer import Tokenizer
from m2s.heads import Head
from m2s.hub import remote, sedd
from m2s.hub.config import PREFIX as PROCESS
from m2s.hub.config import from_dict, network_from_dict, network_to_dict, to_dict
from m2s.hub.folder import CONFIG, WEIGHTS, current, write
from m2s.hub.tensors import read_safetensors

FORMAT = 1  # raised when an older m2s could no longer read what this one writes
MIXIN = "a folder that PyTorchModelHubMixin wrote: load it by its class's from_pretrained and give model and head to m2s.sample"
MODEL = "model."  # prefix of the names of the network's tensors


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds. It unpacks as (model, head)."""

    model: nn.Module
    head: Head
    tokenizer: Tokenizer | None = None
    data: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.head))


def save(
    folder: str | Path,
    model: nn.Module,
    head: Head,
    data: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """The network, its head and process, what its data are, and its tokenizer, into `folder`.

    `data` is a description such as {"kind": "image", "shape": [8, 8], "levels": 17} or {"kind": "text", "length": 128};
    `extra` is anything else JSON can hold (a step count, a git commit). A tokenizer that is read from a file (GPT-2's merges)
    has a copy of it there. A checkpoint already in the folder is replaced only when the new one is complete on the disk.
    """
    validation.instance("model", model, nn.Module, "a network such as m2s.models.DiT(config)")
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    tensors: dict[str, Tensor] = {}
    config = _describe(model, head, data, tokenizer, extra, tensors)
    for name, tensor in model.state_dict().items():
        tensors[MODEL + name] = tensor.detach().cpu().contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        with contextlib.suppress(FileNotFoundError):  # then whoever reads text has it elsewhere, or is told
            tokenizers.save_tokenizer_files(tokenizer, folder)
    write(folder, config, tensors)
    return folder


def load(path_or_repo: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint in a folder, or in a repository "owner/name" of the Hugging Face hub; the network is in eval mode.

    The folder is ours (`save`), or one of SEDD: `m2s.load("louaaron/sedd-small")`.
    """
    folder = remote.locate(path_or_repo, (CONFIG, WEIGHTS, *tokenizers.KEPT, *sedd.FILES))
    settings = sedd.recognise(folder)
    if settings is None:
        return _load(folder, device)
    with _within(folder):
        model, head, data, tokenizer = sedd.load(folder, settings)
        config = _describe(model, head, data, tokenizer, {"sedd": settings}, {})
    return Checkpoint(model.to(device).eval(), head, tokenizer, data, config)


def _load(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """A folder that `save` wrote."""
    config = read_config(folder)
    if not (folder / WEIGHTS).exists():
        raise FileNotFoundError(f"{folder} holds {CONFIG} but no {WEIGHTS}: copy that file too, or save the checkpoint again")
    tensors = read_safetensors(folder / WEIGHTS)
    with _within(folder):
        head = from_dict(config["head"], {name: tensors[name] for name in tensors if name.startswith(PROCESS)})
        validation.instance("head", head, Head, 'the description of a head such as {"kind": "Posterior", ...}')
        tokenizer = None if config.get("tokenizer") is None else tokenizers.from_dict(config["tokenizer"], folder)
        with torch.random.fork_rng(devices=[]):  # first weights, thrown away at once, are drawn from nobody's stream
            model = network_from_dict(config["model"])
        _check_vocabulary(config["model"], head, tokenizer)
        weights = {name.removeprefix(MODEL): tensors[name] for name in tensors if name.startswith(MODEL)}
        _check_tensors(model, weights, [name for name in tensors if not name.startswith((MODEL, PROCESS))])
    model.load_state_dict(weights, assign=True)
    return Checkpoint(model.to(device).eval(), head, tokenizer, config.get("data"), config)


def push(folder: str | Path, repo: str, private: bool = False) -> str:
    """Upload the checkpoint in `folder` to the repository "owner/name" of the Hugging Face hub. Returns its address."""
    _load(Path(folder))
    return remote.upload(Path(folder), repo, (CONFIG, WEIGHTS, *tokenizers.KEPT), private)


def _describe(
    model: nn.Module,
    head: Head,
    data: Mapping[str, Any] | None,
    tokenizer: Tokenizer | None,
    extra: Mapping[str, Any] | None,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """What `config.json` says; the head's matrices are put into `tensors`."""
    config: dict[str, Any] = {
        "format": FORMAT,
        "m2s": _version(),
        "model": network_to_dict(model),
        "head": to_dict(head, tensors),
        "data": None if data is None else dict(data),
        "tokenizer": named(tokenizer) or None,
        "extra": {} if extra is None else dict(extra),
    }
    try:
        json.dumps(config)
    except TypeError as error:
        raise TypeError(f"data and extra must hold what JSON can: numbers, strings, lists, dictionaries; {error}") from None
    _check_vocabulary(config["model"], head, tokenizer)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`, if it is whole and of a format that this m2s knows."""
    path = current(folder)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        also = f"; {MIXIN}" if (folder / WEIGHTS).exists() else ""
        raise FileNotFoundError(
            f"{folder} holds no {CONFIG}: it is not a checkpoint, or its first save never ended{also}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Take it from a copy, or save the checkpoint again") from None
    if not isinstance(config, dict) or not isinstance(config.get("format"), int):
        raise ValueError(
            f'{path} does not say its "format": it was not written by m2s.hub.save. What can be read is m2s\'s own checkpoints '
            "and those of SEDD (louaaron/sedd-small, or a folder of its training), not those of other projects, such as MDLM, "
            f"DUO or GIDD; {MIXIN}"
        )
    if config["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {config['format']} (m2s {config.get('m2s')}), but this m2s ({_version()}) reads formats up to "
            f"{FORMAT}: install a newer m2s"
        )
    missing = [name for name in ("model", "head") if not isinstance(config.get(name), dict)]
    if missing:
        raise ValueError(f"{path} does not describe the {' and the '.join(missing)}: save the checkpoint again")
    return config


def _check_vocabulary(model: Mapping[str, Any], head: Head, tokenizer: Tokenizer | None) -> None:
    states, process = model.get("states"), head.process
    if states is not None and states != process.states:
        raise ValueError(f"the network has {states} states, but the process {process} has {process.states}: they must agree")
    if tokenizer is not None and tokenizer.vocab != process.vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab} tokens, but the process {process} has {process.vocab}: they must agree"
        )


def _check_tensors(model: nn.Module, weights: Mapping[str, Tensor], strangers: list[str]) -> None:
    """Every tensor of the network is there, in its shape, and nothing else is."""
    expected = model.state_dict()
    faults = [f"{name} is missing" for name in expected if name not in weights]
    faults += [f"{name} is unexpected" for name in (*(name for name in weights if name not in expected), *strangers)]
    faults += [
        f"{name} has shape {list(weights[name].shape)}, expected {list(expected[name].shape)}"
        for name in expected
        if name in weights and weights[name].shape != expected[name].shape
    ]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise ValueError(f"{WEIGHTS} does not fit the network that {CONFIG} describes: {shown}")


@contextlib.contextmanager
def _within(folder: Path) -> Iterator[None]:
    """Errors raised inside say which folder they are about."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder}: {error}") from error


def _version() -> str:
    from m2s import __version__  # not before m2s itself has been imported

    return __version__
