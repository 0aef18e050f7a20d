"""The fleet's figures, each against its target: `make bench SUITE=fleet`, `python -m benchmarks.fleet --check`.

    dispatch    a burst of jobs on machines of this process: begun and ended a second, by one dispatcher (`fleet_dispatch.py`)
    claim       one claim while 100,000 jobs wait (`fleet_claims.py`)
    poll        500 machines behind an SSH server, every 15 s; 20 % are dead, 5 % hang (`fleet_polling.py`)
    start       from the wish to the command that runs, by sweep and by each doorbell (`fleet_processes.py`)
    adoption    from kill -9 of a dispatcher until another one, or the next `fleet up`, drives what it drove (`fleet_processes.py`)
    submit      jobs submitted a second; no target (`fleet_processes.py`)

On SQLite and on a PostgreSQL of its own, where both make sense. It takes about ten minutes on two cores that have nothing else to do, and
figures say little where they have. The table is printed and kept in `results/fleet-<machine>.json` with what it was measured on; with
--check the exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import asyncssh
import sqlalchemy

from benchmarks import fleet_claims, fleet_dispatch, fleet_polling, fleet_processes
from benchmarks.step import RESULTS, machine, slug
from groupwise.jobs.fleet.poller import Pace
from tests import postgres

JOBS = 3000
"""In the burst."""
STARTS = 10
ARRAY = 1000
POLLED = 45.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and what it should be."""

    name: str
    on: str
    unit: str
    measured: float
    most: float | None = None
    least: float | None = None

    @property
    def ok(self) -> bool | None:
        """None: it has no target."""
        if self.most is not None:
            return self.measured < self.most
        return None if self.least is None else self.measured >= self.least

    @property
    def target(self) -> str:
        """In words."""
        if self.most is not None:
            return f"< {self.most:g}"
        return "" if self.least is None else f"≥ {self.least:g}"


