"""The runner's answers as values: `MemberState`, `Observation` and the like, read from JSON.

Unknown fields are skipped, since a newer runner may send more. A field that is missing or of the wrong type raises BadAnswer, unless an
older runner did not send it yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

from groupwise.jobs.hosts.framing import BadAnswer
from groupwise.jobs.hosts.spec import (
    JOB_ID,
    MOST_ARTEFACTS,
    FileEntry,
    Manifest,
    file_entry,
    path_problems,
)

Word = TypeVar("Word", bound=StrEnum)

MOST, MOST_OF_SMALL = (1 << 63) - 1, (1 << 31) - 1
"""Largest numbers that database columns hold."""
LONGEST, LONGEST_NAME, LONGEST_TAIL, LONGEST_OUTPUT = 4096, 300, 1 << 16, 8 << 20
"""Most characters that are kept of a text, of a name, of the end of a log, and of a program's output."""
MOST_LISTED, MOST_GPUS, MOST_SHOWN = 10_000, 256, 1_000
"""Most entries of a list, most GPUs of a machine, and how many entries are kept of lists that are for people."""
MOST_EPOCH = (1 << 62) - 1
"""Highest epoch that runners accept. No control plane gives out a higher one, and databases do not count much further."""


class RunnerState(StrEnum):
    """An attempt's state, as its machine sees it."""

    ABSENT = "absent"
    """No trace of it. This does not prove that it never begins there: only `void` does."""
    QUEUED = "queued"
    """Laid out for an engine (Slurm, Ray) to begin."""
    CLAIMED = "claimed"
    """Its supervisor lives, its command has not begun."""
    RUNNING = "running"
    EXITED = "exited"
    """Ended, with an exit record."""
    LOST = "lost"
    """Begun, but its supervisor is gone without an exit record, and the machine was not restarted."""
    REBOOTED = "rebooted"
    """Begun before the machine's last start, without an exit record."""
    VOIDED = "voided"
    """It never ran here and never will."""
    REFUSED = "refused"
    """The runner would not start it; final for this epoch."""


class ExitReason(StrEnum):
    """Why a command ended."""

    EXITED = "exited"
    """The command ended by itself, or by a signal that was not ours."""
    CANCELLED = "cancelled"
    EVICTED = "evicted"
    """Its engine, or the owner of its machine, wanted it ended, and said so in time."""
    TIME_LIMIT = "time_limit"
    DEADMAN = "deadman"
    """The control plane was silent for too long."""
    SPAWN_FAILED = "spawn_failed"
    """It could not be started."""


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """How a command ended."""

    code: int | None
    signal: int | None
    reason: ExitReason
    message: str
    oom_kill: int
    """How many of its processes the kernel has killed because memory ran out."""
    seconds: float | None
    finished_at: float | None
    """Seconds since the epoch, by the machine's clock."""
    tail: str
    """The end of its log."""
    gpus: int | None = None
    """How many GPUs it held on its machine; None: its runner does not say."""
    age: float | None = None
    """Seconds between the end and this answer."""
    leftovers: int = 0
    """How many processes it left behind and the supervisor had to end."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the runner would not start an attempt."""

    code: str
    """lower_epoch, voided, gpu_busy, gpu_missing, foreign_busy, disk_full, ram, bad_spec, unknown_program …"""
    message: str
    holder: str | None = None
    highest: int | None = None
    """The highest epoch of the job that the machine has seen; only for `lower_epoch`."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """The state of one attempt on one machine."""

    job: str
    epoch: int
    state: RunnerState
    rank: int = 0
    boot_id: str | None = None
    """The machine's boot id when the attempt began."""
    same_boot: bool = True
    pid: int | None = None
    start_ticks: int | None = None
    method: str | None = None
    started_at: float | None = None
    log_size: int = 0
    checkpoints: int = 0
    """How many complete checkpoints it has."""
    step: int | None = None
    """The step of the newest complete checkpoint."""
    exit: ExitRecord | None = None
    refused: Refusal | None = None
    survivors: int | None = None
    """How many of its processes live although its supervisor is gone; None: not counted."""
    place: str | None = None
    """Name of the root that answered."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it was begun with."""
    share_mb: int | None = None
    """MiB of its share of each GPU; None: it has whole GPUs."""
    slot: int | None = None
    """The CPU slot of a job without a GPU."""
    clock: float | None = None
    """The machine's boot clock when it answered. `wait` and `touch` send it back, and the deadman counts silence from then."""
    engine: str | None = None
    """The engine that it was laid out for."""
    engine_says: str = ""
    """The end of the engine's log of it; from an `EngineRunner`, what it waits for."""
    engine_options: tuple[str, ...] = ()
    """The options that the engine was given."""
    engine_has: bool | None = None
    """True if a queued attempt is in its engine's queue. None: the engine was not asked, or gave no answer."""
    folder: str | None = None
    """The attempt's folder, if an engine begins it."""
    age: float | None = None
    """Seconds since the attempt was laid out; only with an engine."""
    beat_age: float | None = None
    """Seconds since its supervisor's last sign of life, by the file's time; only with an engine."""

    @property
    def lives(self) -> bool:
        """True if processes of it live, with its supervisor or without."""
        return self.state in _SUPERVISED or bool(self.survivors)

    @property
    def may_begin(self) -> bool:
        """True if an engine may begin it at any moment, without another request."""
        return self.state is RunnerState.QUEUED

    @property
    def handle(self) -> dict[str, Any]:
        """The facts that tell its processes from others on that machine."""
        return {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "boot_id": self.boot_id,
            "method": self.method,
            "place": self.place,
        }


