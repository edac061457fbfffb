"""The NELBO of a data set, in bits per dimension, with the standard errors of its estimate.

found = dataset_nelbo(model, head, images.test, passes=4)
found.estimate("nelbo")        # nats per position
summarize(found)               # every term in bits and nats, as JSON can store it
"""

from m2s.evaluation.bpd.estimate import Estimate, student_t_quantile
from m2s.evaluation.bpd.examples import EvaluationSet, Shard
from m2s.evaluation.bpd.nelbo import IMPORTANCE, TERMS, DatasetNelbo, dataset_nelbo, integrand_curve
from m2s.evaluation.bpd.report import format_difference, format_table, plot_integrand, summarize
from m2s.evaluation.bpd.text import example_sizes, token_sizes, token_windows

__all__ = [
    "IMPORTANCE",
    "TERMS",
    "DatasetNelbo",
    "Estimate",
    "EvaluationSet",
    "Shard",
    "dataset_nelbo",
    "example_sizes",
    "format_difference",
    "format_table",
    "integrand_curve",
    "plot_integrand",
    "student_t_quantile",
    "summarize",
    "token_sizes",
    "token_windows",
]
