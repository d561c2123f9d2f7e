"""The file format of tables: what was written comes back, and everything else is one clear error."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.tables import DAY, H200, LLAMA, MEASURED, make_row, make_table, regime, reseal
from tl_backend.configs.choice import KINDS, default_config
from tl_backend.configs.generations import read_shipped
from tl_backend.configs.identity import KNOWN, DeviceIdentity, spec_of
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.models import problems
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.rows import Measured, Modelled, Ratio, Row, Settled, stored
from tl_backend.configs.table import MAX_TABLE_BYTES, Provenance, Table, Toolchain, dump_table, parse_table, read_table
from tl_backend.errors import TableError
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.regimes import cases

# One of each family and kind.
PORTABLE = default_prefill_config(LLAMA, spec_of(H200))
ROWS = (
    make_row(at=regime("decode")),
    make_row(at=regime("prefill", 2000, 2000), config=PORTABLE),
    make_row(at=regime("extend", 2000, 5000)),
)
SETTLED = Settled(problem=ProblemKey.of(LLAMA), regime=regime("extend", 100, 5000), us=12.5)
TABLE = make_table(*ROWS, settled=(SETTLED,))
DATA = dump_table(TABLE)
FIGURES = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def measured(draw: st.DrawFn) -> Measured:
    low, median, high = sorted([draw(FIGURES), draw(FIGURES), draw(FIGURES)])
    peer = draw(st.none() | TEXTS)
    return Measured(
        us=draw(FIGURES),
        default_us=draw(FIGURES),
        times_default=Ratio(low=low, median=median, high=high),
        peer=peer,
        peer_us=None if peer is None else draw(FIGURES),
        date=draw(st.dates()),
        gpu=draw(TEXTS),
        driver=draw(TEXTS),
    )


@st.composite
def tables(draw: st.DrawFn) -> Table:
    device = draw(st.sampled_from(sorted(KNOWN, key=str)))
    at = st.builds(
        regime,
        st.sampled_from(("prefill", "extend", "decode", "verify")),
        st.integers(1, 5000),
        st.integers(1, 50000),
        st.integers(1, 99),
    )
    problem = st.builds(
        make_problem, st.just(16), st.sampled_from((1, 4, 16)), st.sampled_from((64, 128)), st.just(16),
        window=st.sampled_from((None, 100, 9999)), dtype=st.just("bfloat16"),
    )  # fmt: skip
    pairs = draw(st.lists(st.tuples(problem, at), max_size=4, unique_by=lambda pair: (ProblemKey.of(pair[0]), pair[1])))
    entries: list[Row | Settled] = []
    for where, when in pairs:
        fields: dict[str, Any] = {"problem": ProblemKey.of(where), "regime": when}
        if draw(st.booleans()):
            known = draw(measured() | TEXTS.filter(len).map(lambda text: Modelled(reason=text)))
            config = stored(default_config(when.kind, where, spec_of(device)))
            entries.append(Row(**fields, config=config, provenance=known))
        else:
            entries.append(Settled(**fields, us=draw(FIGURES)))
    return Table.make(
        device=device,
        toolchain=Toolchain(tilelang=draw(TEXTS), torch=draw(TEXTS), hip=draw(st.none() | TEXTS)),
        provenance=Provenance(date=draw(st.dates()), gpu=draw(TEXTS), driver=draw(TEXTS), tool_version="0"),
        rows=tuple(entry for entry in entries if isinstance(entry, Row)),
        settled=tuple(entry for entry in entries if isinstance(entry, Settled)),
        generation=draw(st.integers(0, 10**6)),
    )


@given(tables())
def test_a_table_comes_back_from_its_file(table: Table) -> None:
    assert parse_table(dump_table(table), "table", device=table.device) == table


@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_a_byte_that_changes_is_seen_or_means_the_same(place: int, byte: int) -> None:
    changed = DATA[:place] + bytes([byte]) + DATA[place + 1 :]
    try:
        table = parse_table(changed, "file.json")
    except TableError as error:
        assert str(error).startswith("table file.json: got ")
    else:
        assert table == TABLE


@given(st.integers(0, len(DATA) - 2))
def test_a_truncated_file_is_an_error(length: int) -> None:
    with pytest.raises(TableError, match=r"table file\.json: got no "):
        parse_table(DATA[:length], "file.json")


def config(document: Any) -> Any:
    return document["rows"][1]["config"]["values"]


def hopper(document: Any) -> Any:
    return document["rows"][2]["config"]["values"]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "negative tile": (lambda d: config(d).update(block_m=-64), r"rows\[2\].*; block_m is -64; 1 to 65536"),
    "no tile": (lambda d: config(d).update(block_n=0), r"block_n is 0; 1 to"),
    "huge tile": (lambda d: config(d).update(threads=10**9), r"threads is 1000000000; 1 to"),
    "decode's tile": (lambda d: d["rows"][0]["config"]["values"]["tile"].update(block_n=-16), r"rows\[1\].*-16; 1 to"),
    "string tile": (lambda d: config(d).update(block_m="64"), r"block_m = '64'; Input should be a valid integer"),
    "float tile": (lambda d: config(d).update(block_m=64.0), r"block_m = 64\.0; Input should be a valid integer"),
    "true tile": (lambda d: config(d).update(block_m=True), r"block_m = True; Input should be a valid integer"),
    "huge Hopper tile": (lambda d: hopper(d).update(block_n=10**9), r"rows\[3\].*; block_n is 1000000000; 1 to 65536"),
    "no Hopper stage": (lambda d: hopper(d).update(q_stages=0), r"rows\[3\].*; q_stages is 0; 1 to 65536"),
    "stray key": (lambda d: config(d).update(triton_version=3), r"triton_version = 3; Unexpected keyword"),
    "missing key": (lambda d: config(d).pop("threads"), r"threads; Field required"),
    "unknown field": (lambda d: d.update(note="hello"), r"note = 'hello'; Extra inputs are not permitted"),
    "no list of rows": (lambda d: d.update(rows={"1": {}}), r"got rows; Input should be a valid array"),
    "schema version": (lambda d: d.update(schema_version=2), r"schema_version 2; this version of tl-backend reads 1"),
    "true schema version": (lambda d: d.update(schema_version=True), "schema_version True; this version"),
    "no schema version": (lambda d: d.pop("schema_version"), "schema_version None; this version"),
    "unknown phase": (
        lambda d: d["rows"][0]["regime"].update(phase="warm"),
        r"phase = 'warm'; Input should be 'prefill'",
    ),
    "no bucket": (
        lambda d: d["rows"][0]["regime"].update(context_len=3000),
        "got 3000; one of 1024, 4096, 16384, None",
    ),
    "no class": (lambda d: d["rows"][0]["problem"].update(page=48), "page 48 causal is the class of no problem"),
    "heads": (lambda d: d["rows"][0]["problem"].update(num_kv_heads=5), "head counts: got 32 q heads, 5 kv heads"),
    "two entries": (
        lambda d: d["rows"].append(d["rows"][0]),
        "two entries for 32/8 D128 bfloat16 page 16 causal, decode",
    ),
    "settled and not": (
        lambda d: d["settled"].append({**d["settled"][0], "regime": d["rows"][0]["regime"]}),
        "two entries for",
    ),
    "no figure": (lambda d: d["rows"][0]["provenance"].update(us=0.0), r"us = 0\.0; Input should be greater than 0"),
    "interval": (
        lambda d: d["rows"][0]["provenance"]["times_default"].update(low=9.0),
        r"a median of 1\.19 outside its interval, 9\.0 to 1\.21",
    ),
    "half a peer": (lambda d: d["rows"][0]["provenance"].update(peer=None), "peer None with peer_us 55.0: one without"),
    "guess": (lambda d: d["rows"][0]["provenance"].update(kind="guess"), "'guess' found using 'kind' does not match"),
    "no reason": (
        lambda d: d["rows"][0].update(provenance={"kind": "modelled", "reason": ""}),
        "reason = ''; String should have at least 1 character",
    ),
    "device": (lambda d: d["device"].update(multiprocessors=114), "114 multiprocessors. is what no device is called"),
    "config": (lambda d: d["rows"][0].update(config=[64, 64]), "Input should be an object"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_malformed_tables_are_one_clear_error(change: str) -> None:
    """CASES.md C15: every kind, under a hash that fits, so that it is not the hash that is refused."""
    apply, message = CHANGES[change]
    document = json.loads(DATA)
    apply(document)
    with pytest.raises(TableError, match=message) as caught:
        parse_table(reseal(document), "file.json")
    text = str(caught.value)
    assert text.startswith("table file.json: got ")
    assert text.endswith("Write it with `tl-backend tune`, or take another with `tl-backend table rollback`.")
    assert "\n" not in text
    assert len(text) < 600


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "got no content; one JSON object"),
        (b" \n", "got no content"),
        (b"\xef\xbb\xbf" + DATA, "got a byte-order mark; UTF-8 without one"),
        (b"\xff\xfe" + DATA, "got no JSON: .*can't decode"),
        (b"[]", "got a JSON list; one JSON object"),
        (b"[" * 10**5, "got deeply nested brackets"),
        (b"1" * 10**4, "got no JSON: .*digits"),
        (DATA.replace(b'"threads"', b'"block_m"', 1), "the key 'block_m' twice in one object"),
        (DATA.replace(b"50.5", b"NaN", 1), "NaN, which JSON does not have"),
        (DATA.replace(b"50.5", b"-Infinity", 1), "-Infinity, which JSON does not have"),
        (DATA.replace(b"50.5", b"1e999", 1), "no JSON: .*1e999.*, which no float64 holds"),
        (DATA.replace(b"50.5", b"50.25", 1), "got content_hash .*; its content has .*: it was changed"),
        (DATA + b" " * MAX_TABLE_BYTES, f"bytes; {MAX_TABLE_BYTES} bytes at most"),
    ],
    ids=str,
)
def test_files_that_are_no_table_are_one_clear_error(data: bytes, message: str) -> None:
    """CASES.md C15."""
    with pytest.raises(TableError, match=rf"^table file\.json: .*{message}"):
        parse_table(data, "file.json")


def test_a_table_of_another_device_is_refused() -> None:
    """CASES.md C15, C16: also where only the count of multiprocessors differs."""
    for identity in KNOWN:
        if identity != TABLE.device:
            with pytest.raises(TableError, match=rf"a table of nvidia_h200 \(.*; this device is {identity.name} "):
                parse_table(DATA, "file.json", device=identity)


def test_an_unknown_family_costs_its_row_and_not_its_table() -> None:
    document = json.loads(DATA)
    document["rows"][0]["config"] = {"family": "hopper", "kind": "decode", "pingpong": [1, {"a": None}]}
    table = parse_table(reseal(document), "file.json")
    assert table.rows[0].config.values is None
    assert parse_table(dump_table(table), "again.json") == table


def test_a_number_of_an_unknown_family_has_to_be_finite() -> None:
    """Nothing else looks at it, and no hash can be made of infinity."""
    document = json.loads(DATA)
    document["rows"][0]["config"] = {"family": "hopper", "kind": "decode", "ratio": 1.5}
    with pytest.raises(TableError, match=r"1e999.*, which no float64 holds"):
        parse_table(reseal(document).replace(b"1.5", b"1e999"), "file.json")


def test_a_table_of_the_whole_list_is_read() -> None:
    """Each class of the models that a file of ours names, in each regime that a search measures."""
    spec = spec_of(TABLE.device)
    rows = {
        (ProblemKey.of(problem), case.regime): make_row(at=case.regime).model_copy(
            update={"problem": ProblemKey.of(problem)}
        )
        for problem in problems().values()
        for kind in KINDS
        for case in cases(kind, problem, spec)
    }
    data = dump_table(make_table(*rows.values()))
    assert len(rows) > 1000
    assert 4 * len(data) < MAX_TABLE_BYTES
    assert len(parse_table(data, "file.json").rows) == len(rows)


def test_a_shipped_table_that_cannot_be_read_is_a_table_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TableError, match=r"nvidia_h200\.json: got Permission denied"):
        read_shipped(TABLE.device)


def test_an_older_file_without_a_field_that_was_added_is_read() -> None:
    """CASES.md C10: its hash is of what it holds, not of what this version would write."""
    document = json.loads(DATA)
    del document["settled"][0]["family"], document["rows"][1]["config"]["values"]["splits_columns"]
    table = parse_table(reseal(document), "file.json")
    assert (table.rows, table.settled) == (TABLE.rows, TABLE.settled)
    del document["settled"]
    assert parse_table(reseal(document), "file.json").rows == TABLE.rows


def test_each_family_and_kind_comes_back_as_what_it_was() -> None:
    assert [(row.config.family, row.config.kind) for row in parse_table(DATA, "file.json").rows] == [
        ("portable", "decode"), ("portable", "prefill"), ("hopper", "prefill"),
    ]  # fmt: skip


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    """CASES.md C15: a symlink loop, a folder, a pipe (whose opening would wait), 200 MB, nothing, no permission."""
    loop, pipe, huge, locked = (tmp_path / name for name in ("loop", "pipe", "huge", "locked"))
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(200 << 20)
    locked.touch()
    locked.chmod(0)
    cases = {
        loop: "Too many levels of symbolic links",
        tmp_path: "a regular file is needed",
        pipe: "a regular file is needed",
        huge: f"209715200 bytes; {MAX_TABLE_BYTES} bytes at most",
        tmp_path / "absent": "No such file or directory",
    }
    if os.geteuid():  # The superuser reads everything.
        cases[locked] = "Permission denied"
    for path, message in cases.items():
        with pytest.raises(TableError, match=message) as caught:
            read_table(path)
        assert str(path) in str(caught.value)


def test_nobody_makes_a_table_that_nobody_could_read() -> None:
    with pytest.raises(ValidationError, match="two entries for"):
        make_table(ROWS[0], ROWS[0])
    with pytest.raises(ValidationError, match="is what no device is called"):
        make_table(device=DeviceIdentity(vendor="nvidia", arch="sm_90", multiprocessors=1, name="nvidia_h200"))
    tile = dataclasses.replace(default_config("prefill", LLAMA, spec_of(TABLE.device)), block_n=-64)
    with pytest.raises(ValidationError, match="block_n is -64; 1 to 65536"):
        make_row(at=regime("prefill"), config=tile)


def test_the_hash_is_of_all_but_itself() -> None:
    assert TABLE.with_generation(1).content_hash != TABLE.content_hash
    assert make_table(*reversed(ROWS), settled=(SETTLED,)).content_hash != TABLE.content_hash
    assert make_table(*ROWS, settled=(SETTLED,)).content_hash == TABLE.content_hash
    assert TABLE.with_generation(3).label == f"nvidia_h200 generation 3 ({TABLE.with_generation(3).content_hash[:8]})"
    assert MEASURED.date == DAY == dt.date(2026, 2, 3)
