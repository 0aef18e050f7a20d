"""`groupwise launch slurm` and `launch ray` with a real Slurm and a real Ray of two nodes each, and what happens to jobs when these, or
somebody, are unkind."""

import asyncio
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from groupwise.clouds.port import Backend, CloudError, Order, Outcome, Phase, Unreachable
from groupwise.hosts import engines
from groupwise.hosts import ray as ray_host
from groupwise.hosts import slurm as slurm_host
from groupwise.hosts.failures import FailureClass
from groupwise.hosts.port import OutcomeUnknown
from groupwise.hosts.spec import Limits
from tests import launch_backends, ray_cluster, slurm
from tests.integration.launch.person import Person
from tests.launch_backends import SAVES, Place, laptop, name

__all__ = ["laptop", "name"]

pytestmark = pytest.mark.launch
Laptop: TypeAlias = launch_backends.Laptop[Backend]
LONG = pytest.mark.soak(suite="launch")
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
class OfOne:
    """What is different between the two."""

    name: str
    place: Callable[[str], Place]
    """With this home folder."""
    variables: dict[str, str]
    """Of whoever is at its head."""
    folder: Path
    """All that it keeps."""
    jobs: Callable[[str], list[Any]]
    """What it has of the attempts of a job."""
    runner: Any
    at: str
    """The place as a word."""


def of_slurm() -> OfOne:
    cluster = slurm.shared()
    conf = str(cluster.configuration)
    return OfOne(
        "slurm",
        lambda home: Place("slurm", home, slurm=conf),
        {"SLURM_CONF": conf},
        cluster.folder,
        numbers,
        slurm_host.SlurmRunner,
        "slurm:{}",
    )


