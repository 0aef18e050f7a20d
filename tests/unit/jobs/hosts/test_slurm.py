"""How the output of Slurm's programs is interpreted, and attempts whose supervisor is not visible from here."""

from typing import Any

import pytest

from groupwise.jobs.hosts.answers import RunnerState
from groupwise.jobs.hosts.driver import Launch, Scheduler
from groupwise.jobs.hosts.host import HostUnreachable, OutcomeUnknown, RunnerRefused
from groupwise.jobs.hosts.schedulers import MAX_HEARTBEAT_AGE
from groupwise.jobs.hosts.slurm import SUBMISSION_GRACE, SlurmRunner
from groupwise.jobs.hosts.spec import JobSpec
from tests.fake_cluster_head import Head

NAME = "j.1-0123abcd"


class Cluster(Head):
    """A login node, and what Slurm's programs say."""

    def __init__(self, queue: str = "", **state: Any) -> None:
        super().__init__(engine="slurm", **state)
        self.queue = queue
        self.answers: dict[str, dict[str, Any]] = {}
        self.ran_there: list[list[str]] = []
        self.submits = ""
        """What is in the queue once something was submitted."""
        self.has_slurm = True

    def __call__(self) -> SlurmRunner:
        return SlurmRunner(self, root="root")

    def ran(self, arguments: list[str]) -> dict[str, Any]:
        if not self.has_slurm:
            raise RunnerRefused("unknown_program", "there is no program squeue on PATH")
        self.ran_there.append(arguments)
        if arguments[0] == "sbatch":
            self.queue = self.submits or self.queue
        said = {"code": 0, "out": self.queue if arguments[0] == "squeue" else "", "err": ""}
        return {**said, **self.answers.get(arguments[0], {})}


def line(state: str, number: int = 7, reason: str = "None", name: str = NAME) -> str:
    return f"{number}|{state}|{name}|{reason}\n"


LAUNCH = Launch("j", 1, JobSpec(("true",)), engine=Scheduler("slurm", ("--partition=gpu",)))


async def test_submitted_once_by_its_name_with_what_was_asked() -> None:
    cluster = Cluster()
    await cluster().launch(LAUNCH)
    [submitted] = [words for words in cluster.ran_there if words[0] == "sbatch"]
    assert {"--partition=gpu", f"--job-name={NAME}", "--no-requeue"} <= {*submitted}
    assert submitted[-1] == "/srv/attempts/j.1/begin.sh"
    cluster = Cluster(line("PENDING", reason="Resources"))
    found = await cluster().launch(LAUNCH)
    assert found.engine_says == "job 7 of Slurm is pending (Resources)"
    assert not [words for words in cluster.ran_there if words[0] == "sbatch"], "it is there"
    cluster = Cluster()
    cluster.submits = line("PENDING", 9) + line("PENDING", 8) + line("PENDING", 5, name="k")
    await cluster().launch(LAUNCH)
    assert cluster.ran_there[-2] == ["scancel", "9"], "of doubles the first stays"


AWAY = {"code": 1, "err": "slurm_load_jobs error: Unable to contact"}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("squeue", AWAY),
        ("sbatch", {"code": 1, "err": "sbatch: error: Batch job submission failed: Socket timed out on send"}),
        ("sbatch", {"code": 1, "err": "sbatch: error: Unable to contact slurm controller (connect failure)"}),
        ("sbatch", {"code": None, "err": ""}),
    ],
)  # fmt: skip
async def test_a_controller_that_is_away_is_no_end(program: str, words: dict[str, Any]) -> None:
    """And a submission without an answer may have been one."""
    cluster = Cluster()
    cluster.answers[program] = words
    with pytest.raises(OutcomeUnknown):
        await cluster().launch(LAUNCH)
    if program == "squeue":
        with pytest.raises(HostUnreachable):
            await cluster().status("j", 1)
        with pytest.raises(OutcomeUnknown):
            await cluster().kill("j", 1, grace=1.0)
    assert (cluster.voided, cluster.forgotten) == (None, False)


