"""What this machine knows of the jobs that were launched from it: where each is, and where its results go.

A note is no more than a shorthand: whoever says where a job is (`--at`) finds it without one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import UsageError
from groupwise.jobs.launch.places import JobBackend
from groupwise.jobs.launch.state import state_folder


@dataclass(frozen=True, slots=True)
class Note:
    """Of one job."""

    name: str
    place: JobBackend
    project: Path
    """The folder that it was launched from."""
    results: Path | None = None
    """Where what it makes goes, if that was said."""
    fetched: Path | None = None
    """Another folder that all it had made by its end was fetched to."""


def folder() -> Path:
    """Of the notes."""
    return state_folder("launches")


def write(note: Note) -> None:
    """Durable; a note of the same name is replaced."""
    document = {
        "format": 1,
        "name": note.name,
        "place": note.place.document(),
        "project": str(note.project),
        "results": None if note.results is None else str(note.results),
        "fetched": None if note.fetched is None else str(note.fetched),
    }
    folder().mkdir(parents=True, exist_ok=True)
    atomic_files.write_json(_file(note.name), document)


def every() -> list[Note]:
    """All that can be read, by name."""
    found = [_read(path) for path in sorted(folder().glob("*.json"))]
    return [each for each in found if each is not None]


def find(name: str) -> Note:
    """The note of this job. Raises UsageError that says what there is."""
    found = _read(_file(name))
    if found is None:
        there = ", ".join(each.name for each in every()) or "none"
        raise UsageError(
            f"{name}: no job of this name was launched from this machine; there are: {there}. Of one that was launched elsewhere say where "
            "it is: --at ssh:USER@HOST."
        )
    return found


def is_of_another(note: Note) -> bool:
    """Whether a job of this name is known from here that is at another place."""
    known = _read(_file(note.name))
    return known is not None and not known.place.is_same(note.place)


def note_fetched(note: Note, folder: Path) -> None:
    """What the job has made is in this folder: said of a job that is known from here."""
    known = _read(_file(note.name))
    if known is not None and known.place.is_same(note.place):
        write(replace(known, fetched=folder.absolute()))


def remove(note: Note) -> None:
    """It is not there afterwards. That of another job stays."""
    if not is_of_another(note):
        _file(note.name).unlink(missing_ok=True)


def _file(name: str) -> Path:
    return folder() / f"{Path(name).name}.json"


def _read(path: Path) -> Note | None:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        place = JobBackend.from_document(document["place"])
        results, fetched = (document.get(name) for name in ("results", "fetched"))
        return Note(
            document["name"],
            place,
            Path(document["project"]),
            None if results is None else Path(results),
            None if fetched is None else Path(fetched),
        )
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return None
