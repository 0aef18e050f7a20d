"""Uploads the local files of a job to the fleet's store, and lists them in the job's manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from groupwise.cli.fleet.access import progress
from groupwise.cli.output import say
from groupwise.core.errors import UsageError
from groupwise.core.plugins import nearest

if TYPE_CHECKING:
    from groupwise.jobs.fleet.client import FleetClient


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """The files that the options name."""

    file_options: Sequence[str]
    project: Path | None
    """The folder of --project-dir."""
    exclude: Sequence[str]

    def by_name(self) -> dict[str, Path]:
        """Local files by their names in the job's folder; what is sent of the project is reported."""
        files: dict[str, Path] = {}
        inside: dict[str, str] = {}
        if self.project is not None:
            from groupwise.jobs.launch.bundle import bundle, path_in_project

            for option in self.file_options:
                path = path_in_project(self.project, option)
                if path is not None and (self.project / path).exists():
                    inside[option] = path
            project = bundle(self.project, take=[*inside.values()], exclude=self.exclude)
            for line in project.summary():
                say(line)
            files |= project.files
        elif self.exclude:
            raise UsageError("--exclude is for the files of --project-dir, which is missing.")
        for option in self.file_options:
            if option not in inside:
                _add_files(files, *_parse_file_option(option))
        return files


def attach_files(
    access: FleetClient,
    documents: Mapping[str, dict[str, Any]],
    local_files: LocalFiles,
    dry_run: bool,
) -> None:
    """Give each job the manifest of its files: those of the options, and its own dataset and reward function."""
    from groupwise.jobs.fleet.queue.request import from_document

    shared_files = local_files.by_name()
    own_files: dict[str, dict[str, Path]] = {}
    for location, document in documents.items():
        try:
            own_files[location] = _own_files(document, shared_files)
            from_document(document)  # before anything is sent, in the same way for every fleet
        except UsageError as error:
            raise UsageError(at(location, error.message)) from error
    entries = _store_files(access, (shared_files, *own_files.values()), dry_run)
    shared = {name: entries[path] for name, path in shared_files.items()}
    for location, document in documents.items():
        its_own = {name: entries[path] for name, path in own_files[location].items()}
        request_files = document.get("files", {})
        # Jobs without their own files share one manifest, because each job of a long array may have thousands of files.
        if request_files or its_own:
            document["files"] = {**shared, **request_files, **its_own}
        elif shared:
            document["files"] = shared
    _warn_of_missing_files(documents.values())


def _warn_of_missing_files(documents: Iterable[Mapping[str, Any]]) -> None:
    """Warn if a word of a command is a local file that is not uploaded: usually the command expects it."""
    file_arguments = {
        name: argument
        for document in documents
        for argument in document.get("arguments", ())
        if (name := PurePosixPath(argument).as_posix()) not in document.get("files", ())
    }
    for name, argument in file_arguments.items():
        if not name.startswith(("/", "..")) and os.path.isfile(argument):
            say(
                f"{argument} is a file here, but is not sent with the job: --file {argument} sends it"
            )


def _own_files(document: dict[str, Any], shared_files: Mapping[str, Path]) -> dict[str, Path]:
    """The local files that a job's dataset and reward function name. Both are changed to the paths in the job's folder."""
    from groupwise.tasks.data.sources import is_local

    files: dict[str, Path] = {}
    dataset = document.get("dataset")
    if isinstance(dataset, str):  # anything else is refused later
        path = Path(dataset).expanduser()
        if path.is_file():
            _add_files(files, path, path.name, shared_files)
            document["dataset"] = f"file:{path.name}"
        elif not dataset.startswith(("/", "file:")) and (is_local(dataset) or "/" not in dataset):
            raise UsageError(_missing_dataset_message(dataset, path))
    rewards = document.get("reward_function")
    if isinstance(rewards, str):
        names = (_add_reward_file(files, name.strip(), shared_files) for name in rewards.split(","))
        document["reward_function"] = ",".join(names)
    return files


