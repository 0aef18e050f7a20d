"""Opening the ledger: its format, and the messages if it cannot be used."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from groupwise.core.errors import StoreError
from groupwise.runs.database import Database
from groupwise.server.ledger.file import APPLICATION_ID, MIGRATIONS, open_file


def one(connection: sqlite3.Connection, pragma: str) -> object:
    return connection.execute(f"PRAGMA {pragma}").fetchone()[0]


def test_a_new_file_has_the_newest_format_and_flushes_each_commit(tmp_path):
    wanted = {"user_version": len(MIGRATIONS), "application_id": APPLICATION_ID}
    wanted |= {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    for _ in range(2):
        with closing(open_file(tmp_path / "server.db")) as connection:
            assert {name: one(connection, name) for name in wanted} == wanted
    with closing(open_file(tmp_path / "server.db")) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(StoreError, match="newer version: upgrade"):
        open_file(tmp_path / "server.db")


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    Database.open_for_writing(tmp_path / "run.db").close()
    (tmp_path / "damaged.db").write_bytes(b"something else entirely" * 100)
    for name, message in (
        ("run.db", "not the ledger"),
        ("damaged.db", "damaged"),
        ("a/b", "folder"),
    ):
        with pytest.raises(StoreError, match=message):
            open_file(tmp_path / name)
