"""`groupwise launch slurm` and `launch ray` with a real Slurm and a real Ray of two nodes each, and what happens to jobs when the cluster
or an operator kills, preempts or refuses them."""

import asyncio
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from groupwise.jobs.clouds.backend import Backend, CloudError, Order, Outcome, Phase, Unreachable
from groupwise.jobs.hosts import ray as ray_host
from groupwise.jobs.hosts import schedulers
from groupwise.jobs.hosts import slurm as slurm_host
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.host import OutcomeUnknown
from groupwise.jobs.hosts.spec import Limits
from tests import launch_backends, ray_cluster, slurm
from tests.integration.launch.person import Person
from tests.launch_backends import SAVES, BackendSpec, client, name

__all__ = ["client", "name"]

pytestmark = pytest.mark.launch
LaunchClient: TypeAlias = launch_backends.LaunchClient[Backend]
SOAK = pytest.mark.soak(suite="launch")
LATER = "--begin=now+1hour"
SLOWLY = 4.0
"""Seconds in which a job saves; by itself Ray kills after 3."""
RUNS = "print('it ran')"
GOES_ON = f"""{SAVES}
if begun:
    print(begun)
    sys.exit(0)
slowly, told = float(sys.argv[1]), []
if slowly < 0:
    save(1, b"one")
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("on", flush=True)
while not told:
    time.sleep(.05)
time.sleep(slowly)
print(len(told))
save(1, b"one")
"""
"""After SIGTERM it takes this many seconds to save; with a negative number it saves before it says "on"."""
SHOWS = """\
import json, os, sys
os.makedirs("outputs")
names = ("SLURM_JOB_PARTITION", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")
told = {name: os.environ.get(name) for name in names}
with open("outputs/told.json", "w") as file:
    json.dump({"words": sys.argv[1:], **told}, file)
print("it ran")
"""


def waits_for(go: Path) -> str:
    return (
        f"import os, time\nprint(os.environ['CUDA_VISIBLE_DEVICES'] or 'none', flush=True)\n"
        f"while not os.path.exists({str(go)!r}):\n    time.sleep(.05)"
    )


@dataclass
class ClusterCase:
    """What differs between Slurm and Ray in these tests."""

    name: str
    spec: Callable[[str], BackendSpec]
    """With this home folder."""
    variables: dict[str, str]
    """The environment of a user on the head node."""
    folder: Path
    """All that it keeps."""
    jobs: Callable[[str], list[Any]]
    """What it has of the attempts of a job."""
    runner: Any
    at: str
    """The value of `--at`, with the folder to fill in."""


def of_slurm() -> ClusterCase:
    cluster = slurm.shared()
    conf = str(cluster.configuration)
    return ClusterCase(
        "slurm",
        lambda home: BackendSpec("slurm", home, slurm=conf),
        {"SLURM_CONF": conf},
        cluster.folder,
        numbers,
        slurm_host.SlurmRunner,
        "slurm:{}",
    )


def of_ray() -> ClusterCase:
    cluster = ray_cluster.shared()
    return ClusterCase(
        "ray",
        lambda home: BackendSpec("ray", home, ray=(cluster.address, cluster.token)),
        {"RAY_ADDRESS": cluster.address, "RAY_AUTH_TOKEN": cluster.token},
        cluster.folder,
        cluster.jobs,
        ray_host.RayRunner,
        f"ray:{{}},{cluster.address}",
    )


def numbers(name: str, states: str = "all") -> list[str]:
    """Of its jobs, as Slurm calls them."""
    lines = slurm.shared().run("squeue", "-h", "-t", states, "-o", "%i|%j").splitlines()
    found = [line.split("|") for line in lines]
    return [number for number, of in found if of.startswith(f"{name}.")]


@pytest.fixture(params=[of_slurm, of_ray], ids=["slurm", "ray"])
def cluster(request: pytest.FixtureRequest) -> ClusterCase:
    return request.param()


only_slurm = pytest.mark.parametrize("cluster", [of_slurm], ids=["slurm"], indirect=True)
only_ray = pytest.mark.parametrize("cluster", [of_ray], ids=["ray"], indirect=True)


