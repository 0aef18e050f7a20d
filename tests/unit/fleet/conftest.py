"""A fleet's database for tests of what stands on it: SQLite, which is there in a hundredth of a second."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.fleet.store.database import Database, connect, migrate


@pytest.fixture
def empty_url(tmp_path: Path) -> str:
    """Of a database without tables."""
    return f"sqlite:///{tmp_path / 'fleet.db'}"


@pytest.fixture
def database(empty_url: str) -> Iterator[Database]:
    """Empty, with all tables."""
    made = connect(empty_url)
    try:
        migrate(made)
        yield made
    finally:
        made.close()
