"""``tl-backend doctor``: each thing that goes wrong in the field has its row, its remedy and its exit code."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tl_backend import __version__
from tl_backend.cli import doctor, doctor_machine, doctor_packages
from tl_backend.cli.app import app
from tl_backend.cli.doctor_rows import Finding, ok, run_checks
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError
from tl_backend.ops import environment

H200 = DeviceSpec.absent("sm_90")
CPU = DeviceSpec.absent("c")
VARIABLES = ("VLLM_PLUGINS", "VLLM_ATTENTION_BACKEND", "CUDA_HOME", "CUDA_PATH", "TILELANG_CACHE_DIR", "CXX", "CC")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home, no variable that means anything, and no process that imports TileLang; vLLM is there."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(doctor, "check_tilelang", lambda device: [ok("TileLang", "0.1.15")])
    monkeypatch.setattr(doctor_packages, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(doctor_machine, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(doctor, "_device", lambda: CPU)


def report() -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code, and the rows by their check."""
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(answer.stdout)
    rows: dict[str, list[dict[str, str]]] = {}
    for row in found["rows"]:
        rows.setdefault(row["check"], []).append(row)
        # A message of this package ends with its remedy.
        assert row["state"] == "ok" or row["remedy"] or row["value"].endswith("."), row
    assert found["healthy"] == (answer.exit_code == 0)
    return answer.exit_code, rows


def states(rows: list[dict[str, str]]) -> list[str]:
    return [row["state"] for row in rows]


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    code, rows = report()
    assert {row["state"] for found in rows.values() for row in found} == {"ok"}, rows
    assert code == 0
    assert "TL_BACKEND_CPU=1" in rows["settings"][0]["value"]
    assert "runs TileLang kernels on CPU" in rows["outcome"][0]["value"]


def test_the_report_for_people_names_every_check() -> None:
    answer = CliRunner().invoke(app, ["doctor"])
    for word in ("Python", "torch", "vLLM plugin", "kernel cache", "outcome", "TL_BACKEND_CPU=1"):
        assert word in answer.stdout


def test_the_cpu_ignores_the_flag() -> None:
    code, rows = report()
    assert (code, states(rows["outcome"])) == (0, ["warning"])
    assert "TL_BACKEND_CPU=1" in rows["outcome"][0]["remedy"]


def test_a_typo_in_vllm_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES.md B21: vLLM says nothing, and serves with another backend."""
    monkeypatch.setenv("VLLM_PLUGINS", "tilelnag")
    code, rows = report()
    assert (code, states(rows["VLLM_PLUGINS"])) == (1, ["warning", "problem"])
    assert "'tilelnag' is no plugin, near 'tilelang'" in rows["VLLM_PLUGINS"][0]["value"]
    assert states(rows["outcome"]) == ["problem"]


def test_vllm_takes_a_space_for_a_part_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver, tilelang")
    code, rows = report()
    assert code == 1
    assert "near 'tilelang'" in rows["VLLM_PLUGINS"][0]["value"]


def test_a_typo_beside_the_right_name_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "tilelang,other")
    code, rows = report()
    assert (code, states(rows["VLLM_PLUGINS"])) == (0, ["warning"])


def test_a_variable_that_vllm_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TILELANG")
    code, rows = report()
    assert (code, states(rows["VLLM_ATTENTION_BACKEND"])) == (0, ["warning"])


@pytest.mark.parametrize(("name", "value"), [("TL_BACKEND_CPUS", "1"), ("TL_BACKEND_CPU", "yes")])
def test_wrong_settings(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    code, rows = report()
    assert (code, states(rows["settings"])) == (1, ["problem"])
    assert name in rows["settings"][0]["value"]


def test_a_wrong_cuda_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES.md C17."""
    monkeypatch.setattr(doctor, "_device", lambda: H200)
    monkeypatch.setenv("CUDA_HOME", ":/usr/local/cuda")
    code, rows = report()
    assert (code, states(rows["compiler"])) == (1, ["problem"])
    assert rows["compiler"][0]["value"].startswith("CUDA_HOME: got ':/usr/local/cuda'")
    assert "CUDA_HOME" in rows["outcome"][0]["value"]


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_device", lambda: H200)
    monkeypatch.setattr(environment, "_DEFAULT_HOMES", {})
    monkeypatch.setattr(environment, "_CUDA_WHEEL", "no-such-distribution")
    monkeypatch.setenv("PATH", "")
    code, rows = report()
    assert (code, states(rows["compiler"])) == (1, ["problem"])
    assert "got no nvcc" in rows["compiler"][0]["value"]


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, rows = report()
    assert (code, states(rows["kernel cache"])) == (1, ["problem"])
    assert "TL_BACKEND_CACHE_DIR" in rows["kernel cache"][0]["remedy"]


