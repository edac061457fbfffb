"""Text to evaluate on: windows of tokens, and how many bytes and characters they stand for."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from m2s.data.documents import DocumentSource
from m2s.data.encode import encode_document
from m2s.data.files import BadData
from m2s.data.tokenizer import Tokenizer
from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.progress import bar_class


def token_sizes(tokenizer: Tokenizer) -> Int[np.ndarray, "V 2"]:
    """Count the bytes and characters of every token.

    A character counts at its first byte, and an end token has neither. So the counts add up however a window cuts a character.

    Args:
        tokenizer: The tokenizer.

    Returns:
        Bytes and characters, [vocab, 2].
    """
    pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab)]
    # In UTF-8 the bytes 10xxxxxx continue a character.
    return np.array([(len(piece), sum(byte & 0xC0 != 0x80 for byte in piece)) for piece in pieces])


def example_sizes(rows: EvaluationSet, tokenizer: Tokenizer, chunk: int = 1024) -> dict[str, Float[Tensor, "N"]]:
    """Count the bytes and characters of every example.

    Args:
        rows: The examples.
        tokenizer: Their tokenizer.
        chunk: The number of examples to read at once.

    Returns:
        "byte" and "character", each [N].
    """
    counts = torch.from_numpy(token_sizes(tokenizer))
    parts = [counts[rows[indices].long()].sum(1) for indices in torch.arange(len(rows)).split(chunk)]
    both = torch.cat(parts).double()
    return {"byte": both[:, 0], "character": both[:, 1]}


def token_windows(
    sources: Sequence[DocumentSource], tokenizer: Tokenizer, length: int, blank: bool = False
) -> tuple[Int[Tensor, "N L"], int]:
    """Tokenize documents and cut them into windows.

    The stream is every document with the end token after it. The tokens after the last full window are left out.

    Args:
        sources: The documents.
        tokenizer: The tokenizer.
        length: The number of tokens of a window.
        blank: Whether documents without text count, which adds their end tokens.

    Returns:
        The windows [N, length], int32, and the number of tokens that are left out.

    Raises:
        BadData: A document cannot be encoded, or there is less than one window.
    """

    def encoded() -> Iterable[np.ndarray]:
        for source in sources:
            for document in bar_class()(source.read(0), desc=source.name, unit="document", disable=None, leave=False):
                if blank or document.text.strip():
                    ids = encode_document(tokenizer, document.text)
                    if isinstance(ids, str):
                        raise BadData(f"{source.name}, document at {document.where} {ids}")
                    yield ids

    parts = list(encoded())
    stream = np.concatenate(parts) if parts else np.zeros(0)
    count, left_out = divmod(len(stream), length)
    if not count:
        names = ", ".join(source.name for source in sources)
        raise BadData(f"{names} holds {left_out} tokens, too few for one window of {length}: give more text")
    return torch.from_numpy(stream[: count * length].astype(np.int32).reshape(count, length)), left_out
