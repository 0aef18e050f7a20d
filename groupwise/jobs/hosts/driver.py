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
    Ran,
    Release,
    RunnerState,
    WorkTree,
)
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.framing import SPOKEN, BadAnswer
from groupwise.jobs.hosts.port import USUAL_BODY, Host, Request, RunnerRefused, RunnerResponse
from groupwise.jobs.hosts.runner_text import runner_text
from groupwise.jobs.hosts.spec import JobSpec, Manifest, as_json

T = TypeVar("T")

USUAL = 30.0
"""Timeout in seconds of a call that does not wait for anything."""
SLOW = 300.0
"""Timeout in seconds of a call that reads or writes much on the machine's disk."""
LONGEST = 86_400.0
"""Timeout in seconds of a call that reads all data of a job; without a sign of progress it is given up after SLOW seconds."""
LARGEST_MANIFEST, LARGEST_OF_CHECKPOINTS = 256 << 20, 32 << 20
"""Most bytes of a list of artefacts (a million files), and of a list of checkpoints (a hundred thousand files)."""
BATCH = 8 << 20
"""Most bytes of blobs in one call: smaller blobs are sent together, a larger one in parts."""
PIECE = 4 << 20
"""Most bytes that are requested at once: of a log, of a file, or of many small files together."""
GATHERED = 500
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
class Engine:
    """A batch system (Slurm, Ray, Modal) that starts an attempt on a machine of its choice."""

    name: str
    options: tuple[str, ...] = ()
    """Options in the engine's own format."""


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
    """Memory in MiB that it uses of one shared GPU; None: its GPUs are exclusive."""
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
    engine: Engine | None = None
    """The engine that starts it; None: the machine itself starts it at once."""
    python: str | None = None
    """The interpreter whose folder comes first on the command's PATH; None: that of the `Runner`."""


