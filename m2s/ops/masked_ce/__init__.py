"""The cross-entropy of masked sites, for rows of posterior logits."""
