import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import select

from groupwise.jobs.fleet import tracker
from groupwise.jobs.fleet.notify.nats import NatsAway
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database, connect
from groupwise.jobs.fleet.store.tables import Attempt, Cursor, Job
from groupwise.jobs.fleet.tracker import JobEnd, NatsOutlet, Tracker, keep_position, position_of
from tests.fleet_databases import copied


class Outlet:
    """Takes what it is told, unless it is away or refuses single ones."""

    name = "outlet"
    announces_history = True

    def __init__(self) -> None:
        self.told: list[JobEnd] = []
        self.heard = asyncio.Event()
        self.away = False
        self.refused: set[str] = set()

    def destination_of(self, job_end: JobEnd) -> str | None:
        return job_end.job_id.rpartition("-")[0] or None

    async def announce(self, job_ends: Sequence[JobEnd]) -> frozenset[int]:
        if self.away:
            return frozenset()
        taken = [e for e in job_ends if e.job_id not in self.refused]
        self.told += taken
        self.heard.set()
        return frozenset(e.event_id for e in taken)

    @property
    def names(self) -> list[str]:
        return [e.job_id for e in self.told]


def end(database: Database, job_id: str, status: str = "completed", **detail: Any) -> None:
    def write(session: Any) -> None:
        if session.get(Job, job_id) is None:
            session.add(Job(job_id=job_id, request={"webhook": "https://example.org/hook"}))
            session.flush()
            session.add(Attempt(job_id=job_id, generation=0, number=0, created_at=0.0))
            session.flush()
        epoch = session.scalars(select(Attempt.epoch).where(Attempt.job_id == job_id)).one()
        events.append(
            session, actor="d", kind=f"job.{status}", job_id=job_id, epoch=epoch, detail=detail
        )

    database.run(write)


def position(database: Database) -> int:
    return database.read(lambda s: position_of(s, "outlet"))


async def test_each_end_is_reported_once_with_what_is_known_of_it(database: Database):
    outlet = Outlet()
    tracking = Tracker(database, outlet)
    lines = "\n".join(f"line {n}" for n in range(50))
    about = {"exit_code": 3, "failure_class": "crashed", "reason": "crashed: exit code 3"}
    end(database, "a", "failed", tail=lines, **about)
    for _ in range(3):
        await tracking.round()
    (told,) = outlet.told
    found = (told.job_id, told.status, told.exit_code, told.failure_class, told.epoch)
    assert found == ("a", "failed", 3, "crashed", 1)
    assert told.log_tail == tuple(f"line {n}" for n in range(30, 50))
    assert (told.subject, told.webhook) == ("jobs.errored", "https://example.org/hook")
    document = json.loads(told.message())
    assert document["job_id"] == "a"
    assert "webhook" not in document, "an address may hold a key"


async def test_after_a_restart_it_continues_where_it_was_acknowledged(database: Database):
    outlet = Outlet()
    outlet.refused = {"b"}
    for name in "abc":
        end(database, name)
    await Tracker(database, outlet).round()
    assert outlet.names == ["a", "c"]
    assert position(database) == 1, "not past what nobody has taken"
    outlet.refused = set()
    await Tracker(database, outlet).round()
    assert outlet.names == ["a", "c", "b", "c"], "told at least once; the event's number says twice"
    assert outlet.told[1] == outlet.told[3]


