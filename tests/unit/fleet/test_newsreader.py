"""What `fleet up` says is news and nothing else: neither a deaf reader nor a database that is away ends the fleet."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import RunError
from groupwise.fleet import newsreader
from groupwise.fleet.newsreader import Newsreader
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.tables import VM
from tests.fleet_api import place_in


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newsreader, "LOOK_SECONDS", 0.01)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "its reader has gone"), ValueError("bug")])
async def test_whoever_does_not_hear_it_ends_nothing(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def say(line: str) -> None:
        raise error

    await Newsreader(place_in(tmp_path), database, say).run()
    assert "no" in caplog.text
    assert "news" in caplog.text


@pytest.mark.parametrize(("slots", "told"), [(None, "one job"), (3, "3 jobs"), (0, "no slot")])
def test_how_many_jobs_a_machine_without_gpus_takes_is_as_was_told(
    database: Database, slots: int | None, told: str
) -> None:
    database.run(lambda s: s.add(VM(vm_id="local", cpu_slots=slots, facts={"cpus": 2})))
    first, *_ = database.read(newsreader._greeting)
    assert told in first


async def test_it_waits_for_a_database_that_is_away(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries, ready = Database.read_in_thread, iter(range(100)), asyncio.Event()

    def say(line: str) -> None:
        if line.startswith("Ready"):
            ready.set()

    async def away(self: Database, fn: Any) -> Any:
        if next(tries) % 2 == 0:
            raise RunError("the server does not answer")
        return await real(self, fn)

    monkeypatch.setattr(Database, "read_in_thread", away)
    reading = asyncio.create_task(Newsreader(place_in(tmp_path), database, say).run())
    async with asyncio.timeout(30):
        await ready.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
