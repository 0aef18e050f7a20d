"""The log, files and checkpoints of a job, listed and read for the control plane."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.blobs import has_blob, hash_of, store_blob
from groupwise.jobs.hosts.runner.checkpoints import SETTLED, checkpoints_of, file_identity
from groupwise.jobs.hosts.runner.files import open_plain, read_json, write_json
from groupwise.jobs.hosts.runner.locks import HeldLock, one_at_a_time
from groupwise.jobs.hosts.runner.protocol import (
    RequestRejected,
    as_list,
    blobs_of,
    count_of,
    is_sha,
    text_of,
)
from groupwise.jobs.hosts.runner.root import attempt_of
from groupwise.jobs.hosts.runner.state import state_of
from groupwise.jobs.hosts.runner.work_folder import (
    MAX_ENTRIES,
    NO_FILES,
    Walk,
    open_regular,
    read_if_unchanged,
)

if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from groupwise.jobs.hosts.runner.checkpoints import Checkpoint
    from groupwise.jobs.hosts.runner.protocol import VerbAnswer
    from groupwise.jobs.hosts.runner.root import Attempt, Root

LARGEST_READ = 64 << 20
MAX_GATHERED = 1000
"""Most files in one `gather`; reading them takes some tenths of a second."""
LARGEST_GATHERED = 4 << 20
"""Most bytes in one `gather`, over all files."""
SAVE_INTERVAL = 20.0
"""Seconds between saves of the hashes while files are read: the caller may disconnect before all files are hashed."""
MAX_ARTEFACTS = 1_000_000
"""Most files of a job, and most folders; upper bound of the job's own limit."""
LARGEST_LISTING = 192 << 20
"""Most bytes that listed files take up in an answer: enough for MAX_ARTEFACTS with paths of 100 characters. The client accepts more
(LARGEST_MANIFEST in `driver.py`)."""
MAX_REFUSED = 1000
"""Most refused files of each kind that an answer lists individually."""
REFUSED_TOGETHER = 4 << 20
"""Most bytes that the list of refused files of each kind takes up in an answer."""
LARGEST_HASHES = 64 << 20
HASHES_EACH = 400
"""Bytes in `hashes.json` per file; raises LARGEST_HASHES for jobs with many files."""


def read_slice(body: dict[str, Any], fd: int) -> VerbAnswer:
    """Answer with the requested part of a file, then close the file."""
    offset = count_of(body, "offset", 0)
    limit = min(count_of(body, "limit", LARGEST_READ), LARGEST_READ)
    try:
        return {"size": os.fstat(fd).st_size, "offset": offset}, os.pread(fd, limit, offset)
    finally:
        os.close(fd)


def files_of(body: dict[str, Any]) -> list[tuple[str, str, int]]:
    """The field `files` of a request: path, SHA-256 and size in bytes of each."""
    blobs = blobs_of([entry[1:] for entry in body["files"]], "files")
    paths = [text_of({"path": entry[0]}, "path") for entry in body["files"]]
    return [(path, *blobs[n]) for n, path in enumerate(paths)]


