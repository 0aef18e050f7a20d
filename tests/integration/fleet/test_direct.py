"""The suite of `tests/unit/fleet/test_direct.py` on a real PostgreSQL, and what is told when that goes away."""

from pathlib import Path
from typing import Any

import pytest

from groupwise.cli.fleet_follow import follow_log
from groupwise.fleet.direct import DirectFleet
from groupwise.fleet.files.logs import append, make
from groupwise.fleet.patience import Patience
from groupwise.fleet.store.database import Database
from groupwise.fleet.verbs.actor import Actor
from groupwise.wire.fleet import LogPart
from tests.fleet_api import place_in
from tests.postgres import Postgres
from tests.unit.fleet.test_direct import *  # noqa: F403
from tests.unit.fleet.test_direct import COMMAND


def test_who_follows_beside_the_database_goes_on_where_its_server_was_away(
    postgres: Postgres,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
) -> None:
    """Killed after a piece was read, and begun again once that has been told."""
    monkeypatch.setattr("groupwise.fleet.store.database.PATIENCE", 0.0)
    told: list[str] = []

    def asked_on(_: float) -> None:
        postgres.start()
        fleet.cancel(job)

    fleet = DirectFleet(
        place_in(tmp_path / "fleet"),
        database,
        Actor("user:ada"),
        Patience(tell=told.append, sleep=asked_on),
    )
    job = fleet.submit(COMMAND)["job_id"]
    path, log = make(fleet.place.logs, job, 4), fleet.log

    def killed_once(job_id: str, **wanted: Any) -> LogPart:
        part = log(job_id, **wanted)
        if not told:
            append(path, 6, b"last\n")
            postgres.kill()
        return part

    append(path, 0, b"first\n")
    fleet.log = killed_once  # type: ignore[method-assign]
    assert follow_log(fleet, job, sleep=lambda _: None)["status"] == "cancelled"
    assert capfd.readouterr().out == "first\nlast\n"
    away, back = told
    assert "postgresql://" in away
    assert back == "the fleet answers again"
