"""The fault campaign: kills, failing calls, damaged and hostile input, extreme arguments.

`python -m tests.faults --minutes 30` runs the long version, `--short` the one of `make test`, and `--case ID` repeats a case.
One process imports everything and runs each command once. Every case is a fork of it, and so takes a fraction of a second.
"""
