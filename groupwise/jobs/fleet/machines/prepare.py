"""`groupwise fleet vm prepare`: gives a machine a Python environment with groupwise in it.

    plan      here: the lock, the wheels, the interpreters to try; its hash names the environment
    provide   files that the machine lacks travel by hash, as those of jobs do
    launch    `builder.py` as the command of one attempt, which needs nobody from then on
    follow    its log is passed on while it works; a connection that is lost is made again
    take in   what it says of itself (`result.json`); whoever asked then writes the interpreter into the machine's row

The machine's runner is used, with a root of its own (`environments/builds` in the machine's folder): so the same guarantees hold as for
jobs, and yet what is built is no job, waits in no queue, and is no stranger to the dispatcher. Nothing that anybody typed becomes a word
of a shell, and secrets travel beside the spec.

Asked twice at once, the second follows the attempt of the first. Ended here by whatever means, the build goes on there; asked again, it is
followed from its first line, or found made. A build that was killed there leaves half an environment, which the next one removes.

Whoever prunes spares what was made or found within the hour before they read which environments the rows name. So one that is taken in is
not removed before its row names it: where that comes late, as after a night in which nothing here ran, it is looked at once more.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.core.errors import RunError, UsageError
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.machines.builder import SPARED
from groupwise.jobs.fleet.machines.plans import DIGITS, Plan, as_bytes, sent_files, with_builder
from groupwise.jobs.fleet.machines.reaching import LOCAL, host_of
from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.fleet.store.tables import VM, Attempt, Member
from groupwise.jobs.hosts.answers import Hello, MemberState, RunnerState
from groupwise.jobs.hosts.driver import Known, Launch, Runner
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.port import (
    Host,
    HostError,
    HostKeyError,
    HostUnreachable,
    OutcomeUnknown,
    RunnerRefused,
)
from groupwise.jobs.hosts.spec import JobSpec, Limits, Manifest

ENVIRONMENTS = "environments"
BUILDS = "builds"
PREPARED = re.compile(rf".*/{ENVIRONMENTS}/([0-9a-f]{{{DIGITS}}})/bin/python")
NO_PROBE = ("true",)
"""Nothing is asked of GPUs."""
ALIVE = frozenset({RunnerState.CLAIMED, RunnerState.RUNNING})
WAIT = 20.0
"""Seconds for one look at a build that says nothing."""
AGAIN = 2.0
"""Seconds before a lost connection is made again."""
CONNECTION_TIMEOUT = 600.0
"""Seconds without any connection after which following is given up."""
KEPT_SECONDS = 600.0
"""How long the folder of a build stays at least, for others that follow it."""
LAUNCHES = 5
"""Others may begin builds of the same environment meanwhile."""
TAKEN_IN = SPARED / 2
"""Seconds after which an environment that was made is looked at once more before it is taken in."""
RESULT_BYTES = 1 << 16

Tell = Callable[[str], None]


class PrepareError(RunError):
    """A machine could not be prepared; the message says what to do. What it had is as it was."""

    code = "vm_not_prepared"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The environment that a machine has now."""

    python: str
    """The interpreter, an absolute path there."""
    version: str
    """Version of Python."""
    groupwise: str
    made: bool
    """False: it was there before."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """Names of environments that were not to be kept."""

    removed: list[str]
    used: list[str]
    """Names of those that processes there use."""
    recent: list[str]
    """Made or found a moment ago: another caller may be about to name them."""


def require_usable(machine: Machine) -> None:
    """Raises UsageError if nothing can be done with it."""
    if machine.lost:
        raise UsageError(
            f"{machine.vm_id} was declared lost; it can be prepared once it has answered again."
        )
    if machine.transport != LOCAL and machine.host_key is None:
        raise UsageError(
            f"{machine.vm_id} is not trusted yet, and nothing but its key is asked of it: `groupwise fleet vm trust {machine.vm_id}`."
        )


# ---------------------------------------------------------------------------------------------------------------------------------------
# Preparing one machine
# ---------------------------------------------------------------------------------------------------------------------------------------


async def prepare(
    machine: Machine, plan: Plan, store: BlobStore, tell: Tell, host: Host | None = None
) -> Prepared:
    """Make the environment there, or find it made. Raises PrepareError, UsageError. `host`: the machine, where it is reached already."""
    require_usable(machine)
    reached = host or host_of(machine)
    try:
        return await _Build(machine, plan, store, tell, reached).run()
    except HostKeyError as error:
        raise PrepareError(
            f"{machine.vm_id}: {error}. Nothing is said to it; compare the key with the machine's own, then "
            f"`groupwise fleet vm trust {machine.vm_id}`."
        ) from None
    except RunnerRefused as refusal:
        full = "; its disk is full: make room there" if refusal.code == "disk_full" else ""
        raise PrepareError(
            f"{machine.vm_id}: the machine's runner will not: {refusal.message}{full}"
        ) from None
    except HostError as error:
        raise PrepareError(
            f"{machine.vm_id} cannot be asked: {error}. `groupwise fleet doctor --vm {machine.vm_id}` looks why."
        ) from None
    finally:
        if host is None:
            await reached.close()


async def prune(
    machine: Machine,
    keep: Callable[[], Awaitable[Sequence[str]]],
    store: BlobStore,
    host: Host | None = None,
) -> Pruned:
    """Remove the environments of a machine that nothing uses, but for those to keep, which are asked for once its time is known."""
    reached = host or host_of(machine)
    try:
        runner = builds_of(machine, reached)
        hello = await runner.hello()
        order = {
            "prune": True,
            "folder": _environments(hello),
            "asked_at": _now_of(hello),
            "keep": list(await keep()),
        }
        files = await asyncio.to_thread(with_builder, store, {"order.json": as_bytes(order)})
        spec = _spec(files, JobSpec(("true",)))
        task = _Task(runner, store, f"prune-{machine.vm_id}"[:60].replace(".", "-"), lambda _: None)
        said = await task.run(spec, files, {}, hello)
    except HostError as error:
        raise PrepareError(f"{machine.vm_id} cannot be asked: {error}") from None
    finally:
        if host is None:
            await reached.close()
    if "problem" in said:
        raise PrepareError(f"{machine.vm_id}: nothing more is removed: {said['problem']}")
    return Pruned(list(said["removed"]), list(said["used"]), list(said["recent"]))


def beginning(session: Session, vm_id: str) -> list[int]:
    """Attempts of which the machine may be told with the interpreter that its row had a moment ago."""
    query = (
        select(Attempt.epoch)
        .join(Member, Member.epoch == Attempt.epoch)
        .where(
            Member.vm_id == vm_id,
            Attempt.state.in_([AttemptState.RESERVED, AttemptState.LAUNCHING]),
        )
        .order_by(Attempt.epoch)
    )
    return list(session.scalars(query).all())


def named(session: Session) -> list[str]:
    """Environments that are named by a row of any machine: two rows may be one machine."""
    found = (PREPARED.fullmatch(python) for python in session.scalars(select(VM.python)))
    return sorted({each[1] for each in found if each is not None})


def builds_of(machine: Machine, host: Host) -> Runner:
    """Its runner, in a root of its own. The programs that it starts are found on the machine's own PATH."""
    root = posixpath.join(machine.workdir, ENVIRONMENTS, BUILDS)
    return Runner(host, root=root, python="python3")


