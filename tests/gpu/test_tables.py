"""The programs that check and compare tables on a GPU, tried on the C target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu import table_rows, two_tunings
from tests.tables import make_row, make_table, regime
from tl_backend.configs.choice import default_config
from tl_backend.configs.identity import BY_NAME, spec_of
from tl_backend.configs.rows import Settled
from tl_backend.configs.table import Table, dump_table
from tl_backend.testing.cases import make_problem

CPU = BY_NAME["cpu"]
PROBLEM = make_problem(2, 1, 32, 16)
DECODE = default_config("decode", PROBLEM, spec_of(CPU))
OTHER = replace(DECODE, tile=replace(DECODE.tile, block_n=16))
AT = regime("decode", 1, 1000, 1)
ROW = make_row(PROBLEM, AT, OTHER, CPU)


@pytest.fixture
def write(tmp_path: Path):
    def path(name: str, table: Table) -> str:
        (tmp_path / name).write_bytes(dump_table(table))
        return str(tmp_path / name)

    return path


def test_every_row_is_checked_and_an_empty_table_is_no_success(write, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert table_rows.main([write("a", make_table(ROW, device=CPU)), "--device", "cpu", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert (document["configs"], document["checks"], document["missed"]) == (1, 3, 0)
    assert all("block_n=16" in row["case"] for row in document["rows"])
    assert table_rows.main([write("b", make_table(device=CPU)), "--device", "cpu"]) == 1


def test_two_tables_are_compared_where_both_have_an_entry(write, tmp_path: Path) -> None:
    settled = Settled(problem=ROW.problem, regime=AT, us=3.0)
    a, b = write("a", make_table(ROW, device=CPU)), write("b", make_table(device=CPU, settled=(settled,)))
    out = tmp_path / "out.json"
    assert two_tunings.main([a, a, "--device", "cpu", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["same"] == 1
    two_tunings.main([a, b, "--device", "cpu", "--out", str(out)])  # Which is faster is not for a test to say.
    (row,) = json.loads(out.read_text())["rows"]
    assert not row["same"]
    assert row["b_times_a"]["low"] <= row["b_times_a"]["median"] <= row["b_times_a"]["high"]
    assert two_tunings.main([write("c", make_table(device=CPU)), a, "--device", "cpu"]) == 1
