"""Row loss: cross-entropy at the clean token, with a weight for each row."""
