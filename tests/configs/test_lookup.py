"""The look-up: whose row serves, what a miss costs, and that no file hurts."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tables import H200, LLAMA, make_row, make_table, regime, reseal
from tl_backend.configs import lookup
from tl_backend.configs.choice import FAMILY_DEFAULT, KINDS, default_config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.generations import ACTIVE, device_folder
from tl_backend.configs.identity import KNOWN, spec_of
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.lookup import Tables
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.configs.regime import Regime
from tl_backend.configs.rows import Row, Settled
from tl_backend.configs.space import space
from tl_backend.configs.table import Table, dump_table
from tl_backend.configs.tile import TileConfig
from tl_backend.configs.words import parse_problem
from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec

DEVICE = spec_of(H200)
# Two configs beside the default that an H200 runs.
OTHERS = {kind: space(kind, LLAMA, DEVICE).kept[1:3] for kind in KINDS}
PREFILL = regime("prefill", 2000, 2000)


class Log(logging.Handler):
    """Keeps lines. vLLM, where a test has imported it, keeps its loggers from the root that pytest listens at."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test says itself which table is shipped."""
    monkeypatch.setattr(lookup, "read_shipped", lambda identity: None)


@pytest.fixture
def log() -> Iterator[list[str]]:
    handler = Log()
    lookup.logger.addHandler(handler)
    yield handler.lines
    lookup.logger.removeHandler(handler)


@pytest.fixture
def counted() -> Counter[tuple[str, str]]:
    return Counter()


def load(*tables: Table, counted: Counter[tuple[str, str]] | None = None, device: DeviceSpec = DEVICE) -> Tables:
    count = Counter() if counted is None else counted
    return Tables(device, tables, count=lambda event, what: count.update([(event, what)]))


def counts(counted: Counter[tuple[str, str]], event: str) -> int:
    return sum(n for (name, _), n in counted.items() if name == event)


def promote(folder: Path, data: bytes, device=H200) -> Path:
    """A user's active table, as it lies on the disk."""
    where = device_folder(folder, device)
    where.mkdir(parents=True)
    (where / "0001.json").write_bytes(data)
    (where / ACTIVE).write_text("1\n")
    return where


def row(at: Regime, which: int = 0, problem=LLAMA) -> Row:
    return make_row(problem, at, OTHERS[at.kind][which])


def test_a_row_serves_its_regime_and_says_so(log: list[str]) -> None:
    table = make_table(row(PREFILL), row(regime(), 1)).with_generation(3)
    chooser = load(table).chooser(LLAMA)
    assert chooser.choose(regime()).config == OTHERS["decode"][1]
    assert chooser.choose(regime()).source == f"nvidia_h200 generation 3 ({table.content_hash[:8]}) row 2"
    assert chooser.choose(PREFILL).config == OTHERS["prefill"][0]
    assert chooser.choose(PREFILL) is chooser.choose(PREFILL)  # Nothing is made at a step.
    assert log == []


def test_configs_are_the_default_and_the_rows_without_repeats() -> None:
    rows = (row(regime()), row(regime(num_requests=99), 1), row(regime(context_len=9), 0), row(PREFILL))
    chooser = load(make_table(*rows)).chooser(LLAMA)
    default = {kind: default_config(kind, LLAMA, DEVICE) for kind in KINDS}
    assert chooser.configs("decode") == (default["decode"], *OTHERS["decode"])
    assert chooser.configs("prefill") == (default["prefill"], OTHERS["prefill"][0])


@pytest.mark.parametrize("tokens", [17, 128, 129, 8192])
def test_a_regime_beyond_the_rows_takes_the_default_and_no_neighbour(tokens: int) -> None:
    """CASES.md C13: rows for few tokens only; many take the default."""
    rows = [row(regime("extend", few, 9000)) for few in (1, 16)]
    chooser = load(make_table(*rows)).chooser(LLAMA)
    for few in (1, 2, 4, 8, 16):
        assert chooser.choose(regime("extend", few, 9000)).config == OTHERS["prefill"][0]
    choice = chooser.choose(regime("extend", tokens, 9000))
    assert (choice.config, choice.source) == (default_config("prefill", LLAMA, DEVICE), FAMILY_DEFAULT)


