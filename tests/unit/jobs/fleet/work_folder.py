"""A machine with one attempt whose log and files a test writes, for tests of fetching."""

import hashlib
import itertools
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.controller import MemberOutput
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import VM, Attempt, Job, Member
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.host import HostUnreachable, Request, RunnerRefused, RunnerResponse
from groupwise.jobs.hosts.spec import JobSpec, Limits, as_json

JOB, OWNER = "job-1", "me"


class WorkFolder:
    """A `Host`: answers log, manifest, read and gather of the attempt."""

    def __init__(self) -> None:
        self.log = b""
        self.files: dict[str, bytes] = {}
        self.refused: list[list[str]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.asked: list[Request] = []
        self.cut_after: int | None = None
        """Calls that are still answered."""

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        assert timeout > 0
        if self.cut_after is not None:
            if self.cut_after == 0:
                raise HostUnreachable("cut off")
            self.cut_after -= 1
        self.asked.append(request)
        answer: RunnerResponse = getattr(self, f"_{request.verb}")(request.body)
        return answer

    async def close(self) -> None: ...

    def checkpoint(self, path: str, step: int, **contents: bytes) -> None:
        """Write a complete one."""
        files = {f"{path}/{name}": data for name, data in contents.items()}
        files[f"{path}/manifest.json"] = str(step).encode()
        self.files |= files
        listed = {name: entry(data) for name, data in files.items()}
        self.checkpoints.append({"path": path, "step": step, "files": listed})

    def read_bytes(self) -> int:
        """How many bytes of files were sent."""
        return sum(
            len(getattr(self, f"_{request.verb}")(request.body).payload)
            for request in self.asked
            if request.verb in ("read", "gather")
        )

    def _log(self, body: Any) -> RunnerResponse:
        at = body["offset"]
        return RunnerResponse({"size": len(self.log)}, self.log[at : at + body["limit"]])

    def _manifest(self, body: Any) -> RunnerResponse:
        if body["what"] == "checkpoints":
            return RunnerResponse({"files": {}, "refused": [], "checkpoints": self.checkpoints})
        files = {path: entry(data) for path, data in self.files.items()}
        return RunnerResponse({"files": files, "refused": self.refused, "checkpoints": []})

    def _read(self, body: Any) -> RunnerResponse:
        if body["path"] not in self.files:
            raise RunnerRefused("not_found", f"{body['path']} is not there")
        at = body["offset"]
        return RunnerResponse({}, self.files[body["path"]][at : at + body["limit"]])

    def _gather(self, body: Any) -> RunnerResponse:
        data = [self.files.get(path, b"gone") for path, _, _ in body["files"]]
        whole = [entry(data[n])[::2] == asked[1:] for n, asked in enumerate(body["files"])]
        return RunnerResponse({"whole": whole}, b"".join(itertools.compress(data, whole)))


def entry(data: bytes) -> list[Any]:
    return [hashlib.sha256(data).hexdigest(), 0o644, len(data)]


def begin(
    database: Database, host: WorkFolder, *, limits: Limits | None = None, rank: int = 0
) -> MemberOutput:
    """A job with a running attempt in the database, and how its driver sees the member."""
    spec = as_json(JobSpec(("true",), limits=limits or Limits()))

    def write(session: Session) -> int:
        if session.get(Job, JOB) is None:
            session.add_all([VM(vm_id="m"), Job(job_id=JOB, status="queued")])
            session.flush()
        over = update(Attempt).where(Attempt.state != "ended")
        session.execute(over.values(state="ended", outcome="void"))
        attempt = Attempt(
            job_id=JOB, generation=0, number=0, state="reserved", owner=OWNER, created_at=0.0
        )
        session.add(attempt)
        session.flush()
        session.add(Member(epoch=attempt.epoch, rank=rank, vm_id="m"))
        return attempt.epoch

    epoch = database.run(write)
    return MemberOutput(Runner(host), OWNER, JOB, 0, epoch, rank, spec, log_offset=0)
