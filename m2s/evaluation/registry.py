"""Metrics by name. A plugin registers its own metric with one line:

m2s.evaluation.METRICS.add("my_metric", my_metric)
"""

from typing import Any, Protocol

from jaxtyping import Integer
from torch import Tensor

from m2s.evaluation.bpd.examples import EvaluationSet
from m2s.evaluation.ngrams import ngrams
from m2s.evaluation.pixels import pixels
from m2s.hub import Checkpoint
from m2s.registry import Registry


class Metric(Protocol):
    """A function that measures samples, or a model.

    A metric ignores the arguments that it does not need, and raises `m2s.errors.UserError` where one that it needs is None.

    Example:
        >>> def mean_token(samples, reference=None, checkpoint=None, **options):
        ...     means = samples.double().mean(1)
        ...     return {"mean_token": {"value": float(means.mean()), "error": float(means.std() / len(means) ** 0.5)}}
        >>> m2s.evaluation.METRICS.add("mean_token", mean_token)
    """

    def __call__(
        self,
        samples: Integer[Tensor, "n L"] | None,
        reference: EvaluationSet | None = None,
        checkpoint: Checkpoint | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Compute the metric.

        Args:
            samples: The tokens of samples, [n, L]; None for a metric of a model.
            reference: Held-out data.
            checkpoint: The model, with its head, tokenizer and the description of its data.
            **options: The options of the metric.

        Returns:
            What JSON can store. A measured value is {"value": ..., "error": ...}, with its standard error or None.
        """


METRICS: Registry[Metric] = Registry("metric")
"""Every registered metric. The built-in ones are added below."""

METRICS.add("ngrams", ngrams)
METRICS.add("pixels", pixels)
