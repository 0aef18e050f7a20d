"""How long people wait for a fleet of real processes: until a job is submitted, until it runs, until somebody else drives it after a crash.

Every role is a process of its own, as users start them, with the settings that they have unless told otherwise; the only machine is this
one, reached without SSH, and jobs are `true`. PostgreSQL and NATS are real (`tests/postgres.py`, `tests/nats.py`). Times are those of the
database's clock, from just before the row is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.client import FleetClient
from groupwise.jobs.fleet.notify.base import Notifier
from groupwise.jobs.fleet.notify.local import LocalNotifier
from groupwise.jobs.fleet.notify.nats import NatsNotifier, access_from
from groupwise.jobs.fleet.notify.postgres import PostgresNotifier
from groupwise.jobs.fleet.operations import submission
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import admission
from groupwise.jobs.fleet.queue.request import JobRequest, from_document
from groupwise.jobs.fleet.store.database import Database, connect, database_time, migrate
from groupwise.jobs.fleet.store.events import ATTEMPT_ADOPTED
from groupwise.jobs.fleet.store.tables import VM, Attempt, Event, Job
from tests import fleet_api, nats

ROOT = Path(__file__).parents[1]
SLOTS = 8
LONG = 120.0
"""Seconds after which something that must happen has not."""
SOMEBODY = Actor("user:bench")
NO_SWEEP = {"SWEEP_SECONDS": "600"}


class Fleet:
    """A folder, a database, and processes that play roles in it."""

    def __init__(self, folder: Path, url: str | None, **settings: str) -> None:
        self.folder = folder
        self.database = connect(url or f"sqlite:///{folder}/fleet.db")
        migrate(self.database)
        told = {} if url is None else {"DATABASE": url}
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "NATS_TOKEN": nats.TOKEN,
            "GROUPWISE_FLEET": str(folder),
            **{f"GROUPWISE_FLEET_{key}": value for key, value in {**told, **settings}.items()},
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.database.run(self._add_machine)

    def _add_machine(self, session: Session) -> None:
        work = str(self.folder / "work")
        vm = VM(vm_id="local", transport="local", workdir=work, python=sys.executable)
        vm.cpu_slots = SLOTS
        session.add(vm)

    def start(self, *role: str) -> subprocess.Popen[bytes]:
        """A process of the control plane."""
        with (self.folder / "log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "groupwise", "fleet", *role],
                env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def until_ready(self) -> None:
        """The machine was looked at."""
        query = select(VM.contact).where(VM.vm_id == "local")
        self.until(lambda s: s.scalar(query) == "ok")

    def until(self, look: Callable[[Session], Any]) -> Any:
        """Its first true value."""
        end = time.monotonic() + LONG
        while not (found := self.database.read(look)):
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.02)
        return found

    def submit(self, *, stays: bool = False) -> tuple[str, float]:
        """A job, and when it was asked for. Nobody is told. `stays`: it runs until the end of this fleet."""
        held = self.folder / "held"
        held.touch()
        wait = f"while [ -e '{held}' ]; do sleep 0.1; done"
        command = ["sh", "-c", wait] if stays else ["true"]

        def write(session: Session) -> tuple[str, float]:
            asked = database_time(session)
            job = admission.submit(session, plain(*command), actor="bench", project="bench")
            return job.job_id, asked

        return self.database.run(write)

    def began(self, job_id: str) -> float:
        """When its machine said that it ran; waits for that."""
        query = select(Attempt.running_at).where(Attempt.job_id == job_id)
        return self.until(lambda s: s.scalar(query))

    def end(self) -> None:
        """Nothing is left, neither processes nor what they have started."""
        (self.folder / "held").unlink(missing_ok=True)
        attempts = self.folder / "work" / "attempts"
        deadline = time.monotonic() + LONG
        while attempts.exists() and not all((a / "exit.json").exists() for a in attempts.iterdir()):
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self.database.close()


def plain(*command: str) -> JobRequest:
    """A command of one CPU slot."""
    return from_document({"arguments": list(command), "resources": {"gpus": 0}})


@contextlib.contextmanager
def fleet(url: str | None, **settings: str) -> Iterator[Fleet]:
    """One without processes. `settings`: as in the environment, without their beginning."""
    with tempfile.TemporaryDirectory(
        prefix="groupwise-fleet-", ignore_cleanup_errors=True
    ) as folder:
        made = Fleet(Path(folder), url, **settings)
        try:
            yield made
        finally:
            made.end()


@contextlib.contextmanager
def messages() -> Iterator[nats.Nats]:
    """A NATS server."""
    with tempfile.TemporaryDirectory() as folder:
        made = nats.Nats(Path(folder))
        made.start()
        try:
            yield made
        finally:
            made.end()


# --- submit → start -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds from the wish to the command that runs."""

    p50: float
    worst: float
    jobs: int


def by_sweep(url: str | None, jobs: int) -> Waits:
    """No notification; the dispatcher looks every two seconds."""
    with fleet(url, NATS_URL="off") as made:
        _play(made)
        return _waits(made, jobs, _nobody, phases=5)


