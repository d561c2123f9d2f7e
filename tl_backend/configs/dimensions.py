"""The named dimensions whose product a tuner searches, for each kernel and kind of device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tl_backend.configs.choice import Config, default_config
from tl_backend.configs.prefill_hopper import HopperPrefillConfig, hopper_refusal, packed_heads
from tl_backend.configs.tile import TileConfig, even_heads, heads_per_tile
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem

Dimensions = dict[str, tuple[Any, ...]]

# Blocks a multiprocessor that a decode aims for: it changes the launch, not the kernel.
BLOCKS = (1, 2, 3, 4)
# Where a tile's output is wider than this, the tiles of ``wide_tiles`` are all that compile.
WIDE_HEAD_DIM = 256


def dimensions(kind: str, problem: AttentionProblem, device: DeviceSpec) -> Dimensions:
    """Name -> values. Their product is what ``candidates`` gives."""
    if kind == "prefill" and hopper_refusal(problem, device) is None:
        return _hopper_family(problem)
    if device.vendor == "cpu":
        return _c_target()
    if problem.head_dim > WIDE_HEAD_DIM:
        return _wide(kind, device)
    if device.vendor == "amd":
        found = _amd(kind, problem, device)
    elif device.arch == "sm_90":
        found = _hopper(kind)
    else:
        found = _mma(kind)
    return found | {"blocks_per_multiprocessor": BLOCKS} if kind == "decode" else found


def candidates(kind: str, problem: AttentionProblem, device: DeviceSpec) -> Iterator[Config]:
    """Every config of the product, legal or not.

    Raises:
        UnsupportedError: no config serves the problem on this device.
    """
    default = default_config(kind, problem, device)
    named = dimensions(kind, problem, device)
    for values in itertools.product(*named.values()):
        chosen: dict[str, Any] = dict(zip(named, values, strict=True))
        if isinstance(default, HopperPrefillConfig):
            yield replace(default, **chosen)
            continue
        blocks = chosen.pop("blocks_per_multiprocessor", None)
        for heads in _heads(kind, problem, device, chosen["block_m"]):
            if isinstance(default, TileConfig):
                yield replace(default, heads_per_tile=heads, **chosen)
            else:
                tile = replace(default.tile, heads_per_tile=heads, **chosen)
                yield replace(default, tile=tile, blocks_per_multiprocessor=blocks or default.blocks_per_multiprocessor)


def _heads(kind: str, problem: AttentionProblem, device: DeviceSpec, block_m: int) -> tuple[int, ...]:
    """Query heads of a tile: as many as the packing allows, in even tiles, half of them, or one.

    A decode has one token a request: fewer heads than fit would read the keys again. AMD has enough dimensions.
    """
    if kind == "decode":
        return (even_heads(problem.group_size, block_m),)
    most = heads_per_tile(problem.group_size, block_m)
    if device.vendor == "amd":
        return (most,)
    return tuple(dict.fromkeys((most, even_heads(problem.group_size, block_m), max(1, most // 2), 1)))


def _c_target() -> Dimensions:
    """A few small tiles, so that a tuner can be tried on any machine; the C target ignores stages and threads."""
    return {"block_m": (16, 32), "block_n": (16, 32, 64), "num_stages": (0,), "threads": (1,)}


def _hopper_family(problem: AttentionProblem) -> Dimensions:
    if problem.is_quantized:
        return {
            "block_n": (64, 80, 96, 112, 128),
            "heads_per_tile": tuple(dict.fromkeys((packed_heads(problem.group_size), 1))),
            "q_stages": (1, 2),
            "narrow_stages": (1, 2),
            "converter_warps": (2, 4),
        }
    return {
        "block_n": (64, 80, 96, 112, 128, 160, 176),
        "warpgroups": (2, 3),
        "heads_per_tile": tuple(dict.fromkeys((packed_heads(problem.group_size), 1))),
        "num_stages": (2, 3),
        "q_stages": (1, 2),
        "q_in_registers": (False, True),
    }


def _hopper(kind: str) -> Dimensions:
    """The portable family there."""
    if kind == "decode":
        return {
            "block_m": (16, 32, 64),
            "block_n": (16, 32, 64, 128),
            "threads": (32, 64, 128),
            "num_stages": (1, 2, 3),
        }
    return {
        "block_m": (64, 128, 192, 256),
        "block_n": (16, 32, 64, 128),
        "threads": (128, 256, 384, 512),
        "num_stages": (1, 2, 3),
    }


def _mma(kind: str) -> Dimensions:
    """NVIDIA without WGMMA."""
    if kind == "decode":
        return {
            "block_m": (16, 32, 64),
            "block_n": (16, 32, 64, 128),
            "threads": (32, 64, 128),
            "num_stages": (1, 2),
        }
    return {
        "block_m": (32, 64, 128),
        "block_n": (16, 32, 64, 128),
        "threads": (64, 128, 256),
        "num_stages": (1, 2),
    }


def _amd(kind: str, problem: AttentionProblem, device: DeviceSpec) -> Dimensions:
    """``k_pack`` and ``coalesced_width`` change how LDS is read and filled, the last two which block takes what."""
    access: Dimensions = {"num_stages": (0, 1), "k_pack": (1, 2), "coalesced_width": (None, 4)}
    if kind == "decode":
        return {"block_m": (16, 32, 64), "block_n": (16, 32, 64, 128), "threads": (64, 128, 256)} | access
    # As many blocks as compute units, and twice as many.
    blocks = [max(1, waves * device.multiprocessors // problem.num_kv_heads) for waves in (1, 2)]
    return {
        "block_m": (32, 64, 128, 256),
        "block_n": (16, 32, 64, 128),
        "threads": (128, 256, 512),
        **access,
        "num_split_q": (0, *blocks),
        "rasterisation": (0, 1, 4),
    }


def _wide(kind: str, device: DeviceSpec) -> Dimensions:
    """Head sizes above 256, whose output fills the registers: few rows a thread, and columns that warps share."""
    if device.vendor == "amd":
        found = {
            "block_m": (16, 32, 64),
            "block_n": (16, 32, 64),
            "threads": (64, 128, 256),
            "num_stages": (0,),
            "splits_columns": (False,),
        }
    else:
        found = {
            "block_m": (16, 32, 64),
            "block_n": (16, 32, 64),
            "threads": (128, 256),
            "num_stages": (1,),
            "splits_columns": (True,),
        }
    return found | {"blocks_per_multiprocessor": BLOCKS} if kind == "decode" else found