_SUPERVISED = frozenset({RunnerState.CLAIMED, RunnerState.RUNNING})


@dataclass(frozen=True, slots=True)
class Hello:
    """A description of a machine."""

    protocols: tuple[int, ...]
    python: str
    hostname: str
    boot_id: str
    home: str
    root: str
    cpus: int | None
    ram_mb: int | None
    disk_free_mb: int | None
    cgroup: bool
    """True if attempts get a control group of their own."""
    memory_limits: bool
    """True if that group can also enforce their memory limit."""
    filesystem: str | None
    """The root's type of file system; locks do not hold on nfs and its kin."""
    methods: tuple[str, ...]
    """Ways to start an attempt that the machine has."""
    time: float | None


class ProbeStatus(StrEnum):
    """The outcome of asking for GPUs."""

    OK = "ok"
    ABSENT = "absent"
    """There is no such program: a machine without GPUs."""
    FAILED = "failed"
    HUNG = "hung"
    GARBAGE = "garbage"


@dataclass(frozen=True, slots=True)
class Probe:
    """How the probe for GPUs went."""

    status: ProbeStatus
    """The outcome of asking which GPUs there are."""
    apps: ProbeStatus
    """The outcome of asking which processes use them."""
    lines_not_read: tuple[str, ...] = ()
    exit: int | None = None
    said: str = ""


