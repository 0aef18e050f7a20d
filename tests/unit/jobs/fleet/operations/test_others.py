"""Submissions, and pruning."""

from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.operations import jobs, prune, submission
from groupwise.jobs.fleet.queue.request import JobRequest
from groupwise.jobs.fleet.store.tables import Attempt, Job, Member, Reservation

# --- submitting


def request(**more: Any) -> JobRequest:
    return JobRequest.model_validate({"arguments": ["true"], **more})


def test_a_plan_leaves_nothing(small: Any) -> None:
    small.machine("vm-1")
    found = small.do(submission.plan, request())
    assert (found["job_id"], found["where"], found["waits"]) == (None, ["vm-1"], [])
    assert small.do(jobs.listing, jobs.JobFilter()) == []
    assert small.events() == []
    found = small.do(submission.plan, request(resources={"gpus": 3}))
    assert found["where"] == []
    assert found["waits"]


LINES = ("a", "b", "c")
WAITING = ("queued", "pending", "held")


def test_no_key_of_a_user_is_one_of_an_array(small: Any) -> None:
    small.machine("vm-1")
    array = small.do(submission.submit_all, [request(name=name) for name in LINES], key="k")
    keys = [small.row(job["job_id"]).idempotency_key for job in array]
    assert keys[0] == "k"
    for key in ("k:0", "k:1", "k 1", "k1"):
        (other,) = small.do(submission.submit_all, [request(name="b")], key=key)
        assert other["job_id"] not in {job["job_id"] for job in array}
    for key in keys[1:]:
        with pytest.raises(Refusal, match="printable ASCII"):
            small.do(submission.submit_all, [request(name="b")], key=key)


def test_one_submits_for_the_projects_that_one_may_see(small: Any) -> None:
    small.machine("vm-1")
    ours = small.as_("ours")
    (job,) = ours.do(submission.submit_all, [request()])
    assert job["project"] == "ours"
    with pytest.raises(Refusal, match="ours, not for theirs"):
        ours.do(submission.submit_all, [request()], project="theirs")


# --- clearing away


def old(small: Any, *job_ids: str) -> None:
    """As if they had ended long ago; the database lets nobody change that, so its rule is put aside."""

    def write(session: Session) -> None:
        session.connection().exec_driver_sql("DROP TRIGGER IF EXISTS fleet_job_final")
        past = func.datetime("now", "-2 days")
        session.execute(update(Job).where(Job.job_id.in_(job_ids)).values(end_time=past))

    small.database.run(write)


def test_only_what_nothing_needs_is_removed(small: Any) -> None:
    small.machine("vm-1")
    gone, leaking, needed, young = (small.job("completed") for _ in range(4))
    running = small.job("running")
    small.attempt(gone, "vm-1", state="ended", cleanup="clean")
    small.attempt(leaking, "vm-1", state="ended", cleanup="leaking")
    small.job("pending", blocked_on=needed)
    old(small, gone, leaking, needed, running)
    assert small.do(prune.old_jobs, 86400.0) == [gone]
    assert small.do(prune.remove, [gone, leaking, needed, running]) == [gone]
    assert small.events() == [("user:ada", "job.pruned")]

    def left(session: Session) -> list[int]:
        tables = (Attempt, Member, Reservation)
        return [session.scalar(select(func.count()).select_from(t)) or 0 for t in tables]

    assert small.database.read(left) == [1, 1, 1]
    assert small.row(young).status == "completed"


def test_jobs_that_other_jobs_wait_for_are_not_pruned(small: Any) -> None:
    jobs_of = {waits: (small.job("completed"), small.job("completed")) for waits in WAITING}
    free = small.job("completed")
    for waits, (first, second) in jobs_of.items():
        small.job(waits, request={"arguments": ["true"], "after": [f"{first}:ok", second]})
    small.job("cancelled", request={"arguments": ["true"], "after": [free]})
    needed = [job for pair in jobs_of.values() for job in pair]
    old(small, *needed, free)
    assert small.do(prune.old_jobs, 86400.0) == [free]
    assert small.do(prune.remove, [*needed, free]) == [free]
