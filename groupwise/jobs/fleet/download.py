"""Downloads the outputs of a job into a local folder, in the same way from a local fleet and over its HTTP API.

The fleet lists the files, path → sha256, mode and size (`Source.artefacts`, `Source.checkpoints`), and serves the bytes of each file from
a given offset. The local folder is checked first: files that already match are kept, and if others are in the way, nothing is fetched
unless they may be replaced. Each file is then written under the name of its hash, `.<sha256>.part`, hashed and flushed, and renamed: a
file with its final name is therefore complete and verified. After an interruption complete files are kept, and the partial one resumes
where it ended. A file that cannot be fetched does not stop the others; it is reported after all others have arrived.

The fleet's list of files is not trusted with the local disk: no path leads out of the folder.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import RunError, UsageError
from groupwise.core.terminal.quantities import counted
from groupwise.core.terminal.text import one_line
from groupwise.jobs.hosts.fetching import set_mode
from groupwise.jobs.hosts.files import PIECE, hash_of
from groupwise.jobs.hosts.spec import SHA256, FileEntry, file_entry, path_problems

Document = dict[str, Any]
OnProgress = Callable[[int, int, str], None]
"""Called with the bytes received so far, the total, and the path of the current file or another activity."""
MAX_PATHS_LISTED = 5
"""Maximum paths in a message."""
PART = re.compile(rf"\.{SHA256.pattern}\.part")
"""Name of a file until it is complete."""
OF_ONE_FILE = frozenset({"unknown_file", "not_found", "internal"})
"""Refusals that concern one file only: it is gone, or its name or path is not accepted by the server or a proxy."""
OF_ITS_NAME = frozenset({errno.ENAMETOOLONG, errno.EILSEQ})
"""Errors of a disk that would accept the file under another name."""


class ProgressCounter:
    """Counts the bytes that were received or sent, and passes the sum to `on_progress`."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress, self._total = on_progress, total
        self._done = 0

    def add(self, label: str, count: int) -> None:
        """Add `count` bytes of `label`, and report the sum."""
        self._done += count
        self._on_progress(self._done, self._total, label)


def no_progress(received: int, total: int, path: str) -> None:
    """Ignore progress."""
    del received, total, path


class DownloadError(RunError):
    """A file could not be fetched, or not be written here. Received data is kept, and the same call resumes from it."""

    code = "download"


class _ContentMismatch(DownloadError):
    """The received bytes differ from the hash or size that the fleet lists."""