def _now_of(hello: Hello) -> float:
    """The machine's time by its own clock, or ours if it does not report one."""
    return time.time() if hello.time is None else hello.time


def _environments(hello: Hello) -> str:
    """The folder of all environments, as an absolute path of the machine."""
    return posixpath.dirname(hello.root)


class _Build:
    """One environment on one machine."""

    def __init__(
        self, machine: Machine, plan: Plan, store: BlobStore, tell: Tell, host: Host
    ) -> None:
        self.machine, self.plan, self.store, self.tell = machine, plan, store, tell
        self.runner = builds_of(machine, host)

    async def run(self) -> Prepared:
        """Run the whole preparation, and return the interpreter."""
        hello = await self.runner.hello()
        while True:
            said = await self._said(hello)
            hello = await self.runner.hello()
            if _now_of(hello) - said["at"] <= TAKEN_IN:
                break
            self.tell("that was a while ago; looking whether it is still there")
        return Prepared(
            str(said["python"]), str(said["version"]), str(said["groupwise"]), bool(said["made"])
        )

    async def _said(self, hello: Hello) -> dict[str, Any]:
        """What the builder says of it; PrepareError where it could not be made."""
        plan = self.plan
        files = await asyncio.to_thread(sent_files, plan, _environments(hello), self.store)
        limits = Limits(time_seconds=plan.time_seconds, grace_seconds=5.0)
        about = JobSpec(
            ("true",), environment=plan.environment, secrets=tuple(plan.secrets), limits=limits
        )
        task = _Task(self.runner, self.store, plan.job, self.tell)
        said = await task.run(_spec(files, about), files, plan.secrets, hello)
        if "problem" in said:
            raise PrepareError(f"{self.machine.vm_id} is not prepared: {said['problem']}")
        return said


