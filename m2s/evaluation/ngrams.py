"""Statistics of n-grams within a sample: entropy, and the fraction that is distinct.

A model that repeats itself has a low entropy and few distinct n-grams. Neither needs a judge.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from m2s.errors import UserError
from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.evaluation.genppl.scores import entropy
from m2s.hub import Checkpoint


def ngram_counts(tokens: Integer[Tensor, "L"], n: int) -> Integer[Tensor, "distinct"]:
    """Count the n-grams of a sequence.

    Args:
        tokens: The sequence, [L].
        n: The length of an n-gram, at most L.

    Returns:
        How often each distinct n-gram occurs.
    """
    return tokens.unfold(0, n, 1).unique(dim=0, return_counts=True)[1]


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
    for n in range(1, max_n + 1):
        counts = [ngram_counts(sequence, n) for sequence in sequences.long()]
        # `entropy` takes tokens, so every distinct n-gram is given a number.
        bits = [entropy(torch.arange(len(count)).repeat_interleave(count)) / math.log(2) for count in counts]
        found[f"entropy_{n}"] = _mean(torch.tensor(bits, dtype=torch.float64))
        found[f"distinct_{n}"] = _mean(torch.tensor([len(count) / (length - n + 1) for count in counts], dtype=torch.float64))
    return found


def _mean(values: Float[Tensor, "n"]) -> dict[str, float | None]:
    """Return a mean with its standard error, which needs two values."""
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"value": float(values.mean()), "error": error}
