"""Score entropy through the rank-one bridge, for rows of posterior logits."""
