"""The runner's answers as typed values (`MemberState`, `Observation` etc.), read from JSON.

Unknown fields are ignored, since a newer runner may send more; null is the same as a missing field. A field that is missing or of the
wrong type raises BadAnswer. Fields that an older runner does not send yet have a default."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from groupwise.core.settings.field_errors import field_errors
from groupwise.jobs.hosts.framing import BadAnswer
from groupwise.jobs.hosts.spec import (
    JOB_ID,
    FileEntry,
    Manifest,
    file_entry,
    path_problems,
)

T = TypeVar("T")

MAX_INT64, MAX_INT32 = (1 << 63) - 1, (1 << 31) - 1
"""Largest integers that database columns can hold."""
LONGEST, LONGEST_NAME, LONGEST_TAIL, LONGEST_OUTPUT = 4096, 300, 1 << 16, 8 << 20
"""Most characters that are kept of a text, of a name, of the end of a log, and of a program's output; the rest is cut off."""
MAX_LISTED, MAX_GPUS, MAX_SHOWN = 10_000, 256, 1_000
"""Most entries of a list, most GPUs of a machine, and how many entries are kept of lists that are only shown to users."""
MAX_EPOCH = (1 << 62) - 1
"""Highest epoch that runners accept. No control plane assigns a higher one, and database columns cannot hold much more."""


def _check_number(value: Any, limit: int = MAX_INT64) -> int | float:
    # NaN fails the comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= limit:
        raise ValueError(f"a number of at most {limit} is expected")
    return value


def _shorten_texts(value: Any) -> list[str]:
    if not isinstance(value, list) or len(cast("list[object]", value)) > MAX_LISTED:
        raise ValueError(f"a list of at most {MAX_LISTED} entries is expected")
    return [str(entry)[:LONGEST] for entry in cast("list[object]", value)[:MAX_SHOWN]]


def _keep_numbers(value: Any) -> list[int | float]:
    entries = cast("list[object]", value) if isinstance(value, list) else []
    return [
        entry for entry in entries if isinstance(entry, int | float) and abs(entry) <= MAX_INT64
    ]


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: entry for k, entry in cast("dict[str, Any]", value).items() if entry is not None}


Text = Annotated[StrictStr, AfterValidator(lambda text: text[:LONGEST])]
Name = Annotated[StrictStr, AfterValidator(lambda text: text[:LONGEST_NAME])]
Output = Annotated[StrictStr, AfterValidator(lambda text: text[:LONGEST_OUTPUT])]
Tail = Annotated[StrictStr, AfterValidator(lambda text: text[:LONGEST_OUTPUT][-LONGEST_TAIL:])]
AnyText = Annotated[str, BeforeValidator(lambda value: str(value)[:LONGEST])]
Texts = Annotated[tuple[str, ...], BeforeValidator(_shorten_texts)]
"""The first MAX_SHOWN entries of a list; entries that are not strings are converted."""
Whole = Annotated[int, BeforeValidator(lambda value: int(_check_number(value)))]
"""An integer; 3.0 is accepted for 3."""
Small = Annotated[int, BeforeValidator(lambda value: int(_check_number(value, MAX_INT32)))]
Real = Annotated[float, BeforeValidator(lambda value: float(_check_number(value)))]
JsonObject = Annotated[T, BeforeValidator(_without_nulls)]
"""An object in an answer."""
ListOf = Annotated[tuple[JsonObject[T], ...], Field(max_length=MAX_LISTED)]


class RunnerState(StrEnum):
    """An attempt's state, as its machine sees it."""

    ABSENT = "absent"
    """No trace of it. This does not prove that it will never start there: only `void` does."""
    QUEUED = "queued"
    """Laid out for an engine (Slurm, Ray), which starts it."""
    CLAIMED = "claimed"
    """Its supervisor lives; its command has not started."""
    RUNNING = "running"
    EXITED = "exited"
    """Ended, with an exit record."""
    LOST = "lost"
    """Started, but its supervisor ended without an exit record, and the machine was not restarted."""
    REBOOTED = "rebooted"
    """Started before the machine's last boot, without an exit record."""
    VOIDED = "voided"
    """It never ran here and never will."""
    REFUSED = "refused"
    """The runner refused to start it; final for this epoch."""


SUPERVISED = frozenset({RunnerState.CLAIMED, RunnerState.RUNNING})
"""The states of an attempt whose supervisor lives."""
CHANGEABLE = SUPERVISED | {RunnerState.QUEUED}
"""The states of an attempt that has not ended."""


