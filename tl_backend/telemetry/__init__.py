"""What this package did, counted: for the demo, the tests and the sidecar.

Imports neither torch, TileLang nor vLLM.
"""