@pytest.mark.parametrize(
    "change",
    [
        {"num_q_heads": 64},
        {"num_kv_heads": 4},
        {"page_size": 128},
        {"window": 100},
        {"soft_cap": 50.0},
        {"causal": False},
    ],
    ids=str,
)
def test_another_problem_takes_the_default_and_no_neighbour(change: dict) -> None:
    """CASES.md C9, C13."""
    tables = load(make_table(row(regime())))
    other = dataclasses.replace(LLAMA, **change)
    choice = tables.chooser(other).choose(regime())
    assert (choice.config, choice.source) == (default_config("decode", other, DEVICE), FAMILY_DEFAULT)


def test_another_device_takes_the_default_and_no_neighbour(tmp_path: Path, log: list[str]) -> None:
    """CASES.md C16: the table of another count, memory or architecture is not looked at, nor taken if it lies there."""
    promote(tmp_path, dump_table(make_table(row(regime()))))
    for identity in KNOWN:
        device = spec_of(identity)
        if identity == H200:
            continue
        choice = Tables.load(device, tmp_path).chooser(LLAMA).choose(regime())
        assert (choice.config, choice.source) == (default_config("decode", LLAMA, device), FAMILY_DEFAULT)
    slice_of_it = dataclasses.replace(DEVICE, multiprocessors=16)
    promote(tmp_path, dump_table(make_table(row(regime()))), device=Tables.load(slice_of_it, None).identity)
    assert Tables.load(slice_of_it, tmp_path).chooser(LLAMA).choose(regime()).source == FAMILY_DEFAULT
    assert "a table of nvidia_h200 (nvidia, sm_90, 132 multiprocessors); this device is nvidia_sm_90_16" in log[-1]


def test_a_misses_line_has_the_reason_and_the_command_once(log: list[str], counted: Counter[tuple[str, str]]) -> None:
    """And each miss is counted, over and over."""
    tables = load(make_table(row(regime())), counted=counted)
    chooser, far = tables.chooser(LLAMA), regime(context_len=10**5)
    same_class = dataclasses.replace(LLAMA, page_size=48)
    for _ in range(3):
        chooser.choose(far)
        tables.chooser(same_class).choose(far)
    (line,) = log
    assert "no row of 32/8 D128 bfloat16 page 16 causal in this regime: decode, keys > 16384, requests <= 8" in line
    command = line.partition("`tl-backend tune --problem ")[2].partition("`")[0]
    assert parse_problem(command) == LLAMA
    assert counted == {("misses", "32/8 D128 bfloat16 page 16 causal: decode, keys > 16384, requests <= 8"): 6}
    chooser.choose(regime(num_requests=99))
    assert len(log) == 2


def test_a_problem_without_any_row_is_one_line(log: list[str], counted: Counter[tuple[str, str]]) -> None:
    chooser = load(make_table(row(regime())), counted=counted).chooser(dataclasses.replace(LLAMA, soft_cap=30.0))
    for requests in (1, 5, 50, 500):
        chooser.choose(regime(num_requests=requests))
        chooser.choose(regime("prefill", 100, 100, requests))
    assert len(log) == 1
    assert (
        "no row of 32/8 D128 bfloat16 page 16 causal soft cap. `tl-backend tune --problem 32/8,D128,page16," in log[0]
    )
    assert counts(counted, "misses") == 8


def test_where_the_default_was_the_best_is_no_miss(log: list[str], counted: Counter[tuple[str, str]]) -> None:
    table = make_table(settled=(Settled(problem=ProblemKey.of(LLAMA), regime=regime(), us=5.0),))
    choice = load(table, counted=counted).chooser(LLAMA).choose(regime())
    assert choice.config == default_config("decode", LLAMA, DEVICE)
    assert choice.source == f"family default, the best that nvidia_h200 ({table.content_hash[:8]}) found"
    assert (log, counted) == ([], Counter())


def test_where_another_familys_default_was_the_best_is_a_miss(
    log: list[str], counted: Counter[tuple[str, str]]
) -> None:
    """Entries from before Hopper's family say nothing of it: a search would not have settled there today."""
    at = {family: regime("prefill", length, length) for family, length in (("portable", 100), ("hopper", 2000))}
    settled = tuple(Settled(problem=ProblemKey.of(LLAMA), regime=at[family], us=5.0, family=family) for family in at)
    tables = load(make_table(row(regime()), settled=settled), counted=counted)
    chooser = tables.chooser(LLAMA)
    assert chooser.choose(at["portable"]).source == FAMILY_DEFAULT
    assert "the best that nvidia_h200" in chooser.choose(at["hopper"]).source
    ((_, regime_of_it),) = tables.skipped
    assert regime_of_it == at["portable"]
    assert counts(counted, "skipped_rows") == counts(counted, "misses") == 1
    assert all("the portable family's default was the best for prefill" in line for line in log)


