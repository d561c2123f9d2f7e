"""Configs of the copy that measures a device's memory."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.device import DeviceSpec

WORD_BYTES = 4
# One access of a thread, the widest that a GPU has.
VECTOR_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class CopyProblem:
    """A copy of any number of words. Attributes: dtype: a word's."""

    dtype: str = "int32"


@dataclass(frozen=True, kw_only=True)
class CopyConfig:
    """What a block copies.

    Attributes:
        threads: of a block.
        vectors: of 16 bytes that a thread reads before it writes them: bytes in flight.
    """

    threads: int
    vectors: int

    @property
    def words(self) -> int:
        """Words of a block."""
        return self.threads * self.vectors * VECTOR_BYTES // WORD_BYTES


def copy_configs(device: DeviceSpec) -> tuple[CopyConfig, ...]:
    """A short list: a ceiling is the best that any of them reaches."""
    if not device.is_gpu:
        return (CopyConfig(threads=1, vectors=256),)  # A page of 4 KiB.
    return tuple(CopyConfig(threads=threads, vectors=vectors) for threads, vectors in _SHAPES)


# (threads, vectors): 16 KiB a block in three ways, and 32 KiB.
_SHAPES = ((256, 4), (512, 2), (1024, 1), (256, 8))
