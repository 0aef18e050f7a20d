"""Turns a project and a command into an order: files by their hashes, the environment, results to fetch, and secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from groupwise.core.cache import cache_folder
from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.backend import Order
from groupwise.jobs.clouds.folder import EARLIER, INCOMING
from groupwise.jobs.clouds.gang import NODES
from groupwise.jobs.clouds.machine import ROOT
from groupwise.jobs.fleet.machines.plans import Plan, sent_files
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.spec import MAX_ARTEFACTS, JobSpec, Limits
from groupwise.jobs.launch.bundle import SHORTEST_SECRET, Bundle, bundle
from groupwise.jobs.launch.results import RESULT
from groupwise.runs.schema import RECORD

OWN_FOLDER = ".groupwise"
"""The subfolder of the working folder with the files that create the environment."""
BOOTSTRAP_COMMAND = ("python3", "-I", f"{OWN_FOLDER}/bootstrap.py")
NODE_COMMAND = ("python", "-m", "groupwise.engine.learner.launch_node")
"""The command that starts the processes of one of several machines."""
DEFAULT_RESULTS = ("runs", "results", "generated", "outputs")
"""Folders that are always fetched: trainings, evaluations, `generate` and job scripts write to them."""
MAX_RESULTS_MB = 10_000_000
"""Larger than any disk: all results of a job are fetched."""
RESERVED_NAMES = (RESULT, EARLIER, INCOMING, NODES)
"""Reserved names in the folder of results, which the job may not use."""
GRACE_SECONDS = 60.0
"""Seconds between TERM and KILL: enough to finish the current step and write its checkpoint."""


def local_store() -> BlobStore:
    """The store of files that are sent to machines; files that were not used for a day are removed."""
    folder = cache_folder("launch")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Other users of this machine must not read copies of files that they may not read in the project.
    folder.chmod(0o700)
    store = BlobStore(folder / "blobs")
    store.collect(())
    return store


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A job as the user requested it."""

    name: str
    project: Path
    command: tuple[str, ...]
    """A program of the environment with its arguments. It runs in a copy of the project."""
    gpus: int = 0
    """GPUs on each machine."""
    nodes: int = 1
    """How many machines run it at once."""
    processes: int = 1
    """Processes on each machine, if there are several machines."""
    hours: float = 24.0
    """Time limit in hours, after which the job is ended."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Environment variables with secret values."""
    environment: Plan | None = None
    """The environment to install at the place; None: the place has one already."""
    results: tuple[str, ...] = ()
    """Paths in the working folder that are fetched in addition to DEFAULT_RESULTS."""
    take: tuple[str, ...] = ()
    """Paths in the project that are sent although git ignores them or a run made them."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders of the project that are not sent."""
    needs: tuple[str, ...] = ()
    """Files and folders on this machine that the command reads."""
    is_remote: bool = True
    """True if the job runs on other disks than those of this machine."""
    root: str = f"~/{ROOT}"
    """The runner's folder at the place; environments are created below it."""
    place_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that only this kind of place knows."""
    python: str | None = None
    """See `groupwise.jobs.clouds.backend.Order`."""
    meets_at: str | None = None
    """See `groupwise.jobs.clouds.backend.Order`."""


@dataclass(frozen=True, slots=True)
class PackedJob:
    """An order whose files are in a store."""

    order: Order
    bundle: Bundle
    """The files of the project that are sent."""


def pack(request: LaunchRequest, store: BlobStore) -> PackedJob:
    """Turn a request into an order, with its files in `store`. Raises UsageError for a project that cannot be sent, and for results that
    cannot be fetched."""
    project = bundle(request.project, request.secrets, request.take, request.exclude)
    if any(PurePosixPath(path).parts[0] == OWN_FOLDER for path in project.files):
        raise UsageError(
            f"{project.root / OWN_FOLDER} would be sent with the project, and the job needs a folder of this name for itself: give yours "
            "another name, or name it in .gitignore."
        )
    _refuse_missing(project, request.needs, is_remote=request.is_remote)
    refuse_shown_secrets(request.command, request.secrets)
    results = tuple(dict.fromkeys((*DEFAULT_RESULTS, *map(_checked_output, request.results))))
    files = dict(store.put_files(project.files))
    if request.environment is not None:
        bootstrap = Path(__file__).with_name("bootstrap.py")
        environment_files = sent_files(request.environment, f"{request.root}/environments", store)
        setup_files = {"bootstrap.py": store.put_file(bootstrap), **environment_files}
        files |= {f"{OWN_FOLDER}/{name}": entry for name, entry in setup_files.items()}
    command = request.command
    if request.nodes > 1:
        command = (*NODE_COMMAND, "--processes", str(request.processes), "--", *command)
    spec = JobSpec(
        arguments=command if request.environment is None else (*BOOTSTRAP_COMMAND, *command),
        files=files,
        secrets=tuple(sorted(request.secrets)),
        artefacts=results,
        checkpoints=results,
        limits=Limits(
            time_seconds=request.hours * 3600,
            grace_seconds=GRACE_SECONDS,
            artefact_mb=MAX_RESULTS_MB,
            artefact_files=MAX_ARTEFACTS,
        ),
    )
    order = Order(
        request.name,
        spec,
        request.gpus,
        request.nodes,
        secrets=request.secrets,
        place_options=request.place_options,
        python=request.python,
        meets_at=request.meets_at,
    )
    return PackedJob(order, project)


def refuse_shown_secrets(command: Sequence[str], secrets: Mapping[str, str]) -> None:
    """Raise UsageError if the command contains the value of a secret. Secrets are sent separately, whereas every user of the machine can
    read the command."""
    secrets_shown = [
        name
        for name, value in secrets.items()
        if len(value) >= SHORTEST_SECRET and any(value in word for word in command)
    ]
    if secrets_shown:
        raise UsageError(
            f"the value of {', '.join(secrets_shown)} is part of the command, and would be seen by every user of the "
            "machine and kept in its files. Let the program read the variable."
        )


def _refuse_missing(project: Bundle, needs: Iterable[str], *, is_remote: bool) -> None:
    """Raise UsageError for a path that the command reads here and that would be missing on the machine."""
    root = project.root.resolve()
    for need in needs:
        target = (root / need).resolve()
        if not target.is_relative_to(root):
            if not is_remote and Path(need).is_absolute():
                continue
            raise UsageError(
                f"the command reads {need}, which is outside of the project, so that the job would not find it. Copy it into the project, "
                "upload it to the hub, or name one that the other machine has and say --no-preflight."
            )
        # A path in a run counts as the whole run, because commands name a run by any such path.
        parents = (folder for folder in (target, *target.parents) if folder.is_relative_to(root))
        needed = next((folder for folder in parents if (folder / RECORD).is_file()), target)
        inside = needed.relative_to(root).as_posix()
        if not any(path == inside or path.startswith(f"{inside}/") for path in project.files):
            raise UsageError(
                f"the command reads {need}, which is not sent with the project. Send it too: --file {inside}"
            )


def _checked_output(path: str) -> str:
    """Normalize a path of --output. Raises UsageError if it is not in the working folder: nothing else is fetched."""
    parts = PurePosixPath(path)
    if parts.parts and parts.parts[0] in RESERVED_NAMES:
        raise UsageError(
            f"{path}: this name is taken in the folder that results come to; call it otherwise."
        )
    if path and not parts.parts:
        raise UsageError(
            "--output .: the whole project does not come back; name what the job makes."
        )
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise UsageError(
            f"{path} is outside of the project: what a job leaves there does not come back. Give a path relative to the project's folder; "
            "for a run that is the key run.dir, which may be set behind the verb: run.dir=runs."
        )
    return parts.as_posix()