async def test_news_that_are_new_begin_with_the_last_hour_and_say_so(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """NATS in a fleet that did without it: nobody wants to hear of a year's jobs at once."""
    for name in ("long-ago", "yesterday"):
        end(database, name)
    monkeypatch.setattr(tracker, "HISTORY_SECONDS", -3600.0)  # an hour later
    news = Outlet()
    news.announces_history = False
    await Tracker(database, news).round()
    assert news.names == []
    [record] = caplog.records
    assert "ended before event 3" in record.getMessage()
    caplog.clear()
    end(database, "new")
    await Tracker(database, news).round()  # as after a restart
    assert (news.names, caplog.records) == (["new"], [])


@pytest.mark.parametrize("since", [("a",), ("a", "new-1", "new-2", "new-3")])
async def test_a_database_that_has_lost_its_last_commits_is_read_again(
    database: Database, migrated_file: Path, tmp_path: Path, since: Sequence[str]
):
    """A copy that had not heard of them took over, whether or not it has given their numbers again by now."""
    outlet = Outlet()
    tracking = Tracker(database, outlet)
    for name in ("a", "lost-1", "lost-2"):
        end(database, name)
    await tracking.round()
    (tmp_path / "copy").mkdir()
    with closing(connect(copied(migrated_file, tmp_path / "copy"))) as copy:
        copy.run(lambda s: keep_position(s, "outlet", 1))
        for name in since:
            end(copy, name)
        tracking._database = copy
        outlet.told.clear()
        for _ in range(3):
            await tracking.round()
        assert outlet.names == list(since[1:])
        end(copy, "last")
        await tracking.round()
        assert outlet.names == [*since[1:], "last"]
        assert position(copy) == len(since) + 1


async def test_no_position_is_written_into_a_database_that_has_lost_it(
    database: Database, migrated_file: Path, tmp_path: Path
):
    """It took over while an outlet was told."""
    outlet = Outlet()
    tracking = Tracker(database, outlet)
    end(database, "a")
    await tracking.round()
    (tmp_path / "copy").mkdir()
    with closing(connect(copied(migrated_file, tmp_path / "copy"))) as copy:
        announce = outlet.announce

        async def announce_and_fail_over(job_ends: Sequence[JobEnd]) -> frozenset[int]:
            tracking._database = copy
            return await announce(job_ends)

        outlet.announce = announce_and_fail_over
        end(database, "lost")
        await tracking.round()
        end(copy, "new")
        await tracking.round()
        assert outlet.names == ["a", "lost", "new"]
        assert position(copy) == 1


async def test_news_of_a_fleet_that_is_new_lose_nothing(
    database: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Also where nobody listens yet, and the tracker begins again long before anybody does; or where it was begun last of all roles."""
    end(database, "before-the-tracker")
    away = Outlet()
    away.announces_history, away.away = False, True
    await Tracker(database, away).round()
    end(database, "first")
    monkeypatch.setattr(tracker, "HISTORY_SECONDS", -1.0)  # all of it is old by now
    news = Outlet()
    news.announces_history = False
    await Tracker(database, news).round()
    assert (news.names, caplog.records) == (["before-the-tracker", "first"], [])


async def test_many_that_wait_at_one_place_keep_none_of_the_others_from_being_read(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    for name, number in (("READ", 5), ("MAX_PENDING", 5), ("MAX_PER_DESTINATION", 2)):
        monkeypatch.setattr(tracker, name, number)
    outlet = Outlet()
    dead = [f"dead-{number}" for number in range(7)]
    outlet.refused = {*dead}
    tracking = Tracker(database, outlet)
    for job in (*dead, "alive-1", "b"):
        end(database, job)
    for _ in range(2):
        await tracking.round()
    assert outlet.names == ["alive-1", "b"]
    assert position(database) == 0
    outlet.refused = {"dead-6"}
    await tracking.round()
    assert position(database) == 2, "what was told, and not what else was read"
    for _ in range(5):
        await tracking.round()
    assert outlet.names == ["alive-1", "b", *dead[:6]]
    assert position(database) == 6
    outlet.refused = set()
    await tracking.round()
    assert outlet.names == ["alive-1", "b", *dead]
    assert position(database) == 9


def test_a_position_never_goes_back(database: Database):
    for given in (3, 7, 5):
        database.run(lambda s, p=given: keep_position(s, "outlet", p))
    assert position(database) == 7
    assert database.read(lambda s: len(s.scalars(select(Cursor.name)).all())) == 1


class Link:
    """A server that takes messages of so many bytes."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.told: list[str] = []

    async def publish(self, texts: Sequence[tuple[str, bytes]], timeout: float) -> None:
        if any(len(payload) > self.largest for _, payload in texts):
            raise NatsAway("maximum payload exceeded")
        self.told += [json.loads(payload)["job_id"] for _, payload in texts]


async def test_an_end_that_fits_in_no_message_keeps_no_other_from_being_told(
    database: Database, caplog: pytest.LogCaptureFixture
):
    """A server may take next to nothing; an id is never cut, since nobody would know what it means."""
    wide = "w" * 80
    small = Link(len(JobEnd(1, wide, "failed", 1_700_000_000.123456).message()) - 40)
    for name in ("a", wide, "b"):
        end(database, name)
    tracking = Tracker(database, NatsOutlet(cast("Any", small)))
    await tracking.round()
    assert small.told == ["a", "b"]
    assert database.read(lambda s: position_of(s, NatsOutlet.name)) == 3
    [record] = caplog.records
    assert f"is not told of the end of {wide}" in record.getMessage()
