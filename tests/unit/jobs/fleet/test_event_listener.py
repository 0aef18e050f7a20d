"""What `fleet up` prints are events only; a reader that does not read does not end the fleet."""

from pathlib import Path

import pytest
from sqlalchemy import func, select

from groupwise.jobs.fleet import event_listener
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.event_listener import EventListener
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import Event
from tests.fleet_api import place_in
from tests.unit.jobs.fleet.queue_helpers import add_machine, claim_some, submit


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_listener, "LOOK_SECONDS", 0.01)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "its reader has gone"), ValueError("bug")])
async def test_an_event_listener_whose_output_fails_ends_without_an_error(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def say(line: str) -> None:
        raise error

    await EventListener(place_in(tmp_path), database, say).run()
    assert "no" in caplog.text
    assert "news" in caplog.text


async def test_the_greeting_names_the_folder_if_it_is_not_the_default(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def greeting() -> str:
        lines = list[str]()

        def say(line: str) -> None:
            lines.append(line)
            if "Ctrl-C" in line:
                raise BrokenPipeError(32, "this test has read enough")

        await EventListener(place_in(tmp_path), database, say).run()
        return "\n".join(lines)

    option = f"fleet list --fleet {place_in(tmp_path).folder}"
    assert option in await greeting()
    monkeypatch.setattr(event_listener, "DEFAULT_FOLDER", str(place_in(tmp_path).folder))
    assert "--fleet" not in await greeting()


async def test_a_line_about_a_silent_machine_names_machine_and_job(
    database: Database, tmp_path: Path
) -> None:
    add_machine(database, "gpu-1")
    job_id = submit(database)
    (claimed,) = claim_some(database)
    listener = EventListener(place_in(tmp_path), database, print)
    newest = select(func.max(Event.event_id))
    for silent in (True, False):
        listener._position = database.read(lambda s: s.scalar(newest)) or 0
        database.run(
            lambda s, to=silent: records.record_contact(s, claimed.epoch, "me", 0, silent=to)
        )
        [line], _ = database.read(listener._next_lines)
        assert "gpu-1" in line
        assert job_id in line


@pytest.mark.parametrize("draining", [False, True])
async def test_the_return_of_a_lost_machine_is_reported(
    database: Database, tmp_path: Path, draining: bool
) -> None:
    add_machine(database, "gpu-1", lost_at=5.0, draining=draining)
    listener = EventListener(place_in(tmp_path), database, print)
    listener._position = 0
    assert database.run(lambda s: records.return_to_use(s, "me", "gpu-1"))
    [line] = [line for line in database.read(listener._next_lines)[0] if "not lost" in line]
    assert "gpu-1" in line
    assert ("takes jobs" in line) is not draining


async def test_a_line_about_a_waiting_job_says_why_the_machine_does_not_take_it(
    database: Database, tmp_path: Path
) -> None:
    add_machine(database, "gpu-1", drain_reason="it burns")
    submit(database, gpus=0)
    assert claim_some(database) == []
    lines, _ = database.read(EventListener(place_in(tmp_path), database, print)._next_lines)
    assert "it burns" in lines[-1]