def _spec(files: Manifest, about: JobSpec) -> JobSpec:
    return JobSpec(
        ("python3", "-I", "builder.py"),
        environment=about.environment,
        files=files,
        secrets=about.secrets,
        artefacts=(),
        checkpoints=(),
        limits=about.limits,
    )


# ---------------------------------------------------------------------------------------------------------------------------------------
# One attempt, from its launch to its result
# ---------------------------------------------------------------------------------------------------------------------------------------


class _Task:
    """A command on a machine that is followed to its end. A live one of the same name is followed, not begun again."""

    def __init__(self, runner: Runner, store: BlobStore, job: str, tell: Tell) -> None:
        self.runner, self.store, self.job, self.tell = runner, store, job, tell

    async def run(
        self, spec: JobSpec, files: Manifest, secrets: Mapping[str, str], hello: Hello
    ) -> dict[str, Any]:
        """Run or follow the build, and return the builder's result."""
        known = await self._known()
        state = _live(known)
        if state is not None:
            self.tell("it is being made already, by another `vm prepare`; what follows is its log")
        else:
            # A launch under the epoch of one that was there, ended or not, is none.
            epoch = max([int(_now_of(hello)), *(each.epoch + 1 for each in known)])
            state = await self._begun(spec, files, secrets, epoch)
        state = await _Follower(self.runner, self.tell).follow(state)
        said = await self._result(state)
        await self._tidy(state, files)
        return said

    async def _known(self) -> list[MemberState]:
        """All of that name that the machine has a folder of."""
        seen = await self.runner.observe(probe=NO_PROBE)
        return [state for state in seen.attempts if state.job == self.job]

    async def _begun(
        self, spec: JobSpec, files: Manifest, secrets: Mapping[str, str], epoch: int
    ) -> MemberState:
        """Launch it, or find it launched by another caller that was quicker."""
        for turn in range(LAUNCHES):
            sent = await self.runner.provide(self.store, files)
            if sent:
                self.tell(f"sent {sent / 1e6:.1f} MB")
            state = await self._launched(Launch(self.job, epoch, spec, secrets=secrets))
            if state is None:
                continue
            if state.refused is None:
                return state
            if state.refused.code != "lower_epoch":
                raise PrepareError(f"the machine's runner will not: {state.refused.message}")
            live = _live(await self._known())
            if live is not None:
                return live
            epoch += (
                1 << 6 * turn
            )  # a build has just ended, or its clock was set back, nobody knows how far
        raise PrepareError("others begin builds there again and again; try again")

    async def _launched(self, launch: Launch) -> MemberState | None:
        """None: some of its files have just been collected."""
        began = time.monotonic()
        while True:
            try:
                return await self.runner.launch(launch)
            except RunnerRefused as refusal:
                if refusal.code == "missing_blobs":
                    return None
                raise
            except OutcomeUnknown:
                # Of one epoch there is never more than one; asked again, it says what became of it.
                if time.monotonic() - began > CONNECTION_TIMEOUT:
                    raise
                await asyncio.sleep(AGAIN)

    async def _result(self, state: MemberState) -> dict[str, Any]:
        """Its own words; the runner's, where it could say none."""
        try:
            data = await self.runner.read(state.job, state.epoch, "result.json", limit=RESULT_BYTES)
            return dict(json.loads(data))
        except (RunnerRefused, ValueError):
            return {"problem": _why(state)}

    async def _tidy(self, own: MemberState, files: Manifest) -> None:
        """Folders of earlier builds go, and files that only they needed. That of this one stays: others may be following it."""
        try:
            for state in (await self.runner.observe(probe=NO_PROBE)).attempts:
                if _is_old(state, own):
                    await self.runner.forget(state.job, state.epoch)
            await self.runner.sweep([entry.sha256 for entry in files.values()])
        except HostError:
            pass  # what is left takes room and does no harm; the next build looks again


