"""`decide` against everything that can happen, in any order: a small model of the control plane drives machines of this process.

The model keeps what the database keeps, and loses what a dispatcher loses when it dies. After each step nothing that was promised is
broken; at the end, when machines are back and nobody interferes any more, everything comes to rest. Failing orders are shrunk to the
shortest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from groupwise.jobs.fleet.attempts.decide import (
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
    Void,
    decide,
    over,
)
from groupwise.jobs.fleet.queue.failures import JobFacts, after_end
from groupwise.jobs.fleet.states import (
    ATTEMPT_MOVES,
    FINAL,
    JOB_MOVES,
    AttemptState,
    Cleanup,
    JobStatus,
    Outcome,
)
from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.answers import ExitRecord, RunnerState
from groupwise.jobs.hosts.host import Request, RunnerRefused
from tests.fake_hosts import FakeHost, FakeHosts, Script
from tests.history_checker import violations
from tests.in_process_fleet import NoJitter

MISFORTUNES = ("cut", "cut", "reboot", "no power", "lost")
HAPPENINGS = (
    *("submit", "tick", "work_and_die") * 3,
    *("work_steadily",) * 5,
    *("misfortune", "all_is_well_again") * 2,
    *("cancel", "kill_supervisor", "old_message", "act_on_old_knowledge", "crash"),
)
"""As often as they stand here."""
NOTHING: Mapping[str, Any] = {}
MACHINES = {"a": ["GPU-a0"], "b": ["GPU-b0"], "c": ["GPU-c0", "GPU-c1"]}
SCRIPTS = (
    Script(ticks=2), Script(ticks=2, code=1), Script(ticks=3, ignores_term=True),
    Script(ticks=2, code=64), Script(refusal="gpu_busy"), Script(ticks=10**6),
    Script(ticks=1, leaks=True),
)  # fmt: skip


@dataclass
class ModelJob:
    """A row of `jobs`."""

    job_id: str
    machines: int
    status: JobStatus = JobStatus.QUEUED
    cancel: bool = False
    spent: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class ModelMember:
    """A row of `attempt_members`, with the GPU that is reserved for it."""

    vm: str
    gpu: str
    reserved: bool = True
    released: bool = False
    abandoned: bool = False
    exit: ExitRecord | None = None


@dataclass
class ModelAttempt:
    """A row of `attempts`."""

    job: ModelJob
    epoch: int
    members: list[ModelMember]
    state: AttemptState = AttemptState.RESERVED
    cleanup: Cleanup = Cleanup.PENDING


@dataclass
class Volatile:
    """What a dispatcher knows of a member, and forgets when it dies."""

    reading: ObservedState = ObservedState.UNKNOWN
    exit: ExitRecord | None = None
    refusal: str | None = None
    quiet: bool | None = None
    collected: bool = False


class Fleet(RuleBasedStateMachine):
    """Jobs, attempts, machines and a dispatcher that may die between any two effects."""

    def __init__(self) -> None:
        super().__init__()
        self.rack = FakeHosts(MACHINES)
        self.jobs: dict[str, ModelJob] = {}
        self.attempts: dict[int, ModelAttempt] = {}
        self.minds: dict[tuple[int, int], Volatile] = {}
        self.lost: set[str] = set()
        self.sent: list[tuple[str, Request]] = []
        self.moves: list[tuple[AttemptState, AttemptState]] = []
        self.final: dict[str, JobStatus] = {}
        self.judged = 0
        self.delayed = False
        """Requests that are sent now arrive later, or never."""

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        """One rule, so that hypothesis leaves none of these out and work is done more often than harm."""
        possible = {
            "submit": len(self.jobs) < 4, "cancel": bool(self.jobs), "misfortune": True,
            "kill_supervisor": bool(self.rack.running()), "old_message": bool(self.sent),
            "work_and_die": bool(self._open()), "act_on_old_knowledge": bool(self._open()),
        }  # fmt: skip
        name = data.draw(st.sampled_from([n for n in HAPPENINGS if possible.get(n, True)]))
        note(name)
        getattr(self, name)(data)

    # what people do

    def submit(self, data: st.DataObject) -> None:
        machines = data.draw(st.integers(1, 2))
        scripts = data.draw(st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=3))
        job_id = f"job-{len(self.jobs)}"
        self.jobs[job_id] = ModelJob(job_id, machines)
        self.rack.scripts[job_id] = scripts
        self.rack.record("accepted", job=job_id)

    def cancel(self, data: st.DataObject) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        if job.status is JobStatus.RUNNING:
            job.cancel = True
            self.rack.record("cancel_requested", job=job.job_id)
        elif job.status not in FINAL:
            self._set_job(job, JobStatus.CANCELLED)

    # what happens to machines

    def misfortune(self, data: st.DataObject) -> None:
        vm, what = (
            data.draw(st.sampled_from(sorted(MACHINES))),
            data.draw(st.sampled_from(MISFORTUNES)),
        )
        host = self.rack[vm]
        match what:
            case "cut":
                host.cut()
            case "no power" if host.powered:
                host.power_off()
            case "reboot" if host.powered:
                host.power_off()
                host.boot()
            case "lost" if not self.lost:
                if host.powered:
                    host.power_off()
                self.lost.add(vm)  # an operator says so, and is right
                self.rack.record("lost", vm=vm)
            case _:
                pass

    def all_is_well_again(self, _: st.DataObject | None = None) -> None:
        for host in self.rack:
            if not host.powered and host.name not in self.lost:
                host.boot()
            host.heal()
            host.clean_up()

    def kill_supervisor(self, data: st.DataObject) -> None:
        job, epoch = data.draw(st.sampled_from(self.rack.running()))
        child_too = data.draw(st.booleans())
        for member in self.attempts[epoch].members:
            folder = self.rack[member.vm].folders.get(f"{job}.{epoch}")
            if folder and folder.process:
                self.rack[member.vm].kill_supervisor(job, epoch, child_too=child_too)
                return

    def old_message(self, data: st.DataObject) -> None:
        """Something that was sent long ago arrives, perhaps once more."""
        vm, request = data.draw(st.sampled_from(self.sent))
        if self.rack[vm].powered:
            self._perform(self.rack[vm], request)

    # what the dispatcher does

    def work_steadily(self, data: st.DataObject) -> None:
        """Nobody dies for a while, and machines are slow."""
        for _ in range(data.draw(st.integers(1, 4))):
            self._round()

    def tick(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            self.rack.tick()

    def work_and_die(self, data: st.DataObject) -> None:
        """One look and what follows; the dispatcher dies after `survives` effects. Without `arrives` what it sent last comes late."""
        self._claim_all()
        attempt = data.draw(st.sampled_from(self._open()))
        survives, arrives = data.draw(st.integers(0, 3)), data.draw(st.booleans())
        self._look(attempt)
        for number, effect in enumerate(decide(self._view(attempt))):
            if number == survives:
                self.delayed = not arrives
                self._do(attempt, effect)
                self.delayed = False
                self.crash()
                return
            self._do(attempt, effect)

    def act_on_old_knowledge(self, data: st.DataObject) -> None:
        """No look before: what is known is what was known."""
        attempt = data.draw(st.sampled_from(self._open()))
        for effect in decide(self._view(attempt)):
            self._do(attempt, effect)

    def crash(self, _: st.DataObject | None = None) -> None:
        self.minds.clear()

    def _round(self) -> None:
        self._claim_all()
        for attempt in self._open():
            self._look(attempt)
            for effect in decide(self._view(attempt)):
                self._do(attempt, effect)

    # the model of the control plane

    def _open(self) -> list[ModelAttempt]:
        return [a for a in self.attempts.values() if a.cleanup is not Cleanup.CLEAN]

    def _claim_all(self) -> None:
        for job in self.jobs.values():
            if job.status is JobStatus.QUEUED:
                self._claim(job)

    def _claim(self, job: ModelJob) -> None:
        held = {m.gpu for a in self.attempts.values() for m in a.members if m.reserved}
        free: list[ModelMember] = []
        for vm, gpus in MACHINES.items():
            usable = [g for g in gpus if g not in held]
            if usable and vm not in self.lost and len(free) < job.machines:
                free.append(ModelMember(vm, usable[0]))
        if len(free) < job.machines:
            return
        epoch = len(self.attempts) + 1
        self.attempts[epoch] = ModelAttempt(job, epoch, free)
        self._set_job(job, JobStatus.RUNNING)

    def _mind(self, attempt: ModelAttempt, rank: int) -> Volatile:
        return self.minds.setdefault((attempt.epoch, rank), Volatile())

    def _view(self, attempt: ModelAttempt) -> AttemptView:
        return AttemptView(
            attempt.job.job_id,
            attempt.epoch,
            attempt.state,
            tuple(self._member(attempt, rank, m) for rank, m in enumerate(attempt.members)),
            cancel_requested=attempt.job.cancel,
            cleanup=attempt.cleanup,
        )

    def _member(self, attempt: ModelAttempt, rank: int, member: ModelMember) -> MemberView:
        mind = self._mind(attempt, rank)
        return MemberView(
            rank,
            member.vm,
            mind.reading,
            exit=mind.exit or member.exit,
            refusal=mind.refusal,
            lost=member.vm in self.lost,
            collected=mind.collected,
            quiet=mind.quiet,
            released=member.released,
            abandoned=member.abandoned,
        )

    def _look(self, attempt: ModelAttempt) -> None:
        if attempt.state is AttemptState.RESERVED:
            return
        for rank in range(len(attempt.members)):
            self._ask(attempt, rank, "status")

    def _ask(
        self, attempt: ModelAttempt, rank: int, verb: str, body: Mapping[str, Any] = NOTHING
    ) -> dict[str, Any] | None:
        member, mind = attempt.members[rank], self._mind(attempt, rank)
        host = self.rack[member.vm]
        request = Request(verb, {"job": attempt.job.job_id, "epoch": attempt.epoch, **body})
        if verb in ("launch", "void", "kill"):
            self.sent.append((member.vm, request))
        if self.delayed:
            return None
        if not (host.powered and host.connected):
            self.minds[attempt.epoch, rank] = replace(mind, reading=ObservedState.UNREACHABLE)
            return None
        answer = self._perform(host, request)
        if answer is not None and "state" in answer:
            self._hear(attempt, rank, answer)
        return answer

    def _perform(self, host: FakeHost, request: Request) -> dict[str, Any] | None:
        try:
            return dict(host.perform(request).body)
        except RunnerRefused:
            return None

    def _hear(self, attempt: ModelAttempt, rank: int, answer: dict[str, Any]) -> None:
        state, mind = answers.parse_member_state(answer), self._mind(attempt, rank)
        never_ran = state.state is RunnerState.LOST and state.pid is None
        mind.reading = ObservedState.ABSENT if never_ran else ObservedState(state.state)
        mind.exit = state.exit or mind.exit
        mind.refusal = state.refused.code if state.refused else mind.refusal

    def _do(self, attempt: ModelAttempt, effect: Effect) -> None:
        match effect:
            case Move():
                if not self.delayed:  # a transaction does not come late
                    self._move(attempt, effect)
            case Launch(rank):
                body = {
                    "rank": rank, "members": len(attempt.members), "spec": {"files": {}}, "gpus": [attempt.members[rank].gpu],
                }  # fmt: skip
                self._ask(attempt, rank, "launch", body)
            case Void(rank):
                self._ask(attempt, rank, "void")
            case Kill(rank):
                self._ask(attempt, rank, "kill", {"grace": 1})
            case Collect(rank):
                if self._ask(attempt, rank, "manifest") is not None:
                    self._mind(attempt, rank).collected = True
            case CheckRelease(rank):
                self._check_release(attempt, rank)
            case Abandon(rank) if not self.delayed:
                attempt.members[rank].abandoned = True
                self._give_back(attempt, rank)

    def _check_release(self, attempt: ModelAttempt, rank: int) -> None:
        found = self._ask(attempt, rank, "release", {"gpus": [attempt.members[rank].gpu]})
        if found is None:
            return
        self._mind(attempt, rank).quiet = found["clean"]
        if attempt.state is AttemptState.ENDED:
            if found["clean"]:
                attempt.members[rank].released = True
                self._give_back(attempt, rank)
            elif attempt.cleanup is Cleanup.PENDING:
                attempt.cleanup = Cleanup.LEAKING

    def _give_back(self, attempt: ModelAttempt, rank: int) -> None:
        attempt.members[rank].reserved = False
        if all(m.released or m.abandoned for m in attempt.members):
            attempt.cleanup = Cleanup.CLEAN

    def _move(self, attempt: ModelAttempt, move: Move) -> None:
        for rank, member in enumerate(attempt.members):
            member.exit = self._mind(attempt, rank).exit or member.exit
        self.moves.append((attempt.state, move.to))
        attempt.state = move.to
        if move.to is not AttemptState.ENDED:
            return
        assert move.outcome is not None
        job = attempt.job
        verdict = after_end(
            JobFacts(job.cancel, job.spent), move.outcome, move.failure, move.because, NoJitter()
        )
        job.spent = dict(verdict.spent)
        self._set_job(job, verdict.status)
        if move.outcome is Outcome.VOID:
            for rank, member in enumerate(attempt.members):
                member.released = True
                self._give_back(attempt, rank)

    def _set_job(self, job: ModelJob, status: JobStatus) -> None:
        assert status in JOB_MOVES[job.status], f"{job.job_id}: {job.status} → {status}"
        job.status = status
        self.rack.record("status", job=job.job_id, status=str(status), generation=0)

    # what must hold

    @invariant()
    def no_promise_is_broken(self) -> None:
        if len(self.rack.history) != self.judged:
            self.judged = len(self.rack.history)
            found = violations(self.rack.history, settled=False)
            assert not found, f"{found}\n{self.rack.history}"

    @invariant()
    def attempts_move_as_the_table_says(self) -> None:
        assert all(after in ATTEMPT_MOVES[before] for before, after in self.moves)
        self.moves.clear()

    @invariant()
    def a_running_job_has_one_live_attempt_and_no_other_has_any(self) -> None:
        live: dict[str, int] = {}
        for attempt in self.attempts.values():
            if attempt.state is not AttemptState.ENDED:
                live[attempt.job.job_id] = live.get(attempt.job.job_id, 0) + 1
        assert live == {j.job_id: 1 for j in self.jobs.values() if j.status is JobStatus.RUNNING}

    @invariant()
    def what_is_alive_holds_its_gpu(self) -> None:
        """Unless an operator has said that its machine is gone, and the machine is."""
        for attempt in self.attempts.values():
            for member in attempt.members:
                folder = self.rack[member.vm].folders.get(f"{attempt.job.job_id}.{attempt.epoch}")
                if folder is not None and folder.holds:
                    assert member.reserved, f"{folder.key} on {member.vm} is alive"

    def teardown(self) -> None:
        """The storm is over: machines are back, somebody works steadily. Nothing is left undone."""
        self.all_is_well_again()
        for scripts in self.rack.scripts.values():
            scripts[:] = [replace(script, ticks=min(script.ticks, 3)) for script in scripts]
        for process in [f.process for host in self.rack for f in host.folders.values()]:
            if process is not None:
                process.left = min(process.left, 3)
        for _ in range(400):
            self._one_quiet_turn()
            if not self._open() and all(
                j.status in FINAL or not self._has_room(j) for j in self.jobs.values()
            ):
                break
        for job in self.jobs.values():
            assert job.status in FINAL or not self._has_room(job), f"{job} is stuck"
        assert self._open() == []
        self.no_promise_is_broken()

    def _has_room(self, job: ModelJob) -> bool:
        """There are machines enough for it that are not lost."""
        return len(MACHINES) - len(self.lost) >= job.machines

    def _one_quiet_turn(self) -> None:
        self.rack.tick()
        for host in self.rack:
            host.clean_up()
        self._round()
        for attempt in self.attempts.values():
            assert over(self._view(attempt)) == (attempt.cleanup is Cleanup.CLEAN)


class LongStorm(Fleet):
    """As much again, and more."""


def of_length(machine: type[Fleet], examples: int) -> Any:
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return case


FleetStateMachine = of_length(Fleet, 40)
FleetInALongStorm = pytest.mark.soak(suite="fleet")(of_length(LongStorm, 1000))
