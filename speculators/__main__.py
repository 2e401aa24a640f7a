"""`python -m speculators`, which is what torchrun starts."""

from speculators.cli import main

main()
