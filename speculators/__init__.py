"""Train draft models for speculative decoding on your own verifier; `serve` and `bench` are its two sibling packages."""

__version__ = "0.1.0"