@dataclass(frozen=True, slots=True)
class Known:
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

    async def hello(self, *, timeout: float = USUAL) -> Hello:
        """Describe the machine. Raises RunnerRefused if it supports none of our protocol versions."""
        machine = answers.hello((await self._ask("hello", timeout=timeout)).body)
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
        timeout: float = USUAL,
    ) -> Observation:
        """Report GPUs, the processes on them, and attempts. `probe`: the command that lists GPUs; None: nvidia-smi."""
        body: dict[str, Any] = {"probe_timeout": probe_timeout}
        if probe is not None:
            body["probe"] = list(probe)
        return answers.observation((await self._ask("observe", body, timeout=timeout)).body)

    async def missing(self, hashes: Iterable[str]) -> list[str]:
        """The blobs that the machine does not have."""
        unique = list(dict.fromkeys(hashes))
        if not unique:
            return []
        answer = await self._ask("missing", {"sha256": unique}, timeout=SLOW)
        lacking = set(_list_of(answer, "missing"))
        return [sha256 for sha256 in unique if sha256 in lacking]

    async def provide(self, store: BlobStore, manifest: Manifest) -> int:
        """Send the machine all blobs of a manifest that it lacks; returns the number of bytes sent."""

        def joined(hashes: Sequence[str]) -> bytes:
            return b"".join(map(store.read, hashes))

        sizes = {entry.sha256: entry.size for entry in manifest.values()}
        lacking = await self.missing(sizes)
        for batch in grouped([(each, sizes[each]) for each in lacking], BATCH, len(lacking)):
            if len(batch) > 1 or sizes[batch[0]] <= BATCH:
                data = await asyncio.to_thread(joined, batch)
                await self._put([(sha256, sizes[sha256]) for sha256 in batch], data)
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
                await self._put([(part, length)], data)
            offset += length
        whole = {"blob": [sha256, size], "parts": [[part, length] for part, length in parts]}
        await self._ask("join", whole, timeout=SLOW, longest=LONGEST)

    async def _put(self, blobs: Sequence[tuple[str, int]], data: bytes) -> None:
        await self._ask("put", {"blobs": blobs}, data, timeout=SLOW)

    async def launch(self, launch: Launch, *, timeout: float = 2 * USUAL) -> MemberState:
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
            body["engine"], longest = launch.engine.name, LONGEST
            body["engine_options"] = list(launch.engine.options)
        answer = await self._ask(
            "launch", body, secrets=launch.secrets, timeout=timeout, longest=longest
        )
        return _state(answer)

    async def run(self, arguments: Sequence[str], *, seconds: float = USUAL) -> Ran:
        """Run a program of the machine and wait for its end, for at most `seconds`."""
        body = {"arguments": list(arguments), "timeout": seconds}
        return answers.ran((await self._ask("run", body, timeout=seconds + USUAL)).body)

    async def void(
        self, job: str, epoch: int, *, because: str = "", timeout: float = USUAL
    ) -> MemberState:
        """Ensure that an attempt never starts. If it has started already, the answer is its state."""
        body = {**_key(job, epoch), "because": because}
        return _state(await self._ask("void", body, timeout=timeout))

    async def status(self, job: str, epoch: int, *, timeout: float = USUAL) -> MemberState:
        """The state of one attempt."""
        return _state(await self._ask("status", _key(job, epoch), timeout=timeout))

    async def wait(
        self, known: Mapping[tuple[str, int], Known], *, seconds: float, margin: float = USUAL
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
        answer = await self._ask("wait", body, timeout=seconds + margin)
        return tuple(answers.member_state(entry) for entry in _list_of(answer, "attempts"))

    async def kill(
        self, job: str, epoch: int, *, grace: float, timeout: float = USUAL
    ) -> MemberState:
        """Send TERM, and after `grace` seconds KILL, to all processes of an attempt. Answers at once; poll `status` to see the end."""
        body = {**_key(job, epoch), "grace": grace}
        return _state(await self._ask("kill", body, timeout=timeout))

    async def log(
        self, job: str, epoch: int, offset: int, *, limit: int = PIECE, timeout: float = USUAL
    ) -> LogPart:
        """Read an attempt's log from byte `offset`, at most `limit` bytes; also returns the log's size."""
        body = {**_key(job, epoch), "offset": offset, "limit": limit}
        answer = await self._ask("log", body, timeout=timeout, most_payload=limit)
        size = answer.body.get("size")
        if not isinstance(size, int) or len(answer.payload) > limit:
            raise BadAnswer("the answer to log says no size, or is longer than was asked for")
        return LogPart(size, answer.payload)

    async def manifest(
        self, job: str, epoch: int, what: str = "artefacts", *, timeout: float = SLOW
    ) -> WorkTree:
        """List the files in an attempt's work folder. `what`: artefacts, checkpoints or all."""
        body = {**_key(job, epoch), "what": what}
        most = LARGEST_OF_CHECKPOINTS if what == "checkpoints" else LARGEST_MANIFEST
        answer = await self._ask("manifest", body, timeout=timeout, longest=LONGEST, most_body=most)
        # In a thread: parsing a list of a million files takes seconds, and would block the event loop.
        return await asyncio.to_thread(answers.work_tree, answer.body)

    async def read(
        self,
        job: str,
        epoch: int,
        path: str,
        *,
        offset: int = 0,
        limit: int = PIECE,
        timeout: float = USUAL,
    ) -> bytes:
        """Read a file in an attempt's work folder from byte `offset`, at most `limit` bytes; links are not followed."""
        body = {**_key(job, epoch), "path": path, "offset": offset, "limit": limit}
        answer = await self._ask("read", body, timeout=timeout, most_payload=limit)
        if len(answer.payload) > limit:
            raise BadAnswer(f"{len(answer.payload)} bytes of {path} came; {limit} were asked for")
        return answer.payload

    async def gather(
        self, job: str, epoch: int, files: Manifest, *, timeout: float = SLOW
    ) -> dict[str, bytes]:
        """Read complete files of an attempt's work folder, at most GATHERED files and PIECE bytes together. Files that no longer match
        `files`, or cannot be read, are left out: `read` gives the reason. A caller that keeps the files must verify their hashes."""
        listed = [[path, entry.sha256, entry.size] for path, entry in files.items()]
        body = {**_key(job, epoch), "files": listed}
        most = sum(entry.size for entry in files.values())
        answer = await self._ask("gather", body, timeout=timeout, most_payload=most)
        whole = _list_of(answer, "whole")
        came = [
            each for each, is_whole in zip(files.items(), whole, strict=False) if is_whole is True
        ]
        if len(whole) != len(listed) or len(answer.payload) != sum(e.size for _, e in came):
            raise BadAnswer("the answer to gather is not as long as the files that it names")
        # The payload is the concatenation of the files.
        ends = list(itertools.accumulate(entry.size for _, entry in came))
        return {
            path: answer.payload[end - entry.size : end]
            for (path, entry), end in zip(came, ends, strict=True)
        }

    async def keep(self, job: str, epoch: int, files: Manifest, *, timeout: float = SLOW) -> None:
        """Make the machine store files of an attempt's work folder as blobs. RunnerRefused `changed` if one has another hash by now."""
        listed = [[path, entry.sha256, entry.size] for path, entry in files.items()]
        body = {**_key(job, epoch), "files": listed}
        await self._ask("keep", body, timeout=timeout, longest=LONGEST)

    async def release(
        self,
        job: str,
        epoch: int,
        *,
        gpus: Sequence[str] = (),
        share_mb: int | None = None,
        idle_memory_mb: int = 500,
        probe: Sequence[str] | None = None,
        timeout: float = USUAL,
    ) -> Release:
        """Report whether all resources of an attempt are free again."""
        body: dict[str, Any] = {
            **_key(job, epoch),
            "gpus": list(gpus),
            "share_mb": share_mb,
            "idle_memory_mb": idle_memory_mb,
        }
        if probe is not None:
            body["probe"] = list(probe)
        return answers.release((await self._ask("release", body, timeout=timeout)).body)

    async def forget(self, job: str, epoch: int, *, timeout: float = SLOW) -> None:
        """Remove an attempt's folder. A launch that arrives later is still refused."""
        await self._ask("forget", _key(job, epoch), timeout=timeout)

    async def sweep(
        self, keep: Iterable[str] = (), *, older_than: float = 3600.0, timeout: float = SLOW
    ) -> None:
        """Remove old blobs that are not in `keep`, runners of earlier releases, and leftovers.

        `older_than`: seconds. Blobs that were sent within this time, or asked for by `missing`, are kept."""
        body = {"keep": list(keep), "older_than": older_than}
        await self._ask("sweep", body, timeout=timeout)

    async def touch(
        self, clocks: Mapping[tuple[str, int], float | None], *, timeout: float = USUAL
    ) -> None:
        """Reset the deadmen of these attempts (job, epoch): the control plane lives. Each has the last received clock of its machine."""
        clocks_by_name = {f"{job}.{epoch}": clock for (job, epoch), clock in clocks.items()}
        if clocks_by_name:
            await self._ask("touch", {"attempts": clocks_by_name}, timeout=timeout)

    async def _ask(
        self,
        verb: str,
        body: Mapping[str, Any] | None = None,
        payload: bytes = b"",
        *,
        secrets: Mapping[str, str] | None = None,
        timeout: float,
        longest: float | None = None,
        most_body: int = USUAL_BODY,
        most_payload: int = 0,
    ) -> RunnerResponse:
        text = runner_text()
        full: dict[str, Any] = {"root": self.root, "runner": text.sha256, **(body or {})}
        request = Request(verb, full, payload, secrets or {}, longest, most_body, most_payload)
        answer = await self.host.call(request, timeout=timeout)
        # The machine lacks this release of the runner: repeat the request with its text.
        if answer.body.get("need") == "runner":
            with_text = replace(request, body={**full, "source": text.source})
            answer = await self.host.call(with_text, timeout=timeout)
            if "need" in answer.body:
                raise RunnerRefused("runner", "the machine asks for its runner again and again")
        return answer


def _key(job: str, epoch: int) -> dict[str, Any]:
    return {"job": job, "epoch": epoch}


def _state(answer: RunnerResponse) -> MemberState:
    return answers.member_state(answer.body)


def _list_of(answer: RunnerResponse, name: str) -> list[Any]:
    found = answer.body.get(name)
    if not isinstance(found, list):
        raise BadAnswer(f"the answer has {name} = {found!r}; a list is expected")
    return list(found)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def grouped(sized: Iterable[tuple[T, int]], most_bytes: int, most: int) -> Iterator[list[T]]:
    """Split items, each with its size in bytes, into groups of at most `most_bytes` and `most` items; a larger item is alone in its
    group."""
    group: list[T] = []
    total = 0
    for item, size in sized:
        if group and (len(group) == most or total + size > most_bytes):
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
