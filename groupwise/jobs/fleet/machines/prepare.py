"""`groupwise fleet vm prepare`: gives a machine a Python environment with groupwise in it.

    plan      here: the lock, the wheels, the interpreters to try; its hash names the environment
    provide   files that the machine lacks are sent by hash, as those of jobs are
    launch    `builder.py` as the command of one attempt, which runs independently from then on
    follow    the build's log is printed while it works; a lost connection is made again
    take in   the builder's `result.json` is read; the caller then writes the interpreter into the machine's row

The build uses the machine's runner with a separate root (`environments/builds` in the machine's folder). It therefore has the
guarantees of jobs, and yet is not a job, waits in no queue, and is not taken for a foreign process by the dispatcher. User input never
becomes part of a shell command, and secrets are sent separately from the spec.

A second `prepare` at the same time follows the attempt of the first. If the command ends here, the build continues there; the next
`prepare` follows it from its first line, or finds it made. A build that was killed there leaves half an environment, which the next one
removes.

Pruning spares environments that were made or found within the last hour, before it reads which environments the rows name. So an
environment is not removed before its row names it. If that takes longer, such as after a night in which nothing ran here, the
environment is checked once more.
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
from groupwise.core.retry import Backoff, ReportedRetry, Retry
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.machines.builder import PRUNE_AFTER_SECONDS
from groupwise.jobs.fleet.machines.connections import LOCAL, host_of
from groupwise.jobs.fleet.machines.plans import DIGITS, Plan, as_bytes, sent_files, with_builder
from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.fleet.store.tables import VM, Attempt, Member
from groupwise.jobs.hosts.answers import SUPERVISED, Hello, MemberState, RunnerState
from groupwise.jobs.hosts.driver import KnownState, Launch, Runner
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.host import (
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
"""Probe command that reads no GPUs."""
BUILDER = ("python3", "-I", "builder.py")
WAIT = 20.0
"""Seconds to wait for news of a silent build before asking again."""
AGAIN = 2.0
"""Seconds before a lost connection is made again."""
CONNECTION_TIMEOUT = 600.0
"""Seconds without any connection after which following is given up."""
KEPT_SECONDS = 600.0
"""Minimum time in seconds that the folder of a build stays, for other callers that follow it."""
LAUNCHES = 5
"""Launches to try: other callers may start builds of the same environment meanwhile."""
TAKEN_IN = PRUNE_AFTER_SECONDS / 2
"""Seconds after which a new environment is checked once more before it is taken in."""
RESULT_BYTES = 1 << 16

Tell = Callable[[str], None]


class PrepareError(RunError):
    """A machine could not be prepared; the message contains the remedy. Its earlier environments are unchanged."""

    code = "vm_not_prepared"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The environment that a machine has after `prepare`."""

    python: str
    """The interpreter, an absolute path there."""
    version: str
    """Version of Python."""
    groupwise: str
    made: bool
    """True if it was made now, False if it existed before."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """Names of the environments that were not to be kept, by the result."""

    removed: list[str]
    used: list[str]
    """Left alone because processes there use them."""
    recent: list[str]
    """Left alone because they were just made or found: another caller may be about to name them."""


def require_usable(machine: Machine) -> None:
    """Raise UsageError if the machine is lost or not trusted."""
    if machine.lost:
        raise UsageError(
            f"{machine.vm_id} was declared lost; it can be prepared once it has answered again."
        )
    if machine.transport != LOCAL and machine.host_key is None:
        raise UsageError(
            f"{machine.vm_id} is not trusted yet, so only its key is read: `groupwise fleet vm trust {machine.vm_id}`."
        )


# ---------------------------------------------------------------------------------------------------------------------------------------
# Preparing one machine
# ---------------------------------------------------------------------------------------------------------------------------------------


async def prepare(
    machine: Machine, plan: Plan, store: BlobStore, tell: Tell, host: Host | None = None
) -> Prepared:
    """Make the environment there, unless it exists. Raises PrepareError, UsageError. `host`: an open connection to the machine."""
    require_usable(machine)
    connection = host or host_of(machine)
    try:
        return await _build_environment(machine, plan, store, tell, connection)
    except HostKeyError as error:
        raise PrepareError(
            f"{machine.vm_id}: {error}. Nothing was sent to it; compare the key with the machine's own, then "
            f"`groupwise fleet vm trust {machine.vm_id}`."
        ) from None
    except RunnerRefused as refusal:
        advice = "; its disk is full: make room there" if refusal.code == "disk_full" else ""
        raise PrepareError(
            f"{machine.vm_id}: the machine's runner refuses: {refusal.message}{advice}"
        ) from None
    except HostError as error:
        raise PrepareError(
            f"{machine.vm_id} cannot be asked: {error}. `groupwise fleet doctor --vm {machine.vm_id}` finds out why."
        ) from None
    finally:
        if host is None:
            await connection.close()


async def prune(
    machine: Machine,
    keep: Callable[[], Awaitable[Sequence[str]]],
    store: BlobStore,
    host: Host | None = None,
) -> Pruned:
    """Remove a machine's unused environments, except those to keep; `keep` is called after the machine's time was read."""
    connection = host or host_of(machine)
    try:
        runner = builds_of(machine, connection)
        hello = await runner.hello()
        order = {
            "prune": True,
            "folder": posixpath.dirname(hello.root),
            "asked_at": _machine_time(hello),
            "keep": list(await keep()),
        }
        files = await asyncio.to_thread(with_builder, store, {"order.json": as_bytes(order)})
        spec = JobSpec(BUILDER, files=files, artefacts=(), checkpoints=())
        job = f"prune-{machine.vm_id}"[:60].replace(".", "-")
        result = await _BuildTask(runner, store, job, lambda _: None).run(spec, {}, hello)
    except HostError as error:
        raise PrepareError(f"{machine.vm_id} cannot be asked: {error}") from None
    finally:
        if host is None:
            await connection.close()
    if "problem" in result:
        raise PrepareError(f"{machine.vm_id}: nothing more is removed: {result['problem']}")
    return Pruned(list(result["removed"]), list(result["used"]), list(result["recent"]))


def starting_attempts(session: Session, vm_id: str) -> list[int]:
    """Attempts that may still be launched on the machine with the interpreter that its row named a moment ago."""
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


def named_environments(session: Session) -> list[str]:
    """Environments named by the row of any machine: two rows may be one machine."""
    matches = (PREPARED.fullmatch(python) for python in session.scalars(select(VM.python)))
    return sorted({match[1] for match in matches if match is not None})


def builds_of(machine: Machine, host: Host) -> Runner:
    """The machine's runner for builds, with a separate root. The programs that it starts are found on the machine's PATH."""
    root = posixpath.join(machine.workdir, ENVIRONMENTS, BUILDS)
    return Runner(host, root=root, python="python3")


def _machine_time(hello: Hello) -> float:
    """The machine's time by its own clock, or ours if it does not report one."""
    return time.time() if hello.time is None else hello.time


