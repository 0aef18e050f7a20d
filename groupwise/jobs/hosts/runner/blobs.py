"""Blobs, i.e. contents that are named by their SHA-256: receiving them, storing them, and copying them into working folders."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import make_folder, remove_file, sync_folder
from groupwise.jobs.hosts.runner.locks import HeldLock, one_at_a_time
from groupwise.jobs.hosts.runner.protocol import (
    LaunchRefused,
    RequestProgress,
    RequestRejected,
    blobs_of,
    shas_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    from groupwise.jobs.hosts.runner.protocol import Readable, VerbAnswer
    from groupwise.jobs.hosts.runner.root import Root

CLONE = 0x40049409
"""The kernel's ioctl FICLONE: makes an independent file that shares its blocks with another until one of the two is changed."""
BLOB_TIME = 1_000_000_000
"""Modification time that every blob gets, in seconds. A blob that was written to later has a different one."""


def has_blob(root: Root, sha: str) -> bool:
    """True if the blob exists and is unchanged. A blob with another modification time is hashed again, and removed if its content
    differs."""
    path = root.blob(sha)
    try:
        file_stat = os.lstat(path)
    except OSError:
        return False
    if not stat.S_ISREG(file_stat.st_mode):
        return False
    if file_stat.st_mtime_ns == BLOB_TIME * 10**9:
        return True
    with open(path, "rb") as file:
        if hash_of(file) == sha:
            os.utime(path, (BLOB_TIME, BLOB_TIME))
            return True
    remove_file(path)
    return False


def hash_of(file: BinaryIO) -> str:
    """SHA-256 of the rest of a file."""
    digest = hashlib.sha256()
    while True:
        data = file.read(1 << 20)
        RequestProgress.done += 1
        if not data:
            return digest.hexdigest()
        digest.update(data)


def receive_blob(
    root: Root, sha: str, size: int, source: Readable, by: str | None = None
) -> tuple[str, str]:
    """Read `size` bytes if their hash is `sha`, else raise RequestRejected. Returns the arguments of `publish_blob`. The caller holds a
    shared lock of the blobs until then. `by` replaces a random part of the temporary name: the next request with that name then
    overwrites an incomplete file."""
    folder = make_folder(os.path.dirname(root.blob(sha)))
    temporary = os.path.join(folder, f"{sha}.{by or os.urandom(8).hex()}.new")
    digest, remaining = hashlib.sha256(), size
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb"
        ) as file:
            while remaining:
                data = source.read(min(remaining, 1 << 20))
                if not data:
                    raise RequestRejected(
                        "truncated", f"the payload ended {remaining} bytes before its end"
                    )
                digest.update(data)
                file.write(data)
                remaining -= len(data)
                RequestProgress.done += 1
            if digest.hexdigest() != sha:
                raise RequestRejected("bad_blob", f"{sha}: the bytes sent have another hash")
            file.flush()
            os.fchmod(file.fileno(), 0o444)
            os.utime(file.fileno(), (BLOB_TIME, BLOB_TIME))
    except BaseException:
        remove_file(temporary)
        raise
    return temporary, root.blob(sha)


def publish_blob(temporary: str, path: str) -> None:
    """Flush a received blob to disk, then give it its name."""
    try:
        fd = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        remove_file(temporary)
        raise
    RequestProgress.done += 1
    sync_folder(os.path.dirname(path))


def store_blob(root: Root, sha: str, size: int, source: Readable, by: str | None = None) -> None:
    """Receive and publish a blob. The caller holds a shared lock of the blobs."""
    publish_blob(*receive_blob(root, sha, size, source, by))


