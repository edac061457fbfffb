"""Generative perplexity and the entropy of the tokens within a sequence, as `m2s evaluate genppl` computes them."""

from typing import Any

from m2s.evaluation.genppl import summarize
from m2s.evaluation.text.metric import Column, MeasuredText, TextContext, TextMetric


def _measure(text: MeasuredText, context: TextContext) -> dict[str, Any]:
    """Summarize the judge's scores."""
    found = summarize(text.judged, context.resamples, context.seed)
    names = ("perplexity", "nats_per_token", "bits_per_byte", "entropy_bits", "entropy_nats")
    return {**{name: found[name] for name in names}, "departures": found["departures"], "unscored": found["unscored"]}


PERPLEXITY = TextMetric(
    _measure,
    (
        Column("perplexity", "lowest", "generative perplexity, averaged as the protocol says", ".2f"),
        Column("entropy_bits", "closest", "entropy of the tokens within a sequence, bits, mean over sequences"),
        Column("entropy_nats", "closest", "the same in nats, as most papers report it", printed=False),
        Column("nats_per_token", "lowest", "log perplexity, nats per token of the judge", printed=False),
        Column("bits_per_byte", "lowest", "negative log-likelihood, bits per byte of text", printed=False),
    ),
    frozenset({"judge"}),
)
