"""Files that travel between the control side and machines: manifests of folders, and the store that keeps contents by their hash.

A manifest gives the sha256, mode and size of each path; the content is a blob. The store is a folder, `<root>/<aa>/<sha256>`, that any
number of processes use at once. A blob appears complete or not at all, is never changed, and is hashed again at every read. Blobs that
no record names any more are collected, except those that were put or asked for within the last day: a caller may be about to name them.
The day is measured by the clock of the store's own file system, because the clocks of machines that share a store may differ.

Blobs that the control side fetched for its own use are marked (`MARK`). There may be very many, so they are spared for minutes only. The
process that fetches declares which blobs it needs (`BlobStore.needed`), and names them in a record before the declaration ends. If any
other process puts such a blob or asks for it, the mark is removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from groupwise.core.errors import RunError, UsageError
from groupwise.jobs.hosts.spec import SHA256, FileEntry

PIECE = 1 << 20
LARGEST_BLOB = 64 << 30
"""Largest size of a file in bytes."""
MAX_FILES = 100_000
WRITE_THREADS = 8
"""Threads that copy files into the store; most of the time each waits for the disk."""
SPARED = 86_400.0
"""Seconds for which a blob is not collected after it was put or asked for. A record must name it within this time."""
SLOWEST_DISK = 32 * PIECE
"""Assumed minimum speed in bytes per second. A received blob is read and hashed once more before it is stored; meanwhile no more of it
arrives."""
SPARED_MARKED = 900.0
"""The same time in seconds for a marked blob. An interrupted transfer can be continued within it."""
MARK = stat.S_ISVTX
"""A mode bit (sticky) that has no other meaning for a blob's file. A copy of the store preserves it; a blob that loses it is only spared
for longer."""
NEEDED = ".needed"
"""The folder of declarations of needed blobs: one file for each `with BlobStore.needed(…)`, locked for its duration."""
INCOMING = "incoming"
"""The folder of incomplete blobs."""


class BlobError(RunError):
    """A blob is damaged, cannot be stored, or is missing."""

    code = "blob"


class BlobBusy(BlobError):
    """Another process is receiving this blob. It may be complete soon, or can be continued if that process stops."""

    code = "blob_busy"


# ---------------------------------------------------------------------------------------------------------------------------------------
# Files in a folder
# ---------------------------------------------------------------------------------------------------------------------------------------


def walk(root: Path, top: Path, is_skipped: Callable[[str], bool] = lambda _: False) -> list[str]:
    """Paths relative to `root` of everything below `top` but folders; links to folders are not entered. `is_skipped`: names of folders to
    leave out. A folder that is removed meanwhile is left out. Raises UsageError for one that cannot be read."""

    def refuse(error: OSError) -> None:
        if isinstance(error, FileNotFoundError) and Path(error.filename) != top:
            return
        raise UsageError(f"the folder {error.filename} cannot be read: {error.strerror}.")

    paths: list[str] = []
    for folder, inside, names in os.walk(top, onerror=refuse):
        inside[:] = sorted(name for name in inside if not is_skipped(name))
        links = [name for name in inside if Path(folder, name).is_symlink()]
        below = Path(folder).relative_to(root)
        paths += [(below / name).as_posix() for name in sorted([*names, *links])]
    return paths


def files_below(root: Path) -> dict[str, Path]:
    """All files below a folder, by path relative to it. Raises UsageError, with a list, if anything is not a regular file."""
    files: dict[str, Path] = {}
    refused: list[str] = []
    for path in walk(root, root):
        file = root / path
        kinds = {"link": file.is_symlink, "pipe": file.is_fifo, "socket": file.is_socket}
        kind = next((kind for kind, holds in kinds.items() if holds()), None)
        if kind is None and file.is_file():
            files[path] = file
        elif os.path.lexists(file):  # otherwise it has just been removed
            refused.append(f"{path} is a {kind or 'device'}")
    if refused:
        listed = "".join(f"\n  {reason}" for reason in refused[:20])
        raise UsageError(f"only regular files can be sent to a machine:{listed}")
    if len(files) > MAX_FILES:
        raise UsageError(
            f"{len(files)} files in {root}; at most {MAX_FILES} are sent: pack them into one"
        )
    return files


def open_local(path: Path) -> io.BufferedReader:
    """Open a file that the user wants to send. Raises UsageError if it cannot be read, or has just been removed."""
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read, and is to be sent: {error.strerror}.") from None


def total_size(paths: Iterable[Path]) -> int:
    """Bytes of the files that the user wants to send, for a line of progress. `open_local` refuses one that has just been removed."""
    size = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def hash_of(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------------------------------------------
# The store
# ---------------------------------------------------------------------------------------------------------------------------------------


class BlobStore:
    """The control side's blob store, in a folder."""

    def __init__(self, root: Path, *, largest: int = LARGEST_BLOB) -> None:
        self.root = root
        self._largest = largest
        root.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """The path of a blob, which need not exist. Raises BlobError if `sha256` is not a hash."""
        if not SHA256.fullmatch(sha256):
            raise BlobError(f"{sha256!r} names no blob: 64 digits of a sha256 are expected")
        return self.root / sha256[:2] / sha256

    def __contains__(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def missing(self, hashes: Iterable[str], *, marked: bool = False) -> list[str]:
        """The blobs that the store lacks. The others are kept for another day, whether a record names them or not.

        `marked`: the caller is about to fetch the missing blobs itself; marked blobs stay marked."""
        with self._shared_lock():
            return [sha256 for sha256 in dict.fromkeys(hashes) if not self._renew(sha256, marked)]

    @contextlib.contextmanager
    def needed(self, hashes: Iterable[str]) -> Generator[None]:
        """Protect these blobs from collection for the duration of a `with`, or until the process ends."""
        folder = self.root / NEEDED
        folder.mkdir(exist_ok=True)
        path = folder / f"{os.getpid()}-{time.monotonic_ns()}"
        with path.open("x") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write("\n".join(hashes))
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def all_needed(self) -> set[str]:
        """Blobs that any process has declared as needed. Read these before reading which blobs the records name: a declaration ends only
        after a record names its blobs."""
        hashes: set[str] = set()
        for path in (self.root / NEEDED).glob("*"):
            with contextlib.suppress(FileNotFoundError), path.open() as file:
                if path.stat().st_mtime + SPARED_MARKED < self.now() and not _is_locked(file):
                    path.unlink()
                else:  # a new file may not be locked yet
                    hashes.update(file.read().split())
        return hashes

    def put(self, data: bytes) -> str:
        """Store these bytes; returns their sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        self._check_size(len(data), sha256)
        with self._shared_lock():
            if not self._renew(sha256):
                self._publish_blob(self._write_temporary((data,)), sha256)
        return sha256

    def put_file(self, source: Path, on_progress: Callable[[int], None] | None = None) -> FileEntry:
        """Store a copy of a file. It is hashed while it is copied, so a file that changes meanwhile is stored as it was read.

        `on_progress` is called after each piece with its number of bytes. Raises UsageError if the file cannot be read."""
        digest = hashlib.sha256()
        size = 0

        def pieces(file: BinaryIO) -> Iterator[bytes]:
            nonlocal size
            while piece := file.read(PIECE):
                size += len(piece)
                self._check_size(size, file.name)
                digest.update(piece)
                if on_progress is not None:
                    on_progress(len(piece))
                yield piece

        with open_local(source) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
            data = file.read(PIECE)
            if len(data) < PIECE:  # most files: nothing is written if the store has it
                if on_progress is not None:
                    on_progress(len(data))
                return FileEntry(self.put(data), mode, len(data))
            file.seek(0)
            with self._shared_lock():
                temporary = self._write_temporary(pieces(file))
                sha256 = digest.hexdigest()
                if self._renew(sha256):
                    temporary.unlink()
                else:
                    self._publish_blob(temporary, sha256)
        return FileEntry(sha256, mode, size)

    def put_files(
        self, files: Mapping[str, Path], on_progress: Callable[[str, int], None] | None = None
    ) -> dict[str, FileEntry]:
        """Store copies of all files; returns the manifest. `on_progress` is called after each piece with the file's name and the piece's
        number of bytes, by one thread at a time."""
        progress_lock = threading.Lock()

        def report(name: str, count: int) -> None:
            with progress_lock:
                if on_progress is not None:
                    on_progress(name, count)

        # Each file is flushed to disk, which a file system does for many at once in the time of one.
        with ThreadPoolExecutor(WRITE_THREADS) as pool:
            reports = (partial(report, name) for name in files)
            return dict(zip(files, pool.map(self.put_file, files.values(), reports), strict=True))

    def read(self, sha256: str) -> bytes:
        """The bytes of a blob. If their hash is wrong, removes the blob, which can then be put again, and raises BlobError."""
        return b"".join(self.pieces(sha256))

    def pieces(self, sha256: str, *, piece: int = PIECE) -> Iterator[bytes]:
        """Yield the bytes of a blob in pieces. Errors as in `read`; a wrong hash is detected after the last piece."""
        digest = hashlib.sha256()
        with self._open_blob(sha256) as file:
            while data := file.read(piece):
                digest.update(data)
                yield data
        actual = digest.hexdigest()
        if actual != sha256:
            self.path(sha256).unlink(missing_ok=True)
            raise BlobError(
                f"the blob {sha256} in {self.root} had other contents (sha256 {actual}): it was damaged on the disk and has been removed"
            )

    def part(self, sha256: str, offset: int, length: int) -> bytes:
        """A range of a blob's bytes, not verified: the caller verifies the whole."""
        with self._open_blob(sha256) as file:
            file.seek(offset)
            return file.read(length)

    def size(self, sha256: str) -> int:
        """Size of a blob in bytes."""
        with self._open_blob(sha256) as file:
            return os.fstat(file.fileno()).st_size

    def copy(self, entry: FileEntry, target: Path) -> None:
        """Write a file of a manifest to `target`, verified and flushed to disk; replaces an existing file."""
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{time.monotonic_ns()}")
        try:
            _write_durably(temporary, self.pieces(entry.sha256), entry.mode)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)

    @contextlib.contextmanager
    def incoming(
        self, sha256: str, size: int, sender: str = "", *, marked: bool = False
    ) -> Generator[Incoming]:
        """Receive a blob in pieces; pieces from before a crash are kept. Raises BlobBusy if another process is receiving it.

        `sender`: letters and digits. Partial blobs of different senders are separate: no sender can continue another's. `marked`: the
        blob gets a mark, unless the store has it without one."""
        self._check_size(size, sha256)
        path = self._incoming_path(sha256, sender)
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlobBusy(f"the blob {sha256} is being received by another process") from None
            if not _is_at(file, path):
                raise BlobBusy(f"the blob {sha256} has just been received by another process")
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if bool(mode & MARK) != marked:
                os.fchmod(file.fileno(), mode ^ MARK)
            yield Incoming(self, sha256, size, file, marked=marked)

    def received(self, sha256: str, sender: str = "") -> int:
        """How many bytes of an incomplete blob have been received, even while another process receives it."""
        try:
            return self._incoming_path(sha256, sender).stat().st_size
        except FileNotFoundError:
            return 0

    def adopt(self, temporary: Path, sha256: str, *, marked: bool = False) -> None:
        """Turn a verified file, flushed to the store's own disk, into a blob."""
        with self._shared_lock():
            self._publish_blob(temporary, sha256, marked)

    def now(self) -> float:
        """The current time, by the clock that dates blobs: that of the store's file system."""
        stamp = self.root / ".lock"
        stamp.touch()
        return stamp.stat().st_mtime

    def collect(self, keep: Collection[str], *, now: float | None = None) -> int:
        """Remove every blob that is neither in `keep` nor spared; returns the number of freed bytes.

        `now`: a time before the caller read which blobs to keep. Blobs put after it are spared even if the collection takes long."""
        moment = self.now() if now is None else now
        return sum(
            self._collect_in(folder, keep, moment)
            for folder in sorted(self.root.iterdir())
            if folder.is_dir() and folder.name != NEEDED
        )

    def _collect_in(self, folder: Path, keep: Collection[str], moment: float) -> int:
        """Collect in one folder, of blobs or of partial ones. The lock is held for one folder at a time: other processes wait less."""
        freed = 0
        with self._lock(fcntl.LOCK_EX):
            for path in folder.iterdir():
                if path.name in keep and folder.name != INCOMING:
                    continue
                status = path.stat()
                spared = SPARED_MARKED if status.st_mode & MARK else SPARED
                if status.st_mtime + spared < moment and not _is_being_received(path):
                    path.unlink()
                    freed += status.st_size
        return freed

    def _shared_lock(self) -> contextlib.AbstractContextManager[None]:
        """Lock against collection while a blob is put."""
        return self._lock(fcntl.LOCK_SH)

    def _mark_lock(self) -> contextlib.AbstractContextManager[None]:
        """Lock for one process at a time to decide whether a blob is marked."""
        return self._lock(fcntl.LOCK_EX, ".marking")

    @contextlib.contextmanager
    def _lock(self, mode: int, name: str = ".lock") -> Generator[None]:
        # Open for reading and writing: on NFS a shared lock requires a readable file, an exclusive lock a writable one.
        with (self.root / name).open("a+b") as lock:
            fcntl.flock(lock, mode)
            yield

    def _renew(self, sha256: str, marked: bool = False) -> bool:
        """Set a blob's time to now and remove its mark, unless `marked`. False if the store lacks the blob."""
        path = self.path(sha256)
        try:
            os.utime(path)
            if not marked and path.stat().st_mode & MARK:
                with self._mark_lock():
                    path.chmod(0o400)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _open_blob(self, sha256: str) -> Generator[io.BufferedReader]:
        try:
            file = self.path(sha256).open("rb")
        except FileNotFoundError:
            raise BlobError(f"the blob {sha256} is not in the store {self.root}") from None
        with file:
            yield file

    def _write_temporary(self, pieces: Iterable[bytes]) -> Path:
        temporary = (
            self._incoming_folder() / f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        )
        try:
            _write_durably(temporary, pieces, 0o444)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _incoming_path(self, sha256: str, sender: str) -> Path:
        return self._incoming_folder() / (self.path(sha256).name + sender)

    def _incoming_folder(self) -> Path:
        folder = self.root / INCOMING
        folder.mkdir(exist_ok=True)
        return folder

    def _publish_blob(self, temporary: Path, sha256: str, marked: bool = False) -> None:
        target = self.path(sha256)
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            sync_folder(self.root)
        with self._mark_lock():
            # A blob that is stored without a mark stays unmarked: another process relies on it.
            is_relied_on = target.exists() and not target.stat().st_mode & MARK
            temporary.chmod(0o400 | MARK if marked and not is_relied_on else 0o400)
            os.utime(temporary)  # its last piece may have arrived long ago
            temporary.replace(target)
        sync_folder(target.parent)

    def _check_size(self, size: int, name: str) -> None:
        if size > self._largest:
            raise BlobError(f"{name}: {size} bytes; at most {self._largest} are kept as one file")