def test_the_users_table_comes_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = regime(num_requests=99)
    shipped = make_table(row(regime(), 0), row(other, 0))
    monkeypatch.setattr(lookup, "read_shipped", lambda identity: shipped if identity == H200 else None)
    promote(tmp_path, dump_table(make_table(row(regime(), 1)).with_generation(1)))
    chooser = Tables.load(DEVICE, tmp_path).chooser(LLAMA)
    assert [chooser.choose(at).config for at in (regime(), other)] == [OTHERS["decode"][1], OTHERS["decode"][0]]
    assert "generation 1" in chooser.choose(regime()).source
    assert chooser.choose(other).source == f"{shipped.label} row 2"
    without = Tables.load(DEVICE, None).chooser(LLAMA)
    assert without.choose(regime()).config == OTHERS["decode"][0]


@pytest.mark.parametrize("arch", [*SHARED_MEMORY_PER_BLOCK, "c"])
@pytest.mark.parametrize("name", ["", "A GPU that nobody knows"])
def test_an_unknown_device_costs_one_line_in_all(
    arch: str, name: str, tmp_path: Path, log: list[str], counted: Counter[tuple[str, str]]
) -> None:
    """CASES.md C11, C12: whatever is asked, of however many layers, and the default fits."""
    device = dataclasses.replace(DeviceSpec.absent(arch), name=name)
    tables = Tables.load(device, tmp_path, count=lambda event, what: counted.update([(event, what)]))
    for window in (None, 100, 5000):
        problem = dataclasses.replace(LLAMA, window=window)
        for at in (regime(), regime(num_requests=99), PREFILL):
            choice = tables.chooser(problem).choose(at)
            assert choice.config.illegal_reason(problem, device) is None
            assert choice.source == FAMILY_DEFAULT
    assert len(log) == (1 if device.is_gpu else 0)  # Of the CPU nobody expects a table: that line is no warning.
    assert all(f"driver's name {name!r}: every launch takes the family default" in line for line in log)
    assert counts(counted, "misses") == 9


BIG = TileConfig(block_m=128, block_n=128, heads_per_tile=4, num_stages=4, threads=256)
HOPPER = HopperPrefillConfig(block_n=128, warpgroups=2, heads_per_tile=4, num_stages=2, q_stages=2)


def decode(**changes: int) -> Row:
    """One whose tile is ``BIG``, changed."""
    return make_row(config=DecodeChoice(tile=dataclasses.replace(BIG, **changes), blocks_per_multiprocessor=2))


def hopper(**changes: int) -> Row:
    return make_row(at=PREFILL, config=dataclasses.replace(HOPPER, **changes))


