"""A whole fleet for fault-injection tests: real PostgreSQL and NATS, machines with sshd, one process per control-plane role.

The test process is the operator and the clients, and injects the faults. It records what it does, trainers (`trainer.py`) record what
they do, and `collect_history.py` merges both with what the fleet says, for `tests/history_checker.py`. Everything that is started ends
with the test process, however that ends: children ask the kernel for a signal, and machines are namespaces below one of them.

    with real_fleet(machines=3, gpus=2) as fleet:
        fleet.start()
        job = fleet.submit([{"steps": 5}])
        fleet.until(lambda: fleet.status(job) == "completed", "the job")

All of it lies in a network that only the thread which came here is in.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.operations import jobs as job_operations
from groupwise.jobs.fleet.operations import machines as machine_operations
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.queue import admission
from groupwise.jobs.fleet.queue.request import from_document
from groupwise.jobs.fleet.states import FINAL, AttemptState, Cleanup
from groupwise.jobs.fleet.store import database as databases
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import GPU, VM, Attempt, Event, Job, Reservation
from groupwise.jobs.hosts.files import BlobStore
from tests import nats, postgres, ssh_hosts
from tests.nats import Nats
from tests.postgres import Postgres
from tests.processes import TIMEOUT_S, wait_until
from tests.required_programs import with_parent_death_signal
from tests.ssh_hosts import FullHost

T = TypeVar("T")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TRAINER = HERE / "trainer.py"
CONTROL = HERE / "control.py"
ROLES = {
    "dispatcher-1": "dispatcher", "dispatcher-2": "dispatcher", "poller": "poller", "requeue": "requeue", "tracker": "tracker",
}  # fmt: skip
QUICK = {
    "POLL_SECONDS": "1", "SWEEP_SECONDS": "0.5", "REQUEUE_SECONDS": "3", "LEASE_SECONDS": "4",
}  # fmt: skip
BEGINS = "--- begins"
LEASE = float(QUICK["LEASE_SECONDS"])
OPERATOR = Actor("user:test")


class Control:
    """One process of the control plane."""

    def __init__(self, name: str, role: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.role = role
        self.environment = dict(environment)
        self.path = folder / f"{name}.log"
        self.frozen = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **further: str) -> None:
        """`further`: variables of its environment for this life."""
        assert not self.is_there(), self.name
        script = [str(CONTROL)] if further else ["-m", "groupwise"]
        with self.path.open("ab") as output:
            output.write(f"{BEGINS}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                [
                    *with_parent_death_signal("KILL"),
                    sys.executable,
                    *script,
                    "fleet",
                    "run",
                    self.role,
                ],
                env={**self.environment, **further},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.frozen = False

    def is_there(self) -> bool:
        """Whether it runs, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """`kill -9`."""
        self._send(signal.SIGKILL)
        self._wait()

    def stop(self) -> int:
        """As an operator would; its exit code."""
        if self.frozen:
            self.thaw()
        self._send(signal.SIGTERM)
        return self._wait()

    def freeze(self) -> None:
        """It does nothing and knows nothing of it, as when its machine is suspended."""
        self._send(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        """The end of `freeze`."""
        self._send(signal.SIGCONT)
        self.frozen = False

    def died(self) -> int | None:
        """Its exit code, where it has ended."""
        return None if self._process is None else self._process.poll()

    def log(self) -> str:
        """What it has said, in all its lives."""
        return self.path.read_text(errors="replace")

    def said(self) -> list[str]:
        """Lines of its last life."""
        return self.log().rpartition(f"{BEGINS}\n")[2].splitlines()

    def _send(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def _wait(self) -> int:
        assert self._process is not None
        return self._process.wait(TIMEOUT_S)


class FleetProcesses:
    """Database, NATS, machines and control processes of a fleet, with what they show."""

    def __init__(
        self,
        root: Path,
        url: str,
        messages: Nats,
        hosts: Sequence[FullHost],
        further: Mapping[str, str],
    ) -> None:
        """`further`: of the environment of its processes."""
        self.url = url
        self.nats = messages
        self.hosts = {host.name: host for host in hosts}
        self.home = root / "fleet"
        """Settings, logs, artefacts, blobs."""
        self.home.mkdir()
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(root), "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT), "GROUPWISE_FLEET": str(self.home),
            "GROUPWISE_FLEET_DATABASE": url, "GROUPWISE_FLEET_NATS_URL": messages.url,
            "NATS_TOKEN": nats.TOKEN,
            **{f"GROUPWISE_FLEET_{name}": value for name, value in QUICK.items()}, **further,
        }  # fmt: skip
        self.database: Database = databases.connect(url)
        databases.migrate(self.database)
        self.controls: dict[str, Control] = {}

    def no_pauses(self) -> None:
        """Jobs that wait before they are tried again need not wait any longer: minutes of a real fleet are seconds here."""
        self.database.run(
            lambda s: s.execute(
                update(Job).where(Job.status == "queued", Job.not_before > 0).values(not_before=0.0)
            )
        )

    def look(self, fn: Callable[[Session], T]) -> T:
        """At the database."""
        return self.database.read(fn)

    def rows(self, query: Any) -> list[Any]:
        """As they are now, for good."""

        def find(session: Session) -> list[Any]:
            found = list(session.scalars(query))
            session.expunge_all()
            return found

        return self.look(find)

    def job(self, job_id: str) -> Job:
        return self.rows(select(Job).where(Job.job_id == job_id))[0]

    def attempts(self, job_id: str) -> list[Attempt]:
        return self.rows(select(Attempt).where(Attempt.job_id == job_id).order_by(Attempt.epoch))

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        return wait_until(condition, what, timeout_s, self.story)

    def story(self) -> str:
        """Diagnostics for a failure message: jobs, the last 60 events, the ends of the logs."""
        jobs = [
            f"{j.job_id} {j.status} {j.assigned_vm} {j.failure_reason} {j.blocked_reasons}"
            for j in self.rows(select(Job))
        ]
        happened = [
            f"{e.kind} {e.job_id} {e.epoch} {e.vm_id} {str(e.detail)[:300]}"
            for e in self.rows(select(Event).order_by(Event.event_id))
        ]
        said = [f"--- {n}\n{c.log()[-3000:]}" for n, c in self.controls.items() if c.path.exists()]
        return "\n".join([*jobs, *happened[-60:], *said])

    def end(self) -> None:
        """All its processes."""
        for control in self.controls.values():
            if control.is_there():
                control.kill()
        self.database.close()


class RealFleet(FleetProcesses):
    """Also does things to the fleet, and records them."""

    def __init__(
        self,
        folder: Path,
        server: Postgres,
        messages: Nats,
        hosts: Sequence[FullHost],
        gpus: int,
        settings: Mapping[str, str],
    ) -> None:
        further = {f"GROUPWISE_FLEET_{name}": value for name, value in settings.items()}
        super().__init__(folder, server.new_database(), messages, hosts, further)
        self.folder = folder
        self.postgres = server
        self.gpus = gpus
        self.records: list[dict[str, Any]] = []
        """What this process did, and was told."""
        self.clock_offset = time.time() - time.monotonic()
        self.history = folder / "history"
        self.history.mkdir()
        self.history.chmod(0o1777)
        self.trainer = BlobStore(self.home / "blobs").put_file(TRAINER)
        self.controls = {
            name: Control(name, role, folder, self.environment) for name, role in ROLES.items()
        }
        self._numbers = 0

    # what is done

    def record(self, what: str, **facts: Any) -> None:
        """Into the history, as having happened now."""
        self.records.append({"at": time.monotonic(), "what": what, **facts})

    def add_machines(self) -> None:
        """A row for each; the poller does the rest."""
        for host in self.hosts.values():
            host.gpus(self.gpus)
        rows = [host.vm_row() for host in self.hosts.values()]
        self.database.run(lambda s: s.add_all(VM(**row) for row in rows))

    def start(self, *names: str) -> None:
        """These processes, or all that are not there."""
        for name in names or self.controls:
            if not self.controls[name].is_there():
                self.controls[name].start()

    def until_polled(self) -> None:
        """All machines with their GPUs are known."""
        wanted = len(self.hosts) * self.gpus
        counted = select(func.count()).select_from(GPU).where(GPU.observed == "ok")
        self.until(lambda: self.look(lambda s: s.scalar(counted)) == wanted, "all GPUs")

    def submit(
        self, plays: Sequence[Mapping[str, Any]], *, job_id: str | None = None, **request: Any
    ) -> str:
        """A job whose attempts do these one after the other. It is accepted when this returns."""
        job = job_id or self.new_id()
        document = self.document(plays, **request)
        self.database.run(lambda s: self.admit(s, job, document))
        self.record("accepted", job=job, **_facts(document))
        return job

    def new_id(self) -> str:
        """One that no job has."""
        self._numbers += 1
        return f"j{self._numbers}"

    def document(self, plays: Sequence[Mapping[str, Any]], **request: Any) -> dict[str, Any]:
        """What a submitter says."""
        share = request.get("resources", {}).get("share_mb")
        told = [{**play, "share_mb": share} for play in plays]
        argument = json.dumps({"history": str(self.history), "plays": told})
        entry = [self.trainer.sha256, 0o644, self.trainer.size]
        return {
            "arguments": ["python3", "-S", "trainer.py", argument],
            "files": {"trainer.py": entry},
            "resources": {"gpus": 1},
            "limits": {"grace_seconds": 1.0},
            **request,
        }

    def admit(self, session: Session, job: str, document: Mapping[str, Any]) -> None:
        """Within a transaction; the same once more is the same job."""
        wanted, who, key = from_document(document), OPERATOR.name, f"key-{job}"
        admission.submit(
            session, wanted, actor=who, project="default", job_id=job, idempotency_key=key
        )

    def operate(self, name: str, job: str) -> None:
        """cancel, hold, release or retry; refusals come through."""
        if name == "cancel":
            self.record("cancel_requested", job=job)
        operation = getattr(job_operations, name)
        self.database.run(lambda s: operation(s, OPERATOR, job) and None)

    def lose(self, vm: str) -> None:
        """`fleet vm mark-lost`."""
        self.record("lost", vm=vm)
        self.database.run(lambda s: machine_operations.lost(s, OPERATOR, vm) and None)

    def power_off(self, vm: str) -> None:
        """All that runs there is gone, and nobody is told."""
        self.hosts[vm].power_loss()
        self.record("power_off", vm=vm)

    # what is seen

    def status(self, job: str) -> str:
        """Of a job."""
        return str(self.job(job).status)

    def epochs(self, job: str) -> list[int]:
        """Of its attempts."""
        return [each.epoch for each in self.attempts(job)]

    def unfinished(self) -> list[str]:
        """Whatever of jobs, attempts and reservations is still open, in words."""
        shown = "job_id epoch state cleanup contact owner".split()
        open_attempts = (Attempt.state != AttemptState.ENDED) | (Attempt.cleanup != Cleanup.CLEAN)
        jobs = self.rows(select(Job).where(Job.status.not_in(FINAL)).order_by(Job.job_id))
        attempts = self.rows(select(Attempt).where(open_attempts).order_by(Attempt.epoch))
        held = self.rows(select(Reservation.epoch).where(Reservation.released_at.is_(None)))
        return [
            *(f"{job.job_id} is {job.status} {job.blocked_reasons or ''}" for job in jobs),
            *(" ".join(str(getattr(each, name)) for name in shown) for each in attempts),
            *(f"a reservation of {epoch}" for epoch in held),
        ]

    def told(self, job: str | None = None) -> list[dict[str, Any]]:
        """What trainers wrote down, of one job or of all, in the order of time."""
        paths = self.history.glob("*.jsonl" if job is None else f"{job}.*.jsonl")
        return sorted((r for path in paths for r in _lines(path)), key=lambda r: r["at"])

    def happened(self, job: str, what: str) -> list[dict[str, Any]]:
        """Such records of its trainers."""
        return [record for record in self.told(job) if record["what"] == what]

    def trainers(self) -> dict[int, dict[str, Any]]:
        """Commands that are alive now: process id out here → their `start`."""
        found: dict[int, dict[str, Any]] = {}
        for vm, pid, attempt in self._marked():
            for path in self.history.glob(f"{attempt}.*.jsonl"):
                first = next(iter(_lines(path)), {})
                if (first.get("vm"), first.get("pid")) == (vm, inner_pid(pid)):
                    found[pid] = first
        return found

    def marked(self) -> list[str]:
        """Every process of any attempt that is alive now."""
        return [f"{attempt} has process {pid} on {vm}" for vm, pid, attempt in self._marked()]

    def _marked(self) -> list[tuple[str, int, str]]:
        return [
            (vm, pid, attempt)
            for vm, host in self.hosts.items()
            if host.is_on()
            for pid in host.processes()
            if (attempt := attempt_of(pid))
        ]

    def over(self) -> set[str]:
        """Jobs that have ended."""
        return set(self.rows(select(Job.job_id).where(Job.status.in_(FINAL))))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a trainer wrote; a last line that is torn was never written."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield json.loads(line)


def _facts(document: Mapping[str, Any]) -> dict[str, Any]:
    limit = document.get("limits", {}).get("time_seconds")
    return {} if limit is None else {"time_limit": limit}


# --- Processes, as they are seen from out here ----------------------------------------------------


def inner_pid(pid: int) -> int | None:
    """As the process itself knows its number; None where it has gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None


def attempt_of(pid: int) -> str | None:
    """Which attempt a process belongs to; None: it is dead, or of none."""
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"GROUPWISE_ATTEMPT":
                return value.decode()
    return None


def state_and_parent(pid: int) -> tuple[str, int]:
    """`X` for one that is gone."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return words[0], int(words[1])
    return "X", 0


# --- All of it ------------------------------------------------------------------------------------


@contextlib.contextmanager
def real_fleet(*, machines: int = 2, gpus: int = 2, **settings: str) -> Iterator[RealFleet]:
    """A fleet of which no control process runs yet, with its machines on and in the database. Nothing is left of it afterwards.

    `settings`: those of a fleet, as in the environment without their beginning.
    """
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    folder = Path(tempfile.mkdtemp(prefix="groupwise-chaos-", dir=root))
    folder.chmod(0o755)
    try:
        with (
            ssh_hosts.own_network(),
            postgres.server() as server,
            nats.server(folder) as messages,
            ssh_hosts.full_hosts(machines) as hosts,
        ):
            fleet = RealFleet(folder, server, messages, hosts, gpus, settings)
            try:
                fleet.add_machines()
                yield fleet
            finally:
                fleet.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
