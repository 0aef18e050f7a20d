"""Driving one attempt: read what is known, decide, do it, wait for news; until nothing is left to do about it.

A dispatcher drives every attempt that it owns, each in a task of its own. `decide.py` says what is to be done, from the row in the database
and from what the machines said last; this file does it, and never decides anything. The task may end at any await, with its process or
because another dispatcher has taken over: what was written down by then is enough for whoever goes on.

What machines say is kept here only as long as it is fresh. A machine that does not answer makes it stale at once, and the first thing after
contact comes back is to ask again. Files are brought to machines beside the loop, and logs and checkpoints are fetched beside it, while the
command runs, so that a slow disk or line never delays a cancellation; and each beside the other, so that a log is followed while a large
checkpoint comes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from groupwise.core.errors import RunError
from groupwise.jobs.fleet.attempts import ending, records, refusals
from groupwise.jobs.fleet.attempts.decide import (
    DEADMAN_MARGIN,
    Abandon,
    CheckRelease,
    Collect,
    Effect,
    Kill,
    Launch,
    MemberView,
    Move,
    Provide,
    Reading,
    View,
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
    timed,
)
from groupwise.jobs.fleet.attempts.records import Machine, MemberRow, Snapshot, Stale
from groupwise.jobs.fleet.attempts.watching import CHANGEABLE, Watch, Watches
from groupwise.jobs.fleet.attempts.write_batching import Reads
from groupwise.jobs.fleet.secrets import SecretMissing, Secrets
from groupwise.jobs.fleet.states import AttemptState
from groupwise.jobs.hosts.answers import MemberState, RunnerState
from groupwise.jobs.hosts.driver import Runner
from groupwise.jobs.hosts.files import BlobError, BlobStore
from groupwise.jobs.hosts.port import HostError, HostUnreachable, OutcomeUnknown, RunnerRefused
from groupwise.jobs.hosts.spec import Manifest

log = logging.getLogger(__name__)

OWN_DISK = (OSError, BlobError)
"""What goes wrong on the control side's disk."""
MOST_TRIES = 5
"""To take in what a job left, before it ends without that, or, where it is to be had once something is mended, before somebody is told."""


@dataclass(frozen=True, slots=True)
class Part:
    """One member of an attempt, for whoever fetches something of it."""

    runner: Runner
    owner: str
    job_id: str
    generation: int
    epoch: int
    rank: int
    spec: Any
    """A `JobSpec` as JSON."""
    log_offset: int
    """How much of the log is on the control side's disk for certain, as the database said when this was made."""


@dataclass(frozen=True, slots=True)
class Collected:
    """How the fetching of artefacts went."""

    problem: str | None = None
    """Why they are not whole and never will be."""
    left_out: int = 0
    """Links, devices and the like beside them, which are never fetched."""


class LogMirror(Protocol):
    """Brings logs to the control machine's disk."""

    async def catch_up(self, part: Part, size: int) -> None:
        """Fetch what is missing of the first `size` bytes. Safe to repeat, and to cancel. Raises HostError."""
        ...


class CheckpointMirror(Protocol):
    """Brings complete checkpoints to the control machine's disk while a job runs."""

    async def mirror(self, part: Part) -> None:
        """Fetch those that are new. Safe to repeat, and to cancel. Raises HostError."""
        ...


class Collector(Protocol):
    """Brings artefacts to the control machine's disk."""

    async def collect(self, part: Part) -> Collected:
        """Fetch them all and verify them. Raises HostError, OSError, BlobError."""
        ...


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between two looks where nothing has been heard. Tests have shorter ones."""

    first: float = 0.5
    longest: float = 15.0
    idle: float = 30.0
    """Where there is nothing to do but to wait."""


@dataclass(frozen=True, slots=True)
class ControllerDependencies:
    """What all drives of one dispatcher share."""

    owner: str
    gateway: Gateway
    snapshots: Reads[int, Snapshot]
    """Of attempts of this owner, by epoch."""
    runner: Callable[[Machine], Runner]
    watches: Watches
    logs: LogMirror
    checkpoints: CheckpointMirror
    collector: Collector
    store: BlobStore
    secrets: Secrets
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Runs it beside; what goes wrong in it is logged."""
    chance: random.Random
    pauses: Pauses = field(default_factory=Pauses)
    clock: Callable[[], float] = time.monotonic
    """Seconds of this process, which nobody can set."""


