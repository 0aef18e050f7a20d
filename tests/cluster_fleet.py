"""A fleet in one process whose machines are Slurm or Ray clusters: real database, files and clusters."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select, update

from groupwise.jobs.fleet.attempts.effects import Death, Gateway, Hook, Side
from groupwise.jobs.fleet.dispatcher import DispatcherDependencies, GlobalJobDispatcher
from groupwise.jobs.fleet.files.artefacts import Collector
from groupwise.jobs.fleet.files.logs import LogMirror
from groupwise.jobs.fleet.files.mirror import CheckpointMirror
from groupwise.jobs.fleet.operations import jobs, machines
from groupwise.jobs.fleet.poller import Pace, Poller
from groupwise.jobs.fleet.queue import admission
from groupwise.jobs.fleet.queue.request import from_document
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import Attempt, Job, Reservation
from groupwise.jobs.fleet.up import Hosts
from groupwise.jobs.hosts.files import BlobStore
from tests.in_process_fleet import SOMEBODY, NoJitter, SilentNotifier, nothing, quick
from tests.processes import TIMEOUT_S

PACE = Pace(interval=0.3, longest=0.3, listed=0.1, spread=0.0, least=0.1)
SAYS = """\
import os, pathlib, sys
with open(sys.argv[1], "a") as file:
    file.write(os.environ["GROUPWISE_ATTEMPT"] + "\\n")
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path("outputs/gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
ray = "a node of Ray" if "RAY_ADDRESS" in os.environ else "no node"
print("on", os.environ.get("SLURM_JOB_PARTITION", ray), flush=True)
"""
SAVES = """\
import hashlib, json, os, pathlib, signal, sys
if "RESUME_FROM" in os.environ:
    print("from", pathlib.Path(os.environ["RESUME_FROM"], "w").read_text(), os.environ["PREVIOUS_FAILURE"])
    sys.exit(0)
folder = pathlib.Path("outputs/checkpoints/step-1")
folder.mkdir(parents=True)
(folder / "w").write_bytes(b"one")
entry = {"size": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
(folder / "manifest.json").write_text(json.dumps({"step": 1, "files": {"w": entry}}))
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""


class ClusterFleet:
    """A poller and a dispatcher in this process, with real files and a real database."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        cluster_log: Callable[[], str] = str,
        pace: Pace = PACE,
    ) -> None:
        """`cluster_log` returns the cluster's log; it is added to the message of a timeout."""
        self.database = database
        self.folder = folder
        self.cluster_log = cluster_log
        self.pace = pace
        self.told = folder / "told"
        """The file to which every execution appends a line."""
        self.hosts = Hosts()
        self._playing: dict[GlobalJobDispatcher | Poller, asyncio.Task[None]] = {}

    def add(self, name: str, engine: Mapping[str, Any] | None = None, **more: Any) -> None:
        new = machines.NewMachine(
            name, transport="local", workdir=str(self.folder / name), engine=engine, **more
        )
        self.database.run(lambda s: machines.add(s, SOMEBODY, new))

    def begin(self, hook: Hook = nothing) -> None:
        """Start a dispatcher, and the poller if none runs."""
        if not any(isinstance(each, Poller) for each in self._playing):
            poller = Poller(self.database, pace=self.pace, rng=NoJitter())
            self._playing[poller] = asyncio.create_task(poller.run())
        gateway, store = Gateway(self.database, hook), BlobStore(self.folder / "blobs")
        parts = DispatcherDependencies(
            database=self.database,
            host=self.hosts,
            listener=SilentNotifier(),
            logs=LogMirror(self.folder / "logs", gateway),
            checkpoints=CheckpointMirror(store, gateway, keep=2),
            collector=Collector(self.folder / "artefacts", store, gateway),
            store=store,
        )
        dispatcher = GlobalJobDispatcher(parts, quick(), gateway=gateway)
        self._playing[dispatcher] = asyncio.create_task(dispatcher.run())

    async def end(self) -> None:
        for each, task in self._playing.items():
            each.stop() if isinstance(each, GlobalJobDispatcher) else task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)
        self._playing.clear()
        await self.hosts.close()

    async def until_dead(self) -> None:
        """Wait until the dispatcher has died by its hook; then all its leases run out."""
        [task] = [t for each, t in self._playing.items() if not isinstance(each, Poller)]
        await asyncio.wait([task], timeout=TIMEOUT_S)
        assert isinstance(task.exception(), BaseExceptionGroup | Death)
        self.database.run(lambda s: s.execute(update(Attempt).values(lease_until=0.0)))
        self._playing = {each: t for each, t in self._playing.items() if t is not task}

    def death(self, job_id: str, effect: str, nth: int) -> Hook:
        """Kills the dispatcher after the nth such effect for this job since it was placed; earlier calls come from reconciling."""
        seen = 0

        def dies(name: str, side: Side) -> None:
            nonlocal seen
            if name == effect and side is Side.AFTER:
                seen += self.job(job_id)["status"] == "running"
                if seen == nth:
                    raise Death

        return dies

    # what people do

    def submit(self, job_id: str, script: str = SAYS, **more: Any) -> None:
        asked = {
            "arguments": [sys.executable, "-c", script, str(self.told)],
            "resources": {"gpus": 0},
            "checkpoints": ["outputs"],
            "artefacts": ["outputs"],
        }
        request = from_document({**asked, **more})
        self.database.run(
            lambda s: admission.submit(
                s, request, actor="user:test", project="default", job_id=job_id
            )
        )

    # what is seen

    def job(self, job_id: str) -> dict[str, Any]:
        return self.database.read(lambda s: jobs.show(s, SOMEBODY, job_id))

    def machine(self, name: str) -> dict[str, Any]:
        return self.database.read(lambda s: machines.show(s, SOMEBODY, name))

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """The job's attempts, the oldest first."""
        return sorted(self.job(job_id)["attempts"], key=lambda each: each["epoch"])

    def states(self, job_id: str) -> list[str]:
        return [each["state"] for each in self.attempts(job_id)]

    def ends(self, job_id: str) -> list[tuple[str | None, str | None, bool | None]]:
        """For each of the job's attempts: outcome, failure class, and whether the failure is charged."""
        found = self.attempts(job_id)
        return [(each["outcome"], each["failure_class"], each["charged"]) for each in found]

    def log(self, job_id: str) -> str:
        return (self.folder / "logs" / f"{job_id}.log").read_text()

    def executions(self) -> list[str]:
        """Jobs, in the order in which they were executed."""
        lines = self.told.read_text().split() if self.told.exists() else []
        return [line.rpartition(".")[0] for line in lines]

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                while not (found := condition()):  # noqa: ASYNC110  (of what other processes do)
                    await asyncio.sleep(0.05)
                return found
        rows = self.database.read(lambda s: [(j.job_id, j.status) for j in s.scalars(select(Job))])
        raise AssertionError(f"timed out waiting for {what}: {rows}\n{self.cluster_log()}")

    async def until_is(self, job_id: str, status: str) -> None:
        await self.until(lambda: self.job(job_id)["status"] == status, f"{job_id} is {status}")

    async def until_waits(self, job_id: str, word: str) -> str:
        def said() -> str:
            return "; ".join(self.job(job_id)["waiting"])

        return await self.until(lambda: word in said() and said(), f"{job_id} waits: {word}")

    async def until_looked_at(self, name: str) -> None:
        """Wait until the machine accepts jobs."""
        await self.until(lambda: self.machine(name)["state"] == "ok", f"{name} is seen")

    async def until_saved(self) -> None:
        """Wait until the job that runs `SAVES` has a checkpoint."""
        await self.until(lambda: self.told.exists() and self.told.read_text(), "it has saved")

    async def until_clean(self) -> None:
        held = select(Reservation).where(Reservation.released_at.is_(None))
        await self.until(
            lambda: not self.database.read(lambda s: s.scalars(held).all()), "all is free"
        )
