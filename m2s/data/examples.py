"""Read examples with their labels from what users have: tensors, arrays, lists, tables and data sets of torch."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from m2s.errors import UserError, UserTypeError

NUMBER_THEM = "give each distinct value a number: np.unique({name}, return_inverse=True)[1]"
LEAVE_OUT = "leave padding out, as in [row[row >= 0] for row in x]. Sequences may have different lengths, and m2s pads them"
ENCODE = "encode it with a tokenizer such as m2s.data.Bytes() or m2s.data.Characters(alphabet)"


@dataclass(frozen=True)
class Examples:
    """Examples as one tensor.

    Args:
        tokens: Tokens, int64 [N, L], with 0 at padding.
        lengths: The lengths of the examples, [N].
        labels: Their classes where the container holds pairs (sequence, label), in the form that it has; otherwise None.
    """

    tokens: Int[Tensor, "N L"]
    lengths: Int[Tensor, "N"]
    labels: Any = None


def as_tokens(name: str, value: Any, what: str = "tokens") -> Int[Tensor, "*shape"]:
    """Return integers from 0 on as a tensor.

    Args:
        name: What it is, for the message of an error.
        value: A tensor, an array or a list of integers, of any shape.
        what: What the integers are, for the message of an error: "tokens", "labels" or "lengths".

    Returns:
        The integers, int64, on the CPU.

    Raises:
        UserTypeError: It does not hold integers.
        UserError: It is empty or holds a negative number.
    """
    found = value if isinstance(value, Tensor) else _to_tensor(name, value, what)
    if found.numel() == 0:
        raise UserError(f"{name} is empty" + (", but an example has at least one token" if what == "tokens" else ""))
    if found.dtype.is_floating_point or found.dtype == torch.bool or found.is_complex():
        kind = str(found.dtype).removeprefix("torch.")
        hint = f"round it, or {NUMBER_THEM.format(name='x' if what == 'tokens' else name)}"
        raise UserTypeError(f"{name} holds {kind}, but it must hold integers from 0 on: {hint}")
    found = found.detach().cpu().long()
    if int(found.min()) < 0:
        hint = f": {LEAVE_OUT}" if what == "tokens" else ""
        raise UserError(f"{name} holds {int(found.min())}, but {what} are numbered from 0 on{hint}")
    return found


def _to_tensor(name: str, value: Any, what: str) -> Tensor:
    """An array or a list as a tensor, or an error that says what it holds."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise UserTypeError(f"{name} holds lists of different lengths, but it must hold integers") from None
    except (TypeError, RuntimeError) as error:  # such as an object whose conversion fails
        raise UserTypeError(f"{name} is {type(value).__name__}, but it must hold integers ({error})") from None
    if array.dtype.kind == "O" and array.size and all(_is_integer(each) for each in array.flat):
        array = array.astype(np.int64)  # as a table with integers that may be missing gives them
    if array.dtype.kind in "USO" and array.size:
        first = next(each for each in array.flat if not _is_integer(each))
        if isinstance(first, str | bytes):
            hint = ENCODE if what == "tokens" else NUMBER_THEM.format(name=name)
            raise UserTypeError(f"{name} holds strings such as {str(first)!r:.40}, but it must hold integers: {hint}")
        kind = "a dict, not" if isinstance(first, Mapping) else f"objects of type {type(first).__name__}, but it must hold"
        hint = ": take the column that holds the tokens" if isinstance(first, Mapping) else ""
        raise UserTypeError(f"{name} holds {kind} integers{hint}")
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise UserTypeError(f"{name} holds {array.dtype}, but it must hold integers") from None


def _is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or numpy, and not a Boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


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


def lengthen(tokens: Int[Tensor, "N L"], length: int) -> Int[Tensor, "N M"]:
    """Pad sequences of one length at their ends with token 0.

    Args:
        tokens: The sequences, [N, L].
        length: M, at least L.

    Returns:
        The sequences, [N, M].
    """
    return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]))


def weights(lengths: Int[Tensor, "B"], length: int) -> Tensor:
    """Return 1 at the tokens of each example and 0 at its padding.

    Args:
        lengths: The lengths of the examples, [B].
        length: The padded length, L.

    Returns:
        Weights, float32 [B, L].
    """
    return (torch.arange(length) < lengths.unsqueeze(-1)).float()


