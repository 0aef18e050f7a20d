"""A fleet from Python, over its HTTP API: the same operations as the command line.

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
import itertools
import logging
import os
import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx2

from groupwise.api.http.failures import MAY_PASS, certificate_problem, problem_in
from groupwise.api.openai_client.bounded_responses import ResponseTooLarge, read_response
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
from groupwise.core.loopback import direct_transport
from groupwise.core.retry import Backoff
from groupwise.jobs.fleet.download import (
    DownloadRequest,
    OnProgress,
    ProgressCounter,
    fetch,
    no_progress,
)
from groupwise.jobs.fleet.retry import RETRY_SECONDS, AwayError, RequestRetries, is_temporary
from groupwise.jobs.fleet.text_validation import require_passable
from groupwise.jobs.hosts.files import PIECE, SLOWEST_DISK, files_below, open_local, total_size
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
UPLOAD_TRIES = 3
"""How often files are hashed and sent if one of them changes during that."""
MAX_HASHES = 10_000
"""Maximum number of hashes in one request."""
log = logging.getLogger(__name__)


class FleetAway(AwayError):
    """The fleet's API does not answer. The request may have been carried out; a submission can be sent again with the same key."""

    code = "fleet_away"

    def __init__(self, message: str, *, temporary: bool = True, silent: bool = False) -> None:
        """`silent`: the connection was not refused, but no answer came in time."""
        super().__init__(message, temporary=temporary)
        self.silent = silent


