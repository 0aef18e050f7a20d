"""What it costs to look at a large fleet, and how late looks are: `python -m benchmarks.fleet_polling --store`.

500 machines are simulated, of which 20 % are dead (a connection that takes as long as it may, and then fails) and 5 % hang (they accept,
and never answer). Each of the others answers after 20 ms with eight GPUs. Without `--ssh` the poller calls them within this process: what
is measured is the poller and the database. With it they are an SSH server in a process of its own, so that the cost of keys, connections
and sessions is measured too; the server's own CPU time is not counted.

Printed, after a first round in which all connections are made: how long after they were due looks began (at machines that answer), the age
of what is known of them, and CPU seconds of this process for each second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import asyncssh
from sqlalchemy import func, insert, select

from groupwise.core.waiting import cancel_and_wait
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.poller import Pace, Poller
from groupwise.jobs.fleet.store import database as databases
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import VM
from groupwise.jobs.hosts.host import HostUnreachable, OutcomeUnknown, Request, RunnerResponse

GPUS = 8
THINKING = 0.02
"""Seconds that a machine takes for its answer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The machines."""

    hosts: int = 500
    dead: float = 0.20
    hanging: float = 0.05

    def kind(self, number: int) -> str:
        """dead, hanging or fine; spread evenly."""
        place = (number * 37 % self.hosts) / self.hosts
        if place < self.dead:
            return "dead"
        return "hanging" if place < self.dead + self.hanging else "fine"


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured; seconds, but for the counts."""

    looks: int
    seconds: float
    cpu_per_second: float
    lag_p50: float
    lag_p99: float
    lag_max: float
    oldest: float
    """Since a machine that answers was last looked at: the worst of all, at the end."""
    contacts: dict[str, int] = field(default_factory=dict[str, int])


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=500)
    parser.add_argument("--interval", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--database", help="URL of an empty database; default: SQLite")
    parser.add_argument("--ssh", action="store_true", help="through asyncssh and a server process")
    parser.add_argument("--store", action="store_true", help="keep the result")
    given = parser.parse_args()
    shape = replace(Shape(), hosts=given.hosts)
    pace = Pace(interval=given.interval)
    with tempfile.TemporaryDirectory() as folder:
        url = given.database or f"sqlite:///{folder}/fleet.db"
        if given.ssh:
            with ssh_server(Path(folder)) as machines:
                found = asyncio.run(measure(url, shape, pace, given.seconds, machines))
        else:
            found = asyncio.run(measure(url, shape, pace, given.seconds))
    for name, value in asdict(found).items():
        print(f"{name:<15} {value if isinstance(value, dict) else round(value, 3)}")
    if given.store:
        from benchmarks.step import RESULTS, machine, slug

        described = machine()
        kind = f"{url.partition(':')[0]}-{'ssh' if given.ssh else 'in-process'}"
        result = {"machine": described, "shape": asdict(shape), "found": asdict(found)}
        file = RESULTS / f"fleet-polling-{kind}-{slug(described)}.json"
        file.write_text(json.dumps(result, indent=2) + "\n")
        print(f"stored in {file}")


async def measure(
    url: str,
    shape: Shape,
    pace: Pace,
    seconds: float,
    rows: dict[str, Any] | None = None,
) -> Found:
    """Poll for a round and then for `seconds`. `rows`: columns of machines that are reached by SSH; None: they are simulated here."""
    with contextlib.closing(databases.connect(url)) as database:
        databases.migrate(database)
        database.run(lambda s: s.execute(insert(VM), list(_rows(shape, rows))))
        poller = Poller(database, pace=pace, reach=None if rows else lambda m: _Simulated(m, shape))
        async with _running(poller):
            await _all_seen(database, shape, pace)
            await asyncio.sleep(pace.interval)
            poller.lags.clear()
            wall, cpu = time.monotonic(), time.process_time()
            await asyncio.sleep(seconds)
            wall, cpu = time.monotonic() - wall, time.process_time() - cpu
            lags = sorted(poller.lags)
            contacts, oldest = await database.read_in_thread(_state)
    return Found(
        looks=len(lags),
        seconds=wall,
        cpu_per_second=cpu / wall,
        lag_p50=lags[len(lags) // 2],
        lag_p99=lags[len(lags) * 99 // 100],
        lag_max=lags[-1],
        oldest=oldest,
        contacts=contacts,
    )


def _rows(shape: Shape, more: dict[str, Any] | None) -> Sequence[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(shape.hosts):
        kind = shape.kind(number)
        row = {"vm_id": f"vm-{number}", "user": kind, "host_key": "simulated", **(more or {})}
        if more and kind == "dead":
            row["port"] = more["dead_port"]
        row.pop("dead_port", None)
        rows.append(row)
    return rows


@contextlib.asynccontextmanager
async def _running(poller: Poller) -> AsyncIterator[None]:
    task = asyncio.create_task(poller.run())
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def _all_seen(database: Database, shape: Shape, pace: Pace) -> None:
    """Until every machine that answers has answered once."""
    fine = sum(shape.kind(n) == "fine" for n in range(shape.hosts))
    deadline = time.monotonic() + 20 * pace.interval + 60
    while True:
        contacts, _ = await database.read_in_thread(_state)
        if contacts.get("ok") == fine:
            return
        assert time.monotonic() < deadline, contacts
        await asyncio.sleep(0.5)


def _state(session: Any) -> tuple[dict[str, int], float]:
    rows = session.execute(select(VM.contact, func.count()).group_by(VM.contact)).all()
    oldest = session.scalar(select(func.min(VM.observed_round)).where(VM.contact == "ok"))
    return dict(rows), databases.database_time(session) - (oldest or 0.0)


# Machines within this process


class _Simulated:
    """A machine by its number."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        self._name = machine.vm_id
        self._kind = shape.kind(int(machine.vm_id.removeprefix("vm-")))

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """See `Host`."""
        if self._kind == "dead":
            await asyncio.sleep(min(5.0, timeout))
            raise HostUnreachable("no connection")
        if self._kind == "hanging":
            await asyncio.sleep(timeout)
            raise OutcomeUnknown("no answer")
        await asyncio.sleep(THINKING)
        return RunnerResponse(json.loads(json.dumps(observed(self._name))))

    async def close(self) -> None:
        """See `Host`."""


def observed(name: str) -> dict[str, Any]:
    """What a machine answers to `observe`."""
    gpu = {"model": "H100", "memory_mb": 81559, "memory_used_mb": 4, "mig": False, "problems": []}
    return {
        "boot_id": f"boot-{name}",
        "time": time.time(),
        "load": [1.0, 1.0, 1.0],
        "cpus": 64,
        "ram_mb": 512000,
        "ram_free_mb": 400000,
        "disk_free_mb": 900000,
        "gpus": [
            {"index": n, "uuid": f"GPU-{name}-{n}", "utilisation": 0, **gpu} for n in range(GPUS)
        ],
        "apps": [],
        "probe": {"status": "ok", "apps": "ok", "lines_not_read": [], "exit": 0},
        "attempts": [],
        "quarantined": [],
    }


# Machines behind an SSH server


@contextlib.contextmanager
def ssh_server(folder: Path) -> Any:
    """The server as a process of its own; the columns of machines behind it."""
    for name in ("host", "client"):
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(folder / name))
        (folder / name).chmod(0o600)
    command = [sys.executable, "-m", "benchmarks.fleet_polling_server", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port, dead_port = map(int, server.stdout.readline().split())
            key = asyncssh.read_private_key(str(folder / "host")).export_public_key().decode()
            yield {
                "ip_address": "127.0.0.1",
                "port": port,
                "dead_port": dead_port,
                "ssh_key_path": str(folder / "client"),
                "host_key": " ".join(key.split()[:2]),
            }
        finally:
            server.kill()


if __name__ == "__main__":
    main()
