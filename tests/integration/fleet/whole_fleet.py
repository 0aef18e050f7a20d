"""A whole fleet of real parts, as its users meet it: the command line, roles as processes, PostgreSQL, NATS, machines.

    with whole_fleet(postgres, count=2) as fleet:
        fleet.start("poller", "dispatcher")
        fleet.cli("submit", "--", "true")

Jobs run with this environment's interpreter. Where only root may come to it, the machines get it at the same place all the same.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import select

from groupwise.cli.main import main
from groupwise.jobs.fleet.settings import FleetPlace, find
from groupwise.jobs.fleet.store.tables import VM, Attempt, Job
from tests import fleet_api, nats
from tests.chaos.fleet import Control, FleetProcesses
from tests.postgres import Postgres
from tests.required_programs import root_needed
from tests.ssh_hosts import FullHost, full_hosts

TIMEOUT_S = 300.0
DOOR = """\
set -e
mkdir -p /run/interpreter; mount --bind "$1" /run/interpreter
mount -t tmpfs -o mode=755 none "$2"; mkdir -p "$1"; mount --bind /run/interpreter "$1"
"""
"""In a machine: a folder that only root may pass is replaced by an empty one with the interpreter at its place."""


def call(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """`groupwise fleet …` in this process, with these variables."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in "oe")
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["fleet", *words])
    finally:
        os.environ.clear()
        os.environ.update(before)
    said: list[str] = []
    for stream in (out, err):
        stream.seek(0)
        said.append(stream.read())
    return subprocess.CompletedProcess(words, code, *said)


class WholeFleet(FleetProcesses):
    """What its people do with them."""

    def __init__(
        self,
        root: Path,
        url: str,
        messages: nats.Nats,
        hosts: list[FullHost],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(root, url, messages, hosts, environment)
        self.folder = self.home
        self.shared = hosts[0].folder.parent / "shared"
        """What lies at the same path on every machine."""
        self.shared.mkdir(mode=0o755)
        for host in hosts:
            open_the_interpreter(host)

    @property
    def place(self) -> FleetPlace:
        found = find(None, self.environment)
        assert isinstance(found, FleetPlace)
        return found

    # what is done

    def add_machines(self, **columns: Any) -> None:
        """Rows, as somebody would write them by hand. The machine that `up` runs on is none of them."""
        rows = [
            host.vm_row() | {"python": sys.executable} | columns for host in self.hosts.values()
        ]
        rows.append({"vm_id": "local", "transport": "local", "active": False})
        self.database.run(lambda s: s.add_all(VM(**row) for row in rows))

    def start(self, *roles: str, **further: str) -> None:
        """Processes of the control plane; `up` plays all roles in one. `further`: settings of theirs, as `SWEEP_SECONDS="600"`."""
        environment = self.environment | {f"GROUPWISE_FLEET_{k}": v for k, v in further.items()}
        for role in roles:
            self.controls[role] = Control(role, role, self.folder.parent, environment)
            self.controls[role].start()

    def until_polled(self) -> None:
        """Every machine answers."""
        query = select(VM.vm_id).where(VM.active, VM.last_polled.is_(None) | (VM.contact != "ok"))
        self.until(lambda: not self.rows(query), "the first look at the machines")

    def cli(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """`groupwise fleet …`; its exit code is looked at unless it is None."""
        done = call(self.environment, *words)
        assert code is None or done.returncode == code, (words, done.stdout, done.stderr)
        return done

    def submit(self, *words: str) -> str:
        """By the command line; the id that it prints."""
        return self.cli("submit", *words).stdout.strip()

    def sql(self, statement: str, *values: Any) -> None:
        """As somebody at a prompt of the database."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode(), values)

    @contextlib.contextmanager
    def api(self) -> Iterator[str]:
        """The address of its API meanwhile; keys are asked for if there are any."""
        with fleet_api.api(self.database, self.place, self.environment) as address:
            yield address

    # what is seen

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        return super().until(condition, what, timeout_s)

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
            thread.join(TIMEOUT_S)


def open_the_interpreter(host: FullHost) -> None:
    """After each start of it."""
    base = Path(sys.base_prefix)
    closed = [p for p in reversed(base.parents) if not p.stat().st_mode & stat.S_IXOTH]
    if closed:
        enter = ["nsenter", "-t", str(host._init), "-m", "--"]
        command = [*enter, "/bin/sh", "-c", DOOR, "sh", str(base), str(closed[0])]
        subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def stand_ins(folder: Path, program: str, *names: str) -> str:
    """Commands of those names that are this program, beside a Python; whoever runs jobs with that has them on its path."""
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"#!{python}\n{program}")
        (folder / name).chmod(0o755)
    (folder / "python3").symlink_to(python)
    return str(folder / "python3")


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
    root_needed()
    folder = Path(
        tempfile.mkdtemp(prefix="groupwise-whole-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    )
    try:
        (folder / "nats").mkdir()
        with (
            nats.server(folder / "nats") as messages,
            full_hosts(machines, settings=settings) as hosts,
        ):
            fleet = WholeFleet(
                folder, url(server.new_database()), messages, hosts, environment or {}
            )
            try:
                yield fleet
            finally:
                fleet.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
