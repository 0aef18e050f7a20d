"""The harness itself: a server that is missing is no silent success, and one that was killed comes back with what it had acknowledged."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from _pytest.outcomes import Failed, Skipped

from tests import postgres as harness
from tests.postgres import Postgres

pytestmark = pytest.mark.fleet

ROOT = Path(__file__).parents[3]


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


BEGINS = """\
import sys, time
from tests.postgres import server
with server() as running:
    print(running.port, running.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="the kernel is asked by setpriv")
def test_it_ends_with_whoever_started_it() -> None:
    """Else each test run that is killed leaves a server behind."""
    with subprocess.Popen(
        [sys.executable, "-c", BEGINS], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        assert owner.stdout is not None
        port, folder = owner.stdout.readline().split()
        owner.kill()
    deadline = time.monotonic() + 30.0
    while _listens(int(port)):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)
    shutil.rmtree(folder)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
