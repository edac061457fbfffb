"""The NELBO of a data set, in bits per dimension, with the standard errors of its estimate.

found = dataset_nelbo(model, head, images.test, passes=4)
found.estimate("bound")        # nats per site
summary(found)                 # every term in bits and nats, as JSON can store it
"""

from m2s.evaluation.bpd.estimate import Estimate, student
from m2s.evaluation.bpd.examples import EvaluationSet, Shard
from m2s.evaluation.bpd.nelbo import IMPORTANCE, TERMS, DatasetNelbo, curve, dataset_nelbo
from m2s.evaluation.bpd.report import difference, draw, summary, table
from m2s.evaluation.bpd.text import measured, sizes, windows

__all__ = [
    "IMPORTANCE",
    "TERMS",
    "DatasetNelbo",
    "Estimate",
    "EvaluationSet",
    "Shard",
    "curve",
    "dataset_nelbo",
    "difference",
    "draw",
    "measured",
    "sizes",
    "student",
    "summary",
    "table",
    "windows",
]
