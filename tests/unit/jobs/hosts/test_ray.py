"""How Ray's answers are interpreted, and what Ray is asked."""

import json
from dataclasses import replace
from typing import Any

import pytest

from groupwise.jobs.hosts.answers import RunnerState
from groupwise.jobs.hosts.driver import Launch, Scheduler
from groupwise.jobs.hosts.host import HostUnreachable, OutcomeUnknown, RunnerRefused
from groupwise.jobs.hosts.ray import ADDRESS, RayRunner
from groupwise.jobs.hosts.schedulers import MAX_HEARTBEAT_AGE
from groupwise.jobs.hosts.spec import JobSpec
from tests.fake_cluster_head import Head

NAME = "j.1-0123abcd"
WORD = "ray:head:8265"
RAY_OPTIONS = json.dumps({"entrypoint_num_cpus": 1, "entrypoint_num_gpus": 2})
LAUNCH = Launch("j", 1, JobSpec(("true",)), engine=Scheduler(WORD, (RAY_OPTIONS,)))
USAGE = {"CPU": [3.0, 4.0], "GPU": [0.5, 2.0]}
CLUSTER = {"data": {"clusterStatus": {"loadMetricsReport": {"usage": USAGE}}}}


class RaysHead(Head):
    """The machine of Ray's head, with the jobs that Ray has."""

    def __init__(self, *jobs: dict[str, Any], **state: Any) -> None:
        asked = {"engine": WORD, "engine_options": [RAY_OPTIONS]}
        super().__init__(**{**asked, "folder": "/srv/it's/j.1", "age": 9999.0, **state})
        self.jobs = {each.pop("name", NAME): each for each in jobs}
        self.answers: dict[str, tuple[int, str]] = {}
        """To calls of a method, in place of Ray's."""
        self.dead: str | None = None
        self.told: list[tuple[str, str, Any]] = []

    def __call__(self, address: str = ADDRESS) -> RayRunner:
        return RayRunner(self, root="root", address=address)

    def changed(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path, _ in self.told if method != "GET"]

    def posted(self) -> Any:
        """What was submitted."""
        [body] = [
            body for method, path, body in self.told if (method, path) == ("POST", "/api/jobs/")
        ]
        return body

    def ran(self, arguments: list[str]) -> dict[str, Any]:
        assert arguments[:4] == ["python3", "-I", "-S", "-c"]
        if self.dead is not None:
            return {"code": 3, "out": "", "err": self.dead}
        asked = json.loads(arguments[5])
        answers = [self._answer(*each) for each in asked["calls"]]
        return {"code": 0, "out": json.dumps(answers), "err": ""}

    def _answer(self, method: str, path: str, body: Any) -> tuple[int, str]:
        self.told.append((method, path, body))
        if path == "/api/cluster_status":
            return 200, json.dumps(CLUSTER)
        if method in self.answers:
            return self.answers[method]
        if method == "POST" and path == "/api/jobs/":
            self.jobs[body["submission_id"]] = {"status": "PENDING"}
            return 200, "{}"
        name = path.split("/")[3]
        if method == "DELETE":
            del self.jobs[name]
        if name in self.jobs or method == "DELETE":
            return 200, json.dumps(self.jobs.get(name))
        return 404, f"Job {name} does not exist"


def job(status: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"status": status, "message": message, **more}


