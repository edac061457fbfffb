"""Row loss: score entropy of an exit rate and a jump distribution that are predicted separately."""

from m2s.ops.factorized_entropy.cpu import row_scalars

__all__ = ["row_scalars"]
