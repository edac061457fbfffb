"""Tokenizers by name, and how they are stored with packed data and with checkpoints."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from m2s.data.tokenizer.base import Tokenizer
from m2s.data.tokenizer.characters import Bytes, Characters
from m2s.data.tokenizer.gpt2 import GPT2
from m2s.data.tokenizer.hugging_face import REPOSITORY, HuggingFace
from m2s.errors import UserError
from m2s.io import atomic_write

TOKENIZERS: dict[str, type[Tokenizer]] = {cls.__name__: cls for cls in (Bytes, Characters, GPT2, HuggingFace)}
"""Every tokenizer class by the "kind" of its description."""
KEPT = tuple(kind.kept for kind in TOKENIZERS.values() if kind.kept is not None)
"""The names of the copies of tokenizer files in a checkpoint or in packed data."""
BUILT_IN = {"gpt2": GPT2, "bytes": Bytes, "chars": Characters}
"""The tokenizers that a command line names, all with default arguments."""


def make_tokenizer(name: str, merges: str | None = None, alphabet: str | None = None) -> Tokenizer:
    """Make the tokenizer that a command line names.

    Args:
        name: gpt2, bytes, chars, a tokenizer.json, a folder with one, or OWNER/NAME on the Hugging Face hub.
        merges: For gpt2: the list of merges or its folder.
        alphabet: For chars: all characters, in the order of their ids.

    Returns:
        A tokenizer that can encode and decode.

    Raises:
        UserError: There is no such tokenizer, a file or package is missing, or an option belongs to another tokenizer.
    """
    for option, value, owner in (("--merges", merges, "gpt2"), ("--alphabet", alphabet, "chars")):
        if value is not None and name != owner:
            raise UserError(f"{option} is for --tokenizer {owner}, but the tokenizer is {name}")
    if name == "gpt2":
        return check_tokenizer(GPT2(merges))
    if name == "bytes":
        return Bytes()
    if name == "chars":
        try:
            return Characters() if alphabet is None else Characters(alphabet)
        except ValueError as error:
            raise UserError(str(error)) from error
    if not Path(name).expanduser().exists() and not REPOSITORY.fullmatch(name):
        raise UserError(
            f"there is no tokenizer {name!r}: choose from {', '.join(BUILT_IN)}, or give a tokenizer.json, a folder with one, "
            "or OWNER/NAME on the Hugging Face hub"
        )
    return check_tokenizer(HuggingFace(name))


def check_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Check that the files and packages of a tokenizer are available.

    Args:
        tokenizer: The tokenizer.

    Returns:
        The tokenizer.

    Raises:
        UserError: A file or package is missing. The message says how to get it.
    """
    try:
        tokenizer.decode([0])
    except (OSError, ImportError, ValueError) as error:
        raise UserError(str(error)) from error
    return tokenizer


def save_tokenizer_files(tokenizer: Tokenizer, folder: Path) -> Path | None:
    """Copy the file that a tokenizer is read from, for `from_dict`.

    Args:
        tokenizer: The tokenizer.
        folder: The folder of a checkpoint or of packed data.

    Returns:
        The path of the copy; None for a tokenizer without a file.

    Raises:
        FileNotFoundError: The file is not on this machine.
    """
    contents = tokenizer.file_contents()
    if contents is None or tokenizer.kept is None:
        return None
    copy = folder / tokenizer.kept
    with atomic_write(copy) as temporary:
        temporary.write_bytes(contents)
    return copy


def from_dict(description: Mapping[str, Any], folder: Path | None = None) -> Tokenizer:
    """Make the tokenizer that `Tokenizer.to_dict` described.

    Args:
        description: The class ("kind") and its arguments.
        folder: A folder with the copy that `save_tokenizer_files` made. The path of the description is ignored, because a
            folder from others must not name files of this machine. Without a copy the tokenizer looks for its file at the
            default place.

    Returns:
        The tokenizer. Its file is read when it is first needed.

    Raises:
        ValueError: The class or an argument is unknown.
    """
    arguments = dict(description)
    kind = arguments.pop("kind", None)
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise ValueError(f"the tokenizer's kind is {kind!r}, but it must be one of {', '.join(TOKENIZERS)}")
    known = [field.name for field in fields(TOKENIZERS[kind])]  # type: ignore[arg-type]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"the tokenizer {kind} has no argument {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    kept = TOKENIZERS[kind].kept
    if folder is not None:
        arguments.pop("path", None)
        if kept is not None and (folder / kept).is_file():
            arguments["path"] = str((folder / kept).absolute())
    elif arguments.get("path") is not None and not Path(arguments["path"]).expanduser().exists():
        del arguments["path"]
    return TOKENIZERS[kind](**arguments)