class Incoming:
    """A blob that is being received. Only one process writes it at a time."""

    def __init__(
        self,
        store: BlobStore,
        sha256: str,
        size: int,
        file: io.BufferedRandom,
        *,
        marked: bool = False,
    ) -> None:
        self._store, self._file, self._marked = store, file, marked
        self.sha256, self.size = sha256, size

    @property
    def received(self) -> int:
        """Number of bytes received so far; the rest has to be fetched."""
        return os.fstat(self._file.fileno()).st_size

    def add(self, data: bytes) -> None:
        """Append the next bytes. Raises BlobError if there are more than announced."""
        if self.received + len(data) > self.size:
            self.restart()
            raise BlobError(
                f"more than the announced {self.size} bytes came for the blob {self.sha256}"
            )
        self._file.write(data)
        self._file.flush()

    def restart(self) -> None:
        """Discard all received bytes."""
        self._file.truncate(0)

    def finish(self) -> None:
        """Turn the received bytes into a blob if their hash is right; otherwise discard them and raise BlobError."""
        self._file.seek(0)
        actual = hashlib.file_digest(self._file, "sha256").hexdigest()
        if actual != self.sha256:
            self.restart()
            raise BlobError(f"what came for the blob {self.sha256} has the sha256 {actual}")
        os.fsync(self._file.fileno())
        path = Path(self._file.name)
        if not _is_at(self._file, path):
            raise BlobError(f"what came for the blob {self.sha256} was removed meanwhile")
        self._store.adopt(path, self.sha256, marked=self._marked)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """True if the path still names this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_locked(file: IO[Any]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_being_received(path: Path) -> bool:
    """True while a process receives the blob. The lock decides, and not the time of the last piece: a large blob is hashed for minutes."""
    if path.parent.name != INCOMING:
        return False
    with path.open("rb") as file:
        return _is_locked(file)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Durable writes
# ---------------------------------------------------------------------------------------------------------------------------------------


def _write_durably(path: Path, pieces: Iterable[bytes], mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk: the names in it then survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not support it
            raise
    finally:
        os.close(descriptor)
