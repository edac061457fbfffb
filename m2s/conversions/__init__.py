"""Exact conversions between posterior, leave-one-out distribution, score and reverse rate, and one reverse step of each."""