class _FileChanged(UsageError):
    """A file has changed since it was hashed."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was changed while it was sent: submit when nothing writes to it.")


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
        retry_timeout: float = RETRY_SECONDS,
        warn: Callable[[str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key`: default is GROUPWISE_API_KEY of the environment. `timeout`: seconds for one request.

        `retry_timeout`: seconds for which `follow`, `wait`, submissions and file transfers keep trying while the fleet does not answer. A
        file that another client is uploading too may make no progress for that long. `warn` is called when the fleet stops answering, when
        it answers again, and when an answer is late; without it these messages are logged as warnings.
        """
        key = os.environ.get(VARIABLE) if key is None else key
        headers = {} if not key else {"Authorization": f"Bearer {key}"}
        self._has_key = bool(key)
        self.url = url.rstrip("/")
        self._sleep, self._clock = sleep, clock
        self._warn = log.warning if warn is None else warn
        self.retries = RequestRetries(retry_timeout, tell=self._warn, sleep=sleep, clock=clock)
        self._timeout = timeout
        self._is_slow = False
        """True if the last answer was late: the next request gets its full time at once."""
        self._http = httpx2.Client(
            base_url=self.url, headers=headers, transport=transport or direct_transport(self.url)
        )

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
        self, path: str, body: Mapping[str, Any], project: str | None, given_key: str | None
    ) -> Any:
        key = new_idempotency_key() if given_key is None else given_key
        query = {"project": project}
        return self._request_patiently("POST", path, body=body, query=query, headers={HEADER: key})

    def plan(self, request: Mapping[str, Any], *, project: str | None = None) -> Document:
        """Describe the job and where it could run now, without submitting it."""
        return self._request_json("POST", "/jobs/plan", body=request, query={"project": project})

    def jobs(self, **filters: Any) -> list[Document]:
        """Jobs, the newest first. `filters` are those of GET /jobs: ids, status, project, name, kind, vm, label, older_than, limit."""
        if filters.get("ids") == []:
            return []  # an empty list cannot be sent in a query string: it would mean "any id"
        return self._request_json("GET", "/jobs", query=filters)

    def show(self, job_id: str) -> Document:
        """Returns everything about one job."""
        return self._request_json("GET", f"/jobs/{_path_segment(job_id)}")

    def progress(self, job_id: str) -> Document:
        """Returns its status, exit code, reason, and the epochs of its attempts: a small document, for frequent polling."""
        return self._request_json("GET", f"/jobs/{_path_segment(job_id)}/progress")

    def cancel(self, job_id: str, reason: str | None = None) -> Document:
        """Ask for the job to end; its status is `cancelled` once none of its processes is left."""
        return self._request_json(
            "POST", f"/jobs/{_path_segment(job_id)}/cancel", body={"reason": reason}
        )

    def hold(self, job_id: str) -> Document:
        """Keep a waiting job from starting until it is released."""
        return self._request_json("POST", f"/jobs/{_path_segment(job_id)}/hold")

    def release(self, job_id: str) -> Document:
        """Allow a held job to start."""
        return self._request_json("POST", f"/jobs/{_path_segment(job_id)}/release")

    def retry(self, job_id: str) -> Document:
        """Start a failed or cancelled job again. Sent once: if no answer came, look at the job first."""
        return self._request_json("POST", f"/jobs/{_path_segment(job_id)}/retry", tries=1)

    def change_all(
        self,
        operation: Literal["cancel", "hold", "release", "retry"],
        ids: Sequence[str],
        reason: str | None = None,
    ) -> list[Document]:
        """Make one change to many jobs: the document of each, or `job_id` and `error` (`code`, `message`) if it was refused.

        A retry is sent once. `reason`: of a cancellation.
        """
        results: list[Document] = []
        fields, tries = (
            {"reason": reason} if operation == "cancel" else {},
            1 if operation == "retry" else None,
        )
        for portion in portions(ids):
            body = {"jobs": portion, **fields}
            results += self._request_json("POST", f"/jobs/{operation}", body=body, tries=tries)
        return results

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
        return self._request_json("POST", "/jobs/prune", body=body, tries=None if dry_run else 1)

    def wait(self, job_id: str) -> Document:
        """Wait until the job has ended, and return it."""
        for _ in self.follow(job_id):
            pass
        return self.retries.ask(lambda: self.show(job_id))

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
        response = self._send_request("GET", f"/jobs/{_path_segment(job_id)}/log", query=query)
        has_epoch = EPOCH_HEADER in response.headers
        return LogPart(
            data=response.content,
            epoch=int(response.headers[EPOCH_HEADER]) if has_epoch else None,
            offset=int(response.headers[OFFSET_HEADER]) if has_epoch else 0,
            ended=response.headers.get(ENDED_HEADER) == "true",
        )

    def follow(
        self, job_id: str, *, epoch: int | None = None, offset: int = 0, rank: int = 0
    ) -> Generator[bytes]:
        """The log as it grows, attempt after attempt, until the job has ended. Without `epoch`: from the start of the newest attempt."""
        while True:
            next_part = partial(
                self.log, job_id, epoch=epoch, offset=offset, rank=rank, wait=WAIT_SECONDS
            )
            part = self.retries.ask(next_part)
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
        on_progress: OnProgress = no_progress,
    ) -> dict[str, list[Any]]:
        """Send files and folders of this machine. Returns the manifest to submit with a job. Files that the fleet already has are not sent.

        A file that grows meanwhile is sent at the size that it had when it was hashed; if one changes otherwise, all are looked at again.
        `on_progress` receives the progress, first of hashing the files, then of sending those that are missing.
        """
        local_files = named_files(files)
        for tries_left in itertools.count(UPLOAD_TRIES - 1, -1):
            entries = _hash_files(local_files, on_progress)
            try:
                self._send_missing(local_files, entries, on_progress)
            except _FileChanged:
                if not tries_left:
                    raise
            else:
                return {name: [e.sha256, e.mode, e.size] for name, e in entries.items()}
        raise AssertionError("the last try returns or raises")

    def _send_missing(
        self, files: Mapping[str, Path], entries: Mapping[str, FileEntry], on_progress: OnProgress
    ) -> None:
        """Send the files that the fleet lacks. Raises _FileChanged if one has changed since it was hashed."""
        names = {entry.sha256: name for name, entry in entries.items()}
        hashes = sorted(names)
        missing_hashes: list[str] = []
        for start in range(0, len(hashes), MAX_HASHES):
            body = {"sha256": hashes[start : start + MAX_HASHES]}
            missing_hashes += self._request_patiently("POST", "/blobs/missing", body=body)[
                "missing"
            ]
        progress = ProgressCounter(
            on_progress, sum(entries[names[sha256]].size for sha256 in missing_hashes)
        )
        for name in (names[sha256] for sha256 in missing_hashes):
            try:
                self._send_file(
                    entries[name], files[name], partial(progress.add, f"sending {name}")
                )
            except Refusal as refusal:  # the fleet has hashed what came
                one_file = {name: files[name]}
                if refusal.code != "invalid_request" or _hash_files(one_file, no_progress) == {
                    name: entries[name]
                }:
                    raise
                raise _FileChanged(files[name]) from refusal

    def _send_file(self, entry: FileEntry, path: Path, on_sent: Callable[[int], None]) -> None:
        """Send one file. While other clients send the same file and it grows, wait for them."""
        sha256, size = entry.sha256, entry.size
        # The fleet stores no part of a file of one piece, so there is nothing to resume.
        offset = self._bytes_received(sha256, size) if size > UPLOAD_PIECE else 0
        last_change = self._clock()
        on_sent(offset)
        with open_local(path) as file:
            while True:
                file.seek(offset)
                piece = file.read(min(UPLOAD_PIECE, size - offset))
                if offset < size and not piece:
                    raise _FileChanged(path)
                received, is_stored = self._send_piece(sha256, size, offset, piece)
                on_sent(received - offset)
                if is_stored:
                    return
                if received == offset or received != offset + len(piece):
                    received = self._while_others_send(sha256, size, received, on_sent)
                if received != offset:
                    offset, last_change = received, self._clock()
                elif self._clock() - last_change > self.retries.seconds + size / SLOWEST_DISK:
                    raise Refusal(
                        FILE_BUSY,
                        f"{path}: another client is sending the same file. {offset} of {size} bytes have arrived, and for minutes no more; "
                        "until it stops, nobody else can send the file. What has arrived is kept: try again later.",
                    )

    def _bytes_received(self, sha256: str, size: int) -> int:
        return self._request_patiently("GET", f"/blobs/{sha256}", query={"size": size})["received"]

    def _send_piece(self, sha256: str, size: int, offset: int, data: bytes) -> tuple[int, bool]:
        """Returns the number of bytes received so far, and whether the file is stored. While others send it, `data` may be rejected."""
        query = {"size": size, "offset": offset}
        try:
            receipt = self._request_patiently("PUT", f"/blobs/{sha256}", query=query, content=data)
        except Refusal as refusal:
            if refusal.code != FILE_BUSY:
                raise
            return offset, False
        return (size, True) if receipt["stored"] else (receipt["received"], False)

    def _while_others_send(
        self, sha256: str, size: int, offset: int, on_sent: Callable[[int], None]
    ) -> int:
        """Wait until the file stops growing; returns how many bytes have been received."""
        last_change = self._clock()
        while True:
            self._sleep(OTHERS_PAUSE * random.uniform(0.5, 1))
            received = self._bytes_received(sha256, size)
            on_sent(received - offset)
            if received != offset:
                offset, last_change = received, self._clock()
            if offset >= size or self._clock() - last_change >= OTHERS_REST:
                return offset

    def artefacts(self, job_id: str, *, epoch: int | None = None, rank: int = 0) -> Document:
        """An attempt's artefacts: `files`, by path, with sha256, mode and bytes. Without `epoch`: of the newest attempt that left any."""
        query = {"epoch": epoch, "rank": rank}
        return self._request_json("GET", f"/jobs/{_path_segment(job_id)}/artefacts", query=query)

    def checkpoints(self, job_id: str) -> list[Document]:
        """Its mirrored checkpoints, the newest first; their `files` have the form of those in `artefacts`."""
        return self._request_json("GET", f"/jobs/{_path_segment(job_id)}/checkpoints")

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
        on_progress: OnProgress = no_progress,
    ) -> Document:
        """Download its outputs into a local folder. Each file appears only when complete and its hash verified. See `download.fetch`."""
        request = DownloadRequest(paths, checkpoints, epoch, rank)
        return fetch(self, job_id, Path(folder), request, force=force, on_progress=on_progress)

    def artefact_pieces(
        self, job_id: str, path: str, *, epoch: int, rank: int = 0, offset: int = 0
    ) -> Generator[bytes]:
        """The bytes of an artefact from an offset on."""
        address = f"/jobs/{_path_segment(job_id)}/artefacts/{quote(path)}"
        return self._stream_file(address, {"epoch": epoch, "rank": rank}, offset)

    def checkpoint_pieces(self, job_id: str, sha256: str, *, offset: int = 0) -> Generator[bytes]:
        """The bytes of a file of a mirrored checkpoint, by its hash, from an offset on."""
        return self._stream_file(
            f"/jobs/{_path_segment(job_id)}/checkpoints/{_path_segment(sha256)}", {}, offset
        )

    def _stream_file(self, path: str, query: Mapping[str, Any], offset: int) -> Generator[bytes]:
        """Yield the file's bytes; a download that is cut off resumes where it ended."""
        failures, retry = 0, self.retries.retry()
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            headers = {"Range": f"bytes={offset}-", "Accept-Encoding": "identity"}
            is_hurried = not self._is_slow
            limits = self._timeouts(is_hurried)
            try:
                with self._http.stream(
                    "GET", path, params=query, headers=headers, timeout=limits
                ) as response:
                    if not response.is_success:
                        raise self._refusal_with_hint(read_response(response))
                    skip = offset if response.status_code == 200 else 0  # a proxy may ignore ranges
                    for data in response.iter_bytes():
                        piece, skip = data[skip:], max(0, skip - len(data))
                        offset += len(piece)
                        failures = 0
                        backoff.reset()
                        retry.end()
                        yield piece
                    retry.end()
                    return
            except httpx2.TransportError as error:
                failure = self._unreachable_error("GET", path, error)
            except (FleetAway, Refusal) as error:
                failure = error
            silent = isinstance(failure, FleetAway) and failure.silent
            if silent and is_hurried:
                self._note_slow_answer("GET", path)
                continue
            failures += 1
            if silent or failures % TRIES == 0 or not is_temporary(failure):
                self.retries.pause_or_raise(retry, failure)
            self._sleep(backoff.next())

    # Machines, projects, keys, state

    def machines(self, *, removed: bool = False) -> list[Document]:
        """All machines, with their GPUs and the jobs that hold them."""
        return self._request_json("GET", "/vms", query={"removed": removed or None})

    def machine(self, vm_id: str) -> Document:
        """Returns one machine."""
        return self._request_json("GET", f"/vms/{_path_segment(vm_id)}")

    def add_machine(self, machine: Mapping[str, Any]) -> Document:
        """Add a machine: a `groupwise.api.schemas.fleet.MachineBody` as JSON."""
        return self._request_json("POST", "/vms", body=machine)

    def change_machine(self, vm_id: str, **changes: Any) -> Document:
        """Change ip_address, port, user, ssh_key_path, jump ({}: none), workdir, python, cpu_slots, projects ([]: any), labels (None
        removes one), deadman (0: never), probe, idle_memory_mb, engine (only these options of its scheduler); None: unchanged."""
        return self._request_json("PUT", f"/vms/{_path_segment(vm_id)}", body=changes)

    def drain(self, vm_id: str, reason: str | None = None) -> Document:
        """Place nothing new there; running jobs continue. The reason is shown with the machine."""
        return self._request_json(
            "POST", f"/vms/{_path_segment(vm_id)}/drain", body={"reason": reason}
        )

    def undrain(self, vm_id: str) -> Document:
        """Place work there again; its count of failed launches is reset."""
        return self._request_json("POST", f"/vms/{_path_segment(vm_id)}/undrain")

    def lost(self, vm_id: str) -> Document:
        """Declare that the machine will not come back: its attempts end, and its jobs run on other machines."""
        return self._request_json("POST", f"/vms/{_path_segment(vm_id)}/lost")

    def remove(self, vm_id: str) -> Document:
        """Remove it from the fleet."""
        return self._request_json("POST", f"/vms/{_path_segment(vm_id)}/remove")

    def trust(self, vm_id: str, fingerprint: str | None = None) -> Document:
        """Pin the host key that it showed last. If a fingerprint is given, the key must have it."""
        return self._request_json(
            "POST", f"/vms/{_path_segment(vm_id)}/trust", body={"fingerprint": fingerprint}
        )

    def clear_quarantine(self, vm_id: str, gpu: str) -> Document:
        """Allow jobs on a quarantined GPU again; `gpu` is its index or UUID."""
        return self._request_json(
            "POST", f"/vms/{_path_segment(vm_id)}/gpus/{_path_segment(gpu)}/clear"
        )

    def projects(self) -> list[Document]:
        """List the projects that the key may see."""
        return self._request_json("GET", "/projects")

    def change_project(self, name: str, **changes: float | None) -> Document:
        """Set weight, max_gpus, max_waiting; None removes a quota."""
        return self._request_json("PUT", f"/projects/{_path_segment(name)}", body=changes)

    def keys(self) -> list[Document]:
        """List all keys, without their secret texts."""
        return self._request_json("GET", "/keys")

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
        return self._request_json("POST", "/keys", body=body, tries=1)

    def revoke_key(self, key_id: str) -> Document:
        """Revoke a key: it is refused from the next request on."""
        return self._request_json("POST", f"/keys/{_path_segment(key_id)}/revoke")

    def status(self) -> Document:
        """Jobs by status, machines, the control plane, alarms."""
        return self._request_json("GET", "/status")

    def events(self, *, after: int = 0, limit: int = 100) -> list[Document]:
        """Events with higher numbers than `after`, the oldest first."""
        return self._request_json("GET", "/events", query={"after": after, "limit": limit})

    # Sending requests

    def _request_json(self, method: str, path: str, **options: Any) -> Any:
        return self._send_request(method, path, **options).json()

    def _request_patiently(self, method: str, path: str, **options: Any) -> Any:
        """`_request_json` for requests that are safe to repeat: keeps trying for minutes while the fleet does not answer."""
        hurried = "content" not in options  # sending an upload may take long
        return self.retries.ask(
            lambda: self._request_json(method, path, hurried=hurried, **options)
        )

    def _send_request(
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
        parameters = {name: value for name, value in (query or {}).items() if value is not None}
        require_passable(**parameters)
        require_passable(**(body or {}))
        request = partial(
            self._read_answer,
            *(method, path),
            json=body,
            content=content,
            params=parameters,
            headers=headers,
        )
        may_hurry = tries > 1 and (method == "GET" if hurried is None else hurried)
        wait = float(parameters.get("wait", 0.0))
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        for _ in range(tries - 1):
            soon = may_hurry and not self._is_slow
            least_pause = 0.0
            try:
                return self._request_once(request, method, path, soon=soon, wait=wait)
            except FleetAway as unreachable:
                if not unreachable.temporary or (unreachable.silent and not soon):
                    raise
                if unreachable.silent:
                    self._note_slow_answer(method, path)
                    continue
            except Refusal as refusal:
                if not refusal.kind.retry or refusal.code == FILE_BUSY:
                    raise  # an upload must first ask how much of the file has arrived
                least_pause = refusal.retry_after or 0.0
                if least_pause > self.retries.seconds:
                    raise
            self._sleep(backoff.next(least_pause))
        return self._request_once(request, method, path, soon=False, wait=wait)

    def _read_answer(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """One request and its whole response. Raises FleetAway for a response beyond all bounds, and what httpx2 raises."""
        with self._http.stream(method, path, **options) as response:
            try:
                return read_response(response)
            except ResponseTooLarge as error:
                raise FleetAway(
                    f"{method} {path} at {self.url}: {error}.", temporary=False
                ) from None

    def _timeouts(self, soon: bool, wait: float = 0.0) -> httpx2.Timeout:
        """`wait`: seconds for which the API itself is asked to wait. It does not extend the limit for sending: a slow API still reads."""
        prompt_limit = min(PROMPT, self._timeout)
        return httpx2.Timeout(
            self._timeout,
            connect=min(CONNECTED, self._timeout),
            read=(prompt_limit if soon else self._timeout) + wait,
            write=prompt_limit,
        )

    def _note_slow_answer(self, method: str, path: str) -> None:
        self._is_slow = True
        self._warn(f"{self.url} has not answered {method} {path} yet; the request is sent again")

    def _request_once(
        self,
        request: Callable[..., httpx2.Response],
        method: str,
        path: str,
        *,
        soon: bool,
        wait: float,
    ) -> httpx2.Response:
        started_at = self._clock()
        try:
            response = request(timeout=self._timeouts(soon, wait))
        except (
            httpx2.InvalidURL,
            ValueError,
        ) as error:  # a name that is too long; a number that JSON lacks
            raise UsageError(f"{method} {path[:80]} cannot be sent: {error}.") from error
        except httpx2.TransportError as error:
            raise self._unreachable_error(method, path, error) from error
        self._is_slow = self._is_slow and self._clock() - started_at > PROMPT + wait
        if not response.is_success:
            raise self._refusal_with_hint(response)
        return response

    def _unreachable_error(self, method: str, path: str, error: httpx2.TransportError) -> FleetAway:
        if untrusted := certificate_problem(self.url, error):
            return FleetAway(untrusted, temporary=False)
        return FleetAway(
            f"{self.url} gave no answer to {method} {path} ({type(error).__name__}: {error}). Is `groupwise fleet up --port` running "
            "there, and the address right?",
            temporary=not isinstance(error, httpx2.UnsupportedProtocol),
            silent=isinstance(error, httpx2.TimeoutException),
        )

    def _refusal_with_hint(self, response: httpx2.Response) -> Refusal | FleetAway:
        """The server's refusal, with a hint about the client's key if it is `unauthorised`."""
        refusal = _parse_refusal(response)
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
    targets = (
        files.items() if isinstance(files, Mapping) else [(own_name(file), file) for file in files]
    )
    files_by_target: dict[str, Path] = {}
    for name, source in targets:
        path = Path(source)
        if path.exists() and not (path.is_dir() or path.is_file()):
            raise UsageError(
                f"{path} is neither a file nor a folder, and cannot be sent with a job: write its output into a file."
            )
        below = files_below(path) if path.is_dir() else {"": path}
        top = "" if name == "." and path.is_dir() else name
        for inner, file in below.items():
            target = "/".join(filter(None, (top, inner)))
            other_path = files_by_target.setdefault(target, file)
            if other_path is not file and other_path.resolve() != file.resolve():
                raise UsageError(
                    f"{file} and {other_path} would both be {target} in the job's working folder: give them as a mapping of "
                    "the names there, files={'OTHER': …}."
                )
    return files_by_target


def own_name(path: str | Path) -> str:
    """The last part of the absolute path: works for `.` and `..`, and does not resolve links."""
    return Path(os.path.abspath(path)).name


def _hash_files(files: Mapping[str, Path], on_progress: OnProgress) -> dict[str, FileEntry]:
    """Hash each file up to its size when opened: a file that is still being written to may have no end."""
    progress = ProgressCounter(on_progress, total_size(files.values()))
    entries: dict[str, FileEntry] = {}
    for name, path in files.items():
        digest, size = hashlib.sha256(), 0
        with open_local(path) as file:
            status = os.fstat(file.fileno())
            while piece := file.read(min(PIECE, status.st_size - size)):
                digest.update(piece)
                size += len(piece)
                progress.add(f"looking at {name}", len(piece))
        entries[name] = FileEntry(digest.hexdigest(), status.st_mode & 0o777, size)
    return entries


def _path_segment(name: str) -> str:
    """Quote a name as one part of a URL path. Raises UsageError for one that would change the path."""
    if name in ("", ".", "..") or "/" in name:
        raise UsageError(
            f"{name!r} is not an id: those of jobs and names of machines begin with a letter or digit."
        )
    require_passable(name)
    return quote(name, safe="")


def _parse_refusal(response: httpx2.Response) -> Refusal | FleetAway:
    """The server's refusal; an answer that does not come from a fleet is reported as such."""
    problem = problem_in(response, time.time())
    if problem is None or problem.code not in KINDS:
        description = f"{response.status_code} from {response.url}, which is not an answer of a fleet: {response.text[:200]}"
        return (
            FleetAway(description)
            if response.status_code in MAY_PASS
            else Refusal("internal", description)
        )
    return Refusal(
        problem.code, problem.detail, errors=problem.errors, retry_after=problem.retry_after
    )
