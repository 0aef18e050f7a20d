"""Uploads the local files of a job to the fleet's store, and lists them in the job's manifest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from groupwise.cli.fleet.access import progress
from groupwise.cli.output import say
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient


def take_along(
    access: FleetClient,
    documents: Mapping[str, dict[str, Any]],
    words: Sequence[str],
    dry_run: bool,
) -> None:
    """Give each job the manifest of its files: those of `--file` (`words`), and its own dataset and reward function."""
    of_all: dict[str, Path] = {}
    for word in words:
        _add(of_all, *_parse_file_option(word))
    own: dict[str, dict[str, Path]] = {}
    for place, document in documents.items():
        try:
            own[place] = _own_files(document, of_all)
        except UsageError as error:
            raise UsageError(at(place, error.message)) from error
    _check(documents)  # before anything is sent
    entries = _store_files(access, (of_all, *own.values()), dry_run)
    shared = {name: entries[path] for name, path in of_all.items()}
    for place, document in documents.items():
        its_own = {name: entries[path] for name, path in own[place].items()}
        given = document.get("files", {})
        # Jobs without their own files share one manifest, because each job of a long array may have thousands of files.
        if manifest := {**shared, **given, **its_own} if given or its_own else shared:
            document["files"] = manifest
    _warn_of_left_behind(documents.values())


def _warn_of_left_behind(documents: Iterable[Mapping[str, Any]]) -> None:
    """Warn if a word of a command is a local file that is not uploaded: usually the command expects it."""
    words = {
        name: word
        for document in documents
        for word in document.get("arguments", ())
        if (name := PurePosixPath(word).as_posix()) not in document.get("files", ())
    }
    for name, word in words.items():
        if not name.startswith(("/", "..")) and os.path.isfile(word):
            say(
                f"{word} is a file here, but does not travel with the job, whose folder is empty: --file {word} takes it along"
            )


def _own_files(document: dict[str, Any], of_all: Mapping[str, Path]) -> dict[str, Path]:
    """The local files that a job's dataset and reward function name. Both are changed to the paths in the job's folder."""
    found: dict[str, Path] = {}
    dataset = document.get("dataset")
    if isinstance(dataset, str):  # anything else is refused later
        path = Path(dataset).expanduser()
        if path.is_file():
            _add(found, path, path.name, of_all)
            document["dataset"] = f"file:{path.name}"
        elif dataset.startswith(("./", "../", "~")):
            raise UsageError(f"dataset {dataset}: there is no such file here.")
    rewards = document.get("reward_function")
    if isinstance(rewards, str):
        words = (_reward(found, each.strip(), of_all) for each in rewards.split(","))
        document["reward_function"] = ",".join(words)
    return found


def _store_files(
    access: FleetClient, files: Iterable[Mapping[str, Path]], dry_run: bool
) -> dict[Path, list[Any]]:
    """Upload files to the fleet's store, and return their manifest entries. `dry_run`: only compute the entries."""
    from groupwise.jobs.hosts.files import hash_of

    named: dict[str, Path] = {}
    for each in files:
        for name, path in each.items():
            # Lines of an array may have different files of the same name; these get absolute paths, which no path in a job's folder is.
            named[name if named.get(name, path) == path else str(path.absolute())] = path
    if dry_run:
        return {
            each: [hash_of(each), each.stat().st_mode & 0o777, each.stat().st_size]
            for each in dict.fromkeys(named.values())
        }
    if not named:
        return {}
    with progress() as tell:
        uploaded = access.upload(named, tell=tell)
    return {path: uploaded[name] for name, path in named.items()}


def _parse_file_option(word: str) -> tuple[Path, str]:
    """Parse `LOCAL` or `LOCAL:REMOTE`. If a file with the complete name exists, the colon is part of it. `.` is the job's own folder."""
    from groupwise.jobs.fleet.client import own_name
    from groupwise.jobs.hosts.spec import path_problems

    local, colon, remote = word.rpartition(":")
    if not colon or Path(word).expanduser().exists():
        local, remote = word, ""
    path = Path(local).expanduser()
    if not path.exists():
        raise UsageError(f"--file {word}: there is no file or folder {path}.")
    target = PurePosixPath(remote or own_name(path)).as_posix()
    if target == "." and not path.is_dir():
        target = own_name(path)
    if target != "." and (wrong := path_problems("--file", target)):
        raise UsageError(wrong[0])
    return path, target


def _add(
    found: dict[str, Path], local: Path, remote: str, beside: Mapping[str, Path] | None = None
) -> None:
    """Add a file, or all files below a folder, under a name in the job's folder. `beside`: files that the folder has already."""
    from groupwise.jobs.fleet.client import named_files

    for name, path in named_files({remote: local}).items():
        there = found.get(name) or (beside or {}).get(name)
        if there is not None and there.resolve() != path.resolve():
            raise UsageError(
                f"{path} and {there} would both be {name} in the job's working folder: give one of them another "
                f"name, --file {path}:OTHER."
            )
        found[name] = path


def _reward(found: dict[str, Path], word: str, of_all: Mapping[str, Path]) -> str:
    """Add the file of `rewards.py:score` and return its new name; any other word is returned unchanged."""
    name, colon, attribute = word.partition(":")
    path = Path(name).expanduser()
    if path.suffix != ".py" or not path.is_file():
        return word
    _add(found, path, path.name, of_all)
    return f"{path.name}{colon}{attribute}"


def _check(documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UsageError for documents that are not valid requests, in the same way for every fleet."""
    from groupwise.jobs.fleet.queue.request import from_document

    for place, each in documents.items():
        try:
            from_document(each)
        except UsageError as error:
            raise UsageError(at(place, error.message)) from error


def at(place: str, message: str) -> str:
    """A message with the line of the array that it is about; jobs from options alone have no line."""
    return f"{place}: {message}" if place else message
