"""Train draft models for speculative decoding on your verifier; `serve` and `bench` are the two sibling packages."""

__version__ = "0.1.0"
