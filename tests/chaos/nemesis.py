"""Random faults and client requests for a fleet, from one seed. `Nemesis.run` injects faults, repairs everything, and waits for idle.

    with real_fleet(machines=3, gpus=2) as fleet:
        assert Nemesis(fleet, seed).run(seconds=60) == []

Faults are injected one at a time and repaired a few seconds later: a killed process is started again, a machine without power boots.
Clients submit, cancel, hold, release, retry, send a request twice, and garbage. The seed does not decide when things happen among
many processes: the same seed gives the same faults, not the same run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, select

from groupwise.api.schemas.problems import Refusal
from groupwise.core.errors import RunError
from groupwise.jobs.fleet.operations import machines as machine_operations
from groupwise.jobs.fleet.store.events import ENDS
from groupwise.jobs.fleet.store.tables import GPU, VM, Cursor, Event, Job
from groupwise.jobs.fleet.tracker import NatsOutlet
from tests.chaos import collect_history
from tests.chaos.fleet import LEASE, OPERATOR, RealFleet, state_and_parent
from tests.history_checker import violations

MAX_WAITING = 14
"""Jobs that are not over; beyond that clients wait."""
OPERATED = 0.02
"""How likely an operator looks, each time that clients do something: without one all machines are drained after some minutes."""
IDLE_TIMEOUT_S = 150.0
"""Seconds in which a repaired fleet must finish everything."""
MODES = (
    *("n/a", "err", "lost", "lost_exit", "garbage", "truncated", "non_utf8"),
    *("exit9", "no_mig_field", "empty", "apps_fail", "hang"),
)


class Nemesis:
    """One run."""

    def __init__(self, fleet: RealFleet, seed: int) -> None:
        self.fleet = fleet
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._down: set[str] = set()
        """What is not as it should be: names of machines, processes and servers."""
        self._jobs: list[str] = []
        self._unsure: dict[str, dict[str, Any]] = {}
        """Submitted, and nobody knows whether that was heard."""
        self._submitted: dict[str, dict[str, Any]] = {}
        self._by_hand: set[str] = set()
        """Submitted by an INSERT."""

    def run(self, seconds: float) -> list[str]:
        """Inject faults for `seconds`, repair everything, wait until idle; return the violations."""
        fleet = self.fleet
        fleet.start()
        fleet.until_polled()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._heal_what_is_due(time.monotonic())
            self._client()
            if self.rng.random() < 0.5:
                self._inject_fault()
            time.sleep(self.rng.uniform(0.1, 0.6))
        self._heal_what_is_due(float("inf"))
        self._until_rest()
        return self.check_history()

    def check_history(self) -> list[str]:
        """The violations, and crashes of control processes."""
        told = collect_history.whole_history(self.fleet)
        collect_history.write(told, self.fleet.folder / "history.jsonl")
        return [*violations(told, gpu_memory_mb=81_559), *self._complaints()]

    def _complaints(self) -> list[str]:
        """A control process may say that something cannot be reached, but never that it crashed."""
        found: list[str] = []
        for name, control in self.fleet.controls.items():
            lines = control.log().splitlines()
            for number, line in enumerate(lines):
                if line.startswith("Traceback") or " crashed" in line:
                    found.append(
                        f"{name} said: {' | '.join(lines[max(0, number - 1) : number + 60])}"
                    )
                    break
        return found

    def summary(self) -> str:
        """What happened, in a few words."""
        told = self.fleet.told()
        starts = sum(r["what"] == "start" for r in told)
        faults = ", ".join(f"{n} {name}" for name, n in self.faults.most_common())
        return f"{len(self._jobs)} jobs, {starts} executions; {faults}"

    # clients

    def _client(self) -> None:
        try:
            self._settle_unsure()
            over = self.fleet.over()
            waiting = [job for job in self._jobs if job not in over]
            if len(waiting) < MAX_WAITING:
                self._submit()
            if self.rng.random() < 0.3 and self._jobs:
                self._verb(self.rng.choice(waiting or self._jobs))
            if self.rng.random() < 0.2:
                self._message()
            if self.rng.random() < 0.5:
                self.fleet.no_pauses()
            if self.rng.random() < OPERATED:
                with contextlib.suppress(Refusal):  # an answer was lost, and it is done already
                    self._repair()
        except RunError:
            pass  # the database is away; whoever asks tries again

    def _submit(self) -> None:
        fleet, job = self.fleet, self.fleet.new_id()
        document = fleet.document(self._plays(), **self._request())
        self._submitted[job] = document
        self._try_to_submit(job, document)

    def _try_to_submit(self, job: str, document: dict[str, Any]) -> None:
        fleet = self.fleet
        self._unsure[job] = document
        if self.rng.random() < 0.2:
            self._by_hand.add(job)
            row = {"job_id": job, "job_type": "COMMAND", "request": document}
            fleet.database.run(lambda s: s.get(Job, job) or s.execute(insert(Job).values(**row)))
        else:
            fleet.database.run(lambda s: fleet.admit(s, job, document))
        self._accepted(job, document)

    def _accepted(self, job: str, document: dict[str, Any]) -> None:
        del self._unsure[job]
        limit = document["limits"].get("time_seconds")
        told = {} if limit is None else {"time_limit": limit}
        self.fleet.record("accepted", job=job, **told)
        self._jobs.append(job)

    def _settle_unsure(self) -> None:
        """Once more what got no answer: it is the same job."""
        for job, document in list(self._unsure.items()):
            there = self.fleet.look(lambda s, job=job: s.get(Job, job) is not None)
            if there:
                self._accepted(job, document)
            else:
                self._try_to_submit(job, document)

    def _plays(self) -> list[dict[str, Any]]:
        codes = [self.rng.choice([1, 137, 64, 3]) for _ in range(self.rng.choice([0, 0, 1, 2]))]
        return [*({**self._play(), "code": code} for code in codes), self._play()]

    def _play(self) -> dict[str, Any]:
        choice = self.rng.choice
        return {
            "steps": choice([0, 1, 5, 20, 60]), "pause": choice([0.05, 0.1]), "term": choice(["exit", "exit", "graceful", "ignore"]),
            "save": choice([0, 0, 3]), "child": choice([None, None, None, None, "dies", "stays"]), "log": choice(["text", "binary"]),
            "chunk": choice([0, 80, 80, 5_000, 300_000]),
        }  # fmt: skip

    def _request(self) -> dict[str, Any]:
        rng = self.rng
        further = [{"gpus": 2}, {"gpus": 1, "machines": 2}, {"gpus": 1, "share_mb": 30_000}]
        resources = rng.choice([*[{"gpus": 1}] * 3, *further])
        limits: dict[str, Any] = {"grace_seconds": rng.choice([0.5, 1.0])}
        if rng.random() < 0.1:
            limits["time_seconds"] = 2.0
        held = {"hold": True} if rng.random() < 0.1 else {}
        return {"resources": resources, "limits": limits, **held}

    def _verb(self, job: str) -> None:
        name = self.rng.choice(["cancel", "cancel", "hold", "release", "retry", "again"])
        try:
            if name == "again":
                if job not in self._by_hand:
                    document = self._submitted[job]
                    self.fleet.database.run(lambda s: self.fleet.admit(s, job, document))
            else:
                self.fleet.operate(name, job)
        except Refusal:
            pass  # it is not in the state for that
        self.faults[name] += 1

    def _message(self) -> None:
        if "nats" in self._down:
            return
        known = self.rng.choice(self._jobs or ["none"]).encode()
        payloads = [known, known, b"no-such-job", b"\xff\xfe\0", b"[]", b"", os.urandom(200)]
        self.fleet.nats.publish("jobs.new", self.rng.choice(payloads))

    # inject and repair faults

    def _inject_fault(self) -> None:
        fleet = self.fleet
        controls, hosts, trainers = fleet.controls.keys, fleet.hosts.keys, fleet.trainers
        faults: list[tuple[Callable[[Any], object], Callable[[], Iterable[Any]]]] = [
            *[(self._kill_control, controls)] * 3, *[(self._freeze_control, controls)] * 2,
            (self._kill_postgres, lambda: ["postgres"]), (self._kill_nats, lambda: ["nats"]),
            *[(self._cut_off, hosts)] * 2, (self._half_open, hosts), (self._reset, hosts),
            *[(self._power_loss, hosts)] * 2, (self._lose, hosts),
            *[(self._kill_trainer, trainers)] * 2, (self._kill_supervisor, trainers),
            (self._foreign_process, hosts), *[(self._strange_probe, hosts)] * 2,
        ]  # fmt: skip
        fault, among = self.rng.choice(faults)
        whole = sorted(each for each in among() if each not in self._down)
        if whole and fault(self.rng.choice(whole)) is not False:
            self.faults[fault.__name__.lstrip("_")] += 1

    def _later(self, name: str, least: float, most: float, heal: Callable[[], object]) -> None:
        """Between so many seconds."""
        self._down.add(name)

        def up() -> None:
            heal()
            self._down.discard(name)

        self._ends.append((time.monotonic() + self.rng.uniform(least, most), up))

    def _heal_what_is_due(self, now: float) -> None:
        due = [heal for at, heal in self._ends if at <= now]
        self._ends = [(at, heal) for at, heal in self._ends if at > now]
        for heal in due:
            heal()

    def _kill_control(self, name: str) -> None:
        control = self.fleet.controls[name]
        control.kill()
        self.fleet.record("control_killed", name=name)
        self._later(name, 0, 2 * LEASE, control.start)

    def _freeze_control(self, name: str) -> None:
        control = self.fleet.controls[name]
        control.freeze()
        self.fleet.record("control_frozen", name=name)
        self._later(name, 0.5, 2.5 * LEASE, control.thaw)

    def _kill_postgres(self, _: str) -> None:
        self.fleet.postgres.kill()
        self.fleet.record("postgres_killed")
        time.sleep(self.rng.choice([0, 0.5, 2.0]))
        self.fleet.postgres.start()

    def _kill_nats(self, name: str) -> None:
        self.fleet.nats.kill()
        self.fleet.record("nats_killed")
        self._later(name, 0, 8, self.fleet.nats.start)

    def _cut_off(self, name: str) -> None:
        self._network(name, "partition", 2 * LEASE)

    def _half_open(self, name: str) -> None:
        self._network(name, "half_open", 2 * LEASE)

    def _reset(self, name: str) -> None:
        self._network(name, "reset", 3)

    def _network(self, name: str, how: str, longest: float) -> None:
        host = self.fleet.hosts[name]
        getattr(host, how)()
        self.fleet.record("network", vm=name, how=how)

        def heal() -> None:
            host.heal()
            self.fleet.record("network", vm=name, how="healed")

        self._later(name, 0.5, longest, heal)

    def _power_loss(self, name: str) -> None:
        self.fleet.power_off(name)
        self._later(name, 0, 2 * LEASE, lambda: self._boot(name))

    def _boot(self, name: str) -> None:
        self.fleet.hosts[name].start()
        self.fleet.record("boot", vm=name)

    def _lose(self, name: str) -> bool:
        """An operator gives a machine up that is only cut off, or has no power; it comes back all the same."""
        host = self.fleet.hosts[name]
        dead = self.rng.random() < 0.5
        if dead:
            self.fleet.power_off(name)
        else:
            host.partition()
            self.fleet.record("network", vm=name, how="partition")
        self._later(name, 2, 2.5 * LEASE, (lambda: self._boot(name)) if dead else host.heal)
        try:
            self.fleet.lose(name)
        except RunError:
            return False  # the database is away; whether it was heard does not matter, the record stands
        return True

    def _kill_trainer(self, pid: int) -> bool:
        """Unless it has just said that it stops: it is held still for a look at that."""
        facts = self._facts(pid)
        if not facts:
            return False
        try:
            os.kill(pid, signal.SIGSTOP)
            while state_and_parent(pid)[0] not in "TX":
                time.sleep(0.001)
            name = "{job}.{epoch}.{rank}.jsonl".format(**facts)
            if b'"stop"' in (self.fleet.history / name).read_bytes():
                os.kill(pid, signal.SIGCONT)
                return False
            self.fleet.record("killed", **facts)
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _kill_supervisor(self, pid: int) -> bool:
        facts, parent = self._facts(pid), state_and_parent(pid)[1]
        if not facts or "groupwise-super" not in _name_of(parent):
            return False
        self.fleet.record("supervisor_killed", **facts)
        os.kill(parent, signal.SIGKILL)
        return True

    def _facts(self, pid: int) -> dict[str, Any]:
        """Of a trainer; none of one that has gone."""
        record = self.fleet.trainers().get(pid, {})
        return {k: record[k] for k in ("job", "epoch", "rank", "vm") if k in record}

    def _foreign_process(self, name: str) -> None:
        uuid = f"GPU-{name}-{self.rng.randrange(self.fleet.gpus)}"
        self._gpus(name, apps=[{"uuid": uuid, "pid": 1, "used_mb": 900}])

    def _strange_probe(self, name: str) -> None:
        self._gpus(name, mode=self.rng.choice(MODES))

    def _gpus(self, name: str, **odd: Any) -> None:
        host, count = self.fleet.hosts[name], self.fleet.gpus
        host.gpus(count, **odd)
        self._later(name, 1, 6, lambda: host.gpus(count))

    # rest

    def _until_rest(self) -> None:
        fleet = self.fleet
        fleet.start()
        fleet.record("healed")

        def rested() -> bool:
            try:
                self._settle_unsure()
                self._repair()
                fleet.no_pauses()
                return not fleet.unfinished()
            except RunError:
                return False

        fleet.until(rested, "rest", IDLE_TIMEOUT_S)
        fleet.until(self._all_is_told, "the tracker", IDLE_TIMEOUT_S)

    def _all_is_told(self) -> bool:
        """The tracker has told NATS of every job that ended."""
        ends = select(func.max(Event.event_id)).where(Event.kind.in_(ENDS))
        position = select(Cursor.position).where(Cursor.name == NatsOutlet.name)
        last, told = self.fleet.look(lambda s: (s.scalar(ends) or 0, s.scalar(position) or 0))
        return told >= last

    def _repair(self) -> None:
        """What an operator does: let go what was held, look at machines and GPUs that the fleet would not use any more."""
        rows, run = self.fleet.rows, self.fleet.database.run
        for job in rows(select(Job.job_id).where(Job.status == "held")):
            self.fleet.operate("release", job)
        for vm in rows(select(VM.vm_id).where(VM.drain_reason.is_not(None))):
            run(lambda s, vm=vm: machine_operations.undrain(s, OPERATOR, vm) and None)
        for gpu in rows(select(GPU).where(GPU.quarantine_reason.is_not(None))):
            run(
                lambda s, g=gpu: (
                    machine_operations.clear_quarantine(s, OPERATOR, g.vm_id, g.uuid) and None
                )
            )


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
