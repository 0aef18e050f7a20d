"""Both databases of a fleet. A suite of `tests/unit/fleet` that is imported here runs on both."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.fleet.store.database import Database, connect, migrate
from tests.postgres import Postgres, server
from tests.ssh_hosts import full_machines, network_of_the_fleet, plain_machines

__all__ = ["full_machines", "network_of_the_fleet", "plain_machines"]


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


@pytest.fixture
def database(empty_url: str) -> Iterator[Database]:
    """Empty, with all tables."""
    made = connect(empty_url)
    try:
        migrate(made)
        yield made
    finally:
        made.close()