def read_examples(name: str, examples: Any, length: int | None = None) -> Examples:
    """Return examples as one tensor, padded where they have different lengths.

    Args:
        name: What they are, for the message of an error.
        examples: A tensor or an array of integers, [N, L]; a table with `to_numpy` or `__array__`; a `TensorDataset` of
            sequences, or of sequences and labels; or N sequences of any lengths or pairs (sequence, label), as a list or a data
            set of torch that has a length.
        length: The padded length; None: that of the longest example.

    Returns:
        Tokens, lengths, and labels where there are any.

    Raises:
        UserTypeError: The examples are not integers, have another number of dimensions, or are in a container that cannot be
            read.
        UserError: There are none, or one is empty, too long or negative.
    """
    labels = None
    if isinstance(examples, TensorDataset):
        examples, labels = _unpack(name, examples)
    _check_container(name, examples)
    if not isinstance(examples, Tensor | np.ndarray) and (hasattr(examples, "to_numpy") or hasattr(examples, "__array__")):
        examples = examples.to_numpy() if hasattr(examples, "to_numpy") else np.asarray(examples)
    if isinstance(examples, np.ndarray) and examples.ndim == 1 and examples.dtype.kind == "O":
        examples = list(examples)  # sequences of different lengths
    if isinstance(examples, Tensor | np.ndarray):
        return _read_array(name, examples, length, labels)
    try:
        count = len(examples)
    except TypeError:
        raise UserTypeError(f"{name} is {type(examples).__name__}, which has no length: give a list or an array") from None
    if count == 0:
        raise UserError(f"{name} is empty")
    items = [examples[i] for i in range(count)]
    if all(isinstance(item, tuple) and len(item) == 1 and _dimensions(item[0]) == 1 for item in items):
        items = [item[0] for item in items]  # a part of a TensorDataset(x)
    pairs = [_is_pair(item) for item in items]
    if any(pairs) and not all(pairs):
        raise UserTypeError(
            f"{name}[{pairs.index(False)}] is no pair (sequence, label), but {name}[{pairs.index(True)}] is one"
        )
    if all(pairs):
        items, labels = [item[0] for item in items], [_plain(item[1]) for item in items]
    sequences = [as_tokens(f"{name}[{i}]", item) for i, item in enumerate(items)]
    if any(sequence.ndim != 1 for sequence in sequences):
        raise UserTypeError(f"{name} must hold sequences of integers, each with one dimension, or pairs (sequence, label)")
    return Examples(*pad(sequences, length), labels)


def _check_container(name: str, examples: Any) -> None:
    """Raise an error, with a way out, for a container that holds no examples by index."""
    if isinstance(examples, str | bytes):
        raise UserTypeError(f"{name} is a text, but it must hold integers: {ENCODE}")
    if isinstance(examples, DataLoader):
        hint = "pass its data set, loader.dataset, and give batch="
        raise UserTypeError(f"{name} is a DataLoader, but m2s makes batches itself, so that a run can be resumed: {hint}")
    if isinstance(examples, Mapping):
        key = next(iter(examples), "x")
        raise UserTypeError(
            f"{name} is a {type(examples).__name__}, but it must hold sequences: give one entry, {name}[{key!r}]"
        )


def _unpack(name: str, dataset: TensorDataset) -> tuple[Any, Any]:
    """The sequences and the labels of a `TensorDataset`."""
    tensors = dataset.tensors
    if len(tensors) > 2 or (len(tensors) == 2 and tensors[1].ndim != 1):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        expected = "sequences [N, L], or sequences and labels [N]"
        raise UserTypeError(f"{name} is a TensorDataset of shapes {shapes}, but it must hold {expected}")
    return tensors[0], tensors[1] if len(tensors) == 2 else None


def _read_array(name: str, examples: Any, length: int | None, labels: Any) -> Examples:
    """The examples of a tensor or an array."""
    if examples.ndim != 2:
        hint = "for one sequence give x[None]" if examples.ndim == 1 else "for images give x.reshape(len(x), -1)"
        raise UserTypeError(f"{name} has shape {list(examples.shape)}, but it must be [N, L]: {hint}")
    tokens = as_tokens(name, examples)
    if length is None or length == tokens.shape[1]:
        return Examples(tokens, torch.full((len(tokens),), tokens.shape[1]), labels)
    return Examples(*pad(list(tokens), length), labels)


def _dimensions(value: Any) -> int:
    """The number of dimensions of a tensor, an array or a list; -1 for lists of different lengths."""
    try:
        return np.ndim(value)
    except ValueError:
        return -1


def _is_pair(example: Any) -> bool:
    """Whether an example is a pair (sequence, label), and not two tokens."""
    if not isinstance(example, tuple | list) or len(example) != 2:
        return False
    return _dimensions(example[0]) == 1 and _dimensions(example[1]) == 0


def _plain(label: Any) -> Any:
    """A label without its tensor."""
    return label.item() if isinstance(label, Tensor) else label


def read_labels(name: str, labels: Any, count: int, what: str = "labels") -> Int[Tensor, "N"]:
    """Return one number for each example.

    Args:
        name: What they are, for the message of an error.
        labels: Integers from 0 on, [N].
        count: The number N of examples.
        what: "labels" or "lengths", for the message of an error.

    Returns:
        The numbers, int64 [N].

    Raises:
        UserTypeError: They are not integers.
        UserError: There is not one for each example, or one is negative.
    """
    found = as_tokens(name, labels, what)
    if found.shape != (count,):
        one = what.removesuffix("s")
        raise UserError(f"{name} has shape {list(found.shape)}, but there are {count} examples: give one {one} for each")
    return found


def choose_labels(labels: Any, contained: Any, count: int, name: str = "labels") -> Int[Tensor, "N"] | None:
    """Return the labels that are given, or those that the examples have.

    Args:
        labels: Labels, [N]; None: those of the examples, if they have any; True: those of the examples; False: none.
        contained: The labels of the examples, [N]; None where they have none.
        count: The number N of examples.
        name: The name of the argument, for the message of an error.

    Returns:
        The labels, int64 [N], or None.

    Raises:
        UserTypeError: They are not integers.
        UserError: There is not one for each example, one is negative, or `labels` is True and there are none.
    """
    if labels is True and contained is None:
        raise UserError(option=name, value=True, reason="x has no labels", hint="give one label for each example")
    if labels is False or (contained is None and labels is None):
        return None
    if labels is not None and labels is not True:
        return read_labels(name, labels, count)
    try:
        return read_labels("the label column of x", contained, count)
    except UserTypeError as error:
        raise UserTypeError(f"{error}; or give {name}=False to leave them out") from None
