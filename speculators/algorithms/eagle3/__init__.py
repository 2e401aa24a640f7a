"""EAGLE-3 (arXiv 2503.01840): a one-layer draft that feeds its own output back, trained by unrolling that chain."""
