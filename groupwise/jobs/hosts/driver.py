"""Typed calls to the runner of one machine. `Runner` knows the verbs and how long each may take; a `Host` carries requests and answers.

Every call may be repeated. After OutcomeUnknown the caller has to repeat it, or ask `status`: the machine may have done what it was asked.
The runner's own text is named by its hash: a machine that does not have it says so, and is asked again with the text."""

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
"""Timeout in seconds for a call that waits for nothing."""
SLOW = 300.0
"""Timeout in seconds for a call that reads or writes much on the machine's disk."""
LONGEST = 86_400.0
"""Timeout in seconds for a call that reads all that a job has made; at most SLOW of them without a sign of progress."""
LARGEST_MANIFEST, LARGEST_OF_CHECKPOINTS = 256 << 20, 32 << 20
"""Size limits in bytes of a list of artefacts (a million files) and of checkpoints (a hundred thousand)."""
BATCH = 8 << 20
"""Most bytes of blobs in one call: smaller blobs travel together, a larger one in parts."""
PIECE = 4 << 20
"""Bytes that are asked for at once, of a log, a file, or many small files together."""
GATHERED = 500
"""Most small files that are asked for at once."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A checkpoint to begin with; its blobs are on the machine already."""

    manifest: Manifest
    """Paths relative to the work folder."""
    step: int
    path: str
    """The checkpoint's folder, relative to the work folder too."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A batch system that begins an attempt on a machine of its choice."""

    name: str
    options: tuple[str, ...] = ()
    """Options for the engine, in its own words."""


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
    """Memory in MiB that it takes of the one GPU it shares; None: it has its GPUs to itself."""
    slot: int | None = None
    """The CPU slot, if it has no GPUs."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Set by the control plane: ATTEMPT, PREVIOUS_FAILURE, MASTER_ADDR …"""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    resume: Resume | None = None
    deadman: float | None = None
    """Seconds without contact after which the machine ends the attempt; None: never."""
    clock: float | None = None
    """Machine clock of the last `MemberState` that came back. The deadman counts from then, so that a launch that arrives too late does not
    begin."""
    method: str | None = None
    """How to detach the supervisor; None: the best way that the machine has."""
    engine: Engine | None = None
    """The engine that begins it; None: the machine itself, at once."""
    python: str | None = None
    """The interpreter whose programs the command finds first; None: that of the runner."""


@dataclass(frozen=True, slots=True)
class Known:
    """The caller's last knowledge of an attempt; `wait` answers when any of it has changed."""

    state: RunnerState
    log_size: int = 0
    checkpoints: int = 0
    step: int | None = None
    """The step of the newest complete checkpoint."""
    clock: float | None = None
    """Machine clock of the last `MemberState` that came back."""


