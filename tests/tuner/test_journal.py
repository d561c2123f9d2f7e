"""What a search has found outlives it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tl_backend.errors import EnvironmentProblemError, InvalidInputError
from tl_backend.tuner.journal import Journal, journal_path

IDENTITY = {"device": {"name": "cpu"}, "problem": 1}


def test_outcomes_are_there_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", IDENTITY) as journal:
        journal.add("found", value=1.5)
        journal.add("other", value=2)
    with Journal(tmp_path / "j", IDENTITY) as journal:
        assert [line["value"] for line in journal.events("found")] == [1.5]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_last_line_that_was_cut_off_is_dropped(tmp_path: Path, cut: int) -> None:
    with Journal(tmp_path / "j", IDENTITY) as journal:
        journal.add("found", value=1)
        journal.add("found", value=2)
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-cut])
    with Journal(tmp_path / "j", IDENTITY) as journal:
        assert [line["value"] for line in journal.events("found")] == [1]
        journal.add("found", value=2)
    assert (tmp_path / "j").read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\n", b"[1]\n", b'{"event": "search"}\n{"event": "found"}\n', b"[" * 200000],
    ids=["empty", "bytes", "a list", "another search", "deep"],
)
def test_a_file_of_something_else_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "j").write_bytes(content)
    with Journal(tmp_path / "j", IDENTITY) as journal:
        assert not list(journal.events("found"))
        journal.add("found", value=1)
    with Journal(tmp_path / "j", IDENTITY) as journal:
        assert len(list(journal.events("found"))) == 1


def test_fresh_forgets(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", IDENTITY) as journal:
        journal.add("found", value=1)
    with Journal(tmp_path / "j", IDENTITY, fresh=True) as journal:
        assert not list(journal.events("found"))
    with Journal(tmp_path / "j", IDENTITY) as journal:
        assert not list(journal.events("found"))


def test_two_searches_do_not_share_one(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", IDENTITY), pytest.raises(InvalidInputError, match="is in use"):
        Journal(tmp_path / "j", IDENTITY)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblemError, match="TL_BACKEND_TABLE_DIR"):
        Journal(tmp_path / "file" / "j", IDENTITY)


def test_each_identity_has_its_file(tmp_path: Path) -> None:
    others = [IDENTITY | {"problem": 2}, IDENTITY | {"kernels": "x"}, IDENTITY]
    assert len({journal_path(tmp_path, identity) for identity in others}) == 3
    assert journal_path(tmp_path, IDENTITY) == journal_path(tmp_path, dict(reversed(IDENTITY.items())))


def test_a_full_disk_is_one_clear_error_and_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def fill(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:20])

    with Journal(tmp_path / "j", IDENTITY) as journal:
        journal.add("found", value=1)
        with monkeypatch.context() as patch, pytest.raises(EnvironmentProblemError, match="No space left on device"):
            patch.setattr(os, "write", fill)
            journal.add("found", value=2)
    with Journal(tmp_path / "j", IDENTITY) as journal:
        assert [line["value"] for line in journal.events("found")] == [1]
