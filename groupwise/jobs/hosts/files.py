"""Files on their way between the control side and machines: what a folder holds (a manifest), and the store that keeps it by hash.

A manifest says for each path its sha256, mode and size; what lies there is a blob. The store is a folder, `<root>/<aa>/<sha256>`, that any
number of processes use at once: a blob appears whole or not at all, is never changed, and is hashed again whenever it is read. What
nobody names any more is collected, but nothing that somebody put there or asked for within the last day: who names it may be about to.
What a day is, the clock of the store's own file system says, because machines that share a store may differ about the time.

What the control side fetched by itself, for a purpose of its own, is marked (`MARK`), and may be very much: it is spared for minutes alone.
Who fetches says meanwhile which blobs are needed (`BlobStore.needed`), and has named them by the end of that. Whoever else puts such a blob
or asks for it takes the mark away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import stat
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from groupwise.core.errors import RunError, UsageError
from groupwise.jobs.hosts.spec import SHA256, FileEntry, path_problems

PIECE = 1 << 20
LARGEST_BLOB = 64 << 30
"""Bytes of one file."""
MOST_FILES = 100_000
SPARED = 86_400.0
"""Seconds in which a blob that was put or asked for is not collected: the longest that anybody takes from there to naming it."""
SLOWEST_DISK = 32 * PIECE
"""Bytes a second: what has come is read and hashed once more before it is a blob, in which time no more of it comes."""
SPARED_MARKED = 900.0
"""The same, of a blob that is marked: what was cut off for so long goes on where it ended."""
MARK = stat.S_ISVTX
"""In the mode of a blob's file, where it means nothing else: a copy of the store keeps it, and what loses it is spared for longer."""
NEEDED = ".needed"
"""The folder in which it is said which blobs are needed: a file for each who needs some, locked for as long."""
INCOMING = "incoming"
"""The folder of what is not whole yet."""


class BlobError(RunError):
    """A blob is not what its name says, cannot be stored, or is not there."""

    code = "blob"


class BlobBusy(BlobError):
    """Somebody else receives this blob at the moment: it may be here soon, or go on from where they leave it."""

    code = "blob_busy"


# ---------------------------------------------------------------------------------------------------------------------------------------
# What lies in a folder
# ---------------------------------------------------------------------------------------------------------------------------------------


def files_below(root: Path, paths: Iterable[str] = (".",)) -> dict[str, Path]:
    """Every regular file of those files and folders, by its path relative to `root`. Raises UsageError that lists whatever is none."""
    found: dict[str, Path] = {}
    refused: list[str] = []
    for path in paths:
        if path == ".":
            _walk(root, root, found, refused)
            continue
        refused += path_problems("file", path)
        if not path_problems("file", path):
            _take(root, root / path, found, refused)
    if refused:
        shown = "".join(f"\n  {why}" for why in refused[:20])
        raise UsageError(f"only regular files can be sent to a machine:{shown}")
    if len(found) > MOST_FILES:
        raise UsageError(
            f"{len(found)} files in {root}; at most {MOST_FILES} are sent: pack them into one"
        )
    return found


def _take(root: Path, path: Path, found: dict[str, Path], refused: list[str]) -> None:
    name = path.relative_to(root).as_posix()
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        refused.append(f"{name}: {error.strerror}")
        return
    if stat.S_ISDIR(mode):
        _walk(root, path, found, refused)
    elif stat.S_ISREG(mode):
        found[name] = path
    else:
        refused.append(f"{name} is {_kind(mode)}")


