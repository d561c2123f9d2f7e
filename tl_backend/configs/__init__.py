"""Configs: what a tuner may choose for a kernel, with its cost in shared memory. Pure Python: no torch, no TileLang."""
