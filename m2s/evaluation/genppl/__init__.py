"""Generative perplexity of samples under a language model, together with their entropy.

    samples = read_samples(Path("a.npz"), PROTOCOLS["mdlm"], tokenizer)
    scores = score(samples, load_judge("gpt2-large"))
    result = summarize(scores)                                # perplexity, entropy, intervals: as JSON can store them
    gap = paired_difference(scores, other)                    # paired differences of two sets of samples

A low perplexity alone says little: repeating one likely sentence has a lower one than any good text. So the entropy of the
tokens and the number of distinct sequences are reported with every perplexity.
"""

from m2s.evaluation.genppl.frontier import (
    Curve,
    area_below,
    common_interval,
    format_areas,
    frontier_areas,
    frontier_curves,
    plot_frontier,
)
from m2s.evaluation.genppl.protocol import PROTOCOLS, Protocol
from m2s.evaluation.genppl.report import (
    format_notes,
    format_table,
    paired_difference,
    protocol_departures,
    sort_by_temperature,
    summarize,
)
from m2s.evaluation.genppl.samples import Samples, decode, read_samples, require_file
from m2s.evaluation.genppl.scores import Scores, entropy, score

__all__ = [
    "PROTOCOLS",
    "Curve",
    "Protocol",
    "Samples",
    "Scores",
    "area_below",
    "common_interval",
    "decode",
    "entropy",
    "format_areas",
    "format_notes",
    "format_table",
    "frontier_areas",
    "frontier_curves",
    "paired_difference",
    "plot_frontier",
    "protocol_departures",
    "read_samples",
    "require_file",
    "score",
    "sort_by_temperature",
    "summarize",
]
