"""Typed calls to the runner of one machine. `Runner` knows the verbs and their timeouts; a `Host` carries requests and answers.

Every call may be repeated. After OutcomeUnknown the caller has to repeat it, or call `status`: the machine may have executed the
request. The runner's text is identified by its hash: a machine that lacks it answers so, and the request is repeated with the text."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.answers import (
    Hello,
    LogPart,
    MemberState,
    Observation,
    ProgramResult,
    Release,
    RunnerState,
    WorkTree,
)
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.framing import SPOKEN, BadAnswer
from groupwise.jobs.hosts.host import DEFAULT_MAX_BODY, Host, Request, RunnerRefused, RunnerResponse
from groupwise.jobs.hosts.runner_text import runner_text
from groupwise.jobs.hosts.spec import JobSpec, Manifest, as_json

T = TypeVar("T")

DEFAULT_TIMEOUT = 30.0
"""Timeout in seconds of a call that does not wait for anything."""
DISK_TIMEOUT = 300.0
"""Timeout in seconds of a call that reads or writes much on the machine's disk."""
LONGEST_CALL = 86_400.0
"""Timeout in seconds of a call that reads all data of a job; without a sign of progress it is given up after DISK_TIMEOUT seconds."""
LARGEST_MANIFEST, LARGEST_OF_CHECKPOINTS = 256 << 20, 32 << 20
"""Most bytes of a list of artefacts (a million files), and of a list of checkpoints (a hundred thousand files)."""
BATCH = 8 << 20
"""Most bytes of blobs in one call: smaller blobs are sent together, a larger one in parts."""
MAX_SENT_FILES = 2000
"""Most blobs in one call: the machine flushes each of them to its disk, which takes seconds if there are many."""
PIECE = 4 << 20
"""Most bytes that are requested at once: of a log, of a file, or of many small files together."""
MAX_GATHERED_FILES = 500
"""Most small files that are requested at once."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A checkpoint from which an attempt resumes; its blobs are on the machine already."""

    manifest: Manifest
    """Paths relative to the work folder."""
    step: int
    path: str
    """The checkpoint's folder, also relative to the work folder."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A batch system (Slurm, Ray, Modal) that starts an attempt on a machine of its choice."""

    name: str
    options: tuple[str, ...] = ()
    """Options in the scheduler's own format."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A request to start an attempt on a machine."""

    job: str
    epoch: int
    spec: JobSpec
    rank: int = 0
    members: int = 1
    gpus: Sequence[str] = ()
    """UUIDs of its GPUs on this machine."""
    share_mb: int | None = None
    """Memory (MB) that it may use of a GPU that it shares with other jobs; None if it has its GPUs to itself."""
    slot: int | None = None
    """The CPU slot, if it has no GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Set by the control plane: ATTEMPT, PREVIOUS_FAILURE, MASTER_ADDR …"""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    resume: Resume | None = None
    deadman: float | None = None
    """Seconds without contact after which the machine ends the attempt; None: never."""
    clock: float | None = None
    """Boot clock of the machine in the last `MemberState` that was received. The deadman counts from this time, so a launch that arrives
    too late does not start."""
    method: str | None = None
    """How the supervisor is detached; None: the best method that the machine supports."""
    engine: Scheduler | None = None
    """The scheduler that starts it; None: the machine itself starts it at once."""
    python: str | None = None
    """The interpreter whose folder comes first on the command's PATH; None: that of the `Runner`."""


@dataclass(frozen=True, slots=True)
class KnownState:
    """The caller's last knowledge of an attempt; `wait` answers once any of it has changed."""

    state: RunnerState
    log_size: int = 0
    checkpoints: int = 0
    step: int | None = None
    """The step of the newest complete checkpoint."""
    clock: float | None = None
    """Boot clock of the machine in the last `MemberState` that was received."""


