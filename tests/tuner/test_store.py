"""A user's generations: numbered once, whole or not there, promoted and rolled back."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tests.tables import H200, make_row, make_table, regime
from tl_backend.configs.generations import (
    ACTIVE,
    MAX_HISTORY,
    active_generation,
    device_folder,
    generation_path,
    generations,
    read_active,
)
from tl_backend.configs.table import read_table
from tl_backend.errors import EnvironmentProblemError, InvalidInputError, TableError
from tl_backend.tuner import store as store_module
from tl_backend.tuner.store import Store, write_table

TABLE = make_table(make_row(), make_row(at=regime("prefill", 100, 100)))
SPAWN = multiprocessing.get_context("spawn")


def test_generations_count_up_and_none_serves_until_it_is_promoted(tmp_path: Path) -> None:
    store = Store(tmp_path / "made" / "on demand")
    assert [store.write_generation(TABLE) for _ in range(3)] == [1, 2, 3]
    folder = device_folder(store.folder, H200)
    assert generations(folder) == [1, 2, 3]
    assert read_table(generation_path(folder, 2)) == TABLE.with_generation(2)
    assert read_active(store.folder, H200) is None
    assert store.promote(H200, 2) == read_active(store.folder, H200) == TABLE.with_generation(2)
    store.write_generation(TABLE)
    assert active_generation(folder) == 2


def test_a_rollback_undoes_the_last_promotion(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(5):
        store.write_generation(TABLE)
    for generation in (2, 5, 5, 3):
        store.promote(H200, generation)
    assert [store.rollback(H200) for _ in range(3)] == [5, 2, None]
    assert read_active(tmp_path, H200) is None
    with pytest.raises(
        InvalidInputError, match=r"rollback of nvidia_h200: got no active generation; one in .* is needed"
    ):
        store.rollback(H200)


def test_history_has_an_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(2):
        store.write_generation(TABLE)
    for turn in range(2 * MAX_HISTORY):
        store.promote(H200, 1 + turn % 2)
    assert len((device_folder(tmp_path, H200) / ACTIVE).read_text().split()) == MAX_HISTORY
    assert active_generation(device_folder(tmp_path, H200)) == 2


def test_only_a_good_table_of_this_device_is_promoted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(InvalidInputError, match=r"generation of nvidia_h200: got 1; .* has none"):
        store.promote(H200, 1)
    assert list(tmp_path.iterdir()) == []
    store.write_generation(TABLE)
    folder = device_folder(tmp_path, H200)
    generation_path(folder, 2).write_bytes(generation_path(folder, 1).read_bytes()[:-9])
    with pytest.raises(TableError, match=r"0002\.json: got no JSON"):
        store.promote(H200, 2)
    other = dataclasses.replace(H200, name="nvidia_h100")
    device_folder(tmp_path, other).mkdir()
    generation_path(device_folder(tmp_path, other), 1).write_bytes(generation_path(folder, 1).read_bytes())
    with pytest.raises(TableError, match="this device is nvidia_h100"):
        store.promote(other, 1)
    assert active_generation(folder) is None


def write_many(folder: Path) -> None:
    for _ in range(6):
        Store(folder).write_generation(TABLE)
        Store(folder).promote(H200, 1)


def test_writers_at_once_never_take_the_same_number(tmp_path: Path) -> None:
    """CASES.md C1, C10."""
    writers = [SPAWN.Process(target=write_many, args=(tmp_path,)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * 4
    folder = device_folder(tmp_path, H200)
    assert generations(folder) == list(range(1, 25))
    for number in range(1, 25):
        assert read_table(generation_path(folder, number)).generation == number


def die_before_the_rename(folder: Path) -> None:
    store_module.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    Store(folder).write_generation(TABLE)


def die_while_promoting(folder: Path) -> None:
    store_module.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    Store(folder).promote(H200, 2)


@pytest.mark.parametrize("die", [die_before_the_rename, die_while_promoting])
def test_a_writer_that_is_killed_leaves_nothing_that_hurts(die, tmp_path: Path) -> None:
    """CASES.md C2, C10: its lock ends with it, and its half-written file is no generation: the next one removes it."""
    store = Store(tmp_path)
    store.write_generation(TABLE)
    store.write_generation(TABLE)
    store.promote(H200, 1)
    process = SPAWN.Process(target=die, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    folder = device_folder(tmp_path, H200)
    assert any(path.name.endswith(store_module.PARTIAL) for path in folder.iterdir())
    assert generations(folder) == [1, 2]
    assert read_active(tmp_path, H200) == TABLE.with_generation(1)
    assert store.write_generation(TABLE) == 3
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "0001.json", "0002.json", "0003.json", ACTIVE]


def test_a_number_is_not_taken_again_while_the_history_has_it(tmp_path: Path) -> None:
    """CASES.md C10: a deleted file's number would make the rollback lead to another table."""
    store = Store(tmp_path)
    for _ in range(3):
        store.write_generation(TABLE)
    store.promote(H200, 3)
    generation_path(device_folder(tmp_path, H200), 3).unlink()
    assert store.write_generation(TABLE) == 4


def test_an_unreadable_history_is_said_and_the_next_promotion_mends_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_generation(TABLE)
    active = device_folder(tmp_path, H200) / ACTIVE
    for content in ("one", "-1", "1 1.5", "9" * 5000, "\0"):
        active.write_text(content)
        with pytest.raises(TableError, match=str(active)):
            store.rollback(H200)
        store.promote(H200, 1)
        assert read_active(tmp_path, H200) == TABLE.with_generation(1)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    """CASES.md C4: also a user without a home, whose settings have no folder."""
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblemError, match=r"folder of tables .*: got .*Set TL_BACKEND_TABLE_DIR to one"):
        Store(tmp_path / "file").write_generation(TABLE)
    with pytest.raises(EnvironmentProblemError, match=r"got none: this user has no home; .*Set TL_BACKEND_TABLE_DIR"):
        Store(None)


def test_files_that_are_no_generation_are_left_alone(tmp_path: Path) -> None:
    folder = device_folder(tmp_path, H200)
    folder.mkdir()
    for name in ("0000.json", "1.json", "notes.json", "00012.json", "0007.txt", "٣.json"):
        (folder / name).touch()
    assert generations(folder) == []
    assert Store(tmp_path).write_generation(TABLE) == 1
    assert len(list(folder.iterdir())) == 8


def test_a_full_disk_keeps_no_half_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", fill)
    with pytest.raises(EnvironmentProblemError, match="No space left on device"):
        Store(tmp_path).write_generation(TABLE)
    with pytest.raises(EnvironmentProblemError, match="No space left on device"):
        write_table(tmp_path / "out.json", TABLE)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
