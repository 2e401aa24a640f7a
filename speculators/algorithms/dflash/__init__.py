"""DFlash (arXiv 2602.06036): fills all mask slots of a block in one bidirectional pass over injected context K/V."""
