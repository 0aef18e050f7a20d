"""Operations on jobs.

1. A change and its event are one; a change that is refused leaves neither.
2. Whatever is asked twice is the same as once.
3. A job of a project that one may not see does not exist.
4. A refusal names the state of the job and what can be done.
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from groupwise.api.schemas.problems import Refusal
from groupwise.cli.fleet.printing import print_job, print_jobs
from groupwise.jobs.fleet.operations import jobs
from groupwise.jobs.fleet.operations.jobs import JobFilter
from groupwise.jobs.fleet.states import JobStatus
from groupwise.jobs.fleet.store.tables import Attempt, Job

WAITING = ["queued", "pending", "held"]
FINAL = ["completed", "failed", "cancelled"]


def set_columns(small: Any, epoch: int, **columns: Any) -> None:
    change = update(Attempt).where(Attempt.epoch == epoch).values(**columns)
    small.database.run(lambda s: s.execute(change))


# --- looking


def test_the_newest_come_first_and_a_page_leads_to_the_next(small: Any) -> None:
    ids = [small.job() for _ in range(5)]  # most of them within one second
    first = small.do(jobs.listing, JobFilter(limit=2))
    second = small.do(jobs.listing, JobFilter(limit=2, older_than=first[-1]["job_id"]))
    third = small.do(jobs.listing, JobFilter(limit=2, older_than=second[-1]["job_id"]))
    assert [each["job_id"] for each in (*first, *second, *third)] == ids[::-1]


def test_a_job_that_completed_without_some_of_its_processes_says_so_in_the_list(small: Any) -> None:
    vm = small.machine()
    made = {ended: small.job(status) for ended, status in ((0, "completed"), (2, "completed"))}
    for kills, job in made.items():
        epoch = small.attempt(job, vm, cleanup="clean", state="collecting")
        evidence = {"members": [{"rank": 0, "exit": {"code": 0, "oom_kill": kills}}]}
        ended = {"state": "ended", "outcome": "succeeded", "evidence": evidence}
        change = update(Attempt).where(Attempt.epoch == epoch).values(**ended)
        small.database.run(lambda s, change=change: s.execute(change))
    listed = {each["job_id"]: each["warning"] for each in small.do(jobs.listing, JobFilter())}
    assert listed.pop(made[0]) is None
    assert "2 of its processes" in listed.pop(made[2])


def test_the_list_counts_from_the_start_of_the_command_and_names_a_silent_machine(
    small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    now = datetime.now(UTC)
    times: dict[str, Any] = {"start_time": now - timedelta(seconds=30)}
    ran, never = (small.job("completed", end_time=now, **times) for _ in range(2))
    silent = small.job("running", **times)
    set_columns(small, small.attempt(ran, small.machine("one")), running_at=now.timestamp() - 20.0)
    small.attempt(never, small.machine("two"), cleanup="clean", state="ended")
    columns = {"running_at": now.timestamp() - 5.0, "contact": "unreachable"}
    set_columns(small, small.attempt(silent, small.machine("three")), **columns)
    print_jobs(small.do(jobs.listing, JobFilter()), now.timestamp())
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " 20 s" in lines[ran]
    assert " 30 s" not in lines[ran] + lines[never] + lines[silent]
    assert " 5 s" in lines[silent]
    assert [job for job, line in lines.items() if "does not answer" in line] == [silent]
    print_job(small.do(jobs.show, ran), now.timestamp())
    assert "took       20 s" in capsys.readouterr().out
    assert small.do(jobs.show, never)["running_at"] is None


def test_show_names_the_command_that_prints_the_whole_log_if_it_shows_a_part(
    small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    job = small.job("failed")
    epoch = small.attempt(job, small.machine(), cleanup="clean", state="collecting")
    record = {"code": 1, "signal": None, "reason": "exited"}
    for lines, is_cut in ((5, False), (6, True)):
        exit_record = record | {"tail": "".join(f"line {n}\n" for n in range(lines))}
        evidence = {"members": [{"rank": 0, "exit": exit_record}]}
        set_columns(small, epoch, evidence=evidence)
        print_job(small.do(jobs.show, job), time.time())
        shown = capsys.readouterr().out
        assert (f"groupwise fleet logs {job} --attempt {epoch}" in shown) is is_cut
        assert ("line 0" in shown) is not is_cut


def test_filters_are_laid_over_each_other(small: Any) -> None:
    one = small.job("running", project="a", name="n", request={"labels": {"team": "x"}})
    small.job("running", project="b", name="n", request={"labels": {"team": "x"}})
    small.job("held", project="a", name="n", request={"labels": {"team": "x"}})
    small.job("running", project="a", name="n", request={"labels": {"team": "y"}})
    small.job("running", project="a", name="n")
    wanted = JobFilter(
        status=frozenset({JobStatus.RUNNING}), project="a", name="n", labels={"team": "x"}
    )
    assert [each["job_id"] for each in small.do(jobs.listing, wanted)] == [one]


def test_jobs_are_listed_by_their_ids(small: Any) -> None:
    one, _, three, theirs = (small.job(project=p) for p in ("a", "a", "a", "b"))
    wanted = jobs.filter_of(ids=[three, one, "job-none", theirs])
    assert [each["job_id"] for each in small.do(jobs.listing, wanted)] == [theirs, three, one]
    assert [each["job_id"] for each in small.as_("a").do(jobs.listing, wanted)] == [three, one]
    assert small.do(jobs.listing, jobs.filter_of(ids=[])) == []
    with pytest.raises(Refusal, match="1000 ids"):
        jobs.filter_of(ids=["j"] * 1001)


def test_a_job_of_another_project_does_not_exist(small: Any) -> None:
    job = small.job(project="theirs")
    for operation in (jobs.show, jobs.cancel, jobs.hold, jobs.release, jobs.retry):
        with pytest.raises(Refusal, check=lambda refused: refused.code == "unknown_job"):
            small.as_("ours").do(operation, job)
    assert small.row(job).status == "queued"


# --- cancelling


def test_a_job_that_waits_is_cancelled_at_once_and_one_that_has_ended_is_not(small: Any) -> None:
    for status in WAITING:
        job = small.job(status)
        for _ in range(2):
            assert small.do(jobs.cancel, job, "no need")["status"] == "cancelled"
        assert small.row(job).end_time is not None
    assert small.events() == [("user:ada", "job.cancelled")] * len(WAITING)
    for status in ("completed", "failed"):
        with pytest.raises(Refusal, match=f"has {status} already") as refused:
            small.do(jobs.cancel, small.job(status))
        assert refused.value.code == "job_state"
    assert len(small.events()) == len(WAITING)


# --- holding


def test_hold_and_release(small: Any) -> None:
    for status in ("queued", "pending"):
        job, before = small.job(status), len(small.events())
        for _ in range(2):
            assert small.do(jobs.hold, job)["status"] == "held"
        assert small.row(job).waiting_since is None
        for _ in range(2):
            assert small.do(jobs.release, job)["status"] == "queued"
        assert small.row(job).waiting_since is not None
        assert small.events()[before:] == [("user:ada", "job.held"), ("user:ada", "job.queued")]


# --- many at once

CHANGES = {
    "cancel": (jobs.cancel, jobs.cancelling()),
    "hold": (jobs.hold, jobs.holding),
    "release": (jobs.release, jobs.releasing),
    "retry": (jobs.retry, jobs.retrying()),
}


@pytest.mark.parametrize("operation", CHANGES)
def test_many_become_what_each_becomes_alone(small: Any, operation: str) -> None:
    alone, change = CHANGES[operation]
    single, many = ([small.job(status) for status in (*WAITING, "running", *FINAL)] for _ in "12")
    told: list[str | None] = []
    for job in single:
        try:
            small.do(alone, job)
            told.append(None)
        except Refusal as refusal:
            told.append(refusal.message)
    events_of_single = small.events()
    found = small.do(jobs.change_many, many, change)
    many_events = small.events()[len(events_of_single) :]
    assert [each["job_id"] for each in found] == many
    assert [each.get("error", {}).get("message") for each in found] == [
        said and said.replace(one, other)
        for said, one, other in zip(told, single, many, strict=True)
    ]
    for one, other, document in zip(single, many, found, strict=True):
        assert small.row(other).status == small.row(one).status
        assert small.row(other).generation == small.row(one).generation
        assert (small.row(other).end_time is None) == (small.row(one).end_time is None)
        if "error" not in document:
            assert document.items() <= small.do(jobs.show, other).items()
    assert sorted(many_events) == sorted(events_of_single)


def test_a_job_waiting_for_cancelled_jobs_is_queued_in_the_same_transaction(
    small: Any,
) -> None:
    first = [small.job() for _ in range(3)]
    last = small.job("pending", request={"after": first})

    def block(session: Session) -> None:
        session.execute(update(Job).where(Job.job_id == last).values(blocked_on=first[0]))

    small.database.run(block)
    small.do(jobs.change_many, first, jobs.cancelling())
    assert small.row(last).status == "queued"


# --- again


def test_retry_begins_a_new_generation(small: Any) -> None:
    for status in ("failed", "cancelled"):
        job = small.job(status, spent={"charged": 2}, retry_count=2, failure_reason="boom")
        assert small.do(jobs.retry, job)["generation"] == 1
        row = small.row(job)
        found = (row.status, row.generation, row.spent, row.retry_count)
        assert found == ("queued", 1, {}, 0)
        assert row.failure_reason is row.end_time is row.cancel_requested_at is None
    assert small.events() == [("user:ada", "job.retried"), ("admission", "job.queued")] * 2


def test_only_failed_or_cancelled_jobs_can_be_retried(small: Any) -> None:
    for status in ("completed", "held", "running", "queued", "pending"):
        job = small.job(status)
        with pytest.raises(Refusal, check=lambda refused: refused.code == "job_state"):
            small.do(jobs.retry, job)
        assert small.row(job).generation == 0


def test_a_job_that_waits_again_runs_nowhere_and_has_not_started(
    small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    small.machine("one")
    job_id = small.job("running", assigned_vm="one", start_time=datetime.now(UTC))

    def listed() -> str:
        print_jobs(small.do(jobs.listing, JobFilter()), time.time())
        return capsys.readouterr().out

    assert " one " in listed()
    small.database.run(lambda s: setattr(s.get_one(Job, job_id), "status", "queued"))
    assert " one " not in listed()
    assert small.do(jobs.show, job_id)["start_time"] is None
