"""Sequences of integers in memory: DNA, codes, rows of a table, anything that is neither images nor packed text.

    source = m2s.data.Sequences([[0, 3, 1], [2, 2]], vocab=4)       # shorter ones are padded, and padding has weight 0
    loader = DataLoader(dataset, batch_size=64, collate_fn=m2s.data.collate)

`Sequences` is a `Source`, so that `m2s.fit` and `m2s.training.train` accept it. `collate` is for a loop of your own.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from m2s import validation
from m2s.data.examples import choose_labels, lengthen, read_examples, read_labels, weights
from m2s.data.source import Batch
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError
from m2s.rng import derived_seed, permute

MOST_TOKENS = 100_000_000  # the embedding of so many, 128 numbers wide, takes 256 GB in training
FEW = 100_000  # with fewer tokens a tenth is held out, otherwise a hundredth


def collate(examples: Sequence[Any]) -> Batch:
    """Make a batch of sequences of any lengths: the `collate_fn` of a `torch.utils.data.DataLoader`.

    Args:
        examples: Sequences of integers, [L_i] each, or pairs (sequence, label).

    Returns:
        Tokens [B, L], padded with 0 at the end; weights [B, L], 0 at padding; and labels [B] where there are any.

    Raises:
        UserTypeError: An example does not hold integers.

    Example:
        >>> loader = DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=m2s.data.collate)
        >>> for batch in loader:
        ...     loss = objective(batch.x_0, weight=batch.weight, condition=batch.label).sum() / batch.weight.sum()
    """
    found = read_examples("example", examples)
    label = None if found.labels is None else read_labels("the label column", found.labels, len(found.tokens))
    return Batch(found.tokens, weights(found.lengths, found.tokens.shape[1]), label)


class Sequences:
    """Sequences in memory as training data. Shorter ones are padded, and padding has weight 0 in the loss and in the NELBO.

    Args:
        examples: A tensor, an array or a table of integers, [N, L]; or N sequences of any lengths, or pairs (sequence, label):
            a list, or a data set of torch that has a length.
        vocab: The number of tokens K; tokens are 0..K-1. None: the greatest token plus one.
        labels: A class for each example, [N]; None: those of the pairs, if there are any; False: none.
        length: The padded length; None: that of the longest example, held out or not.
        validation_x: Held-out examples, in the form of `examples`. None: 1 % of the tokens are held out at random, or 10 % of
            fewer than 100,000.
        validation_labels: A class for each of them; required with `labels` and `validation_x`.
        tokenizer: Turns tokens into text; None: there is none.
        seed: Chooses the examples that are held out.

    Attributes:
        inferred: Whether the vocabulary was inferred.
        padded: Whether some example is shorter than `length`.

    Raises:
        UserError: A number is out of range, or there are too few examples.
        UserTypeError: The examples are not integers.
    """

    shape = None

    def __init__(
        self,
        examples: Any,
        vocab: int | None = None,
        labels: Any = None,
        length: int | None = None,
        validation_x: Any = None,
        validation_labels: Any = None,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> None:
        found = read_examples("x", examples, length)
        given = choose_labels(labels, found.labels, len(found.tokens))
        if validation_x is None:
            self._split(found.tokens, found.lengths, given, seed)
        else:
            held_out = read_examples("validation_x", validation_x, length)
            longest = max(found.tokens.shape[1], held_out.tokens.shape[1])
            self._train, self._lengths, self._labels = lengthen(found.tokens, longest), found.lengths, given
            self._held_out, self._held_out_lengths = lengthen(held_out.tokens, longest), held_out.lengths
            chosen = False if given is None and validation_labels is None else validation_labels
            self._held_out_labels = choose_labels(chosen, held_out.labels, len(held_out.tokens), "validation_labels")
            if (given is None) != (self._held_out_labels is None):
                raise UserError(option="validation_labels", expected="given if and only if labels and validation_x are")
        most = 1 + max(int(self._train.max()), int(self._held_out.max()))
        self.inferred = vocab is None
        if vocab is not None:
            validate_vocab(vocab, most)
        self.vocab = max(2, most) if vocab is None else vocab
        if self.vocab > MOST_TOKENS:
            reason = f"more than {MOST_TOKENS:,} tokens do not fit into memory"
            hint = "give each token that occurs a number: np.unique(x, return_inverse=True)[1]"
            raise UserError(option="vocab", value=self.vocab, reason=reason, hint=hint)
        self.length, self.size, self.held_out = self._train.shape[1], len(self._train), len(self._held_out)
        every = [value for value in (self._labels, self._held_out_labels) if value is not None]
        self.classes = 1 + max(int(value.max()) for value in every) if every else None
        self.padded = bool((torch.cat([self._lengths, self._held_out_lengths]) < self.length).any())
        self.tokenizer = tokenizer
        kind = "sequence" if tokenizer is None else "text"
        self.description: dict[str, Any] = {"kind": kind, "length": self.length, "vocab": self.vocab}

    def _split(self, tokens: Tensor, lengths: Tensor, labels: Tensor | None, seed: int) -> None:
        """Hold out some examples."""
        count = len(tokens)
        if count < 2:
            raise UserError(f"x holds {count} example, but at least 2 are needed: one is held out. Or give validation_x")
        held_out = max(1, count // (10 if int(lengths.sum()) < FEW else 100))
        drawn = permute(np.arange(count), count, derived_seed(seed, "held out"), 0).astype(np.int64)
        order = torch.from_numpy(drawn)
        last, first = order[:held_out].sort().values, order[held_out:].sort().values
        self._train, self._lengths = tokens[first], lengths[first]
        self._held_out, self._held_out_lengths = tokens[last], lengths[last]
        self._labels, self._held_out_labels = (None, None) if labels is None else (labels[first], labels[last])

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of all examples, lengths and labels."""
        digest = hashlib.sha256()
        parts = (self._train, self._lengths, self._labels, self._held_out, self._held_out_lengths, self._held_out_labels)
        for part in parts:
            digest.update(b"none" if part is None else str(tuple(part.shape)).encode() + part.numpy().tobytes())
        return digest.hexdigest()

    def train(self, indices: Int[Tensor, "B"]) -> Batch:
        """Return the training examples with these indices.

        Args:
            indices: Indices below `size`, [B].

        Returns:
            Tokens [B, L], weights [B, L] where some examples are padded, and labels [B] where there are any.
        """
        return self._batch(self._train, self._lengths, self._labels, indices)

    def validation(self, indices: Int[Tensor, "B"]) -> Batch:
        """Return the validation examples with these indices.

        Args:
            indices: Indices below `held_out`, [B].

        Returns:
            Tokens [B, L], weights [B, L] where some examples are padded, and labels [B] where there are any.
        """
        return self._batch(self._held_out, self._held_out_lengths, self._held_out_labels, indices)

    def _batch(self, tokens: Tensor, lengths: Tensor, labels: Tensor | None, indices: Tensor) -> Batch:
        """Some examples with their weights and labels."""
        weight = weights(lengths[indices], self.length) if self.padded else None
        return Batch(tokens[indices], weight, None if labels is None else labels[indices])


def validate_vocab(vocab: int, least: int) -> None:
    """Check that a vocabulary holds all tokens.

    Args:
        vocab: The number of tokens.
        least: The greatest token plus one.

    Raises:
        UserError: It is smaller than `least` or than 2.
    """
    validation.positive_int("vocab", vocab, low=2)
    if vocab < least:
        raise UserError(option="vocab", value=vocab, expected=f"at least {least}: the greatest token is {least - 1}")
