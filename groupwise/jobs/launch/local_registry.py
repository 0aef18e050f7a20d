"""This machine's notes of the jobs launched from it: the place of each, and the folder of its results.

A note is only a shortcut: if the job's place is given (`--at`), commands find the job without one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.jobs.launch.places import BACKENDS, JobBackend, state_folder


@dataclass(frozen=True, slots=True)
class Note:
    """The note of one job."""

    name: str
    place: JobBackend
    project: Path
    """The folder from which it was launched."""
    results: Path | None = None
    """The folder of its results, if the user set one."""
    fetched: Path | None = None
    """Another folder to which all its results were fetched after its end."""


_NOTE = TypeAdapter(Note)


def folder() -> Path:
    """The folder of the notes."""
    return state_folder("launches")


def write(note: Note) -> None:
    """Write a note durably, replacing one of the same name."""
    document = {"format": 1, **_NOTE.dump_python(note, mode="json")}
    folder().mkdir(parents=True, exist_ok=True)
    atomic_files.write_json(_note_path(note.name), document)


def list_notes() -> list[Note]:
    """All readable notes, sorted by name."""
    notes = [_read_note(path) for path in sorted(folder().glob("*.json"))]
    return [note for note in notes if note is not None]


def find(name: str) -> Note:
    """The note of this job. Raises UsageError, with a list of the known jobs, if it is missing."""
    note = _read_note(_note_path(name))
    if note is None:
        names = ", ".join(known_note.name for known_note in list_notes()) or "none"
        raise UsageError(
            f"{name}: no job of this name was launched from this machine; there are: {names}. Of one that was launched elsewhere say where "
            "it is: --at ssh:USER@HOST."
        )
    return note


def is_of_another(note: Note) -> bool:
    """True if a note of this name exists for a job at another place."""
    existing = _read_note(_note_path(note.name))
    return existing is not None and not existing.place.is_same(note.place)


def note_fetched(note: Note, folder: Path) -> None:
    """Record in the job's note, if there is one, that its results are in this folder."""
    existing = _read_note(_note_path(note.name))
    if existing is not None and existing.place.is_same(note.place):
        write(replace(existing, fetched=folder.absolute()))


def remove(note: Note) -> None:
    """Remove a note, unless it belongs to another job of this name."""
    if not is_of_another(note):
        _note_path(note.name).unlink(missing_ok=True)


def _note_path(name: str) -> Path:
    return folder() / f"{Path(name).name}.json"


def _read_note(path: Path) -> Note | None:
    try:
        note = _NOTE.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return note if note.place.kind in BACKENDS else None  # a kind of another release
