"""Options of a tile that change which block takes which work, on the C target, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tl_backend.configs.choice import FixedChooser
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.ops import workspace
from tl_backend.testing.cases import Case, make_problem
from tl_backend.testing.poison import check_attention

CPU = torch.device("cpu")
C = DeviceSpec.absent("c")
# 3 kv heads, and two tiles of a kv head's 5 query heads: 6 lanes.
PROBLEM = make_problem(15, 3, 32, 16)
TILE = replace(default_prefill_config(PROBLEM, C), block_m=16, heads_per_tile=3)
# Work lists of 26 items, of one, and of several requests of which some have no token.
CASES = [
    Case(query_lens=(70, 3, 55), seq_lens=(90, 3, 155)),
    Case(query_lens=(4,), seq_lens=(40,)),
    Case(query_lens=(2, 0, 17, 0), seq_lens=(20, 0, 17, 9)),
]


def check(monkeypatch: pytest.MonkeyPatch, tile: TileConfig, case: Case) -> None:
    assert tile.illegal_reason(PROBLEM, C) is None
    chooser = FixedChooser(PROBLEM, C, prefill=tile)
    monkeypatch.setattr(workspace, "chooser_for", lambda *args, **kwargs: chooser)
    check_attention(PROBLEM, case, CPU)


# A block for all, turns that leave a rest, turns that leave none, and more blocks than work.
@pytest.mark.parametrize("num_split_q", [1, 3, 13, 100])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_that_walk_several_items(monkeypatch, num_split_q: int, case: Case) -> None:
    check(monkeypatch, replace(TILE, num_split_q=num_split_q), case)


# Panels of one lane, panels that divide the six lanes, and panels that do not.
@pytest.mark.parametrize("rasterisation", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_panels_of_lanes(monkeypatch, rasterisation: int, case: Case) -> None:
    check(monkeypatch, replace(TILE, rasterisation=rasterisation), case)
