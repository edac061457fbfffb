"""Vocabulary: the words of a text that occur in the training text.

A word is a maximal run of letters, in lower case. The first and the last word of a sequence may be cut by its ends and are left
out. `known_words` is the fraction of the words of the sequences that occur in the training text, `frequent_words` of those that
occur there at least ten times: a long training text holds many strings that are no words. Both are fractions of all words of
the set, and their intervals resample sequences.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from m2s.evaluation.bootstrap import bootstrap
from m2s.evaluation.text.metric import Column, MeasuredText, TextContext, TextMetric
from m2s.evaluation.text.words import inner_words

FREQUENT = 10
"""Occurrences in the training text from which on a word counts as frequent."""


def _measure(text: MeasuredText, context: TextContext) -> dict[str, Any]:
    """Count the words that the training text has."""
    training = context.training
    assert training is not None  # the metric declares that it needs the training text
    vocabulary = training.words
    words = [inner_words(one) for one in text.samples.texts]
    counts = np.array([len(one) for one in words], np.float64)
    found: dict[str, Any] = {}
    for name, least in (("known_words", 1), ("frequent_words", FREQUENT)):
        known = np.array([sum(vocabulary[word] >= least for word in one) for one in words], np.float64)
        pair = np.stack([known, counts], axis=1)
        # A few short sequences may have no complete word at all. Then none is known.
        mean = bootstrap(pair, lambda sums: sums[..., 0] / np.maximum(sums[..., 1], 1), context.resamples, context.seed)
        found[name] = asdict(mean)
    return {**found, "words": int(counts.sum()), "searched_tokens": training.count}


VOCABULARY = TextMetric(
    _measure,
    (
        Column("known_words", "closest", "words that occur in the training text over all words"),
        Column("frequent_words", "closest", f"words that occur there at least {FREQUENT} times over all words"),
    ),
    frozenset({"training text"}),
)
