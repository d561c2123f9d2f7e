"""The import walls of docs/architecture.md, held by reading every file's imports, and once by importing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "tl_backend"
ROOT = Path(__file__).parents[1] / PACKAGE
HEAVY = {"torch", "tilelang", "tvm", "tvm_ffi", "vllm", "triton", "transformers"}

BASE = {"errors", "settings", "device", "problem", "cache_folder", "_version"}
# Part -> the parts that it may import, at any depth of a function.
WALLS = {
    "__init__": {"_version"},
    "_version": set(),
    "errors": set(),
    "settings": {"errors"},
    "problem": {"errors"},
    "device": {"errors"},
    "cache_folder": {"errors", "settings"},
    "telemetry": {"errors", "settings"},
    "configs": {"errors", "problem", "device"},
    "kernels": {"errors", "problem", "device", "configs"},
    "ops": BASE | {"telemetry", "configs", "kernels"},
    "vllm_plugin": BASE | {"telemetry", "ops"},
    "testing": BASE | {"configs", "ops"},
    "measure": BASE | {"configs", "ops"},
    "tuner": BASE | {"configs", "ops", "measure"},
    "cli": BASE | {"telemetry", "configs", "ops", "measure", "tuner", "testing", "vllm_plugin"},
}
# Parts whose files must import where none of HEAVY is installed, and the one function that may ask torch.
LIGHT = {"__init__", "_version", "errors", "settings", "problem", "device", "cache_folder", "telemetry", "configs"}
ASKS_TORCH = {("device", "_of")}
# Who imports vLLM, and who TileLang. One file runs vLLM's command line and has to import it.
KNOWS_VLLM = {"vllm_plugin"}
# Peers that are measured beside this package's kernels: in functions, since vLLM need not be there.
MEASURES_VLLM = {"measure/peers_vllm.py"}
COMMAND = "vllm.entrypoints.cli.main"
KNOWS_TILELANG = {"kernels", "ops", "testing"}


@dataclass(frozen=True)
class Import:
    """One import: the module's dotted name, where it stands, and the function around it ("" at the top)."""

    name: str
    line: int
    function: str
    for_types: bool

    @property
    def root(self) -> str:
        return self.name.split(".")[0]


def imports_of(tree: ast.AST, function: str = "", for_types: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, function, for_types)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            # `from package import part` may name a part.
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if node.module == PACKAGE else str(node.module)
                yield Import(name, node.lineno, function, for_types)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports_of(node, function or node.name, for_types)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imports_of(ast.Module(node.body, []), function, True)
            yield from imports_of(ast.Module(node.orelse, []), function, for_types)
        else:
            yield from imports_of(node, function, for_types)


def violations(part: str, source: str, file: str = "") -> list[str]:
    """What in a file of ``part`` breaks a wall."""
    found = []
    for item in imports_of(ast.parse(source)):
        if item.root == PACKAGE:
            target = [*item.name.split("."), "__init__"][1]
            target = "_version" if target == "__version__" else target
            if target not in WALLS[part] | {part}:
                found.append(f"line {item.line}: {part} imports {target}")
        elif item.root in HEAVY and not item.for_types:
            if part in LIGHT and (part, item.function) not in ASKS_TORCH:
                found.append(f"line {item.line}: {part} imports {item.root}")
            asks_vllm = part in KNOWS_VLLM or item.name == COMMAND or (file in MEASURES_VLLM and item.function)
            if item.root == "vllm" and not asks_vllm:
                found.append(f"line {item.line}: {part} imports vllm")
            if item.root == "tilelang" and part not in KNOWS_TILELANG:
                found.append(f"line {item.line}: {part} imports tilelang")
            if item.root == "tilelang" and part == "ops" and not item.function:
                found.append(f"line {item.line}: ops imports tilelang before the first compile")
    return found


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_file_keeps_the_walls(path: Path) -> None:
    assert violations(part_of(path), path.read_text(), str(path.relative_to(ROOT))) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("configs", "import torch"),
        ("configs", "def f():\n    import tilelang"),
        ("configs", "from tl_backend.ops import paged_attention"),
        ("device", "import torch"),
        ("device", "def other():\n    import torch"),
        ("kernels", "from tl_backend import ops"),
        ("kernels", "from tl_backend.ops.compiled import KERNELS"),
        ("ops", "import vllm"),
        ("ops", "import tilelang"),
        ("ops", "from tl_backend.vllm_plugin import backend"),
        ("telemetry", "if x:\n    try:\n        from torch import cuda\n    except ImportError:\n        pass"),
        ("vllm_plugin", "from tl_backend.kernels import prefill"),
        ("vllm_plugin", "def f():\n    import tilelang"),
    ],
)
def test_a_planted_violation_is_found(part: str, source: str) -> None:
    assert violations(part, source)


def test_only_peers_of_vllm_ask_vllm_and_only_when_they_are_asked() -> None:
    inside = "def f():\n    import vllm"
    assert violations("measure", inside, "measure/peers_vllm.py") == []
    assert violations("measure", "import vllm", "measure/peers_vllm.py")
    assert violations("measure", inside, "measure/ceilings.py")


def test_type_checking_imports_are_free() -> None:
    assert violations("device", "if TYPE_CHECKING:\n    import torch") == []


def test_every_part_has_walls() -> None:
    assert {part_of(path) for path in FILES} <= WALLS.keys()


@pytest.mark.parametrize("part", sorted(LIGHT - {"__init__"} | {"vllm_plugin.register"}))
def test_light_modules_import_nothing_heavy(part: str) -> None:
    where = ROOT.joinpath(*part.split("."))
    names = [f"{PACKAGE}.{part}"]
    if where.is_dir():
        names += [f"{PACKAGE}.{part}.{file.stem}" for file in sorted(where.glob("*.py")) if file.stem != "__init__"]
    script = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        f"print(sorted({HEAVY} & sys.modules.keys()), 'libcuda' in open('/proc/self/maps').read())"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[] False"