@pytest.fixture
def submitter(cluster: ClusterCase, person: Person, monkeypatch: pytest.MonkeyPatch) -> Person:
    """A user on the cluster's head node, with a polling interval of 1 s."""
    monkeypatch.setattr(schedulers, "POLL_SECONDS", 1.0)
    for variable, value in cluster.variables.items():
        monkeypatch.setenv(variable, value)
    (person.project / "job.py").write_text(RUNS)
    return person


@pytest.fixture
def spec(cluster: ClusterCase, tmp_path: Path) -> BackendSpec:
    return cluster.spec(str(tmp_path))


def new_order(
    client: LaunchClient, script: str, *options: str, gpus: int = 0, more: str = "", **asks: Any
) -> Order:
    """`more`: of the name."""
    return client.order(
        script,
        f"{asks.pop('slowly', 0)}",
        name=client.name + more,
        gpus=gpus,
        place_options={**asks, **({"options": [*options]} if options else {})},
        limits=Limits(time_seconds=600, grace_seconds=20),
    )


# --- typed -----------------------------------------------------------------------------------------


def test_a_script_runs_on_a_node_and_is_found_from_another_machine_by_engine_and_folder(
    submitter: Person, cluster: ClusterCase
) -> None:
    (submitter.project / "job.py").write_text(SHOWS)
    shared, words = submitter.home / "shared", ("two words", "--gpus", "-x", "it's")
    more = ("--partition", "gpu") if cluster.name == "slurm" else ("--resource", "apart=1")
    asks = ("--gpus", "2", "--cpus", "2", "--memory", "100M", "--shared", str(shared), *more)
    submitter.types(cluster.name, "--name", "shows", *asks, "--script", "job.py", *words)
    told = json.loads((submitter.project / "launches/shows/outputs/told.json").read_text())
    head = ray_cluster.shared() if cluster.name == "ray" else None
    assert told == {
        "words": list(words),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_PARTITION": None if head else "gpu",
        "SLURM_CPUS_PER_TASK": None if head else "2",
        "RAY_ADDRESS": f"{head.host}:{head.gcs}" if head else None,
    }
    assert submitter.result("shows")["state"] == "succeeded"
    [job] = cluster.jobs("shows")
    if head:
        assert head.node in job["driver_agent_http_address"]
        assert submitter.holding(head.token) == []
    submitter.state = "another"
    assert "it ran" in submitter.types("logs", "-f", "shows", "--at", cluster.at.format(shared)).out
    assert (shared / "groupwise-launch").is_dir()


@only_slurm
def test_a_plan_asks_slurm_and_changes_nothing(submitter: Person, cluster: ClusterCase) -> None:
    dry = ("slurm", "--name", "planned", "--dry-run")
    typed = submitter.types(*dry, "--gpus", "2", "--script", "job.py")
    options = shlex.split(
        next(line for line in typed.out.splitlines() if "submit it to Slurm" in line)
    )
    assert "--gpus-per-node=2" in options
    assert "to start at" in typed.out
    for wrong, why in (
        (("--gpus", "3"), "Slurm would not have it"),
        (("--partition", "none-such"), "invalid partition"),
        (("--sbatch=--array=1-9",), "--array"),
    ):
        typed = submitter.types(*dry, *wrong, "--script", "job.py", code=None)
        assert typed.code != 0
        assert why in typed.err
        assert "Traceback" not in typed.err
    assert cluster.jobs("planned") == []


def test_a_pending_job_shows_its_reason_and_can_be_stopped(
    submitter: Person, cluster: ClusterCase
) -> None:
    waits, says = (f"--sbatch={LATER}",), "pending (BeginTime)"
    if cluster.name == "ray":
        ray_cluster.shared().idle()
        waits = ("--gpus", "9")
        says = "is pending: it wants 1 CPU, 9 GPU; free: 8 of 8 CPU, 4 of 4 GPU"
    submitter.types(cluster.name, "--name", "later", "--detach", *waits, "--script", "job.py")
    [listed] = json.loads(submitter.types("list", "--json").out)["jobs"]
    place = cluster.at.format("").removesuffix(":")
    assert (listed["state"], listed["place"]) == ("waiting", place)
    assert says in listed["waits_for"]
    submitter.types("stop", "later")
    assert json.loads(submitter.types("list", "--json").out)["jobs"][0]["state"] == "cancelled"
    assert submitter.types("logs", "later").out == ""
    if cluster.name == "slurm":
        assert numbers("later", "pending,running") == []