async def test_a_job_that_slurm_refuses_leaves_nothing() -> None:
    cluster = Cluster()
    cluster.answers["sbatch"] = {"code": 1, "err": "sbatch: error: invalid partition specified: x"}
    with pytest.raises(RunnerRefused, match="invalid partition") as refusal:
        await cluster().launch(LAUNCH)
    assert refusal.value.code == "engine"
    assert (cluster.voided is None, cluster.forgotten) == (False, True)


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"])
async def test_ended_in_the_queue_it_never_begins(state: str) -> None:
    for runner in (Cluster.__call__, tended):
        cluster = Cluster(line(state))
        assert (await runner(cluster).status("j", 1)).state is RunnerState.VOIDED
        assert "it never began" in (cluster.voided or "")


async def test_not_in_the_queue_it_may_be_on_its_way_for_a_while() -> None:
    cluster = Cluster(line("PENDING", name="another"), age=SUBMISSION_GRACE / 2)
    assert (await cluster().status("j", 1)).state is RunnerState.QUEUED
    cluster.state["age"] = SUBMISSION_GRACE + 1
    cluster.state["engine_says"] = "sh: python3: not found\n"
    assert (await cluster().status("j", 1)).state is RunnerState.VOIDED
    assert cluster.voided is not None
    assert "python3: not found" in cluster.voided


@pytest.mark.parametrize("seen", ["lost", "rebooted"])
@pytest.mark.parametrize(
    ("queue", "beat_age", "same_boot", "truth"),
    [
        (line("RUNNING"), 9999.0, False, RunnerState.RUNNING),
        (line("PENDING"), 9999.0, False, RunnerState.RUNNING),  # as a controller says that began
        (line("COMPLETING"), 9999.0, False, RunnerState.RUNNING),
        (line("NODE_FAIL"), MAX_HEARTBEAT_AGE / 2, False, RunnerState.RUNNING),  # its node goes on
        ("", MAX_HEARTBEAT_AGE / 2, False, RunnerState.RUNNING),
        (line("NODE_FAIL"), MAX_HEARTBEAT_AGE + 1, False, None),
        ("", MAX_HEARTBEAT_AGE + 1, False, None),
        ("", 1.0, True, None),  # on this machine its lock would be seen
    ],
)
async def test_an_attempt_is_lost_only_if_slurm_and_its_heartbeat_are_silent(
    seen: str, queue: str, beat_age: float, same_boot: bool, truth: RunnerState | None
) -> None:
    cluster = Cluster(queue, state=seen, pid=3, beat_age=beat_age, same_boot=same_boot)
    found = await cluster().status("j", 1)
    assert found.state is (truth or RunnerState(seen))


# --- of who tends it -------------------------------------------------------------------------------


def tended(cluster: Cluster) -> SlurmRunner:
    return SlurmRunner(cluster, root="root", caller_watches=True)


async def test_a_queued_job_stays_queued_while_slurm_does_not_answer() -> None:
    cluster = Cluster(age=SUBMISSION_GRACE * 100)
    cluster.answers["squeue"] = AWAY
    for found in (await tended(cluster).launch(LAUNCH), await tended(cluster).status("j", 1)):
        assert (found.state, found.engine_has) == (RunnerState.QUEUED, None)
        assert "Slurm does not answer" in found.engine_says
    assert cluster.voided is None
    del cluster.answers["squeue"]
    for cluster.queue, has in (("", False), (line("PENDING", reason="Resources"), True)):
        found = await tended(cluster).status("j", 1)
        assert (found.state, found.engine_has) == (RunnerState.QUEUED, has)


@pytest.mark.parametrize("seen", ["lost", "rebooted"])
async def test_a_started_job_counts_as_running_while_slurm_is_unreachable(seen: str) -> None:
    cluster = Cluster(state=seen, pid=3, beat_age=9999.0, same_boot=False)
    cluster.answers["squeue"] = AWAY
    assert (await tended(cluster).status("j", 1)).state is RunnerState.RUNNING
    del cluster.answers["squeue"]
    ended = await tended(cluster).status("j", 1)
    assert ended.state is RunnerState(seen)
    assert "knows nothing of it" in ended.engine_says
