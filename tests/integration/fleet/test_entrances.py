"""A real GRPO job by the five entrances, on a real machine, to its very end. And one of them loses its machine on the way.

1. However it was submitted, a job has the same command; it ends `completed`, and its model is there.
2. Its log is byte for byte what the machine has; its end is told on `jobs.completed`.
3. A message alone wakes a dispatcher that would not have looked for ten minutes; a row alone is found without any message.
4. One that loses its machine after a checkpoint was mirrored goes on from there on another one: no step before the checkpoint is
   done twice, and its weights are those of a job that nothing happened to, to the bit.

In a run of the tests two of the five train, and the others are held; with `make soak SUITE=fleet` all of them train and lose their machine.
"""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from groupwise.fleet.client import FleetClient
from groupwise.fleet.files.artefacts import artefact_folder
from groupwise.fleet.files.logs import log_path
from groupwise.fleet.store.tables import VM, Checkpoint, Job
from groupwise.fleet.verbs import machines
from groupwise.fleet.verbs.actor import Actor
from tests.integration.fleet import tiny_grpo
from tests.integration.fleet.whole_fleet import (
    WholeFleet,
    hearing,
    open_the_interpreter,
    whole_fleet,
)
from tests.postgres import Postgres

pytestmark = pytest.mark.timeout(900)

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

    def cli(self, hold: bool) -> str:
        """Files of the submitter travel."""
        further = {
            k: v for k, v in COLUMNS.items() if k not in {"model", "hyperparams", "use_unsloth"}
        }
        return self.fleet.submit(
            *("--kind", "GRPO", "--model", "tiny", "--dataset", str(self.data)),
            *("--reward_function", f"{self.rewards}:share", "--reward_function", "correctness"),
            *(word for name, value in further.items() for word in (f"--{name}", str(value))),
            *("--hyperparams", json.dumps(COLUMNS["hyperparams"])),
            *(["--hold"] if hold else []),
        )

    def http(self, hold: bool) -> str:
        """Any client of HTTP."""
        with httpx2.Client(headers={"Authorization": f"Bearer {self.key}"}) as client:
            request = {**COLUMNS, **self.there, "job_type": "GRPO", "hold": hold}
            answer = client.post(f"{self.address}/jobs", json=request)
        assert answer.status_code == 201, answer.text
        return answer.json()["job_id"]

    def python(self, hold: bool) -> str:
        """The client of the package; it uploads what travels."""
        with FleetClient(self.address, self.key) as client:
            rewards = f"{tiny_grpo.REWARDS}:share,correctness"
            request = tiny_grpo.row(reward_function=rewards) | COLUMNS | {"hold": hold}
            job = client.submit(request, files=[self.data, self.rewards])
        return job["job_id"]

    def row(self, hold: bool, job_id: str = "by-row") -> str:
        """A row, as SQL; what it does not say has defaults."""
        written = {"job_id": job_id, **self.there, **COLUMNS}
        written |= {"status": "held"} if hold else {}
        written["hyperparams"] = json.dumps(written["hyperparams"])
        names, marks = ", ".join(written), ", ".join(["%s"] * len(written))
        self.fleet.sql(f"INSERT INTO jobs ({names}) VALUES ({marks})", *written.values())
        return job_id

    def message(self, hold: bool) -> str:
        """The id of a row that is there."""
        job_id = self.row(hold, "by-message")
        time.sleep(1.0)  # nobody looks meanwhile: nothing else could show that
        assert self.fleet.job(job_id).status == "queued"
        assert self.fleet.attempts(job_id) == []
        self.fleet.nats.publish("jobs.new", job_id.encode())
        return job_id


@pytest.fixture
def fleet(network_of_the_fleet: None, postgres: Postgres) -> Iterator[WholeFleet]:
    if os.geteuid() != 0:
        pytest.skip("machines in namespaces need root")
    with whole_fleet(postgres) as made:
        made.hosts[DOOMED].gpus(1)
        made.hosts[SAFE].gpus(5)
        made.add_machines()
        yield made


@pytest.fixture
def told(fleet: WholeFleet) -> Iterator[dict[str, dict[str, Any]]]:
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
        verb = machines.undrain if name == vm else machines.drain
        fleet.database.run(
            lambda s, name=name, verb=verb: verb(s, Actor("user:test"), name) and None
        )


