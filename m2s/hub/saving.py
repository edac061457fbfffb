"""Write a checkpoint: `config.json`, `model.safetensors` and the files of the tokenizer. Nothing is pickled."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from m2s import validation
from m2s.data import tokenizer as tokenizers
from m2s.data.tokenizer import Tokenizer
from m2s.heads import Head
from m2s.hub import builtin
from m2s.hub.description import describe_parts
from m2s.hub.folder import MODEL, write


def save(
    folder: str | Path,
    model: nn.Module,
    head: Head,
    data: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save a network, with everything that is needed to sample from it.

    A checkpoint that is already in the folder is replaced only when the new one is complete on the disk.

    Args:
        folder: Where to write; created if it does not exist.
        model: A network of a class in `m2s.models.NETWORKS`.
        head: Its head, of a registered class, as are its process and schedule (`m2s.hub.config.saved_classes`).
        data: A description of the data, {"kind": "image", "shape": [8, 8], "levels": 17} or {"kind": "text", "length": 128}.
        tokenizer: The tokenizer of a text model. One that is read from a file (GPT-2's merges) is copied into the folder.
        extra: Anything else that JSON can hold, such as a step count or a git commit.

    Returns:
        The folder.

    Raises:
        TypeError: A class is not registered, or `data` or `extra` holds what JSON cannot. Nothing is written.
        ValueError: Network, process and tokenizer have different vocabularies, `data` does not fit them, or the folder is a
            name of built-in weights. Nothing is written.

    Example:
        >>> m2s.hub.save("runs/mine", model, head, data={"kind": "text", "length": 128})
        >>> model, head = m2s.load("runs/mine")
    """
    if builtin.is_builtin(folder):
        raise ValueError(f"{folder} names weights in the package, which are not replaced: give the path of a folder")
    validation.instance("model", model, nn.Module, "a network such as m2s.models.DiT(config)")
    validation.instance("head", head, Head, "a head such as m2s.Posterior(process)")
    tensors: dict[str, Tensor] = {}
    config = describe_parts(model, head, data, tokenizer, extra, tensors)
    for name, tensor in model.state_dict().items():
        tensors[MODEL + name] = tensor.detach().cpu().contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    copied = None
    if tokenizer is not None:
        with contextlib.suppress(FileNotFoundError):  # without the file, encoding text raises an error that says so
            copied = tokenizers.save_tokenizer_files(tokenizer, folder)
    write(folder, config, tensors, [] if copied is None else [copied])
    return folder
