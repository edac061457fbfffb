"""Row loss: cross-entropy of masked positions, for rows of posterior logits (Theorem 4.6)."""