def of_ray() -> OfOne:
    cluster = ray_cluster.shared()
    return OfOne(
        "ray",
        lambda home: Place("ray", home, ray=(cluster.address, cluster.token)),
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
def engine(request: pytest.FixtureRequest) -> OfOne:
    return request.param()


only_slurm = pytest.mark.parametrize("engine", [of_slurm], ids=["slurm"], indirect=True)
only_ray = pytest.mark.parametrize("engine", [of_ray], ids=["ray"], indirect=True)


@pytest.fixture
def clerk(engine: OfOne, person: Person, monkeypatch: pytest.MonkeyPatch) -> Person:
    """A person at its head, whose questions to it come sooner."""
    monkeypatch.setattr(engines, "LOOK_SECONDS", 1.0)
    for variable, value in engine.variables.items():
        monkeypatch.setenv(variable, value)
    (person.project / "job.py").write_text(RUNS)
    return person


@pytest.fixture
def place(engine: OfOne, tmp_path: Path) -> Place:
    return engine.place(str(tmp_path))


def asked(
    laptop: Laptop, script: str, *options: str, gpus: int = 0, more: str = "", **asks: Any
) -> Order:
    """`more`: of the name."""
    return laptop.order(
        script,
        f"{asks.pop('slowly', 0)}",
        name=laptop.name + more,
        gpus=gpus,
        asks={**asks, **({"options": [*options]} if options else {})},
        limits=Limits(time_seconds=600, grace_seconds=20),
    )


# --- typed -----------------------------------------------------------------------------------------


def test_a_script_runs_on_a_node_and_is_found_from_another_machine_by_engine_and_folder(
    clerk: Person, engine: OfOne
) -> None:
    (clerk.project / "job.py").write_text(SHOWS)
    shared, words = clerk.home / "shared", ("two words", "--gpus", "-x", "it's")
    more = ("--partition", "gpu") if engine.name == "slurm" else ("--resource", "apart=1")
    asks = ("--gpus", "2", "--cpus", "2", "--memory", "100M", "--shared", str(shared), *more)
    clerk.types(engine.name, "--name", "shows", *asks, "--script", "job.py", *words)
    told = json.loads((clerk.project / "launches/shows/outputs/told.json").read_text())
    head = ray_cluster.shared() if engine.name == "ray" else None
    assert told == {
        "words": list(words),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_PARTITION": None if head else "gpu",
        "SLURM_CPUS_PER_TASK": None if head else "2",
        "RAY_ADDRESS": f"{head.host}:{head.gcs}" if head else None,
    }
    assert clerk.result("shows")["state"] == "succeeded"
    [job] = engine.jobs("shows")
    if head:
        assert head.node in job["driver_agent_http_address"]
        assert clerk.holding(head.token) == []
    clerk.state = "another"
    assert "it ran" in clerk.types("logs", "-f", "shows", "--at", engine.at.format(shared)).out
    assert (shared / "groupwise-launch").is_dir()


@only_slurm
def test_a_plan_asks_slurm_and_changes_nothing(clerk: Person, engine: OfOne) -> None:
    dry = ("slurm", "--name", "planned", "--dry-run")
    typed = clerk.types(*dry, "--gpus", "2", "--script", "job.py")
    options = shlex.split(next(line for line in typed.out.splitlines() if "sbatch" in line))
    assert "--gpus-per-node=2" in options
    assert "to start at" in typed.out
    for wrong, why in (
        (("--gpus", "3"), "Slurm would not have it"),
        (("--partition", "none-such"), "invalid partition"),
        (("--sbatch=--array=1-9",), "--array"),
    ):
        typed = clerk.types(*dry, *wrong, "--script", "job.py", code=None)
        assert typed.code != 0
        assert why in typed.err
        assert "Traceback" not in typed.err
    assert engine.jobs("planned") == []


def test_what_waits_says_what_for_and_is_stopped(clerk: Person, engine: OfOne) -> None:
    waits, says = (f"--sbatch={LATER}",), "pending (BeginTime)"
    if engine.name == "ray":
        ray_cluster.shared().idle()
        waits = ("--gpus", "9")
        says = "is pending: it wants 1 CPU, 9 GPU; free: 8 of 8 CPU, 4 of 4 GPU"
    clerk.types(engine.name, "--name", "later", "--detach", *waits, "--script", "job.py")
    [listed] = json.loads(clerk.types("list", "--json").out)["jobs"]
    place = engine.at.format("").removesuffix(":")
    assert (listed["state"], listed["place"]) == ("waiting", place)
    assert says in listed["waits_for"]
    clerk.types("stop", "later")
    assert json.loads(clerk.types("list", "--json").out)["jobs"][0]["state"] == "cancelled"
    assert clerk.types("logs", "later").out == ""
    if engine.name == "slurm":
        assert numbers("later", "pending,running") == []


# --- unkind ----------------------------------------------------------------------------------------


async def test_cut_off_before_it_was_submitted_it_is_submitted_once(
    laptop: Laptop, engine: OfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gets it from whoever looks, Slurm from whoever asks for it again."""

    async def is_cut_off(*_: object) -> None:
        raise asyncio.CancelledError

    order = asked(laptop, RUNS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_submit", is_cut_off)
        with pytest.raises(asyncio.CancelledError):
            await laptop.submit(order)
    assert engine.jobs(laptop.name) == []
    handle = await laptop.backend.find(laptop.name)
    assert handle is not None
    if engine.name == "slurm":
        status = await laptop.backend.status(handle)
        assert (status.phase, status.waits_for) == (Phase.WAITING, "it is on its way to Slurm")
        assert engine.jobs(laptop.name) == []
        assert await laptop.submit(order) == handle
    assert await laptop.outcome(handle) is Outcome.SUCCEEDED
    assert await laptop.submit(order) == handle
    assert len(engine.jobs(laptop.name)) == 1
    assert await laptop.said(handle) == "it ran\n"


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        (of_slurm, "preempted"),
        pytest.param(of_slurm, "by hand", marks=LONG),
        pytest.param(of_ray, "by hand", marks=LONG),
    ],
    indirect=["engine"],
)
async def test_ended_by_its_engine_it_saves_and_goes_on_from_there(
    laptop: Laptop, engine: OfOne, how: str
) -> None:
    asks: dict[str, Any] = {"partition": "gpu"} if engine.name == "slurm" else {"slowly": SLOWLY}
    alone = ("--nodelist=n1", "--exclusive") if engine.name == "slurm" else ()
    handle = await laptop.submit(asked(laptop, GOES_ON, *alone, **asks))
    await laptop.running(handle)
    if how == "preempted":
        urgent = asked(laptop, RUNS, *alone, more="-by", partition="urgent")
        assert await laptop.outcome(await laptop.submit(urgent)) is Outcome.SUCCEEDED
    elif engine.name == "slurm":
        slurm.shared().run("scancel", *numbers(laptop.name, "running"))
    else:
        ray_cluster.shared().stop(laptop.name)
    status = await laptop.until(handle, lambda status: status.ending)
    assert status.ending is not None
    assert (status.ending.failure, status.step) == (FailureClass.PREEMPTION, 1)
    assert await laptop.said(handle) == "on\n1\n"
    again = await laptop.resume()
    assert await laptop.outcome(again) is Outcome.SUCCEEDED
    assert await laptop.said(again) == "one\n"


@LONG
async def test_without_its_head_a_job_goes_on_and_nothing_is_placed_twice(
    laptop: Laptop, engine: OfOne
) -> None:
    go, of_ray = laptop.folder / "go", engine.name == "ray"
    handle = await laptop.submit(asked(laptop, waits_for(go)))
    waits: dict[str, Any] = {"resources": {"new": 1}} if of_ray else {}
    options = () if of_ray else (LATER,)
    later = await laptop.submit(asked(laptop, RUNS, *options, more="-later", **waits))
    await laptop.running(handle)
    if of_ray:
        ray_cluster.shared().kill("gcs_server", "dashboard/dashboard.py", "ray-dashboard-")
    else:
        slurm.shared().until_saved(f"{laptop.name}-later.1")
        slurm.shared().kill("controller")
    new = asked(laptop, RUNS, more="-new")
    try:
        assert (await laptop.backend.status(handle)).phase is Phase.RUNNING
        with pytest.raises(Unreachable, match="does not answer"):
            await laptop.backend.status(later)
        with pytest.raises(Unreachable, match="does not answer"):
            await laptop.submit(new)
        go.touch()
        assert await laptop.outcome(handle) is Outcome.SUCCEEDED
    finally:
        if of_ray:
            ray_cluster.shared().end()
            ray_cluster.shared().start(new=1)
            ray_cluster.shared().start_node()
        else:
            slurm.shared().start("controller")
            slurm.shared().until_ready()
    if of_ray:
        assert await laptop.outcome(later) is Outcome.SUCCEEDED
        assert await laptop.said(later) == "it ran\n"
    else:
        assert (await laptop.backend.status(later)).phase is Phase.WAITING
        await laptop.backend.cancel(later, 1.0)
    assert await laptop.outcome(await laptop.submit(new)) is Outcome.SUCCEEDED
    assert len(engine.jobs(f"{laptop.name}-new")) == 1


# --- Slurm -----------------------------------------------------------------------------------------


@only_slurm
async def test_refused_or_cancelled_in_the_queue_its_name_is_free(laptop: Laptop) -> None:
    with pytest.raises(CloudError, match="would not have it"):
        await laptop.submit(asked(laptop, "print()", gpus=3))
    assert await laptop.backend.find(laptop.name) is None
    handle = await laptop.submit(asked(laptop, RUNS, LATER))
    slurm.shared().run("scancel", *numbers(laptop.name, "pending"))
    end = await laptop.ending(handle)
    assert (end.outcome, end.failure) == (Outcome.REFUSED, FailureClass.LAUNCH_FAILURE)
    assert "cancelled" in end.reason
    again = await laptop.resume()
    assert again.attempt == handle.attempt + 1
    await laptop.backend.cancel(again, 1.0)
    assert await laptop.outcome(again) is Outcome.CANCELLED
    assert numbers(laptop.name, "pending,running") == []


# --- Ray -------------------------------------------------------------------------------------------


@only_ray
async def test_each_gets_gpus_of_its_own_and_what_asks_for_none_gets_none(laptop: Laptop) -> None:
    go = laptop.folder / "go"

    async def placed(word: str, gpus: int) -> Any:
        there = {"apart": 0.5}
        return await laptop.submit(
            asked(laptop, waits_for(go), gpus=gpus, more=f"-{word}", resources=there)
        )

    handles = [await placed("a", 1), await placed("b", 1), await placed("c", 0)]
    for each in handles:
        await laptop.running(each)
    waiting = await placed("d", 1)
    assert (await laptop.backend.status(waiting)).phase is Phase.WAITING
    *seen, none = [(await laptop.said(each)).strip() for each in handles]
    assert (sorted(seen), none) == (["0", "1"], "none")
    go.touch()
    for each in (*handles, waiting):
        assert await laptop.outcome(each) is Outcome.SUCCEEDED
    assert (await laptop.said(waiting)).strip() in ("0", "1")


@LONG
@only_ray
async def test_an_answer_that_does_not_come_is_asked_for_again_and_it_runs_once(
    laptop: Laptop, engine: OfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = ray_host.RayRunner._submit, iter([True])

    async def answers_late(*asked: Any) -> None:
        await real(*asked)
        if next(lost, False):
            raise OutcomeUnknown("no answer in time")

    with monkeypatch.context() as patch:
        patch.setattr(ray_host.RayRunner, "_submit", answers_late)
        handle = await laptop.submit(asked(laptop, RUNS))
    assert next(lost, None) is None
    assert await laptop.outcome(handle) is Outcome.SUCCEEDED
    assert len(engine.jobs(laptop.name)) == 1
    assert await laptop.said(handle) == "it ran\n"


@LONG
@only_ray
async def test_with_its_node_it_is_lost_and_goes_on_from_its_checkpoint(laptop: Laptop) -> None:
    handle = await laptop.submit(asked(laptop, GOES_ON, slowly=-1.0, resources={"apart": 1}))
    await laptop.until(handle, lambda status: status.log_size and status.step)
    await asyncio.to_thread(ray_cluster.shared().kill_node)
    assert await laptop.outcome(handle) is Outcome.LOST
    ray_cluster.shared().start_node()
    again = await laptop.resume()
    assert await laptop.outcome(again) is Outcome.SUCCEEDED
    assert await laptop.said(again) == "one\n"
