"""What a job takes along: the files that its options name, put into the fleet's store and listed in its manifest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from groupwise.cli.fleet.progress import progress
from groupwise.cli.output import say
from groupwise.core.errors import UsageError

if TYPE_CHECKING:
    from groupwise.cli.fleet.access import Fleet


def take_along(
    access: Fleet, documents: Mapping[str, dict[str, Any]], words: Sequence[str], dry_run: bool
) -> None:
    """Each job gets the manifest of what travels with it: what `--file` names, and its own data set and reward function."""
    of_all: dict[str, Path] = {}
    for word in words:
        _add(of_all, *_local_and_remote(word))
    own: dict[str, dict[str, Path]] = {}
    for place, document in documents.items():
        try:
            own[place] = _own_files(document, of_all)
        except UsageError as error:
            raise UsageError(at(place, error.message)) from error
    _check(documents)  # before anything is sent
    kept = _kept(access, (of_all, *own.values()), dry_run)
    shared = {name: kept[path] for name, path in of_all.items()}
    for place, document in documents.items():
        its_own = {name: kept[path] for name, path in own[place].items()}
        said = document.get("files", {})
        # One for all jobs that have no files of their own: a long array of them may take thousands along.
        if manifest := {**shared, **said, **its_own} if said or its_own else shared:
            document["files"] = manifest
    _tell_of_left_behind(documents.values())


def _tell_of_left_behind(documents: Iterable[Mapping[str, Any]]) -> None:
    """A word of a command that is a file here is mostly meant to be one there."""
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
    """Files here that its data set and reward function name; both are renamed to where they will lie."""
    found: dict[str, Path] = {}
    if (data := _local_file(document.get("dataset"))) is not None:
        _add(found, data, data.name, of_all)
        document["dataset"] = f"file:{data.name}"
    rewards = document.get("reward_function")
    if isinstance(rewards, str):
        words = (_reward(found, each.strip(), of_all) for each in rewards.split(","))
        document["reward_function"] = ",".join(words)
    return found


def _kept(
    access: Fleet, files: Iterable[Mapping[str, Path]], dry_run: bool
) -> dict[Path, list[Any]]:
    """In the fleet's store, where dispatchers take them from; `--dry-run` only looks at them."""
    from groupwise.jobs.hosts.files import hash_of

    named: dict[str, Path] = {}
    for each in files:
        for name, path in each.items():
            # Lines of an array may have files of one name; no path in a job's folder begins with a slash.
            named[name if named.get(name, path) == path else str(path.absolute())] = path
    if dry_run:
        return {
            each: [hash_of(each), each.stat().st_mode & 0o777, each.stat().st_size]
            for each in dict.fromkeys(named.values())
        }
    if not named:
        return {}
    with progress() as tell:
        sent = access.upload(named, tell=tell)
    return {path: sent[name] for name, path in named.items()}


def _local_and_remote(word: str) -> tuple[Path, str]:
    """`LOCAL`, `LOCAL:REMOTE`; a name with a colon in it is taken whole where there is such a file. `.` is the job's folder itself."""
    from groupwise.jobs.fleet.client import own_name
    from groupwise.jobs.hosts.spec import path_problems

    local, colon, remote = word.rpartition(":")
    if not colon or Path(word).expanduser().exists():
        local, remote = word, ""
    path = Path(local).expanduser()
    if not path.exists():
        raise UsageError(f"--file {word}: there is no file or folder {path}.")
    named = PurePosixPath(remote or own_name(path)).as_posix()
    if named == "." and not path.is_dir():
        named = own_name(path)
    if named != "." and (wrong := path_problems("--file", named)):
        raise UsageError(wrong[0])
    return path, named


def _add(
    found: dict[str, Path], local: Path, remote: str, beside: Mapping[str, Path] | None = None
) -> None:
    """A file, or all below a folder, to travel under that name. `beside`: what lies there already."""
    from groupwise.jobs.fleet.client import named_files

    for name, path in named_files({remote: local}).items():
        there = found.get(name) or (beside or {}).get(name)
        if there is not None and there.resolve() != path.resolve():
            raise UsageError(
                f"{path} and {there} would both be {name} in the job's working folder: give one of them another "
                f"name, --file {path}:OTHER."
            )
        found[name] = path


def _local_file(word: object) -> Path | None:
    """The file that a word names here, if it names one; what is no word at all is told later."""
    if not isinstance(word, str):
        return None
    path = Path(word).expanduser()
    if path.is_file():
        return path
    if word.startswith(("./", "../", "~")):
        raise UsageError(f"dataset {word}: there is no such file here.")
    return None


def _reward(found: dict[str, Path], word: str, of_all: Mapping[str, Path]) -> str:
    """`rewards.py:score` takes the file along; anything else stays what it is."""
    name, colon, attribute = word.partition(":")
    path = Path(name).expanduser()
    if path.suffix != ".py" or not path.is_file():
        return word
    _add(found, path, path.name, of_all)
    return f"{path.name}{colon}{attribute}"


def _check(documents: Mapping[str, Mapping[str, Any]]) -> None:
    """What is wrong with the words is told here, the same way for every fleet."""
    from groupwise.jobs.fleet.queue.request import from_document

    for place, each in documents.items():
        try:
            from_document(each)
        except UsageError as error:
            raise UsageError(at(place, error.message)) from error


def at(place: str, message: str) -> str:
    """Before it, the line of an array that it is about; the options need no place."""
    return f"{place}: {message}" if place else message
