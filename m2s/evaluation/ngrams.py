"""Statistics of n-grams within a sample: entropy, and the fraction that is distinct.

A model that repeats itself has a low entropy and few distinct n-grams. Neither needs a judge.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, Integer
from torch import Tensor

from m2s.errors import UserError
from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.evaluation.genppl.scores import entropy
from m2s.hub import Checkpoint


def ngram_ids(tokens: Integer[np.ndarray, "n L"], max_n: int) -> Iterator[Int64[np.ndarray, "n m"]]:
    """Give every distinct n-gram of some sequences a number, without collisions.

    Args:
        tokens: The sequences, [n, L].
        max_n: The length of the longest n-grams, at most L.

    Yields:
        For each length 1..max_n the number of the n-gram at each position, from 0 on, [n, L - length + 1]. Two are equal where
        the n-grams are.
    """
    first = ids = _numbered(tokens.astype(np.int64))
    for length in range(1, max_n + 1):
        if length > 1:
            ids = _numbered(ids[:, :-1] * (int(first.max()) + 1) + first[:, length - 1 :])
        yield ids


def _numbered(values: Int64[np.ndarray, "n m"]) -> Int64[np.ndarray, "n m"]:
    """Replace distinct values by 0, 1, ..., so that a product of two of them is far from overflow."""
    return np.unique(values, return_inverse=True)[1].reshape(values.shape)


def ngrams(
    samples: Integer[Tensor, "n L"] | None,
    reference: EvaluationSet | None = None,
    checkpoint: Checkpoint | None = None,
    max_n: int = 3,
    **_: Any,
) -> dict[str, Any]:
    """Measure the variety of samples by their n-grams. It is the metric "ngrams" of `m2s.evaluation.METRICS`.

    Args:
        samples: The tokens of samples, [n, L].
        reference: Real data, measured in the same way for comparison.
        checkpoint: Not used.
        max_n: The length of the longest n-grams.

    Returns:
        "samples" and, where given, "reference". Each has, for n = 1..max_n, "entropy_n" (bits per n-gram of a sequence) and
        "distinct_n" (distinct n-grams over all n-grams of a sequence). Values are means over sequences, with their standard
        errors.

    Raises:
        UserError: There are no samples, or they are shorter than `max_n`.
    """
    if samples is None:
        raise UserError("the metric ngrams measures samples, but none are given: give a file of samples")
    result = {"samples": _statistics(samples, max_n)}
    if reference is not None:
        result["reference"] = _statistics(reference[torch.arange(len(reference))], max_n)
    return result


def _statistics(sequences: Integer[Tensor, "n L"], max_n: int) -> dict[str, Any]:
    """Compute the mean and the standard error of each statistic over sequences."""
    length = sequences.shape[1]
    if not 1 <= max_n <= length:
        raise UserError(f"max_n is {max_n}, but it must lie in 1..{length}, the length of a sequence")
    found: dict[str, Any] = {}
    for n, ids in enumerate(ngram_ids(sequences.numpy(), max_n), 1):
        bits = [entropy(row) / math.log(2) for row in ids]
        found[f"entropy_{n}"] = _mean(torch.tensor(bits, dtype=torch.float64))
        found[f"distinct_{n}"] = _mean(torch.from_numpy(distinct_per_sequence(ids) / (length - n + 1)))
    return found


def distinct_per_sequence(ids: Int64[np.ndarray, "n m"]) -> Int64[np.ndarray, "n"]:
    """Count the distinct values in each row.

    Args:
        ids: The values, [n, m], at least one in a row.

    Returns:
        The counts, [n].
    """
    return 1 + (np.diff(np.sort(ids, axis=1)) != 0).sum(1)


def _mean(values: Float[Tensor, "n"]) -> dict[str, float | None]:
    """Return a mean with its standard error, which needs two values."""
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"value": float(values.mean()), "error": error}
