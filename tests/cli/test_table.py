"""``tl-backend table``: what it prints, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.tables import H200, LLAMA, make_row, make_table, regime, reseal
from tl_backend.cli.app import app
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.generations import read_active
from tl_backend.configs.identity import BY_NAME
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.configs.rows import Modelled, Settled
from tl_backend.configs.table import Table, dump_table
from tl_backend.configs.tile import TileConfig
from tl_backend.tuner.progress import describe_config
from tl_backend.tuner.store import Store

ROW = make_row()
SETTLED = Settled(problem=ProblemKey.of(LLAMA), regime=regime("prefill", 100, 100), us=12.5, family="hopper")
TABLE = make_table(ROW, settled=(SETTLED,))
MODELLED = make_table(ROW.model_copy(update={"provenance": Modelled(reason="the H200's chip")}))
SMALL = TileConfig(block_m=16, block_n=64, heads_per_tile=4, num_stages=1, threads=32)
BIG = HopperPrefillConfig(block_n=128, warpgroups=2, heads_per_tile=4, num_stages=4, q_stages=2)
UNFIT = make_table(ROW, make_row(at=regime("prefill"), config=BIG))


def table(*args: str) -> Result:
    return CliRunner().invoke(app, ["table", *args])


def answer(*args: str, code: int = 0) -> Any:
    result = table(*args, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    return json.loads(result.stdout)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A user's folder with two generations of an H200, of which the first serves, and one of the CPU."""
    monkeypatch.setenv("TL_BACKEND_TABLE_DIR", str(tmp_path / "tables"))
    store = Store(tmp_path / "tables")
    for made in (TABLE, MODELLED, make_table(device=BY_NAME["cpu"])):
        store.write_generation(made)
    store.promote(H200, 1)
    return store


def write(path: Path, made: Table) -> str:
    path.write_bytes(dump_table(made))
    return str(path)


def test_list(store: Store) -> None:
    (store.folder / "nvidia_h200" / "0003.json").write_bytes(b"{")
    (store.folder / "notes.txt").touch()
    found = {item["target"]: item for item in answer("list")}
    assert {target: item["active"] for target, item in found.items() if "@shipped" not in target} == {
        "cpu@1": False,
        "nvidia_h200@1": True,
        "nvidia_h200@2": False,
        "nvidia_h200@3": False,
    }
    assert found["nvidia_h200@1"]["content_hash"] == TABLE.with_generation(1).content_hash
    assert (found["nvidia_h200@1"]["rows"], found["nvidia_h200@1"]["settled"]) == (1, 1)
    assert "got no JSON" in found["nvidia_h200@3"]["problem"]
    text = table("list").stdout
    assert "nvidia_h200@2" in text
    assert "got no JSON" in text


def test_list_without_any_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tl_backend.cli.table_targets.read_shipped", lambda device: None)
    for folder in (tmp_path / "absent", tmp_path):
        monkeypatch.setenv("TL_BACKEND_TABLE_DIR", str(folder))
        assert answer("list") == []
        assert f"No table, neither shipped nor in {folder}" in " ".join(table("list").stdout.split())


def test_a_promoted_generation_that_is_gone_is_listed(store: Store) -> None:
    (store.folder / "nvidia_h200" / "0001.json").unlink()
    found = {item["target"]: item for item in answer("list")}
    assert found["nvidia_h200@1"]["active"]
    assert "No such file" in found["nvidia_h200@1"]["problem"]


def test_show(store: Store, tmp_path: Path) -> None:
    assert answer("show", "nvidia_h200") == json.loads(dump_table(TABLE.with_generation(1)))
    assert answer("show", "nvidia_h200@2") == json.loads(dump_table(MODELLED.with_generation(2)))
    assert answer("show", "@1")["device"]["name"] == "cpu"  # This machine's.
    path = write(tmp_path / "mine.json", UNFIT)
    assert answer("show", path) == json.loads(dump_table(UNFIT))
    assert "hopper: 128x128, 4 heads" in table("show", path).stdout
    assert describe_config(BIG) == "128x128, 4 heads, 4 stages and 2 of Q, 384 threads"
    text = table("show", "nvidia_h200").stdout
    for words in ("nvidia_h200 generation 1", "32/8 D128", "1.19 (1.18 to 1.21)", "50.5", "the default is the best"):
        assert words in text
    assert "modelled" in table("show", "nvidia_h200@2").stdout


