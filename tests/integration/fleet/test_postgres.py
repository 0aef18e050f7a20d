"""The harness itself: a server that is missing is no silent success, and one that was killed comes back with what it had acknowledged."""

import psycopg
import pytest
from _pytest.outcomes import Failed, Skipped

from tests import postgres as harness
from tests.postgres import Postgres

pytestmark = pytest.mark.fleet


@pytest.mark.parametrize(("promised", "outcome"), [("1", Failed), ("0", Skipped)])
def test_a_missing_server(
    monkeypatch: pytest.MonkeyPatch, promised: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(harness, "programs", lambda: None)
    monkeypatch.setenv("GROUPWISE_REAL_SERVERS", promised)
    with pytest.raises(outcome, match="there is no PostgreSQL"):
        harness.needed()


def test_killed_and_back(postgres: Postgres) -> None:
    url = postgres.new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (a INTEGER)")
        connection.execute("INSERT INTO kept VALUES (1)")
        postgres.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    postgres.start()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT a FROM kept").fetchall() == [(1,)]
