"""Prints the lines of `groupwise fleet up` while it runs: one for everything that happens to jobs and machines, read from the events.

It starts with present events; earlier ones are in `groupwise fleet list`. Nothing depends on it: if its output cannot be written, or
anything else fails here, the fleet continues.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupwise.core.errors import RunError
from groupwise.core.terminal.quantities import counted
from groupwise.core.terminal.text import one_line, shorten
from groupwise.jobs.fleet.operations import status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.documents import machine_state
from groupwise.jobs.fleet.settings import DEFAULT_FOLDER, FleetPlace
from groupwise.jobs.fleet.states import Contact
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import VM, Event, Job

LOOK_SECONDS = 1.0
READ = 200
"""Events that are read at once."""
LONGEST = 120

T = TypeVar("T")
Say = Callable[[str], None]
log = logging.getLogger(__name__)


class EventListener:
    """Prints events until it is cancelled."""

    def __init__(
        self, place: FleetPlace, database: Database, say: Say, url: str | None = None
    ) -> None:
        """`url`: the address of the fleet's API, if there is one."""
        self._place = place
        self._database = database
        self._say = say
        self._url = url
        self._position = 0

    async def run(self) -> None:
        """Print a greeting, then the events, until cancelled or until the output cannot be written any more."""
        try:
            self._say(f"Fleet in {self._place.folder} ({self._database.name.partition(':')[0]}).")
            unobserved = select(VM.vm_id).where(
                VM.active, VM.contact == Contact.NEW, VM.lost_at.is_(None)
            )
            for _ in range(int(15 / LOOK_SECONDS)):  # until the machines have been observed
                if await self._read_database(lambda session: session.scalar(unobserved)) is None:
                    break
                await asyncio.sleep(LOOK_SECONDS)
            for line in [
                *await self._read_database(_greeting_lines),
                *_first_commands(self._place),
            ]:
                self._say(line)
            if self._url is not None:
                self._say(f"Its API, for other programs: {self._url}")
            newest = select(func.max(Event.event_id))
            self._position = await self._read_database(lambda session: session.scalar(newest) or 0)
            while True:
                lines, self._position = await self._when_it_answers(
                    lambda: self._database.in_thread(self._next_lines)
                )
                for line in lines:
                    self._say(line)
                await asyncio.sleep(LOOK_SECONDS)
        except OSError as error:
            log.warning("the news cannot be written, so there is none any more: %s", error)
        except Exception:  # a bug in a line of text ends no role
            log.exception("there are no news any more; the fleet continues")

    async def _read_database(self, look: Callable[[Session], T]) -> T:
        return await self._when_it_answers(lambda: self._database.read_in_thread(look))

    async def _when_it_answers(self, look: Callable[[], Awaitable[T]]) -> T:
        """Repeat the read until the database answers; the roles themselves report an unreachable one."""
        while True:
            try:
                return await look()
            except RunError as error:
                log.debug("no news: %s", error)
                await asyncio.sleep(LOOK_SECONDS)

    def _next_lines(self, session: Session) -> tuple[list[str], int]:
        """Lines for the events since the last call, and the new position."""
        lines: list[str] = []
        position = self._position
        for event in events.after(session, position, READ):
            position = event.event_id
            if (text := _event_line(session, event)) is not None:
                time_of_day = time.strftime("%H:%M:%S", time.localtime(event.at))
                lines.append(f"{time_of_day}  {shorten(one_line(text), LONGEST)}")
        return lines, position


def _greeting_lines(session: Session) -> list[str]:
    overview = status.overview(session, Actor("up"))
    machines, jobs = overview["machines"], overview["jobs"]
    lines = [_machines_line(session, machines)]
    job_counts = [f"{jobs[name]} {name}" for name in ("running", "queued", "pending") if jobs[name]]
    if job_counts:
        lines.append(f"Jobs: {', '.join(job_counts)}.")
    lines += [
        f"! {alarm['message']}: {alarm['remedy']}"
        for alarm in overview["alarms"]
        if alarm["kind"] != "role_missing"
    ]
    return lines


def _first_commands(place: FleetPlace) -> list[str]:
    """What to type in another terminal, with the folder if commands would not find this fleet without it."""
    is_default = place.folder == Path(DEFAULT_FOLDER).expanduser().absolute()
    option = "" if is_default else f" --fleet {shlex.quote(str(place.folder))}"
    return [
        "Ready. In another terminal:",
        f"  groupwise fleet submit{option} -- python -c \"print('hello')\"",
        f"  groupwise fleet list{option}",
        "Ctrl-C ends the fleet; jobs that run continue without it.",
    ]