@dataclass(frozen=True, slots=True)
class SeenGPU:
    """A GPU, as the probe showed it. None: the probe did not say."""

    index: int
    uuid: str
    model: str | None = None
    memory_mb: int | None = None
    memory_used_mb: int | None = None
    utilisation: int | None = None
    """Percent."""
    temperature: int | None = None
    """Degrees Celsius."""
    mig: bool = False
    mig_devices: tuple[Mapping[str, Any], ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SeenApp:
    """A process on a GPU."""

    uuid: str
    pid: int | None
    memory_mb: int | None
    attempt: str | None
    """`<job>.<epoch>` if the process is one of ours."""


@dataclass(frozen=True, slots=True)
class Stray:
    """Something that looks like an attempt but is unknown to the runner, which never touches it."""

    what: str
    """folder or process."""
    detail: str
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """GPUs, load and attempts of a machine at one moment."""

    boot_id: str
    time: float | None
    load: tuple[float, ...]
    cpus: int | None
    ram_mb: int | None
    ram_free_mb: int | None
    disk_free_mb: int | None
    probe: Probe
    gpus: tuple[SeenGPU, ...]
    apps: tuple[SeenApp, ...]
    attempts: tuple[MemberState, ...]
    quarantined: tuple[Stray, ...]
    unremoved: tuple[str, ...] = ()
    """Folders of forgotten attempts, with files in them that the runner's user may not remove."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A program's exit status and output."""

    code: int | None
    """Exit status; None: it did not end in time, and was killed."""
    out: str
    err: str


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
    """Path and why: links, devices, what cannot be read."""
    checkpoints: tuple[CheckpointTree, ...]
    refused_more: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many more of each kind the machine refuses; of very many it names only some."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that still holds what an attempt had."""

    what: str
    """lock, process, cgroup or memory."""
    detail: str
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The outcome of `release`: clean, or what is still held."""

    clean: bool
    holders: tuple[Holder, ...]


class Fields:
    """The fields of one JSON object of an answer, each read with the type that it must have. Raises BadAnswer."""

    def __init__(self, document: object, where: str) -> None:
        if not isinstance(document, dict):
            raise BadAnswer(f"{where} is {type(document).__name__}; an object is expected")
        self._document = cast("dict[str, Any]", document)
        self._where = where

    def text(self, name: str, most: int = LONGEST) -> str:
        """A required text. Only its first `most` characters are kept."""
        return cast("str", self._typed(name, str, required=True))[:most]

    def number(self, name: str, most: int = MOST) -> int:
        """A required whole number, of at most that size."""
        return self._counted(name, most, int, required=True) or 0

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A truth value; required if there is no default."""
        found = self._typed(name, bool, required=default is None)
        return bool(default) if found is None else cast("bool", found)

    def text_or_none(self, name: str, most: int = LONGEST) -> str | None:
        """A text, or None if it is null or missing. Only its first `most` characters are kept."""
        found = cast("str | None", self._typed(name, str))
        return None if found is None else found[:most]

    def number_or_none(self, name: str, most: int = MOST) -> int | None:
        """A whole number of at most that size, or None; 3.0 is accepted for 3."""
        return self._counted(name, most, int, float)

    def real_or_none(self, name: str) -> float | None:
        """Any number that a database can hold, or None."""
        found = self._typed(name, int, float)
        if found is not None and not abs(cast("float", found)) <= MOST:  # NaN neither
            raise self.wrong(name, "a number")
        return None if found is None else float(cast("float", found))

    def object_or_none(self, name: str) -> Fields | None:
        """The fields of a nested object; None if it is null or missing."""
        found = self._typed(name, dict)
        return None if found is None else Fields(found, f"{self._where}.{name}")

    def objects(self, name: str, most: int = MOST_LISTED) -> list[Fields]:
        """A list of at most `most` objects; empty if missing."""
        found = enumerate(self.listed(name, most))
        return [Fields(entry, f"{self._where}.{name}[{n}]") for n, entry in found]

    def texts(self, name: str) -> tuple[str, ...]:
        """The first MOST_SHOWN entries of a list; an entry that is no text is converted."""
        return tuple(str(entry)[:LONGEST] for entry in self.listed(name)[:MOST_SHOWN])

    def listed(self, name: str, most: int = MOST_LISTED) -> Sequence[object]:
        """A list of at most `most` entries; empty if missing."""
        found = cast("list[object]", self._typed(name, list) or [])
        if len(found) > most:
            raise BadAnswer(f"{self._where}.{name} has {len(found)} entries; {most} is the most")
        return found

    def mapping(self, name: str) -> Mapping[str, object]:
        """An object whose names are not known in advance; empty if missing."""
        return cast("dict[str, object]", self._typed(name, dict) or {})

    def plain(self) -> Mapping[str, Any]:
        """The whole object, as it came."""
        return self._document

    def wrong(self, name: str, wanted: str) -> BadAnswer:
        """The error to raise for a field with an impossible value."""
        return BadAnswer(
            f"{self._where}.{name} is {repr(self._document.get(name))[:200]}; {wanted} is expected"
        )

    def _counted(self, name: str, most: int, *types: type, required: bool = False) -> int | None:
        found = cast("float | None", self._typed(name, *types, required=required))
        if found is not None and not abs(found) <= most:  # NaN neither
            raise self.wrong(name, f"a number of at most {most}")
        return None if found is None else int(found)

    def _typed(self, name: str, *types: type, required: bool = False) -> object:
        found: object = self._document.get(name)
        if found is None and not required:
            return None
        if not isinstance(found, types) or (isinstance(found, bool) and bool not in types):
            raise self.wrong(name, " or ".join(t.__name__ for t in types))
        return found


def member_state(document: object) -> MemberState:
    """Read the state of an attempt. Raises BadAnswer, as do all readers below."""
    f = Fields(document, "the state of an attempt")
    exit_record, refused = f.object_or_none("exit"), f.object_or_none("refused")
    state = _one_of(RunnerState, f, "state")
    if state is RunnerState.EXITED and exit_record is None:
        raise f.wrong("exit", "an exit record")
    return MemberState(
        job=f.text("job"),
        epoch=f.number("epoch"),
        state=state,
        rank=f.number_or_none("rank") or 0,
        boot_id=f.text_or_none("boot_id"),
        same_boot=f.flag("same_boot", default=True),
        pid=f.number_or_none("pid"),
        start_ticks=f.number_or_none("start_ticks"),
        method=f.text_or_none("method"),
        started_at=f.real_or_none("started_at"),
        log_size=f.number_or_none("log_size") or 0,
        checkpoints=f.number_or_none("checkpoints") or 0,
        step=f.number_or_none("step"),
        exit=None if exit_record is None else _exit_record(exit_record),
        refused=None if refused is None else _refusal(refused),
        survivors=f.number_or_none("survivors"),
        place=f.text_or_none("place"),
        gpus=f.texts("gpus"),
        share_mb=f.number_or_none("share_mb"),
        slot=f.number_or_none("slot"),
        clock=f.real_or_none("clock"),
        engine=f.text_or_none("engine"),
        engine_says=f.text_or_none("engine_says") or "",
        engine_options=f.texts("engine_options"),
        folder=f.text_or_none("folder"),
        age=f.real_or_none("age"),
        beat_age=f.real_or_none("beat_age"),
    )


def ran(document: object) -> Ran:
    """Read the answer to `run`."""
    f = Fields(document, "the answer to run")
    return Ran(
        f.number_or_none("code"), f.text("out", LONGEST_OUTPUT), f.text("err", LONGEST_OUTPUT)
    )


def _exit_record(f: Fields) -> ExitRecord:
    return ExitRecord(
        code=f.number_or_none("code", MOST_OF_SMALL),
        signal=f.number_or_none("signal"),
        reason=_one_of(ExitReason, f, "reason"),
        message=f.text_or_none("message") or "",
        oom_kill=f.number_or_none("oom_kill") or 0,
        seconds=f.real_or_none("seconds"),
        finished_at=f.real_or_none("finished_at"),
        tail=(f.text_or_none("tail", LONGEST_OUTPUT) or "")[-LONGEST_TAIL:],
        gpus=f.number_or_none("gpus"),
        age=f.real_or_none("age"),
        leftovers=f.number_or_none("leftovers") or 0,
    )


def _refusal(f: Fields) -> Refusal:
    holder = f.plain().get("holder")
    return Refusal(
        code=f.text("code"),
        message=f.text_or_none("message") or "",
        holder=None if holder is None else str(holder)[:LONGEST],
        highest=f.number_or_none("highest"),
    )


def hello(document: object) -> Hello:
    """Read the answer to `hello`."""
    f = Fields(document, "the answer to hello")
    protocols = tuple(n for n in f.listed("protocols") if isinstance(n, int))
    groups = f.object_or_none("cgroup")
    return Hello(
        protocols=protocols or (f.number("protocol"),),
        python=f.text("python"),
        hostname=f.text("hostname"),
        boot_id=f.text("boot_id"),
        home=f.text("home"),
        root=f.text("root"),
        cpus=f.number_or_none("cpus"),
        ram_mb=f.number_or_none("ram_mb"),
        disk_free_mb=f.number_or_none("disk_free_mb"),
        cgroup=groups is not None and groups.flag("v2", default=False),
        memory_limits=groups is not None and groups.flag("memory", default=False),
        filesystem=f.text_or_none("filesystem"),
        methods=f.texts("methods"),
        time=f.real_or_none("time"),
    )


def observation(document: object) -> Observation:
    """Read the answer to `observe`."""
    f = Fields(document, "the observation")
    probe = f.object_or_none("probe")
    if probe is None:
        raise f.wrong("probe", "an object")
    attempts: list[MemberState] = []
    strays = [
        Stray(
            each.text("what", LONGEST_NAME),
            each.text_or_none("detail", LONGEST_NAME) or "",
            each.number_or_none("pid"),
        )
        for each in f.objects("quarantined")
    ]
    for state in map(member_state, f.listed("attempts")):
        if 0 <= state.epoch <= MOST_EPOCH and JOB_ID.fullmatch(state.job):
            attempts.append(state)
        else:  # a job may make up an impossible name, which must hide no other attempt
            strays.append(Stray("folder", f"{state.job}.{state.epoch}"))
    return Observation(
        boot_id=f.text("boot_id", LONGEST_NAME),
        time=f.real_or_none("time"),
        load=tuple(n for n in f.listed("load") if isinstance(n, float | int) and abs(n) <= MOST),
        cpus=f.number_or_none("cpus"),
        ram_mb=f.number_or_none("ram_mb"),
        ram_free_mb=f.number_or_none("ram_free_mb"),
        disk_free_mb=f.number_or_none("disk_free_mb"),
        probe=Probe(
            status=_one_of(ProbeStatus, probe, "status"),
            apps=_one_of(ProbeStatus, probe, "apps"),
            lines_not_read=probe.texts("lines_not_read"),
            exit=probe.number_or_none("exit"),
            said=probe.text_or_none("said") or "",
        ),
        gpus=tuple(_gpu(g) for g in f.objects("gpus", MOST_GPUS)),
        apps=tuple(_app(a) for a in f.objects("apps")),
        attempts=tuple(attempts),
        quarantined=tuple(strays[:MOST_SHOWN]),
        unremoved=f.texts("unremoved"),
    )


def _gpu(f: Fields) -> SeenGPU:
    return SeenGPU(
        index=f.number("index", MOST_OF_SMALL),
        uuid=f.text("uuid", LONGEST_NAME),
        model=f.text_or_none("model", LONGEST_NAME),
        memory_mb=f.number_or_none("memory_mb", MOST_OF_SMALL),
        memory_used_mb=f.number_or_none("memory_used_mb", MOST_OF_SMALL),
        utilisation=f.number_or_none("utilisation", MOST_OF_SMALL),
        temperature=f.number_or_none("temperature", MOST_OF_SMALL),
        mig=f.flag("mig", default=False),
        mig_devices=tuple(d.plain() for d in f.objects("mig_devices")),
        problems=f.texts("problems"),
    )


def _app(f: Fields) -> SeenApp:
    return SeenApp(
        uuid=f.text("uuid"),
        pid=f.number_or_none("pid"),
        memory_mb=f.number_or_none("memory_mb"),
        attempt=f.text_or_none("attempt"),
    )


def work_tree(document: object) -> WorkTree:
    """Read the answer to `manifest`. Paths that lead out of the work folder are moved to `refused`: the machine is not trusted with our
    disk."""
    f = Fields(document, "the manifest")
    refused: list[tuple[str, str]] = []
    for entry in f.listed("refused", MOST_ARTEFACTS):
        if not isinstance(entry, list) or len(cast("list[object]", entry)) != 2:
            raise BadAnswer(
                f"{entry!r} in the manifest's list of refused paths; [path, why] is expected"
            )
        path, why = cast("list[object]", entry)
        refused.append((str(path), str(why)))
    checkpoints: list[CheckpointTree] = []
    for each in f.objects("checkpoints"):
        step = each.plain().get("step")
        if not isinstance(step, int) or 0 <= step <= MOST:  # older runners let impossible ones pass
            checkpoints.append(_checkpoint(each))
    counts = f.mapping("refused_more")
    if not all(isinstance(count, int) and 0 <= count <= MOST for count in counts.values()):
        raise f.wrong("refused_more", "a number for each kind")
    return WorkTree(
        files=_manifest(f, "files", refused),
        refused=tuple(refused),
        checkpoints=tuple(checkpoints),
        refused_more=cast("dict[str, int]", dict(counts)),
    )


def _checkpoint(f: Fields) -> CheckpointTree:
    refused: list[tuple[str, str]] = []
    files = _manifest(f, "files", refused)
    path = f.text("path")
    if refused or path_problems("checkpoint", path):
        raise f.wrong("files", "paths inside the work folder")
    return CheckpointTree(path, f.number("step"), files)


def _manifest(f: Fields, name: str, refused: list[tuple[str, str]]) -> Manifest:
    files: dict[str, FileEntry] = {}
    for path, entry in f.mapping(name).items():
        problems = path_problems("file", path)
        if problems:
            refused.append((path, problems[0]))
            continue
        found = file_entry(entry)
        if found is None:
            raise f.wrong(name, "[sha256, mode, size] for each path")
        files[path] = found
    # A path may lead through another file of the list; an honest machine never reports one.
    for path in list(files):
        if not any(str(above) in files for above in PurePosixPath(path).parents):
            continue
        del files[path]
        refused.append((path, "a file of the list is its folder"))
    return files


def release(document: object) -> Release:
    """Read the answer to `release`."""
    f = Fields(document, "the answer to release")
    holders = tuple(
        Holder(h.text("what"), h.text_or_none("detail") or "", h.number_or_none("pid"))
        for h in f.objects("holders")
    )
    return Release(f.flag("clean"), holders)


def _one_of(words: type[Word], f: Fields, name: str) -> Word:
    word = f.text(name)
    try:
        return words(word)
    except ValueError:
        raise f.wrong(name, f"one of {', '.join(words)}") from None
