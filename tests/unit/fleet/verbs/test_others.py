"""Projects, the state of the fleet, submissions and what is cleared away."""

import itertools
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.fleet.queue.request import JobRequest
from groupwise.fleet.store.database import seconds
from groupwise.fleet.store.tables import GPU, Attempt, ControlProcess, Job, Member, Reservation
from groupwise.fleet.verbs import jobs, prune, status, submission
from groupwise.wire.problems import Refusal

# --- projects


# --- the fleet as a whole


def process(small: Any, role: str, silent: float, owner: str, **facts: Any) -> None:
    def write(session: Session) -> None:
        seen = seconds(session) - silent
        row = {"owner": owner, "role": role, "host": "h", "pid": 1}
        session.add(ControlProcess(**row, started_at=seen, seen_at=seen, facts=facts))

    small.database.run(write)


def test_alarms_say_what_to_do(small: Any) -> None:
    small.machine("silent", contact="unreachable", problem="timed out")
    small.machine("strange", contact="untrusted")
    small.machine("noisy", cordoned="three launches failed")
    job = small.job("completed")
    small.attempt(job, "noisy", state="ended", cleanup="leaking")
    found = {each["kind"]: each for each in small.do(status.overview)["alarms"]}
    assert "vm lost silent" in found["unreachable"]["remedy"]
    assert "vm trust strange" in found["untrusted"]["remedy"]
    assert "vm uncordon noisy" in found["cordoned"]["remedy"]
    assert found["leaking"]["job_id"] == job
    seen = {each["kind"] for each in small.as_("ours").do(status.overview)["alarms"]}
    assert seen == {"role_missing"}


def told_of(fleet: Any, kind: str) -> list[str]:
    return [each["message"] for each in fleet.do(status.overview)["alarms"] if each["kind"] == kind]


@pytest.mark.parametrize(
    ("fact", "kind"), [("folder", "folder_not_shared"), ("release", "releases_differ")]
)
def test_living_processes_that_are_one_fleet_and_differ_are_told_of(
    small: Any, fact: str, kind: str
) -> None:
    process(small, "dispatcher", 0.0, "a", **{fact: "one"})
    process(small, "api", 0.0, "b", **{fact: "one"})
    process(small, "poller", 0.0, "c")
    process(small, "dispatcher", status.SILENT_SECONDS + 5, "dead", **{fact: "other"})
    assert told_of(small, kind) == []
    process(small, "tracker", 0.0, "d", **{fact: "other"})
    (message,) = told_of(small, kind)
    assert "api on h (process 1), dispatcher on h (process 1); " in message
    assert message.endswith("tracker on h (process 1)")
    assert told_of(small.as_("ours"), kind) == []


# --- submitting


def request(**more: Any) -> JobRequest:
    return JobRequest.model_validate({"arguments": ["true"], **more})


def test_a_wish_that_no_machine_fulfils_is_noted(small: Any) -> None:
    """Accepted all the same: the machine may come. A plan has told it anyway."""
    process(small, "dispatcher", 0.0, "a")
    small.machine("h1", gpus=2, labels={"zone": "a", "disk": "fast", "cores": 8})
    small.machine("h2", gpus=1, labels={"zone": "b"})
    small.machine("h11", active=False, labels={"zone": "c"})
    small.database.run(lambda s: s.execute(update(GPU).values(model="NVIDIA A100")))
    wishes: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"vm": "h11"}, ("'h11'", "did you mean h1?")),
        ({"vm": "0", "named": [1]}, ("'0'", "GPU 1 of it", "there are h1, h2")),
        ({"labels": {"disk": "fat"}}, ("label disk=fat", "did you mean disk=fast?")),
        ({"labels": {"zone": "b", "disk": "fast"}}, ("disk=fast and zone=b together",)),
        ({"vm": "h2", "labels": {"disk": "fast"}}, ("h2", "disk=fast", "there are zone=b")),
        ({"gpu_model": "h900"}, ("h900", "there are NVIDIA A100")),
        ({"vm": "h1", "named": [0, 7]}, ("h1", "GPU 7")),
        ({"named": ["GPU-x"]}, ("GPU-x",)),
        ({"vm": "h1", "named": [0], "gpu_model": "a100", "labels": {"zone": "a"}}, ()),
        ({"labels": {"cores": "8"}}, ()),
    )
    for needs, words in wishes:
        asked = request(resources={"gpus": len(needs.get("named", "1")), **needs})
        (job,) = small.do(submission.submit_all, [asked])
        assert len(job["notes"]) == bool(words)
        assert [word for word in words if word not in job["notes"][0]] == []
        assert small.do(submission.plan, asked)["notes"] == []


def test_a_plan_leaves_nothing(small: Any) -> None:
    small.machine("vm-1")
    found = small.do(submission.plan, request())
    assert (found["job_id"], found["where"], found["waits"]) == (None, ["vm-1"], [])
    assert small.do(jobs.listing, jobs.JobFilter()) == []
    assert small.events() == []
    found = small.do(submission.plan, request(resources={"gpus": 3}))
    assert found["where"] == []
    assert found["waits"]


def test_the_first_of_several_that_is_wrong_is_told(small: Any) -> None:
    """Whenever in the course of it that is found out: what cannot be written, and what could never run."""
    small.machine("vm-1")
    wrong: tuple[dict[str, Any], ...] = ({"name": "\0"}, {"output_dir": "../elsewhere"})
    for first, second in itertools.product(wrong, wrong):
        several = [request(), request(), request(**first), request(), request(**second)]
        with pytest.raises(Refusal) as refused:
            small.do(submission.submit_all, several, key="k")
        (name,) = first
        assert refused.value.code == "invalid_request"
        assert refused.value.detail.startswith(f"job 3 of 5: {name}")
        (told,) = refused.value.errors
        assert (told.field, told.message.partition(" ")[0].rstrip(":")) == ("jobs.2", name)
    assert small.do(jobs.listing, jobs.JobFilter()) == []
    assert small.events() == []


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
    with pytest.raises(Refusal, match="may submit for ours, not for theirs"):
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


def test_what_another_job_is_to_come_after_stays(small: Any) -> None:
    jobs_of = {waits: (small.job("completed"), small.job("completed")) for waits in WAITING}
    free = small.job("completed")
    for waits, (first, second) in jobs_of.items():
        small.job(waits, request={"arguments": ["true"], "after": [f"{first}:ok", second]})
    small.job("cancelled", request={"arguments": ["true"], "after": [free]})
    needed = [job for pair in jobs_of.values() for job in pair]
    old(small, *needed, free)
    assert small.do(prune.old_jobs, 86400.0) == [free]
    assert small.do(prune.remove, [*needed, free]) == [free]
