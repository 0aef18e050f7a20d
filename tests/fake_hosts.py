"""Machines that exist only in this process: a faithful model of their runners, for tests of whatever drives jobs on machines.

`FakeHosts` is a rack of them and the only clock: `tick` lets every command that runs do one unit of work. A `FakeHost` is a
`groupwise.jobs.hosts.host.Host`. It keeps what a real runner keeps on disk (a folder for each attempt, the highest epoch of each job, exit
records, logs, who holds which GPU) apart from what a power cut takes away (processes). All verbs are safe to repeat, as the real ones are.

What a command does is scripted: `scripts[job_id]` holds a `Script` for each of its attempts, the last one for all that follow. What goes
wrong is said beforehand with `fail`, or done to the machine: `cut`, `heal`, `power_off`, `boot`, `kill_supervisor`.

Every command writes into `history` when it starts, steps and stops, and so does everything that is done to a machine: that is what a
checker reads. The model runs real commands nowhere, has no SSH, no files beyond those of scripts, and no time limits of calls but the one
of `wait`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from groupwise.jobs.hosts.host import (
    HostUnreachable,
    OutcomeUnknown,
    Request,
    RunnerRefused,
    RunnerResponse,
)

PROTOCOL = 1
GRACE_TICKS = 2
"""Ticks until KILL for a command that ignores TERM."""


@dataclass(frozen=True, slots=True)
class Script:
    """Script of one attempt's command."""

    ticks: int = 2
    """Units of work before it exits; 0: it has exited before the first observation."""
    code: int | None = 0
    signal: int | None = None
    """The signal that ends it, instead of an exit with `code`."""
    tail: str = ""
    """The end of its log."""
    oom_kill: int = 0
    ignores_term: bool = False
    leaks: bool = False
    """True: it leaves a process behind that holds its GPUs."""
    checkpoints: int = 0
    """Complete checkpoints that exist as soon as it runs; their content is never read."""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Files that exist when it exits, relative to the work folder."""
    refusal: str | None = None
    """Code with which the runner refuses to start it."""


class Fault(StrEnum):
    """A fault in one call."""

    REQUEST_LOST = "request_lost"
    """The request did not arrive, and the caller cannot know."""
    ANSWER_LOST = "answer_lost"
    """The request was performed, and the caller cannot know."""
    UNREACHABLE = "unreachable"
    """Nothing was sent, and the caller knows that."""
    LATE = "late"
    """The caller gets no answer, and the request arrives only when `deliver` is called."""
    NEVER = "never"
    """There is no answer until the caller gives up."""
    REFUSED = "refused"
    """The runner refuses."""


@dataclass(slots=True)
class _Process:
    """The command of an attempt, or a process that it left behind."""

    script: Script
    left: int
    ending: int | None = None
    """Ticks until KILL; None: nothing ends it."""
    why: str = "exited"


@dataclass(slots=True)
class _Folder:
    """An attempt's files on disk, and its processes."""

    job: str
    epoch: int
    rank: int = 0
    members: int = 1
    begun: bool = False
    """True if its command has run."""
    state: str = "claimed"
    """voided, refused, or claimed; the rest follows from the processes and the exit record."""
    boot_id: str = ""
    gpus: tuple[str, ...] = ()
    share_mb: int | None = None
    slot: int | None = None
    exit: dict[str, Any] | None = None
    refused: dict[str, Any] | None = None
    log: bytes = b""
    process: _Process | None = None
    supervisor: bool = False
    leaked: bool = False
    artefacts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    checkpoints: int = 0
    step: int | None = None
    """The step of the newest checkpoint."""
    deadman: float | None = None
    contact: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.job}.{self.epoch}"

    @property
    def holds(self) -> bool:
        """True if one of its processes is alive."""
        return self.process is not None or self.supervisor or self.leaked


