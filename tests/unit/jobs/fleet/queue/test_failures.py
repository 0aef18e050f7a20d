"""From failure classes to what follows."""

import random
from typing import Any

import pytest

from groupwise.jobs.fleet.queue.failures import (
    BACKOFF_CAP,
    BUDGETS,
    FREE_RETRIES,
    JobFacts,
    RetryPolicy,
    Verdict,
    after_end,
    backoff,
)
from groupwise.jobs.fleet.states import JobStatus, Outcome
from groupwise.jobs.hosts.failures import FailureClass


def follows(
    failure: FailureClass | None,
    *,
    outcome: Outcome = Outcome.FAILED,
    policy: RetryPolicy | None = None,
    spent: dict[str, int] | None = None,
    cancelled: bool = False,
) -> Verdict:
    facts = JobFacts(cancelled, spent or {}, policy or RetryPolicy())
    return after_end(facts, outcome, failure, "why", random.Random(1))


def test_success_is_success_however_late_it_was_cancelled() -> None:
    for cancelled in (False, True):
        found = follows(None, outcome=Outcome.SUCCEEDED, cancelled=cancelled)
        assert found.status is JobStatus.COMPLETED


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.VOID, Outcome.FAILED])
def test_a_cancelled_job_is_not_retried(outcome: Outcome) -> None:
    failure = FailureClass.HOST_LOST if outcome is Outcome.FAILED else None
    assert follows(failure, outcome=outcome, cancelled=True).status is JobStatus.CANCELLED


def test_a_void_attempt_without_failure_is_requeued_at_once() -> None:
    found = follows(None, outcome=Outcome.VOID)
    assert (found.status, found.delay, found.counts_as_retry) == (JobStatus.QUEUED, 0.0, False)


def tries(failure: FailureClass, policy: RetryPolicy | None = None) -> int:
    """Attempts that a job gets which fails always in this way."""
    spent: dict[str, int] = {}
    for attempt in range(1, 200):
        found = follows(failure, spent=spent, policy=policy)
        spent = dict(found.spent)
        if found.status is JobStatus.FAILED:
            assert found.reason is not None
            assert failure in found.reason
            return attempt
        assert found.counts_as_retry
    raise AssertionError("it is tried again for ever")


def test_every_class_comes_to_an_end() -> None:
    free = FREE_RETRIES + 1
    attempts = {
        FailureClass.GPU_OOM: 1, FailureClass.HOST_OOM: 3, FailureClass.GPU_FAULT: 5,
        FailureClass.NETWORK: 6, FailureClass.PREEMPTION: free, FailureClass.REBOOT: 3,
        FailureClass.HOST_LOST: free, FailureClass.SUPERVISOR_LOST: 3,
        FailureClass.LAUNCH_FAILURE: 6, FailureClass.NOT_PROVIDED: 6, FailureClass.TIME_LIMIT: 1,
        FailureClass.USER_ERROR: 1, FailureClass.KILLED: 2, FailureClass.CRASHED: 3,
        FailureClass.ARTEFACTS: 1,
    }  # fmt: skip
    assert {failure: tries(failure) for failure in BUDGETS} == attempts
    assert set(BUDGETS) == set(FailureClass)


def test_a_job_may_say_how_often() -> None:
    assert tries(FailureClass.GPU_OOM, RetryPolicy(smaller_batch=True)) == 2
    assert tries(FailureClass.CRASHED, RetryPolicy(charged=0)) == 1
    assert tries(FailureClass.CRASHED, RetryPolicy(charged=5)) == 6
    assert tries(FailureClass.NETWORK, RetryPolicy(per_class={FailureClass.NETWORK: 1})) == 2
    often = RetryPolicy(per_class={FailureClass.NETWORK: 40})
    assert tries(FailureClass.NETWORK, often) == 41
    many = {FailureClass.NETWORK: 35, "free": 35}
    assert follows(FailureClass.PREEMPTION, policy=often, spent=many).status is JobStatus.QUEUED


def test_charged_failures_of_different_kinds_come_out_of_one_budget() -> None:
    once = follows(FailureClass.CRASHED)
    twice = follows(FailureClass.REBOOT, spent=dict(once.spent))
    assert twice.status is JobStatus.QUEUED
    assert follows(FailureClass.HOST_OOM, spent=dict(twice.spent)).status is JobStatus.FAILED


def test_machines_that_fail_cost_a_job_nothing_of_its_own_budget() -> None:
    spent: dict[str, int] = {}
    for _ in range(5):
        found = follows(FailureClass.HOST_LOST, spent=spent)
        assert not found.charged
        spent = dict(found.spent)
    assert follows(FailureClass.CRASHED, spent=spent).status is JobStatus.QUEUED


def test_pauses_grow_and_are_drawn_from_all_of_their_range() -> None:
    rng = random.Random(7)
    for failures, bound in ((1, 10.0), (2, 20.0), (4, 80.0), (50, BACKOFF_CAP)):
        drawn = [backoff(failures, rng) for _ in range(500)]
        assert max(drawn) <= bound
        assert max(drawn) > 0.9 * bound
        assert min(drawn) < 0.1 * bound
    assert backoff(3, random.Random(5)) == backoff(3, random.Random(5))


def test_a_job_that_is_to_run_once_is_not_begun_again_whatever_happens() -> None:
    once = RetryPolicy(once=True)
    for failure in FailureClass:
        assert follows(failure, policy=once).status is JobStatus.FAILED
    for never_ran in (None, FailureClass.LAUNCH_FAILURE):
        found = follows(never_ran, outcome=Outcome.VOID, policy=once)
        assert found.status is JobStatus.QUEUED


class Longest(random.Random):
    """Draws the longest."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_a_job_whose_gpu_is_taken_is_requeued_with_growing_delays() -> None:
    spent: dict[str, Any] = {}
    delays: list[float] = []
    for _ in range(50):
        facts = JobFacts(spent=spent, taken=True)
        found = after_end(facts, Outcome.VOID, FailureClass.LAUNCH_FAILURE, "no", Longest())
        assert found.status is JobStatus.QUEUED
        spent = dict(found.spent)
        delays.append(found.delay)
    assert delays[:4] == [10.0, 20.0, 40.0, 80.0]
    assert (delays[-1], spent) == (BACKOFF_CAP, {"taken": 50})


def test_a_gang_of_which_one_found_its_gpu_taken_is_begun_once_where_it_may_only_be_once() -> None:
    facts = JobFacts(taken=True, policy=RetryPolicy(once=True))
    failure = FailureClass.LAUNCH_FAILURE
    assert after_end(facts, Outcome.FAILED, failure, "no", Longest()).status is JobStatus.FAILED
    assert after_end(facts, Outcome.VOID, failure, "no", Longest()).status is JobStatus.QUEUED
