"""Row loss: score entropy of an unconstrained log-score."""

from m2s.ops.score_entropy.cpu import entropy_from_logs, row_scalars, unconstrained_score_entropy

__all__ = ["entropy_from_logs", "row_scalars", "unconstrained_score_entropy"]
