"""A fleet that is reached directly has the methods of the client, with the same names of arguments, and gives the same documents."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.fleet.client import FleetClient
from groupwise.jobs.fleet.direct import DirectFleet
from groupwise.jobs.fleet.retry import Patience
from groupwise.jobs.fleet.store.database import CommitUnknown, Database
from groupwise.jobs.fleet.verbs.actor import Actor
from tests.fleet_api import place_in

OF_THE_DATABASE = {"read", "change", "ring"}
OF_THE_CLIENT = {"close", "follow", "wait"}
COMMAND = {"arguments": ["true"], "resources": {"gpus": 0}}


@pytest.fixture
def fleet(database: Database, tmp_path: Path) -> DirectFleet:
    return DirectFleet(place_in(tmp_path / "fleet"), database, Actor("user:ada"))


def methods(of: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for name, value in vars(of).items()
        if not name.startswith("_") and callable(value)
    }


def test_both_ways_have_the_same_methods() -> None:
    direct, client = methods(DirectFleet), methods(FleetClient)
    assert direct.keys() - OF_THE_DATABASE == client.keys() - OF_THE_CLIENT
    for name in direct.keys() & client.keys():
        assert str(direct[name]) == str(client[name]), name


def test_a_submission_that_got_no_answer_is_sent_again_under_its_name(
    fleet: DirectFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told = fleet.database.run, list[str]()
    fleet.patience = Patience(tell=told.append, sleep=lambda _: None)

    def unheard(fn: Any) -> Any:
        answer = run(fn)
        if not told:
            raise CommitUnknown("the connection was lost")
        return answer

    monkeypatch.setattr(fleet.database, "run", unheard)
    job = fleet.submit(COMMAND)["job_id"]
    assert [each["job_id"] for each in fleet.jobs()] == [job]
    assert len(told) == 2
    assert fleet.submit(COMMAND)["job_id"] != job