class FakeHosts:
    """Several machines with one clock, their scripts and their history."""

    def __init__(self, machines: Mapping[str, Sequence[str]]) -> None:
        self.history: list[dict[str, Any]] = []
        """One record for each event, in order."""
        self.scripts: dict[str, list[Script]] = {}
        self.now = 0.0
        """The time in seconds; `advance` moves it. A tick takes no time."""
        self._attempts_seen: dict[str, list[int]] = {}
        self.hosts = {name: FakeHost(name, gpus, self) for name, gpus in machines.items()}

    def __getitem__(self, name: str) -> FakeHost:
        return self.hosts[name]

    def __iter__(self) -> Iterator[FakeHost]:
        return iter(self.hosts.values())

    def script(self, job: str, epoch: int) -> Script:
        """The attempt's script: the n-th epoch of a job that was ever launched gets its n-th script."""
        epochs = self._attempts_seen.setdefault(job, [])
        if epoch not in epochs:
            epochs.append(epoch)
        scripts = self.scripts.get(job) or [Script()]
        return scripts[min(epochs.index(epoch), len(scripts) - 1)]

    def tick(self) -> None:
        """Every command does one unit of work."""
        for host in self:
            host.tick()
        self.stir()

    def advance(self, seconds: float) -> None:
        """Let time pass; commands without contact for longer than their deadman are ended."""
        self.now += seconds
        for host in self:
            host.strike()
        self.stir()

    def stir(self) -> None:
        """Wake everyone who waits for a change."""
        for host in self:
            host.wake()

    def record(self, what: str, **facts: Any) -> None:
        """Append an event to the history; its index is its time."""
        self.history.append({"at": len(self.history), "what": what, **facts})

    def running(self) -> list[tuple[str, int]]:
        """Job and epoch of every command that is alive."""
        return [(f.job, f.epoch) for host in self for f in host.folders.values() if f.process]


