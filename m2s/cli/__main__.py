"""`python -m m2s.cli`, for where the `m2s` script is not on the path."""

from m2s.cli import main

main()
