"""The real servers of a worker. A suite of `tests/unit/jobs/fleet` that is imported here runs on PostgreSQL; on SQLite it runs there."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from groupwise.jobs.fleet.store.database import Database, connect
from tests.fleet_databases import migrated_file, new_fleet
from tests.postgres import Postgres, server
from tests.ssh_hosts import full_machines, network_of_the_fleet, plain_machines

__all__ = ["full_machines", "migrated_file", "network_of_the_fleet", "plain_machines"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The server of this worker. Whoever kills it starts it again."""
    with server() as running:
        yield running


@pytest.fixture
def empty_url(postgres: Postgres) -> str:
    """Of a database without tables."""
    return postgres.new_database()


@pytest.fixture
def ready_url(postgres: Postgres) -> str:
    """Of a database with all tables."""
    return new_fleet(postgres)


@pytest.fixture
def database(ready_url: str) -> Iterator[Database]:
    """Empty, with all tables."""
    with closing(connect(ready_url)) as made:
        yield made


@pytest.fixture
def second(ready_url: str, database: Database) -> Iterator[Database]:
    """A second connection to the same database, as another process would open it."""
    with closing(connect(ready_url)) as made:
        yield made
