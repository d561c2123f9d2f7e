"""The wheel that users install: built offline, whole, and light to import."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Neither an index nor a build environment: everything needed is in the checkout and this interpreter.
OFFLINE = ["--no-index", "--no-deps", "--disable-pip-version-check", "--quiet"]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    answer = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, f"{command} -> {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # setuptools builds inside the tree that it is given: a copy keeps the checkout clean.
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "tl_backend", tree / "tl_backend", ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-build-isolation", "-w", out, tree, cwd=out)
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", *OFFLINE, "--target", target, wheel, cwd=target)
    return target


@pytest.fixture(scope="module")
def metadata(installed: Path) -> importlib.metadata.Distribution:
    [found] = importlib.metadata.distributions(path=[str(installed)])
    return found


def test_every_module_is_in_it(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tl_backend/")}
    kept = {str(path.relative_to(ROOT)) for path in (ROOT / "tl_backend").rglob("*.py")} | {"tl_backend/py.typed"}
    kept |= {str(path.relative_to(ROOT)) for path in (ROOT / "tl_backend" / "tables").glob("*.json")}
    assert packed >= kept, f"missing: {sorted(kept - packed)}; a folder without __init__.py is no package"


def test_is_pure_python_and_carries_its_licence(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    [licence] = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/LICENSE")]
    assert b"Apache License" in zipfile.ZipFile(wheel).read(licence)


def test_metadata(metadata: importlib.metadata.Distribution) -> None:
    assert metadata.metadata["Name"] == "tl-backend"
    assert metadata.metadata["Requires-Python"] == ">=3.10"
    needs = [need for need in metadata.requires or [] if "extra ==" not in need]
    assert sorted(needs) == ["pydantic>=2.7", "rich>=13", "tilelang>=0.1.12", "typer>=0.12"]
    assert set(metadata.metadata.get_all("Provides-Extra") or []) == {"vllm", "cpu", "plot", "dev"}
    assert "vllm<0.34,>=0.32" in str(metadata.requires)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("vllm.general_plugins", "tilelang", "tl_backend.vllm_plugin.register:register"),
        ("console_scripts", "tl-backend", "tl_backend.cli.app:main"),
    ],
)
def test_entry_point(metadata: importlib.metadata.Distribution, group: str, name: str, value: str) -> None:
    [point] = [point for point in metadata.entry_points if point.group == group]
    assert (point.name, point.value) == (name, value)
    assert callable(point.load())


@pytest.mark.parametrize("module", ["tl_backend", "tl_backend.vllm_plugin.register"])
def test_importing_it_imports_nothing_heavy(installed: Path, module: str) -> None:
    script = (
        f"import sys, tl_backend, {module}\n"
        "heavy = {'torch', 'tilelang', 'tvm', 'tvm_ffi', 'triton', 'vllm'} & sys.modules.keys()\n"
        "print(tl_backend.__file__, tl_backend.__version__, sorted(heavy), 'libcuda' in open('/proc/self/maps').read())"
    )
    env = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin"}
    answer = run(sys.executable, "-c", script, cwd=installed, env=env).split(maxsplit=2)
    assert Path(answer[0]).is_relative_to(installed)
    assert answer[1] == importlib.metadata.version("tl-backend")
    assert answer[2].strip() == "[] False"
