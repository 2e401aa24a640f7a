"""DFlash (arXiv 2602.06036): a block draft that fills all mask slots in one bidirectional pass over injected context K/V."""