def _walk(root: Path, folder: Path, found: dict[str, Path], refused: list[str]) -> None:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        refused.append(f"{folder}: {error.strerror}")
        return
    for entry in entries:
        _take(root, entry, found, refused)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def hash_of(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------------------------------------------
# The store
# ---------------------------------------------------------------------------------------------------------------------------------------


class BlobStore:
    """Blobs of the control side, in a folder."""

    def __init__(self, root: Path, *, largest: int = LARGEST_BLOB) -> None:
        self.root = root
        self._largest = largest
        root.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Where that blob lies, or would."""
        if not SHA256.fullmatch(sha256):
            raise BlobError(f"{sha256!r} names no blob: 64 digits of a sha256 are expected")
        return self.root / sha256[:2] / sha256

    def __contains__(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def missing(self, hashes: Iterable[str], *, marked: bool = False) -> list[str]:
        """Those that are not here. The others are kept for the next day, whoever names them or not.

        `marked`: for who is about to fetch the missing ones by itself; then those that are marked stay so.
        """
        with self._shared():
            return [each for each in dict.fromkeys(hashes) if not self._spare(each, marked)]

    @contextlib.contextmanager
    def needed(self, hashes: Iterable[str]) -> Generator[None]:
        """Meanwhile none of these is collected. It is over with the process at the latest."""
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
        """By whoever is at work. To be asked before it is asked what is named, which is when they are named at the latest."""
        found: set[str] = set()
        for path in (self.root / NEEDED).glob("*"):
            with contextlib.suppress(FileNotFoundError), path.open() as file:
                if path.stat().st_mtime + SPARED_MARKED < self.now() and not _is_locked(file):
                    path.unlink()
                else:  # one that is young may not be locked yet
                    found.update(file.read().split())
        return found

    def put(self, data: bytes) -> str:
        """Keep these bytes; their sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        self._check_size(len(data), sha256)
        with self._shared():
            if not self._spare(sha256):
                self._publish(self._written((data,)), sha256)
        return sha256

    def put_file(self, source: Path, more: Callable[[int], None] | None = None) -> FileEntry:
        """Keep a copy of a file. It is hashed as it is copied, so that one which changes meanwhile is kept as it was read.

        `more` is told of each further so many bytes.
        """
        with source.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
            with self._shared():
                return self._put_from(file, mode, more)

    def put_files(
        self, files: Mapping[str, Path], more: Callable[[str, int], None] | None = None
    ) -> dict[str, FileEntry]:
        """Keep copies of all; the manifest. `more` is told of which file there are so many further bytes."""

        def kept(name: str, path: Path) -> FileEntry:
            return self.put_file(path, None if more is None else partial(more, name))

        return {name: kept(name, path) for name, path in files.items()}

    def read(self, sha256: str) -> bytes:
        """The bytes of a blob. Raises BlobError where they are not what the name says; that blob is gone then, and may be put again."""
        return b"".join(self.pieces(sha256))

    def pieces(self, sha256: str, *, piece: int = PIECE) -> Iterator[bytes]:
        """As `read`, piece by piece; the error comes after the last one."""
        digest = hashlib.sha256()
        with self._opened(sha256) as file:
            while data := file.read(piece):
                digest.update(data)
                yield data
        self._check(sha256, digest.hexdigest())

    def part(self, sha256: str, offset: int, length: int) -> bytes:
        """Some bytes of a blob, not verified: who gets all of them verifies them."""
        with self._opened(sha256) as file:
            file.seek(offset)
            return file.read(length)

    def size(self, sha256: str) -> int:
        """Bytes of a blob."""
        with self._opened(sha256) as file:
            return os.fstat(file.fileno()).st_size

    def copy(self, entry: FileEntry, target: Path) -> None:
        """A file of a manifest, at `target`, durable and verified; what was there before is replaced."""
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
        """A blob that comes piece by piece; what came before a crash is still there. BlobBusy where somebody else is receiving it.

        `sender`: letters and digits; what two of them send is kept apart, so that neither completes what the other has begun. `marked`: the
        blob is to be, unless it is here without a mark.
        """
        self._check_size(size, sha256)
        path = self._incoming_path(sha256, sender)
        with path.open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlobBusy(f"the blob {sha256} is being received by somebody else") from None
            if not _is_at(file, path):
                raise BlobBusy(f"the blob {sha256} has just been received by somebody else")
            _set_mark(file, marked)
            yield Incoming(self, sha256, size, file, marked=marked)

    def received(self, sha256: str, sender: str = "") -> int:
        """Bytes that have come of a blob which is not whole yet, also while somebody receives it."""
        try:
            return self._incoming_path(sha256, sender).stat().st_size
        except FileNotFoundError:
            return 0

    def adopt(self, temporary: Path, sha256: str, *, marked: bool = False) -> None:
        """A verified, durable file on the store's own disk becomes a blob."""
        with self._shared():
            self._publish(temporary, sha256, marked)

    def now(self) -> float:
        """By the clock that blobs are dated with."""
        stamp = self.root / ".lock"
        stamp.touch()
        return stamp.stat().st_mtime

    def collect(self, keep: Collection[str], *, now: float | None = None) -> int:
        """Remove every blob that is not in `keep`, but for those spared; the bytes that this made free.

        `now`: from before it was asked what is to be kept, so that what was put since then is spared however long this takes.
        """
        moment = self.now() if now is None else now
        return sum(
            self._collect_in(folder, keep, moment)
            for folder in sorted(self.root.iterdir())
            if folder.is_dir() and folder.name != NEEDED
        )

    def _collect_in(self, folder: Path, keep: Collection[str], moment: float) -> int:
        """Blobs of one folder, or what was left of some that never became whole; whoever puts some waits no longer than that."""
        freed = 0
        with self._locked(fcntl.LOCK_EX):
            for path in folder.iterdir():
                if path.name in keep and folder.name != INCOMING:
                    continue
                status = path.stat()
                spared = SPARED_MARKED if status.st_mode & MARK else SPARED
                if status.st_mtime + spared < moment and not _is_being_received(path):
                    path.unlink()
                    freed += status.st_size
        return freed

    def _shared(self) -> contextlib.AbstractContextManager[None]:
        """While something is put, nothing is collected."""
        return self._locked(fcntl.LOCK_SH)

    def _marking(self) -> contextlib.AbstractContextManager[None]:
        """Only one at a time decides whether a blob is marked."""
        return self._locked(fcntl.LOCK_EX, ".marking")

    @contextlib.contextmanager
    def _locked(self, how: int, name: str = ".lock") -> Generator[None]:
        # To read and to write: NFS gives a shared lock only to who may read, and one that is alone only to who may write.
        with (self.root / name).open("a+b") as lock:
            fcntl.flock(lock, how)
            yield

    def _spare(self, sha256: str, marked: bool = False) -> bool:
        """`marked`: it may be and stay so."""
        path = self.path(sha256)
        try:
            os.utime(path)
            if not marked and path.stat().st_mode & MARK:
                with self._marking():
                    path.chmod(0o400)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _opened(self, sha256: str) -> Generator[io.BufferedReader]:
        try:
            file = self.path(sha256).open("rb")
        except FileNotFoundError:
            raise BlobError(f"the blob {sha256} is not in the store {self.root}") from None
        with file:
            yield file

    def _put_from(
        self, file: BinaryIO, mode: int, more: Callable[[int], None] | None = None
    ) -> FileEntry:
        digest = hashlib.sha256()
        size = 0

        def pieces() -> Iterator[bytes]:
            nonlocal size
            while piece := file.read(PIECE):
                size += len(piece)
                self._check_size(size, file.name)
                digest.update(piece)
                if more is not None:
                    more(len(piece))
                yield piece

        temporary = self._written(pieces())
        sha256 = digest.hexdigest()
        if self._spare(sha256):
            temporary.unlink()
        else:
            self._publish(temporary, sha256)
        return FileEntry(sha256, mode, size)

    def _written(self, pieces: Iterable[bytes]) -> Path:
        temporary = self._incoming_folder() / f"{os.getpid()}-{time.monotonic_ns()}"
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

    def _publish(self, temporary: Path, sha256: str, marked: bool = False) -> None:
        target = self.path(sha256)
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            sync_folder(self.root)
        with self._marking():
            counted_on = target.exists() and not target.stat().st_mode & MARK
            temporary.chmod(0o400 | MARK if marked and not counted_on else 0o400)
            os.utime(temporary)  # its last piece may have come long ago
            temporary.replace(target)
        sync_folder(target.parent)

    def _check(self, sha256: str, found: str) -> None:
        if found != sha256:
            self.path(sha256).unlink(missing_ok=True)
            raise BlobError(
                f"the blob {sha256} in {self.root} had other contents (sha256 {found}): it was damaged on the disk and has been removed"
            )

    def _check_size(self, size: int, name: str) -> None:
        if size > self._largest:
            raise BlobError(f"{name}: {size} bytes; at most {self._largest} are kept as one file")


class Incoming:
    """A blob that is on its way into the store. Only one writes it at a time."""

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
        """Bytes that are here already; what follows them is to be fetched."""
        return os.fstat(self._file.fileno()).st_size

    def add(self, data: bytes) -> None:
        """Bytes that follow those received. Raises BlobError where there are more than announced."""
        if self.received + len(data) > self.size:
            self.restart()
            raise BlobError(
                f"more than the announced {self.size} bytes came for the blob {self.sha256}"
            )
        self._file.write(data)
        self._file.flush()

    def restart(self) -> None:
        """Forget what has come."""
        self._file.truncate(0)

    def finish(self) -> None:
        """Make it a blob, if it is what it should be; else forget it and raise BlobError."""
        self._file.seek(0)
        found = hashlib.file_digest(self._file, "sha256").hexdigest()
        if found != self.sha256:
            self.restart()
            raise BlobError(f"what came for the blob {self.sha256} has the sha256 {found}")
        os.fsync(self._file.fileno())
        path = Path(self._file.name)
        if not _is_at(self._file, path):
            raise BlobError(f"what came for the blob {self.sha256} was removed meanwhile")
        self._store.adopt(path, self.sha256, marked=self._marked)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _set_mark(file: BinaryIO, marked: bool) -> None:
    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    if bool(mode & MARK) != marked:
        os.fchmod(file.fileno(), mode ^ MARK)


def _is_locked(file: IO[Any]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_being_received(path: Path) -> bool:
    """However long ago its last piece came: a large one is hashed for minutes."""
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
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such thing
            raise
    finally:
        os.close(descriptor)
