"""Every kernel that a shipped table asks for: generated for its device, with the shared memory that its config says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tl_backend.configs.generations import read_shipped
from tl_backend.configs.identity import KNOWN, spec_of
from tl_backend.configs.space import tile_of
from tl_backend.ops.codegen import generate
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.prefill import prefill_key


def kernels() -> list[KernelKey]:
    """Without repeats: devices of one architecture have the same code, and a decode's pieces only store otherwise."""
    found: dict[KernelKey, None] = {}
    for identity in KNOWN:
        table = read_shipped(identity)
        device = replace(spec_of(identity), name=identity.arch)
        for row in table.rows if table else ():
            problem, config = row.problem.representative(), row.config.values
            assert config is not None
            if row.regime.kind == "decode":
                found[decode_keys(problem, tile_of(config), device, split=True)[0]] = None
            else:
                found[prefill_key(problem, tile_of(config), device)] = None
    return list(found)


KERNELS = kernels()


@pytest.mark.parametrize("key", KERNELS, ids=[f"{number}-{key.device.arch}" for number, key in enumerate(KERNELS)])
def test_a_shipped_row_generates_and_fits(key: KernelKey) -> None:
    """CASES.md C14: a shipped tuned table crashed the model."""
    tile = getattr(key.config, "tile", key.config)
    code = generate(key)
    assert code.shared_memory == tile.shared_memory(key.problem, key.device) <= key.device.shared_memory_per_block


def test_there_are_some_of_both_kernels() -> None:
    assert {key.kind for key in KERNELS} == {"prefill_hopper", "decode"}