def _missing_dataset_message(dataset: str, path: Path) -> str:
    """Why a dataset that can only be a local file is not one."""
    if path.is_dir():
        return f"dataset {dataset} is a folder: send it as well, --file {dataset}:{path.name} --dataset file:{path.name}."
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    near = nearest(path.name, [entry.name for entry in folder.iterdir()])
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"dataset {dataset}: there is no file {path.name} here (in {path.absolute().parent}).{hint} A dataset on the hub is named "
        "OWNER/NAME, and a file on the machine by its absolute path."
    )


def _store_files(
    access: FleetClient, files: Iterable[Mapping[str, Path]], dry_run: bool
) -> dict[Path, list[Any]]:
    """Upload files to the fleet's store, and return their manifest entries. `dry_run`: only compute the entries."""
    from groupwise.jobs.hosts.files import open_local

    paths: dict[str, Path] = {}
    for manifest in files:
        for name, path in manifest.items():
            # Lines of an array may have different files of the same name; these get absolute paths, which no path in a job's folder is.
            paths[name if paths.get(name, path) == path else str(path.absolute())] = path
    if dry_run:
        entries: dict[Path, list[Any]] = {}
        for path in dict.fromkeys(paths.values()):
            with open_local(path) as file:
                status, digest = os.fstat(file.fileno()), hashlib.file_digest(file, "sha256")
            entries[path] = [digest.hexdigest(), status.st_mode & 0o777, status.st_size]
        return entries
    if not paths:
        return {}
    with progress() as on_progress:
        uploaded = access.upload(paths, on_progress=on_progress)
    return {path: uploaded[name] for name, path in paths.items()}


def _parse_file_option(option_value: str) -> tuple[Path, str]:
    """Parse `LOCAL` or `LOCAL:REMOTE`. If a file with the complete name exists, the colon is part of it. `.` is the job's own folder."""
    from groupwise.jobs.fleet.client import own_name
    from groupwise.jobs.hosts.spec import path_problems

    local, colon, remote = option_value.rpartition(":")
    if not colon or Path(option_value).expanduser().exists():
        local, remote = option_value, ""
    path = Path(local).expanduser()
    if not path.exists():
        raise UsageError(f"--file {option_value}: there is no file or folder {path}.")
    target = PurePosixPath(remote or own_name(path)).as_posix()
    if target == "." and not path.is_dir():
        target = own_name(path)
    if target != "." and (problems := path_problems("--file", target)):
        raise UsageError(problems[0])
    return path, target


def _add_files(
    files: dict[str, Path],
    local: Path,
    remote: str,
    existing_files: Mapping[str, Path] | None = None,
) -> None:
    """Add a file, or all files below a folder, under a name in the job's folder. `existing_files`: files that the folder has already."""
    from groupwise.jobs.fleet.client import named_files

    for name, path in named_files({remote: local}).items():
        other_path = files.get(name) or (existing_files or {}).get(name)
        if other_path is not None and other_path.resolve() != path.resolve():
            raise UsageError(
                f"{path} and {other_path} would both be {name} in the job's working folder: give one of them another "
                f"name, --file {path}:OTHER."
            )
        files[name] = path


def _add_reward_file(files: dict[str, Path], reward: str, shared_files: Mapping[str, Path]) -> str:
    """Add the file of `rewards.py:score` and return its new name; any other word is returned unchanged."""
    name, colon, attribute = reward.partition(":")
    path = Path(name).expanduser()
    if path.suffix != ".py" or not path.is_file():
        return reward
    _add_files(files, path, path.name, shared_files)
    return f"{path.name}{colon}{attribute}"


def at(location: str, message: str) -> str:
    """A message with the line of the array that it is about; jobs from options alone have no line."""
    return f"{location}: {message}" if location else message
