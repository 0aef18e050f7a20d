"""A GRPO job, submitted in each of the five ways, runs to its end on a real machine. One of them loses its machine on the way.

1. However it was submitted, a job has the same command; it ends `completed`, and its model is there.
2. Its log is byte for byte what the machine has; its end is told on `jobs.completed`.
3. A message alone wakes a dispatcher that would not have looked for ten minutes; a row alone is found without any message.
4. One that loses its machine after a checkpoint was mirrored goes on from there on another one: no step before the checkpoint is
   done twice, and its weights are those of a job that nothing happened to, to the bit.

In a run of the tests a stand-in trains, and one job loses its machine; with `make soak SUITE=fleet` real trainings do, and all lose theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from groupwise.jobs.fleet.client import FleetClient
from groupwise.jobs.fleet.files.artefacts import artefact_folder
from groupwise.jobs.fleet.files.logs import log_path
from groupwise.jobs.fleet.operations import machines
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.store.tables import VM, Checkpoint, Job
from tests.integration.fleet import tiny_grpo
from tests.integration.fleet.whole_fleet import (
    WholeFleet,
    hearing,
    open_the_interpreter,
    stand_ins,
    whole_fleet,
)
from tests.postgres import Postgres

ENTRANCES = ("message", "row", "cli", "http", "python")
DOOMED, SAFE = "h1", "h2"
HELD_AT = 4
"""The step at which one stops that is to lose its machine: it has removed its first checkpoints by then."""
GATE = '''

def wait_at_the_gate():
    """The first attempt of a job that somebody holds stops once it has that checkpoint."""
    hold = {hold!r} + os.environ["GROUPWISE_ATTEMPT"].rpartition(".")[0]
    while os.environ["ATTEMPT"] == "0" and glob.glob({checkpoints!r}) and os.path.exists(hold):
        time.sleep(0.02)
'''
COLUMNS = {
    name: value
    for name, value in tiny_grpo.COLUMNS.items()
    if name not in {"dataset", "reward_function", "job_type"}
} | {"hyperparams": {**tiny_grpo.HYPERPARAMS, "run.save_steps": 1}}
"""Each step is a checkpoint, and the last two are kept, as by default."""


STAND_IN = """
import hashlib, json, os, sys, time
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
steps, hold = int(options["max_steps"]), {hold!r} + os.environ["GROUPWISE_ATTEMPT"].rpartition(".")[0]
begun, weights = 0, hashlib.sha256(open(options["dataset"].removeprefix("file:"), "rb").read()).hexdigest()
if "RESUME_FROM" in os.environ:
    begun = json.load(open(os.environ["RESUME_FROM"] + "/manifest.json"))["step"]
    weights = open(os.environ["RESUME_FROM"] + "/weights").read()
for step in range(begun + 1, steps + 1):
    time.sleep(step == {held_at} + 1)  # somebody may be about to hold it
    while step > {held_at} and os.environ["ATTEMPT"] == "0" and os.path.exists(hold):
        time.sleep(0.02)
    weights = hashlib.sha256(weights.encode()).hexdigest()
    print("step %d/%d" % (step, steps), flush=True)
    folder = "{checkpoints}/step-%d" % step
    os.makedirs(folder, exist_ok=True)
    open(folder + "/weights", "w").write(weights)
    files = {{"weights": {{"sha256": hashlib.sha256(weights.encode()).hexdigest(), "size": 64}}}}
    open(folder + "/manifest.new", "w").write(json.dumps({{"step": step, "files": files}}))
    os.rename(folder + "/manifest.new", folder + "/manifest.json")
for name in {expected!r}:
    os.makedirs(os.path.dirname(name), exist_ok=True)
    open(name, "a").write("" if "manifest" in name else weights)
