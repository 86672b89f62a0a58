"""Golden values, read and compared as upstream does but failing closed, and the parity of two runs' curves."""