class ExitReason(StrEnum):
    """Why a command ended."""

    EXITED = "exited"
    """The command ended by itself, or by a signal that was not ours."""
    CANCELLED = "cancelled"
    EVICTED = "evicted"
    """Its engine, or the owner of its machine, requested its end in advance."""
    TIME_LIMIT = "time_limit"
    DEADMAN = "deadman"
    """The machine had no contact with the control plane for too long."""
    SPAWN_FAILED = "spawn_failed"
    """The command could not be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """How a command ended."""

    code: Small | None = None
    signal: Whole | None = None
    reason: ExitReason
    message: Text = ""
    oom_kill: Whole = 0
    """How many of its processes the kernel killed for lack of memory."""
    seconds: Real | None = None
    finished_at: Real | None = None
    """Seconds since the epoch, by the machine's clock."""
    tail: Tail = ""
    """The end of the log."""
    gpus: Whole | None = None
    """How many GPUs it held on its machine; None: its runner does not report it."""
    age: Real | None = None
    """Seconds between the end and this answer."""
    leftovers: Whole = 0
    """How many processes outlived the command and had to be ended by the supervisor."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the runner would not start an attempt."""

    code: Text
    """One of lower_epoch, voided, gpu_busy, gpu_missing, foreign_busy, disk_full, ram, bad_spec, unknown_program …"""
    message: Text = ""
    holder: AnyText | None = None
    highest: Whole | None = None
    """The highest epoch of the job that the machine has seen; only for `lower_epoch`."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """The state of one attempt on one machine."""

    job: Text
    epoch: Annotated[StrictInt, BeforeValidator(_check_number)]
    state: RunnerState
    rank: Whole = 0
    boot_id: Text | None = None
    """The machine's boot id at the start of the attempt."""
    same_boot: StrictBool = True
    pid: Whole | None = None
    start_ticks: Whole | None = None
    method: Text | None = None
    started_at: Real | None = None
    log_size: Whole = 0
    checkpoints: Whole = 0
    """How many complete checkpoints it has."""
    step: Whole | None = None
    """The step of the newest complete checkpoint."""
    exit: JsonObject[ExitRecord] | None = None
    refused: JsonObject[Refusal] | None = None
    survivors: Whole | None = None
    """How many of its processes live although its supervisor has ended; None: not counted."""
    place: Text | None = None
    """The random name of the root that answered."""
    gpus: Texts = ()
    """UUIDs of its GPUs at the start."""
    share_mb: Whole | None = None
    """Memory in MB of its share of a GPU; None: it has whole GPUs."""
    slot: Whole | None = None
    """The CPU slot of a job without a GPU."""
    clock: Real | None = None
    """The machine's boot clock at the time of the answer. `wait` and `touch` send it back, and the deadman counts silence from then."""
    engine: Text | None = None
    """The engine that it was laid out for."""
    engine_says: Text = ""
    """The end of the engine's log of the attempt; from an `SchedulerRunner`, the reason why it waits."""
    engine_options: Texts = ()
    """The options that were passed to the engine."""
    engine_has: bool | None = None
    """True if a queued attempt is in its engine's queue. None: the engine was not asked, or did not answer."""
    folder: Text | None = None
    """The attempt's folder, if an engine starts it."""
    age: Real | None = None
    """Seconds since the attempt was laid out; only with an engine."""
    beat_age: Real | None = None
    """Seconds since its supervisor's last heartbeat, by the file's time; only with an engine."""

    @property
    def is_alive(self) -> bool:
        """True if any of its processes live, with or without the supervisor."""
        return self.state in SUPERVISED or bool(self.survivors)

    @property
    def may_start(self) -> bool:
        """True if an engine may start it at any moment, without another request."""
        return self.state is RunnerState.QUEUED

    @property
    def handle(self) -> dict[str, Any]:
        """The facts that identify its processes on that machine."""
        return {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "boot_id": self.boot_id,
            "method": self.method,
            "place": self.place,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A description of a machine."""

    protocols: tuple[Whole, ...]
    python: Text
    hostname: Text
    boot_id: Text
    home: Text
    root: Text
    cpus: Whole | None = None
    ram_mb: Whole | None = None
    disk_free_mb: Whole | None = None
    cgroup: StrictBool = False
    """True if attempts get their own control group."""
    memory_limits: StrictBool = False
    """True if that group can also enforce their memory limit."""
    filesystem: Text | None = None
    """Type of the root's file system; locks are unreliable on nfs and similar ones."""
    methods: Texts = ()
    """Supported methods to start an attempt."""
    time: Real | None = None


class ProbeStatus(StrEnum):
    """The outcome of asking for GPUs."""

    OK = "ok"
    ABSENT = "absent"
    """The program is missing: a machine without GPUs."""
    FAILED = "failed"
    HUNG = "hung"
    GARBAGE = "garbage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How the probe for GPUs went."""

    status: ProbeStatus
    """The outcome of the query for GPUs."""
    apps: ProbeStatus
    """The outcome of the query for processes on GPUs."""
    tool: Name = "nvidia-smi"
    lines_not_read: Texts = ()
    lost: Texts = ()
    """Lines that say that a GPU cannot be reached; the others were reported."""
    exit: Whole | None = None
    said: Text = ""


@dataclass(frozen=True, slots=True)
class SeenGPU:
    """A GPU, as the probe reported it. None: the probe did not report the value."""

    index: Small
    uuid: Name
    model: Name | None = None
    memory_mb: Small | None = None
    memory_used_mb: Small | None = None
    utilisation: Small | None = None
    """Percent."""
    temperature: Small | None = None
    """Degrees Celsius."""
    mig: StrictBool = False
    """It is split into MIG devices, each of which is a GPU of the list."""
    problems: Texts = ()


_AMD_UUID = re.compile(r"GPU-(?:amd-.*|[0-9a-f]{16})", re.IGNORECASE)


def vendor_of(uuid: str) -> str:
    """`AMD` or `NVIDIA`: the vendor of the GPU with this UUID, in the form in which the runner reports it."""
    return "AMD" if _AMD_UUID.fullmatch(uuid) else "NVIDIA"


@dataclass(frozen=True, slots=True)
class SeenApp:
    """A process on a GPU."""

    uuid: Text
    pid: Whole | None = None
    memory_mb: Whole | None = None
    attempt: Text | None = None
    """`<job>.<epoch>` if the process is one of ours."""
    graphics: StrictBool = False
    """It also draws, as processes of a desktop do; such a process uses the GPU only by its memory."""


@dataclass(frozen=True, slots=True)
class UntrackedItem:
    """Something that looks like an attempt but is unknown to the runner, which never touches it."""

    what: Name
    """`folder` or `process`."""
    detail: Name = ""
    pid: Whole | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """GPUs, load and attempts of a machine at one moment."""

    boot_id: Name
    time: Real | None = None
    load: Annotated[tuple[float, ...], BeforeValidator(_keep_numbers)] = ()
    cpus: Whole | None = None
    ram_mb: Whole | None = None
    ram_free_mb: Whole | None = None
    disk_free_mb: Whole | None = None
    probe: JsonObject[Probe]
    gpus: Annotated[tuple[JsonObject[SeenGPU], ...], Field(max_length=MAX_GPUS)] = ()
    apps: ListOf[SeenApp] = ()
    attempts: ListOf[MemberState] = ()
    quarantined: ListOf[UntrackedItem] = ()
    unremoved: Texts = ()
    """Folders of forgotten attempts that contain files which the runner's user may not remove."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """A program's exit status and output."""

    code: Whole | None = None
    """Exit status; None: it did not end in time, and was killed."""
    out: Output = ""
    err: Output = ""


@dataclass(frozen=True, slots=True)
class LogPart:
    """A piece of a log, and the size of the whole log."""

    size: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CheckpointTree:
    """A complete checkpoint on a machine: a folder whose manifest.json was written last."""

    path: str
    """Relative to the work folder, as are the paths of `files`."""
    step: int
    files: Manifest


@dataclass(frozen=True, slots=True)
class WorkTree:
    """The files in the work folder of an attempt."""

    files: Manifest
    refused: tuple[tuple[str, str], ...]
    """Path and reason: links, devices, unreadable files."""
    checkpoints: tuple[CheckpointTree, ...]
    refused_more: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many more files are refused, by reason; if there are very many, the machine lists only some."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that still holds a resource of an attempt."""

    what: Text
    """`lock`, `process`, `cgroup` or `memory`."""
    detail: Text = ""
    pid: Whole | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The outcome of `release`: clean, or a list of what is still held."""

    clean: StrictBool
    holders: ListOf[Holder] = ()


@cache
def _type_adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def read_answer(kind: type[T], document: object, label: str) -> T:
    """Validate an object of an answer; `label` names it in messages. Raises BadAnswer."""
    try:
        return _type_adapter(kind).validate_python(_without_nulls(document))
    except ValidationError as error:
        first = field_errors(error, document_name="it")[0]
        place = f"{label}.{first.field}" if first.field else label
        raise BadAnswer(f"{place} is {repr(first.given)[:200]}: {first.message}") from None


def parse_member_state(document: object) -> MemberState:
    """Read the state of an attempt. Raises BadAnswer, as all readers below do."""
    return _checked_member(read_answer(MemberState, document, "the state of an attempt"))


def _checked_member(state: MemberState) -> MemberState:
    if state.state is RunnerState.EXITED and state.exit is None:
        raise BadAnswer("the state of an attempt is exited: an exit record is expected")
    return state if state.engine_has is None else replace(state, engine_has=None)


@dataclass(frozen=True, slots=True)
class _CgroupBody:
    v2: StrictBool = False
    memory: StrictBool = False


@dataclass(frozen=True, slots=True)
class _HelloBody:
    """The fields of the answer to `hello` that have another form in `Hello`."""

    protocols: tuple[Any, ...] = ()
    protocol: Whole | None = None
    cgroup: JsonObject[_CgroupBody] = _CgroupBody()


def parse_hello(document: object) -> Hello:
    """Read the answer to `hello`."""
    body = read_answer(_HelloBody, document, "the answer to hello")
    protocols = [n for n in body.protocols if isinstance(n, int)]
    derived = {
        "protocols": protocols or [body.protocol],
        "cgroup": body.cgroup.v2,
        "memory_limits": body.cgroup.memory,
    }
    return read_answer(
        Hello, {**cast("dict[str, Any]", document), **derived}, "the answer to hello"
    )


def parse_observation(document: object) -> Observation:
    """Read the answer to `observe`."""
    observed = read_answer(Observation, document, "the observation")
    attempts: list[MemberState] = []
    strays = [*observed.quarantined]
    for state in map(_checked_member, observed.attempts):
        if 0 <= state.epoch <= MAX_EPOCH and JOB_ID.fullmatch(state.job):
            attempts.append(state)
        else:  # a job may create a folder with an invalid name, which must not hide other attempts
            strays.append(UntrackedItem("folder", f"{state.job}.{state.epoch}"))
    return replace(observed, attempts=tuple(attempts), quarantined=tuple(strays[:MAX_SHOWN]))


@dataclass(frozen=True, slots=True)
class _TreeBody:
    """The answer to `manifest`. `files` may have a million entries, which are checked individually."""

    files: dict[str, Any] = field(default_factory=dict[str, Any])
    refused: tuple[tuple[str, str], ...] = ()
    checkpoints: tuple[dict[str, Any], ...] = ()
    refused_more: dict[str, Annotated[StrictInt, Field(ge=0, le=MAX_INT64)]] = field(
        default_factory=dict[str, int]
    )


@dataclass(frozen=True, slots=True)
class _CheckpointBody:
    path: Text
    step: Whole
    files: dict[str, Any] = field(default_factory=dict[str, Any])


def parse_work_tree(document: object) -> WorkTree:
    """Read the answer to `manifest`. Paths that lead out of the work folder are moved to `refused`: a machine must not be able to write
    elsewhere on our disk."""
    body = read_answer(_TreeBody, document, "the manifest")
    refused = list(body.refused)
    checkpoints: list[CheckpointTree] = []
    for entry in body.checkpoints:
        step = entry.get("step")
        if isinstance(step, int) and not 0 <= step <= MAX_INT64:
            continue  # older runners report impossible steps
        checkpoint = read_answer(_CheckpointBody, entry, "a checkpoint")
        outside: list[tuple[str, str]] = []
        files = _parse_files(checkpoint.files, outside)
        if outside or path_problems("checkpoint", checkpoint.path):
            raise BadAnswer(
                f"the checkpoint {checkpoint.path[:200]!r} is not inside the work folder, as is expected"
            )
        checkpoints.append(CheckpointTree(checkpoint.path, checkpoint.step, files))
    files = _parse_files(body.files, refused)
    return WorkTree(files, tuple(refused), tuple(checkpoints), body.refused_more)


def _parse_files(entries: Mapping[str, Any], refused: list[tuple[str, str]]) -> Manifest:
    files: dict[str, FileEntry] = {}
    for path, entry in entries.items():
        problems = path_problems("file", path)
        if problems:
            refused.append((path, problems[0]))
            continue
        file = file_entry(entry)
        if file is None:
            raise BadAnswer(
                f"{path[:200]!r} is {repr(entry)[:200]}: [sha256, mode, size] is expected"
            )
        files[path] = file
    # Refuse paths below another file of the list: only a dishonest machine reports such.
    for path in list(files):
        if not any(str(above) in files for above in PurePosixPath(path).parents):
            continue
        del files[path]
        refused.append((path, "a file of the list is its folder"))
    return files
