"""Documents to token ids, with checks that the ids are valid."""

from hashlib import sha256
from typing import Any

import numpy as np

from m2s.data.shards import DTYPES, dtype_name
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError

MAX_VOCAB = 2**31  # ids fit into int32, the type of windows that are tokenized for an evaluation


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe a tokenizer so that any other one has a different description.

    Where its file is on this machine is not part of the description.

    Args:
        tokenizer: The tokenizer.

    Returns:
        For meta.json: its class and arguments, its sizes, and a SHA-256 of the text of every id.

    Raises:
        UserError: The tokenizer cannot decode, has too many tokens, or its end token is not one of them.
    """
    vocab, end = tokenizer.vocab, tokenizer.end
    if not 0 < vocab <= MAX_VOCAB:
        raise UserError(f"the tokenizer has {vocab:,} tokens, but at most {MAX_VOCAB:,} are possible: use a smaller one")
    if end is not None and not 0 <= end < vocab:
        raise UserError(f"the tokenizer's end token is {end}, but it must lie in 0..{vocab - 1}")
    try:
        texts = "\0".join(tokenizer.decode([index]) for index in range(vocab))
    except (OSError, ImportError, ValueError) as error:
        raise UserError(str(error)) from error
    return {
        "tokenizer": tokenizer_description(tokenizer),
        "vocab": vocab,
        "end": end,
        "tokenizer_sha256": sha256(texts.encode()).hexdigest(),
    }


def tokenizer_description(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the class and arguments of a tokenizer, without the path of its file.

    Args:
        tokenizer: The tokenizer, or None.

    Returns:
        The description for `m2s.data.tokenizer.from_dict`; {} for None.
    """
    return {} if tokenizer is None else {key: value for key, value in tokenizer.to_dict().items() if key != "path"}


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray | str:
    """Encode a document and append the end token, where the tokenizer has one.

    Args:
        tokenizer: The tokenizer.
        text: The document.

    Returns:
        The ids, uint16 or uint32; or, where the document is invalid, a string with the reason.
    """
    try:
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    except ValueError as error:
        return f"cannot be encoded: {error}"
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab:
        return f"encodes to ids from {ids.min()} to {ids.max()}, but the vocabulary is 0..{tokenizer.vocab - 1}"
    dtype = DTYPES[dtype_name(tokenizer.vocab)]
    if tokenizer.end is None:
        return ids.astype(dtype)
    if (ids == tokenizer.end).any():
        return f"encodes to the end-of-text token {tokenizer.end} itself, which may only separate documents"
    return np.append(ids, tokenizer.end).astype(dtype)
