"""Read samples of text from .npz, .txt and .jsonl files."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError, counted
from m2s.evaluation.genppl.protocol import Protocol
from m2s.evaluation.judge import END
from m2s.npz import read_npz

HEADING = re.compile(r"(?:\A|\n\n)--- sample (\d+) ---\n")


@dataclass(frozen=True)
class Samples:
    """The samples of a file that a protocol uses.

    Args:
        path: The file.
        protocol: The protocol.
        texts: The texts, with every end of a document written as <|endoftext|>.
        tokens: The tokens that they were decoded from, [n, L]; None where the file has text only.
        tokenizer: The tokenizer of `tokens`; None where the file has text only.
        settings: The settings that `m2s sample` stored; {} where there are none.
    """

    path: Path
    protocol: Protocol
    texts: list[str]
    tokens: Int[np.ndarray, "n L"] | None
    tokenizer: Tokenizer | None
    settings: dict[str, Any]

    def __len__(self) -> int:
        return len(self.texts)


def require_file(path: Path) -> None:
    """Check that a file of samples exists.

    Args:
        path: The file.

    Raises:
        UserError: There is no such file.
    """
    if path.is_dir():
        raise UserError(
            f"{path} is a folder, but samples are a file: draw some first, such as m2s sample {path} --n 1024 --out "
            "samples.npz, and give that file"
        )
    if not path.is_file():
        raise UserError(f"there is no file {path}: give samples as .npz or .txt of `m2s sample`, or .jsonl with a field text")


def read_samples(path: Path, protocol: Protocol, tokenizer: Tokenizer | None = None, limit: int | None = None) -> Samples:
    """Read the samples of a file.

    Args:
        path: A .npz or .txt of `m2s sample`, or a .jsonl with a field "text".
        protocol: The protocol, which sets the greatest number of samples and of tokens.
        tokenizer: Decodes the tokens of a .npz.
        limit: The number of samples to read; None: that of the protocol.

    Returns:
        The first `limit` samples.

    Raises:
        UserError: The file is missing or damaged, has no tokenizer, or has fewer than two samples.
    """
    limit = protocol.samples if limit is None else limit
    require_file(path)
    try:
        if path.suffix == ".npz":
            samples = _read_npz(path, protocol, tokenizer, limit)
        elif path.suffix == ".txt":
            samples = Samples(path, protocol, _read_txt(path)[:limit], None, None, {})
        elif path.suffix == ".jsonl":
            samples = Samples(path, protocol, _read_jsonl(path)[:limit], None, None, {})
        else:
            raise UserError(f"{path} must end in .npz, .txt or .jsonl")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(samples) < 2:
        raise UserError(f"{path} gives {counted(len(samples), 'sample')}, but an interval needs at least 2")
    return samples


def _read_npz(path: Path, protocol: Protocol, tokenizer: Tokenizer | None, limit: int | None) -> Samples:
    """Read and decode the tokens of a .npz."""
    try:
        found = read_npz(path, ["tokens"], optional=["settings"])
        tokens = found["tokens"]
        settings = json.loads(str(found["settings"])) if "settings" in found else {}
        if not isinstance(settings, dict):
            raise ValueError("its settings are not an object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged or not a .npz of `m2s sample` ({error}): draw the samples again") from error
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"tokens in {path} are {tokens.dtype} of shape {list(tokens.shape)}, expected integers [samples, length]"
        )
    data = settings.get("data")
    if isinstance(data, dict) and data.get("kind") == "image":
        raise UserError(f"{path} holds images, which a judge cannot read: measure them with m2s evaluate fid {path}")
    if tokenizer is None:
        raise UserError(f"{path} holds tokens, and nothing says how to decode them: give --checkpoint RUN or --tokenizer NAME")
    tokens = tokens[:limit, : protocol.tokens].astype(np.int64)
    try:
        wrong = np.argwhere((tokens < 0) | (tokens >= tokenizer.vocab))
        if len(wrong):
            row, column = wrong[0]
            raise UserError(
                f"sample {row} of {path} holds the token {tokens[row, column]} at {column}, but {type(tokenizer).__name__} has "
                f"0..{tokenizer.vocab - 1}: the samples are of another tokenizer (or of images)"
            )
        return Samples(path, protocol, [decode(tokenizer, row) for row in tokens], tokens, tokenizer, settings)
    except UserError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise UserError(str(error)) from error


def decode(tokenizer: Tokenizer, tokens: Int[np.ndarray, "L"]) -> str:
    """Decode a sample, with every end token written as <|endoftext|>.

    Args:
        tokenizer: The tokenizer.
        tokens: The tokens of one sample, [L].

    Returns:
        The text.
    """
    ends = np.flatnonzero(tokens == tokenizer.end) if tokenizer.end is not None else np.zeros(0, np.int64)
    pieces = np.split(tokens, np.stack([ends, ends + 1], 1).ravel())[::2]
    return END.join(tokenizer.decode(piece.tolist()) for piece in pieces)


def _read_txt(path: Path) -> list[str]:
    """Read the texts below lines "--- sample 0 ---", as `m2s sample --out a.txt` writes them."""
    before, *parts = HEADING.split(path.read_bytes().decode("utf-8").removesuffix("\n"))
    numbers, texts = [int(number) for number in parts[::2]], parts[1::2]
    if before or not parts:
        raise UserError(
            f"{path} does not begin with a line like --- sample 0 ---: it is not of `m2s sample`; use .jsonl instead"
        )
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise UserError(f"the samples in {path} are not numbered consecutively: a part is missing, or a text has such a line")
    return texts


def _read_jsonl(path: Path) -> list[str]:
    """Read the field "text" of every line."""
    texts = []
    for number, line in enumerate(path.read_bytes().decode("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"])
            texts[-1].encode("utf-8")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f'line {number} of {path} is not an object with a text, like {{"text": "once"}}') from error
    return texts
