"""Novelty: the n-grams of a text that do not occur in the training text, and the longest verbatim copy from it.

For n = 2..8, `novel_n` is the fraction of the n-grams of the sequences that occur nowhere in the training text (McCoy et al.
2023). The training text is one stream of tokens: an n-gram may span the end of a document. `longest_copy` is the length of the
longest part of a sequence that occurs in the training text, the mean over sequences. All counts are exact
(`m2s.evaluation.text.suffix_array`). Where only the start of the training text is searched, novelty is too high and copies are
too short; the result says how many tokens were searched.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from m2s.evaluation.bootstrap import bootstrap
from m2s.evaluation.text.metric import Column, MeasuredText, TextContext, TextMetric

SIZES = (2, 3, 4, 5, 6, 7, 8)


def _measure(text: MeasuredText, context: TextContext) -> dict[str, Any]:
    """Count novel n-grams, and find the longest copies."""
    tokens = text.tokens
    width = tokens.shape[1]
    training = context.training
    assert training is not None  # the metric declares that it needs the training text
    lengths = training.index(width).match_lengths(tokens)
    columns = {}
    for size in SIZES:
        if size <= width:
            columns[f"novel_{size}"] = (lengths[:, : width - size + 1] < size).mean(1)
    copies = lengths.max(1)
    columns["longest_copy"] = copies.astype(np.float64)
    found: dict[str, Any] = {}
    for name, values in columns.items():
        pair = np.stack([values, np.ones_like(values)], axis=1)
        mean = bootstrap(pair, lambda sums: sums[..., 0] / sums[..., 1], context.resamples, context.seed)
        found[name] = asdict(mean)
    found["longest_copy_of_all"] = {"value": float(copies.max()), "low": None, "high": None}
    return {**found, "searched_tokens": training.count, "training_tokens": training.total}


NOVELTY = TextMetric(
    _measure,
    (
        *(
            Column(f"novel_{n}", "closest", f"{n}-grams that do not occur in the training text", printed=n in (2, 4, 8))
            for n in SIZES
        ),
        Column("longest_copy", "closest", "longest part of a sequence that is in the training text, tokens", ".1f"),
        Column("longest_copy_of_all", "closest", "longest such part of all sequences, tokens", ".0f", printed=False),
    ),
    frozenset({"training text"}),
)
