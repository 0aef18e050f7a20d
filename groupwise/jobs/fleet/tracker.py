"""The tracker: announces that a job has ended, on `jobs.completed` and `jobs.errored` of NATS and to the job's own webhook.

It follows the events of the fleet; the dispatcher that ended the job wrote one in the same transaction. Each outlet keeps its own
position in `cursors` and moves it only past events that were acknowledged. Delivery is therefore at least once: a restart of the tracker
or of NATS may repeat an announcement (its `event_id` shows that) but never loses one. Several trackers at once repeat announcements, and
do no other harm.

A database may lose its last commits when a copy of it takes over, and then assigns their numbers a second time. The event that was read
last is then missing or is another event, and the tracker starts again at the position that this database holds.

The NATS subjects carry news: when NATS is first used in a fleet that has run for long, announcements start with the jobs that ended in the
last hour, and the log says so. The position is stored at once, and from then on nothing is lost. A webhook belongs to its job, and is
called no matter how late.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, cast

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.core.errors import RunError
from groupwise.jobs.fleet.notify.base import LARGEST
from groupwise.jobs.fleet.notify.nats import NatsAway, NatsLink, NatsRefused
from groupwise.jobs.fleet.processes import NATS_CURSOR
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database, database_time
from groupwise.jobs.fleet.store.engine import upsert
from groupwise.jobs.fleet.store.tables import Attempt, Cursor, Event, Job

COMPLETED, ERRORED = "jobs.completed", "jobs.errored"
"""Subjects of NATS. A cancelled job has not completed: it is announced on `jobs.errored`, with the status `cancelled`."""
LAST_LINES = 20
MAX_UNCUT = 80
"""Texts of up to this many characters are not cut; an id may be this long."""
INTERVAL = 1.0
"""Seconds between two reads of the events."""
READ = 1000
"""Events that are read at once."""
MAX_PENDING = 10_000
"""Announcements that wait in memory for delivery; the rest wait in the database."""
MAX_PER_DESTINATION = 200
"""Announcements in memory for one destination; beyond that only event numbers are kept, and reading continues for the others."""
MAX_NUMBERS = 200_000
"""Maximum number of events kept by number alone."""
HISTORY_SECONDS = 3600.0
"""Seconds: a new outlet treats jobs that ended earlier as history."""
MAX_NAMED = 5
"""Jobs that a warning names."""
PUBLISHED_AT_ONCE = 100
"""Announcements published before waiting for an acknowledgement."""
ACKNOWLEDGE_TIMEOUT = 5.0
"""Seconds that NATS may take for one acknowledgement."""
REFUSED_SECONDS = 30.0
"""Seconds between two attempts on a subject to which NATS does not allow us to publish."""

EventPosition = tuple[int, float]
"""An event's number and time; the time is needed because a number may be assigned twice."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job, as it is announced."""

    event_id: int
    """The same in every repetition of the announcement."""
    job_id: str
    status: str
    """completed, failed or cancelled."""
    at: float
    """Seconds since 1970."""
    project: str = "default"
    name: str | None = None
    generation: int = 0
    epoch: int | None = None
    """Epoch of the attempt that ended it; None: no attempt was started."""
    exit_code: int | None = None
    failure_class: str | None = None
    failure_reason: str | None = None
    log_tail: tuple[str, ...] = ()
    """Last lines, oldest first."""
    webhook: str | None = None

    @property
    def subject(self) -> str:
        """The NATS subject."""
        return COMPLETED if self.status == JobStatus.COMPLETED else ERRORED

    def message(self, largest: int = LARGEST) -> bytes:
        """Encode as JSON of at most `largest` bytes if possible: drop the oldest log lines first, then cut the longest text in half."""
        document: dict[str, Any] = {
            "event_id": self.event_id,
            "job_id": self.job_id,
            "status": self.status,
            "at": self.at,
            "project": self.project,
            "name": self.name,
            "generation": self.generation,
            "epoch": self.epoch,
            "exit_code": self.exit_code,
            "failure_class": self.failure_class,
            "failure_reason": self.failure_reason,
            "log_tail": list(self.log_tail),
        }
        while len(text := json.dumps(document).encode()) > largest and _shorten(document):
            pass
        return text


