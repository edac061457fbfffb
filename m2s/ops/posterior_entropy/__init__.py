"""Row loss: score entropy of posterior logits through the bridge of a rank-one process."""

from m2s.ops.posterior_entropy.cpu import posterior_score_entropy, row_scalars

__all__ = ["posterior_score_entropy", "row_scalars"]