def test_a_row_of_an_unknown_family_is_shown(tmp_path: Path) -> None:
    document = json.loads(dump_table(TABLE))
    document["rows"][0]["config"] = {"family": "hopper", "kind": "decode"}
    (tmp_path / "new.json").write_bytes(reseal(document))
    assert "hopper: unknown here" in table("show", str(tmp_path / "new.json")).stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cpu", "table 'cpu': got none of cpu; a shipped table, or one of the user's that was promoted"),
        ("nvidia_h200@9", "table 'nvidia_h200@9': got none of nvidia_h200"),
        ("nvidia_h200@two", "generation: got 'two'; a number or 'shipped' after @"),
        ("nvidia_h300", "device: got nvidia_h300; this machine's is cpu; others are nvidia_h100,"),
        ("./absent.json", "table absent.json: got No such file or directory"),
    ],
)
def test_a_target_that_is_not_there_is_bad_input(store: Store, target: str, message: str) -> None:
    result = table("show", target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_diff(store: Store, tmp_path: Path) -> None:
    same = write(tmp_path / "same.json", TABLE)
    assert answer("diff", "nvidia_h200@1", same) == {"equal": True, "entries": []}
    assert "The same 2 entries." in table("diff", "nvidia_h200@1", same).stdout
    found = answer("diff", "nvidia_h200@1", "nvidia_h200@2", code=1)
    assert [(entry["regime"], entry["new"] is None) for entry in found["entries"]] == [
        (str(ROW.regime), False),
        (str(SETTLED.regime), True),
    ]
    text = table("diff", "nvidia_h200@1", "nvidia_h200@2").stdout
    assert "the default is the best" in text
    assert "none" in text
    assert answer("diff", "cpu@1", "nvidia_h200@1", code=1)["device"][0]["name"] == "cpu"


def test_validate(store: Store, tmp_path: Path) -> None:
    assert all(item["valid"] for item in answer("validate"))
    unfit = write(tmp_path / "unfit.json", UNFIT)
    (item,) = answer("validate", unfit, code=1)
    assert item["valid"] is False
    assert item["problems"][0].startswith("row 2: needs ")
    (store.folder / "nvidia_h200" / "0002.json").write_bytes(b"")
    bad = {item["target"]: item["problems"] for item in answer("validate", code=1) if not item["valid"]}
    assert list(bad) == ["nvidia_h200@2"]
    result = table("validate", "nvidia_h200@2", unfit)
    assert result.exit_code == 1
    assert "got no content" in result.stdout
    assert "row 2: needs" in result.stdout
    stale = make_table(ROW, settled=(SETTLED.model_copy(update={"family": "portable"}),))
    (item,) = answer("validate", write(tmp_path / "stale.json", stale), code=1)
    assert item["problems"][0].startswith("settled 1: the portable family's default")
    assert "nvidia_h200@1: valid" in table("validate", "nvidia_h200@1").stdout


def test_promote_and_rollback(store: Store) -> None:
    device = ("--device", "nvidia_h200")
    assert answer("promote", "2", *device)["content_hash"] == MODELLED.with_generation(2).content_hash
    assert read_active(store.folder, H200) == MODELLED.with_generation(2)
    assert answer("rollback", *device)["generation"] == 1
    assert "nvidia_h200 generation 2" in table("promote", "2", *device).stdout
    assert "nvidia_h200 generation 1" in table("rollback", *device).stdout
    assert answer("rollback", *device)["generation"] is None
    assert read_active(store.folder, H200) is None
    result = table("rollback", *device)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: rollback of nvidia_h200: got no active generation")
    result = table("promote", "7")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: generation of cpu: got 7; ")
    assert table("promote", "0").exit_code == 2


def test_carry(store: Store, tmp_path: Path) -> None:
    row = make_row(config=DecodeChoice(tile=SMALL, blocks_per_multiprocessor=2))
    out = tmp_path / "h100.json"
    said = answer("carry", write(tmp_path / "h200.json", make_table(row)), "nvidia_h100", "--out", str(out))
    assert (said["rows"], said["out"]) == (1, str(out))
    assert answer("validate", str(out))[0]["valid"]
    assert table("carry", str(out), "nvidia_h100_nvl", "--out", str(tmp_path / "x.json")).exit_code == 2
    assert not (tmp_path / "x.json").exists()


def test_brackets_are_no_styles(store: Store, tmp_path: Path) -> None:
    """A driver's name, and what stands in a bad file, are shown as they are."""
    odd = make_table(ROW)
    odd = Table.make(
        device=odd.device, toolchain=odd.toolchain, rows=odd.rows,
        provenance=odd.provenance.model_copy(update={"gpu": "GPU [/x]"}),
    )  # fmt: skip
    store.write_generation(odd)
    (store.folder / "cpu" / "active").write_bytes(b"[/red]")
    listed = table("list")
    assert listed.exit_code == 0
    assert "GPU [/x]" in listed.stdout
    assert "[/red]" in listed.stdout


def test_a_folder_that_cannot_be_read_is_one_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    listed = table("list")
    assert listed.exit_code == 2
    assert "Permission denied; it has to be a folder that can be read" in listed.stderr