class Runner:
    """The runner of one machine."""

    def __init__(
        self, host: Host, *, root: str = "groupwise-fleet", python: str = "python3"
    ) -> None:
        """`root`: the runner's folder, relative to the user's home there. `python`: the interpreter for jobs."""
        self.host = host
        self.root = root
        self.python = python

    async def hello(self, *, timeout: float = DEFAULT_TIMEOUT) -> Hello:
        """Describe the machine. Raises RunnerRefused if it supports none of our protocol versions."""
        machine = answers.parse_hello((await self._call_runner("hello", timeout=timeout)).body)
        if not SPOKEN.intersection(machine.protocols):
            raise RunnerRefused(
                "protocol",
                f"the runner speaks protocol {', '.join(map(str, machine.protocols))}; this control plane speaks"
                f" {', '.join(map(str, sorted(SPOKEN)))}",
            )
        return machine

    async def observe(
        self,
        *,
        probe: Sequence[str] | None = None,
        probe_timeout: float = 10.0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Observation:
        """Report GPUs, the processes on them, and attempts. `probe`: the command that lists GPUs; None: nvidia-smi."""
        body: dict[str, Any] = {"probe_timeout": probe_timeout}
        if probe is not None:
            body["probe"] = list(probe)
        return answers.parse_observation(
            (await self._call_runner("observe", body, timeout=timeout)).body
        )

    async def missing(self, hashes: Iterable[str]) -> list[str]:
        """The blobs that the machine does not have."""
        unique = list(dict.fromkeys(hashes))
        if not unique:
            return []
        answer = await self._call_runner("missing", {"sha256": unique}, timeout=DISK_TIMEOUT)
        lacking = set(_list_field(answer, "missing"))
        return [sha256 for sha256 in unique if sha256 in lacking]

    async def provide(self, store: BlobStore, manifest: Manifest) -> int:
        """Send the machine all blobs of a manifest that it lacks; returns the number of bytes sent."""

        def joined(hashes: Sequence[str]) -> bytes:
            return b"".join(map(store.read, hashes))

        sizes = {entry.sha256: entry.size for entry in manifest.values()}
        lacking = await self.missing(sizes)
        for batch in batches_by_size(
            [(lacking_hash, sizes[lacking_hash]) for lacking_hash in lacking], BATCH, MAX_SENT_FILES
        ):
            if len(batch) > 1 or sizes[batch[0]] <= BATCH:
                data = await asyncio.to_thread(joined, batch)
                blobs = [(sha256, sizes[sha256]) for sha256 in batch]
                await self._call_runner("put", {"blobs": blobs}, data, timeout=DISK_TIMEOUT)
            else:
                await self._put_in_parts(store, batch[0], sizes[batch[0]])
        return sum(sizes[sha256] for sha256 in lacking)

    async def _put_in_parts(self, store: BlobStore, sha256: str, size: int) -> None:
        """Send a large blob in parts, which the machine joins. Parts are blobs too: after an interruption only the missing ones are sent.
        Raises BlobError if the blob is damaged."""

        def hashed() -> list[tuple[str, int]]:
            pieces = store.pieces(sha256, piece=BATCH)
            return [(hashlib.sha256(piece).hexdigest(), len(piece)) for piece in pieces]

        parts, offset = await asyncio.to_thread(hashed), 0
        lacking = set(await self.missing(part for part, _ in parts))
        for part, length in parts:
            if part in lacking:
                lacking.remove(part)  # several parts may have the same content
                data = await asyncio.to_thread(store.part, sha256, offset, length)
                blobs = [(part, length)]
                await self._call_runner("put", {"blobs": blobs}, data, timeout=DISK_TIMEOUT)
            offset += length
        blob = {"blob": [sha256, size], "parts": [[part, length] for part, length in parts]}
        await self._call_runner("join", blob, timeout=DISK_TIMEOUT, longest=LONGEST_CALL)

    async def launch(self, launch: Launch, *, timeout: float = 2 * DEFAULT_TIMEOUT) -> MemberState:
        """Start an attempt, unless it was started before. RunnerRefused `missing_blobs`: nothing was claimed yet."""
        body: dict[str, Any] = {
            "job": launch.job,
            "epoch": launch.epoch,
            "rank": launch.rank,
            "members": launch.members,
            "spec": as_json(launch.spec),
            "gpus": list(launch.gpus),
            "share_mb": launch.share_mb,
            "slot": launch.slot,
            "environment": dict(launch.environment),
            "resume": None,
            "deadman": launch.deadman,
            "clock": launch.clock,
            "python": launch.python or self.python,
        }
        if launch.resume is not None:
            manifest = {p: [e.sha256, e.mode, e.size] for p, e in launch.resume.manifest.items()}
            body["resume"] = {
                "manifest": manifest,
                "step": launch.resume.step,
                "path": launch.resume.path,
            }
        if launch.method is not None:
            body["method"] = launch.method
        longest = None
        if launch.engine is not None:
            # All files are laid out before the answer, which takes long.
            body["engine"], longest = launch.engine.name, LONGEST_CALL
            body["engine_options"] = list(launch.engine.options)
        answer = await self._call_runner(
            "launch", body, secrets=launch.secrets, timeout=timeout, longest=longest
        )
        return answers.parse_member_state(answer.body)

    async def run(
        self, arguments: Sequence[str], *, seconds: float = DEFAULT_TIMEOUT
    ) -> ProgramResult:
        """Run a program of the machine and wait for its end, for at most `seconds`."""
        body = {"arguments": list(arguments), "timeout": seconds}
        answer = await self._call_runner("run", body, timeout=seconds + DEFAULT_TIMEOUT)
        return answers.read_answer(ProgramResult, answer.body, "the answer to run")

    async def void(
        self, job: str, epoch: int, *, because: str = "", timeout: float = DEFAULT_TIMEOUT
    ) -> MemberState:
        """Ensure that an attempt never starts. If it has started already, the answer is its state."""
        body = {**_attempt_key(job, epoch), "because": because}
        answer = await self._call_runner("void", body, timeout=timeout)
        return answers.parse_member_state(answer.body)

    async def status(
        self, job: str, epoch: int, *, timeout: float = DEFAULT_TIMEOUT
    ) -> MemberState:
        """The state of one attempt."""
        answer = await self._call_runner("status", _attempt_key(job, epoch), timeout=timeout)
        return answers.parse_member_state(answer.body)

    async def wait(
        self,
        known: Mapping[tuple[str, int], KnownState],
        *,
        seconds: float,
        margin: float = DEFAULT_TIMEOUT,
    ) -> tuple[MemberState, ...]:
        """Wait until one of the attempts (job, epoch) differs from `known`, or for `seconds`; returns the states of all."""
        body = {
            "known": {
                f"{job}.{epoch}": {
                    "state": k.state,
                    "log_size": k.log_size,
                    "checkpoints": k.checkpoints,
                    "step": k.step,
                    "clock": k.clock,
                }
                for (job, epoch), k in known.items()
            },
            "timeout": seconds,
        }
        answer = await self._call_runner("wait", body, timeout=seconds + margin)
        return tuple(answers.parse_member_state(entry) for entry in _list_field(answer, "attempts"))

    async def kill(
        self, job: str, epoch: int, *, grace: float, timeout: float = DEFAULT_TIMEOUT
    ) -> MemberState:
        """Send TERM, and after `grace` seconds KILL, to all processes of an attempt. Answers at once; poll `status` to see the end."""
        body = {**_attempt_key(job, epoch), "grace": grace}
        answer = await self._call_runner("kill", body, timeout=timeout)
        return answers.parse_member_state(answer.body)

    async def log(
        self,
        job: str,
        epoch: int,
        offset: int,
        *,
        limit: int = PIECE,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> LogPart:
        """Read an attempt's log from byte `offset`, at most `limit` bytes; also returns the log's size."""
        body = {**_attempt_key(job, epoch), "offset": offset, "limit": limit}
        answer = await self._call_runner("log", body, timeout=timeout, most_payload=limit)
        size = answer.body.get("size")
        if not isinstance(size, int) or len(answer.payload) > limit:
            raise BadAnswer("the answer to log says no size, or is longer than was asked for")
        return LogPart(size, answer.payload)

    async def manifest(
        self, job: str, epoch: int, what: str = "artefacts", *, timeout: float = DISK_TIMEOUT
    ) -> WorkTree:
        """List the files in an attempt's work folder. `what`: artefacts, checkpoints or all."""
        body = {**_attempt_key(job, epoch), "what": what}
        max_body = LARGEST_OF_CHECKPOINTS if what == "checkpoints" else LARGEST_MANIFEST
        answer = await self._call_runner(
            "manifest", body, timeout=timeout, longest=LONGEST_CALL, most_body=max_body
        )
        # In a thread: parsing a list of a million files takes seconds, and would block the event loop.
        return await asyncio.to_thread(answers.parse_work_tree, answer.body)

    async def read(
        self,
        job: str,
        epoch: int,
        path: str,
        *,
        offset: int = 0,
        limit: int = PIECE,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> bytes:
        """Read a file in an attempt's work folder from byte `offset`, at most `limit` bytes; links are not followed."""
        body = {**_attempt_key(job, epoch), "path": path, "offset": offset, "limit": limit}
        answer = await self._call_runner("read", body, timeout=timeout, most_payload=limit)
        if len(answer.payload) > limit:
            raise BadAnswer(f"{len(answer.payload)} bytes of {path} came; {limit} were asked for")
        return answer.payload

    async def gather(
        self, job: str, epoch: int, files: Manifest, *, timeout: float = DISK_TIMEOUT
    ) -> dict[str, bytes]:
        """Read complete files of an attempt's work folder, at most MAX_GATHERED_FILES files and PIECE bytes together. Files that no longer
        match `files`, or cannot be read, are left out: `read` gives the reason. A caller that keeps the files must verify their hashes."""
        listed = [[path, entry.sha256, entry.size] for path, entry in files.items()]
        body = {**_attempt_key(job, epoch), "files": listed}
        max_bytes = sum(entry.size for entry in files.values())
        answer = await self._call_runner("gather", body, timeout=timeout, most_payload=max_bytes)
        is_unchanged = _list_field(answer, "whole")
        received = [
            file
            for file, is_whole in zip(files.items(), is_unchanged, strict=False)
            if is_whole is True
        ]
        if len(is_unchanged) != len(listed) or len(answer.payload) != sum(
            e.size for _, e in received
        ):
            raise BadAnswer("the answer to gather is not as long as the files that it names")
        # The payload is the concatenation of the files.
        ends = list(itertools.accumulate(entry.size for _, entry in received))
        return {
            path: answer.payload[end - entry.size : end]
            for (path, entry), end in zip(received, ends, strict=True)
        }

    async def keep(
        self, job: str, epoch: int, files: Manifest, *, timeout: float = DISK_TIMEOUT
    ) -> None:
        """Make the machine store files of an attempt's work folder as blobs. RunnerRefused `changed` if one has another hash by now."""
        listed = [[path, entry.sha256, entry.size] for path, entry in files.items()]
        body = {**_attempt_key(job, epoch), "files": listed}
        await self._call_runner("keep", body, timeout=timeout, longest=LONGEST_CALL)

    async def release(
        self,
        job: str,
        epoch: int,
        *,
        gpus: Sequence[str] = (),
        share_mb: int | None = None,
        idle_memory_mb: int = 500,
        probe: Sequence[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Release:
        """Report whether all resources of an attempt are free again."""
        body: dict[str, Any] = {
            **_attempt_key(job, epoch),
            "gpus": list(gpus),
            "share_mb": share_mb,
            "idle_memory_mb": idle_memory_mb,
        }
        if probe is not None:
            body["probe"] = list(probe)
        answer = await self._call_runner("release", body, timeout=timeout)
        return answers.read_answer(Release, answer.body, "the answer to release")

    async def forget(self, job: str, epoch: int, *, timeout: float = DISK_TIMEOUT) -> None:
        """Remove an attempt's folder. A launch that arrives later is still refused."""
        await self._call_runner("forget", _attempt_key(job, epoch), timeout=timeout)

    async def sweep(
        self, keep: Iterable[str] = (), *, older_than: float = 3600.0, timeout: float = DISK_TIMEOUT
    ) -> None:
        """Remove old blobs that are not in `keep`, runners of earlier releases, and leftovers.

        `older_than`: seconds. Blobs that were sent within this time, or asked for by `missing`, are kept."""
        body = {"keep": list(keep), "older_than": older_than}
        await self._call_runner("sweep", body, timeout=timeout)

    async def touch(
        self, clocks: Mapping[tuple[str, int], float | None], *, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Reset the deadmen of these attempts (job, epoch): the control plane lives. Each has the last received clock of its machine."""
        clocks_by_name = {f"{job}.{epoch}": clock for (job, epoch), clock in clocks.items()}
        if clocks_by_name:
            await self._call_runner("touch", {"attempts": clocks_by_name}, timeout=timeout)

    async def _call_runner(
        self,
        verb: str,
        body: Mapping[str, Any] | None = None,
        payload: bytes = b"",
        *,
        secrets: Mapping[str, str] | None = None,
        timeout: float,
        longest: float | None = None,
        most_body: int = DEFAULT_MAX_BODY,
        most_payload: int = 0,
    ) -> RunnerResponse:
        text = runner_text()
        full_body: dict[str, Any] = {"root": self.root, "runner": text.sha256, **(body or {})}
        request = Request(verb, full_body, payload, secrets or {}, longest, most_body, most_payload)
        answer = await self.host.call(request, timeout=timeout)
        # The machine lacks this release of the runner: repeat the request with its text.
        if answer.body.get("need") == "runner":
            with_text = replace(request, body={**full_body, "source": text.source})
            answer = await self.host.call(with_text, timeout=timeout)
            if "need" in answer.body:
                raise RunnerRefused("runner", "the machine asks for its runner again and again")
        return answer


def _attempt_key(job: str, epoch: int) -> dict[str, Any]:
    return {"job": job, "epoch": epoch}


def _list_field(answer: RunnerResponse, name: str) -> list[Any]:
    value = answer.body.get(name)
    if not isinstance(value, list):
        raise BadAnswer(f"the answer has {name} = {value!r}; a list is expected")
    return list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def batches_by_size(
    sized_items: Iterable[tuple[T, int]], max_bytes: int, max_items: int
) -> Iterator[list[T]]:
    """Split items, each with its size in bytes, into groups of at most `max_bytes` and `max_items` items; a larger item is alone in its
    group."""
    group: list[T] = []
    total = 0
    for item, size in sized_items:
        if group and (len(group) == max_items or total + size > max_bytes):
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
