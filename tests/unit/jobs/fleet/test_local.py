"""A fleet of this machine: what its client has beside that of an API, and that its answers are streamed and end with it."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet import local
from groupwise.jobs.fleet.local import LocalFleet
from groupwise.jobs.fleet.machines import packing
from groupwise.jobs.fleet.notify.local import LocalNotifier, OpenFolder, command_socket
from groupwise.jobs.fleet.notify.postgres import PostgresNotifier
from groupwise.jobs.fleet.settings import FleetPlace, FleetSettings
from groupwise.jobs.fleet.store.database import CommitUnknown, Database, DatabaseFailure
from tests.fleet_api import commands_answered, place_in
from tests.meanwhile import right_after

COMMAND = {"arguments": ["true"], "resources": {"gpus": 0}}
MACHINE = {"vm_id": "here", "transport": "local"}


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def fleet(database: Database, tmp_path: Path, messages: list[str]) -> Iterator[LocalFleet]:
    place = place_in(tmp_path / "fleet")
    with LocalFleet(place, "user:ada", database=database, warn=messages.append) as found:
        yield found


def test_events_name_the_user_or_for_whom_the_dashboard_acts(fleet: LocalFleet) -> None:
    fleet.add_machine(MACHINE)
    fleet.on_behalf_of("local").drain("here")
    fleet.on_behalf_of("k7f2").undrain("here")
    actors = [each["actor"] for each in fleet.events() if each["kind"].startswith("vm.")]
    assert actors == ["user:ada", "user:ada", "web:k7f2"]


async def test_a_dispatcher_is_woken(database: Database, tmp_path: Path) -> None:
    place = place_in(tmp_path / "fleet")
    notifiers: list[Any] = [LocalNotifier(place.folder)]
    if database.dialect == "postgresql":
        notifiers.append(PostgresNotifier(database.connection_arguments()))
    heard = [asyncio.create_task(notifier.wait(20)) for notifier in notifiers]
    await asyncio.sleep(0)
    while not all(getattr(notifier, "is_listening", True) for notifier in notifiers):  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0.01)
    try:
        # The fleet stays open: a command that goes on after it has submitted wakes dispatchers at once.
        with LocalFleet(place, "user:ada", database=database) as fleet:
            job = (await asyncio.to_thread(fleet.submit, COMMAND))["job_id"]
            assert await asyncio.gather(*heard) == [{job}] * len(notifiers)
    finally:
        for notifier in notifiers:
            await notifier.close()


def test_a_file_that_is_removed_before_it_is_sent_is_named(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    file.write_text("of a run that goes on")
    right_after(monkeypatch, local, "named_files", file.unlink)
    with pytest.raises(UsageError, match="f cannot be read, and is to be sent"):
        fleet.upload([file])


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
    fleet: LocalFleet, messages: list[str], monkeypatch: pytest.MonkeyPatch
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


def test_a_failure_of_the_database_is_reported_in_its_own_words(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(fn: Any) -> Any:
        raise DatabaseFailure("fleet.db does not do its work: disk I/O error.", temporary=False)

    monkeypatch.setattr(fleet.database, "read", failing)
    with pytest.raises(Refusal, match="disk I/O error"):
        fleet.jobs()


def place_of(database: Database, folder: Path) -> FleetPlace:
    """Of a fleet that names this database in its settings."""
    url = database.engine.url.render_as_string(hide_password=False)
    return FleetPlace(place_in(folder / "fleet").folder, FleetSettings(database=url))


def test_a_client_continues_by_itself_when_the_process_that_answers_it_ends(
    database: Database, tmp_path: Path
) -> None:
    place = place_of(database, tmp_path / ("long" * 40))
    with commands_answered(database, place):
        fleet = LocalFleet(place, "user:jörg")
        held = fleet.submit({**COMMAND, "hold": True})["job_id"]
        with commands_answered(database, place), LocalFleet(place, "user:ada") as second:
            second.release(held)  # a second process leaves the socket to the first
        fleet.hold(held)
    with fleet:
        assert fleet.show(held)["submitted_by"] == "user:jörg"
        fleet.release(held)
        assert fleet.upload([Path(__file__)])


@pytest.mark.parametrize("listens", [False, True], ids=["killed", "hung"])
def test_a_process_that_does_not_answer_is_not_waited_for(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    monkeypatch.setattr("groupwise.jobs.fleet.local.PROBE_SECONDS", 0.05)
    place = place_of(database, tmp_path)
    name = command_socket(packing.version(), place.settings.database)
    with socket.socket(socket.AF_UNIX) as left, OpenFolder(place.folder) as folder:
        left.bind(folder.address(name))
        if listens:
            left.listen()
        with LocalFleet(place, "user:ada") as fleet:
            assert fleet.jobs() == []
    if not listens:
        with commands_answered(database, place), LocalFleet(place, "user:ada") as fleet:
            assert fleet.jobs() == []
            assert fleet._database is None
