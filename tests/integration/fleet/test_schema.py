"""The suite of `tests/unit/jobs/fleet/store/test_schema.py`, views included, on a real PostgreSQL, and migrations while others go on."""

from collections.abc import Generator
from contextlib import closing, contextmanager

import psycopg
import pytest
from sqlalchemy import text

from groupwise.jobs.fleet.store import triggers
from groupwise.jobs.fleet.store.database import Database, check_schema, connect, migrate
from groupwise.jobs.fleet.store.engine import parse
from groupwise.jobs.fleet.store.triggers import Rule
from tests.unit.jobs.fleet.store.test_schema import *  # noqa: F403


@pytest.fixture
def other_rules(ready_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than those with which the database was made."""
    never = Rule("job_never", "jobs", "UPDATE", "1 = 1", "never")
    monkeypatch.setattr(triggers, "rules", lambda: (never,))


@contextmanager
def a_backup(url: str) -> Generator[psycopg.Connection]:
    """What pg_dump holds of every table until it has read all of them."""
    with psycopg.connect(url) as reader:
        reader.execute("LOCK TABLE jobs IN ACCESS SHARE MODE")
        yield reader


@pytest.mark.usefixtures("other_rules")
def test_a_migration_that_waits_for_a_backup_blocks_no_other_session(ready_url: str) -> None:
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        with closing(connect(ready_url)) as fleet:  # between two attempts it holds nothing
            fleet.run(lambda s: s.execute(text("INSERT INTO jobs (job_id) VALUES ('j')")))
        backup.rollback()

    with a_backup(ready_url) as backup, closing(Database(parse(ready_url), sleep)) as database:
        migrate(database)
        check_schema(database)
    assert len(naps) == 1