Have = int | tuple[int, int | None]


@dataclass(slots=True)
class _Fetching:
    """The log of a member, or its checkpoints, on their way while it runs."""

    there: Have
    """What its machine had when it was heard last: bytes; or checkpoints, and the step of the newest. Who keeps two has two for ever."""
    here: Have
    """That of it which is on the control side."""
    task: asyncio.Task[None] | None = None
    """Of which there is one at a time."""

    @property
    def begins(self) -> bool:
        """There is something to fetch, and nobody does."""
        return self.there != self.here and (self.task is None or self.task.done())

    async def ended(self) -> None:
        """What is under way has come, or has failed."""
        if self.task is not None:
            await asyncio.wait([self.task])


class _MemberMonitor:
    """What is known of one member on its machine; a `watching.Listener`."""

    def __init__(
        self,
        job_id: str,
        epoch: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = (job_id, epoch)
        self.last: MemberState | None = None
        self.hearing = False
        self.reachable = True
        self.place: str | None = None
        """The root in which it was begun, as the machine names it."""
        self.elsewhere = False
        """Who answers has another root: a machine or a folder that knows nothing of it."""
        self.ended: float | None = None
        """When its command ended, by the clock of this process."""
        self.asked = False
        """It has been asked, and the answer has not been made worthless since."""
        self.refusal: str | None = None
        self.provided = True
        """As `MemberView.provided`."""
        self.providing: asyncio.Task[None] | None = None
        self.mistake: Exception | None = None
        """Of ours, in providing."""
        self.quiet: bool | None = None
        self.collected = False
        self.problem: str | None = None
        self.left_out = 0
        self.tries = 0
        self.log = _Fetching(0, 0)
        self.checkpoints = _Fetching((0, None), (0, None))
        self.watch: Watch | None = None
        self._wake = wake
        self._clock = clock

    def heard(self, state: MemberState) -> None:
        self.learn(state)
        if not self.elsewhere:  # else it is asked again after a while
            self._wake()

    def learn(self, state: MemberState) -> None:
        """What its drive has asked for itself wakes nobody: the drive sees whether it is news, and else would never rest."""
        self.elsewhere = self.place not in (None, state.place)
        if self.elsewhere:
            self.last, self.reachable, self.asked = None, False, False
            return
        self.place = state.place
        if self.ended is None and state.exit is not None and state.exit.age is not None:
            self.ended = self._clock() - state.exit.age
        self.last, self.reachable, self.asked = state, True, True

    def lost_contact(self, why: str) -> None:
        self.last, self.reachable, self.hearing, self.elsewhere = None, False, False, False
        self._wake()

    def contact_again(self) -> None:
        self.last, self.reachable, self.asked = None, True, False
        self._wake()

    @property
    def reading(self) -> Reading:
        """In the words of `decide`."""
        if self.last is None:
            return Reading.UNKNOWN if self.reachable else Reading.UNREACHABLE
        if self.last.engine is not None and self.last.state is RunnerState.REBOOTED:
            return Reading.LOST  # it began on a machine that is another than the one that is asked
        if (
            self.last.engine is None
            and self.last.state is RunnerState.LOST
            and self.last.pid is None
        ):
            return Reading.ABSENT  # its command never ran, and launch or void take the folder over
        return Reading(self.last.state)

    @property
    def given(self) -> bool:
        """As `MemberView.given`."""
        return self.last is None or self.last.engine_has is not False

    @property
    def mind(self) -> tuple[Any, ...]:
        """Changes with everything that a decision depends on."""
        return (
            self.reading, self.refusal, self.provided, self.given, self.quiet, self.collected, self.problem
        )  # fmt: skip


class Drive:
    """The driving of one attempt by its owner."""

    def __init__(self, epoch: int, desk: ControllerDependencies) -> None:
        self.epoch = epoch
        self._desk = desk
        self._ears: dict[int, _MemberMonitor] = {}
        self._silences: dict[int, float] = {}
        """Since when a member is known to be silent, by this process's own clock."""
        self._news = asyncio.Event()
        self._pause = desk.pauses.first

    def poke(self) -> None:
        """Something about it has changed in the database."""
        self._news.set()

    async def run(self) -> None:
        """Until nothing is left to do, or somebody else does it."""
        try:
            while await self._round():
                pass
        except Stale as error:
            log.info("%s", error)
        finally:
            self._stop_listening()

    async def _round(self) -> bool:
        self._news.clear()
        try:
            row = await self._look()
            view = self._view(row)
            if over(view):
                return False
            effects = decide(view)
            progress = await self._perform(row, effects)
        except (
            RunError
        ) as error:  # the database does not answer, or did not say whether it committed
            log.warning("%s: %s", self.epoch, error)
            effects, progress = (), False
        await self._rest(bool(effects), progress)
        return True

    async def _rest(self, wants_more: bool, progress: bool) -> None:
        """Nothing at all after progress; else until there is news, or it is time to look again without."""
        if progress:
            self._pause = self._desk.pauses.first
            return
        limit = self._desk.pauses.idle
        if wants_more:
            limit = self._desk.chance.uniform(0.5, 1.0) * self._pause
            self._pause = min(2 * self._pause, self._desk.pauses.longest)
        try:
            async with asyncio.timeout(limit):
                await self._news.wait()
        except TimeoutError:
            pass

    # Reading

    async def _look(self) -> Snapshot:
        """The row, and fresh readings where there are none."""
        row = await self._read()
        if row.state is AttemptState.RESERVED:
            return row
        unasked = [m for m in row.members if not m.released and self._needs_asking(row, m)]
        if unasked:
            await _all(self._ask(row, m, lambda r, m: r.status(*self._ear(row, m).name)) for m in unasked)  # fmt: skip
        for member in row.members:
            self._fetch_beside(row, member)
        return await self._note_contact(row)

    async def _read(self) -> Snapshot:
        found = await self._desk.gateway.look_together(self._desk.snapshots, self.epoch)
        if found is None:
            raise Stale(f"epoch {self.epoch} is not {self._desk.owner}'s")
        return found

    def _needs_asking(self, row: Snapshot, member: MemberRow) -> bool:
        ear = self._ear(row, member)
        return ear.last is None and (ear.reachable or ear.elsewhere)

    def _ear(self, row: Snapshot, member: MemberRow) -> _MemberMonitor:
        ear = self._ears.get(member.rank)
        if ear is None:
            ear = self._ears[member.rank] = _MemberMonitor(row.job_id, self.epoch, self._news.set)
            ear.provided = len(row.members) == 1 or not files_of(row)
            runner = self._desk.runner(member.machine)
            ear.watch = self._desk.watches.listen(member.machine.vm_id, runner, ear)
        ear.place = member.handle.get("place", ear.place)
        return ear

    async def _ask(
        self,
        row: Snapshot,
        member: MemberRow,
        question: Callable[[Runner, MemberRow], Awaitable[MemberState]],
    ) -> None:
        """Put a question whose answer is a state; no answer makes what was known worthless."""
        ear = self._ear(row, member)
        try:
            ear.learn(await question(self._desk.runner(member.machine), member))
        except HostUnreachable as error:
            self._silent(ear, error)
        except RunnerRefused as error:  # what was read of it before still holds
            log.info("%s on %s: %s", row.key, member.machine.vm_id, error)
            if ear.last is None:
                self._silent(ear, error)
        except HostError as error:
            log.info("%s on %s: %s", row.key, member.machine.vm_id, error)
            if not ear.asked:
                self._silent(ear, error)
            ear.last, ear.asked = None, False  # asked again, once, before it counts as silent

    def _silent(self, ear: _MemberMonitor, error: Exception) -> None:
        ear.lost_contact(str(error))
        if ear.watch is not None:
            ear.watch.down = True
            ear.watch.look_again()

    async def _note_contact(self, row: Snapshot) -> Snapshot:
        """Who fell silent is written down; who speaks again too, before its deadman may be kept quiet."""
        changed = [
            (m.rank, not ear.reachable, ear.elsewhere)
            for m in row.members
            if (ear := self._ears.get(m.rank))
            and not m.released
            and ((m.silent_since is not None) == ear.reachable or m.elsewhere != ear.elsewhere)
        ]
        if changed:
            owner, epoch = self._desk.owner, self.epoch

            def note(session: Any) -> None:
                for rank, silent, elsewhere in changed:
                    records.contact(session, epoch, owner, rank, silent=silent, elsewhere=elsewhere)

            await self._desk.gateway.commit("attempt.contact", note)
            row = await self._read()
        for member in row.members:
            self._let_hear(member)
        return row

    def _let_hear(self, member: MemberRow) -> None:
        ear = self._ears.get(member.rank)
        if ear is None:
            return
        hearing = ear.reachable and ear.last is not None and ear.last.state in CHANGEABLE
        if hearing != ear.hearing:
            ear.hearing = hearing
            if ear.watch is not None:
                ear.watch.look_again()

    def _view(self, row: Snapshot) -> View:
        return View(
            job_id=row.job_id,
            epoch=row.epoch,
            state=row.state,
            members=tuple(self._member(row, m) for m in row.members),
            cancel_requested=row.cancel_requested,
            cleanup=row.cleanup,
        )

    def _member(self, row: Snapshot, m: MemberRow) -> MemberView:
        seen = MemberView(
            rank=m.rank,
            vm_id=m.machine.vm_id,
            reading=Reading.UNKNOWN,
            exit=m.exit,
            lost=m.machine.lost,
            deadman_over=self._deadman_is_over(row, m),
            drained=not m.machine.takes_new,
            released=m.released,
            abandoned=m.abandoned,
            gpu_problems=m.gpu_problems,
        )
        ear = self._ears.get(m.rank)
        if ear is None:
            return seen
        last = ear.last
        refused = last.refused if last else None
        return replace(
            seen,
            reading=ear.reading,
            exit=last.exit if last and last.exit else m.exit,
            refusal=f"{refused.code}: {refused.message}" if refused else ear.refusal,
            highest=refused.highest if refused else None,
            provided=ear.provided,
            given=ear.given,
            engine_says=last.engine_says if last else "",
            rejected=ear.refusal is not None,
            ended=ear.ended,
            collected=ear.collected,
            collection_problem=ear.problem,
            left_out=ear.left_out,
            quiet=ear.quiet,
        )

    def _deadman_is_over(self, row: Snapshot, member: MemberRow) -> bool:
        """Nothing of it runs, and nothing will: what has begun there was ended by its deadman, which has had more than its time since the
        machine fell silent, and what was sent before that begins nothing. But for one whose supervisor is dead, and keeps no deadman.

        Two clocks have to say so: that of the database, and this process's own, which nobody can set. Whoever takes over counts anew, since
        a jump of the first makes leases run out as well."""
        deadman, since = deadman_of(member), member.silent_since
        if since is None:
            self._silences.pop(member.rank, None)
            return False
        now = self._desk.clock()
        silent = min(row.now - since, now - self._silences.setdefault(member.rank, now))
        if deadman is None or member.recorded is Reading.LOST:
            return False
        return silent > deadman + DEADMAN_MARGIN

    # Doing

    async def _perform(self, row: Snapshot, effects: Sequence[Effect]) -> bool:
        """Whether anything has changed by it."""
        self._provide_no_others(effects)
        if len(effects) == 1 and isinstance(effects[0], Move):
            await self._move(row, effects[0])
            return True
        await self._write_down(row)
        before = {rank: ear.mind for rank, ear in self._ears.items()}
        ranks = dict.fromkeys(e.rank for e in effects if not isinstance(e, Move))
        await _all(
            self._perform_for(row, rank, [e for e in effects if getattr(e, "rank", None) == rank])
            for rank in ranks
        )
        return before != {rank: ear.mind for rank, ear in self._ears.items()}

    async def _perform_for(self, row: Snapshot, rank: int, effects: Sequence[Effect]) -> None:
        """One after the other, on one machine."""
        member = row.members[rank]
        for effect in effects:
            match effect:
                case Provide():
                    self._provide(row, member)
                case Launch():
                    await self._launch(row, member)
                case Void():
                    await self._ask(row, member, lambda r, _: r.void(row.job_id, row.epoch))
                case Kill():
                    await self._kill(row, member)
                case Collect():
                    await self._collect(row, member)
                case CheckRelease():
                    await self._check_release(row, member)
                case Abandon():
                    await self._abandon(member)
                case Move():
                    raise AssertionError("a move stands alone")

    async def _move(self, row: Snapshot, move: Move) -> None:
        """The next state, in one transaction with what was seen that led there."""
        owner, epoch, chance = self._desk.owner, self.epoch, self._desk.chance
        seen, ends = self._unwritten(row), move.to is AttemptState.ENDED
        deadmen = _deadmen(row) if move.to is AttemptState.LAUNCHING else {}

        def write(session: Any) -> None:
            for rank, deadman in deadmen.items():
                records.sending(session, epoch, owner, rank, deadman)
            for rank, state in seen:
                records.record(session, epoch, owner, state, rank)
            if ends:
                ending.end(session, epoch, owner, move, chance)
            else:
                records.move(session, epoch, owner, move.to)

        if ends:
            await self._last_of_what_it_left(row)
        await self._desk.gateway.commit_of(epoch, f"attempt.{move.to}", write, ends=ends)

    async def _write_down(self, row: Snapshot) -> None:
        """What machines say that the database does not know yet."""
        owner, epoch = self._desk.owner, self.epoch
        if seen := self._unwritten(row):

            def write(session: Any) -> None:
                for rank, state in seen:
                    records.record(session, epoch, owner, state, rank)

            await self._desk.gateway.commit_of(epoch, "attempt.record", write)

    def _unwritten(self, row: Snapshot) -> list[tuple[int, MemberState]]:
        """That a folder is absent says nothing, so it is not written down."""
        return [
            (m.rank, ear.last)
            for m in row.members
            if (ear := self._ears.get(m.rank))
            and ear.last
            and ear.last.state is not RunnerState.ABSENT
            and (m.recorded, m.waits) != (ear.last.state, records.waits_for(ear.last))
        ]

    async def _launch(self, row: Snapshot, member: MemberRow) -> None:
        """Have it begun. A machine that lacks files is to get them first; one that says no before it has claimed anything is remembered."""
        ear = self._ear(row, member)
        try:
            launch = launch_of(row, member, self._desk.secrets)
        except SecretMissing as error:
            ear.refusal = f"{refusals.SECRET}: {error}"
            return
        refused: list[RunnerRefused] = []

        async def tell(runner: Runner, _: MemberRow) -> MemberState:
            try:
                return await runner.launch(await timed(launch, runner))
            except RunnerRefused as error:
                refused.append(error)
                return await runner.status(row.job_id, row.epoch)

        await self._ask(row, member, tell)
        for error in refused:
            if error.code == "missing_blobs":
                ear.provided = False
            else:
                ear.refusal = str(error)

    async def _kill(self, row: Snapshot, member: MemberRow) -> None:
        grace = float(row.spec["limits"]["grace_seconds"])
        await self._ask(row, member, lambda r, _: r.kill(row.job_id, row.epoch, grace=grace))

    def _provide(self, row: Snapshot, member: MemberRow) -> None:
        """Have the files of an attempt brought to its machine, unless that is under way."""
        ear = self._ear(row, member)
        if ear.mistake is not None:
            raise ear.mistake
        if ear.providing is None or ear.providing.done():
            ear.providing = self._desk.spawn(self._bring_files(row, member, ear))

    def _provide_no_others(self, effects: Sequence[Effect]) -> None:
        """What is under way to machines that are not to have it any more ends; parts that have arrived stay there."""
        wanted = {effect.rank for effect in effects if isinstance(effect, Provide)}
        for rank, ear in self._ears.items():
            if ear.providing is not None and rank not in wanted:
                ear.providing.cancel()

    async def _bring_files(self, row: Snapshot, member: MemberRow, ear: _MemberMonitor) -> None:
        store = self._desk.store
        try:
            await self._desk.runner(member.machine).provide(store, files_of(row))
            ear.provided = True
        except RunnerRefused as error:
            ear.refusal = str(error)
        except HostError as error:
            self._silent(ear, error)
        except BlobError as error:
            ear.refusal = await asyncio.to_thread(_why_not_provided, store, row, error)
        except OSError as error:
            ear.refusal = f"{refusals.DISK}: a file of the job cannot be read: {error}"
        except Exception as error:  # noqa: BLE001  # raised in the drive, whose failures people are told of
            ear.mistake = error
        if ear.provided or ear.refusal or ear.mistake:
            self._news.set()

    async def _check_release(self, row: Snapshot, member: MemberRow) -> None:
        """Does its machine still run or hold anything of it? What is given back is given back in one transaction."""
        ear, machine = self._ear(row, member), member.machine
        try:
            found = await self._desk.runner(machine).release(
                row.job_id, row.epoch, gpus=member.gpus, share_mb=member.share_mb,
                idle_memory_mb=machine.idle_memory_mb, probe=machine.probe,
            )  # fmt: skip
        except RunnerRefused as error:
            log.warning("%s on %s: %s", row.key, machine.vm_id, error)
            return
        except HostError as error:
            self._silent(ear, error)
            return
        ear.quiet = all(holder.what == "memory" for holder in found.holders)
        if row.state is not AttemptState.ENDED:
            return
        owner, epoch, rank = self._desk.owner, self.epoch, member.rank
        if found.clean:
            await self._desk.gateway.commit_of(
                epoch, "attempt.release", lambda s: ending.release(s, epoch, owner, rank)
            )
            self._news.set()
            return
        holders = [{"what": h.what, "detail": h.detail, "pid": h.pid} for h in found.holders]
        await self._desk.gateway.commit(
            "attempt.leaking", lambda s: records.leaking(s, epoch, owner, rank, holders)
        )

    async def _abandon(self, member: MemberRow) -> None:
        owner, epoch, rank = self._desk.owner, self.epoch, member.rank
        await self._desk.gateway.commit(
            "attempt.abandon", lambda s: ending.abandon(s, epoch, owner, rank)
        )
        self._news.set()

    # Fetching

    def _part(self, row: Snapshot, member: MemberRow) -> Part:
        return Part(
            self._desk.runner(member.machine), self._desk.owner, row.job_id, row.generation,
            row.epoch, member.rank, row.spec, member.log_offset,
        )  # fmt: skip

    def _fetch_beside(self, row: Snapshot, member: MemberRow) -> None:
        """While it runs: begin to fetch what has come of its log and of its checkpoints, each unless that is under way."""
        ear = self._ears.get(member.rank)
        if ear is None or ear.last is None or ear.last.state not in CHANGEABLE:
            return
        logs, checkpoints, size = self._desk.logs, self._desk.checkpoints, ear.last.log_size
        ear.log.there, ear.checkpoints.there = size, (ear.last.checkpoints, ear.last.step)
        if ear.log.begins:
            part = self._part(row, member)
            self._begin_to_fetch(ear.log, part, lambda: logs.catch_up(part, size))
        if ear.checkpoints.begins:
            part = self._part(row, member)
            self._begin_to_fetch(ear.checkpoints, part, lambda: checkpoints.mirror(part))

    def _begin_to_fetch(
        self, fetching: _Fetching, part: Part, fetch: Callable[[], Awaitable[None]]
    ) -> None:
        fetching.task = self._desk.spawn(self._fetch(fetching, fetching.there, part, fetch))

    async def _fetch(
        self, fetching: _Fetching, there: Have, part: Part, fetch: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await fetch()
            fetching.here = there
        except (HostError, RunError, Stale, *OWN_DISK) as error:  # tried again by whoever drives it
            log.info("%s.%s: %s", part.job_id, part.epoch, error)
            return
        if fetching.there != there:
            self._news.set()  # more has come meanwhile, and nobody may tell of it again

    async def _collect(self, row: Snapshot, member: MemberRow) -> None:
        """The rest of the log, the newest checkpoint, the artefacts."""
        ear, part = self._ear(row, member), self._part(row, member)
        last = ear.last  # the watch of the machine may take it away meanwhile
        if last is None:
            return
        try:
            await ear.log.ended()
            await self._desk.logs.catch_up(part, last.log_size)
            await ear.checkpoints.ended()
            if last.checkpoints:
                await self._desk.checkpoints.mirror(part)
            found = await self._desk.collector.collect(part)
            ear.problem, ear.left_out, ear.collected = found.problem, found.left_out, True
        except RunnerRefused as error:
            ear.problem, ear.collected = f"{member.machine.vm_id} refused: {error}", True
        except OutcomeUnknown as error:  # its machine may answer whatever else it is asked
            why = f"{member.machine.vm_id} does not give what it left: {error}"
            await self._not_taken_in(row, member, why, mendable=True)
            await self._ask(row, member, lambda r, _: r.status(row.job_id, row.epoch))
        except HostError as error:
            self._silent(ear, error)
        except OWN_DISK as error:
            log.warning("%s: its artefacts cannot be written: %s", row.key, error)
            why = f"the control machine could not write: {error}"
            await self._not_taken_in(row, member, why, mendable=_is_ours(error))
        except (Stale, RunError):
            raise
        except Exception as error:  # what a job leaves must never make it impossible to end it
            log.exception("%s: what it left cannot be taken in", row.key)
            why = f"the control machine could not take it in: {error!r}"
            await self._not_taken_in(row, member, why, mendable=False)

    async def _not_taken_in(
        self, row: Snapshot, member: MemberRow, why: str, *, mendable: bool
    ) -> None:
        """Tried again; not for ever where the job is the cause, or somebody wants it ended. `mendable`: a machine is the cause, this one or
        its own, so that nothing that the job has made is lost by it, and somebody is told."""
        ear = self._ear(row, member)
        ear.tries += 1
        if ear.tries < MOST_TRIES:
            return
        if not mendable or row.cancel_requested:
            ear.problem, ear.collected = why, True
            return
        owner, epoch = self._desk.owner, self.epoch
        await self._desk.gateway.commit_of(
            epoch, "attempt.stuck", lambda s: records.stuck(s, epoch, owner, member.rank, why)
        )

    async def _last_of_what_it_left(self, row: Snapshot) -> None:
        """Log and newest checkpoint of an attempt that ends without having been collected (its machine booted anew), as far as they can
        be had. After this, no machine that answers has a newer checkpoint than the one that the next attempt goes on from."""
        for member in row.members:
            ear = self._ears.get(member.rank)
            if ear is None or ear.collected or ear.last is None:
                continue
            part, last = self._part(row, member), ear.last
            try:
                await ear.log.ended()
                if last.log_size:
                    await self._desk.logs.catch_up(part, last.log_size)
                await ear.checkpoints.ended()
                if last.checkpoints:
                    await self._desk.checkpoints.mirror(part)
            except (HostError, *OWN_DISK) as error:
                log.info("%s: the end of what it left is lost: %s", row.key, error)
            except (Stale, RunError):
                raise
            except Exception:  # as above
                log.exception("%s: the end of what it left is lost", row.key)

    def _stop_listening(self) -> None:
        for ear in self._ears.values():
            for task in (ear.log.task, ear.checkpoints.task, ear.providing):
                if task is not None:
                    task.cancel()
            if ear.watch is not None:
                ear.watch.remove(ear)


def _why_not_provided(store: BlobStore, row: Snapshot, error: BlobError) -> str | None:
    """Whose files the store does not have any more: first those of the checkpoint, for which there may be another. None: they have come
    back meanwhile."""
    resume = resume_of(row)
    if resume and (lacking := _lacking(store, resume.manifest)):
        return refusals.of_checkpoint(resume.step, resume.path, lacking, error)
    if lacking := _lacking(store, files_of(row)):
        return refusals.of_files(row.job_id, lacking, error)
    return None


def _lacking(store: BlobStore, files: Manifest) -> list[str]:
    return [path for path, entry in files.items() if entry.sha256 not in store]


def _is_ours(error: Exception) -> bool:
    """A disk that is full or broken is; a name or a content that nobody could store is the job's."""
    return isinstance(error, OSError) and error.errno not in (errno.ENAMETOOLONG, errno.EILSEQ)


def _deadmen(row: Snapshot) -> dict[int, float]:
    """By rank; what is on record before a machine is told of it, and stays, whatever its row says later."""
    found = {member.rank: member.machine.deadman for member in row.members}
    return {rank: deadman for rank, deadman in found.items() if deadman is not None}


async def _all(work: Any) -> None:
    """All of it, whatever goes wrong in some; then the first that did."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
