"""`config.json` of a checkpoint: what it describes, and whether its parts fit together."""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from m2s import validation
from m2s.data.encode import tokenizer_description
from m2s.data.tokenizer import Tokenizer
from m2s.heads import Head
from m2s.hub import formats
from m2s.hub.config import network_to_dict, to_dict
from m2s.hub.folder import CONFIG, WEIGHTS, current
from m2s.version import __version__

MODEL_TYPE = "m2s"  # by which AutoModel of transformers finds `m2s.hub.auto_model`
FORMAT = 1  # increased when an older m2s cannot read new checkpoints
MIXIN = "a folder that PyTorchModelHubMixin wrote: load it by its class's from_pretrained and give model and head to m2s.sample"
MAX_SITES = 2**31 - 1  # of an image, where the network has no limit


def describe_parts(
    model: nn.Module,
    head: Head,
    data: Mapping[str, Any] | None,
    tokenizer: Tokenizer | None,
    extra: Mapping[str, Any] | None,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """Return the contents of `config.json`.

    Args:
        model: The network.
        head: Its head.
        data: A description of the data, or None.
        tokenizer: The tokenizer, or None.
        extra: Anything else that JSON can hold, or None.
        tensors: The matrices of the head are added to it, by name.

    Returns:
        A dictionary that JSON can hold.

    Raises:
        TypeError: A class is not registered, or `data` or `extra` holds what JSON cannot.
        ValueError: Network, process and tokenizer have different vocabularies, or `data` does not fit them.
    """
    config: dict[str, Any] = {
        "model_type": MODEL_TYPE,
        "format": FORMAT,
        "m2s": __version__,
        "model": network_to_dict(model),
        "head": to_dict(head, tensors),
        "data": None if data is None else dict(data),
        "tokenizer": tokenizer_description(tokenizer) or None,
        "extra": {} if extra is None else dict(extra),
    }
    try:
        json.dumps(config)
    except TypeError as error:
        raise TypeError(f"data and extra must hold what JSON can: numbers, strings, lists, dictionaries; {error}") from None
    check_vocabulary(config["model"], head, tokenizer)
    check_data(json.loads(json.dumps(config["data"])), config["model"], head)  # as it reads from a file
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check `config.json`.

    Args:
        folder: The folder of a checkpoint.

    Returns:
        Its contents.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged, was not written by m2s, or was written by a newer version.
    """
    path = current(folder)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        also = f"; {MIXIN}" if (folder / WEIGHTS).exists() else _inside(folder)
        raise FileNotFoundError(
            f"{folder} holds no {CONFIG}: it is not a checkpoint, or its first save was interrupted{also}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}. Take it from a copy, or save the checkpoint again") from None
    if not isinstance(config, dict) or not isinstance(config.get("format"), int):
        raise ValueError(
            f'{path} does not say its "format": it was not written by m2s.hub.save. It is in no layout of '
            f"other projects that m2s loads ({', '.join(formats.FORMATS)}; docs/checkpoints.md describes them); {MIXIN}"
        )
    if config["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {config['format']} (m2s {config.get('m2s')}), but this m2s ({__version__}) reads formats up to "
            f"{FORMAT}: install a newer m2s"
        )
    missing = [name for name in ("model", "head") if not isinstance(config.get(name), dict)]
    if missing:
        raise ValueError(f"{path} does not describe the {' and the '.join(missing)}: save the checkpoint again")
    return config


def _inside(folder: Path) -> str:
    """What to add where a checkpoint lies in a folder below, as in the hub's cache or in the folder of a training."""
    places = itertools.chain(*(folder.glob(f"{below}/{name}") for below in ("*", "*/*") for name in (CONFIG, "*.ckpt")))
    found = next((path.parent if path.name == CONFIG else path for path in places), None)
    return "" if found is None else f"; there may be one in it: try {found}"


def check_vocabulary(model: Mapping[str, Any], head: Head, tokenizer: Tokenizer | None) -> None:
    """Raise an error unless network, process and tokenizer have the same vocabulary.

    Args:
        model: The description of the network.
        head: The head, with its process.
        tokenizer: The tokenizer, or None.

    Raises:
        ValueError: The vocabularies differ.
    """
    states, process = model.get("states"), head.process
    if states is not None and states != process.states:
        raise ValueError(f"the network has {states} states, but the process {process} has {process.states}: they must agree")
    if tokenizer is not None and tokenizer.vocab != process.vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab} tokens, but the process {process} has {process.vocab}: they must agree"
        )


def check_data(data: Any, model: Mapping[str, Any], head: Head) -> None:
    """Raise an error unless a description of data has the keys that sampling and evaluation read, and fits the network.

    Args:
        data: The description, or None.
        model: The description of the network.
        head: The head, with its process.

    Raises:
        ValueError: The description is not one, or its shape, levels or length do not fit network and process.
    """
    if data is None:
        return
    if not isinstance(data, dict):
        raise ValueError(f'data is {data!r}, but it must be a description such as {{"kind": "text", "length": 128}}')
    if data.get("kind") == "image":
        shape: Any = data.get("shape")
        levels: Any = data.get("levels")
        if not isinstance(shape, list) or len(shape) not in (2, 3):
            raise ValueError(f"data.shape is {shape!r}, but it must be [height, width] or [height, width, channels]")
        for size in shape:
            validation.positive_int("data.shape", size)
        validation.positive_int("data.levels", levels, low=2)
        if levels != head.process.vocab:
            raise ValueError(
                f"data.levels is {levels}, but the process {head.process} has {head.process.vocab}: they must agree"
            )
        image, length = model.get("shape"), model.get("length")  # a transformer has the greatest length, if any
        if isinstance(image, list | tuple) and shape != list(image):
            raise ValueError(f"data.shape is {shape}, but the network is for images {image}: they must agree")
        if math.prod(shape) > (length if isinstance(length, int) else MAX_SITES):
            raise ValueError(f"data.shape is {shape}, but the network is for at most {length or MAX_SITES} sites")
    elif data.get("length") is not None:
        validation.positive_int("data.length", data["length"])