class Source(Protocol):
    """A fleet, as a source of the files of its jobs."""

    def artefacts(self, job_id: str, *, epoch: int | None = None, rank: int = 0) -> Document:
        """An attempt's artefacts; without `epoch` those of the newest attempt that left any."""
        ...

    def checkpoints(self, job_id: str) -> list[Document]:
        """Its mirrored checkpoints, the newest first."""
        ...

    def artefact_pieces(
        self, job_id: str, path: str, *, epoch: int, rank: int = 0, offset: int = 0
    ) -> Iterator[bytes]:
        """The bytes of an artefact from an offset on."""
        ...

    def checkpoint_pieces(self, job_id: str, sha256: str, *, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a file of a checkpoint, by its hash, from an offset on."""
        ...


@dataclass(frozen=True, slots=True)
class DownloadRequest:
    """The choice of a job's files to fetch."""

    paths: Sequence[str] = ()
    """Files and folders, as the fleet lists them; empty: all."""
    checkpoints: bool = False
    """True: its mirrored checkpoints instead of its artefacts."""
    epoch: int | None = None
    """Only this attempt's files; None: the newest artefacts, or the checkpoints of all attempts."""
    rank: int = 0
    """Rank of the gang member."""


def fetch(
    source: Source,
    job_id: str,
    folder: Path,
    request: DownloadRequest,
    *,
    force: bool = False,
    on_progress: OnProgress = no_progress,
) -> Document:
    """Fetch the files into the folder; returns the document that `--json` prints. `force`: replace other files that are in the way.

    Raises UsageError if a path is none of the job's, or other files are in the way; DownloadError; and errors of the source.
    """
    if request.checkpoints:
        checkpoints = [
            checkpoint
            for checkpoint in source.checkpoints(job_id)
            if request.epoch in (None, checkpoint["epoch"])
        ]
        if not checkpoints:
            attempt_note = "" if request.epoch is None else f" of the attempt {request.epoch}"
            raise UsageError(
                f"{job_id} has no mirrored checkpoint{attempt_note}: none was written whole, or it is its artefacts that have them."
            )
        newest: dict[str, Document] = {}
        for checkpoint in checkpoints:
            newest.setdefault(checkpoint["path"], checkpoint)
        # If two attempts wrote a checkpoint under the same path, the newer one counts.
        files = [_parse_manifest(checkpoint["files"]) for checkpoint in newest.values()]
        available = {
            path: entry
            for checkpoint_files in reversed(files)
            for path, entry in checkpoint_files.items()
        }
        left_out = []
    else:
        try:
            artefacts = source.artefacts(job_id, epoch=request.epoch, rank=request.rank)
        except Refusal as refusal:
            if refusal.code == "unknown_file" and source.checkpoints(job_id):
                hint = f"`groupwise fleet fetch {job_id} --checkpoints` fetches its checkpoints."
                raise Refusal(refusal.code, f"{refusal.message} {hint}") from None
            raise
        available, left_out = _parse_manifest(artefacts["files"]), artefacts["left_out"]
        request = DownloadRequest(request.paths, False, artefacts["epoch"], request.rank)
    files = choose_files(available, request.paths, job_id)

    def pieces(path: str, offset: int) -> Iterator[bytes]:
        if request.checkpoints:
            return source.checkpoint_pieces(job_id, files[path].sha256, offset=offset)
        assert request.epoch is not None, "the list names the attempt"
        return source.artefact_pieces(
            job_id, path, epoch=request.epoch, rank=request.rank, offset=offset
        )

    files_kept = bring(files, pieces, folder, force=force, on_progress=on_progress)
    return {
        "job_id": job_id,
        "folder": str(folder.absolute()),
        "files": [
            {"path": path, "sha256": entry.sha256, "bytes": entry.size, "kept": path in files_kept}
            for path, entry in sorted(files.items())
        ],
        "left_out": left_out,
    }


def _parse_manifest(files: Mapping[str, Sequence[Any]]) -> dict[str, FileEntry]:
    entries: dict[str, FileEntry] = {}
    for path, entry in files.items():
        if problems := path_problems("file", path):
            raise DownloadError(f"the fleet offers what is not fetched: {problems[0]}")
        if (parsed := file_entry(entry)) is None:
            raise DownloadError(
                f"the fleet says no hash, mode and size of {one_line(path)}: it is of another release, or not what it seems."
            )
        entries[path.encode(errors="replace").decode()] = parsed
    return entries


def choose_files(
    files: Mapping[str, FileEntry], paths: Sequence[str], job_id: str
) -> dict[str, FileEntry]:
    """The files that `paths` name, or that lie below a folder that they name; all if there are no paths. UsageError lists the files."""
    chosen: dict[str, FileEntry] = {}
    for path in paths:
        name = path.strip("/").removeprefix("./")
        below = {p: e for p, e in files.items() if p == name or p.startswith(f"{name}/")}
        if not below:
            raise UsageError(f"{job_id} left no {path!r}; {_suggestion(name, files)}.")
        chosen |= below
    return chosen if paths else dict(files)


def _suggestion(name: str, files: Mapping[str, FileEntry]) -> str:
    if not files:
        return "there is nothing in its outputs, and what it writes elsewhere is fetched only if `submit --output` names it"
    folders = {path[:index] for path in files for index, c in enumerate(path) if c == "/"}
    if matches := difflib.get_close_matches(name, [*folders, *files], n=1):
        return f"did you mean {matches[0]}? It left {counted(len(files), 'file')}"
    return f"there {'is' if len(files) == 1 else 'are'} {_join_paths(sorted(files))}"


def _join_paths(paths: Sequence[str]) -> str:
    rest_note = (
        f" and {len(paths) - MAX_PATHS_LISTED} more" if len(paths) > MAX_PATHS_LISTED else ""
    )
    return ", ".join(paths[:MAX_PATHS_LISTED]) + rest_note


# Files


def bring(
    files: Mapping[str, FileEntry],
    pieces: Callable[[str, int], Iterator[bytes]],
    folder: Path,
    *,
    force: bool = False,
    on_progress: OnProgress = no_progress,
) -> frozenset[str]:
    """Fetch all these files into the folder; returns the paths that matched already. `pieces`: the bytes of a file from an offset on.

    Raises DownloadError if some cannot be fetched, after all others have arrived.
    """
    problems: dict[str, str] = {}
    try:
        files_kept = _matching_files(files, folder, force)
        received, total = (
            sum(files[path].size for path in files_kept),
            sum(e.size for e in files.values()),
        )
        for path in sorted(files.keys() - files_kept):
            try:
                _fetch_file(
                    folder / path,
                    files[path],
                    pieces,
                    path,
                    lambda n, p=path, h=received: on_progress(h + n, total, p),
                )
            except (_ContentMismatch, Refusal, OSError) as error:
                problems[path] = _file_error(error)
                continue
            received += files[path].size
            on_progress(received, total, path)
    except OSError as error:
        raise DownloadError(
            f"{error.filename or folder}: {error.strerror or error}. What has come is kept; the same command continues from there."
        ) from error
    if problems:
        raise DownloadError(_describe_missing(problems, len(files), folder))
    return frozenset(files_kept)


def _file_error(error: _ContentMismatch | Refusal | OSError) -> str:
    """The reason why this file alone cannot be fetched. Raises the error again if it concerns more than this file."""
    if isinstance(error, _ContentMismatch):
        return error.message
    if isinstance(error, OSError):
        if error.errno in OF_ITS_NAME:
            return error.strerror or str(error)
    elif error.code in OF_ONE_FILE:
        return error.message
    raise error


def _describe_missing(problems: Mapping[str, str], total: int, folder: Path) -> str:
    names = sorted(problems)
    details = "; ".join(
        f"{one_line(name)}: {problems[name].rstrip('.')}" for name in names[:MAX_PATHS_LISTED]
    )
    rest_note = (
        f"; and {len(names) - MAX_PATHS_LISTED} more" if len(names) > MAX_PATHS_LISTED else ""
    )
    others_note = "" if len(names) == total else f" All others are in {folder}."
    return (
        f"{len(names)} of {counted(total, 'file')} did not come: {details}{rest_note}.{others_note}"
    )


def _matching_files(files: Mapping[str, FileEntry], folder: Path, force: bool) -> set[str]:
    """The paths of files that match already. Raises UsageError if others are in the way."""
    unchanged = {path for path, entry in files.items() if _is_unchanged(folder / path, entry)}
    existing = sorted(path for path in files.keys() - unchanged if os.path.lexists(folder / path))
    conflicts = [path for path in existing if not force or (folder / path).is_dir()]
    if conflicts:
        verb = "is another file" if len(conflicts) == 1 else "are other files"
        raise UsageError(
            f"{_join_paths(conflicts)} in {folder} {verb} than the job's. --force replaces them, --to names another folder. Nothing was "
            "fetched."
            if not force
            else f"{_join_paths(conflicts)} in {folder}: a folder is where a file should be; remove it, or name another folder with --to."
        )
    return unchanged


def _is_unchanged(path: Path, entry: FileEntry) -> bool:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno in OF_ITS_NAME:
            return False
        raise
    is_file = stat.S_ISREG(status.st_mode)
    return is_file and status.st_size == entry.size and hash_of(path) == entry.sha256


def _fetch_file(
    target: Path,
    entry: FileEntry,
    pieces: Callable[[str, int], Iterator[bytes]],
    path: str,
    on_chunk: Callable[[int], None],
) -> None:
    """Fetch one file: complete and verified, or not at all. The part of an earlier try may be damaged; then fetch it from scratch, once."""
    if PART.fullmatch(target.name):
        raise _ContentMismatch("files that are not whole yet have such names here")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_file = target.with_name(f".{entry.sha256}.part")
    with _open_locked(partial_file) as file:
        offset = os.fstat(file.fileno()).st_size
        if offset > entry.size:
            file.truncate(0)
            offset = 0
        try:
            remaining = pieces(path, offset) if offset < entry.size else iter(())
            is_complete = _append_pieces(file, entry, remaining, on_chunk)
        except Refusal:
            if not os.fstat(file.fileno()).st_size:
                partial_file.unlink()
            raise
        if not is_complete and offset:
            file.truncate(0)
            is_complete = _append_pieces(file, entry, pieces(path, 0), on_chunk)
        if not is_complete:
            partial_file.unlink()
            raise _ContentMismatch(
                "other bytes came than the fleet says that it has: it was damaged on its way, or there. Fetch it again."
            )
        set_mode(file.fileno(), entry)
        os.fsync(file.fileno())
        partial_file.replace(target)


def _open_locked(partial_file: Path) -> BinaryIO:
    """Open and lock the file, to exclude other processes. Raises DownloadError if another one has it."""
    file = partial_file.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), partial_file.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass  # another process is fetching it, or has just finished
    file.close()
    raise DownloadError(
        f"another process is fetching into {partial_file.parent} as well; wait until it is done, or name another folder."
    )


def _append_pieces(
    file: BinaryIO, entry: FileEntry, pieces: Iterator[bytes], on_chunk: Callable[[int], None]
) -> bool:
    """Append the pieces to the present content; returns whether size and hash then match."""
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(PIECE):
        digest.update(piece)
    size = os.fstat(file.fileno()).st_size
    for piece in pieces:
        size += len(piece)
        if size > entry.size:
            return False
        digest.update(piece)
        file.write(piece)
        on_chunk(size)
    file.flush()
    return size == entry.size and digest.hexdigest() == entry.sha256
