"""Databases with all tables of a fleet: copies of one that is migrated once, because a migration takes longer than most tests."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.jobs.fleet.store.database import connect, migrate
from tests.postgres import Postgres

READY = "ready"
"""The name of the migrated database in PostgreSQL."""


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file."""
    file = tmp_path_factory.mktemp("ready") / "fleet.db"
    _migrate(f"sqlite:///{file}")
    assert [path.name for path in file.parent.iterdir()] == [file.name], "it is whole by itself"
    return file


def copied(file: Path, folder: Path) -> str:
    """Copy a file; returns the copy's URL."""
    return f"sqlite:///{shutil.copyfile(file, folder / file.name)}"


def new_fleet(postgres: Postgres) -> str:
    """Create a database on this server; returns its URL."""
    if not postgres.has(READY):
        postgres.execute(f"CREATE DATABASE {READY}")
        _migrate(postgres.url(READY))
    return postgres.new_database(READY)


def _migrate(url: str) -> None:
    with closing(connect(url)) as database:
        migrate(database)
