"""All that knows vLLM: the entry point, the backend, its metadata builder and its implementation.

Importing this package imports neither torch, TileLang nor vLLM.
"""
