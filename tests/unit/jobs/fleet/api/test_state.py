"""Numbers for Prometheus: what an alert is about is there also when it is bad."""

from typing import Any

import pytest

from groupwise.jobs.fleet.api.routes.state import render
from groupwise.jobs.fleet.operations import status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import ControlProcess


def silence(database: Database) -> dict[str, float]:
    return of_roles(database, "groupwise_fleet_role_silent_seconds")


def of_roles(database: Database, name: str) -> dict[str, float]:
    found = database.read(lambda s: status.overview(s, Actor("metrics")))
    start = name + '{role="'
    samples = [line.removeprefix(start) for line in render(found) if line.startswith(start)]
    return {role: float(value) for role, _, value in (each.partition('"} ') for each in samples)}


def record_process(database: Database, role: str, owner: str, ago: float) -> None:
    def write(session: Any) -> None:
        at = status.database_time(session) - ago
        row = {"host": "h", "pid": 1, "started_at": at, "seen_at": at}
        session.add(ControlProcess(owner=owner, role=role, **row))

    database.run(write)


def test_a_role_that_has_died_is_silent_for_so_long(database: Database) -> None:
    record_process(database, "poller", "p", 300.0)
    record_process(database, "poller", "older", 900.0)
    record_process(database, "tracker", "t", 2 * status.FORGOTTEN_SECONDS)
    found = silence(database)
    assert found["poller"] == pytest.approx(300, abs=30)
    assert found["tracker"] == float("inf")


def test_a_role_counts_as_alive_if_one_of_its_processes_is(database: Database) -> None:
    for owner, ago in (("d1", 400.0), ("d2", 1.0), ("api", 0.0)):
        record_process(database, "api" if owner == "api" else "dispatcher", owner, ago)
    assert silence(database)["dispatcher"] < 30
    living = of_roles(database, "groupwise_fleet_role_processes")
    assert (living["dispatcher"], living["api"], living["poller"]) == (1, 1, 0)