def by_doorbell(kind: str, url: str | None, jobs: int) -> Waits:
    """local, postgresql or nats; the dispatcher's own sweep is ten minutes away."""
    with contextlib.ExitStack() as held:
        if kind == "nats":
            address = held.enter_context(messages()).url
        else:
            address = "off"
        made = held.enter_context(fleet(url, NATS_URL=address, **NO_SWEEP))
        _play(made)
        notifier: Callable[[], Notifier] = {
            "local": lambda: LocalNotifier(made.folder),
            "postgresql": lambda: PostgresNotifier(made.database.connection_arguments()),
            "nats": lambda: NatsNotifier(access_from(address, {"NATS_TOKEN": nats.TOKEN})),
        }[kind]
        return _waits(made, jobs, lambda job_id: asyncio.run(_ring(notifier(), job_id)))


def _nobody(job_id: str) -> None:
    """Is told."""


async def _ring(notifier: Notifier, job_id: str) -> None:
    notifier.open()
    notifier.notify([job_id])
    await notifier.close()


def _play(made: Fleet) -> None:
    for role in ("poller", "dispatcher"):
        made.start(role)
    made.until_ready()
    job_id, _ = made.submit()
    if made.environment.get("GROUPWISE_FLEET_SWEEP_SECONDS"):
        # heard as soon as its dispatcher listens; each of the following is announced once
        while not made.database.read(lambda s: s.scalar(select(Attempt.epoch))):
            asyncio.run(_ring(LocalNotifier(made.folder), job_id))
            time.sleep(0.1)
    made.began(job_id)


def _waits(made: Fleet, jobs: int, ring: Callable[[str], None], phases: int = 1) -> Waits:
    """`phases`: of the two seconds of a sweep, so that jobs come at each of them."""
    found: list[float] = []
    for number in range(jobs):
        time.sleep(2.0 / phases * (number % phases))
        job_id, asked = made.submit()
        ring(job_id)
        found.append(made.began(job_id) - asked)
    return Waits(statistics.median(found), max(found), jobs)


# --- crash → adoption -----------------------------------------------------------------------------


def adoption_by_another(urls: Sequence[str], spread: float = 10.0) -> list[float]:
    """Of two dispatchers the one that drives a job is killed; until the other one has it. One fleet for each URL, all at once.

    They are killed `spread` seconds apart in all, since it matters how long before the lease was renewed.
    """
    with contextlib.ExitStack() as held:
        fleets = [held.enter_context(fleet(url, NATS_URL="off")) for url in urls]
        for made in fleets:
            made.start("poller")
            made.start("dispatcher")
        jobs = [_running(made) for made in fleets]
        for made in fleets:
            made.start("dispatcher")
        time.sleep(3.0)  # the second one looks around
        killed: list[float] = []
        for made in fleets:
            killed.append(_kill(made, made.processes[1]))
            time.sleep(spread / len(fleets))
        pairs = zip(fleets, jobs, killed, strict=True)
        return [_adopted(made, job_id) - at for made, job_id, at in pairs]


def adoption_after_restart() -> float:
    """An embedded fleet is killed and started again at once; until it drives the job that ran."""
    with fleet(None) as made:
        first = made.start("up")
        job_id = _running(made)
        at = _kill(made, first)
        made.start("up")
        return _adopted(made, job_id) - at


def _running(made: Fleet) -> str:
    made.until_ready()
    job_id, _ = made.submit(stays=True)
    made.began(job_id)
    return job_id


def _kill(made: Fleet, process: subprocess.Popen[bytes]) -> float:
    at = made.database.run(database_time)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return at


def _adopted(made: Fleet, job_id: str) -> float:
    query = select(Event.at).where(Event.job_id == job_id, Event.kind == ATTEMPT_ADOPTED)
    return made.until(lambda s: s.scalar(query))


# --- submitting -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rates:
    """Jobs a second."""

    command_line: float
    """One `groupwise fleet submit` after the other."""
    api: float
    array: float
    """Many in one transaction."""


def submitting(url: str | None, array: int, commands: int = 5, calls: int = 100) -> Rates:
    """No dispatcher runs."""
    with fleet(url, NATS_URL="off") as made:
        made.database.run(_seen)
        return Rates(
            _rate(commands, lambda: _by_command_line(made, commands)),
            _rate(calls, lambda: _by_api(made, calls)),
            _rate(array, lambda: _as_array(made.database, array)),
        )


def _seen(session: Session) -> None:
    vm = session.get_one(VM, "local")
    vm.contact, vm.observed_round = "ok", database_time(session)


def _rate(units: int, work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return units / (time.perf_counter() - begun)


def _by_command_line(made: Fleet, jobs: int) -> None:
    command = [sys.executable, "-m", "groupwise", "fleet", "submit", "--gpus", "0", "--", "true"]
    for _ in range(jobs):
        subprocess.run(command, env=made.environment, check=True, stdout=subprocess.DEVNULL)


def _by_api(made: Fleet, jobs: int) -> None:
    place = fleet_api.place_in(made.folder)
    with (
        fleet_api.api(made.database, place, made.environment) as address,
        FleetClient(address) as client,
    ):
        for _ in range(jobs):
            client.submit({"arguments": ["true"], "resources": {"gpus": 0}})


def _as_array(database: Database, jobs: int) -> None:
    requests = [plain("true")] * jobs
    made = database.run(lambda s: submission.submit_all(s, SOMEBODY, requests))
    assert len({each["job_id"] for each in made}) == jobs
    count = database.read(lambda s: s.query(Job).count())
    assert count >= jobs
