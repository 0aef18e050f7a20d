"""Events in order. Late commits are in `tests/integration/fleet/test_events.py`."""

from collections.abc import Callable

from sqlalchemy.orm import Session

from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database


def happens(**more: object) -> Callable[[Session], int]:
    given = {"actor": "user:ada", "kind": events.JOB_QUEUED, **more}
    return lambda session: events.append(session, **given)  # pyright: ignore[reportArgumentType, reportReturnType]


def read(database: Database, position: int = 0, limit: int = 100) -> list[int]:
    return [e.event_id for e in database.run(lambda s: events.after(s, position, limit))]


def test_readers_continue_where_they_were(database: Database) -> None:
    for _ in range(5):
        database.run(happens())
    ids = read(database)
    assert len(ids) == 5
    assert ids == sorted(ids)
    assert read(database, limit=2) == ids[:2]
    assert read(database, position=ids[1], limit=2) == ids[2:4]
    assert read(database, position=ids[-1]) == []


def test_gathered_events_are_written_in_order(database: Database) -> None:
    def several(session: Session) -> None:
        with events.batch(session):
            for n in range(3):
                happens(job_id=f"j{n}", detail={"n": n})(session)
        happens(job_id="j3")(session)

    database.run(several)
    found = database.run(lambda s: [(e.job_id, e.detail) for e in events.after(s, 0, 10)])
    assert found == [*((f"j{n}", {"n": n}) for n in range(3)), ("j3", None)]
