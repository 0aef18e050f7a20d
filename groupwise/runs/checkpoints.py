"""Checkpoints: `checkpoints/step-N/` holds the state after N steps, and is visible only when it is complete.

The loop calls `begin` and `finish`, or `save`, which does both. The learner and every other component with state write their files into a
temporary folder; `finish` writes a manifest with the size and SHA-256 of each file last, and renames the folder. A folder called `step-N`
was therefore once complete. If it was damaged since, its manifest shows it: the checkpoint is skipped and reported with the reason.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from groupwise.core import atomic_files
from groupwise.core.errors import (
    CheckpointError,
    GroupwiseError,
    ResumeMismatchError,
    RunNotFoundError,
    StoreError,
)
from groupwise.runs import record_segments

FORMAT = 1
"""Version of the manifest and its meaning. A manifest with a higher one is refused: a newer release wrote it."""

MANIFEST = "manifest.json"
RUN_FILES = "run"
"""Folder within a checkpoint of the files that only a run without its record needs (`groupwise.runs.recovery`)."""
_NAME = re.compile(r"step-(\d+)")
_Identity = tuple[int, int, int, int]
"""Device, inode, size and modification time: paths with equal values are the same file."""


class _Damaged(Exception):
    """The reason why a checkpoint cannot be used."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as it was when the checkpoint was written."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    """Number of steps done."""
    path: Path
    files: Mapping[str, FileEntry]
    """Files by path within the folder, with `/` as the separator."""
    extra: Mapping[str, Any]
    """Data added by the writer: the last step's manifest, fingerprints, layout."""
    versions: Mapping[str, str]
    """Versions of Groupwise and Python that wrote it."""
    created_at: float
    """Seconds since 1970."""

    def verify(self, *, carried: bool = False) -> None:
        """Read every file and compare it with the manifest; CheckpointError names the first difference. Raises what `reading` does.

        The `carried` files are as long as the whole record of the run, and are read only if asked for; their sizes are always compared.
        """
        try:
            _check_files(self.path, self.files, contents=True, carried=carried)
        except _Damaged as damage:
            if not self.path.is_dir():
                raise RunNotFoundError(_deleted_while_read(self.path)) from damage
            raise CheckpointError(
                f"the checkpoint {self.path} is damaged: {damage}. "
                "Resume from an earlier one, or restore it from a copy."
            ) from damage


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that cannot be used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}: {self.reason}"


class CheckpointList(list[Checkpoint]):
    """The complete checkpoints of a run by their steps; `skipped` lists the unusable ones."""

    def __init__(
        self, complete: Iterable[Checkpoint], skipped: Iterable[SkippedCheckpoint]
    ) -> None:
        super().__init__(complete)
        self.skipped = tuple(skipped)


