"""A fleet from Python, over its HTTP API: the same verbs as the command line.

    fleet = FleetClient("http://127.0.0.1:8010")
    job = fleet.submit({"arguments": ["python", "train.py"]}, files=["train.py"])
    for piece in fleet.follow(job["job_id"]):
        print(piece.decode(), end="")

Every method returns the documents that `--json` prints; `groupwise.jobs.fleet.local` has the same client for a fleet on this machine. A
refusal is raised as `Refusal`, with the server's code and message. If no answer comes, a call that is safe to repeat is sent again, and
`FleetAway` is raised if that has not helped: within seconds by most calls, but only after minutes by those that follow, wait, submit or
transfer files (`groupwise.jobs.fleet.retry`). A submission carries an idempotency key, so repeating it creates no second job.

An API may also accept a request and send nothing: it hangs, or its work takes long. The user is informed within seconds, and the request
is sent again with more time; without that message the user could not know that the client is waiting.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2

from groupwise.api.http.failures import MAY_PASS, certificate_problem, problem_in
from groupwise.api.schemas.fleet import (
    ENDED_HEADER,
    EPOCH_HEADER,
    OFFSET_HEADER,
    LogPart,
    expect_few,
    portions,
)
from groupwise.api.schemas.idempotency import HEADER, new_idempotency_key
from groupwise.api.schemas.keys import VARIABLE
from groupwise.api.schemas.problems import KINDS, Refusal
from groupwise.core.errors import UsageError
from groupwise.core.retry import Backoff
from groupwise.jobs.fleet.download import DownloadRequest, Sum, Tell, fetch, tell_nobody
from groupwise.jobs.fleet.retry import ASK_ON, AwayError, RetryPolicy, is_passing
from groupwise.jobs.fleet.text_validation import require_passable
from groupwise.jobs.hosts.files import PIECE, SLOWEST_DISK, files_below
from groupwise.jobs.hosts.spec import FileEntry

Document = dict[str, Any]
TRIES = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""First and longest pause in seconds between tries: the bound doubles, and the pause is drawn at random below it."""
CONNECTED = 10.0
"""Time limit in seconds for opening a connection."""
PROMPT = 15.0
"""Seconds without an answer after which the user is informed, and the request is sent again with its full time limit."""
WAIT_SECONDS = 20.0
"""Time in seconds for which one request waits for more of a log."""
UPLOAD_PIECE = 16 * PIECE
FILE_BUSY = "file_busy"
OTHERS_PAUSE = 1.0
"""Seconds between two checks of a file that another client is sending too."""
OTHERS_REST = 5.0
"""Seconds without progress on such a file, after which this client continues the upload itself."""
MOST_HASHES = 10_000
"""Maximum number of hashes in one request."""
log = logging.getLogger(__name__)


class FleetAway(AwayError):
    """The fleet's API does not answer. The request may have been carried out; a submission can be sent again with the same key."""

    code = "fleet_away"

    def __init__(self, message: str, *, passing: bool = True, silent: bool = False) -> None:
        """`silent`: the connection was not refused, but no answer came in time."""
        super().__init__(message, passing=passing)
        self.silent = silent


