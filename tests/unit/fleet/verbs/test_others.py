"""Projects, the state of the fleet, submissions and what is cleared away."""

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from groupwise.fleet import tracker
from groupwise.fleet.queue.request import JobRequest
from groupwise.fleet.store import events
from groupwise.fleet.store.database import seconds
from groupwise.fleet.store.tables import GPU, Attempt, ControlProcess, Job, Member, Reservation
from groupwise.fleet.tracker import NatsOutlet
from groupwise.fleet.verbs import jobs, keys, machines, projects, prune, status, submission
from groupwise.wire.problems import Refusal

# --- projects


def test_a_project_is_made_and_changed(small: Any) -> None:
    assert small.do(projects.change, "p", weight=2.0, max_gpus=4)["max_gpus"] == 4
    assert small.do(projects.change, "p", max_gpus=None)["max_gpus"] is None
    (found,) = small.do(projects.listing)
    assert (found["name"], found["weight"], found["waiting"]) == ("p", 2.0, 0)
    assert [kind for _, kind in small.events()] == ["project.changed", "project.changed"]


def test_a_project_that_cannot_be(small: Any) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "nothing to change"),
        *(({"weight": weight}, "a number from 1e-06") for weight in (0.0, float("nan"), 1e300)),
        ({"max_gpus": -1}, "max_gpus -1"),
        ({"max_waiting": 10**20}, "2147483647"),
    )
    for wanted_of_it, told in refused:
        with pytest.raises(Refusal, match=told):
            small.do(projects.change, "p", **wanted_of_it)


# --- the fleet as a whole


def process(small: Any, role: str, silent: float, owner: str, **facts: Any) -> None:
    def write(session: Session) -> None:
        seen = seconds(session) - silent
        row = {"owner": owner, "role": role, "host": "h", "pid": 1}
        session.add(ControlProcess(**row, started_at=seen, seen_at=seen, facts=facts))

    small.database.run(write)


def test_the_dead_are_told_from_the_living(small: Any) -> None:
    process(small, "dispatcher", 0.0, "a")
    process(small, "poller", status.SILENT_SECONDS + 5, "b")
    found = small.do(status.overview)
    assert [each["alive"] for each in found["processes"]] == [True, False]
    (alarm,) = found["alarms"]
    assert alarm["kind"] == "role_missing"
    assert alarm["roles"] == ["poller", "requeue", "tracker"]


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


