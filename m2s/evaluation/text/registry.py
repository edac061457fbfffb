"""Metrics of text by name. A plugin registers its own with one line, and `m2s evaluate text` then computes it:

m2s.evaluation.TEXT_METRICS.add("my_metric", TextMetric(measure, columns))
"""

from m2s.evaluation.text.frechet import FRECHET
from m2s.evaluation.text.mauve import MAUVE
from m2s.evaluation.text.metric import TextMetric
from m2s.evaluation.text.novelty import NOVELTY
from m2s.evaluation.text.perplexity import PERPLEXITY
from m2s.evaluation.text.repetition import REPETITION
from m2s.evaluation.text.vocabulary import VOCABULARY
from m2s.registry import Registry

TEXT_METRICS: Registry[TextMetric] = Registry("metric of text")
"""Every metric of `m2s evaluate text`. The built-in ones are added below."""

TEXT_METRICS.add("perplexity", PERPLEXITY)
TEXT_METRICS.add("mauve", MAUVE)
TEXT_METRICS.add("frechet", FRECHET)
TEXT_METRICS.add("repetition", REPETITION)
TEXT_METRICS.add("novelty", NOVELTY)
TEXT_METRICS.add("vocabulary", VOCABULARY)
