"""Every problem that is accepted has a legal prefill and decode tile on every architecture."""

from __future__ import annotations

import pytest

from tl_backend.configs.decode import default_decode_tile
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec
from tl_backend.problem import SUPPORTED_HEAD_DIMS
from tl_backend.testing.cases import make_problem

ARCHES = [*SHARED_MEMORY_PER_BLOCK, "c"]
RATIOS = (1, 2, 3, 5, 7, 8, 12, 24, 71)
PAGES = (16, 32, 48, 64, 96, 128, 272, 528, 544, 672, 784, 1152, 1280, 2112, 4192, 4352)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("default", [default_prefill_config, default_decode_tile])
def test_every_problem_has_a_legal_tile(arch: str, default) -> None:
    device = DeviceSpec.absent(arch)
    for head_dim in SUPPORTED_HEAD_DIMS:
        for page_size in PAGES:
            for ratio in RATIOS:
                problem = make_problem(ratio, 1, head_dim, page_size, dtype=device.dtypes[-1])
                tile = default(problem, device)
                assert tile.illegal_reason(problem, device) is None
                assert tile.tokens_per_tile >= 1, "CASES.md A18: a tile holds no token"
                if device.is_gpu:
                    assert tile.threads % device.wave_size == 0
