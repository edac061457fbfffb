"""Score entropy of a free log-score, for rows of log-scores."""
