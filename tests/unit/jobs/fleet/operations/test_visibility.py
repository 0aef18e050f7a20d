"""What a key that is bound to a project learns of machines, and of jobs of other projects: that they are there, and no more."""

import json
from typing import Any

import pytest
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.operations import jobs, machines, status, submission
from groupwise.jobs.fleet.operations.visibility import HIDDEN
from groupwise.jobs.fleet.queue.request import from_document
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.tables import GPU, VM, Job
from tests.unit.jobs.fleet.queue_helpers import submit

CANARY = "canary-of-others"
REQUEST = from_document({"arguments": ["true"], "resources": {"gpus": 1}})
REASONS = [
    "vm-1: unreachable: CANARY: CANARY",
    "vm-1, vm-2 and 3 more: draining: 3 launches in a row failed; the last one: CANARY\nCANARY",
    "vm-1: its GPUs cannot be read: CANARY",
    "vm-1: 1 of 2 GPUs fit, 2 wanted: GPU 0 is quarantined: CANARY; GPU 1 is quarantined: CANARY",
    "vm-1: GPU 1 is in use by somebody outside of the fleet (CANARY)",
    "vm-1: 0 of 2 fitting GPUs free, 1 wanted; GPUs are kept for CANARY, waiting for long",
    "it is kept for other projects; GPUs are kept for CANARY, waiting for long",
]


@pytest.fixture
def spoken_of(small: Any) -> Any:
    """Machines of which everything is said that can be."""
    way = {"user": CANARY, "ssh_key_path": CANARY, "workdir": CANARY, "probe": [CANARY]}
    for vm_id, gpus in (("vm-1", 2), ("vm-2", 1), ("vm-3", 1)):
        small.machine(vm_id, gpus=gpus, jump={"host": CANARY, "user": CANARY}, **way)
    small.machine(
        "vm-4", engine={"name": "slurm", "slots": 3, "options": [CANARY], "address": CANARY}
    )
    small.job("running", job_id=f"job-{CANARY}", project="theirs")
    small.attempt(f"job-{CANARY}", "vm-1", gpu=0)

    def write(session: Session) -> None:
        for vm_id, more in (
            ("vm-1", {"drain_reason": CANARY, "problem": CANARY}),
            ("vm-2", {"contact": "unreachable", "problem": CANARY}),
            ("vm-3", {}),
        ):
            vm = session.get_one(VM, vm_id)
            vm.facts = {"cpus": 8, "untracked": [{"job_id": CANARY}], "other": CANARY}
            for name, value in more.items():
                setattr(vm, name, value)
        for gpu in session.query(GPU):
            gpu.quarantine_reason, gpu.detail = f"{CANARY} (attempt {CANARY}.7)", CANARY
            gpu.fault_report = {"job_id": CANARY, "epoch": 7, "at": 1.0, "message": CANARY}
        for vm_id in ("vm-1", "vm-2", "vm-3"):
            said = {"user": CANARY}
            events.append(
                session,
                actor=CANARY,
                kind="vm.changed",
                vm_id=vm_id,
                before=said,
                after=said,
                detail=said,
            )

    small.database.run(write)
    return small


def waiting_job(small: Any) -> str:
    job_id = submit(small.database, project="ours", gpus=1)

    def write(session: Session) -> None:
        job = session.get_one(Job, job_id)
        job.blocked_reasons = [reason.replace("CANARY", CANARY) for reason in REASONS]
        detail = {"reasons": job.blocked_reasons}
        events.append(session, actor="d", kind="job.pending", job_id=job_id, detail=detail)

    small.database.run(write)
    return job_id


def everything(small: Any, job_id: str) -> dict[str, Any]:
    return {
        "listing": small.do(machines.listing, removed=True),
        "shown": [small.do(machines.show, f"vm-{n}") for n in (1, 2, 3)],
        "status": small.do(status.overview),
        "jobs": small.do(jobs.listing, jobs.filter_of()),
        "job": small.do(jobs.show, job_id),
        "plan": small.do(submission.plan, REQUEST, project="ours"),
        "released": small.do(jobs.release, job_id),
    }


def test_a_bound_key_does_not_see_through_machines(spoken_of: Any) -> None:
    job_id = waiting_job(spoken_of)
    seen = everything(spoken_of.as_("ours"), job_id)
    for name, found in seen.items():
        assert CANARY not in json.dumps(found), name
    assert HIDDEN in json.dumps(seen["plan"]["waits"])
    assert "it is kept for other projects; GPUs are kept for" in json.dumps(seen["job"])
    vm = seen["shown"][0]
    assert (vm["state"], vm["total_gpus"], vm["facts"]) == ("draining", 2, {"cpus": 8})
    assert vm["drain_reason"] == vm["gpus"][0]["quarantine_reason"] == HIDDEN
    assert [each["kind"] for each in vm["events"]] == ["vm.changed"]
    elastic = spoken_of.as_("ours").do(machines.show, "vm-4")
    assert elastic["engine"] == {"name": "slurm", "slots": 3}


def test_a_key_of_the_whole_fleet_sees_all(spoken_of: Any) -> None:
    job_id = waiting_job(spoken_of)
    for name, found in everything(spoken_of, job_id).items():
        assert CANARY in json.dumps(found), name