class FakeHost:
    """One machine as its runner sees it."""

    def __init__(self, name: str, gpus: Sequence[str], rack: FakeHosts) -> None:
        self.name = name
        self.gpus = list(gpus)
        """UUIDs of the GPUs that its driver shows."""
        self.foreign: set[str] = set()
        """GPUs that are used by others."""
        self.folders: dict[str, _Folder] = {}
        self.highest: dict[str, int] = {}
        self.forgotten: set[str] = set()
        self.blobs: dict[str, bytes] = {}
        self.boots = 1
        self.place = f"root-of-{name}"
        """The name of its root folder. Under another name it knows no attempts of this one."""
        self.powered = True
        self.connected = True
        self.calls: list[Request] = []
        """All requests that arrived."""
        self.launches: list[Mapping[str, Any]] = []
        self._rack = rack
        self.refuses: str | None = None
        """Code with which it refuses every launch."""
        self._faults: list[tuple[str, Fault]] = []
        self._late: list[Request] = []
        self._raw = {"log": self._log, "read": self._read, "gather": self._gather}
        self._plain: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "hello": lambda _: self._hello(),
            "observe": lambda _: self._observe(),
            "missing": lambda b: {"missing": [s for s in b["sha256"] if s not in self.blobs]},
            "launch": self._launch,
            "void": lambda b: self._void(b["job"], b["epoch"]),
            "status": lambda b: self._status(b["job"], b["epoch"]),
            "touch": self._touched,
            "kill": lambda b: self._kill(b["job"], b["epoch"]),
            "manifest": self._manifest,
            "release": self._release,
            "forget": lambda b: self._forget(b["job"], b["epoch"]),
            "sweep": lambda _: {"removed": 0},
        }
        self._news = asyncio.Event()

    # What is done to it

    @property
    def boot_id(self) -> str:
        """The boot id, a new one after each boot."""
        return f"{self.name}-boot-{self.boots}"

    def fail(self, verb: str, fault: Fault, times: int = 1) -> None:
        """Apply the fault to the next `times` calls of this verb."""
        self._faults += [(verb, fault)] * times

    def faultless(self) -> None:
        """Remove all planned faults."""
        self._faults.clear()

    def cut(self) -> None:
        """Cut the connection; jobs continue."""
        self.connected = False
        self._rack.record("cut", vm=self.name)
        self.wake()

    def heal(self) -> None:
        """Make the machine reachable again."""
        self.connected = True
        self._rack.record("heal", vm=self.name)
        self.wake()

    def power_off(self) -> None:
        """Kill all processes without any exit record."""
        self._rack.record("power_off", vm=self.name)
        self.powered = False
        for folder in self.folders.values():
            folder.process, folder.supervisor, folder.leaked = None, False, False
        self.wake()

    def boot(self) -> None:
        """Boot the machine again, with its disk."""
        self.boots += 1
        self.powered = True
        self._rack.record("boot", vm=self.name)
        self.wake()

    def kill_supervisor(self, job: str, epoch: int, *, child_too: bool = False) -> None:
        """Kill the supervisor. The command continues without it, unless `child_too`."""
        folder = self.folders[f"{job}.{epoch}"]
        folder.supervisor = False
        self._rack.record("supervisor_killed", **self._who(folder))
        if child_too and folder.process:
            folder.process = None
            self._record_stop(folder, None, "killed")
        self.wake()

    def clean_up(self) -> None:
        """End the processes that were left behind."""
        for folder in self.folders.values():
            folder.leaked = False
        self.wake()

    async def deliver(self) -> int:
        """Deliver the delayed requests; returns their number."""
        late, self._late = self._late, []
        for request in late:
            try:
                self.perform(request)
            except RunnerRefused:
                continue  # no caller is left to be told
        self.wake()
        return len(late)

    # Work

    def tick(self) -> None:
        """Let commands work, and end those that have finished or were told to stop."""
        for folder in list(self.folders.values()):
            process = folder.process
            if process is None:
                continue
            process.left -= 1
            self._rack.record("step", **self._who(folder))
            if process.left <= 0:
                self._finish(folder, process, process.script.code, process.script.signal)
            elif process.ending is not None:
                process.ending -= 1
                if process.ending <= 0:
                    self._finish(
                        folder, process, None, 15 if not process.script.ignores_term else 9
                    )

    def strike(self) -> None:
        """End the attempts whose deadman has expired."""
        for folder in self.folders.values():
            process = folder.process
            if process is None or folder.deadman is None or not folder.supervisor:
                continue
            if self._rack.now - folder.contact > folder.deadman:
                process.why = "deadman"
                self._finish(folder, process, None, 15)

    def _finish(
        self, folder: _Folder, process: _Process, code: int | None, signal: int | None
    ) -> None:
        by_itself = process.left <= 0
        folder.process = None
        script = process.script
        if by_itself:
            folder.leaked = script.leaks
            folder.artefacts.update(script.files)
            folder.log += script.tail.encode()
        why = "exited" if by_itself else process.why
        self._record_stop(folder, code if signal is None else -signal, why)
        if not folder.supervisor:
            return  # no supervisor was left to write it down
        folder.supervisor = False
        self._write_exit(
            folder, None if signal is not None else code, signal, why,
            oom_kill=script.oom_kill if by_itself else 0,
        )  # fmt: skip

    def _write_exit(
        self, folder: _Folder, code: int | None, signal: int | None, why: str, oom_kill: int = 0
    ) -> None:
        folder.exit = {
            "code": code,
            "signal": signal,
            "reason": why,
            "message": None,
            "oom_kill": oom_kill,
            "finished_at": float(len(self._rack.history)),
            "tail": folder.log[-4000:].decode("utf-8", "replace"),
            "gpus": len(folder.gpus),
        }

    def _who(self, folder: _Folder) -> dict[str, Any]:
        return {
            "job": folder.job,
            "epoch": folder.epoch,
            "rank": folder.rank,
            "vm": self.name,
            "gpus": list(folder.gpus),
            "share_mb": folder.share_mb,
            "members": folder.members,
        }

    def _record_stop(self, folder: _Folder, code: int | None, why: str) -> None:
        self._rack.record("stop", **self._who(folder), code=code, why=why)

    def wake(self) -> None:
        """Wake the callers that wait for a change."""
        self._news.set()

    # The port

    async def call(self, request: Request, *, timeout: float) -> RunnerResponse:
        """See `Host.call`."""
        await asyncio.sleep(0)
        if not (self.powered and self.connected):
            raise HostUnreachable(f"{self.name}: no connection")
        await self._go_wrong(request)
        if request.verb == "wait":
            return RunnerResponse(await self._wait(request.body, timeout))
        answer = self.perform(request)
        self.wake()
        await asyncio.sleep(0)
        if not (self.powered and self.connected):
            raise OutcomeUnknown(f"{self.name}: cut off before the answer")
        return answer

    async def _go_wrong(self, request: Request) -> None:
        """Apply the fault planned for this call, if any."""
        match self._next_fault(request.verb):
            case Fault.UNREACHABLE:
                raise HostUnreachable(f"{self.name}: no connection")
            case Fault.REQUEST_LOST:
                raise OutcomeUnknown(f"{self.name}: cut off while {request.verb} was sent")
            case Fault.ANSWER_LOST:
                self.perform(request)
                self.wake()
                raise OutcomeUnknown(f"{self.name}: cut off before the answer")
            case Fault.LATE:
                self._late.append(request)
                raise OutcomeUnknown(f"{self.name}: no answer in time")
            case Fault.NEVER:
                await asyncio.Event().wait()
            case Fault.REFUSED:
                raise RunnerRefused("disk_full", "no space left on device")
            case None:
                return

    async def close(self) -> None:
        """There is nothing to close."""

    def _next_fault(self, verb: str) -> Fault | None:
        for index, (name, fault) in enumerate(self._faults):
            if name == verb:
                del self._faults[index]
                return fault
        return None

    def perform(self, request: Request) -> RunnerResponse:
        """Perform the request completely, without any fault."""
        self.calls.append(request)
        body = request.body
        if request.verb == "put":
            return self._put(body, request.payload)
        if request.verb in self._raw:
            return self._raw[request.verb](body)
        if request.verb in self._plain:
            return RunnerResponse(self._plain[request.verb](body))
        raise RunnerRefused("unknown_verb", request.verb)

    # Verbs

    def _hello(self) -> dict[str, Any]:
        return {
            "protocols": [PROTOCOL],
            "protocol": PROTOCOL,
            "python": "3.11.0",
            "hostname": self.name,
            "boot_id": self.boot_id,
            "home": "/home/fake",
            "root": "/home/fake/groupwise-fleet",
            "cpus": 8,
            "ram_mb": 64_000,
            "disk_free_mb": 100_000,
            "cgroup": {"v2": False, "memory": False},
            "methods": ["fork"],
            "time": self._rack.now,
        }

    def _observe(self) -> dict[str, Any]:
        return self._hello() | {
            "load": [0.0],
            "ram_free_mb": 60_000,
            "gpus": [
                {
                    "index": index,
                    "uuid": uuid,
                    "model": "Fake 80GB",
                    "memory_mb": 81_920,
                    "memory_used_mb": 40_000 if uuid in self.foreign else 0,
                    "utilisation": 0,
                    "temperature": 30,
                    "mig": False,
                    "problems": [],
                }
                for index, uuid in enumerate(self.gpus)
            ],
            "apps": [
                {"uuid": uuid, "pid": 1, "memory_mb": 40_000, "attempt": None}
                for uuid in sorted(self.foreign)
            ],
            "probe": {"status": "ok", "apps": "ok", "lines_not_read": [], "exit": 0},
            "attempts": [self._state(folder) for folder in self.folders.values()],
            "quarantined": [],
        }

    def _put(self, body: Mapping[str, Any], payload: bytes) -> RunnerResponse:
        position = 0
        for sha256, size in body["blobs"]:
            content = payload[position : position + size]
            position += size
            if hashlib.sha256(content).hexdigest() != sha256:
                raise RunnerRefused("bad_blob", f"{sha256} is not what came")
            self.blobs[sha256] = content
        return RunnerResponse({"stored": len(body["blobs"])})

    def _launch(self, body: Mapping[str, Any]) -> dict[str, Any]:
        job, epoch = body["job"], body["epoch"]
        key = f"{job}.{epoch}"
        if key in self.folders:
            return self._state(self.folders[key])
        if key in self.forgotten:
            return self._nothing(job, epoch, "voided")
        resume: Mapping[str, Any] = body["resume"]["manifest"] if body.get("resume") else {}
        needed = {**body["spec"]["files"], **resume}.values()
        missing = [s for s, _, _ in needed if s not in self.blobs]
        if missing:
            raise RunnerRefused("missing_blobs", ", ".join(missing))
        self.launches.append(body)
        if epoch < self.highest.get(job, 0):
            return self._nothing(job, epoch, "refused") | {
                "refused": {
                    "code": "lower_epoch",
                    "message": f"{self.highest[job]} has been here",
                    "highest": self.highest[job],
                }
            }
        heard = self._rack.now if body.get("clock") is None else min(self._rack.now, body["clock"])
        folder = _Folder(
            job, epoch, body["rank"], body["members"], boot_id=self.boot_id, gpus=tuple(body["gpus"]),
            share_mb=body.get("share_mb"), slot=body.get("slot"), deadman=body.get("deadman"), contact=heard,
        )  # fmt: skip
        self.folders[key] = folder
        self.highest[job] = epoch
        script = self._rack.script(job, epoch)
        if why := self._refusal(folder, script):
            folder.state, folder.refused = "refused", {"code": why[0], "message": why[1]}
            self._rack.record("refused", **self._who(folder), code=why[0])
            return self._state(folder)
        if folder.deadman is not None and self._rack.now - heard >= folder.deadman:
            self._write_exit(folder, None, None, "deadman")  # it arrived too late to begin
            return self._state(folder)
        folder.supervisor = True
        folder.begun, folder.checkpoints = True, script.checkpoints
        folder.process = _Process(script, script.ticks)
        self._rack.record("start", **self._who(folder))
        return self._state(folder)

    def _refusal(self, folder: _Folder, script: Script) -> tuple[str, str] | None:
        if code := script.refusal or self.refuses:
            return code, "as scripted"
        for uuid in folder.gpus:
            if uuid not in self.gpus:
                return "gpu_missing", f"{uuid} is not here"
            if uuid in self.foreign:
                return "foreign_busy", f"{uuid} is used by pid 1"
            if holder := self._holder(uuid, folder):
                return "gpu_busy", f"{uuid} is held by {holder.key}"
        for other in self.folders.values():
            if other is not folder and other.holds and other.slot == folder.slot is not None:
                return "gpu_busy", f"slot {folder.slot} is held by {other.key}"
        return None

    def _holder(self, uuid: str, asking: _Folder) -> _Folder | None:
        """The folder that holds this GPU's lock, unless both may share it."""
        for other in self.folders.values():
            if other is asking or not other.holds or uuid not in other.gpus:
                continue
            if other.share_mb is None or asking.share_mb is None:
                return other
        return None

    def _void(self, job: str, epoch: int) -> dict[str, Any]:
        key = f"{job}.{epoch}"
        if key not in self.folders:
            self.folders[key] = _Folder(job, epoch, state="voided", boot_id=self.boot_id)
            self.highest[job] = max(epoch, self.highest.get(job, 0))
        return self._state(self.folders[key])

    def _status(self, job: str, epoch: int) -> dict[str, Any]:
        folder = self.folders.get(f"{job}.{epoch}")
        if folder is None:
            gone = f"{job}.{epoch}" in self.forgotten
            return self._nothing(job, epoch, "voided" if gone else "absent")
        return self._state(folder)

    def _touch(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self.folders:
                self.folders[key].contact = self._rack.now

    def _touched(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._touch(list(body["attempts"]))
        return {"touched": list(body["attempts"])}

    async def _wait(self, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        known: Mapping[str, Mapping[str, Any]] = body["known"]
        self._touch(list(known))
        limit = min(body.get("timeout", timeout), timeout)
        try:
            async with asyncio.timeout(limit):
                while True:
                    self._news = asyncio.Event()
                    if not (self.powered and self.connected):
                        raise OutcomeUnknown(f"{self.name}: cut off while waiting")
                    found = [self._state_of(key) for key in known]
                    if changed := [s for s in found if self._differs(s, known)]:
                        return {"attempts": changed, "boot_id": self.boot_id}
                    await self._news.wait()
        except TimeoutError:
            return {"attempts": [], "boot_id": self.boot_id}

    def _state_of(self, key: str) -> dict[str, Any]:
        job, _, epoch = key.rpartition(".")
        return self._status(job, int(epoch))

    @staticmethod
    def _differs(state: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> bool:
        before = known[f"{state['job']}.{state['epoch']}"]
        return any(
            name in before and before[name] != state[name]
            for name in ("state", "log_size", "checkpoints", "step")
        )

    def _kill(self, job: str, epoch: int) -> dict[str, Any]:
        folder = self.folders.get(f"{job}.{epoch}")
        if folder is None:
            return self._nothing(job, epoch, "absent")
        process = folder.process
        if process is not None and not folder.supervisor:
            folder.process = None
            self._record_stop(folder, -9, "cancelled")
        elif process is not None and process.ending is None:
            process.ending = GRACE_TICKS if process.script.ignores_term else 1
            process.why = "cancelled"
        folder.leaked = False
        return self._state(folder)

    def _log(self, body: Mapping[str, Any]) -> RunnerResponse:
        folder = self._folder(body)
        begin = body["offset"]
        return RunnerResponse({"size": len(folder.log)}, folder.log[begin : begin + body["limit"]])

    def _manifest(self, body: Mapping[str, Any]) -> dict[str, Any]:
        folder = self._folder(body)
        files = {
            path: [hashlib.sha256(content).hexdigest(), 0o644, len(content)]
            for path, content in folder.artefacts.items()
        }
        return {"files": files, "refused": [], "checkpoints": []}

    def _read(self, body: Mapping[str, Any]) -> RunnerResponse:
        content = self._folder(body).artefacts.get(body["path"])
        if content is None:
            raise RunnerRefused("not_found", body["path"])
        begin = body["offset"]
        return RunnerResponse({"size": len(content)}, content[begin : begin + body["limit"]])

    def _gather(self, body: Mapping[str, Any]) -> RunnerResponse:
        artefacts = self._folder(body).artefacts
        found = [(artefacts.get(path), sha256) for path, sha256, _ in body["files"]]
        whole = [
            data is not None and hashlib.sha256(data).hexdigest() == sha256
            for data, sha256 in found
        ]
        came = [data or b"" for n, (data, _) in enumerate(found) if whole[n]]
        return RunnerResponse({"whole": whole}, b"".join(came))

    def _release(self, body: Mapping[str, Any]) -> dict[str, Any]:
        folder = self.folders.get(f"{body['job']}.{body['epoch']}")
        holders: list[dict[str, Any]] = []
        if folder and (folder.process or folder.leaked):
            holders.append({"what": "process", "detail": f"{folder.key} runs", "pid": 1})
        if folder and folder.holds:
            holders += [
                {"what": "lock", "detail": f"held by {folder.key}", "pid": None}
                for _ in body["gpus"]
            ]
        return {"clean": not holders, "holders": holders}

    def _forget(self, job: str, epoch: int) -> dict[str, Any]:
        key = f"{job}.{epoch}"
        folder = self.folders.get(key)
        if folder and folder.holds:
            raise RunnerRefused("busy", f"{key} is alive")
        self.folders.pop(key, None)
        self.forgotten.add(key)
        return {}

    def _folder(self, body: Mapping[str, Any]) -> _Folder:
        folder = self.folders.get(f"{body['job']}.{body['epoch']}")
        if folder is None:
            raise RunnerRefused("not_found", f"{body['job']}.{body['epoch']} is not here")
        return folder

    # Answers

    def _aged(self, ended: dict[str, Any] | None) -> dict[str, Any] | None:
        if ended is None:
            return None
        return {**ended, "age": len(self._rack.history) - ended["finished_at"]}

    def _state(self, folder: _Folder) -> dict[str, Any]:
        return self._nothing(folder.job, folder.epoch, self._word(folder)) | {
            "rank": folder.rank,
            "boot_id": folder.boot_id,
            "same_boot": folder.boot_id == self.boot_id,
            "pid": 4242 if folder.begun else None,
            "start_ticks": folder.epoch,
            "method": "fork",
            "gpus": list(folder.gpus),
            "share_mb": folder.share_mb,
            "slot": folder.slot,
            "log_size": len(folder.log),
            "checkpoints": folder.checkpoints,
            "step": folder.step,
            "exit": self._aged(folder.exit),
            "refused": folder.refused,
            "survivors": int(folder.process is not None) if self._word(folder) == "lost" else None,
        }

    def _word(self, folder: _Folder) -> str:
        if folder.state != "claimed":
            return folder.state
        if folder.exit:
            return "exited"
        if folder.boot_id != self.boot_id:
            return "rebooted"
        if not folder.supervisor:
            return "lost"
        return "running" if folder.process else "claimed"

    def _nothing(self, job: str, epoch: int, state: str) -> dict[str, Any]:
        return {
            "job": job,
            "epoch": epoch,
            "rank": 0,
            "state": state,
            "boot_id": self.boot_id,
            "same_boot": True,
            "pid": None,
            "start_ticks": None,
            "method": None,
            "started_at": None,
            "gpus": [],
            "share_mb": None,
            "slot": None,
            "log_size": 0,
            "heartbeat_age": 0.0,
            "checkpoints": 0,
            "step": None,
            "exit": None,
            "refused": None,
            "survivors": None,
            "clock": self._rack.now,
            "place": self.place,
        }