def _shorten(document: dict[str, Any]) -> bool:
    """Shorten the document once; False: nothing can be removed. Hand-written rows may hold texts of any length; our ids stay whole."""
    if document["log_tail"]:
        del document["log_tail"][0]
        return True
    texts = {key: text for key, text in document.items() if isinstance(text, str)}
    longest = max(texts, key=lambda key: len(texts[key]))
    field = longest if len(texts[longest]) > MAX_UNCUT else "failure_reason"
    if text := texts.get(field):
        document[field] = text[: len(text) // 2]
    return bool(text)


class Outlet(Protocol):
    """A destination of announcements. `name` is the key of its position in `cursors`."""

    name: str
    announces_history: bool
    """True if a new outlet also announces jobs that ended before it existed."""

    def destination_of(self, job_end: JobEnd) -> str | None:
        """The destination, if slow ones must not hold up the others; None: there is one destination for all."""
        ...

    async def announce(self, job_ends: Sequence[JobEnd]) -> frozenset[int]:
        """Announce them. Returns the events that are finished; the others are passed again. A missing listener raises nothing."""
        ...


class NatsOutlet:
    """Publishes to the subjects of NATS; an event is finished once the server has acknowledged it."""

    name = NATS_CURSOR
    announces_history = False

    def __init__(self, link: NatsLink, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._not_before: dict[str, float] = {}
        """Monotonic time from which a refused subject is tried again, by subject."""

    def destination_of(self, job_end: JobEnd) -> str | None:
        """See `Outlet`."""
        return None

    async def announce(self, job_ends: Sequence[JobEnd]) -> frozenset[int]:
        """See `Outlet`."""
        delivered: set[int] = set()
        for subject in (COMPLETED, ERRORED):  # we may lack permission for one of them
            if self._clock() >= self._not_before.get(subject, 0.0):
                delivered |= await self._publish_subject(
                    [end for end in job_ends if end.subject == subject]
                )
        return frozenset(delivered)

    async def _publish_subject(self, job_ends: Sequence[JobEnd]) -> set[int]:
        """Publish events of one subject, and return those that were accepted."""
        delivered: set[int] = set()
        for begin in range(0, len(job_ends), PUBLISHED_AT_ONCE):
            portion = job_ends[begin : begin + PUBLISHED_AT_ONCE]
            largest = min(self._link.largest, LARGEST)
            messages = [(e, e.message(largest)) for e in portion]
            fitting_messages = [(e.subject, text) for e, text in messages if len(text) <= largest]
            try:
                await self._link.publish(fitting_messages, ACKNOWLEDGE_TIMEOUT)
            except NatsRefused:  # the link has logged it, and the server repeats it each time
                self._not_before[portion[0].subject] = self._clock() + REFUSED_SECONDS
                break
            except NatsAway as error:
                logger.debug("%s", error)  # the link warns once about a lost connection
                break
            # Events above the size limit are skipped: waiting for them would block all later ones.
            for end in [e for e, text in messages if len(text) > largest]:
                logger.warning(
                    "%s is not told of the end of %.80s: NATS takes %d bytes of a message, fewer than that needs",
                    end.subject,
                    end.job_id,
                    largest,
                )
            delivered.update(e.event_id for e in portion)
        return delivered


class _EventsLost(Exception):
    """The database is not the one that was read before, or has lost some of its events."""


class Tracker:
    """One outlet's reader of the events; `run` continues until it is cancelled."""

    def __init__(self, database: Database, outlet: Outlet, interval: float = INTERVAL) -> None:
        self._database = database
        self._outlet = outlet
        self._interval = interval
        self._position: int | None = None
        """Number of the last event that was read since this process started."""
        self._newest: EventPosition | None = None
        """The newest event up to `_read`; None: there was none."""
        self._stored_position = 0
        self._untold: dict[int, JobEnd] = {}
        self._untold_by_destination: Counter[str] = Counter()
        """Number of announcements in `_untold` for each destination."""
        self._postponed: dict[str, deque[int]] = {}
        """Numbers of further events for a destination, the oldest first."""

    async def run(self) -> None:
        """Announce the ends of jobs until cancelled."""
        is_failing = False
        while True:
            try:
                has_more = await self.round()
                is_failing = False
            except RunError as error:
                if not is_failing:
                    logger.warning("%s: the events cannot be read: %s", self._outlet.name, error)
                is_failing, has_more = True, False
            # an error in one outlet must not stop the others, which run concurrently
            except Exception:
                if not is_failing:
                    logger.exception("%s crashed and is started again", self._outlet.name)
                is_failing, has_more = True, False
            if not has_more:
                await asyncio.sleep(self._interval)

    async def round(self) -> bool:
        """Read new events, announce them and those that failed before; returns whether more can be read at once."""
        try:
            return await self._run_round()
        except _EventsLost:  # start again from the stored position, and forget the events in memory
            logger.warning(
                "%s: the database has lost events that were there; it is read again from the position that is stored in it",
                self._outlet.name,
            )
            self._position, self._newest = None, None
            self._untold.clear()
            self._untold_by_destination.clear()
            self._postponed.clear()
            return True

    async def _run_round(self) -> bool:
        if self._position is None:
            name, history = self._outlet.name, self._outlet.announces_history
            position, skipped = await self._database.in_thread(lambda s: begin(s, name, history))
            self._newest = await self._database.in_thread(lambda s: _newest_event(s, position))
            if skipped:
                logger.warning(
                    "%s is new in this fleet and begins with what ended in the last hour: "
                    "it is not told of jobs that ended before event %d",
                    name,
                    skipped + 1,
                )
            self._position = self._stored_position = position
        await self._reload_postponed()
        is_full = self._has_room() and await self._read_new(self._position)
        if self._untold:
            for event_id in await self._outlet.announce(list(self._untold.values())):
                job_end = self._untold.pop(event_id, None)
                if (
                    job_end is not None
                    and (destination := self._outlet.destination_of(job_end)) is not None
                ):
                    self._untold_by_destination[destination] -= 1
                    if not self._untold_by_destination[destination]:
                        del self._untold_by_destination[destination]
        waiting_ids = [*self._untold, *(numbers[0] for numbers in self._postponed.values())]
        position = min(waiting_ids) - 1 if waiting_ids else self._position
        if position > self._stored_position:
            await self._database.in_thread(lambda s: self._keep_position(s, position))
            self._stored_position = position
        return is_full

    def _keep_position(self, session: Session, position: int) -> None:
        _require_same_history(session, self._newest)
        keep_position(session, self._outlet.name, position)

    async def _read_new(self, position: int) -> bool:
        newest = self._newest
        read_events, ends, pruned = await self._database.in_thread(
            lambda s: _next_ends(s, position, newest)
        )
        self._warn_of_pruned(pruned)
        if read_events:
            self._newest = read_events[-1]
            self._position, _ = read_events[-1]
        for end in ends:
            destination = self._outlet.destination_of(end)
            if destination is not None and (
                destination in self._postponed
                or self._untold_by_destination[destination] >= MAX_PER_DESTINATION
            ):
                self._postponed.setdefault(destination, deque()).append(end.event_id)
            else:
                self._add_pending(end)
        return len(read_events) == READ

    async def _reload_postponed(self) -> None:
        """Load announcements for destinations at which few wait now."""
        ids: list[int] = []
        for destination, numbers in list(self._postponed.items()):
            room = MAX_PER_DESTINATION - self._untold_by_destination[destination]
            if room >= MAX_PER_DESTINATION // 2 and len(ids) < READ:
                ids += list(islice(numbers, room))
        if not ids:
            return
        newest = self._newest

        def read_ends(session: Session) -> tuple[list[JobEnd], list[str]]:
            _require_same_history(session, newest)
            query = select(Event).where(Event.event_id.in_(ids)).order_by(Event.event_id)
            return _ended_jobs(session, list(session.scalars(query)))

        ends, pruned = await self._database.read_in_thread(read_ends)
        self._warn_of_pruned(pruned)
        for end in ends:
            self._add_pending(end)
        read_ids = frozenset(ids)
        remaining = {
            destination: deque(n for n in numbers if n not in read_ids)
            for destination, numbers in self._postponed.items()
        }
        self._postponed = {
            destination: numbers for destination, numbers in remaining.items() if numbers
        }

    def _has_room(self) -> bool:
        numbers = sum(map(len, self._postponed.values()))
        return len(self._untold) < MAX_PENDING and numbers < MAX_NUMBERS

    def _add_pending(self, job_end: JobEnd) -> None:
        self._untold[job_end.event_id] = job_end
        if (destination := self._outlet.destination_of(job_end)) is not None:
            self._untold_by_destination[destination] += 1

    def _warn_of_pruned(self, pruned: Sequence[str]) -> None:
        if pruned:
            logger.warning(
                "%s: %d jobs were pruned before their ends could be told there: %s",
                self._outlet.name,
                len(pruned),
                ", ".join(pruned[:MAX_NAMED]) + (", …" if len(pruned) > MAX_NAMED else ""),
            )


def position_of(session: Session, name: str) -> int:
    """The position of the reader of this name; 0 before it has read anything."""
    return session.execute(select(Cursor.position).where(Cursor.name == name)).scalar() or 0


def begin(session: Session, name: str, announces_history: bool) -> tuple[int, int]:
    """Store and return the reader's position, and the last event that it skips because it is new, or 0."""
    if session.get(Cursor, name) is not None:
        return position_of(session, name), 0
    first_skipped = (
        0 if announces_history else events.newest(session, database_time(session) - HISTORY_SECONDS)
    )
    keep_position(session, name, first_skipped)
    return position_of(session, name), first_skipped


def keep_position(session: Session, name: str, position: int) -> None:
    """Store the position. It never moves back: another reader of the same name may be further."""
    session.execute(upsert(session, Cursor).values(name=name, position=0).on_conflict_do_nothing())
    session.execute(
        update(Cursor)
        .where(Cursor.name == name, Cursor.position < position)
        .values(position=position)
    )


def _next_ends(
    session: Session, position: int, newest: EventPosition | None
) -> tuple[list[EventPosition], list[JobEnd], list[str]]:
    """Events that were read, those that are the end of a job, and ids of ended jobs that have been pruned."""
    _require_same_history(session, newest)
    read_events = events.after(session, position, READ)
    ends, pruned = _ended_jobs(
        session, [event for event in read_events if event.kind in events.ENDS]
    )
    return [(event.event_id, event.at) for event in read_events], ends, pruned


def _require_same_history(session: Session, newest: EventPosition | None) -> None:
    """Raise _EventsLost if the newest event that was read is missing or different now."""
    if newest is not None and _newest_event(session, newest[0]) != newest:
        raise _EventsLost


def _newest_event(session: Session, position: int) -> EventPosition | None:
    """The newest event up to this number; events are never deleted or changed."""
    query = select(Event.event_id, Event.at).where(Event.event_id <= position)
    row = session.execute(query.order_by(Event.event_id.desc()).limit(1)).first()
    return None if row is None else (row.event_id, row.at)


def _ended_jobs(session: Session, end_events: Sequence[Event]) -> tuple[list[JobEnd], list[str]]:
    """The ends of jobs, and the ids of jobs that have been pruned meanwhile."""
    events_with_jobs = [(event, _ended_job(session, event)) for event in end_events]
    pruned = [str(event.job_id) for event, job_end in events_with_jobs if job_end is None]
    return [job_end for _, job_end in events_with_jobs if job_end is not None], pruned


def _ended_job(session: Session, event: Event) -> JobEnd | None:
    """Build the announcement; None: the job has been pruned meanwhile, while its events stay."""
    job = session.get(Job, event.job_id)
    if job is None:
        return None
    attempt = session.get(Attempt, event.epoch) if event.epoch is not None else None
    detail = event.detail or {}
    # Users may write rows by hand; this job may even have been refused because of its webhook.
    request: Any = job.request
    document = cast("dict[str, Any]", request) if isinstance(request, dict) else {}
    webhook_value = document.get("webhook")
    webhook = webhook_value if isinstance(webhook_value, str) else None
    return JobEnd(
        event_id=event.event_id,
        job_id=job.job_id,
        status=events.ENDS[event.kind],
        at=event.at,
        project=job.project,
        name=job.name,
        generation=job.generation if attempt is None else attempt.generation,
        epoch=event.epoch,
        exit_code=detail.get("exit_code"),
        failure_class=detail.get("failure_class"),
        failure_reason=detail.get("reason"),
        log_tail=tuple(str(detail.get("tail") or "").splitlines()[-LAST_LINES:]),
        webhook=webhook,
    )