class FleetClient:
    """One fleet. Use it as a context manager, or `close` it; one thread at a time."""

    is_local = False
    tries = TRIES
    """How often a request that changes nothing, or has a key, is sent before it fails."""
    """True if it answers in this process (`groupwise.jobs.fleet.local`)."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout: float = 60.0,
        transport: httpx2.BaseTransport | None = None,
        retry_timeout: float = ASK_ON,
        tell: Callable[[str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key`: default is GROUPWISE_API_KEY of the environment. `timeout`: seconds for one request.

        `retry_timeout`: seconds for which `follow`, `wait`, submissions and file transfers keep trying while the fleet does not answer. A
        file that another client is uploading too may make no progress for that long. `tell` is called when the fleet stops answering, when
        it answers again, and when an answer is late; without it these messages are logged as warnings.
        """
        key = os.environ.get(VARIABLE) if key is None else key
        headers = {} if not key else {"Authorization": f"Bearer {key}"}
        self._has_key = bool(key)
        self.url = url.rstrip("/")
        self._sleep, self._clock = sleep, clock
        self._tell = log.warning if tell is None else tell
        self.retry_policy = RetryPolicy(retry_timeout, tell=self._tell, sleep=sleep, clock=clock)
        self._timeout = timeout
        self._is_slow = False
        """True if the last answer was late: the next request gets its full time at once."""
        self._http = httpx2.Client(base_url=self.url, headers=headers, transport=transport)

    def on_behalf_of(self, who: str) -> Self:
        """Returns the same client: an API identifies callers by their key alone."""
        del who
        return self

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
        """Close its connections."""
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
        """Submit a job. Once this returns, the job is on the fleet's disk.

        `request`: a `groupwise.jobs.fleet.queue.request.JobRequest` as JSON: `arguments`, or a kind's columns. `files`: files and folders
        to send with the job, as paths or as name → path. A second submission with the same key returns the same job.
        """
        document = dict(request)
        if files:
            document["files"] = {**document.get("files", {}), **self.upload(files)}
        return self._post_once("/jobs", document, project, idempotency_key)

    def submit_all(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        project: str | None = None,
        idempotency_key: str | None = None,
    ) -> list[Document]:
        """Submit several jobs, all of them or none. A second submission with the same key returns the same jobs."""
        expect_few(len(requests))
        if len(requests) == 1:
            return [self._post_once("/jobs", requests[0], project, idempotency_key)]
        body = {"jobs": [dict(request) for request in requests]}
        return self._post_once("/jobs/array", body, project, idempotency_key)

    def _post_once(
        self, path: str, body: Mapping[str, Any], project: str | None, named: str | None
    ) -> Any:
        key = new_idempotency_key() if named is None else named
        query = {"project": project}
        return self._patiently("POST", path, body=body, query=query, headers={HEADER: key})

    def plan(self, request: Mapping[str, Any], *, project: str | None = None) -> Document:
        """Describe the job and where it could run now, without submitting it."""
        return self._json("POST", "/jobs/plan", body=request, query={"project": project})

    def jobs(self, **filters: Any) -> list[Document]:
        """Jobs, the newest first. `filters` are those of GET /jobs: ids, status, project, name, kind, vm, label, older_than, limit."""
        if filters.get("ids") == []:
            return []  # an empty list cannot be sent in a query string: it would mean "any id"
        return self._json("GET", "/jobs", query=filters)

    def show(self, job_id: str) -> Document:
        """Returns everything about one job."""
        return self._json("GET", f"/jobs/{_part(job_id)}")

    def progress(self, job_id: str) -> Document:
        """Returns its status, exit code, reason, and the epochs of its attempts: a small document, for frequent polling."""
        return self._json("GET", f"/jobs/{_part(job_id)}/progress")

    def cancel(self, job_id: str, reason: str | None = None) -> Document:
        """Ask for the job to end; its status is `cancelled` once none of its processes is left."""
        return self._json("POST", f"/jobs/{_part(job_id)}/cancel", body={"reason": reason})

    def hold(self, job_id: str) -> Document:
        """Keep a waiting job from starting until it is released."""
        return self._json("POST", f"/jobs/{_part(job_id)}/hold")

    def release(self, job_id: str) -> Document:
        """Allow a held job to start."""
        return self._json("POST", f"/jobs/{_part(job_id)}/release")

    def retry(self, job_id: str) -> Document:
        """Start a failed or cancelled job again. Sent once: if no answer came, look at the job first."""
        return self._json("POST", f"/jobs/{_part(job_id)}/retry", tries=1)

    def cancel_all(self, ids: Sequence[str], reason: str | None = None) -> list[Document]:
        """`cancel` for many: the document of each job, or `job_id` and `error` (`code`, `message`) if it was refused."""
        return self._changed_all("cancel", ids, reason=reason)

    def hold_all(self, ids: Sequence[str]) -> list[Document]:
        """`hold` for many; returns the same as `cancel_all`."""
        return self._changed_all("hold", ids)

    def release_all(self, ids: Sequence[str]) -> list[Document]:
        """`release` for many; returns the same as `cancel_all`."""
        return self._changed_all("release", ids)

    def retry_all(self, ids: Sequence[str]) -> list[Document]:
        """`retry` for many; returns the same as `cancel_all`. Sent once."""
        return self._changed_all("retry", ids, tries=1)

    def _changed_all(
        self, verb: str, ids: Sequence[str], *, tries: int | None = None, **more: Any
    ) -> list[Document]:
        found: list[Document] = []
        for some in portions(ids):
            found += self._json("POST", f"/jobs/{verb}", body={"jobs": some, **more}, tries=tries)
        return found

    def prune(
        self,
        older_than: float,
        *,
        project: str | None = None,
        status: Sequence[str] | None = None,
        dry_run: bool = False,
    ) -> Document:
        """Remove jobs that ended more than `older_than` seconds ago, with logs and artefacts; returns their ids and bytes. Sent once."""
        body = {
            "older_than": older_than,
            "project": project,
            "status": None if status is None else list(status),
            "dry_run": dry_run,
        }
        return self._json("POST", "/jobs/prune", body=body, tries=None if dry_run else 1)

    def wait(self, job_id: str) -> Document:
        """Wait until the job has ended, and return it."""
        for _ in self.follow(job_id):
            pass
        return self.retry_policy.ask(lambda: self.show(job_id))

    # Bytes

    def log(
        self,
        job_id: str,
        *,
        epoch: int | None = None,
        offset: int = 0,
        rank: int = 0,
        tail: int | None = None,
        wait: float = 0.0,
    ) -> LogPart:
        """The next piece of a log. Without `epoch`: of the newest attempt, from its start, or from `tail` lines before its present end.

        `wait`: seconds to wait for more if there is none yet, at most 30.
        """
        query = {"epoch": epoch, "offset": offset, "rank": rank, "tail": tail, "wait": wait}
        answer = self._answer("GET", f"/jobs/{_part(job_id)}/log", query=query)
        known = EPOCH_HEADER in answer.headers
        return LogPart(
            data=answer.content,
            epoch=int(answer.headers[EPOCH_HEADER]) if known else None,
            offset=int(answer.headers[OFFSET_HEADER]) if known else 0,
            ended=answer.headers.get(ENDED_HEADER) == "true",
        )

    def follow(
        self, job_id: str, *, epoch: int | None = None, offset: int = 0, rank: int = 0
    ) -> Generator[bytes]:
        """The log as it grows, attempt after attempt, until the job has ended. Without `epoch`: from the start of the newest attempt."""
        while True:
            more = partial(
                self.log, job_id, epoch=epoch, offset=offset, rank=rank, wait=WAIT_SECONDS
            )
            part = self.retry_policy.ask(more)
            if part.epoch is not None:
                epoch, offset = part.epoch, part.offset
            if part.data:
                yield part.data
            if part.ended:
                return

    def upload(
        self,
        files: Sequence[str | Path] | Mapping[str, str | Path],
        *,
        tell: Tell = tell_nobody,
    ) -> dict[str, list[Any]]:
        """Send files and folders of this machine. Returns the manifest to submit with a job. Files that the fleet already has are not sent.

        A file that grows meanwhile is sent at the size that it had when it was hashed; one that becomes shorter is a UsageError.
        `tell` receives the progress, first of hashing the files, then of sending those that are missing.
        """
        found = named_files(files)
        entries = _entries(found, tell)
        names = {entry.sha256: name for name, entry in entries.items()}
        every = sorted(names)
        missing: list[str] = []
        for start in range(0, len(every), MOST_HASHES):
            some = {"sha256": every[start : start + MOST_HASHES]}
            missing += self._patiently("POST", "/blobs/missing", body=some)["missing"]
        total = Sum(tell, sum(entries[names[sha256]].size for sha256 in missing))
        for name in (names[sha256] for sha256 in missing):
            self._send(entries[name], found[name], partial(total.more, f"sending {name}"))
        return {name: [each.sha256, each.mode, each.size] for name, each in entries.items()}

    def _send(self, entry: FileEntry, path: Path, more: Callable[[int], None]) -> None:
        """Send one file. While other clients send the same file and it grows, wait for them."""
        sha256, size = entry.sha256, entry.size
        here, since = self._bytes_received(sha256, size), self._clock()
        more(here)
        with path.open("rb") as file:
            while True:
                file.seek(here)
                piece = file.read(min(UPLOAD_PIECE, size - here))
                if here < size and not piece:
                    raise UsageError(f"{path} has become shorter while it was sent.")
                now, stored = self._piece(sha256, size, here, piece)
                more(now - here)
                if stored:
                    return
                if now == here or now != here + len(piece):
                    now = self._while_others_send(sha256, size, now, more)
                if now != here:
                    here, since = now, self._clock()
                elif self._clock() - since > self.retry_policy.seconds + size / SLOWEST_DISK:
                    raise Refusal(
                        FILE_BUSY,
                        f"{path}: another client sends the same file, of which {here} of {size} bytes are there; for minutes no more has "
                        "come; nor can it be sent from here meanwhile. What is there is kept: try again later.",
                    )

    def _bytes_received(self, sha256: str, size: int) -> int:
        return self._patiently("GET", f"/blobs/{sha256}", query={"size": size})["received"]

    def _piece(self, sha256: str, size: int, offset: int, data: bytes) -> tuple[int, bool]:
        """Returns the number of bytes received so far, and whether the file is stored. While others send it, `data` may be rejected."""
        query = {"size": size, "offset": offset}
        try:
            answer = self._patiently("PUT", f"/blobs/{sha256}", query=query, content=data)
        except Refusal as refusal:
            if refusal.code != FILE_BUSY:
                raise
            return offset, False
        return (size, True) if answer["stored"] else (answer["received"], False)

    def _while_others_send(
        self, sha256: str, size: int, here: int, more: Callable[[int], None]
    ) -> int:
        """Wait until the file stops growing; returns how many bytes have been received."""
        since = self._clock()
        while True:
            self._sleep(OTHERS_PAUSE * random.uniform(0.5, 1))
            now = self._bytes_received(sha256, size)
            more(now - here)
            if now != here:
                here, since = now, self._clock()
            if here >= size or self._clock() - since >= OTHERS_REST:
                return here

    def artefacts(self, job_id: str, *, epoch: int | None = None, rank: int = 0) -> Document:
        """An attempt's artefacts: `files`, by path, with sha256, mode and bytes. Without `epoch`: of the newest attempt that left any."""
        query = {"epoch": epoch, "rank": rank}
        return self._json("GET", f"/jobs/{_part(job_id)}/artefacts", query=query)

    def checkpoints(self, job_id: str) -> list[Document]:
        """Its mirrored checkpoints, the newest first; their `files` have the form of those in `artefacts`."""
        return self._json("GET", f"/jobs/{_part(job_id)}/checkpoints")

    def fetch(
        self,
        job_id: str,
        folder: str | Path,
        *,
        paths: Sequence[str] = (),
        checkpoints: bool = False,
        epoch: int | None = None,
        rank: int = 0,
        force: bool = False,
        tell: Tell = tell_nobody,
    ) -> Document:
        """Download its outputs into a local folder. Each file appears only when complete and its hash verified. See `download.fetch`."""
        request = DownloadRequest(paths, checkpoints, epoch, rank)
        return fetch(self, job_id, Path(folder), request, force=force, tell=tell)

    def artefact_pieces(
        self, job_id: str, path: str, *, epoch: int, rank: int = 0, offset: int = 0
    ) -> Generator[bytes]:
        """The bytes of an artefact from an offset on."""
        address = f"/jobs/{_part(job_id)}/artefacts/{quote(path)}"
        return self._pieces(address, {"epoch": epoch, "rank": rank}, offset)

    def checkpoint_pieces(self, job_id: str, sha256: str, *, offset: int = 0) -> Generator[bytes]:
        """The bytes of a file of a mirrored checkpoint, by its hash, from an offset on."""
        return self._pieces(f"/jobs/{_part(job_id)}/checkpoints/{_part(sha256)}", {}, offset)

    def _pieces(self, path: str, query: Mapping[str, Any], offset: int) -> Generator[bytes]:
        """Yield the file's bytes; a download that is cut off resumes where it ended."""
        failures, silence = 0, self.retry_policy.silence()
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            headers = {"Range": f"bytes={offset}-", "Accept-Encoding": "identity"}
            hurried = not self._is_slow
            limits = self._limits(hurried)
            try:
                with self._http.stream(
                    "GET", path, params=query, headers=headers, timeout=limits
                ) as answer:
                    if not answer.is_success:
                        answer.read()
                        raise self._refusal(answer)
                    skip = offset if answer.status_code == 200 else 0  # a proxy may ignore ranges
                    for data in answer.iter_bytes():
                        piece, skip = data[skip:], max(0, skip - len(data))
                        offset += len(piece)
                        failures = 0
                        backoff.reset()
                        silence.is_over()
                        yield piece
                    silence.is_over()
                    return
            except httpx2.TransportError as error:
                failed = self._away("GET", path, error)
            except (FleetAway, Refusal) as error:
                failed = error
            silent = isinstance(failed, FleetAway) and failed.silent
            if silent and hurried:
                self._is_late("GET", path)
                continue
            failures += 1
            if silent or failures % TRIES == 0 or not is_passing(failed):
                silence.goes_on(failed)
            self._sleep(backoff.next())

    # Machines, projects, keys, state

    def machines(self, *, removed: bool = False) -> list[Document]:
        """All machines, with their GPUs and the jobs that hold them."""
        return self._json("GET", "/vms", query={"removed": removed or None})

    def machine(self, vm_id: str) -> Document:
        """Returns one machine."""
        return self._json("GET", f"/vms/{_part(vm_id)}")

    def add_machine(self, machine: Mapping[str, Any]) -> Document:
        """Add a machine: a `groupwise.api.schemas.fleet.MachineBody` as JSON."""
        return self._json("POST", "/vms", body=machine)

    def change_machine(self, vm_id: str, **changes: Any) -> Document:
        """Change ip_address, port, user, ssh_key_path, jump ({}: none), workdir, python, cpu_slots, projects ([]: any), labels (None
        removes one), deadman (0: never), probe, idle_memory_mb, engine (only these options of its scheduler); None: unchanged."""
        return self._json("PUT", f"/vms/{_part(vm_id)}", body=changes)

    def drain(self, vm_id: str) -> Document:
        """Place nothing new there; running jobs continue."""
        return self._json("POST", f"/vms/{_part(vm_id)}/drain")

    def undrain(self, vm_id: str) -> Document:
        """Place work there again."""
        return self._json("POST", f"/vms/{_part(vm_id)}/undrain")

    def cordon(self, vm_id: str, reason: str) -> Document:
        """Place nothing new there, and record the reason."""
        return self._json("POST", f"/vms/{_part(vm_id)}/cordon", body={"reason": reason})

    def uncordon(self, vm_id: str) -> Document:
        """Place work there again; its count of failed launches is reset."""
        return self._json("POST", f"/vms/{_part(vm_id)}/uncordon")

    def lost(self, vm_id: str) -> Document:
        """Declare that the machine will not come back: its attempts end, and its jobs run on other machines."""
        return self._json("POST", f"/vms/{_part(vm_id)}/lost")

    def remove(self, vm_id: str) -> Document:
        """Remove it from the fleet."""
        return self._json("POST", f"/vms/{_part(vm_id)}/remove")

    def trust(self, vm_id: str, fingerprint: str | None = None) -> Document:
        """Pin the host key that it showed last. If a fingerprint is given, the key must have it."""
        return self._json("POST", f"/vms/{_part(vm_id)}/trust", body={"fingerprint": fingerprint})

    def clear_quarantine(self, vm_id: str, gpu: str) -> Document:
        """Allow jobs on a quarantined GPU again; `gpu` is its index or UUID."""
        return self._json("POST", f"/vms/{_part(vm_id)}/gpus/{_part(gpu)}/clear")

    def projects(self) -> list[Document]:
        """List the projects that the key may see."""
        return self._json("GET", "/projects")

    def change_project(self, name: str, **changes: float | None) -> Document:
        """Set weight, max_gpus, max_waiting; None removes a quota."""
        return self._json("PUT", f"/projects/{_part(name)}", body=changes)

    def keys(self) -> list[Document]:
        """List all keys, without their secret texts."""
        return self._json("GET", "/keys")

    def make_key(
        self,
        role: str,
        *,
        projects: Sequence[str] | None = None,
        seconds: float | None = None,
        note: str | None = None,
    ) -> Document:
        """Make a key with the role read, act or admin. Sent once: if no answer comes, the key's text is lost and the key may be revoked."""
        body = {
            "role": role,
            "projects": None if projects is None else list(projects),
            "seconds": seconds,
            "note": note,
        }
        return self._json("POST", "/keys", body=body, tries=1)

    def revoke_key(self, key_id: str) -> Document:
        """Revoke a key: it is refused from the next request on."""
        return self._json("POST", f"/keys/{_part(key_id)}/revoke")

    def status(self) -> Document:
        """Jobs by status, machines, the control plane, alarms."""
        return self._json("GET", "/status")

    def events(self, *, after: int = 0, limit: int = 100) -> list[Document]:
        """Events with higher numbers than `after`, the oldest first."""
        return self._json("GET", "/events", query={"after": after, "limit": limit})

    # Sending requests

    def _json(self, method: str, path: str, **more: Any) -> Any:
        return self._answer(method, path, **more).json()

    def _patiently(self, method: str, path: str, **more: Any) -> Any:
        """`_json` for requests that are safe to repeat: keeps trying for minutes while the fleet does not answer."""
        hurried = "content" not in more  # sending an upload may take long
        return self.retry_policy.ask(lambda: self._json(method, path, hurried=hurried, **more))

    def _answer(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        tries: int | None = None,
        hurried: bool | None = None,
    ) -> httpx2.Response:
        """`hurried`: if no answer comes soon, the request may be sent again while the first is still being handled. None: only for GET."""
        tries = self.tries if tries is None else tries
        known = {name: value for name, value in (query or {}).items() if value is not None}
        require_passable(**known)
        require_passable(**(body or {}))
        request = partial(
            self._http.request,
            *(method, path),
            json=body,
            content=content,
            params=known,
            headers=headers,
        )
        may_hurry = tries > 1 and (method == "GET" if hurried is None else hurried)
        wait = float(known.get("wait", 0.0))
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        for _ in range(tries - 1):
            soon = may_hurry and not self._is_slow
            least = 0.0
            try:
                return self._once(request, method, path, soon=soon, wait=wait)
            except FleetAway as away:
                if not away.passing or (away.silent and not soon):
                    raise
                if away.silent:
                    self._is_late(method, path)
                    continue
            except Refusal as refusal:
                if not refusal.kind.retry or refusal.code == FILE_BUSY:
                    raise  # an upload must first ask how much of the file has arrived
                least = refusal.retry_after or 0.0
                if least > self.retry_policy.seconds:
                    raise
            self._sleep(backoff.next(least))
        return self._once(request, method, path, soon=False, wait=wait)

    def _limits(self, soon: bool, wait: float = 0.0) -> httpx2.Timeout:
        """`wait`: seconds for which the API itself is asked to wait. It does not extend the limit for sending: a slow API still reads."""
        prompt = min(PROMPT, self._timeout)
        return httpx2.Timeout(
            self._timeout,
            connect=min(CONNECTED, self._timeout),
            read=(prompt if soon else self._timeout) + wait,
            write=prompt,
        )

    def _is_late(self, method: str, path: str) -> None:
        self._is_slow = True
        self._tell(f"{self.url} does not answer {method} {path} so far, and is asked again")

    def _once(
        self,
        request: Callable[..., httpx2.Response],
        method: str,
        path: str,
        *,
        soon: bool,
        wait: float,
    ) -> httpx2.Response:
        began = self._clock()
        try:
            answer = request(timeout=self._limits(soon, wait))
        except (
            httpx2.InvalidURL,
            ValueError,
        ) as error:  # a name that is too long; a number that JSON lacks
            raise UsageError(f"{method} {path[:80]} cannot be sent: {error}.") from error
        except httpx2.TransportError as error:
            raise self._away(method, path, error) from error
        self._is_slow = self._is_slow and self._clock() - began > PROMPT + wait
        if not answer.is_success:
            raise self._refusal(answer)
        return answer

    def _away(self, method: str, path: str, error: httpx2.TransportError) -> FleetAway:
        if untrusted := certificate_problem(self.url, error):
            return FleetAway(untrusted, passing=False)
        return FleetAway(
            f"{self.url} gave no answer to {method} {path} ({type(error).__name__}: {error}). Is `groupwise fleet up --port` running "
            "there, and the address right?",
            passing=not isinstance(error, httpx2.UnsupportedProtocol),
            silent=isinstance(error, httpx2.TimeoutException),
        )

    def _refusal(self, answer: httpx2.Response) -> Refusal | FleetAway:
        """The server's refusal, with a hint about the client's key if it is `unauthorised`."""
        refusal = _refusal(answer)
        if isinstance(refusal, FleetAway) or refusal.code != "unauthorised":
            return refusal
        if self._has_key:
            return Refusal(
                refusal.code, f"{refusal.detail} The one that was sent is that of {VARIABLE}."
            )
        return Refusal(
            refusal.code,
            f"{self.url} needs a key, and none was sent: put yours into {VARIABLE}. The fleet's operator makes one "
            "with `groupwise fleet key new ROLE`.",
        )