def save(
    folder: Path,
    step: int,
    fill: Callable[[Path], None],
    extra: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Write the checkpoint after `step` steps; `fill` writes its files into the folder that it receives.

    An existing one of that step is replaced. CheckpointError if it cannot be written; earlier checkpoints stay intact.
    """
    with begin(folder, step) as building:
        fill(building)
        return finish(building, step, extra)


@contextmanager
def begin(folder: Path, step: int) -> Generator[Path]:
    """Inside, there is a temporary folder for the files of a checkpoint, which `finish` makes one. Raises what `save` does."""
    final = folder / f"step-{step}"
    building = atomic_files.building_path(final)
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        yield building
    except StoreError as error:  # its message says what to do
        raise CheckpointError(f"cannot write the checkpoint {final}: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {final}: {error.strerror or error}. Free space on that disk (or fix its permissions), then "
            "go on with --resume: the earlier checkpoints stand."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def finish(building: Path, step: int, extra: Mapping[str, Any] | None = None) -> Checkpoint:
    """Hash the files that were written since `begin`, write the manifest, and rename the folder to the checkpoint of `step`."""
    final = building.parent / f"step-{step}"
    # Hashes of files that earlier checkpoints share by hard links; those files need not be read again.
    hashes = {
        identity: entry.sha256
        for checkpoint in complete(building.parent)
        for name, entry in checkpoint.files.items()
        if (identity := _identity(checkpoint.path / name)) is not None
    }
    atomic_files.write_json(building / MANIFEST, _manifest(building, step, extra or {}, hashes))
    if final.exists():
        atomic_files.remove_folder(final)
    atomic_files.publish_folder(building, final)
    return read(final)


def complete(folder: Path, verify: bool = False) -> CheckpointList:
    """The complete checkpoints in `folder`, by number of steps. `verify`: hash the files of the last one, and of earlier ones until one is
    undamaged.

    ResumeMismatchError if one of them was written by a newer version.
    """
    good: list[Checkpoint] = []
    skipped: list[SkippedCheckpoint] = []
    for path in sorted(_folders(folder), key=_step_of, reverse=True):
        try:
            good.append(_read_checkpoint(path, verify and not good))
        except _Damaged as damage:
            if path.is_dir():  # otherwise its run has deleted it meanwhile
                skipped.append(SkippedCheckpoint(path, str(damage)))
    return CheckpointList(reversed(good), reversed(skipped))


def newest(folder: Path, *, carried: bool = False) -> Checkpoint | None:
    """The last complete and undamaged checkpoint; None if there is none. Stops reading at the first good one, from the end."""
    for path in sorted(_folders(folder), key=_step_of, reverse=True):
        with suppress(_Damaged):
            return _read_checkpoint(path, verify=True, carried=carried)
    return None


def read(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`; CheckpointError if it is incomplete or damaged."""
    try:
        return _read_checkpoint(path, verify=False)
    except _Damaged as damage:
        raise CheckpointError(f"{path} is not a complete checkpoint: {damage}.") from damage


@contextmanager
def reading(weights: Path | None) -> Generator[None]:
    """Inside, weights are read from a folder. If that is a checkpoint which its run deletes meanwhile, any error becomes a RunNotFoundError
    that says so.
    """
    try:
        yield
    except (OSError, GroupwiseError) as error:
        if weights is None or weights.is_dir() or not _NAME.fullmatch(weights.name):
            raise
        raise RunNotFoundError(_deleted_while_read(weights)) from error


def _deleted_while_read(path: Path) -> str:
    return (
        f"{path} was deleted by the run while it was read, because newer ones are there (run.save_total_limit). "
        "Give the command again."
    )


def prune(folder: Path, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Delete all complete checkpoints except the last `keep` and the protected steps; returns the deleted steps.

    Their segments of the record are kept in the run's folder.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint must be kept, not {keep}")
    pruned = [
        checkpoint for checkpoint in complete(folder)[:-keep] if checkpoint.step not in protect
    ]
    for checkpoint in pruned:
        record_segments.keep_record_segment(checkpoint.path)
        atomic_files.remove_folder(checkpoint.path)
    if pruned:
        record_segments.merge_kept_record_segments(folder.parent)
    return [checkpoint.step for checkpoint in pruned]


def drop_after(folder: Path, step: int) -> list[int]:
    """Delete the checkpoints of later steps, damaged ones too; returns their steps.

    A resume from an earlier checkpoint does this *before* it rewinds the record: a crash between the two leaves a record
    that is ahead of its checkpoints, which the next resume rewinds.
    """
    later_folders = sorted(
        (path for path in _folders(folder) if _step_of(path) > step), key=_step_of
    )
    for path in reversed(later_folders):
        atomic_files.remove_folder(path)
    record_segments.drop_record_segments_after(folder.parent, step)
    return [_step_of(path) for path in later_folders]


def sweep(folder: Path) -> tuple[str, ...]:
    """Delete the unfinished files of dead writers. The caller holds the run's lock."""
    folders = [
        existing for existing in (folder, folder.parent / record_segments.KEPT) if existing.is_dir()
    ]
    return tuple(name for existing in folders for name in atomic_files.sweep(existing))


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _identity(file: Path) -> _Identity | None:
    """Equal for all hard links of one file; None for a file with a single name."""
    status = file.stat()
    has_other_links = status.st_nlink > 1
    return (
        (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if has_other_links
        else None
    )


def _manifest(
    building: Path, step: int, extra: Mapping[str, Any], hashes: Mapping[_Identity, str]
) -> dict[str, Any]:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in building.rglob("*") if path.is_file()):
        identity = _identity(path)
        known_hash = None if identity is None else hashes.get(identity)
        files[path.relative_to(building).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": known_hash or _sha256(path),
        }
    try:
        own_version = metadata.version("groupwise")
    except metadata.PackageNotFoundError:
        own_version = "unknown"
    return {
        "format": FORMAT,
        "step": step,
        "created_at": time.time(),
        "versions": {"groupwise": own_version, "python": platform.python_version()},
        "files": files,
        "extra": dict(extra),
    }


def _read_checkpoint(path: Path, verify: bool, carried: bool = False) -> Checkpoint:
    try:
        content = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise _Damaged(f"{MANIFEST} is missing, it was not finished") from error
    except (OSError, ValueError) as error:
        raise _Damaged(f"{MANIFEST} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise _Damaged(f"{MANIFEST} is not a manifest")
    content = cast("dict[str, Any]", content)
    file_format = content.get("format")
    if not isinstance(file_format, int):
        raise _Damaged(f"{MANIFEST} does not say which format it has")
    if file_format > FORMAT:
        raise ResumeMismatchError(
            f"the checkpoint {path} has format {file_format}; this version of Groupwise reads formats up to {FORMAT}. "
            "It was written by a newer version: upgrade Groupwise to use it."
        )
    try:
        checkpoint = Checkpoint(
            step=int(content["step"]),
            path=path,
            files={name: FileEntry(**entry) for name, entry in content["files"].items()},
            extra=content["extra"],
            versions=content["versions"],
            created_at=float(content["created_at"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _Damaged(f"{MANIFEST} lacks what it should say ({error!r})") from error
    if _NAME.fullmatch(path.name) and checkpoint.step != _step_of(path):
        raise _Damaged(f"{MANIFEST} is of step {checkpoint.step}")
    _check_files(path, checkpoint.files, contents=verify, carried=carried)
    return checkpoint


def _check_files(
    path: Path, files: Mapping[str, FileEntry], *, contents: bool, carried: bool
) -> None:
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            raise _Damaged(f"{name} is missing")
        try:
            size = file.stat().st_size
            if size != entry.size:
                raise _Damaged(f"{name} has {size} bytes instead of {entry.size}")
            is_read = contents and (carried or not name.startswith(f"{RUN_FILES}/"))
            if is_read and _sha256(file) != entry.sha256:
                raise _Damaged(f"{name} was changed since it was written")
        except FileNotFoundError as error:  # the run deletes this checkpoint at the moment
            raise _Damaged(f"{name} is missing") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
