"""Repetition: how often the n-grams of a text occur again, in the same text and in the others of the set.

For n = 1..4:

* `repeated_n`: 1 - (distinct n-grams of a sequence) / (its n-grams), mean over sequences (seq-rep-n of Welleck et al. 2020);
* `distinct_n`: (distinct n-grams of all sequences) / (all n-grams) (Li et al. 2016);
* `shared_n`: the fraction of the n-grams of a sequence that another sequence of the set has too, the mean over sequences. It is
  high where a model writes the same phrases again and again.

`distinct_n` and `shared_n` depend on the number of sequences, so they have no bootstrap interval, which would repeat sequences.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from m2s.evaluation.bootstrap import bootstrap
from m2s.evaluation.ngrams import distinct_per_sequence, ngram_ids
from m2s.evaluation.text.metric import Column, MeasuredText, TextContext, TextMetric

SIZES = (1, 2, 3, 4)


def shared_with_others(ids: Int64[np.ndarray, "n m"]) -> Bool[np.ndarray, "n m"]:
    """Return which values another row has too.

    Args:
        ids: Values from 0 on, [n, m], such as those of `m2s.evaluation.ngrams.ngram_ids`.

    Returns:
        Whether the value at each place is in another row, [n, m].
    """
    rows = np.arange(len(ids))[:, None]
    pairs = np.unique(ids * len(ids) + rows)  # each row counts once for a value
    return np.bincount(pairs // len(ids), minlength=int(ids.max()) + 1)[ids] > 1


def _measure(text: MeasuredText, context: TextContext) -> dict[str, Any]:
    """Count repeated n-grams within sequences and within the set."""
    tokens = text.tokens
    texts = len(np.unique(tokens, axis=0))
    found: dict[str, Any] = {"distinct_texts": {"value": texts / len(tokens), "low": None, "high": None}}
    for size, ids in enumerate(ngram_ids(tokens, min(max(SIZES), tokens.shape[1])), 1):
        repeated = 1 - distinct_per_sequence(ids) / ids.shape[1]
        columns = np.stack([repeated, np.ones_like(repeated)], axis=1)
        mean = bootstrap(columns, lambda sums: sums[..., 0] / sums[..., 1], context.resamples, context.seed)
        found[f"repeated_{size}"] = asdict(mean)
        found[f"distinct_{size}"] = {"value": (int(ids.max()) + 1) / ids.size, "low": None, "high": None}
        found[f"shared_{size}"] = {"value": float(shared_with_others(ids).mean()), "low": None, "high": None}
    return found


REPETITION = TextMetric(
    _measure,
    (
        Column("distinct_texts", "closest", "distinct samples over all samples"),
        *(Column(f"repeated_{n}", "closest", f"repeated {n}-grams of a sequence over its {n}-grams") for n in SIZES),
        *(
            Column(f"distinct_{n}", "closest", f"distinct {n}-grams of all sequences over all {n}-grams", printed=n == 4)
            for n in SIZES
        ),
        *(
            Column(f"shared_{n}", "closest", f"{n}-grams of a sequence that another sequence of the file has", printed=n == 4)
            for n in SIZES
        ),
    ),
)