def _machines_line(session: Session, counts: Mapping[str, Any]) -> str:
    if counts["total"] != 1:
        gpus = f", {counted(counts['gpus'], 'GPU')}" if counts["gpus"] else ""
        return f"{counts['ready']} of {counts['total']} machines are ready{gpus}."
    vm = session.scalars(select(VM).where(VM.active)).one()
    if vm.engine is not None:
        return f"One machine, {vm.vm_id}, behind which {vm.engine.get('name')} begins jobs."
    facts = vm.facts
    ram = facts.get("ram_mb")
    resources = [counted(facts["cpus"], "CPU") if facts.get("cpus") else "? CPUs"]
    if ram:
        resources.append(f"{ram / 1000:.0f} GB")
    resources.append(counted(counts["gpus"], "GPU") if counts["gpus"] else "no GPU")
    slots = 1 if vm.cpu_slots is None else vm.cpu_slots
    return f"One machine, {vm.vm_id}: {', '.join(resources)}, {counted(slots, 'slot')} for jobs without a GPU."


def _event_line(session: Session, event: Event) -> str | None:
    """The line about an event; None: it is not told, as that a new machine answers."""
    job = session.get(Job, event.job_id) if event.kind in _SHOW_JOB else None
    before, detail = event.before or {}, event.detail or {}
    match event.kind:
        case events.JOB_SUBMITTED:
            name = "" if job is None or job.name is None else f" ({job.name})"
            return f"{event.job_id}{name} submitted by {event.actor.removeprefix('user:')}"
        case events.JOB_PENDING:
            reasons = [] if job is None else job.blocked_reasons or []
            return f"{event.job_id} waits" + (f": {'; '.join(reasons[:2])}" if reasons else "")
        case events.ATTEMPT_RUNNING:
            location = "" if job is None or job.assigned_vm is None else f" on {job.assigned_vm}"
            gpu = "" if job is None or job.gpu_index is None else f", GPU {job.gpu_index}"
            return f"{event.job_id} runs{location}{gpu}"
        case events.JOB_COMPLETED | events.JOB_FAILED | events.JOB_CANCELLED:
            is_told = event.kind != events.JOB_COMPLETED and detail.get("reason")
            outcome = f"{event.job_id} {event.kind.removeprefix('job.')}"
            return f"{outcome}: {detail['reason']}" if is_told else outcome
        case events.JOB_QUEUED if before.get("status") == "running":
            cause = detail.get("failure_class") or "failed"
            return f"{event.job_id} is tried again in {detail.get('delay', 0):.0f} s ({cause})"
        case events.JOB_CHECKPOINT_DAMAGED:
            return f"the checkpoint of step {detail.get('step')} of {event.job_id} is damaged: it begins again {detail.get('then')}"
        case events.JOB_CHECKPOINT_NOT_MIRRORED:
            return f"{event.job_id}: {detail.get('why')}"
        case events.VM_REACHABLE | events.VM_RETURNED if (
            "lost_at" in before or before.get("contact") == Contact.UNREACHABLE
        ):
            vm = session.get(VM, event.vm_id) if event.kind == events.VM_RETURNED else None
            is_ready = vm is not None and machine_state(vm) != "draining"
            news = "answers again" if vm is None else "is not lost any more"
            return f"{event.vm_id} {news}" + (": it takes jobs again" if is_ready else "")
        case kind if kind in _PLAIN:
            gpu = f"GPU {detail.get('index')} of {event.vm_id}" if kind in _OF_GPUS else None
            action = kind.partition(".")[2].replace("_", " ")
            location = f" on {event.vm_id}" if kind in _OF_CONTACT else ""
            return f"{gpu or event.job_id or event.vm_id or ''} {action}{location}"
        case _:
            return None


_SHOW_JOB = (events.JOB_SUBMITTED, events.JOB_PENDING, events.ATTEMPT_RUNNING)
"""Events whose line says more of their job."""
_OF_GPUS = (events.GPU_REPORTED, events.GPU_QUARANTINED)
_OF_CONTACT = (events.ATTEMPT_UNREACHABLE, events.ATTEMPT_REACHABLE)
"""Events of an attempt whose line names its machine: the job may run on another one by now."""
_PLAIN = (
    events.JOB_RETRIED,
    events.JOB_HELD,
    events.JOB_CANCEL_REQUESTED,
    events.ATTEMPT_ADOPTED,
    events.ATTEMPT_LEAKING,
    *_OF_CONTACT,
    events.VM_ADDED,
    events.VM_LOST,
    events.VM_UNREACHABLE,
    events.VM_UNTRUSTED,
    events.VM_TRUSTED,
    events.VM_DRAINING,
    *_OF_GPUS,
)
"""Events whose line is their subject and their name."""
