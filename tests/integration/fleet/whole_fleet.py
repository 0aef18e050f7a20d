"""A whole fleet of real parts, as its users meet it: the command line and each role a process of its own, PostgreSQL, NATS, machines.

    with whole_fleet(postgres, count=2) as fleet:
        fleet.start("poller", "dispatcher")
        fleet.cli("submit", "--", "true")

Jobs run with this environment's interpreter. Where only root may come to it, the machines get it at the same place all the same.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from groupwise.fleet.settings import FleetPlace, find
from groupwise.fleet.store import database as databases
from groupwise.fleet.store.tables import VM, Attempt, Event, Job
from tests import fleet_api, nats
from tests.chaos.fleet import Control, dies_with_us
from tests.postgres import Postgres
from tests.ssh_hosts import FullHost, full_hosts

ROOT = Path(__file__).parents[3]
SECONDS = 300.0
"""For anything, on a machine with other work."""
QUICK = {
    "POLL_SECONDS": "1",
    "SWEEP_SECONDS": "0.5",
    "REQUEUE_SECONDS": "3",
    "LEASE_SECONDS": "4",
}
DOOR = """\
set -e
mkdir -p /run/interpreter; mount --bind "$1" /run/interpreter
mount -t tmpfs -o mode=755 none "$2"; mkdir -p "$1"; mount --bind /run/interpreter "$1"
"""
"""In a machine: a folder that only root may pass is replaced by an empty one with the interpreter at its place."""


class WholeFleet:
    """All parts, and what its people do."""

    def __init__(
        self,
        folder: Path,
        url: str,
        messages: nats.Nats,
        hosts: list[FullHost],
        environment: Mapping[str, str],
    ) -> None:
        self.folder = folder
        """Of the fleet: settings, logs, artefacts, blobs."""
        self.shared = hosts[0].folder.parent / "shared"
        """What lies at the same path on every machine."""
        self.shared.mkdir(mode=0o755)
        self.url = url
        self.nats = messages
        self.hosts = {host.name: host for host in hosts}
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder.parent),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "GROUPWISE_FLEET": str(folder),
            "GROUPWISE_FLEET_DATABASE": url,
            "GROUPWISE_FLEET_NATS_URL": messages.url,
            "NATS_TOKEN": nats.TOKEN,
            **{f"GROUPWISE_FLEET_{name}": value for name, value in QUICK.items()},
            **environment,
        }
        self.database = databases.connect(url)
        databases.migrate(self.database)
        self.controls: dict[str, Control] = {}
        for host in hosts:
            open_the_interpreter(host)

    @property
    def place(self) -> FleetPlace:
        found = find(None, self.environment)
        assert isinstance(found, FleetPlace)
        return found

    # what is done

    def add_machines(self, **columns: Any) -> None:
        """Rows, as somebody would write them by hand."""
        rows = [
            host.vm_row() | {"python": sys.executable} | columns for host in self.hosts.values()
        ]
        self.database.run(lambda s: s.add_all(VM(**row) for row in rows))

    def start(self, *roles: str, **further: str) -> None:
        """Processes of the control plane. `further`: settings of theirs, as `SWEEP_SECONDS="600"`."""
        environment = self.environment | {f"GROUPWISE_FLEET_{k}": v for k, v in further.items()}
        for role in roles:
            self.controls[role] = Control(role, role, self.folder.parent, environment)
            self.controls[role].start()

    def until_polled(self) -> None:
        """Every machine answers."""
        query = select(VM.vm_id).where(VM.active, VM.last_polled.is_(None) | (VM.contact != "ok"))
        self.until(lambda: not self.rows(query), "the first look at the machines")

    def cli(
        self, *words: str, code: int | None = 0, text: str | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """`groupwise fleet …`; its exit code is looked at unless it is None."""
        done = subprocess.run(
            [sys.executable, "-m", "groupwise", "fleet", *words],
            env=self.environment,
            cwd=self.folder.parent,
            input=None if text is None else text.encode(),
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        assert code is None or done.returncode == code, (words, done.stdout, done.stderr)
        return done

    def submit(self, *words: str) -> str:
        """By the command line; the id that it prints."""
        return self.cli("submit", *words).stdout.decode().strip()

    def sql(self, statement: str, *values: Any) -> None:
        """As somebody at a prompt of the database."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode(), values)

    @contextlib.contextmanager
    def api(self) -> Iterator[str]:
        """The address of its API meanwhile; keys are asked for if there are any."""
        with fleet_api.api(self.database, self.place, self.environment) as address:
            yield address

    def no_pauses(self) -> None:
        """Nothing waits before it is tried again."""
        self.database.run(
            lambda s: s.execute(
                update(Job).where(Job.status == "queued", Job.not_before > 0).values(not_before=0.0)
            )
        )

    # what is seen

    def rows(self, query: Any) -> list[Any]:
        def look(session: Session) -> list[Any]:
            found = list(session.scalars(query))
            session.expunge_all()
            return found

        return self.database.read(look)

    def job(self, job_id: str) -> Job:
        return self.rows(select(Job).where(Job.job_id == job_id))[0]

    def attempts(self, job_id: str) -> list[Attempt]:
        return self.rows(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.epoch))

    def until(self, condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
        """Its first true value."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.story()}"
            time.sleep(0.05)
        return found

    def ended(self, job_id: str, *, status: str = "completed") -> Job:
        """The job, once it has ended, which it has to in this way."""

        def over() -> bool:
            self.no_pauses()
            return self.job(job_id).status in {"completed", "failed", "cancelled"}

        self.until(over, f"the end of {job_id}")
        job = self.job(job_id)
        assert job.status == status, f"{job.status}: {job.failure_reason}\n{self.story()}"
        return job

    def until_idle(self) -> None:
        """Every attempt has ended and given back what it held."""
        query = select(Attempt.epoch).where(
            (Attempt.state != "ended") | (Attempt.cleanup != "clean")
        )
        self.until(lambda: not self.rows(query), "the release of everything")

    def log_there(self, job_id: str, epoch: int) -> bytes:
        """The log on the machine that it ran on."""
        for host in self.hosts.values():
            path = host.workdir / "attempts" / f"{job_id}.{epoch}" / "log"
            if path.exists():
                return path.read_bytes()
        raise AssertionError(f"no machine has a log of {job_id}.{epoch}")

    def story(self) -> str:
        """For whoever wonders why a test failed."""
        jobs = [
            f"{j.job_id} {j.status} {j.assigned_vm} {j.failure_reason} {j.blocked_reasons}"
            for j in self.rows(select(Job))
        ]
        happened = [
            f"{e.kind} {e.job_id} {e.epoch} {e.vm_id} {str(e.detail)[:300]}"
            for e in self.rows(select(Event).order_by(Event.event_id))
        ]
        there = [
            f"{name}: {path.relative_to(host.workdir)}"
            for name, host in self.hosts.items()
            for path in (host.workdir / "attempts").glob("*/*/outputs/**/manifest.json")
        ]
        said = [f"--- {n}\n{c.log()[-3000:]}" for n, c in self.controls.items() if c.path.exists()]
        return "\n".join([*jobs, *happened[-60:], *there, *said])

    def close(self) -> None:
        for control in self.controls.values():
            if control.is_there():
                control.kill()
        self.database.close()


@contextlib.contextmanager
def hearing(server: nats.Nats, subject: str, tell: Callable[[str, bytes], None]) -> Iterator[None]:
    """`tell(subject, message)` of all that is published meanwhile, in a thread."""
    with server._connected() as (connection, lines):
        connection.sendall(f"SUB {subject} 1\r\nPING\r\n".encode())
        assert any(line.startswith(b"PONG") for line in lines)
        connection.settimeout(None)

        def listen() -> None:
            for line in lines:
                if line.startswith(b"MSG "):
                    words = line.split()
                    tell(words[1].decode(), lines.read(int(words[-1])))
                    lines.read(2)
                elif line.startswith(b"PING"):
                    connection.sendall(b"PONG\r\n")

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield
        finally:
            connection.shutdown(socket.SHUT_RDWR)
            thread.join(SECONDS)


def open_the_interpreter(host: FullHost) -> None:
    """After each start of it."""
    base = Path(sys.base_prefix)
    closed = [p for p in reversed(base.parents) if not p.stat().st_mode & stat.S_IXOTH]
    if closed:
        enter = ["nsenter", "-t", str(host._init), "-m", "--"]
        command = [*enter, "/bin/sh", "-c", DOOR, "sh", str(base), str(closed[0])]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def _messages(folder: Path) -> Iterator[nats.Nats]:
    """A NATS that ends with this process, however that ends."""
    program = folder / "nats-server"
    program.write_text(f'#!/bin/sh\nexec {" ".join(dies_with_us())} {nats.needed()} "$@"\n')
    program.chmod(0o755)
    server = nats.Nats(str(program), folder)
    try:
        server.start()
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def whole_fleet(
    server: Postgres,
    *,
    machines: int = 2,
    url: Callable[[str], str] = str,
    environment: Mapping[str, str] | None = None,
    settings: str = "",
) -> Iterator[WholeFleet]:
    """One with machines that are on and not yet known to it, and no process of the control plane. Nothing is left of it afterwards.

    `url`: what becomes of the database's. `settings`: further lines of the machines' sshd_config.
    """
    folder = Path(
        tempfile.mkdtemp(prefix="groupwise-whole-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    )
    try:
        for name in ("fleet", "nats"):
            (folder / name).mkdir()
        with (
            _messages(folder / "nats") as messages,
            full_hosts(machines, settings=settings) as hosts,
        ):
            fleet = WholeFleet(
                folder / "fleet", url(server.new_database()), messages, hosts, environment or {}
            )
            try:
                yield fleet
            finally:
                fleet.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
