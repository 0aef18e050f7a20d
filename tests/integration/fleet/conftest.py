"""Both databases of a fleet. A suite of `tests/unit/fleet` that is imported here runs on both."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from groupwise.fleet.store.database import Database, connect
from tests.fleet_databases import copied, migrated_file, new_fleet
from tests.postgres import Postgres, server
from tests.ssh_hosts import full_machines, network_of_the_fleet, plain_machines

__all__ = ["full_machines", "migrated_file", "network_of_the_fleet", "plain_machines"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The server of this worker. Whoever kills it starts it again."""
    with server() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fleet.db'}"
    running: Postgres = request.getfixturevalue("postgres")
    return running.new_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def ready_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a database with all tables."""
    if request.param == "sqlite":
        return copied(request.getfixturevalue("migrated_file"), tmp_path)
    return new_fleet(request.getfixturevalue("postgres"))


@pytest.fixture
def database(ready_url: str) -> Iterator[Database]:
    """Empty, with all tables."""
    with closing(connect(ready_url)) as made:
        yield made
