"""The tables in a launch: a user's row serves it, is compiled before it, and is named by what counts launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tables import make_row, make_table, regime
from tl_backend.configs.choice import default_config
from tl_backend.configs.decode import DecodeChoice, default_decode_choice
from tl_backend.configs.identity import BY_NAME
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.rows import Row
from tl_backend.configs.space import tile_of
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError, InvalidInputError
from tl_backend.ops import paged_attention, prepare
from tl_backend.ops.choices import chooser_for, tables_of
from tl_backend.ops.compiled import KernelCache, KernelKey
from tl_backend.ops.prepare import required_kernels
from tl_backend.telemetry import launches
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.store import Store

CPU = BY_NAME["cpu"]
SPEC = DeviceSpec.of(torch.device("cpu"))
PROBLEM = make_problem(4, 2, 32, 16)
TILE = dataclasses.replace(default_prefill_config(PROBLEM, SPEC), block_m=16, block_n=16, heads_per_tile=2)
DECODE = DecodeChoice(
    tile=dataclasses.replace(default_decode_choice(PROBLEM, SPEC).tile, block_n=16), blocks_per_multiprocessor=1
)
ROWS = (
    make_row(PROBLEM, regime("decode", 1, 40, 2), DECODE, CPU),
    make_row(PROBLEM, regime("extend", 6, 40, 1), TILE, CPU),
)


@pytest.fixture
def users_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes and promotes a user's table of the CPU; returns its label."""

    def promote(*rows: Row) -> str:
        store = Store(tmp_path)
        table = store.promote(CPU, store.write_generation(make_table(*rows, device=CPU)))
        monkeypatch.setenv("TL_BACKEND_TABLE_DIR", str(tmp_path))
        return table.label

    return promote


def attend(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> torch.Tensor:
    """One call on random data, the same at each."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-max(seq_lens) // 16)
    return paged_attention(
        torch.randn(sum(query_lens), 4, 32, generator=generator),
        torch.randn(len(seq_lens) * pages, 2, 16, 64, generator=generator),
        torch.arange(len(seq_lens) * pages, dtype=torch.int32).reshape(len(seq_lens), pages),
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        torch.tensor(seq_lens, dtype=torch.int32),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(seq_lens),
    )


def served(before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Launches since then, by kernel and source."""
    found: dict[str, dict[str, int]] = {}
    for kernel, sources in launches.rows().items():
        for source, count in sources.items():
            if more := count - before.get(kernel, {}).get(source, 0):
                found.setdefault(kernel, {})[source] = more
    return found


def test_a_launch_is_served_by_the_users_row_and_says_so(users_table: Callable[..., str]) -> None:
    wanted = [attend((1, 1), (40, 33)), attend((6,), (40,))]
    label = users_table(*ROWS)
    before = launches.rows()
    got = [attend((1, 1), (40, 33)), attend((6,), (40,))]
    assert served(before) == {"decode": {f"{label} row 1": 1}, "prefill": {f"{label} row 2": 1}}
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_what_a_row_asks_for_is_compiled_at_start_up(users_table: Callable[..., str]) -> None:
    default = required_kernels(PROBLEM, SPEC)
    users_table(*ROWS)
    keys = required_kernels(PROBLEM, SPEC)
    assert set(default) < set(keys)
    assert [key.config for key in keys if key.kind == "prefill"] == [default_config("prefill", PROBLEM, SPEC), TILE]
    assert {key.config.tile.block_n for key in keys if key.kind == "decode"} == {16, 32}


@pytest.mark.parametrize("row", ROWS, ids=["decode", "prefill"])
def test_a_row_whose_kernel_does_not_compile_is_skipped_and_a_default_is_not(
    users_table: Callable[..., str], monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    """CASES.md C14: a shipped row crashed the model."""
    label, broken = users_table(*ROWS), row.config.values
    tile = tile_of(broken)

    def refuse(keys: Iterable[KernelKey], **_: Any) -> dict[KernelKey, str]:
        bad = [k for k in keys if k.kind == row.regime.kind and tile in (k.config, getattr(k.config, "tile", None))]
        return dict.fromkeys(bad, "no such instruction")

    monkeypatch.setitem(prepare.__globals__, "load_kernels", refuse)
    monkeypatch.setitem(prepare.__globals__, "KERNELS", KernelCache())
    prepare([PROBLEM], torch.device("cpu"))
    number = ROWS.index(row) + 1
    choices = [chooser_for(PROBLEM, SPEC).choose(one.regime) for one in ROWS]
    assert choices[number - 1].source == f"family default, since {label} row {number} does not compile"
    assert choices[number - 1].config == default_config(row.regime.kind, PROBLEM, SPEC)
    assert choices[number % 2].source == f"{label} row {number % 2 + 1}"
    assert f"{label} row {number}: no such instruction" in launches.events()["skipped_rows"]
    tile = tile_of(default_config(row.regime.kind, PROBLEM, SPEC))
    with pytest.raises(EnvironmentProblemError, match="no such instruction"):
        prepare([PROBLEM], torch.device("cpu"))


def test_misses_are_counted_among_the_events(users_table: Callable[..., str]) -> None:
    users_table(ROWS[0])
    before = launches.events().get("misses", {})
    attend((6,), (40,))
    after = launches.events()["misses"]
    (missed,) = [what for what in after if after[what] != before.get(what, 0)]
    assert missed == "4/2 D32 float32 page 16 causal: extend, queries <= 16, keys <= 1024, requests <= 1"


def test_batch_invariance_has_one_config_for_every_batch(users_table: Callable[..., str]) -> None:
    users_table(*ROWS)
    chooser = chooser_for(PROBLEM, SPEC, batch_invariant=True)
    assert chooser.configs("prefill") == (default_config("prefill", PROBLEM, SPEC),)
    assert chooser.choose(ROWS[1].regime).source == "family default, for batch invariance"


def test_tables_can_be_switched_off(users_table: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    users_table(*ROWS)
    monkeypatch.setenv("TL_BACKEND_TABLES", "0")
    choice = chooser_for(PROBLEM, SPEC).choose(ROWS[0].regime)
    assert choice.source == "family default, as TL_BACKEND_TABLES=0 asks"
    monkeypatch.setenv("TL_BACKEND_TABLES", "off")
    with pytest.raises(InvalidInputError, match="TL_BACKEND_TABLES: got 'off'; 0 or 1"):
        chooser_for(PROBLEM, SPEC)


def test_tables_are_loaded_once_and_choosers_made_once(users_table: Callable[..., str], tmp_path: Path) -> None:
    label = users_table(*ROWS)
    assert chooser_for(PROBLEM, SPEC) is chooser_for(PROBLEM, SPEC)
    users_table(ROWS[1])  # Serves the processes that start from now on.
    assert chooser_for(PROBLEM, SPEC).choose(ROWS[0].regime).source == f"{label} row 1"
    assert tables_of(SPEC, tmp_path).tables[0].generation == 1