def submitted(
    fleet: WholeFleet, ways: Entrances, running: set[str], victims: set[str], chance: random.Random
) -> dict[str, str]:
    """A job by each entrance, held, or in a machine that stays, or in one that does not; entrance → id."""
    jobs: dict[str, str] = {}
    for name in ENTRANCES:
        only(fleet, DOOMED if name in victims else SAFE)
        job_id = jobs[name] = getattr(ways, name)(hold=name not in running)
        if name not in running:
            continue
        stopped = ways.stop(job_id) if name in victims else None
        fleet.until(lambda j=job_id: begun(fleet, j), f"the start of {name}")
        assert fleet.job(job_id).assigned_vm == (DOOMED if stopped else SAFE), fleet.story()
        if name == "message":  # it has woken somebody; from now on somebody looks
            assert fleet.controls["up"].stop() == 0
            fleet.start("up")
        if stopped:
            lose_the_machine(fleet, job_id, chance.choice((True, False)))
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
        fleet.cli("vm", "lost", DOOMED, "--yes")
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
    """It went on from its checkpoint, as the record of the run itself says."""
    [first, second] = fleet.attempts(job_id)
    assert first.outcome == "failed"
    assert first.failure_class in ("host_lost", "reboot")
    assert first.failure_class == "reboot" or not first.charged
    assert fleet.job(job_id).retry_count == 1
    at = second.resume_from["step"]
    assert at >= HELD_AT
    log = log_path(fleet.place.logs, job_id, second.epoch).read_text()
    assert f"step {at + 1}/" in log
    assert f"step {at}/" not in log
    folder = artefact_folder(fleet.place.artefacts, job_id, second.epoch)
    with sqlite3.connect(folder / "outputs/grpo/run.db") as record:
        steps = dict(record.execute("SELECT step, finished_at FROM steps ORDER BY step"))
        resumes = list(record.execute("SELECT step, steps_dropped FROM resumes"))
    record.close()
    assert list(steps) == list(range(min(steps), min(steps) + tiny_grpo.STEPS))
    done = list(steps.values())
    assert all(time < second.created_at for time in done[:at])
    assert all(time > second.created_at for time in done[at:])
    assert len(resumes) == 1
    assert weights(fleet, job_id) == reference


def commands(fleet: WholeFleet, jobs: dict[str, str]) -> set[tuple[str, ...]]:
    """Of jobs that nobody is asked to begin, once they are admitted; wherever their files lie."""
    waiting = select(Job).where(Job.job_id.in_(jobs.values()), Job.admitted_at.is_(None))
    fleet.until(lambda: not fleet.rows(waiting), "admission of all")
    specs = [fleet.job(job_id).spec or {} for job_id in jobs.values()]
    return {tuple(re.sub(r"=(\./|/\S*/)", "=", word) for word in s["arguments"]) for s in specs}


def run_all(
    fleet: WholeFleet,
    heard: dict[str, Any],
    running: set[str],
    victims: set[str],
    chance: random.Random,
) -> None:
    fleet.start("up", SWEEP_SECONDS="600", REQUEUE_SECONDS="600")
    fleet.until_polled()
    key = fleet.cli("key", "new", "act").stdout.strip()
    with fleet.api() as address:
        ways = Entrances(fleet, address, key)
        jobs = submitted(fleet, ways, running, victims, chance)
        assert len(commands(fleet, jobs)) == 1
        held = {name for name in jobs if name not in running}
        for name in held:
            fleet.cli("cancel", jobs.pop(name))
        if victims == running:
            jobs["undisturbed"] = ways.row(False, "undisturbed")
        for job_id in jobs.values():
            check_end(fleet, job_id, heard)
    undisturbed = [job for name, job in jobs.items() if name not in victims]
    reference = weights(fleet, undisturbed[0])
    for job_id in undisturbed:
        assert len(fleet.attempts(job_id)) == 1
        assert weights(fleet, job_id) == reference
    for name in victims:
        check_resumed(fleet, jobs[name], reference)
    fleet.until_idle()
    assert len(fleet.rows(select(Job))) == len(jobs) + len(held)


def test_five_entrances_and_one_lost_machine(
    fleet: WholeFleet, told: dict[str, dict[str, Any]]
) -> None:
    chance = drawn()
    victim, other = chance.choice(ENTRANCES), chance.choice(ENTRANCES[1:])
    print(f"the one that loses its machine is {victim}")
    running = {"message", other if victim == "message" else victim}
    run_all(fleet, told, running, {victim}, chance)


@pytest.mark.soak(suite="fleet")
def test_all_entrances_of_a_fleet_lose_their_machines(
    fleet: WholeFleet, told: dict[str, dict[str, Any]]
) -> None:
    run_all(fleet, told, set(ENTRANCES), set(ENTRANCES), drawn())


def drawn() -> random.Random:
    """Chance that can be had once more."""
    seed = int(os.environ.get("GROUPWISE_TEST_SEED") or random.randrange(1000))
    print(f"GROUPWISE_TEST_SEED={seed}")
    return random.Random(seed)
