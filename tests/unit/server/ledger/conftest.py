"""An open ledger, its transaction, and an empty run."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from groupwise.server.ledger.file import open_file
from groupwise.server.ledger.transaction import Transaction
from tests.unit.server.ledger.making import FakeTime, begin


@pytest.fixture
def connection(tmp_path) -> Iterator[sqlite3.Connection]:
    with closing(open_file(tmp_path / "server.db")) as opened:
        opened.execute("BEGIN")
        yield opened


@pytest.fixture
def ledger(connection) -> Transaction:
    """An open transaction, without a run."""
    return Transaction(connection, now=1_700_000_000.0, uptime=100.0)


@pytest.fixture
def run(ledger) -> Transaction:
    """An open transaction, with an active run."""
    begin(ledger)
    return ledger


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()