def _live(states: Sequence[MemberState]) -> MemberState | None:
    alive = [state for state in states if state.state in ALIVE]
    return alive[-1] if alive else None


def _is_old(state: MemberState, own: MemberState) -> bool:
    """Ended long ago, by the clock of the machine."""
    if (state.job, state.epoch) == (own.job, own.epoch) or state.state in ALIVE:
        return False
    now = own.exit.finished_at if own.exit is not None else None
    then = state.exit.finished_at if state.exit is not None else None
    return now is None or then is None or now - then > KEPT_SECONDS


def _why(state: MemberState) -> str:
    """How it ended, where it could not say so itself."""
    ended = state.exit
    if state.state == RunnerState.REBOOTED:
        return "the machine was started anew meanwhile; try again"
    if ended is None:
        return f"what watched over it on the machine was killed ({state.state}); try again"
    if ended.reason == "time_limit":
        return f"{ended.message}; --time-limit allows more, and what was fetched is in pip's cache"
    if ended.oom_kill or ended.signal == 9:
        return "it was killed, as the kernel does where memory ends; try again"
    last = [line for line in ended.tail.splitlines() if line.strip()][-3:]
    return ended.message or " / ".join(last) or f"exit code {ended.code}"


class _Follower:
    """Passes on a log while it is written."""

    def __init__(self, runner: Runner, tell: Tell) -> None:
        self.runner, self.tell = runner, tell
        self._offset = 0
        self._rest = b""
        self._silent_since: float | None = None

    async def follow(self, state: MemberState) -> MemberState:
        """Until it has ended. Raises HostError where the machine stays silent for CONNECTION_TIMEOUT."""
        while True:
            try:
                await self._read(state)
                if state.state not in ALIVE:
                    return state
                known = Known(state.state, self._offset, clock=state.clock)
                for each in await self.runner.wait({(state.job, state.epoch): known}, seconds=WAIT):
                    state = each
                self._heard()
            except (HostUnreachable, OutcomeUnknown) as error:
                await self._silence(error)

    async def _read(self, state: MemberState) -> None:
        """All that is there. Who has ended writes no more, so that what is read after that is all."""
        while True:
            part = await self.runner.log(state.job, state.epoch, self._offset)
            self._heard()
            if not part.data:
                break
            self._offset += len(part.data)
            *lines, self._rest = (self._rest + part.data).split(b"\n")
            for line in lines:
                self.tell(line.decode("utf-8", "replace"))
        if state.state not in ALIVE and self._rest:
            self.tell(self._rest.decode("utf-8", "replace"))

    def _heard(self) -> None:
        if self._silent_since is not None:
            self.tell("the connection is back")
        self._silent_since = None

    async def _silence(self, error: HostError) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self.tell(
                f"the connection is lost ({error}); it goes on there, and is looked for again"
            )
        if now - self._silent_since > CONNECTION_TIMEOUT:
            raise error
        await asyncio.sleep(AGAIN)