"""
"""Trains as quickly as a machine counts: what it makes follows from data and steps, and from nothing else."""


class Entrances:
    """Ways to submit the same job. Each gives its id."""

    def __init__(self, fleet: WholeFleet, address: str, key: str) -> None:
        self.fleet, self.address, self.key = fleet, address, key
        self.data = fleet.shared / tiny_grpo.DATA
        self.rewards = fleet.shared / tiny_grpo.REWARDS
        self.data.write_bytes(tiny_grpo.files()[tiny_grpo.DATA])
        gate = GATE.format(
            hold=f"{fleet.shared}/hold-",
            checkpoints=f"{tiny_grpo.CHECKPOINTS}/step-{HELD_AT}/manifest.json",
        )
        called = tiny_grpo.SOURCE.replace(
            "    pairs =", "    wait_at_the_gate()\n    pairs ="
        ).replace("def share", "import glob, os, time\n\n\ndef share", 1)
        self.rewards.write_text(called + gate)
        self.there = {
            "model": "tiny",
            "dataset": str(self.data),
            "reward_function": f"{self.rewards}:share,correctness",
        }

    def stop(self, job_id: str) -> Path:
        """It stops after that checkpoint, until the file is gone."""
        path = self.fleet.shared / f"hold-{job_id}"
        path.touch()
        return path

    def cli(self) -> str:
        """Files of the submitter travel."""
        further = {
            k: v for k, v in COLUMNS.items() if k not in {"model", "hyperparams", "use_unsloth"}
        }
        return self.fleet.submit(
            *("--kind", "GRPO", "--model", "tiny", "--dataset", str(self.data)),
            *("--reward-function", f"{self.rewards}:share", "--reward-function", "correctness"),
            *(word for name, value in further.items() for word in (f"--{name}", str(value))),
            *("--hyperparams", json.dumps(COLUMNS["hyperparams"])),
        )

    def http(self) -> str:
        """Any client of HTTP."""
        with httpx2.Client(headers={"Authorization": f"Bearer {self.key}"}) as client:
            request = {**COLUMNS, **self.there, "job_type": "GRPO"}
            answer = client.post(f"{self.address}/jobs", json=request)
        assert answer.status_code == 201, answer.text
        return answer.json()["job_id"]

    def python(self) -> str:
        """The client of the package; it uploads what travels."""
        with FleetClient(self.address, self.key) as client:
            rewards = f"{tiny_grpo.REWARDS}:share,correctness"
            request = tiny_grpo.row(reward_function=rewards) | COLUMNS
            job = client.submit(request, files=[self.data, self.rewards])
        return job["job_id"]

    def row(self, job_id: str = "by-row") -> str:
        """A row, as SQL; what it does not say has defaults."""
        written = {"job_id": job_id, **self.there, **COLUMNS}
        written["hyperparams"] = json.dumps(written["hyperparams"])
        names, marks = ", ".join(written), ", ".join(["%s"] * len(written))
        self.fleet.sql(f"INSERT INTO jobs ({names}) VALUES ({marks})", *written.values())
        return job_id

    def message(self) -> str:
        """The id of a row that is there, and that nobody looks for while all machines are looked at."""
        job_id = self.row("by-message")
        moments = select(VM.last_polled).where(VM.active)
        last = max(self.fleet.rows(moments))
        self.fleet.until(lambda: min(self.fleet.rows(moments)) > last, "a look at all machines")
        assert self.fleet.job(job_id).status == "queued"
        assert self.fleet.attempts(job_id) == []
        self.fleet.nats.publish("jobs.new", job_id.encode())
        return job_id


@pytest.fixture
def fleet(
    request: pytest.FixtureRequest, network_of_the_fleet: None, postgres: Postgres
) -> Iterator[WholeFleet]:
    """With the trainer that the test names."""
    with whole_fleet(postgres) as made:
        made.hosts[DOOMED].gpus(1)
        made.hosts[SAFE].gpus(5)
        if request.param == "real":
            made.add_machines()
        else:
            text = STAND_IN.format(
                hold=f"{made.shared}/hold-",
                held_at=HELD_AT,
                checkpoints=tiny_grpo.CHECKPOINTS,
                expected=tiny_grpo.EXPECTED,
            )
            program = stand_ins(made.shared / "bin", text, "groupwise-train-grpo")
            made.add_machines(python=program)
        yield made


@pytest.fixture
def completion_messages(fleet: WholeFleet) -> Iterator[dict[str, dict[str, Any]]]:
    """What is said on `jobs.completed`, by job."""
    heard: dict[str, dict[str, Any]] = {}

    def listen(subject: str, payload: bytes) -> None:
        document = json.loads(payload)
        heard[document["job_id"]] = document

    with hearing(fleet.nats, "jobs.completed", listen):
        yield heard


def only(fleet: WholeFleet, vm: str) -> None:
    """New work is placed there alone."""
    for name in fleet.hosts:
        operation = machines.undrain if name == vm else machines.drain
        fleet.database.run(
            lambda s, name=name, operation=operation: (
                operation(s, Actor("user:test"), name) and None
            )
        )


def submitted(
    fleet: WholeFleet, ways: Entrances, victims: set[str], rng: random.Random
) -> dict[str, str]:
    """A job by each entrance, in a machine that stays, or in one that does not; entrance → id."""
    jobs: dict[str, str] = {}
    for name in ENTRANCES:
        only(fleet, DOOMED if name in victims else SAFE)
        job_id = jobs[name] = getattr(ways, name)()
        stopped = ways.stop(job_id) if name in victims else None
        fleet.until(lambda j=job_id: begun(fleet, j), f"the start of {name}")
        assert fleet.job(job_id).assigned_vm == (DOOMED if stopped else SAFE), fleet.story()
        if name == "message":  # it has woken somebody; from now on somebody looks
            assert fleet.controls["up"].stop() == 0
            fleet.start("up")
        if stopped:
            lose_the_machine(fleet, job_id, rng.choice((True, False)))
            stopped.unlink()
        if stopped and len(victims) > 1:
            fleet.until(lambda j=job_id: resumed(fleet, j), f"the second attempt of {name}")
            bring_back(fleet)
    return jobs


def begun(fleet: WholeFleet, job_id: str) -> bool:
    """Its machine has it: to place nothing new there does not concern it any more."""
    found = fleet.attempts(job_id)
    return bool(found) and found[-1].state not in {"reserved", "launching"}


def resumed(fleet: WholeFleet, job_id: str) -> bool:
    fleet.no_pauses()
    return len(fleet.attempts(job_id)) == 2 and begun(fleet, job_id)


def bring_back(fleet: WholeFleet) -> None:
    """The machine as new: for whoever comes next."""
    host = fleet.hosts[DOOMED]
    if not host.is_on():
        host.start()
    open_the_interpreter(host)
    query = select(VM.vm_id).where(VM.vm_id == DOOMED, VM.contact == "ok", VM.lost_at.is_(None))
    fleet.until(lambda: fleet.rows(query), "the return of the machine")


def lose_the_machine(fleet: WholeFleet, job_id: str, for_good: bool) -> None:
    """Its power, once a checkpoint of the job is safe. Then it is given up, or begins anew."""
    kept = select(Checkpoint.step).where(Checkpoint.job_id == job_id, Checkpoint.step >= HELD_AT)
    fleet.until(lambda: fleet.rows(kept), f"the mirrored checkpoint of {job_id}")
    assert fleet.job(job_id).assigned_vm == DOOMED
    fleet.hosts[DOOMED].power_loss()
    only(fleet, SAFE)
    if for_good:
        fleet.cli("vm", "mark-lost", DOOMED, "--yes")
    else:
        fleet.hosts[DOOMED].start()
        fleet.until(lambda: fleet.attempts(job_id)[0].state == "ended", "the end of its attempt")


def weights(fleet: WholeFleet, job_id: str) -> bytes:
    [*_, last] = fleet.attempts(job_id)
    folder = artefact_folder(fleet.place.artefacts, job_id, last.epoch)
    return (folder / "outputs/model.safetensors").read_bytes()


def check_end(fleet: WholeFleet, job_id: str, heard: dict[str, Any]) -> None:
    """Artefacts, log and news."""
    job, [*_, last] = fleet.ended(job_id), fleet.attempts(job_id)
    folder = artefact_folder(fleet.place.artefacts, job_id, last.epoch)
    missing = [name for name in tiny_grpo.EXPECTED if not (folder / name).exists()]
    assert missing == [], job_id
    kept = log_path(fleet.place.logs, job_id, last.epoch).read_bytes()
    assert kept == fleet.log_there(job_id, last.epoch)
    assert f"step {tiny_grpo.STEPS}/{tiny_grpo.STEPS}".encode() in kept
    assert (fleet.place.logs / f"{job_id}.log").read_bytes() == kept
    fleet.until(lambda: job_id in heard, f"the news of {job_id}")
    assert heard[job_id]["epoch"] == last.epoch
    assert heard[job_id]["exit_code"] == job.exit_code == 0


def check_resumed(fleet: WholeFleet, job_id: str, reference: bytes) -> None:
    """It went on from its checkpoint: as its log says, and the record of a real run itself."""
    [first, second] = fleet.attempts(job_id)
    assert first.outcome == "failed"
    assert first.failure_class in ("host_lost", "reboot")
    assert first.failure_class == "reboot" or not first.charged
    assert fleet.job(job_id).retry_count == 1
    at = second.resume_from["step"]
    assert at >= HELD_AT
    log = log_path(fleet.place.logs, job_id, second.epoch).read_text()
    assert (f"step {at + 1}/" in log, f"step {at}/" in log) == (True, False)
    assert weights(fleet, job_id) == reference
    file = artefact_folder(fleet.place.artefacts, job_id, second.epoch) / "outputs/grpo/run.db"
    if not file.read_bytes().startswith(b"SQLite"):
        return
    with contextlib.closing(sqlite3.connect(file)) as record:
        steps = dict(record.execute("SELECT step, finished_at FROM steps ORDER BY step"))
        resumes = list(record.execute("SELECT step, steps_dropped FROM resumes"))
    assert list(steps) == list(range(min(steps), min(steps) + tiny_grpo.STEPS))
    done = list(steps.values())
    assert all(time < second.created_at for time in done[:at])
    assert all(time > second.created_at for time in done[at:])
    assert len(resumes) == 1


def commands(fleet: WholeFleet, jobs: dict[str, str]) -> set[tuple[str, ...]]:
    """Wherever their files lie."""
    specs = [fleet.job(job_id).spec or {} for job_id in jobs.values()]
    return {tuple(re.sub(r"=(\./|/\S*/)", "=", word) for word in s["arguments"]) for s in specs}


@pytest.mark.parametrize(
    ("fleet", "lost"),
    [
        ("a stand-in", 1),
        pytest.param(
            *("real", len(ENTRANCES)),
            marks=[pytest.mark.soak(suite="fleet"), pytest.mark.timeout(1800)],
        ),
    ],
    indirect=["fleet"],
)
def test_five_entrances_and_lost_machines(
    fleet: WholeFleet, completion_messages: dict[str, dict[str, Any]], lost: int
) -> None:
    seed = int(os.environ.get("GROUPWISE_TEST_SEED") or random.randrange(1000))
    print(f"GROUPWISE_TEST_SEED={seed}")
    rng = random.Random(seed)
    victims: set[str] = set(rng.sample(ENTRANCES, lost))
    print(f"those that lose their machines are {victims}")
    fleet.start("up", SWEEP_SECONDS="600", REQUEUE_SECONDS="600")
    fleet.until_polled()
    key = fleet.cli("key", "new", "act").stdout.strip()
    with fleet.api() as address:
        ways = Entrances(fleet, address, key)
        jobs = submitted(fleet, ways, victims, rng)
        assert len(commands(fleet, jobs)) == 1
        if lost == len(ENTRANCES):
            jobs["undisturbed"] = ways.row("undisturbed")
        for job_id in jobs.values():
            check_end(fleet, job_id, completion_messages)
    undisturbed = [job for name, job in jobs.items() if name not in victims]
    reference = weights(fleet, undisturbed[0])
    for job_id in undisturbed:
        assert len(fleet.attempts(job_id)) == 1
        assert weights(fleet, job_id) == reference
    for name in victims:
        check_resumed(fleet, jobs[name], reference)
    fleet.until_idle()
    assert len(fleet.rows(select(Job))) == len(jobs)