def test_a_disk_that_is_almost_full_is_told_once(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (tmp_path / "logs" / "not yet made", tmp_path)

    def told(fleet: Any) -> list[dict[str, Any]]:
        alarms = fleet.do(status.overview, folders)["alarms"]
        return [each for each in alarms if each["kind"] == "disk_full"]

    free = SimpleNamespace(free=status.LEAST_FREE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert told(small) == []
    free.free = 12_000
    (alarm,) = told(small)
    assert alarm["message"].startswith("the control machine has 12 kB left on the disk of /")
    assert small.do(status.overview)["alarms"][0]["kind"] == "disk_full", "of the database's file"
    assert told(small.as_("ours")) == []


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


def test_that_nats_is_not_told_of_ends_is_told(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "UNTOLD_SECONDS", 0.0)
    for job in ("told", "untold"):
        kind = {"actor": "d", "kind": events.JOB_FAILED, "job_id": job}
        number = small.database.run(lambda s, kind=kind: events.append(s, **kind))
        if job == "told":
            small.database.run(lambda s, n=number: tracker.keep_position(s, NatsOutlet.name, n))
    assert told_of(small, "not_told") == [], "nobody is to be told"
    process(small, "tracker", 0.0, "a", telling={"trouble": "it may not"})
    (message,) = told_of(small, "not_told")
    assert message.endswith(": it may not")
    assert told_of(small.as_("ours"), "not_told") == []
    monkeypatch.setattr(status, "UNTOLD_SECONDS", 60.0)
    assert told_of(small, "not_told") == []
    monkeypatch.setattr(status, "UNTOLD_SECONDS", 0.0)
    small.database.run(lambda s: tracker.keep_position(s, NatsOutlet.name, number))
    assert told_of(small, "not_told") == []


def test_a_log_that_grows_and_grows_is_told(small: Any) -> None:
    """As long as its machine has something of its attempt."""
    for vm_id, state, cleanup in (
        *(("vm-1", "running", "pending"), ("vm-2", "ended", "pending"), ("vm-3", "ended", "clean")),
    ):
        small.machine(vm_id)
        small.attempt(
            small.job("running", job_id=f"on-{vm_id}"), vm_id, state=state, cleanup=cleanup
        )

    def logged(size: int) -> list[str]:
        small.database.run(lambda s: s.execute(update(Member).values(log_offset=size)))
        found = small.do(status.overview)["alarms"]
        return [each["job_id"] for each in found if each["kind"] == "log_large"]

    assert logged(status.LARGE_LOG - 1) == []
    assert sorted(logged(status.LARGE_LOG)) == ["on-vm-1", "on-vm-2"]


# --- submitting


def request(**more: Any) -> JobRequest:
    return JobRequest.model_validate({"arguments": ["true"], **more})


def test_a_key_of_a_project_whose_jobs_run_as_the_fleet_is_noted(small: Any) -> None:
    small.machine("vm-1", user="ml")
    made = small.do(keys.make, "act", projects=["ours"])
    assert made["notes"] == []
    small.machine("local", transport="local")
    for role, bound, noted in (
        ("act", ["ours"], True),
        ("admin", ["ours", "b"], True),
        ("read", ["ours"], False),
        ("act", None, False),
    ):
        notes = small.do(keys.make, role, projects=bound)["notes"]
        assert bool(notes) == noted, (role, bound)
    small.do(machines.change, "local", projects=["default"])
    assert small.do(keys.make, "act", projects=["ours"])["notes"] == []
    (note,) = small.do(keys.make, "act", projects=["default"])["notes"]
    assert "local as the user of the fleet itself" in note
    assert "`groupwise fleet vm set local --project P`" in note


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


def test_a_key_stands_for_all_of_an_array(small: Any) -> None:
    """As many lines, or it is another request."""
    small.machine("vm-1")
    several = [request(name=name) for name in LINES]
    for before in (1, 2, 3):
        key = f"k{before}"
        made = small.do(submission.submit_all, several[:before], key=key)
        again = small.do(submission.submit_all, several[:before], key=key)
        assert [job["job_id"] for job in again] == [job["job_id"] for job in made]
        others = [several[:after] for after in (1, 2, 3) if after != before]
        for other in (*others, [*several[: before - 1], request(name="other")]):
            with pytest.raises(Refusal) as refused:
                small.do(submission.submit_all, other, key=key)
            assert (refused.value.code, refused.value.errors) == ("idempotency_key_reused", ())
    assert len(small.do(jobs.listing, jobs.JobFilter())) == 1 + 2 + 3


def test_a_key_is_remembered_as_long_as_its_jobs(small: Any) -> None:
    """Of an array each for itself."""
    small.machine("vm-1")
    several = [request(name=name) for name in LINES]
    first, second, third = (
        job["job_id"] for job in small.do(submission.submit_all, several, key="k")
    )
    small.do(jobs.cancel, second)
    small.database.run(lambda session: prune.remove(session, small.actor, [second]))
    again = [job["job_id"] for job in small.do(submission.submit_all, several, key="k")]
    assert (again[0], again[2]) == (first, third)
    assert again[1] not in (first, second, third)


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


def test_what_is_no_key_is_refused(small: Any) -> None:
    small.machine("vm-1")
    for key in ("", "k" * 256, "k\n"):
        for number in (1, 2):
            with pytest.raises(Refusal, check=lambda refused: refused.code == "invalid_request"):
                small.do(submission.submit_all, [request()] * number, key=key)
    assert small.do(jobs.listing, jobs.JobFilter()) == []


def test_no_more_of_an_array_than_may_wait_is_none_of_it(small: Any) -> None:
    small.machine("vm-1")
    small.do(projects.change, "default", max_waiting=3)
    with pytest.raises(Refusal, match=r"job 4 of 5: .* may have 3"):
        small.do(submission.submit_all, [request()] * 5)
    assert small.do(jobs.listing, jobs.JobFilter()) == []
    assert len(small.do(submission.submit_all, [request()] * 3)) == 3


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


def test_the_files_of_a_job_and_no_others_go(tmp_path: Path) -> None:
    for name in ("job-1", "job-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "3.log").write_text("x" * 5000)
        (tmp_path / f"{name}.log").symlink_to(f"{name}/3.log")
    assert prune.size_of_files([tmp_path], "job-1") >= 5000
    prune.remove_files([tmp_path], "job-1")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["job-10", "job-10.log"]