def named_files(files: Sequence[str | Path] | Mapping[str, str | Path]) -> dict[str, Path]:
    """Expand files and folders of this machine into single files, keyed by their paths in the job's folder: their own names, or the names
    of a mapping, in which `.` is the job's folder itself. Raises UsageError for anything that is neither file nor folder (a pipe may have
    no end), and for two files with the same target path.
    """
    named = (
        files.items() if isinstance(files, Mapping) else [(own_name(each), each) for each in files]
    )
    found: dict[str, Path] = {}
    for name, place in named:
        path = Path(place)
        if path.exists() and not (path.is_dir() or path.is_file()):
            raise UsageError(
                f"{path} is neither a file nor a folder, and cannot travel with a job: write what comes from it into a file."
            )
        below = files_below(path) if path.is_dir() else {"": path}
        top = "" if name == "." and path.is_dir() else name
        for inner, each in below.items():
            target = "/".join(filter(None, (top, inner)))
            there = found.setdefault(target, each)
            if there is not each and there.resolve() != each.resolve():
                raise UsageError(
                    f"{each} and {there} would both be {target} in the job's working folder: give them as a mapping of "
                    "the names there, files={'OTHER': …}."
                )
    return found


def own_name(place: str | Path) -> str:
    """The last part of the absolute path: works for `.` and `..`, and does not resolve links."""
    return Path(os.path.abspath(place)).name


