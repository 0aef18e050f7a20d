"""The controller of one attempt: read the state, decide, perform, wait for news; until nothing is left to do.

A dispatcher drives every attempt that it owns, each in its own task. `decide.py` chooses the next step, from the row in the database and
from the machines' last readings; this file performs it, and never decides anything. The task may end at any await, with its process or
because another dispatcher has taken over: the database then holds enough for the next dispatcher to continue.

Readings are kept only while they are fresh. If a machine does not answer, its reading is discarded at once, and it is asked again as soon
as it can be reached. Files are sent to machines in separate tasks; logs and checkpoints are fetched in others while the command runs. A
slow disk or network therefore never delays a cancellation, and a log is followed while a large checkpoint is fetched.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from groupwise.core.errors import RunError
from groupwise.core.retry import Backoff
from groupwise.core.waiting import wait_at_most
from groupwise.jobs.fleet.attempts import ending, records, refusals
from groupwise.jobs.fleet.attempts.decide import (
    DEADMAN_MARGIN,
    Abandon,
    AttemptView,
    CheckRelease,
    Collect,
    Effect,
    Kill,
    Launch,
    MemberView,
    Move,
    ObservedState,
    Provide,
    Void,
    decide,
    over,
)
from groupwise.jobs.fleet.attempts.effects import Gateway
from groupwise.jobs.fleet.attempts.launching import (
    deadman_of,
    files_of,
    launch_of,
    resume_of,
    with_machine_time,
)
from groupwise.jobs.fleet.attempts.records import Machine, MemberRow, Snapshot, Stale
from groupwise.jobs.fleet.attempts.watching import (
    MachineWatch,
    MachineWatches,
    PollTiming,
)
from groupwise.jobs.fleet.attempts.write_batching import BatchedReads
from groupwise.jobs.fleet.queue.placement import is_oversubscribed
from groupwise.jobs.fleet.secrets import SecretMissing, Secrets
from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.hosts.answers import CHANGEABLE, MemberState, RunnerState
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.files import BlobError, BlobStore
from groupwise.jobs.hosts.host import HostError, HostUnreachable, OutcomeUnknown, RunnerRefused
from groupwise.jobs.hosts.spec import Manifest

log = logging.getLogger(__name__)

OWN_DISK = (OSError, BlobError)
"""Errors of the control machine's disk."""
JOBS_OWN_ERRNOS = (errno.ENAMETOOLONG, errno.EILSEQ)
"""OSErrors for which a file of the job is the cause: its name cannot be stored."""
MAX_COLLECTIONS = 5
"""Failed collections before an attempt ends without its artefacts, or, if a repair may help, before an operator is alerted."""


@dataclass(frozen=True, slots=True)
class MemberOutput:
    """A member of an attempt whose log, checkpoints and artefacts are fetched."""

    runner: Runner
    owner: str
    job_id: str
    generation: int
    epoch: int
    rank: int
    spec: Any
    """A `JobSpec` as JSON."""
    log_offset: int
    """Bytes of the log that are on the control side's disk for certain, according to the database."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of collecting artefacts."""

    problem: str | None = None
    """Why they are incomplete and always will be."""
    left_out: int = 0
    """Number of links, devices and the like, which are never fetched."""


class LogMirror(Protocol):
    """Mirrors logs to the control machine's disk."""

    async def catch_up(self, output: MemberOutput, size: int) -> None:
        """Fetch the missing part of the first `size` bytes. Safe to repeat, and to cancel. Raises HostError."""
        ...


class CheckpointMirror(Protocol):
    """Mirrors complete checkpoints to the control machine's disk while a job runs."""

    async def mirror(self, output: MemberOutput) -> None:
        """Fetch new checkpoints. Safe to repeat, and to cancel. Raises HostError."""
        ...


class Collector(Protocol):
    """Brings artefacts to the control machine's disk."""

    async def collect(self, output: MemberOutput) -> Collected:
        """Fetch them all and verify them. Raises HostError, OSError, BlobError."""
        ...


