"""A fleet from Python, over its HTTP API: the same verbs as the command line.

    fleet = FleetClient("http://127.0.0.1:8010")
    job = fleet.submit({"arguments": ["python", "train.py"]}, files=["train.py"])
    for piece in fleet.follow(job["job_id"]):
        print(piece.decode(), end="")

Every method gives the documents that `--json` prints. A refusal is raised as `Refusal`, with the server's code and words; where no answer
came, a call that may be repeated is, and `FleetAway` is raised when that has not helped. A submission names itself, so that repeating it
makes no second job.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2

from groupwise.errors import RunError, UsageError
from groupwise.hosts.files import PIECE, files_below, hash_of
from groupwise.wire.idempotency import HEADER, new_idempotency_key
from groupwise.wire.keys import VARIABLE
from groupwise.wire.problems import KINDS, FieldError, Problem, Refusal

Document = dict[str, Any]
TRIES = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds between tries; doubled, and drawn below that."""
WAIT_SECONDS = 20.0
"""For which one request waits for more of a log."""
UPLOAD_PIECE = 16 * PIECE


class FleetAway(RunError):
    """The fleet's API does not answer. What was asked may have been done; a submission with the same key may be sent again."""

    code = "fleet_away"


class FleetClient:
    """One fleet. Use it as a context manager, or `close` it; one thread at a time."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout: float = 60.0,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`key`: without it, GROUPWISE_API_KEY of the environment. `timeout`: seconds for one request."""
        key = os.environ.get(VARIABLE) if key is None else key
        headers = {} if not key else {"Authorization": f"Bearer {key}"}
        self.url = url.rstrip("/")
        self._sleep = sleep
        self._http = httpx2.Client(
            base_url=self.url, headers=headers, timeout=timeout, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its connections."""
        self._http.close()

    # Jobs

    def submit(
        self,
        request: Mapping[str, Any],
        *,
        project: str | None = None,
        files: Sequence[str | Path] | Mapping[str, str | Path] = (),
        idempotency_key: str | None = None,
    ) -> Document:
        """Submit a job; once this returns it is on the fleet's disk.

        `request`: a `groupwise.fleet.queue.request.JobRequest` as JSON: `arguments`, or a kind's columns. `files`: what it takes
        along, by name or path → file or folder here. Submitted again with the same key it is the same job.
        """
        document = dict(request)
        if files:
            document["files"] = {**document.get("files", {}), **self.upload(files)}
        key = new_idempotency_key() if idempotency_key is None else idempotency_key
        return self._json(
            "POST", "/jobs", body=document, query={"project": project}, headers={HEADER: key}
        )

    def plan(self, request: Mapping[str, Any], *, project: str | None = None) -> Document:
        """What the job would be and where it could run now; nothing is submitted."""
        return self._json("POST", "/jobs/plan", body=request, query={"project": project})

    def jobs(self, **wanted: Any) -> list[Document]:
        """Jobs, the newest first. `wanted`: status, project, name, kind, vm, label, older_than, limit, as GET /jobs takes them."""
        return self._json("GET", "/jobs", query=wanted)

    def show(self, job_id: str) -> Document:
        """All about one job."""
        return self._json("GET", f"/jobs/{_part(job_id)}")

    def cancel(self, job_id: str) -> Document:
        """Have it end; its status is `cancelled` once nothing of it is left."""
        return self._json("POST", f"/jobs/{_part(job_id)}/cancel")

    def hold(self, job_id: str) -> Document:
        """Have a waiting job wait until it is released."""
        return self._json("POST", f"/jobs/{_part(job_id)}/hold")

    def release(self, job_id: str) -> Document:
        """Let a held job go on."""
        return self._json("POST", f"/jobs/{_part(job_id)}/release")

    def retry(self, job_id: str) -> Document:
        """Begin a failed or cancelled job anew. Sent once: where no answer came, look at the job first."""
        return self._json("POST", f"/jobs/{_part(job_id)}/retry", tries=1)

    def wait(self, job_id: str) -> Document:
        """The job, once it has ended."""
        for _ in self.follow(job_id):
            pass
        return self.show(job_id)

    # Bytes

    def follow(
        self, job_id: str, *, epoch: int | None = None, offset: int = 0, rank: int = 0
    ) -> Generator[bytes]:
        """The log as it grows, attempt after attempt, until the job has ended. Without `epoch`: from the beginning of the newest."""
        while True:
            query = {"epoch": epoch, "offset": offset, "rank": rank, "wait": WAIT_SECONDS}
            answer = self._answer("GET", f"/jobs/{_part(job_id)}/log", query=query)
            if "X-Log-Epoch" in answer.headers:
                epoch = int(answer.headers["X-Log-Epoch"])
                offset = int(answer.headers["X-Log-Offset"])
            if answer.content:
                yield answer.content
            if answer.headers.get("X-Log-Ended") == "true":
                return

    def upload(
        self, files: Sequence[str | Path] | Mapping[str, str | Path]
    ) -> dict[str, list[Any]]:
        """Send files and folders of this machine; the manifest under which a job takes them along. What is there already is not sent."""
        named = files if isinstance(files, Mapping) else {Path(name).name: name for name in files}
        found: dict[str, Path] = {}
        for name, place in named.items():
            path = Path(place)
            below = files_below(path) if path.is_dir() else {"": path}
            found |= {f"{name}/{inner}" if inner else name: each for inner, each in below.items()}
        hashes = {name: hash_of(path) for name, path in found.items()}
        missing = self._json(
            "POST", "/blobs/missing", body={"sha256": sorted(set(hashes.values()))}
        )
        for sha256 in missing["missing"]:
            self._send(sha256, next(path for name, path in found.items() if hashes[name] == sha256))
        return {
            name: [hashes[name], path.stat().st_mode & 0o777, path.stat().st_size]
            for name, path in found.items()
        }

    def _send(self, sha256: str, path: Path) -> None:
        size = path.stat().st_size
        sent = self._json("GET", f"/blobs/{sha256}", query={"size": size})["received"]
        with path.open("rb") as file:
            while True:
                file.seek(sent)
                answer = self._json(
                    "PUT",
                    f"/blobs/{sha256}",
                    query={"size": size, "offset": sent},
                    content=file.read(UPLOAD_PIECE),
                )
                if answer["stored"]:
                    return
                sent = answer["received"]

    def artefacts(self, job_id: str) -> Document:
        """What it left: `files`, by path, with sha256, mode and bytes."""
        return self._json("GET", f"/jobs/{_part(job_id)}/artefacts")

    def fetch(self, job_id: str, folder: str | Path) -> list[Path]:
        """Bring what it left into a folder here; each file appears whole, after its hash was found right."""
        left = self.artefacts(job_id)["files"]
        return [self._fetch(job_id, path, left[path][0], Path(folder)) for path in sorted(left)]

    def _fetch(self, job_id: str, path: str, sha256: str, folder: Path) -> Path:
        target = folder / path
        if target.is_file() and hash_of(target) == sha256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.part")
        hashed = hashlib.sha256()
        address = f"/jobs/{_part(job_id)}/artefacts/{quote(path)}"
        with self._http.stream("GET", address) as answer, temporary.open("wb") as file:
            if answer.status_code != 200:
                answer.read()
                raise _refusal(answer)
            for piece in answer.iter_bytes():
                hashed.update(piece)
                file.write(piece)
        if hashed.hexdigest() != sha256:
            temporary.unlink()
            raise FleetAway(f"{path} of {job_id} did not arrive whole; fetch it again.")
        return temporary.replace(target)

    # Machines, people, state

    def machines(self, *, removed: bool = False) -> list[Document]:
        """All machines, with their GPUs and who holds them."""
        return self._json("GET", "/vms", query={"removed": removed or None})

    def machine(self, vm_id: str) -> Document:
        """One of them."""
        return self._json("GET", f"/vms/{_part(vm_id)}")

    def add_machine(self, machine: Mapping[str, Any]) -> Document:
        """Take one in: a `groupwise.wire.fleet.MachineBody` as JSON."""
        return self._json("POST", "/vms", body=machine)

    def drain(self, vm_id: str) -> Document:
        """Place nothing new there; what runs goes on."""
        return self._json("POST", f"/vms/{_part(vm_id)}/drain")

    def undrain(self, vm_id: str) -> Document:
        """Place work there again."""
        return self._json("POST", f"/vms/{_part(vm_id)}/undrain")

    def cordon(self, vm_id: str, reason: str) -> Document:
        """Place nothing new there, and say why."""
        return self._json("POST", f"/vms/{_part(vm_id)}/cordon", body={"reason": reason})

    def uncordon(self, vm_id: str) -> Document:
        """Place work there again; failed launches are forgotten."""
        return self._json("POST", f"/vms/{_part(vm_id)}/uncordon")

    def lost(self, vm_id: str) -> Document:
        """It will not come back: its attempts end, and its jobs go elsewhere."""
        return self._json("POST", f"/vms/{_part(vm_id)}/lost")

    def remove(self, vm_id: str) -> Document:
        """Take it out of the fleet."""
        return self._json("POST", f"/vms/{_part(vm_id)}/remove")

    def trust(self, vm_id: str, fingerprint: str) -> Document:
        """Pin the host key that it showed last, which must have this fingerprint."""
        return self._json("POST", f"/vms/{_part(vm_id)}/trust", body={"fingerprint": fingerprint})

    def clear_quarantine(self, vm_id: str, gpu: str) -> Document:
        """Let jobs have a GPU again; `gpu` is its index or UUID."""
        return self._json("POST", f"/vms/{_part(vm_id)}/gpus/{_part(gpu)}/clear")

    def projects(self) -> list[Document]:
        """Those that the key may see."""
        return self._json("GET", "/projects")

    def change_project(self, name: str, **wanted: float | None) -> Document:
        """Set weight, max_gpus, max_waiting; None takes a quota away."""
        return self._json("PUT", f"/projects/{_part(name)}", body=wanted)

    def keys(self) -> list[Document]:
        """What is known of all keys."""
        return self._json("GET", "/keys")

    def make_key(
        self,
        role: str,
        *,
        projects: Sequence[str] | None = None,
        seconds: float | None = None,
        note: str | None = None,
    ) -> Document:
        """A key with the role read, act or admin. Sent once: where no answer came, nobody knows the key, and it may be revoked."""
        body = {
            "role": role,
            "projects": None if projects is None else list(projects),
            "seconds": seconds,
            "note": note,
        }
        return self._json("POST", "/keys", body=body, tries=1)

    def revoke_key(self, key_id: str) -> Document:
        """From the next request on nobody is known by it."""
        return self._json("POST", f"/keys/{_part(key_id)}/revoke")

    def status(self) -> Document:
        """Jobs by status, machines, the control plane, alarms."""
        return self._json("GET", "/status")

    def events(self, *, after: int = 0, limit: int = 100) -> list[Document]:
        """What happened after that event, the oldest first."""
        return self._json("GET", "/events", query={"after": after, "limit": limit})

    # Asking

    def _json(self, method: str, path: str, **more: Any) -> Any:
        return self._answer(method, path, **more).json()

    def _answer(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        tries: int = TRIES,
    ) -> httpx2.Response:
        known = {name: value for name, value in (query or {}).items() if value is not None}
        pause, last = FIRST_PAUSE, ""
        for number in range(tries):
            if number:
                self._sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, LONGEST_PAUSE)
            try:
                answer = self._http.request(
                    method, path, json=body, content=content, params=known, headers=headers
                )
            except httpx2.TransportError as error:
                last = f"{type(error).__name__}: {error}"
                continue
            if answer.is_success:
                return answer
            refusal = _refusal(answer)
            if not refusal.kind.retry or number == tries - 1:
                raise refusal
            pause = max(pause, min(refusal.retry_after or 0, LONGEST_PAUSE))
        raise FleetAway(
            f"{self.url} gave no answer to {method} {path} ({last}). Is `groupwise fleet up --port` running there, and the address right?"
        )


def _part(name: str) -> str:
    """A name as one part of an address. Raises UsageError for one that would be another address."""
    if name in ("", ".", ".."):
        raise UsageError(
            f"{name!r} is no id: those of jobs and names of machines begin with a letter or digit."
        )
    return quote(name, safe="")


def _refusal(answer: httpx2.Response) -> Refusal:
    """What the server said; what is no word of a fleet is told as such."""
    try:
        problem = Problem.model_validate(answer.json())
    except ValueError:
        problem = None
    if problem is None or problem.code not in KINDS:
        text = answer.text[:200]
        return Refusal(
            "internal",
            f"{answer.status_code} from {answer.url}, which is no fleet's answer: {text}",
        )
    errors = [FieldError(field=each.field, message=each.message) for each in problem.errors]
    return Refusal(problem.code, problem.detail, errors=errors, retry_after=problem.retry_after)
