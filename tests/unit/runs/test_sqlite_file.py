"""What the run's record and the server's ledger share: their format, and the messages if SQLite or the disk refuses."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.core import atomic_files
from groupwise.core.errors import StoreError
from groupwise.runs.find import run_info
from groupwise.runs.sqlite_file import Format, connect, connect_writer, is_full, remedy, version
from groupwise.runs.store import Store
from tests.disks import fill, small_disk

KIND = Format(
    "a list of birds",
    0x42495244,
    ("CREATE TABLE birds (name TEXT);", "ALTER TABLE birds ADD COLUMN wings INTEGER;"),
    if_another="Count them elsewhere.",
)
OLDER = Format(KIND.name, KIND.application_id, KIND.migrations[:1])


def opened(path: Path, kind: Format = KIND) -> sqlite3.Connection:
    return connect_writer(path, kind, "birds")


def test_an_older_file_gets_what_it_lacks_and_keeps_what_it_has(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "birds.db", OLDER)) as connection:
        connection.execute("INSERT INTO birds VALUES ('wren')")
    with closing(opened(tmp_path / "birds.db")) as connection:
        assert version(connection) == 2
        assert connection.execute("SELECT * FROM birds").fetchall() == [("wren", None)]


def test_a_migration_is_done_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, points = tmp_path / "birds.db", list[str]()

    def end(point: str) -> None:
        points.append(point)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "on_write", end)
        with pytest.raises(KeyboardInterrupt):
            opened(path)
    assert points == ["commit:birds:before"]
    with closing(connect(path, "ro")) as connection:
        assert version(connection) == 0
        assert connection.execute("SELECT * FROM sqlite_master").fetchall() == []
    broken = Format(KIND.name, KIND.application_id, (*KIND.migrations, "CREATE TABLE birds (x);"))
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        opened(path, broken)
    with closing(opened(path)) as connection:
        assert version(connection) == 2


def test_other_files_and_newer_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "birds.db"
    opened(path).close()
    with pytest.raises(StoreError, match=r"format 2.* up to 1"):
        opened(path, OLDER)
    fish = Format("a list of fish", 0x46495348, KIND.migrations)
    with pytest.raises(StoreError, match=r"not a list of fish\.$"):
        opened(path, fish)
    opened(tmp_path / "fish.db", fish).close()
    with pytest.raises(StoreError, match=r"birds\. Count them elsewhere\.$"):
        opened(tmp_path / "fish.db")


def test_a_full_disk_has_its_own_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        path = disk / "birds.db"
        with closing(opened(path)) as connection:
            fill(disk)
            with pytest.raises(sqlite3.Error) as refused:
                connection.execute("INSERT INTO birds (name) VALUES (hex(randomblob(2000000)))")
        assert is_full(path, refused.value)
        assert "Free space" in remedy(path, refused.value)


def test_a_disk_that_fails_is_not_a_full_one(tmp_path: Path) -> None:
    failed = sqlite3.OperationalError("disk I/O error")
    failed.sqlite_errorcode = sqlite3.SQLITE_IOERR
    assert not is_full(tmp_path / "birds.db", failed)
    assert "see the system's log" in remedy(tmp_path / "birds.db", failed)


COMPUTED = (
    "DROP TABLE meta; CREATE VIEW meta AS WITH RECURSIVE n(key) AS (SELECT 1 UNION ALL SELECT key FROM n) SELECT key, key AS value FROM n",
    "DROP TABLE meta; CREATE TABLE meta (key, value AS (hex(zeroblob(450000000))))",
    "DROP VIEW prompts; CREATE VIEW prompts AS SELECT 1 AS draw",
)


@pytest.mark.parametrize("script", COMPUTED)
def test_a_record_whose_tables_are_computed_is_not_read(tmp_path: Path, script: str) -> None:
    path = tmp_path / "run.db"
    Store.create(path).close()
    with closing(sqlite3.connect(path)) as foreign:
        foreign.executescript(script)
    with pytest.raises(StoreError, match="is computed, and not by a version of Groupwise"):
        Store.open(path, readonly=True)
    assert "is computed" in str(run_info(tmp_path).broken)
