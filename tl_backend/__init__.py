"""TileLang attention kernels as an out-of-tree attention backend for vLLM.

Importing this package imports neither torch, TileLang nor vLLM, and touches no GPU: an early TileLang import breaks
AITER on ROCm, and vLLM loads every plugin in every one of its processes.
"""

from tl_backend._version import __version__

__all__ = ["__version__"]
