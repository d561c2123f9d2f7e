"""Rows that are carried to devices nobody could measure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tables import LLAMA, make_row, make_table, regime
from tl_backend.configs.decode import DecodeChoice, default_decode_choice
from tl_backend.configs.identity import BY_NAME, spec_of
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.configs.rows import Modelled, Settled
from tl_backend.configs.tile import TileConfig
from tl_backend.errors import UnsupportedError
from tl_backend.tuner.modelled import carried

PREFILL = HopperPrefillConfig(block_n=96, warpgroups=2, heads_per_tile=4, num_stages=2, q_stages=2)
SMALL = TileConfig(block_m=16, block_n=64, heads_per_tile=4, num_stages=1, threads=32)
DECODE = DecodeChoice(tile=SMALL, blocks_per_multiprocessor=2)
PREFILL_ROW = make_row(at=regime("prefill", 4096), config=PREFILL)
DECODE_ROW = make_row(config=DECODE)
TABLE = make_table(
    PREFILL_ROW, DECODE_ROW, settled=(Settled(problem=PREFILL_ROW.problem, regime=regime("extend"), us=3.0),)
)


def test_the_same_chip_takes_every_row_and_no_finding_about_its_default() -> None:
    table = carried(TABLE, BY_NAME["nvidia_h100"])
    assert [(row.regime, row.config) for row in table.rows] == [(row.regime, row.config) for row in TABLE.rows]
    assert all(isinstance(row.provenance, Modelled) and "nvidia_h200" in row.provenance.reason for row in table.rows)
    assert table.settled == ()
    assert table.device == BY_NAME["nvidia_h100"]


def test_another_architecture_takes_what_runs_on_the_same_instructions() -> None:
    table = carried(TABLE, BY_NAME["nvidia_a100_80gb"])
    assert [row.config.values for row in table.rows] == [DECODE]
    assert "mma.sync" in table.rows[0].provenance.reason


def test_another_number_of_multiprocessors_is_another_device() -> None:
    table = carried(TABLE, BY_NAME["nvidia_h100_pcie"])
    assert [row.config.values for row in table.rows] == [DECODE]


def test_tiles_that_tma_copies_stay_at_home() -> None:
    page_128 = make_row(replace(LLAMA, page_size=128), config=DECODE)
    with pytest.raises(UnsupportedError, match="alike"):
        carried(make_table(page_128), BY_NAME["nvidia_a100_80gb"])


@pytest.mark.parametrize("device", ["amd_mi300x", "cpu"])
def test_other_vendors_take_nothing(device: str) -> None:
    with pytest.raises(UnsupportedError, match=f"tl-backend tune` on a {device}"):
        carried(TABLE, BY_NAME[device])


def test_what_the_device_cannot_hold_or_has_by_default_is_left_out() -> None:
    a100 = spec_of(BY_NAME["nvidia_a100_80gb"])
    large = replace(SMALL, block_n=128, num_stages=8)
    default = default_decode_choice(LLAMA, a100)
    at = [regime(context_len=keys) for keys in (1000, 2000, 5000)]
    configs = (replace(DECODE, tile=large), default, DECODE)
    rows = [make_row(at=where, config=config) for where, config in zip(at, configs, strict=True)]
    kept = carried(make_table(*rows), BY_NAME["nvidia_a100_80gb"]).rows
    assert [row.regime for row in kept] == [at[2]]


def test_a_modelled_row_is_not_carried_further() -> None:
    h100 = carried(TABLE, BY_NAME["nvidia_h100"])
    with pytest.raises(UnsupportedError, match="none of the 2 rows"):
        carried(h100, BY_NAME["nvidia_h100_nvl"])