# --- faults ----------------------------------------------------------------------------------------


async def test_cut_off_before_it_was_submitted_it_is_submitted_once(
    client: LaunchClient, cluster: ClusterCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gets it from whoever looks, Slurm from whoever asks for it again."""

    async def is_cut_off(*_: object) -> None:
        raise asyncio.CancelledError

    order = new_order(client, RUNS)
    with monkeypatch.context() as patch:
        patch.setattr(cluster.runner, "_submit", is_cut_off)
        with pytest.raises(asyncio.CancelledError):
            await client.submit(order)
    assert cluster.jobs(client.name) == []
    handle = await client.backend.find(client.name)
    assert handle is not None
    if cluster.name == "slurm":
        status = await client.backend.status(handle)
        assert (status.phase, status.waits_for) == (Phase.WAITING, "it is on its way to Slurm")
        assert cluster.jobs(client.name) == []
        assert await client.submit(order) == handle
    assert await client.outcome(handle) is Outcome.SUCCEEDED
    assert await client.submit(order) == handle
    assert len(cluster.jobs(client.name)) == 1
    assert await client.said(handle) == "it ran\n"


@pytest.mark.parametrize(
    ("cluster", "how"),
    [
        (of_slurm, "preempted"),
        pytest.param(of_slurm, "by hand", marks=SOAK),
        pytest.param(of_ray, "by hand", marks=SOAK),
    ],
    indirect=["cluster"],
)
async def test_ended_by_its_engine_it_saves_and_continues_from_there(
    client: LaunchClient, cluster: ClusterCase, how: str
) -> None:
    asks: dict[str, Any] = {"partition": "gpu"} if cluster.name == "slurm" else {"slowly": SLOWLY}
    alone = ("--nodelist=n1", "--exclusive") if cluster.name == "slurm" else ()
    handle = await client.submit(new_order(client, GOES_ON, *alone, **asks))
    await client.running(handle)
    if how == "preempted":
        urgent = new_order(client, RUNS, *alone, more="-by", partition="urgent")
        assert await client.outcome(await client.submit(urgent)) is Outcome.SUCCEEDED
    elif cluster.name == "slurm":
        slurm.shared().run("scancel", *numbers(client.name, "running"))
    else:
        ray_cluster.shared().stop(client.name)
    status = await client.until(handle, lambda status: status.ending)
    assert status.ending is not None
    assert (status.ending.failure, status.step) == (FailureClass.PREEMPTION, 1)
    assert await client.said(handle) == "on\n1\n"
    again = await client.resume()
    assert await client.outcome(again) is Outcome.SUCCEEDED
    assert await client.said(again) == "one\n"


@SOAK
async def test_without_its_head_a_job_continues_and_nothing_is_placed_twice(
    client: LaunchClient, cluster: ClusterCase
) -> None:
    go, of_ray = client.folder / "go", cluster.name == "ray"
    handle = await client.submit(new_order(client, waits_for(go)))
    waits: dict[str, Any] = {"resources": {"new": 1}} if of_ray else {}
    options = () if of_ray else (LATER,)
    later = await client.submit(new_order(client, RUNS, *options, more="-later", **waits))
    await client.running(handle)
    if of_ray:
        ray_cluster.shared().kill("gcs_server", "dashboard/dashboard.py", "ray-dashboard-")
    else:
        slurm.shared().until_saved(f"{client.name}-later.1")
        slurm.shared().kill("controller")
    new = new_order(client, RUNS, more="-new")
    try:
        assert (await client.backend.status(handle)).phase is Phase.RUNNING
        with pytest.raises(Unreachable, match="does not answer"):
            await client.backend.status(later)
        with pytest.raises(Unreachable, match="does not answer"):
            await client.submit(new)
        go.touch()
        assert await client.outcome(handle) is Outcome.SUCCEEDED
    finally:
        if of_ray:
            ray_cluster.shared().end()
            ray_cluster.shared().start(new=1)
            ray_cluster.shared().start_node()
        else:
            slurm.shared().start("controller")
            slurm.shared().until_ready()
    if of_ray:
        assert await client.outcome(later) is Outcome.SUCCEEDED
        assert await client.said(later) == "it ran\n"
    else:
        assert (await client.backend.status(later)).phase is Phase.WAITING
        await client.backend.cancel(later, 1.0)
    assert await client.outcome(await client.submit(new)) is Outcome.SUCCEEDED
    assert len(cluster.jobs(f"{client.name}-new")) == 1


# --- Slurm -----------------------------------------------------------------------------------------


@only_slurm
async def test_refused_or_cancelled_in_the_queue_its_name_is_free(client: LaunchClient) -> None:
    with pytest.raises(CloudError, match="would not have it"):
        await client.submit(new_order(client, "print()", gpus=3))
    assert await client.backend.find(client.name) is None
    handle = await client.submit(new_order(client, RUNS, LATER))
    slurm.shared().run("scancel", *numbers(client.name, "pending"))
    end = await client.ending(handle)
    assert (end.outcome, end.failure) == (Outcome.REFUSED, FailureClass.LAUNCH_FAILURE)
    assert "cancelled" in end.reason
    again = await client.resume()
    assert again.attempt == handle.attempt + 1
    await client.backend.cancel(again, 1.0)
    assert await client.outcome(again) is Outcome.CANCELLED
    assert numbers(client.name, "pending,running") == []


# --- Ray -------------------------------------------------------------------------------------------


@only_ray
async def test_each_gets_gpus_of_its_own_and_what_asks_for_none_gets_none(
    client: LaunchClient,
) -> None:
    go = client.folder / "go"

    async def placed(word: str, gpus: int) -> Any:
        there = {"apart": 0.5}
        return await client.submit(
            new_order(client, waits_for(go), gpus=gpus, more=f"-{word}", resources=there)
        )

    handles = [await placed("a", 1), await placed("b", 1), await placed("c", 0)]
    for each in handles:
        await client.running(each)
    waiting = await placed("d", 1)
    assert (await client.backend.status(waiting)).phase is Phase.WAITING
    *seen, none = [(await client.said(each)).strip() for each in handles]
    assert (sorted(seen), none) == (["0", "1"], "none")
    go.touch()
    for each in (*handles, waiting):
        assert await client.outcome(each) is Outcome.SUCCEEDED
    assert (await client.said(waiting)).strip() in ("0", "1")


@SOAK
@only_ray
async def test_an_answer_that_does_not_come_is_asked_for_again_and_it_runs_once(
    client: LaunchClient, cluster: ClusterCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = ray_host.RayRunner._submit, iter([True])

    async def answers_late(*asked: Any) -> None:
        await real(*asked)
        if next(lost, False):
            raise OutcomeUnknown("no answer in time")

    with monkeypatch.context() as patch:
        patch.setattr(ray_host.RayRunner, "_submit", answers_late)
        handle = await client.submit(new_order(client, RUNS))
    assert next(lost, None) is None
    assert await client.outcome(handle) is Outcome.SUCCEEDED
    assert len(cluster.jobs(client.name)) == 1
    assert await client.said(handle) == "it ran\n"


@SOAK
@only_ray
async def test_with_its_node_it_is_lost_and_continues_from_its_checkpoint(
    client: LaunchClient,
) -> None:
    handle = await client.submit(new_order(client, GOES_ON, slowly=-1.0, resources={"apart": 1}))
    await client.until(handle, lambda status: status.log_size and status.step)
    await asyncio.to_thread(ray_cluster.shared().kill_node)
    assert await client.outcome(handle) is Outcome.LOST
    ray_cluster.shared().start_node()
    again = await client.resume()
    assert await client.outcome(again) is Outcome.SUCCEEDED
    assert await client.said(again) == "one\n"