@dataclass(frozen=True, slots=True)
class ControllerDependencies:
    """Dependencies that all controllers of one dispatcher share."""

    owner: str
    gateway: Gateway
    snapshots: BatchedReads[int, Snapshot]
    """Reads attempts of this owner, by epoch."""
    runner: Callable[[Machine], Runner]
    watches: MachineWatches
    logs: LogMirror
    checkpoints: CheckpointMirror
    collector: Collector
    store: BlobStore
    secrets: Secrets
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Runs a coroutine as a separate task; its errors are logged."""
    rng: random.Random
    poll_timing: PollTiming = field(default_factory=PollTiming)
    clock: Callable[[], float] = time.monotonic
    """A monotonic clock, in seconds."""


TransferProgress = int | tuple[int, int | None]
"""Bytes of a log; or the number of checkpoints with the newest step (if only the last two are kept, the number alone stays at 2)."""


@dataclass(slots=True)
class _Fetching:
    """The log or the checkpoints of a member, fetched while it runs."""

    available: TransferProgress
    """What the machine has, as of its last state."""
    fetched: TransferProgress
    """What of it is on the control side."""
    task: asyncio.Task[None] | None = None
    """The task in progress; at most one runs at a time."""

    @property
    def begins(self) -> bool:
        """True if there is something to fetch and no task is fetching it."""
        return self.available != self.fetched and (self.task is None or self.task.done())

    async def wait_until_ended(self) -> None:
        """Wait until the running task has ended, with or without success."""
        if self.task is not None:
            await asyncio.wait([self.task])


class _MemberMonitor:
    """The last reading of one member, and the state of sending its files and fetching its outputs; a `watching.Listener`."""

    def __init__(
        self,
        job_id: str,
        epoch: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = (job_id, epoch)
        self.last: MemberState | None = None
        self.machine_answers = False
        self.reachable = True
        self.place: str | None = None
        """The root folder in which it started, as the machine names it."""
        self.elsewhere = False
        """True if the runner that answers has another root: a different machine or folder, which knows nothing of the attempt."""
        self.ended: float | None = None
        """When its command ended, by this process's monotonic clock."""
        self.was_asked = False
        """The member has been asked, and the answer is still valid."""
        self.refusal: str | None = None
        self.provided = True
        """See `MemberView.provided`."""
        self.providing: asyncio.Task[None] | None = None
        self.mistake: Exception | None = None
        """A bug of ours that surfaced while providing files."""
        self.quiet: bool | None = None
        self.collected = False
        self.problem: str | None = None
        self.left_out = 0
        self.tries = 0
        self.log = _Fetching(0, 0)
        self.checkpoints = _Fetching((0, None), (0, None))
        self.watch: MachineWatch | None = None
        self._wake = wake
        self._clock = clock

    def on_state(self, state: MemberState) -> None:
        self.update(state)
        if not self.elsewhere:  # otherwise the member is asked again after a pause
            self._wake()

    def update(self, state: MemberState) -> None:
        """Store an answer without waking the controller: it asked for the answer, and checks by itself whether anything changed."""
        self.elsewhere = self.place not in (None, state.place)
        if self.elsewhere:
            self.last, self.reachable, self.was_asked = None, False, False
            return
        self.place = state.place
        if self.ended is None and state.exit is not None and state.exit.age is not None:
            self.ended = self._clock() - state.exit.age
        self.last, self.reachable, self.was_asked = state, True, True

    def on_contact_lost(self, reason: str) -> None:
        self.last, self.reachable, self.machine_answers, self.elsewhere = None, False, False, False
        self._wake()

    def on_contact(self) -> None:
        self.last, self.reachable, self.was_asked = None, True, False
        self._wake()

    @property
    def reading(self) -> ObservedState:
        """The state in the terms of `decide`."""
        if self.last is None:
            return ObservedState.UNKNOWN if self.reachable else ObservedState.UNREACHABLE
        if self.last.engine is not None and self.last.state is RunnerState.REBOOTED:
            return ObservedState.LOST  # an engine started it on a machine other than the one asked
        if (
            self.last.engine is None
            and self.last.state is RunnerState.LOST
            and self.last.pid is None
        ):
            # Its command never ran, and launch or void take over the folder.
            return ObservedState.ABSENT
        return ObservedState(self.last.state)

    @property
    def given(self) -> bool:
        """See `MemberView.given`."""
        return self.last is None or self.last.engine_has is not False

    @property
    def decision_state(self) -> tuple[Any, ...]:
        """Everything that a decision depends on; compared to see whether anything has changed."""
        return (
            self.reading, self.refusal, self.provided, self.given, self.quiet, self.collected, self.problem
        )  # fmt: skip


