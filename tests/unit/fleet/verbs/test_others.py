"""Projects, the state of the fleet, submissions and what is cleared away."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update
from sqlalchemy.event import listen
from sqlalchemy.orm import Session

from groupwise.fleet import tracker
from groupwise.fleet.queue.request import JobRequest
from groupwise.fleet.queue.resources import Resources
from groupwise.fleet.store import events
from groupwise.fleet.store.database import seconds
from groupwise.fleet.store.tables import GPU, VM, Attempt, ControlProcess, Job, Member, Reservation
from groupwise.fleet.tracker import NatsOutlet
from groupwise.fleet.verbs import jobs, keys, machines, projects, prune, status, submission, wanted
from groupwise.wire.problems import Refusal

# --- projects


def test_a_project_is_made_and_changed(small: Any) -> None:
    assert small.do(projects.change, "p", weight=2.0, max_gpus=4)["max_gpus"] == 4
    assert small.do(projects.change, "p", max_gpus=None)["max_gpus"] is None
    (found,) = small.do(projects.listing)
    assert (found["name"], found["weight"], found["waiting"]) == ("p", 2.0, 0)
    assert [kind for _, kind in small.events()] == ["project.changed", "project.changed"]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({}, "nothing to change"),
        ({"weight": 0.0}, "a number from 1e-06 to 1e[+]06"),
        ({"weight": float("nan")}, "a number from 1e-06"),
        ({"weight": 1e300}, "a number from 1e-06"),
        ({"max_gpus": -1}, "max_gpus -1"),
        ({"max_waiting": 10**20}, "0 to 2147483647"),
    ],
)
def test_a_project_that_cannot_be(small: Any, wanted: dict[str, Any], told: str) -> None:
    with pytest.raises(Refusal, match=told):
        small.do(projects.change, "p", **wanted)


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


def test_what_stands_in_no_table_is_told_while_a_machine_runs_it(small: Any) -> None:
    since = small.database.read(seconds) - 61
    found = {"what": "attempt", "detail": "x.5", "job_id": "x", "epoch": 5, "since": since}
    folder = {"what": "folder", "detail": "odd", "pid": None}
    small.machine("vm-1", facts={"quarantined": [folder, found]})
    small.machine("lost", facts={"quarantined": [found]}, lost_at=1.0)

    def told(fleet: Any) -> list[dict[str, Any]]:
        alarms = fleet.do(status.overview)["alarms"]
        return [each for each in alarms if each["kind"] == "attempt_quarantined"]

    (alarm,) = told(small)
    assert "vm-1 runs x.5" in alarm["message"]
    assert (alarm["job_id"], alarm["epoch"], alarm["since"]) == ("x", 5, since)
    assert small.do(machines.show, "vm-1")["facts"]["quarantined"][1] == found
    assert told(small.as_("ours")) == []
    small.database.run(lambda s: s.execute(update(VM).values(facts={"quarantined": [folder]})))
    assert told(small) == []


@pytest.mark.parametrize(
    ("state", "cleanup", "told"),
    [("running", "pending", True), ("ended", "pending", True), ("ended", "clean", False)],
)
def test_a_log_that_grows_and_grows_is_told(
    small: Any, state: str, cleanup: str, told: bool
) -> None:
    small.machine("vm-1")
    job = small.job("running")
    small.attempt(job, "vm-1", state=state, cleanup=cleanup)

    def logged(size: int) -> list[dict[str, Any]]:
        small.database.run(lambda s: s.execute(update(Member).values(log_offset=size)))
        found = small.do(status.overview)["alarms"]
        return [each for each in found if each["kind"] == "log_large"]

    assert logged(status.LARGE_LOG - 1) == []
    found = logged(status.LARGE_LOG)
    assert [each["job_id"] for each in found] == ([job] if told else [])
    assert all("10 GB" in each["message"] for each in found)


def test_only_jobs_that_one_may_see_are_counted(small: Any) -> None:
    small.job("running", project="theirs")
    small.job(project="ours")
    assert small.as_("ours").do(status.overview)["jobs"]["running"] == 0
    assert small.as_("ours").do(status.overview)["jobs"]["queued"] == 1


# --- submitting


def request(**more: Any) -> JobRequest:
    return JobRequest.model_validate({"arguments": ["true"], **more})


def test_that_nobody_runs_it_is_noted(small: Any) -> None:
    asked = [request(resources={"gpus": 0}), request(resources={"gpus": 0})]
    for count in (1, 2):
        for job in small.do(submission.submit_all, asked[:count]):
            assert job["notes"] == [status.NO_DISPATCHER]


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


def test_a_job_says_that_machines_are_asked_first(small: Any) -> None:
    small.machine("vm-1")
    (job,) = small.do(submission.submit_all, [request(resources={"gpus": 0})])

    def waiting() -> str:
        return small.do(jobs.show, job["job_id"])["waiting"][0]

    assert waiting() == status.NO_DISPATCHER
    process(small, "dispatcher", 0.0, "a", not_asked=["vm-1", "vm-2", "vm-3"])
    assert waiting().endswith("asked all machines what they run, and vm-1 and 2 more not yet")
    process(small, "dispatcher", 0.0, "b", not_asked=["vm-2"])
    assert waiting().endswith("and vm-2 not yet")
    process(small, "dispatcher", 0.0, "c")
    assert waiting() == "there is room for it, and it is the next in the queue"


def test_what_was_settled_unasked_is_noted(small: Any) -> None:
    small.machine("vm-1")
    process(small, "dispatcher", 0.0, "a")
    (job,) = small.do(submission.submit_all, [request()])
    assert job["notes"] == ["--gpus was not given: the job gets no GPU, as the fleet has none"]
    small.machine("vm-2", gpus=1)
    (job,) = small.do(submission.submit_all, [request()])
    assert job["notes"] == ["--gpus was not given: the job gets 1 GPU"]
    (job,) = small.do(submission.submit_all, [request(resources={"gpus": 0})])
    assert job["notes"] == []


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (
            {"vm": "h11"},
            "no machine is called 'h11', so the job waits until that changes; did you mean h1?",
        ),
        (
            {"vm": "0", "named": [1]},
            "no machine is called '0' (GPU 1 of it is asked for), so the job waits until that changes; there are h1, h2.",
        ),
        (
            {"labels": {"disk": "fat"}},
            "no machine has the label disk=fat, so the job waits until that changes; did you mean disk=fast?",
        ),
        (
            {"labels": {"zone": "b", "disk": "fast"}},
            "no machine has disk=fast and zone=b together, so the job waits until that changes",
        ),
        (
            {"vm": "h2", "labels": {"disk": "fast"}},
            "machine h2 does not have the label disk=fast, so the job waits until that changes; there are zone=b.",
        ),
        (
            {"gpu_model": "h900"},
            "no GPU that was seen is a h900, so the job waits until that changes; there are NVIDIA A100.",
        ),
        (
            {"vm": "h1", "named": [0, 7]},
            "machine h1 does not have a GPU 7 that was seen, so the job waits until that changes",
        ),
        (
            {"named": ["GPU-x"]},
            "no machine has a GPU GPU-x that was seen, so the job waits until that changes",
        ),
        ({"vm": "h1", "named": [0], "gpu_model": "a100", "labels": {"zone": "a"}}, None),
        ({"labels": {"cores": "8"}}, None),
    ],
)
def test_a_wish_that_no_machine_fulfils_is_noted(
    small: Any, needs: dict[str, Any], said: str | None
) -> None:
    """Accepted all the same: the machine may come. A plan has told it anyway."""
    process(small, "dispatcher", 0.0, "a")
    small.machine("h1", gpus=2, labels={"zone": "a", "disk": "fast", "cores": 8})
    small.machine("h2", gpus=1, labels={"zone": "b"})
    small.machine("h11", active=False, labels={"zone": "c"})
    small.database.run(lambda s: s.execute(update(GPU).values(model="NVIDIA A100")))
    asked = request(resources={"gpus": len(needs.get("named", "1")), **needs})
    (job,) = small.do(submission.submit_all, [asked])
    assert job["notes"] == ([] if said is None else [said])
    assert small.do(submission.plan, asked)["notes"] == []


def test_the_fleet_is_read_once_for_all_jobs_of_an_array(small: Any) -> None:
    small.machine("h1")
    asked = [Resources(vm=f"h1-{number}") for number in range(500)]
    asked += [Resources(vm="h2")] * 500

    def look(session: Session) -> tuple[list[list[str]], int]:
        counted: list[str] = []
        connection = session.connection()
        listen(connection, "before_cursor_execute", lambda *seen: counted.append(seen[2]))
        return wanted.nowhere(session, asked), len(counted)

    found, statements = small.database.read(look)
    assert (len(found), statements) == (1000, 2)
    assert [len(notes) for notes in found] == [1] * 1000
    assert found[0][0].endswith("did you mean h1?")
    assert found[499] == ["no machine is called 'h1-499', so the job waits until that changes"]
    assert small.database.read(lambda s: wanted.nowhere(s, [Resources()])) == [[]]


def test_of_thousands_of_different_wishes_each_costs_the_same_in_a_large_fleet(small: Any) -> None:
    """All this is within the transaction that submits, for which other writers wait."""
    asked = [
        Resources(labels={"run": str(number), "zone": "a"}, gpu_model=f"H{number}", named=(number,))
        for number in range(300)
    ]

    def calls(asked: list[Resources]) -> int:
        counted = 0

        def count(*_: Any) -> None:
            nonlocal counted
            counted += 1

        def look(session: Session) -> None:
            sys.setprofile(count)
            try:
                wanted.nowhere(session, asked)
            finally:
                sys.setprofile(None)

        small.database.read(look)
        return counted

    small.machine("h", gpus=8, labels={"zone": "a"})
    few = calls(asked) - calls(asked[:100])
    for number in range(30):
        small.machine(f"h{number}", gpus=8, labels={"zone": "a", "name": str(number)})
    assert calls(asked) - calls(asked[:100]) < 1.1 * few


def test_a_plan_leaves_nothing(small: Any) -> None:
    small.machine("vm-1")
    found = small.do(submission.plan, request())
    assert (found["job_id"], found["where"], found["waits"]) == (None, ["vm-1"], [])
    assert small.do(jobs.listing, jobs.JobFilter()) == []
    assert small.events() == []
    found = small.do(submission.plan, request(resources={"gpus": 3}))
    assert found["where"] == []
    assert found["waits"]


def test_what_can_never_run_is_refused_and_leaves_nothing(small: Any) -> None:
    small.machine("vm-1")
    wrong = request(output_dir="../elsewhere")
    for verb, asked in ((submission.submit_all, [request(), wrong]), (submission.plan, wrong)):
        with pytest.raises(Refusal, match="output_dir") as refused:
            small.do(verb, asked)
        assert refused.value.code == "invalid_request"
    assert small.do(jobs.listing, jobs.JobFilter()) == []


WRONG: dict[str, dict[str, Any]] = {
    "it cannot be written": {"name": "\0"},
    "it could never run": {"output_dir": "../elsewhere"},
}


@pytest.mark.parametrize("second", WRONG)
@pytest.mark.parametrize("first", WRONG)
def test_the_first_of_several_that_is_wrong_is_told(small: Any, first: str, second: str) -> None:
    """Whenever in the course of it that is found out."""
    small.machine("vm-1")
    several = [request(), request(), request(**WRONG[first]), request(), request(**WRONG[second])]
    with pytest.raises(Refusal) as refused:
        small.do(submission.submit_all, several, key="k")
    (name,) = WRONG[first]
    assert refused.value.code == "invalid_request"
    assert refused.value.detail.startswith(f"job 3 of 5: {name}")
    (told,) = refused.value.errors
    assert (told.field, told.message.partition(" ")[0].rstrip(":")) == ("jobs.2", name)
    assert small.do(jobs.listing, jobs.JobFilter()) == []
    assert small.events() == []


def test_a_key_that_had_other_jobs_is_refused_as_a_whole(small: Any) -> None:
    small.machine("vm-1")
    small.do(submission.submit_all, [request(name="a"), request(name="b")], key="k")
    with pytest.raises(Refusal, match=r"^The same key came with another body") as refused:
        small.do(submission.submit_all, [request(name="a"), request(name="c")], key="k")
    assert (refused.value.code, refused.value.errors) == ("idempotency_key_reused", ())


LINES = ("a", "b", "c")


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_key_stands_for_all_of_an_array(small: Any, before: int, after: int) -> None:
    """As many lines, or it is another request."""
    small.machine("vm-1")
    several = [request(name=name) for name in LINES]
    made = small.do(submission.submit_all, several[:before], key="k")
    if before == after:
        again = small.do(submission.submit_all, several[:after], key="k")
        assert [job["job_id"] for job in again] == [job["job_id"] for job in made]
    else:
        with pytest.raises(Refusal) as refused:
            small.do(submission.submit_all, several[:after], key="k")
        assert refused.value.code == "idempotency_key_reused"
    assert len(small.do(jobs.listing, jobs.JobFilter())) == before


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


@pytest.mark.parametrize(
    ("key", "told"),
    [("", "has 0 characters; a key has 1 to 255"), ("k" * 256, "256"), ("k\n", "printable")],
)
@pytest.mark.parametrize("number", [1, 2])
def test_what_is_no_key_is_refused(small: Any, key: str, told: str, number: int) -> None:
    small.machine("vm-1")
    with pytest.raises(Refusal, match=told) as refused:
        small.do(submission.submit_all, [request()] * number, key=key)
    assert refused.value.code == "invalid_request"
    assert small.do(jobs.listing, jobs.JobFilter()) == []


def test_what_was_cleared_away_of_an_array_is_submitted_again(small: Any) -> None:
    small.machine("vm-1")
    several = [request(name=name) for name in LINES]
    made = [job["job_id"] for job in small.do(submission.submit_all, several, key="k")]
    gone = delete(Job).where(Job.job_id == made[0])
    small.database.run(lambda s: s.execute(gone) and None)
    again = [job["job_id"] for job in small.do(submission.submit_all, several, key="k")]
    assert again[1:] == made[1:]
    assert again[0] not in made


def test_no_more_of_an_array_than_may_wait_is_none_of_it(small: Any) -> None:
    small.machine("vm-1")
    small.do(projects.change, "default", max_waiting=3)
    with pytest.raises(Refusal, match=r"job 4 of 5: .* may have 3"):
        small.do(submission.submit_all, [request()] * 5)
    assert small.do(jobs.listing, jobs.JobFilter()) == []
    assert len(small.do(submission.submit_all, [request()] * 3)) == 3


def test_an_array_is_one_transaction_and_one_key(small: Any) -> None:
    small.machine("vm-1")
    both = [request(name="a"), request(name="b")]
    first = small.do(submission.submit_all, both, key="k")
    again = small.do(submission.submit_all, both, key="k")
    assert [each["job_id"] for each in again] == [each["job_id"] for each in first]
    assert len({each["job_id"] for each in first}) == 2


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


@pytest.mark.parametrize("status", ["queued", "pending", "held"])
def test_what_another_job_is_to_come_after_stays(small: Any, status: str) -> None:
    first, second, free = (small.job("completed") for _ in range(3))
    small.job(status, request={"arguments": ["true"], "after": [f"{first}:ok", second]})
    small.job("cancelled", request={"arguments": ["true"], "after": [free]})
    old(small, first, second, free)
    assert small.do(prune.old_jobs, 86400.0) == [free]
    assert small.do(prune.remove, [first, second, free]) == [free]


def test_the_files_of_a_job_and_no_others_go(tmp_path: Path) -> None:
    for name in ("job-1", "job-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "3.log").write_text("x" * 5000)
        (tmp_path / f"{name}.log").symlink_to(f"{name}/3.log")
    assert prune.size_of_files([tmp_path], "job-1") >= 5000
    prune.remove_files([tmp_path], "job-1")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["job-10", "job-10.log"]
