"""The parts of scripts/snapshot.py: what it records, how it writes values, and how it compares them."""