async def _build_environment(
    machine: Machine, plan: Plan, store: BlobStore, tell: Tell, host: Host
) -> Prepared:
    """Make the environment, unless it exists; repeat that if it took so long that the environment may have been pruned meanwhile."""
    runner = builds_of(machine, host)
    hello = await runner.hello()
    while True:
        files = await asyncio.to_thread(sent_files, plan, posixpath.dirname(hello.root), store)
        spec = JobSpec(
            BUILDER,
            environment=plan.environment,
            files=files,
            secrets=tuple(plan.secrets),
            artefacts=(),
            checkpoints=(),
            limits=Limits(time_seconds=plan.time_seconds, grace_seconds=5.0),
        )
        result = await _BuildTask(runner, store, plan.job, tell).run(spec, plan.secrets, hello)
        if "problem" in result:
            raise PrepareError(f"{machine.vm_id} is not prepared: {result['problem']}")
        hello = await runner.hello()
        if _machine_time(hello) - result["at"] <= TAKEN_IN:
            break
        tell("that was a while ago; looking whether it is still there")
    return Prepared(
        str(result["python"]),
        str(result["version"]),
        str(result["groupwise"]),
        bool(result["made"]),
    )


# ---------------------------------------------------------------------------------------------------------------------------------------
# One attempt, from its launch to its result
# ---------------------------------------------------------------------------------------------------------------------------------------


