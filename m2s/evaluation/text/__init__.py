"""Metrics of generated text beside generative perplexity, which alone can be lowered without writing better text.

    TEXT_METRICS       every metric by name: perplexity with entropy, MAUVE, Fréchet distance, repetition, novelty,
                       vocabulary
    ADVERSARIES        samples that a good metric does not rank first
    SuffixArray(text, 512).match_lengths(tokens)        the longest copy from every position on
    mauve_score(samples, reference).value    from embeddings, each [n, H]

`m2s evaluate text` computes all of them for many files.
"""

from m2s.evaluation.text.adversaries import ADVERSARIES, Adversary, AdversarySource, make_adversary
from m2s.evaluation.text.frechet import embedding_distance
from m2s.evaluation.text.mauve import Mauve, divergence_frontier, frontier_area, mauve_score
from m2s.evaluation.text.metric import Column, MeasuredText, TextContext, TextMetric, TrainingText
from m2s.evaluation.text.registry import TEXT_METRICS
from m2s.evaluation.text.suffix_array import SuffixArray

__all__ = [
    "ADVERSARIES",
    "TEXT_METRICS",
    "Adversary",
    "AdversarySource",
    "Column",
    "Mauve",
    "MeasuredText",
    "SuffixArray",
    "TextContext",
    "TextMetric",
    "TrainingText",
    "divergence_frontier",
    "embedding_distance",
    "frontier_area",
    "make_adversary",
    "mauve_score",
]