def verb_log(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Read the command's output from a byte offset."""
    attempt = attempt_of(root, body)
    try:
        fd = open_plain(attempt.at("log"))
    except OSError:
        return {"size": 0, "offset": count_of(body, "offset", 0)}, b""
    return read_slice(body, fd)


def verb_read(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Read part of a file of the working folder."""
    attempt, path = attempt_of(root, body), text_of(body, "path")
    expected = body.get("sha256")
    if expected is not None:
        hashes = Hashes(attempt)
        if hashes.of(path) != expected:
            raise RequestRejected("changed", f"{path} is not what it was: its hash is another")
        hashes.save()
    return read_slice(body, open_regular(attempt.work, path))


def verb_gather(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Read many small files of the working folder in one answer: one request for each would take longer than the reading, since each starts
    a process."""
    attempt, files = attempt_of(root, body), files_of(body)
    if len(files) > MAX_GATHERED or sum(size for _, _, size in files) > LARGEST_GATHERED:
        raise RequestRejected(
            "bad_request",
            f"files: at most {MAX_GATHERED} of together {LARGEST_GATHERED} bytes are expected",
        )
    contents = [read_if_unchanged(attempt.work, path, sha, size) for path, sha, size in files]
    return {"whole": [data is not None for data in contents]}, b"".join(filter(None, contents))


def verb_keep(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Store files of the working folder as blobs. If one has changed, the files before it in the list are stored all the same."""
    attempt, files = attempt_of(root, body), files_of(body)
    with HeldLock(root.lock("blobs.lock"), fcntl.LOCK_SH):
        for path, sha, size in files:
            if not has_blob(root, sha):
                keep_file(root, attempt.work, path, sha, size)
    return {"kept": [sha for _, sha, _ in files]}, b""


def keep_file(root: Root, work: str, path: str, sha: str, size: int) -> None:
    """Store a copy and not a link, because the command may continue to write to the file."""
    with open(open_regular(work, path), "rb") as file:
        try:
            store_blob(root, sha, size, file)
        except RequestRejected as refusal:
            if refusal.body["code"] not in ("truncated", "bad_blob"):
                raise
            raise RequestRejected(
                "changed", f"{path} is not what it was: its hash is another"
            ) from None


def verb_manifest(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """List the files and checkpoints that can be fetched."""
    attempt, kind = attempt_of(root, body), text_of(body, "what")
    if kind not in ("artefacts", "checkpoints", "all"):
        raise RequestRejected("bad_request", "what: artefacts, checkpoints or all")
    state = state_of(attempt) or {}
    answer: dict[str, Any] = {"files": {}, "refused": [], "refused_more": {}, "checkpoints": []}
    if kind != "checkpoints" and os.path.isdir(attempt.path):
        with one_at_a_time(attempt.path):
            answer.update(Artefacts(attempt, state).collect())
    if kind != "artefacts":
        # In the answer the oldest is first. If it cannot hold all, the newest are kept.
        hashes, room = Hashes(attempt), LARGEST_LISTING
        checkpoints: list[dict[str, Any]] = []
        for checkpoint in reversed(checkpoints_of(attempt, state.get("checkpoints") or ())):
            entry = listed_checkpoint(checkpoint, hashes)
            size = sum(map(listed_bytes, entry["files"])) if entry else 0
            if entry and size <= room:
                room -= size
                checkpoints.append(entry)
        hashes.save()
        answer["checkpoints"] = checkpoints[::-1]
    return answer, b""


class Artefacts:
    """The output files of a job, within its limits and within the size of an answer."""

    def __init__(self, attempt: Attempt, state: dict[str, Any]) -> None:
        limits: dict[str, Any] = state.get("limits") or {}
        most_mb = limits.get("artefact_mb")
        self.bytes_left = (20_000 if most_mb is None else int(most_mb)) * 10**6
        self.files_left = most_artefacts(state)
        self.room = LARGEST_LISTING
        self.hashes = Hashes(attempt)
        self.walk = Walk(attempt.work, max(MAX_ENTRIES, 2 * self.files_left))
        self.declared: list[str] = state.get("artefacts") or []
        self.files: dict[str, list[Any]] = {}
        self.refused: dict[bool, list[list[str]]] = {True: [], False: []}
        """Refused files, by whether the job fails because of them. Both kinds have their own limit."""
        self.refused_room = {True: REFUSED_TOGETHER, False: REFUSED_TOGETHER}
        self.unlisted: dict[str, int] = {}
        """How many more files were refused than are listed, by reason."""

    def collect(self) -> dict[str, Any]:
        """The files sorted by path, and the refused files."""
        for path in self.declared:
            self.walk.enter(path)
        for path, reason in self.walk.refused.items():
            self._refuse(path, reason)
        for path in sorted(self.walk.files):
            self._add_file(path, self.walk.files[path])
        self.hashes.save()
        refused = self.refused[True] + self.refused[False]
        return {"files": self.files, "refused": refused, "refused_more": self.unlisted}

    def _refuse(self, path: str, reason: str) -> None:
        is_serious = path in self.declared or reason not in NO_FILES
        self.refused_room[is_serious] -= listed_bytes(path)
        if self.refused_room[is_serious] < 0 or len(self.refused[is_serious]) >= MAX_REFUSED:
            self.unlisted[reason] = self.unlisted.get(reason, 0) + 1
        else:
            self.refused[is_serious].append([path, reason])

    def _add_file(self, path: str, file_stat: os.stat_result) -> None:
        self.room -= listed_bytes(path)
        if not self.files_left or self.room < 0:
            return self._refuse(path, "too_many")
        if file_stat.st_size > self.bytes_left:
            return self._refuse(path, "too_large")
        try:
            sha = self.hashes.of(path)
        except PermissionError:
            return self._refuse(path, "unreadable")
        except OSError:
            return self._refuse(path, "broken")
        except RequestRejected:  # it is not a plain file any more
            sha = None
        if sha is None:
            return self._refuse(path, "changing")
        self.files[path] = [sha, stat.S_IMODE(file_stat.st_mode), file_stat.st_size]
        self.files_left -= 1
        self.bytes_left -= file_stat.st_size
        return None


def most_artefacts(state: dict[str, Any]) -> int:
    """How many output files the job may have."""
    limits: dict[str, Any] = state.get("limits") or {}
    limit = limits.get("artefact_files")
    return min(100_000 if limit is None else int(limit), MAX_ARTEFACTS)


def listed_bytes(path: str) -> int:
    """Upper bound of the bytes that one listed file takes up in an answer."""
    return len(json.dumps(path)) + 96


def listed_checkpoint(checkpoint: Checkpoint, hashes: Hashes) -> dict[str, Any] | None:
    """One checkpoint, its files and the manifest itself; None if it is changing. The hashes are those stated in the manifest: the client
    verifies them."""
    hashed = {checkpoint.path + "/" + p: e["sha256"] for p, e in checkpoint.files.items()}
    hashed[checkpoint.manifest] = None
    # The checkpoint was replaced or removed meanwhile.
    with contextlib.suppress(OSError, RequestRejected):
        hashed[checkpoint.manifest] = hashes.of(checkpoint.manifest)
    if hashed[checkpoint.manifest] is None:
        return None
    stats = {path: checkpoint.stats[path] for path in hashed}
    files = {path: [hashed[path], stat.S_IMODE(f.st_mode), f.st_size] for path, f in stats.items()}
    return {"path": checkpoint.path, "step": checkpoint.step, "files": files}


class Hashes:
    """SHA-256 of files, cached while size, inode and times stay the same: callers ask for the same gigabytes repeatedly."""

    def __init__(self, attempt: Attempt) -> None:
        self.path, self.work = attempt.at("hashes.json"), attempt.work
        max_bytes = most_artefacts(state_of(attempt) or {}) * HASHES_EACH
        self.entries = read_json(self.path, max(LARGEST_HASHES, max_bytes)) or {}
        self.is_dirty = False
        self.save_at = time.monotonic() + SAVE_INTERVAL

    def of(self, path: str) -> str | None:
        """A file's hash; None if the file changed while it was read. Raises OSError if it cannot be read, RequestRejected if it is no plain
        file any more."""
        with open(open_regular(self.work, path), "rb") as file:
            original = file_identity(os.fstat(file.fileno()))
            entry = as_list(self.entries.get(path))
            if entry[:1] == [original] and is_sha(entry[-1]):
                return str(entry[-1])
            sha = hash_of(file)
            if file_identity(os.fstat(file.fileno())) != original:
                return None
        if time.time() - original[2] / 1e9 > SETTLED:
            self.entries[path] = [original, sha]
            self.is_dirty = True
        if time.monotonic() >= self.save_at:
            self.save()
            self.save_at = time.monotonic() + SAVE_INTERVAL
        return sha

    def save(self) -> None:
        """Save the hashes for the next request. If that fails, they are computed again."""
        if self.is_dirty:
            with contextlib.suppress(OSError):
                write_json(self.path, self.entries)
                self.is_dirty = False