class AttemptController:
    """Drives one attempt, for the dispatcher that owns it."""

    def __init__(self, epoch: int, deps: ControllerDependencies) -> None:
        self.epoch = epoch
        self._deps = deps
        self._monitors: dict[int, _MemberMonitor] = {}
        self._silences: dict[int, float] = {}
        """When each silent member fell silent, by this process's monotonic clock."""
        self._has_news = asyncio.Event()
        self._backoff = Backoff(deps.poll_timing.first, deps.poll_timing.longest, deps.rng.random)

    def wake(self) -> None:
        """Wake the controller: the attempt has changed in the database."""
        self._has_news.set()

    async def run(self) -> None:
        """Run until nothing is left to do, or another dispatcher owns the attempt."""
        try:
            while await self._run_round():
                pass
        except Stale as error:
            log.info("%s", error)
        finally:
            for monitor in self._monitors.values():
                for task in (monitor.log.task, monitor.checkpoints.task, monitor.providing):
                    if task is not None:
                        task.cancel()
                if monitor.watch is not None:
                    monitor.watch.remove(monitor)

    async def _run_round(self) -> bool:
        """Read, decide, perform, then wait for news. False once nothing is left to do."""
        self._has_news.clear()
        try:
            row = await self._read_current()
            view = AttemptView(
                job_id=row.job_id,
                epoch=row.epoch,
                state=row.state,
                members=tuple(self._member_view(row, m) for m in row.members),
                cancel_requested=row.cancel_requested,
                cleanup=row.cleanup,
            )
            if over(view):
                return False
            effects = decide(view)
            progress = await self._perform(row, effects)
        except RunError as error:
            # The database does not answer, or did not say whether it committed.
            log.warning("%s: %s", self.epoch, error)
            effects, progress = (), False
        if progress:
            self._backoff.reset()
            return True
        limit = self._deps.poll_timing.idle
        if effects:  # they have changed nothing yet: check again soon, with a growing pause
            limit = self._backoff.next()
        await wait_at_most(limit, self._has_news)
        return True

    # Reading

    async def _read_current(self) -> Snapshot:
        """Read the row, after asking each machine whose member has no fresh reading."""
        row = await self._read_snapshot()
        if row.state is AttemptState.RESERVED:
            return row
        unasked: list[MemberRow] = []
        for member in row.members:
            if not member.released:
                monitor = self._monitor(row, member)
                if monitor.last is None and (monitor.reachable or monitor.elsewhere):
                    unasked.append(member)
        if unasked:
            await _gather_all(self._ask_machine(row, m, lambda r, m: r.status(*self._monitor(row, m).name)) for m in unasked)  # fmt: skip
        for member in row.members:
            self._start_fetching(row, member)
        return await self._note_contact(row)

    async def _read_snapshot(self) -> Snapshot:
        snapshot = await self._deps.gateway.read_batched(self._deps.snapshots, self.epoch)
        if snapshot is None:
            raise Stale(f"epoch {self.epoch} is not {self._deps.owner}'s")
        return snapshot

    def _monitor(self, row: Snapshot, member: MemberRow) -> _MemberMonitor:
        """The monitor of a member, which also listens to the watch of its machine."""
        monitor = self._monitors.get(member.rank)
        if monitor is None:
            monitor = self._monitors[member.rank] = _MemberMonitor(
                row.job_id, self.epoch, self._has_news.set
            )
            monitor.provided = len(row.members) == 1 or not files_of(row)
            monitor.watch = self._deps.watches.listen(member.machine, monitor)
        monitor.place = member.handle.get("place", monitor.place)
        return monitor

    async def _ask_machine(
        self,
        row: Snapshot,
        member: MemberRow,
        question: Callable[[Runner, MemberRow], Awaitable[MemberState]],
    ) -> None:
        """Ask the member's runner a question whose answer is a state. Without an answer, the last reading is discarded."""
        monitor = self._monitor(row, member)
        try:
            monitor.update(await question(self._deps.runner(member.machine), member))
        except HostUnreachable as error:
            self._note_silence(monitor, error)
        except RunnerRefused as error:  # the last reading still holds
            log.info("%s on %s: %s", row.key, member.machine.vm_id, error)
            if monitor.last is None:
                self._note_silence(monitor, error)
        except HostError as error:
            log.info("%s on %s: %s", row.key, member.machine.vm_id, error)
            if not monitor.was_asked:
                self._note_silence(monitor, error)
            # Asked again, once, before it counts as silent.
            monitor.last, monitor.was_asked = (
                None,
                False,
            )

    def _note_silence(self, monitor: _MemberMonitor, error: Exception) -> None:
        """Count the machine as silent, until its watch reaches it again."""
        monitor.on_contact_lost(str(error))
        if monitor.watch is not None:
            monitor.watch.is_silent = True
            monitor.watch.look_again()

    async def _note_contact(self, row: Snapshot) -> Snapshot:
        """Record which machines fell silent and which answer again. The latter must be recorded before a status request may reset the
        deadman of a member there."""
        changed_members = [
            (m.rank, not monitor.reachable, monitor.elsewhere)
            for m in row.members
            if (monitor := self._monitors.get(m.rank))
            and not m.released
            and (
                (m.silent_since is not None) == monitor.reachable
                or m.elsewhere != monitor.elsewhere
            )
        ]
        if changed_members:
            owner, epoch = self._deps.owner, self.epoch

            def note(session: Any) -> None:
                for rank, silent, elsewhere in changed_members:
                    records.record_contact(
                        session, epoch, owner, rank, silent=silent, elsewhere=elsewhere
                    )

            await self._deps.gateway.commit("attempt.contact", note)
            row = await self._read_snapshot()
        for member in row.members:
            if (monitor := self._monitors.get(member.rank)) is None:
                continue
            is_answering = (
                monitor.reachable and monitor.last is not None and monitor.last.state in CHANGEABLE
            )
            if is_answering != monitor.machine_answers:
                monitor.machine_answers = is_answering
                if monitor.watch is not None:
                    monitor.watch.look_again()
        return row

    def _member_view(self, row: Snapshot, m: MemberRow) -> MemberView:
        member_view = MemberView(
            rank=m.rank,
            vm_id=m.machine.vm_id,
            reading=ObservedState.UNKNOWN,
            exit=m.exit,
            lost=m.machine.lost,
            deadman_over=self._deadman_is_over(row, m),
            drained=not (m.machine.takes_new or is_oversubscribed(m.slot)),
            released=m.released,
            abandoned=m.is_abandoned,
            gpu_problems=m.gpu_problems,
        )
        monitor = self._monitors.get(m.rank)
        if monitor is None:
            return member_view
        state = monitor.last
        refusal = state.refused if state else None
        return replace(
            member_view,
            reading=monitor.reading,
            exit=state.exit if state and state.exit else m.exit,
            refusal=f"{refusal.code}: {refusal.message}" if refusal else monitor.refusal,
            highest=refusal.highest if refusal else None,
            provided=monitor.provided,
            given=monitor.given,
            engine_says=state.engine_says if state else "",
            rejected=monitor.refusal is not None,
            ended=monitor.ended,
            collected=monitor.collected,
            collection_problem=monitor.problem,
            left_out=monitor.left_out,
            quiet=monitor.quiet,
        )

    def _deadman_is_over(self, row: Snapshot, member: MemberRow) -> bool:
        """True once the machine has been silent for longer than its deadman timeout and a margin: its runner has then ended the job, and
        rejects launch requests that arrive late. Never true if the supervisor died (LOST), since the supervisor runs the deadman.

        Both the database's clock and this process's monotonic clock must agree. A dispatcher that takes over starts counting from zero,
        since a jump of the database's clock makes leases expire as well."""
        deadman, since = deadman_of(member), member.silent_since
        if since is None:
            self._silences.pop(member.rank, None)
            return False
        now = self._deps.clock()
        silent = min(row.now - since, now - self._silences.setdefault(member.rank, now))
        if deadman is None or member.recorded is ObservedState.LOST:
            return False
        return silent > deadman + DEADMAN_MARGIN

    # Performing effects

    async def _perform(self, row: Snapshot, effects: Sequence[Effect]) -> bool:
        """Perform the effects; returns whether that changed anything."""
        self._provide_no_others(effects)
        if len(effects) == 1 and isinstance(effects[0], Move):
            await self._write_move(row, effects[0])
            return True
        owner, epoch = self._deps.owner, self.epoch
        # States that machines report and the database does not have yet.
        if unwritten_states := self._unwritten_states(row):

            def write(session: Any) -> None:
                for rank, state in unwritten_states:
                    records.record_state(session, epoch, owner, state, rank)

            await self._deps.gateway.commit_of(epoch, "attempt.record", write)
        states_before = {rank: monitor.decision_state for rank, monitor in self._monitors.items()}
        ranks = dict.fromkeys(e.rank for e in effects if not isinstance(e, Move))
        await _gather_all(
            self._perform_for(row, rank, [e for e in effects if getattr(e, "rank", None) == rank])
            for rank in ranks
        )
        return states_before != {
            rank: monitor.decision_state for rank, monitor in self._monitors.items()
        }

    async def _perform_for(self, row: Snapshot, rank: int, effects: Sequence[Effect]) -> None:
        """Perform the effects of one member in order."""
        member, grace = row.members[rank], float(row.spec["limits"]["grace_seconds"])
        for effect in effects:
            match effect:
                case Provide():
                    self._provide(row, member)
                case Launch():
                    await self._launch_member(row, member)
                case Void():
                    await self._ask_machine(row, member, lambda r, _: r.void(row.job_id, row.epoch))
                case Kill():
                    await self._ask_machine(
                        row, member, lambda r, _: r.kill(row.job_id, row.epoch, grace=grace)
                    )
                case Collect():
                    await self._collect_member(row, member)
                case CheckRelease():
                    await self._check_release(row, member)
                case Abandon():
                    await self._deps.gateway.commit(
                        "attempt.abandon",
                        partial(
                            ending.abandon,
                            epoch=self.epoch,
                            owner=self._deps.owner,
                            rank=member.rank,
                        ),
                    )
                    self._has_news.set()
                case Move():
                    raise AssertionError("a move stands alone")

    async def _write_move(self, row: Snapshot, move: Move) -> None:
        """Write the next state, in one transaction with the readings that led to it."""
        owner, epoch, rng = self._deps.owner, self.epoch, self._deps.rng
        unwritten_states, ends_attempt = self._unwritten_states(row), move.to is AttemptState.ENDED

        def write(session: Any) -> None:
            if move.to is AttemptState.LAUNCHING:
                # Recorded before a machine receives them; the attempt keeps this deadman even if its machine's row changes.
                for member in row.members:
                    if (deadman := member.machine.deadman) is not None:
                        records.record_deadman(session, epoch, owner, member.rank, deadman)
            for rank, state in unwritten_states:
                records.record_state(session, epoch, owner, state, rank)
            if ends_attempt:
                ending.end(session, epoch, owner, move, rng)
            else:
                records.move(session, epoch, owner, move.to)

        if ends_attempt:
            await self._fetch_remainder(row)
        await self._deps.gateway.commit_of(epoch, f"attempt.{move.to}", write, ends=ends_attempt)

    def _unwritten_states(self, row: Snapshot) -> list[tuple[int, MemberState]]:
        """Readings that the database does not have yet, by rank. An absent folder proves nothing and is never recorded."""
        return [
            (m.rank, monitor.last)
            for m in row.members
            if (monitor := self._monitors.get(m.rank))
            and monitor.last
            and monitor.last.state is not RunnerState.ABSENT
            and (m.recorded, m.waits)
            != (monitor.last.state, records.engine_wait_reason(monitor.last))
        ]

    async def _launch_member(self, row: Snapshot, member: MemberRow) -> None:
        """Launch the attempt on this member's machine. If files are missing there, they must be provided first. Any other refusal is kept
        in the monitor, since the folder stays absent after it."""
        monitor = self._monitor(row, member)
        try:
            launch = launch_of(row, member, self._deps.secrets)
        except SecretMissing as error:
            monitor.refusal = f"{refusals.SECRET}: {error}"
            return
        refusals_received: list[RunnerRefused] = []

        async def launch_member(runner: Runner, _: MemberRow) -> MemberState:
            try:
                return await runner.launch(await with_machine_time(launch, runner))
            except RunnerRefused as error:
                refusals_received.append(error)
                return await runner.status(row.job_id, row.epoch)

        await self._ask_machine(row, member, launch_member)
        for error in refusals_received:
            if error.code == "missing_blobs":
                monitor.provided = False
            else:
                monitor.refusal = str(error)

    def _provide(self, row: Snapshot, member: MemberRow) -> None:
        """Start to send the attempt's files to the machine, unless a task is doing so."""
        monitor = self._monitor(row, member)
        if monitor.mistake is not None:
            raise monitor.mistake
        if monitor.providing is None or monitor.providing.done():
            monitor.providing = self._deps.spawn(self._bring_files(row, member, monitor))

    def _provide_no_others(self, effects: Sequence[Effect]) -> None:
        """Stop sending files to machines that no longer need them; parts that have arrived stay there."""
        ranks = {effect.rank for effect in effects if isinstance(effect, Provide)}
        for rank, monitor in self._monitors.items():
            if monitor.providing is not None and rank not in ranks:
                monitor.providing.cancel()

    async def _bring_files(self, row: Snapshot, member: MemberRow, monitor: _MemberMonitor) -> None:
        """Send the files, in a separate task; the result is left in the monitor."""
        store = self._deps.store
        try:
            await self._deps.runner(member.machine).provide(store, files_of(row))
            monitor.provided = True
        except RunnerRefused as error:
            monitor.refusal = str(error)
        except HostError as error:
            self._note_silence(monitor, error)
        except BlobError as error:
            monitor.refusal = await asyncio.to_thread(_provision_problem, store, row, error)
        except OSError as error:
            monitor.refusal = f"{refusals.DISK}: a file of the job cannot be read: {error}"
        except Exception as error:  # noqa: BLE001  # the drive raises it, and its failures are reported
            monitor.mistake = error
        if monitor.provided or monitor.refusal or monitor.mistake:
            self._has_news.set()

    async def _check_release(self, row: Snapshot, member: MemberRow) -> None:
        """Ask whether the machine still runs or holds anything of the attempt; if not, release its reservations."""
        monitor, machine = self._monitor(row, member), member.machine
        try:
            release = await self._deps.runner(machine).release(
                row.job_id, row.epoch, gpus=member.gpus, share_mb=member.share_mb,
                idle_memory_mb=machine.idle_memory_mb, probe=machine.probe,
            )  # fmt: skip
        except RunnerRefused as error:
            log.warning("%s on %s: %s", row.key, machine.vm_id, error)
            return
        except HostError as error:
            self._note_silence(monitor, error)
            return
        monitor.quiet = all(holder.what == "memory" for holder in release.holders)
        if row.state is not AttemptState.ENDED:
            return
        owner, epoch, rank = self._deps.owner, self.epoch, member.rank
        if release.clean:
            await self._deps.gateway.commit_of(
                epoch, "attempt.release", lambda s: ending.release(s, epoch, owner, rank)
            )
            self._has_news.set()
            return
        holders = [{"what": h.what, "detail": h.detail, "pid": h.pid} for h in release.holders]
        await self._deps.gateway.commit(
            "attempt.leaking", lambda s: records.record_leaking(s, epoch, owner, rank, holders)
        )

    # Fetching

    def _output_of(self, row: Snapshot, member: MemberRow) -> MemberOutput:
        """The member in the form that log mirror and collectors take."""
        return MemberOutput(
            self._deps.runner(member.machine), self._deps.owner, row.job_id, row.generation,
            row.epoch, member.rank, row.spec, member.log_offset,
        )  # fmt: skip

    def _start_fetching(self, row: Snapshot, member: MemberRow) -> None:
        """While the member runs: start to fetch new log and new checkpoints, each unless a task is doing so."""
        monitor = self._monitors.get(member.rank)
        if monitor is None or monitor.last is None or monitor.last.state not in CHANGEABLE:
            return
        logs, checkpoints, size = self._deps.logs, self._deps.checkpoints, monitor.last.log_size
        monitor.log.available, monitor.checkpoints.available = (
            size,
            (monitor.last.checkpoints, monitor.last.step),
        )
        if monitor.log.begins:
            output = self._output_of(row, member)
            fetching = monitor.log
            fetch = self._run_fetch(
                fetching, fetching.available, output, lambda: logs.catch_up(output, size)
            )
            fetching.task = self._deps.spawn(fetch)
        if monitor.checkpoints.begins:
            output = self._output_of(row, member)
            fetching = monitor.checkpoints
            fetch = self._run_fetch(
                fetching, fetching.available, output, lambda: checkpoints.mirror(output)
            )
            fetching.task = self._deps.spawn(fetch)

    async def _run_fetch(
        self,
        fetching: _Fetching,
        machine_state: TransferProgress,
        output: MemberOutput,
        fetch: Callable[[], Awaitable[None]],
    ) -> None:
        """Fetch the data that the machine had when the task was created, and note that it has arrived."""
        try:
            await fetch()
            fetching.fetched = machine_state
        except (HostError, RunError, Stale, *OWN_DISK) as error:  # tried again in a later round
            log.info("%s.%s: %s", output.job_id, output.epoch, error)
            return
        if fetching.available != machine_state:
            self._has_news.set()  # more has arrived there meanwhile, perhaps the last of it

    async def _collect_member(self, row: Snapshot, member: MemberRow) -> None:
        """Fetch the rest of the log, the newest checkpoint and the artefacts."""
        monitor, output = self._monitor(row, member), self._output_of(row, member)
        state = monitor.last  # kept, since the machine's watch may reset it meanwhile
        if state is None:
            return
        try:
            await monitor.log.wait_until_ended()
            await self._deps.logs.catch_up(output, state.log_size)
            await monitor.checkpoints.wait_until_ended()
            if state.checkpoints:
                await self._deps.checkpoints.mirror(output)
            collected = await self._deps.collector.collect(output)
            monitor.problem, monitor.left_out, monitor.collected = (
                collected.problem,
                collected.left_out,
                True,
            )
        except RunnerRefused as error:
            monitor.problem, monitor.collected = f"{member.machine.vm_id} refused: {error}", True
        except OutcomeUnknown as error:  # the machine may still answer other requests
            reason = f"{member.machine.vm_id} does not give what it left: {error}"
            await self._note_failed_collection(row, member, reason, mendable=True)
            await self._ask_machine(row, member, lambda r, _: r.status(row.job_id, row.epoch))
        except HostError as error:
            self._note_silence(monitor, error)
        except OWN_DISK as error:
            log.warning("%s: its artefacts cannot be written: %s", row.key, error)
            reason = f"the control machine could not write: {error}"
            # A full or broken disk can be repaired; a name or content that cannot be stored is the job's.
            is_repairable = isinstance(error, OSError) and error.errno not in JOBS_OWN_ERRNOS
            await self._note_failed_collection(row, member, reason, mendable=is_repairable)
        except (Stale, RunError):
            raise
        except Exception as error:  # a job's files must never make it impossible to end it
            log.exception("%s: what it left cannot be taken in", row.key)
            reason = f"the control machine could not take it in: {error!r}"
            await self._note_failed_collection(row, member, reason, mendable=False)

    async def _note_failed_collection(
        self, row: Snapshot, member: MemberRow, reason: str, *, mendable: bool
    ) -> None:
        """Count a failed collection, which is tried again. After MAX_COLLECTIONS, if the cause can be repaired (`mendable`), the attempt is
        marked as stuck and an operator alerted, so that nothing that the job made is lost. Otherwise, or once cancelled, it ends without
        its artefacts."""
        monitor = self._monitor(row, member)
        monitor.tries += 1
        if monitor.tries < MAX_COLLECTIONS:
            return
        if not mendable or row.cancel_requested:
            monitor.problem, monitor.collected = reason, True
            return
        owner, epoch = self._deps.owner, self.epoch
        await self._deps.gateway.commit_of(
            epoch,
            "attempt.stuck",
            lambda s: records.record_stuck(s, epoch, owner, member.rank, reason),
        )

    async def _fetch_remainder(self, row: Snapshot) -> None:
        """Fetch log and newest checkpoint of an attempt that ends without collection (its machine rebooted), as far as possible.

        After this, no machine that answers has a newer checkpoint than the one from which the next attempt resumes.
        """
        for member in row.members:
            monitor = self._monitors.get(member.rank)
            if monitor is None or monitor.collected or monitor.last is None:
                continue
            output, state = self._output_of(row, member), monitor.last
            try:
                await monitor.log.wait_until_ended()
                if state.log_size:
                    await self._deps.logs.catch_up(output, state.log_size)
                await monitor.checkpoints.wait_until_ended()
                if state.checkpoints:
                    await self._deps.checkpoints.mirror(output)
            except (HostError, *OWN_DISK) as error:
                log.info("%s: the end of what it left is lost: %s", row.key, error)
            except (Stale, RunError):
                raise
            except Exception:  # as above
                log.exception("%s: the end of what it left is lost", row.key)


def _provision_problem(store: BlobStore, row: Snapshot, error: BlobError) -> str | None:
    """A refusal that names the files that the store has lost: first those of the checkpoint, since there may be another one. None: the
    files exist again.
    """
    resume = resume_of(row)
    if resume and (lacking := _missing_files(store, resume.manifest)):
        return refusals.of_checkpoint(resume.step, resume.path, lacking, error)
    if lacking := _missing_files(store, files_of(row)):
        return refusals.of_files(row.job_id, lacking, error)
    return None


def _missing_files(store: BlobStore, files: Manifest) -> list[str]:
    return [path for path, entry in files.items() if entry.sha256 not in store]


async def _gather_all(work: Any) -> None:
    """Await all coroutines, even if some fail; then raise the first error."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