def _entries(found: Mapping[str, Path], tell: Tell) -> dict[str, FileEntry]:
    """Hash each file up to its size when opened: a file that is still being written to may have no end."""
    total = Sum(tell, sum(path.stat().st_size for path in found.values()))
    entries: dict[str, FileEntry] = {}
    for name, path in found.items():
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            while piece := file.read(min(PIECE, status.st_size - size)):
                digest.update(piece)
                size += len(piece)
                total.more(f"looking at {name}", len(piece))
        entries[name] = FileEntry(digest.hexdigest(), status.st_mode & 0o777, size)
    return entries


def _part(name: str) -> str:
    """Quote a name as one part of a URL path. Raises UsageError for one that would change the path."""
    if name in ("", ".", "..") or "/" in name:
        raise UsageError(
            f"{name!r} is no id: those of jobs and names of machines begin with a letter or digit."
        )
    require_passable(name)
    return quote(name, safe="")


def _refusal(answer: httpx2.Response) -> Refusal | FleetAway:
    """The server's refusal; an answer that does not come from a fleet is reported as such."""
    problem = problem_in(answer, time.time())
    if problem is None or problem.code not in KINDS:
        words = f"{answer.status_code} from {answer.url}, which is no fleet's answer: {answer.text[:200]}"
        return FleetAway(words) if answer.status_code in MAY_PASS else Refusal("internal", words)
    return Refusal(
        problem.code, problem.detail, errors=problem.errors, retry_after=problem.retry_after
    )
