"""Audit of scores: does every score that a sampler uses have a posterior? It is counted at every site and step.

    found = m2s.audit(model, head, shape=(128, 512))
    print(found)                              # the fractions of the four classes
    found.overall().before.classes            # outside the box, material, boundary, realizable
    found.summary()                           # all counts, step by step, as JSON can store them

The run itself is not changed. Each score is examined as the sampler gets it, and again after projection. Only sums are stored,
so memory does not grow with the number of samples. Sites that no transition leads into (an unmasked site under absorbing noise)
have no score that the sampler uses, and are not counted.
"""

from m2s.evaluation.audit.auditor import ROUNDING, TOLERANCE, Audit
from m2s.evaluation.audit.run import audit, audit_parts, audit_sampling, check_auditable
from m2s.evaluation.audit.stats import Counts, LogHistogram, StepStats, merge_stats, stats_from_json

__all__ = [
    "ROUNDING",
    "TOLERANCE",
    "Audit",
    "Counts",
    "LogHistogram",
    "StepStats",
    "audit",
    "audit_parts",
    "audit_sampling",
    "check_auditable",
    "merge_stats",
    "stats_from_json",
]
