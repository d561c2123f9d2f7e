"""What README.md and docs/ name is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tl_backend import settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VARIABLE = re.compile(r"TL_BACKEND_[A-Z_]+[A-Z]")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|txt|toml|sh))`")
# Places where a file may stand that is named without its whole path, and the stem of the example.
FOLDERS = ["", "tl_backend", "tl_backend/vllm_plugin"]
EXAMPLES = re.compile(r"(^|_)foo\b")


def test_every_setting_is_documented_and_no_other() -> None:
    described = set(VARIABLE.findall(inspect.getdoc(settings.Settings) or ""))
    assert described
    assert set(VARIABLE.findall((ROOT / "README.md").read_text())) == described


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = {name for name in FILE.findall(page.read_text()) if not EXAMPLES.search(Path(name).stem)}
    missing = {name for name in named if not any((ROOT / folder / name).exists() for folder in FOLDERS)}
    assert missing == set()


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE)) <= targets


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / "docs" / "cases.md").read_text())
    assert named
    missing = {(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text()}
    assert missing == set()
