"""A fleet of this machine: what its client has beside that of an API, and that its answers are streamed and end with it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.local import LocalFleet
from groupwise.jobs.fleet.notify.local import LocalDoorbell
from groupwise.jobs.fleet.notify.postgres import PostgresDoorbell
from groupwise.jobs.fleet.store.database import CommitUnknown, Database, DatabaseFailure
from tests.fleet_api import place_in

COMMAND = {"arguments": ["true"], "resources": {"gpus": 0}}
MACHINE = {"vm_id": "here", "transport": "local"}


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def fleet(database: Database, tmp_path: Path, told: list[str]) -> Iterator[LocalFleet]:
    place = place_in(tmp_path / "fleet")
    with LocalFleet(place, database, "user:ada", warn=told.append) as found:
        yield found


def test_events_name_the_user_or_for_whom_the_dashboard_acts(fleet: LocalFleet) -> None:
    fleet.add_machine(MACHINE)
    fleet.on_behalf_of("local").drain("here")
    fleet.on_behalf_of("k7f2").undrain("here")
    actors = [each["actor"] for each in fleet.events() if each["kind"].startswith("vm.")]
    assert actors == ["user:ada", "user:ada", "web:k7f2"]


async def test_a_dispatcher_is_woken(database: Database, tmp_path: Path) -> None:
    place = place_in(tmp_path / "fleet")
    bells: list[Any] = [LocalDoorbell(place.folder)]
    if database.dialect == "postgresql":
        bells.append(PostgresDoorbell(database.connection_arguments()))
    heard = [asyncio.create_task(bell.wait(20)) for bell in bells]
    await asyncio.sleep(0)
    while not all(getattr(bell, "is_listening", True) for bell in bells):  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    try:
        # The fleet stays open: a command that goes on after it has submitted wakes dispatchers at once.
        with LocalFleet(place, database, "user:ada") as fleet:
            job = (await asyncio.to_thread(fleet.submit, COMMAND))["job_id"]
            assert await asyncio.gather(*heard) == [{job}] * len(bells)
    finally:
        for bell in bells:
            await bell.close()


def test_files_go_in_and_come_out_in_pieces(fleet: LocalFleet, tmp_path: Path) -> None:
    data = bytes(range(256)) * (1 << 17)  # 32 MiB: several pieces each way
    (tmp_path / "data").write_bytes(data)
    manifest = fleet.upload([tmp_path / "data"])
    entry = manifest["data"]
    blob = fleet.place.blobs / entry[0][:2] / entry[0]
    assert blob.read_bytes() == data
    job = fleet.submit({**COMMAND, "files": manifest})["job_id"]
    left = fleet.place.artefacts / job / "1"
    left.mkdir(parents=True)
    (left / "data").hardlink_to(blob)
    left.with_suffix(".json").write_text(json.dumps({"files": manifest, "left_out": []}))
    with closing(fleet.artefact_pieces(job, "data", epoch=1, offset=3)) as pieces:
        assert data[3:].startswith(next(pieces))  # and what nobody reads on is given up
    assert b"".join(fleet.artefact_pieces(job, "data", epoch=1, offset=3)) == data[3:]


def test_threads_may_ask_at_once(fleet: LocalFleet) -> None:
    job = fleet.submit(COMMAND)["job_id"]
    waiting = threading.Thread(target=lambda: list(fleet.follow(job)), daemon=True)
    waiting.start()
    fleet.cancel(job)
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_submission_that_got_no_answer_is_sent_again_under_its_name(
    fleet: LocalFleet, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lost = fleet.database.run, list[int]()

    def unheard(fn: Any) -> Any:
        answer = run(fn)
        if not lost:
            lost.append(1)
            raise CommitUnknown("the connection was lost")
        return answer

    monkeypatch.setattr(fleet.database, "run", unheard)
    monkeypatch.setattr(fleet, "_sleep", lambda _: None)
    job = fleet.submit(COMMAND)["job_id"]
    assert [each["job_id"] for each in fleet.jobs()] == [job]
    assert fleet.submit(COMMAND)["job_id"] != job


def test_a_failure_of_the_database_is_told_in_its_own_words(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fn: Any) -> Any:
        raise DatabaseFailure("fleet.db does not do its work: disk I/O error.", passing=False)

    monkeypatch.setattr(fleet.database, "read", failing)
    with pytest.raises(Refusal, match="disk I/O error"):
        fleet.jobs()
