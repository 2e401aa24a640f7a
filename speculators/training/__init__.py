"""The training loop and what surrounds it. Nothing in here knows an algorithm by name."""