async def test_submitted_under_its_name_with_what_was_asked_and_time_to_save() -> None:
    head = RaysHead()
    found = await head().launch(LAUNCH)
    body = head.posted()
    assert body["submission_id"] == NAME
    assert (body["entrypoint_num_cpus"], body["entrypoint_num_gpus"]) == (1, 2)
    assert body["entrypoint"] == (
        "exec sh '/srv/it'\"'\"'s/j.1/begin.sh' >>'/srv/it'\"'\"'s/j.1/engine.log' 2>&1"
    )
    assert body["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "30"
    assert found.engine_says == (
        f"job {NAME} of Ray is pending: it wants 1 CPU, 2 GPU; free: 1 of 4 CPU, 1.5 of 2 GPU"
    )
    head = RaysHead(job("RUNNING"))
    await head().launch(LAUNCH)
    assert head.changed() == [], "what Ray has is not submitted again"
    head = RaysHead()
    await head().launch(replace(LAUNCH, engine=Scheduler(WORD, ("{}",))))
    assert head.posted()["entrypoint"].startswith("CUDA_VISIBLE_DEVICES= exec sh "), "no GPU"


@pytest.mark.parametrize("status", [400, 500])
async def test_a_concurrent_submission_of_the_same_job_counts_as_queued(status: int) -> None:
    head = RaysHead()
    head.answers["POST"] = (status, f"ValueError: Job with submission_id {NAME} already exists.")
    assert (await head().launch(LAUNCH)).state is RunnerState.QUEUED
    assert head.voided is None


async def test_a_job_that_ray_refuses_leaves_nothing_and_a_server_error_is_unknown() -> None:
    head = RaysHead()
    head.answers["POST"] = (400, "Traceback:\n  …\nTypeError: entrypoint_num_cpus must be a number")
    with pytest.raises(RunnerRefused, match="TypeError") as refusal:
        await head().launch(LAUNCH)
    assert (refusal.value.code, head.voided is None, head.forgotten) == ("engine", False, True)
    head = RaysHead()
    head.answers["POST"] = (500, "No available agent to submit job, please try again later.")
    with pytest.raises(OutcomeUnknown, match="please try again later"):
        await head().launch(LAUNCH)
    assert (head.voided, head.forgotten) == (None, False)


async def test_a_head_that_is_away_or_says_something_else_is_no_end() -> None:
    head = RaysHead()
    head.dead = "[Errno 111] Connection refused"
    for ask, kind in (
        (head().launch(LAUNCH), OutcomeUnknown),
        (head().status("j", 1), HostUnreachable),
    ):
        with pytest.raises(kind, match=r"http.*refused"):
            await ask
    head.dead = None
    for answer in ((404, "<html>Not Found</html>"), (500, "down"), (200, "[]"), (401, "no")):
        head.answers["GET"] = answer
        told = r"RAY_AUTH_TOKEN.*auth_token" if answer[0] == 401 else "."
        with pytest.raises(HostUnreachable, match=told):
            await head().status("j", 1)
    assert (head.voided, head.changed()) == (None, [])
    head.answers["GET"] = (200, '{"ray_version": "2.60.0"}')
    assert await head().free_resources() == "1 of 4 CPU, 1.5 of 2 GPU"
    head.answers["GET"] = (200, "<html>another service</html>")
    with pytest.raises(HostUnreachable):
        await head().free_resources()


@pytest.mark.parametrize("status", ["STOPPED", "FAILED"])
async def test_ended_before_it_began_it_never_does(status: str) -> None:
    head = RaysHead(job(status, "Job was intentionally stopped."))
    assert (await head().status("j", 1)).state is RunnerState.VOIDED
    assert "Job was intentionally stopped" in (head.voided or "")


GIVEN_UP = job("FAILED", "…", error_type="JOB_SUPERVISOR_ACTOR_START_TIMEOUT")
"""After a quarter of an hour."""


@pytest.mark.parametrize("jobs", [(), (GIVEN_UP,)], ids=["a new head", "given up"])
async def test_a_job_that_ray_forgot_or_gave_up_is_submitted_again_unchanged(
    jobs: tuple[dict[str, Any], ...],
) -> None:
    head = RaysHead(*[dict(each) for each in jobs])
    found = await head().status("j", 1)
    assert (found.state, found.engine_says) == (RunnerState.QUEUED, "it is on its way to Ray")
    deleted = [("DELETE", f"/api/jobs/{NAME}")] * len(jobs)
    assert head.changed() == [*deleted, ("POST", "/api/jobs/")]
    body = head.told[-1][2] if head.told[-1][0] == "POST" else head.posted()
    assert (body["submission_id"], body["entrypoint_num_gpus"]) == (NAME, 2)
    head = RaysHead(*[dict(each) for each in jobs])
    found = await tended(head).status("j", 1)
    assert (found.state, found.engine_has) == (RunnerState.QUEUED, False), "who tends it does that"
    assert ("POST", "/api/jobs/") not in head.changed()
    found = await tended(head).launch(TENDED)
    assert (found.state, found.engine_has) == (RunnerState.QUEUED, True)
    assert head.changed()[-1] == ("POST", "/api/jobs/")


@pytest.mark.parametrize(
    ("status", "truth"), [("RUNNING", RunnerState.RUNNING), ("FAILED", RunnerState.LOST)]
)
async def test_an_attempt_is_lost_only_if_ray_has_no_such_job(
    status: str, truth: RunnerState
) -> None:
    """What else of it there is to say `test_slurm.py` says of every engine."""
    head = RaysHead(job(status), state="lost", pid=3, beat_age=MAX_HEARTBEAT_AGE + 1)
    assert (await head().status("j", 1)).state is truth
    assert head.changed() == []
    head = RaysHead(job("PENDING"))
    assert (await head().void("j", 1)).state is RunnerState.VOIDED
    assert head.changed() == [("POST", f"/api/jobs/{NAME}/stop")], "Ray need not begin it"


@pytest.mark.parametrize(("engine", "address"), [
    (WORD, "http://10.0.0.7:8265"), ("ray:10.0.0.7:8265", ADDRESS), ("ray:another:8265", ADDRESS), ("slurm", ADDRESS),
])  # fmt: skip
async def test_a_job_of_another_engine_is_not_submitted_or_stopped(
    engine: str, address: str
) -> None:
    head = RaysHead(engine=engine)
    assert (await head(address).status("j", 1)).state is RunnerState.QUEUED
    await head(address).void("j", 1)
    assert head.told == []


# --- of somebody who tends it ----------------------------------------------------------------------


def tended(head: RaysHead) -> RayRunner:
    head.state["engine"] = "ray"
    return RayRunner(head, root="root", address="http://another:8265", caller_watches=True)


TENDED = replace(LAUNCH, engine=Scheduler("ray", (RAY_OPTIONS,)))


async def test_tended_it_waits_while_its_head_is_away() -> None:
    head = RaysHead()
    head.dead = "Connection refused"
    for found in (await tended(head).launch(TENDED), await tended(head).status("j", 1)):
        assert (found.state, found.engine_has) == (RunnerState.QUEUED, None)
        assert "at http://another:8265" in found.engine_says
    assert head.voided is None