def test_a_cache_of_tilelangs_that_lies_elsewhere_has_a_row_of_its_own(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    assert "TileLang's cache" not in report()[1]
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, rows = report()
    assert (code, states(rows["kernel cache"]), states(rows["TileLang's cache"])) == (1, ["ok"], ["problem"])
    assert "TILELANG_CACHE_DIR" in rows["TileLang's cache"][0]["remedy"]


def test_a_home_that_is_not_there_matters_less_where_a_variable_names_the_cache(monkeypatch, tmp_path: Path) -> None:
    """CASES.md C4."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    code, rows = report()
    assert (code, states(rows["HOME"]), states(rows["kernel cache"])) == (0, ["warning"], ["warning"])
    assert "it may be cleared" in rows["kernel cache"][0]["value"]
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    code, rows = report()
    assert (code, states(rows["HOME"]), states(rows["kernel cache"])) == (0, ["warning"], ["ok"])
    monkeypatch.delenv("HOME")
    assert states(report()[1]["HOME"]) == ["warning"]


def test_little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    for free, state, code in ((1 << 29, "warning", 0), (1 << 20, "problem", 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        exit_code, rows = report()
        assert (exit_code, states(rows["space, kernel cache"])) == (code, [state])


def metadata(folder: Path, version: str, entry_points: str = "") -> None:
    info = folder / f"tl_backend-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tl-backend\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


ENTRY_POINTS = "[vllm.general_plugins]\ntilelang = tl_backend.vllm_plugin.register:register\n"


def test_a_stale_dist_info_hides_the_entry_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CASES.md B21: Python takes the first metadata on its path, and vLLM then finds no plugin."""
    metadata(tmp_path / "stale", "0.0.1")
    monkeypatch.syspath_prepend(tmp_path / "stale")
    code, rows = report()
    assert code == 1
    assert states(rows["tl-backend"]) == states(rows["vLLM plugin"]) == states(rows["outcome"]) == ["problem"]
    assert str(tmp_path / "stale") in rows["tl-backend"][0]["value"]
    assert "stale" in rows["vLLM plugin"][0]["remedy"]


def test_a_second_dist_info_that_hides_nothing_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("one", "two"):
        metadata(tmp_path / name, __version__, ENTRY_POINTS)
        monkeypatch.syspath_prepend(tmp_path / name)
    code, rows = report()
    assert (code, states(rows["tl-backend"]), states(rows["vLLM plugin"])) == (0, ["warning"], ["ok"])


def test_another_plugin_of_that_value_under_another_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    metadata(tmp_path / "other", __version__, ENTRY_POINTS.replace("tilelang =", "tile ="))
    monkeypatch.syspath_prepend(tmp_path / "other")
    code, rows = report()
    assert (code, states(rows["vLLM plugin"])) == (0, ["warning"])


@pytest.mark.parametrize(("version", "message"), [(None, "not installed"), ("0.31.2", "vLLM version: got 0.31.2")])
def test_a_vllm_that_is_not_served(monkeypatch: pytest.MonkeyPatch, version: str | None, message: str) -> None:
    for module in (doctor_packages, doctor_machine):
        monkeypatch.setattr(module, "vllm_version", lambda: version)
    code, rows = report()
    assert (code, states(rows["vLLM"]), states(rows["outcome"])) == (1, ["problem"], ["problem"])
    assert message in rows["vLLM"][0]["value"]


def test_no_tilelang_and_one_that_does_not_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "tilelang"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    (found,) = doctor_packages.check_tilelang(CPU)
    assert found.state == "problem"
    assert "does not import: OSError: no such library" in found.value
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.14")
    (found,) = doctor_packages.check_tilelang(CPU)
    assert found.value.startswith("TileLang: got 0.1.14; 0.1.15 or newer")


def test_a_bad_table_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "tables" / "cpu"
    folder.mkdir(parents=True)
    (folder / "active").write_text("7\n")
    monkeypatch.setenv("TL_BACKEND_TABLE_DIR", str(tmp_path / "tables"))
    code, rows = report()
    assert (code, states(rows["table"])) == (1, ["problem"])


def test_tables_that_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_BACKEND_TABLES", "0")
    code, rows = report()
    assert (code, states(rows["table"])) == (0, ["warning"])


def test_a_check_that_raises_is_a_row() -> None:
    def bug() -> list[Finding]:
        raise ZeroDivisionError("oh")

    def refusal() -> list[Finding]:
        raise InvalidInputError("thing: got 1; 2 is needed. Pass 2.")

    rows = run_checks([("first", bug), ("second", refusal), ("third", lambda: [ok("third", "fine")])])
    assert [(row.check, row.state) for row in rows] == [("first", "problem"), ("second", "problem"), ("third", "ok")]
    assert rows[0].value == "the check failed: ZeroDivisionError: oh"


def test_a_machine_without_torch_still_gets_its_rows() -> None:
    script = (
        "import sys\nsys.modules['torch'] = None\nfrom tl_backend.cli.doctor import examine\n"
        "print({row.check: row.state for row in examine()})"
    )
    states_of = ast.literal_eval(subprocess.check_output([sys.executable, "-c", script], text=True))
    assert {states_of[check] for check in ("torch", "device", "compiler", "outcome")} == {"problem"}
    assert {states_of[check] for check in ("Python", "vLLM plugin", "kernel cache", "table")} == {"ok"}


def test_vllm_is_not_imported() -> None:
    script = (
        "import sys\nfrom tl_backend.cli.doctor import examine\n"
        "rows = examine()\nprint('vllm' in sys.modules, 'tilelang' in sys.modules, len(rows) > 10)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).split() == ["False", "False", "True"]