class Runner:
    """The runner of one machine."""

    def __init__(
        self, host: Host, *, root: str = "groupwise-fleet", python: str = "python3"
    ) -> None:
        """`root`: where it keeps its files, relative to the user's home there. `python`: the interpreter that jobs are run with."""
        self.host = host
        self.root = root
        self.python = python

    async def hello(self, *, timeout: float = USUAL) -> Hello:
        """Describe the machine. Raises RunnerRefused if it speaks no protocol of ours."""
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
        """GPUs, the processes on them, and attempts. `probe`: the command that lists GPUs; None: nvidia-smi."""
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
        """Send the machine every blob of a manifest that it lacks; returns the number of bytes sent."""

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
        """Send a large blob in parts, which the machine joins. Parts are blobs too, so after an interruption only the missing ones are
        sent. Raises BlobError if the blob is damaged."""

        def hashed() -> list[tuple[str, int]]:
            pieces = store.pieces(sha256, piece=BATCH)
            return [(hashlib.sha256(piece).hexdigest(), len(piece)) for piece in pieces]

        parts, offset = await asyncio.to_thread(hashed), 0
        lacking = set(await self.missing(part for part, _ in parts))
        for part, length in parts:
            if part in lacking:
                lacking.remove(part)  # several may have the same content
                data = await asyncio.to_thread(store.part, sha256, offset, length)
                await self._put([(part, length)], data)
            offset += length
        whole = {"blob": [sha256, size], "parts": [[part, length] for part, length in parts]}
        await self._ask("join", whole, timeout=SLOW, longest=LONGEST)

    async def _put(self, blobs: Sequence[tuple[str, int]], data: bytes) -> None:
        await self._ask("put", {"blobs": blobs}, data, timeout=SLOW)

    async def launch(self, launch: Launch, *, timeout: float = 2 * USUAL) -> MemberState:
        """Start an attempt, unless it was begun before. RunnerRefused `missing_blobs`: nothing was claimed yet."""
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
            body["engine"], longest = launch.engine.name, LONGEST  # its files are laid out first
            body["engine_options"] = list(launch.engine.options)
        answer = await self._ask(
            "launch", body, secrets=launch.secrets, timeout=timeout, longest=longest
        )
        return _state(answer)

    async def run(self, arguments: Sequence[str], *, seconds: float = USUAL) -> Ran:
        """Run a program of the machine to its end, for at most `seconds`."""
        body = {"arguments": list(arguments), "timeout": seconds}
        return answers.ran((await self._ask("run", body, timeout=seconds + USUAL)).body)

    async def void(
        self, job: str, epoch: int, *, because: str = "", timeout: float = USUAL
    ) -> MemberState:
        """Ensure that an attempt never begins; the answer says how far it was if it had begun already."""
        body = {**_key(job, epoch), "because": because}
        return _state(await self._ask("void", body, timeout=timeout))

    async def status(self, job: str, epoch: int, *, timeout: float = USUAL) -> MemberState:
        """The machine's knowledge of an attempt."""
        return _state(await self._ask("status", _key(job, epoch), timeout=timeout))

    async def wait(
        self, known: Mapping[tuple[str, int], Known], *, seconds: float, margin: float = USUAL
    ) -> tuple[MemberState, ...]:
        """States of attempts (job, epoch) as soon as one differs from `known`, or after `seconds`."""
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
        """Send TERM, and after `grace` seconds KILL, to all that is left of an attempt. Answers at once; poll `status` to see the end."""
        body = {**_key(job, epoch), "grace": grace}
        return _state(await self._ask("kill", body, timeout=timeout))

    async def log(
        self, job: str, epoch: int, offset: int, *, limit: int = PIECE, timeout: float = USUAL
    ) -> LogPart:
        """Bytes of an attempt's log from `offset`, at most `limit`, and the log's size."""
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
        # Reading a list of a million files takes seconds, in which the event loop would serve nothing else.
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
        """Bytes of a file in an attempt's work folder, at most `limit`; links are not followed."""
        body = {**_key(job, epoch), "path": path, "offset": offset, "limit": limit}
        answer = await self._ask("read", body, timeout=timeout, most_payload=limit)
        if len(answer.payload) > limit:
            raise BadAnswer(f"{len(answer.payload)} bytes of {path} came; {limit} were asked for")
        return answer.payload

    async def gather(
        self, job: str, epoch: int, files: Manifest, *, timeout: float = SLOW
    ) -> dict[str, bytes]:
        """Read whole files of an attempt's work folder, at most GATHERED files and PIECE bytes together. A file is left out if it no longer
        is what `files` says, or cannot be read: `read` says why. A caller that keeps them has to compare their hashes."""
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
        # The payload holds the files one after the other.
        ends = list(itertools.accumulate(entry.size for _, entry in came))
        return {
            path: answer.payload[end - entry.size : end]
            for (path, entry), end in zip(came, ends, strict=True)
        }

    async def keep(self, job: str, epoch: int, files: Manifest, *, timeout: float = SLOW) -> None:
        """Have the machine keep files of an attempt's work folder as blobs. RunnerRefused `changed` if one has another hash by now."""
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
        """Report whether everything that an attempt had is free again."""
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
        """Remove an attempt's folder. A launch that arrives later is refused all the same."""
        await self._ask("forget", _key(job, epoch), timeout=timeout)

    async def sweep(
        self, keep: Iterable[str] = (), *, older_than: float = 3600.0, timeout: float = SLOW
    ) -> None:
        """Remove old blobs that are not in `keep`, runners of earlier releases, and leftovers.

        `older_than`: seconds. Blobs that were sent since then, or asked for by `missing`, stay."""
        body = {"keep": list(keep), "older_than": older_than}
        await self._ask("sweep", body, timeout=timeout)

    async def touch(
        self, clocks: Mapping[tuple[str, int], float | None], *, timeout: float = USUAL
    ) -> None:
        """Tell the deadmen of these attempts (job, epoch) that the control plane lives, each with the last clock that came back."""
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
    """Group items, each with its size in bytes, into what one call can carry; an item that is larger is alone."""
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