FOREIGN = {"family": "hopper", "kind": "decode", "pingpong": True}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (decode(), r"needs \d+ bytes of shared memory; sm_90 has 232448"),
        (decode(num_stages=1, threads=384), "rule: rows of warps"),
        (decode(num_stages=1, threads=7), "no multiple of a wave of 32"),
        (decode(num_stages=1, block_n=40), "40 is not a multiple of 16"),
        (decode(num_stages=1, heads_per_tile=8), "8 heads in a tile of"),
        (hopper(num_stages=4), r"needs \d+ bytes of shared memory; sm_90 has 232448"),
        (hopper(block_n=176, q_stages=1), "196 registers a thread for output, scores and weights; 192 fit"),
        (hopper(heads_per_tile=3), "3 heads in a tile of a group of 4"),
        # What an older version has tuned, against its own default.
        (make_row(at=PREFILL, config=BIG), "where Hopper's family takes head size 128 .rule: family"),
        (make_row(at=regime(), config=OTHERS["prefill"][0]), "a config of the prefill for decode"),
        (
            make_row(at=regime(), config=DecodeChoice(tile=OTHERS["decode"][0].tile, blocks_per_multiprocessor=99)),
            "99 blocks a multiprocessor; 1 to 8",
        ),
        (FOREIGN, r"kernel family 'hopper' \('decode'\) is not known here"),
    ],
    ids=[
        "shared memory",
        "layout",
        "threads",
        "rows",
        "heads",
        "Hopper memory",
        "Hopper registers",
        "Hopper heads",
        "portable",
        "kind",
        "blocks",
        "family",
    ],
)
def test_a_row_that_the_device_cannot_run_is_skipped_when_it_is_loaded(
    bad: Row | dict, reason: str, tmp_path: Path, log: list[str], counted: Counter[tuple[str, str]]
) -> None:
    """CASES.md C14: the default serves in its place, it is counted with its reason, and the other rows stay."""
    good = row(regime(num_requests=99))
    document = json.loads(dump_table(make_table(good, bad if isinstance(bad, Row) else row(regime()))))
    if not isinstance(bad, Row):
        document["rows"][1]["config"] = bad
    promote(tmp_path, reseal(document))
    tables = Tables.load(DEVICE, tmp_path, count=lambda event, what: counted.update([(event, what)]))
    chooser, at = tables.chooser(LLAMA), bad.regime if isinstance(bad, Row) else regime()
    for _ in range(2):
        choice = chooser.choose(at)
        assert (choice.config, choice.source) == (default_config(at.kind, LLAMA, DEVICE), FAMILY_DEFAULT)
    assert chooser.choose(good.regime).config == OTHERS["decode"][0]
    assert len(chooser.configs(at.kind)) == (2 if at.kind == "decode" else 1)
    ((event, what),) = [key for key in counted if key[0] == "skipped_rows"]
    assert counted[event, what] == 1
    loaded, missed = log
    pattern = re.compile(rf"row 2: .*{reason}")
    for text in (what, loaded, missed):
        assert pattern.search(text), text
    assert "`tl-backend tune --problem 32/8,D128,page16,bfloat16`" in missed


GOOD = dump_table(make_table(row(regime())))


def test_a_bad_file_costs_one_line_and_one_count(
    tmp_path: Path, log: list[str], counted: Counter[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES.md C15: whatever is there in a table's place; the shipped table serves on."""
    shipped = make_table(row(PREFILL))
    monkeypatch.setattr(lookup, "read_shipped", lambda identity: shipped)

    def write(name: str, content: bytes) -> None:
        (promote(tmp_path / name, GOOD) / "0001.json").write_bytes(content)

    write("empty", b"")
    write("truncated", GOOD[: len(GOOD) // 2])
    write("bom", b"\xef\xbb\xbf" + GOOD)
    write("changed", GOOD.replace(b"50.5", b"50.25", 1))
    write("huge", b" " * (5 << 20))
    (promote(tmp_path / "folder", GOOD) / "0001.json").unlink()
    (device_folder(tmp_path / "folder", H200) / "0001.json").mkdir()
    path = promote(tmp_path / "loop", GOOD) / "0001.json"
    path.unlink()
    path.symlink_to(path)
    (promote(tmp_path / "gone", GOOD) / "0001.json").unlink()
    (promote(tmp_path / "no number", GOOD) / ACTIVE).write_text("two\n")
    (promote(tmp_path / "active folder", GOOD) / ACTIVE).unlink()
    (device_folder(tmp_path / "active folder", H200) / ACTIVE).mkdir()
    (tmp_path / "file").write_bytes(GOOD)
    cases = [path for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert len(cases) == 10
    for folder in cases:
        log.clear()
        counted.clear()
        tables = Tables.load(DEVICE, folder, count=lambda event, what: counted.update([(event, what)]))
        assert tables.chooser(LLAMA).choose(PREFILL).source == f"{shipped.label} row 1"
        (line,) = log
        assert str(folder) in line
        assert counts(counted, "bad_tables") == 1
        assert len(tables.bad_files) == 1
    assert Tables.load(DEVICE, tmp_path / "file").tables == (shipped,)  # No folder at all is no fault.


def test_without_any_good_table_a_bad_one_is_the_only_line(tmp_path: Path, log: list[str]) -> None:
    promote(tmp_path, b"{}")
    chooser = Tables.load(DEVICE, tmp_path).chooser(LLAMA)
    for at in (regime(), PREFILL):
        assert chooser.choose(at).source == FAMILY_DEFAULT
    (line,) = log
    assert "schema_version None" in line


def test_shipped_tables_are_whole_and_run_on_their_devices() -> None:
    """CASES.md C14: every shipped row is one that its device can run."""
    for identity in KNOWN:
        tables = Tables.load(spec_of(identity), None)
        assert (tables.bad_files, tables.skipped) == ((), {})