def lay_out(root: Root, work: str, manifest: dict[str, list[Any]]) -> Iterator[None]:
    """Copy the files of a manifest into the working folder, where the command may change them. Yields regularly, so the caller can stop
    it."""
    for path, (sha, mode, _) in manifest.items():
        target = os.path.join(work, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        yield from copy_blob(root.blob(sha), target, sha, mode & 0o777)


def copy_blob(blob: str, target: str, sha: str, mode: int) -> Iterator[None]:
    """Make an independent copy: a clone if the file system supports it, else a verified copy. Raises LaunchRefused if the blob is
    damaged."""
    remove_file(target)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(blob, "rb") as source, open(fd, "wb") as file:
        try:  # with a clone, `file` shares the blob's content until one of them is changed
            fcntl.ioctl(file.fileno(), CLONE, source.fileno())
            is_intact = True
        except OSError:  # this file system cannot clone
            digest = hashlib.sha256()
            for data in iter(lambda: source.read(1 << 20), b""):
                yield
                digest.update(data)
                file.write(data)
            is_intact = digest.hexdigest() == sha
        os.fchmod(file.fileno(), mode)
    if not is_intact:
        remove_file(blob)
        raise LaunchRefused(
            "bad_spec",
            f"blob {sha} was damaged on this machine's disk; it has been removed, send it again",
        )


def verb_missing(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """List the blobs that have to be sent. The others are about to be used: they are protected from a sweep for a while."""
    return {"missing": [sha for sha in shas_of(body, "sha256") if not protect_blob(root, sha)]}, b""


def protect_blob(root: Root, sha: str) -> bool:
    """True if the blob exists; its change time becomes now, which protects it from a sweep for a while. `launch` checks again, under the
    lock."""
    try:
        if has_blob(root, sha):
            os.utime(root.blob(sha), (BLOB_TIME, BLOB_TIME))
            return True
    except FileNotFoundError:
        pass  # a sweep removed it in between
    return False


def verb_put(root: Root, body: dict[str, Any], payload: BinaryIO) -> VerbAnswer:
    """Store blobs. Those that arrived complete are kept even if a later one did not."""
    from concurrent.futures import ThreadPoolExecutor  # which takes time, and few requests need

    blobs = blobs_of(body["blobs"], "blobs")
    if sum(size for _, size in blobs) != body.get("payload", 0):
        raise RequestRejected(
            "bad_request", "payload: as many bytes as the blobs have together are expected"
        )
    # A disk flushes many files at once in the time of one.
    with HeldLock(root.lock("blobs.lock"), fcntl.LOCK_SH), ThreadPoolExecutor(16) as pool:
        received = (receive_blob(root, sha, size, payload) for sha, size in blobs)
        published = [pool.submit(publish_blob, *temporary) for temporary in received]
    for each in published:
        each.result()
    return {"stored": [sha for sha, _ in blobs]}, b""


def verb_join(root: Root, body: dict[str, Any], _: BinaryIO) -> VerbAnswer:
    """Join parts, sent earlier as blobs, into one blob, then remove the parts."""
    ((sha, size),) = blobs_of([body["blob"]], "blob")
    parts = [part for part, _ in blobs_of(body["parts"], "parts")]
    folder = make_folder(os.path.dirname(root.blob(sha)))
    with one_at_a_time(folder), HeldLock(root.lock("blobs.lock"), fcntl.LOCK_SH):
        if not has_blob(root, sha):
            missing = [part for part in parts if not has_blob(root, part)]
            if missing:
                raise RequestRejected(
                    "missing_blobs", f"{len(missing)} parts are not here", missing=missing
                )
            joined = JoinedFiles([root.blob(part) for part in parts])
            store_blob(root, sha, size, joined, "join")
        for part in parts:
            if part != sha:
                remove_file(root.blob(part))
    return {"stored": [sha]}, b""


class JoinedFiles:
    """Several files, read in sequence as if they were one."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths[::-1]
        self.file: BinaryIO | None = None

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes from the current file; empty at the end of the last file."""
        while True:
            if self.file is None:
                if not self.paths:
                    return b""
                self.file = open(self.paths.pop(), "rb")  # noqa: SIM115  (closed below, or with the process)
            data = self.file.read(size)
            if data:
                return data
            self.file.close()
            self.file = None
