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
from m2s.data.source import Batch
from m2s.data.tokenizer import Tokenizer
from m2s.errors import UserError, UserTypeError
from m2s.rng import derived_seed, permute

FEW = 100_000  # with fewer tokens a tenth is held out, otherwise a hundredth


def as_tokens(name: str, value: Any) -> Int[Tensor, "*shape"]:
    """Return tokens as a tensor.

    Args:
        name: What it is, for the message of an error.
        value: A tensor, an array or a list of integers, of any shape.

    Returns:
        The tokens, int64, on the CPU.

    Raises:
        UserTypeError: It does not hold integers.
        UserError: It is empty or holds a negative number.
    """
    try:
        found = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise UserTypeError(f"{name} is {value!r:.60}, but it must hold integers ({error})") from None
    if found.numel() == 0:
        raise UserError(f"{name} is empty, but an example has at least one token")
    if found.dtype.is_floating_point or found.dtype == torch.bool or found.is_complex():
        kind = str(found.dtype).removeprefix("torch.")
        hint = "round it, or give each distinct value a number: np.unique(x, return_inverse=True)"
        raise UserTypeError(f"{name} holds {kind}, but it must hold integers from 0 on: {hint}")
    found = found.detach().cpu().long()
    if int(found.min()) < 0:
        raise UserError(f"{name} holds {int(found.min())}, but tokens are numbered from 0 on; padding is added by m2s")
    return found


def pad(sequences: Sequence[Int[Tensor, "_"]], length: int | None = None) -> tuple[Int[Tensor, "N L"], Int[Tensor, "N"]]:
    """Pad sequences at their ends with token 0.

    Args:
        sequences: The sequences, of any lengths.
        length: L; None: the greatest length.

    Returns:
        The padded sequences, int64 [N, L], and their lengths, [N].

    Raises:
        UserError: A sequence is longer than `length`.
    """
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    longest = int(lengths.max())
    if length is not None and longest > length:
        raise UserError(option="length", value=length, expected=f"at least {longest}, the length of the longest example")
    tokens = torch.zeros(len(sequences), longest if length is None else length, dtype=torch.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, lengths


def weights(lengths: Int[Tensor, "B"], length: int) -> Tensor:
    """Return 1 at the tokens of each example and 0 at its padding.

    Args:
        lengths: The lengths of the examples, [B].
        length: The padded length, L.

    Returns:
        Weights, float32 [B, L].
    """
    return (torch.arange(length) < lengths.unsqueeze(-1)).float()


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
    labeled = all(isinstance(example, tuple | list) and len(example) == 2 and np.ndim(example[1]) == 0 for example in examples)
    labeled = labeled and all(np.ndim(example[0]) == 1 for example in examples)
    sequences = [example[0] for example in examples] if labeled else examples
    x_0, lengths = pad([as_tokens(f"example {i}", sequence).flatten() for i, sequence in enumerate(sequences)])
    label = torch.tensor([int(example[1]) for example in examples]) if labeled else None
    return Batch(x_0, weights(lengths, x_0.shape[1]), label)


class Sequences:
    """Sequences in memory as training data. Shorter ones are padded, and padding has weight 0 in the loss and in the NELBO.

    Args:
        examples: A tensor or an array of integers, [N, L], or N sequences of any lengths: a list, or a data set of torch that
            has a length.
        vocab: The number of tokens K; tokens are 0..K-1. None: the greatest token plus one.
        labels: A class for each example, [N]; None: there are none.
        length: The padded length; None: that of the longest example.
        validation: Held-out examples, in the form of `examples`. None: 1 % of the tokens are held out at random, or 10 % of
            fewer than 100,000.
        validation_labels: A class for each of them; required with `labels` and `validation`.
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
        validation: Any = None,
        validation_labels: Any = None,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> None:
        tokens, lengths = read_sequences("x", examples, length)
        given = None if labels is None else read_labels("labels", labels, len(tokens))
        if validation is None:
            self._split(tokens, lengths, given, seed)
        else:
            self._train, self._lengths, self._labels = tokens, lengths, given
            self._held_out, self._held_out_lengths = read_sequences("validation", validation, tokens.shape[1])
            if (given is None) != (validation_labels is None):
                raise UserError(option="validation_labels", expected="given if and only if labels and validation are")
            self._held_out_labels = None
            if validation_labels is not None:
                self._held_out_labels = read_labels("validation_labels", validation_labels, len(self._held_out))
        most = 1 + max(int(self._train.max()), int(self._held_out.max()))
        self.inferred = vocab is None
        if vocab is not None:
            validate_vocab(vocab, most)
        self.vocab = max(2, most) if vocab is None else vocab
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
            raise UserError(f"x holds {count} example, but at least 2 are needed: one is held out. Or give validation")
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


def read_sequences(name: str, examples: Any, length: int | None) -> tuple[Int[Tensor, "N L"], Int[Tensor, "N"]]:
    """Return examples as one tensor, padded where they have different lengths.

    Args:
        name: What they are, for the message of an error.
        examples: A tensor or an array of integers, [N, L], or N sequences of any lengths.
        length: The padded length; None: that of the longest example.

    Returns:
        Tokens, int64 [N, L], and the lengths of the examples, [N].

    Raises:
        UserTypeError: The examples are not integers, or have another number of dimensions.
        UserError: There are none, or one is empty, too long or negative.
    """
    if isinstance(examples, str | bytes):
        raise UserTypeError(f"{name} is a text, but it must hold integers: encode it with a tokenizer such as m2s.data.Bytes()")
    if isinstance(examples, Tensor | np.ndarray) and np.ndim(examples) != 2:
        shape = list(examples.shape)
        raise UserTypeError(f"{name} has shape {shape}, but it must be [N, L]: for images give x.reshape(len(x), -1)")
    if isinstance(examples, Tensor | np.ndarray):
        tokens = as_tokens(name, examples)
        lengths = torch.full((len(tokens),), tokens.shape[1])
        if length is None or length == tokens.shape[1]:
            return tokens, lengths
        return pad(list(tokens), length)
    try:
        count = len(examples)
    except TypeError:
        raise UserTypeError(f"{name} is {type(examples).__name__}, which has no length: give a list or an array") from None
    if count == 0:
        raise UserError(f"{name} is empty")
    sequences = [as_tokens(f"{name}[{i}]", examples[i]) for i in range(count)]
    if any(sequence.ndim != 1 for sequence in sequences):
        raise UserTypeError(f"{name} must hold sequences of integers, each with one dimension")
    return pad(sequences, length)


def read_labels(name: str, labels: Any, count: int) -> Int[Tensor, "N"]:
    """Return one number for each example.

    Args:
        name: What they are, for the message of an error.
        labels: Integers from 0 on, [N].
        count: The number N of examples.

    Returns:
        The numbers, int64 [N].

    Raises:
        UserTypeError: They are not integers.
        UserError: There is not one for each example, or one is negative.
    """
    found = as_tokens(name, labels)
    if found.shape != (count,):
        raise UserError(f"{name} has shape {list(found.shape)}, but there are {count} examples: give one label for each")
    return found