Database = Callable[[], str]
"""The URL of an empty one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, keep; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SUITES, help="one part; may be repeated")
    parser.add_argument("--check", action="store_true", help="fail where a target is missed")
    parser.add_argument("--keep", type=Path, help="where the result goes, if not to results/")
    given = parser.parse_args(arguments)
    parts = {name: SUITES[name] for name in given.only or SUITES}
    figures = measured(parts, given.keep, partly=bool(given.only))
    print(table(figures))
    missed = [figure for figure in figures if figure.ok is False]
    return int(given.check and bool(missed))


def measured(parts: Mapping[str, Suite], keep: Path | None, *, partly: bool) -> list[Figure]:
    """All figures of these parts. A result that is not whole is not kept."""
    before, began, figures = os.getloadavg(), time.monotonic(), list[Figure]()
    with databases() as urls:
        for name, suite in parts.items():
            print(f"{name} …", flush=True)
            figures += suite(urls)
    document = {
        "machine": {**machine(), **versions()},
        "load_before": before,
        "load_after": os.getloadavg(),
        "seconds": round(time.monotonic() - began),
        "figures": [{**asdict(f), "target": f.target, "ok": f.ok} for f in figures],
    }
    if not partly:
        keep = keep or RESULTS / f"fleet-{slug(document['machine'])}.json"
        keep.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return figures


@contextlib.contextmanager
def databases() -> Iterator[dict[str, Database]]:
    """Empty ones, of either kind."""
    with tempfile.TemporaryDirectory() as folder, postgres.server() as server:
        numbers = iter(range(1000))
        yield {
            "sqlite": lambda: f"sqlite:///{folder}/{next(numbers)}.db",
            "postgresql": server.new_database,
        }


# --- what is measured -----------------------------------------------------------------------------

Suite = Callable[[Mapping[str, Database]], list[Figure]]


def dispatch(urls: Mapping[str, Database]) -> list[Figure]:
    """Begun and ended."""
    found: list[Figure] = []
    for kind, url in urls.items():
        with tempfile.TemporaryDirectory() as folder:
            seen = asyncio.run(fleet_dispatch.measure(url(), JOBS, Path(folder)))
        found += [
            Figure("jobs begun", kind, "a second", seen.per_second, least=100),
            Figure("jobs begun and ended", kind, "a second", seen.ended_per_second),
            Figure("CPU time of a job", kind, "ms", seen.cpu_per_job * 1e3),
        ]
    return found


def claim(urls: Mapping[str, Database]) -> list[Figure]:
    """While very many wait."""
    found: list[Figure] = []
    for kind, url in urls.items():
        seen = fleet_claims.measure(url())
        found += [
            Figure("claim, all queued, p99", kind, "ms", seen.queued.p99, most=50),
            Figure("claim, many pending, p99", kind, "ms", seen.pending.p99, most=50),
            Figure("release before a claim, p99", kind, "ms", seen.release.p99),
            Figure("marking after a claim, p99", kind, "ms", seen.mark.p99),
            Figure("rows admitted", kind, "a second", seen.admitted_per_second),
        ]
        if seen.racing is not None:
            found.append(Figure("claim, eight processes at once, p50", kind, "ms", seen.racing.p50))
    return found


def poll(urls: Mapping[str, Database]) -> list[Figure]:
    """Through SSH, where most of the work is."""
    shape, pace = fleet_polling.Shape(), Pace()
    with (
        tempfile.TemporaryDirectory() as folder,
        fleet_polling.ssh_server(Path(folder)) as machines,
    ):
        work = fleet_polling.measure(urls["sqlite"](), shape, pace, POLLED, machines)
        seen = asyncio.run(work)
    return [
        Figure("500 machines every 15 s", "sqlite", "cores", seen.cpu_per_second, most=1),
        Figure("500 machines every 15 s, lag p99", "sqlite", "s", seen.lag_p99, most=5),
    ]


def start(urls: Mapping[str, Database]) -> list[Figure]:
    """By sweep, and by each doorbell."""
    waits = {
        ("submit to start by sweep, p50", "sqlite", 2.0): fleet_processes.by_sweep(None, STARTS),
        ("submit to start by sweep, p50", "postgresql", 2.0): fleet_processes.by_sweep(
            urls["postgresql"](), STARTS
        ),
        ("submit to start by doorbell: folder, p50", "sqlite", 0.5): fleet_processes.by_doorbell(
            "local", None, STARTS
        ),
        (
            "submit to start by doorbell: NOTIFY, p50",
            "postgresql",
            0.5,
        ): fleet_processes.by_doorbell("postgresql", urls["postgresql"](), STARTS),
        ("submit to start by doorbell: NATS, p50", "postgresql", 0.5): fleet_processes.by_doorbell(
            "nats", urls["postgresql"](), STARTS
        ),
    }
    return [
        Figure(name, kind, "s", seen.p50, most=most) for (name, kind, most), seen in waits.items()
    ]


def adoption(urls: Mapping[str, Database]) -> list[Figure]:
    """By another dispatcher, and by the next process of an embedded fleet."""
    taken = fleet_processes.adoption_by_another([urls["postgresql"]() for _ in range(3)])
    again = fleet_processes.adoption_after_restart()
    return [
        Figure("crash to adoption, worst of three", "postgresql", "s", max(taken), most=30),
        Figure("crash to adoption after a restart", "sqlite", "s", again, most=30),
    ]


def submit(urls: Mapping[str, Database]) -> list[Figure]:
    """One by one, by HTTP, and many at once."""
    found: list[Figure] = []
    for kind, url in urls.items():
        seen = fleet_processes.submitting(url(), ARRAY)
        found += [
            Figure("submitted by the command line", kind, "a second", seen.command_line),
            Figure("submitted by the API", kind, "a second", seen.api),
            Figure("submitted as an array", kind, "a second", seen.array),
        ]
    return found


SUITES: dict[str, Suite] = {
    "dispatch": dispatch,
    "claim": claim,
    "poll": poll,
    "start": start,
    "adoption": adoption,
    "submit": submit,
}


# --- what is shown --------------------------------------------------------------------------------


def table(figures: Sequence[Figure]) -> str:
    """For a terminal."""
    words = {True: "ok", False: "MISSED", None: ""}
    rows = [
        ("figure", "on", "target", "measured", ""),
        *((f.name, f.on, f.target, f"{f.measured:.3g} {f.unit}", words[f.ok]) for f in figures),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    place = postgres.programs()
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "postgresql": "" if place is None else _said([str(place / "postgres"), "--version"]),
        "sqlalchemy": sqlalchemy.__version__,
        "asyncssh": asyncssh.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
