"""Generative perplexity of samples under a language model, together with their entropy.

    samples = read_samples(Path("a.npz"), PROTOCOLS["mdlm"], tokenizer)
    scores = score(samples, load_judge("gpt2-large"))
    result = summary(scores)                                  # perplexity, entropy, intervals: as JSON can store them
    gap = difference(scores, other)                           # paired differences of two sets of samples

A low perplexity alone says little: repeating one likely sentence has a lower one than any good text. So the entropy of the
tokens and the number of distinct sequences are reported with every perplexity.
"""

from m2s.evaluation.genppl.protocol import PROTOCOLS, Protocol
from m2s.evaluation.genppl.report import departures, difference, draw, in_order, notes, summary, table
from m2s.evaluation.genppl.samples import Samples, decode, read_samples
from m2s.evaluation.genppl.scores import Scores, entropy, score

__all__ = [
    "PROTOCOLS",
    "Protocol",
    "Samples",
    "Scores",
    "decode",
    "departures",
    "difference",
    "draw",
    "entropy",
    "in_order",
    "notes",
    "read_samples",
    "score",
    "summary",
    "table",
]
