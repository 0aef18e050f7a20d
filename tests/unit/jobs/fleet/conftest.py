"""A fleet's database for tests: SQLite, which is created in a hundredth of a second."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.jobs.fleet.store.database import Database, connect
from tests.fleet_databases import copied, migrated_file

__all__ = ["migrated_file"]


@pytest.fixture
def empty_url(tmp_path: Path) -> str:
    """Of a database without tables."""
    return f"sqlite:///{tmp_path / 'fleet.db'}"


@pytest.fixture
def database(migrated_file: Path, tmp_path: Path) -> Iterator[Database]:
    """Empty, with all tables."""
    with closing(connect(copied(migrated_file, tmp_path))) as made:
        yield made
