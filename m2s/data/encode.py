"""Documents to token ids, checked against what the files can hold."""

from hashlib import sha256
from typing import Any

import numpy as np

from m2s.data.shards import TOKEN
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError

LARGEST = 2**16


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """What tells this tokenizer from another: how to make it again, its sizes, and a SHA-256 of what each id stands for.

    Where its file lies on this machine is no part of that.
    """
    vocab, end = tokenizer.vocab, tokenizer.end
    if not 0 < vocab <= LARGEST:
        raise UserError(
            f"the tokenizer has {vocab:,} tokens, but uint16 files hold ids below {LARGEST:,} only: use a smaller one"
        )
    if end is not None and not 0 <= end < vocab:
        raise UserError(f"the tokenizer's end token is {end}, but it must lie in 0..{vocab - 1}")
    try:
        words = "\0".join(tokenizer.decode([index]) for index in range(vocab))
    except (OSError, ImportError, ValueError) as error:
        raise UserError(str(error)) from error
    return {"tokenizer": named(tokenizer), "vocab": vocab, "end": end, "tokenizer_sha256": sha256(words.encode()).hexdigest()}


def named(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Which tokenizer it is, wherever its files lie; nothing of none."""
    return {} if tokenizer is None else {key: value for key, value in tokenizer.to_dict().items() if key != "path"}


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray | str:
    """The ids of a document with `end` (where there is one) after them, or what is wrong with it."""
    try:
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    except ValueError as error:
        return f"cannot be encoded: {error}"
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab:
        return f"encodes to ids from {ids.min()} to {ids.max()}, but the vocabulary is 0..{tokenizer.vocab - 1}"
    if tokenizer.end is None:
        return ids.astype(TOKEN)
    if (ids == tokenizer.end).any():
        return f"encodes to the end-of-text token {tokenizer.end} itself, which may only separate documents"
    return np.append(ids, tokenizer.end).astype(TOKEN)