class _BuildTask:
    """A command on a machine, followed to its end. If one of the same name is running there, that one is followed instead."""

    def __init__(self, runner: Runner, store: BlobStore, job: str, tell: Tell) -> None:
        self.runner, self.store, self.job, self.tell = runner, store, job, tell

    async def run(self, spec: JobSpec, secrets: Mapping[str, str], hello: Hello) -> dict[str, Any]:
        """Run or follow the build. Returns the builder's `result.json`, or {"problem"} with the reason why there is none."""
        attempts = await self._attempts_there()
        state = _live_attempt(attempts)
        if state is not None:
            self.tell("it is being made already, by another `vm prepare`; what follows is its log")
        else:
            # The runner refuses an epoch that it has seen before, whether that attempt has ended or not.
            epoch = max([int(_machine_time(hello)), *(attempt.epoch + 1 for attempt in attempts)])
            state = await self._start_attempt(spec, secrets, epoch)
        state = await _Follower(self.runner, self.tell).follow(state)
        try:
            data = await self.runner.read(state.job, state.epoch, "result.json", limit=RESULT_BYTES)
            result = dict(json.loads(data))
        except (RunnerRefused, ValueError):
            result = {"problem": _failure_reason(state)}
        await self._remove_earlier_builds(state, spec.files)
        return result

    async def _attempts_there(self) -> list[MemberState]:
        """Attempts of this name that have a folder on the machine."""
        observation = await self.runner.observe(probe=NO_PROBE)
        return [state for state in observation.attempts if state.job == self.job]

    async def _start_attempt(
        self, spec: JobSpec, secrets: Mapping[str, str], epoch: int
    ) -> MemberState:
        """Launch the attempt, or return the state of one that another caller has launched first."""
        for round_number in range(LAUNCHES):
            sent_bytes = await self.runner.provide(self.store, spec.files)
            if sent_bytes:
                self.tell(f"sent {sent_bytes / 1e6:.1f} MB")
            state = await self._launch_attempt(Launch(self.job, epoch, spec, secrets=secrets))
            if state is None:
                continue
            if state.refused is None:
                return state
            if state.refused.code != "lower_epoch":
                raise PrepareError(f"the machine's runner refuses: {state.refused.message}")
            live = _live_attempt(await self._attempts_there())
            if live is not None:
                return live
            # A build has just ended, or the machine's clock was set back by an unknown amount.
            epoch += 1 << 6 * round_number
        raise PrepareError("others begin builds there again and again; try again")

    async def _launch_attempt(self, launch: Launch) -> MemberState | None:
        """The state after the launch. None: some of its files have just been swept from the machine."""
        retry = Retry(CONNECTION_TIMEOUT, Backoff(AGAIN, AGAIN, low=1.0))
        while True:
            try:
                return await self.runner.launch(launch)
            except RunnerRefused as refusal:
                if refusal.code == "missing_blobs":
                    return None
                raise
            except OutcomeUnknown as error:
                # An epoch is launched at most once, so it is safe to send the request again.
                await asyncio.sleep(retry.next(error))

    async def _remove_earlier_builds(self, own_state: MemberState, files: Manifest) -> None:
        """Remove folders of earlier builds, and files that only they needed. The folder of this build stays: others may be following it."""
        # This time is by the machine's clock.
        finished_at = own_state.exit.finished_at if own_state.exit is not None else None
        try:
            for state in (await self.runner.observe(probe=NO_PROBE)).attempts:
                if (state.job, state.epoch) == (
                    own_state.job,
                    own_state.epoch,
                ) or state.state in SUPERVISED:
                    continue
                other_finished_at = state.exit.finished_at if state.exit is not None else None
                if (
                    finished_at is None
                    or other_finished_at is None
                    or finished_at - other_finished_at > KEPT_SECONDS
                ):
                    await self.runner.forget(state.job, state.epoch)
            await self.runner.sweep([entry.sha256 for entry in files.values()])
        except HostError:
            pass  # files that remain take space and do no harm; the next build tries again


def _live_attempt(states: Sequence[MemberState]) -> MemberState | None:
    alive = [state for state in states if state.state in SUPERVISED]
    return alive[-1] if alive else None


def _failure_reason(state: MemberState) -> str:
    """The reason why a build ended without a result."""
    exit_record = state.exit
    if state.state == RunnerState.REBOOTED:
        return "the machine was restarted meanwhile; try again"
    if exit_record is None:
        return f"what watched over it on the machine was killed ({state.state}); try again"
    if exit_record.reason == "time_limit":
        return f"{exit_record.message}; --time-limit allows more, and what was fetched is in pip's cache"
    if exit_record.oom_kill or exit_record.signal == 9:
        return "it was killed, as the kernel does where memory ends; try again"
    last_lines = [line for line in exit_record.tail.splitlines() if line.strip()][-3:]
    return exit_record.message or " / ".join(last_lines) or f"exit code {exit_record.code}"


class _Follower:
    """Passes on the log of a build while it is written."""

    def __init__(self, runner: Runner, tell: Tell) -> None:
        self.runner, self.tell = runner, tell
        self._offset = 0
        self._partial_line = b""
        retry = Retry(CONNECTION_TIMEOUT, Backoff(AGAIN, AGAIN, low=1.0))
        retry.renew()  # the time counts from the first failure
        self._retry = ReportedRetry(
            retry,
            tell,
            lambda error: (
                f"the connection is lost ({error}); it continues there, and is looked for again"
            ),
            "the connection is back",
        )

    async def follow(self, state: MemberState) -> MemberState:
        """Follow it until it has ended. Raises HostError if the machine stays silent for CONNECTION_TIMEOUT."""
        while True:
            try:
                await self._read_log(state)
                if state.state not in SUPERVISED:
                    return state
                known = KnownState(state.state, self._offset, clock=state.clock)
                for new_state in await self.runner.wait(
                    {(state.job, state.epoch): known}, seconds=WAIT
                ):
                    state = new_state
                self._retry.end()
            except (HostUnreachable, OutcomeUnknown) as error:
                await asyncio.sleep(self._retry.pause(error))

    async def _read_log(self, state: MemberState) -> None:
        """Read the log up to its present end. An attempt that has ended writes no more, so this is then the whole log."""
        while True:
            part = await self.runner.log(state.job, state.epoch, self._offset)
            self._retry.end()
            if not part.data:
                break
            self._offset += len(part.data)
            *lines, self._partial_line = (self._partial_line + part.data).split(b"\n")
            for line in lines:
                self.tell(line.decode("utf-8", "replace"))
        if state.state not in SUPERVISED and self._partial_line:
            self.tell(self._partial_line.decode("utf-8", "replace"))
