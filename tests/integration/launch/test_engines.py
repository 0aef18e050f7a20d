"""`groupwise launch slurm` and `launch ray` with a real Slurm and a real Ray of two nodes each, and what happens to jobs when these, or
somebody, are unkind."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from groupwise.clouds.port import Backend, CloudError, Order, Outcome, Phase, Unreachable
from groupwise.hosts import engines
from groupwise.hosts import ray as ray_host
from groupwise.hosts import slurm as slurm_host
from groupwise.hosts.driver import Engine, Launch, Runner
from groupwise.hosts.failures import FailureClass
from groupwise.hosts.files import BlobStore
from groupwise.hosts.port import OutcomeUnknown
from groupwise.hosts.spec import JobSpec, Limits
from tests import ray, slurm
from tests.integration.launch.person import Person
from tests.integration.launch.stopping import ctrl_c_ends_it
from tests.places import Place, ending, said, until

pytestmark = pytest.mark.launch
LONG = pytest.mark.soak(suite="launch")
LATER = "--begin=now+1hour"
SLOWLY = 4.0
"""Seconds in which a job saves; by itself Ray kills after 3."""
RUNS = "print('it ran')"
SAVES = """\
import hashlib, json, os, pathlib, signal, sys, time
def save():
    folder = pathlib.Path("outputs/checkpoints/step-1")
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(b"one")
    entry = {"size": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"step": 1, "files": {"w": entry}}))
if "RESUME_FROM" in os.environ:
    print(pathlib.Path(os.environ["RESUME_FROM"], "w").read_text())
    sys.exit(0)
slowly = float(sys.argv[1])
if slowly < 0:
    save()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("on", flush=True)
while not told:
    time.sleep(.05)
time.sleep(slowly)
print(len(told))
save()
"""
SHOWS = """\
import json, os, sys
os.makedirs("outputs")
names = ("SLURM_JOB_PARTITION", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")
told = {name: os.environ.get(name) for name in names}
with open("outputs/told.json", "w") as file:
    json.dump({"words": sys.argv[1:], **told}, file)
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
    cluster = ray.shared()
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
    for name, value in engine.variables.items():
        monkeypatch.setenv(name, value)
    (person.project / "job.py").write_text(RUNS)
    return person


@pytest.fixture
async def backend(engine: OfOne, tmp_path: Path) -> AsyncIterator[Backend]:
    reached = engine.place(str(tmp_path)).reach()
    yield reached
    await reached.close()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.originalname.removeprefix("test_")[:60].replace("_", "-")


def order(
    name: str, script: str, *options: str, gpus: int = 0, slowly: float = 0, **asks: Any
) -> Order:
    spec = JobSpec(
        ("python3", "-c", script, str(slowly)),
        artefacts=("outputs",),
        checkpoints=("outputs",),
        limits=Limits(time_seconds=600, grace_seconds=20),
    )
    return Order(name, spec, gpus, asks={**asks, **({"options": [*options]} if options else {})})


# --- typed -----------------------------------------------------------------------------------------


def test_a_script_runs_on_a_node_and_comes_back(clerk: Person, engine: OfOne) -> None:
    (clerk.project / "job.py").write_text(SHOWS)
    words = ("two words", "--gpus", "-x", "it's")
    more = ("--partition", "gpu") if engine.name == "slurm" else ("--resource", "apart=1")
    asks = ("--gpus", "2", "--cpus", "2", "--memory", "100M", *more)
    clerk.types(engine.name, "--name", "shows", *asks, "--script", "job.py", *words)
    told = json.loads((clerk.project / "launches/shows/outputs/told.json").read_text())
    head = ray.shared() if engine.name == "ray" else None
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
        (("--sbatch", "constraint"), "an option of sbatch is expected"),
        (("--shared", "relative"), "absolute path"),
        (("--user", "me"), "--host"),
    ):
        typed = clerk.types(*dry, *wrong, "--script", "job.py", code=None)
        assert typed.code != 0
        assert why in typed.err
        assert "Traceback" not in typed.err
    assert engine.jobs("planned") == []


@only_ray
def test_a_plan_asks_ray_and_changes_nothing(
    clerk: Person, engine: OfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.shared().idle()
    dry = ("ray", "--dry-run", "--name", "planned", "--gpus", "1")
    typed = clerk.types(*dry, "--resource", "apart=1", "--script", "job.py")
    assert '"entrypoint_num_cpus": 1, "entrypoint_num_gpus": 1' in typed.out
    assert "Ray has free: 8 of 8 CPU, 4 of 4 GPU" in typed.out
    dead = ("--address", f"http://127.0.0.1:{ray.shared().gcs}")
    typed = clerk.types(*dry, *dead, "--script", "job.py", code=1)
    assert "Ray does not answer there" in typed.err
    assert "Traceback" not in typed.err
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 40)
    assert "does not take its token" in clerk.types(*dry, "--script", "job.py", code=1).err
    assert engine.jobs("planned") == []


@LONG
def test_ctrl_c_ends_it_in_order_and_fetches(clerk: Person, engine: OfOne) -> None:
    ctrl_c_ends_it(clerk, engine.name, far=(engine.folder,))


def test_what_waits_says_what_for_and_is_stopped(clerk: Person, engine: OfOne) -> None:
    waits, says = (f"--sbatch={LATER}",), "pending (BeginTime)"
    if engine.name == "ray":
        ray.shared().idle()
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


def test_found_from_another_machine_by_engine_and_folder(clerk: Person, engine: OfOne) -> None:
    shared = clerk.home / "shared"
    where = ("--shared", str(shared))
    clerk.types(engine.name, "--name", "there", "--detach", *where, "--script", "job.py")
    clerk.state = "another"
    typed = clerk.types("logs", "-f", "there", "--at", engine.at.format(shared))
    assert "it ran" in typed.out
    assert (shared / "groupwise-launch").is_dir()


# --- unkind ----------------------------------------------------------------------------------------


async def test_cut_off_before_it_was_submitted_it_is_submitted_once(
    backend: Backend,
    store: BlobStore,
    name: str,
    engine: OfOne,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray gets it from whoever looks, Slurm from whoever asks for it again."""

    async def is_cut_off(*_: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_submit", is_cut_off)
        with pytest.raises(asyncio.CancelledError):
            await backend.submit(order(name, RUNS), store)
    assert engine.jobs(name) == []
    handle = await backend.find(name)
    assert handle is not None
    if engine.name == "slurm":
        status = await backend.status(handle)
        assert (status.phase, status.waits_for) == (Phase.WAITING, "it is on its way to Slurm")
        assert engine.jobs(name) == []
        assert await backend.submit(order(name, RUNS), store) == handle
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert await backend.submit(order(name, RUNS), store) == handle
    assert len(engine.jobs(name)) == 1
    assert await said(backend, handle) == "it ran\n"


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
    backend: Backend, store: BlobStore, name: str, engine: OfOne, how: str
) -> None:
    asks: dict[str, Any] = {"partition": "gpu"} if engine.name == "slurm" else {"slowly": SLOWLY}
    alone = ("--nodelist=n1", "--exclusive") if engine.name == "slurm" else ()
    handle = await backend.submit(order(name, SAVES, *alone, **asks), store)
    await until(backend, handle, lambda status: status.log_size)
    if how == "preempted":
        other = order(f"{name}-by", RUNS, *alone, partition="urgent")
        urgent = await backend.submit(other, store)
        assert (await ending(backend, urgent)).outcome is Outcome.SUCCEEDED
    elif engine.name == "slurm":
        slurm.shared().run("scancel", *numbers(name, "running"))
    else:
        ray.shared().stop(name)
    status = await until(backend, handle, lambda status: status.ending)
    assert status.ending is not None
    assert (status.ending.failure, status.step) == (FailureClass.PREEMPTION, 1)
    assert await said(backend, handle) == "on\n1\n"
    again = await backend.resume(name, {}, store)
    assert (await ending(backend, again)).outcome is Outcome.SUCCEEDED
    assert await said(backend, again) == "one\n"


@LONG
async def test_without_its_head_a_job_goes_on_and_nothing_is_placed_twice(
    backend: Backend, store: BlobStore, name: str, engine: OfOne, tmp_path: Path
) -> None:
    go, of_ray = tmp_path / "go", engine.name == "ray"
    handle = await backend.submit(order(name, waits_for(go)), store)
    waits = order(f"{name}-later", RUNS, resources={"new": 1})
    later = await backend.submit(waits if of_ray else order(f"{name}-later", RUNS, LATER), store)
    await until(backend, handle, lambda status: status.log_size)
    if of_ray:
        ray.shared().kill("gcs_server", "dashboard/dashboard.py", "ray-dashboard-")
    else:
        slurm.shared().until_saved(f"{name}-later.1")
        slurm.shared().kill("controller")
    try:
        assert (await backend.status(handle)).phase is Phase.RUNNING
        with pytest.raises(Unreachable, match="does not answer"):
            await backend.status(later)
        with pytest.raises(Unreachable, match="does not answer"):
            await backend.submit(order(f"{name}-new", RUNS), store)
        go.touch()
        assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    finally:
        if of_ray:
            ray.shared().end()
            ray.shared().start(new=1)
            ray.shared().start_node()
        else:
            slurm.shared().start("controller")
            slurm.shared().until_ready()
    if of_ray:
        assert (await ending(backend, later)).outcome is Outcome.SUCCEEDED
        assert await said(backend, later) == "it ran\n"
    else:
        assert (await backend.status(later)).phase is Phase.WAITING
        await backend.cancel(later, 1.0)
    new = await backend.submit(order(f"{name}-new", RUNS), store)
    assert (await ending(backend, new)).outcome is Outcome.SUCCEEDED
    assert len(engine.jobs(f"{name}-new")) == 1


# --- Slurm -----------------------------------------------------------------------------------------


@only_slurm
async def test_cancelled_by_hand_in_the_queue_it_ends_and_can_be_resumed(
    backend: Backend, store: BlobStore, name: str
) -> None:
    handle = await backend.submit(order(name, RUNS, LATER), store)
    slurm.shared().run("scancel", *numbers(name))
    end = await ending(backend, handle)
    assert (end.outcome, end.failure) == (Outcome.REFUSED, FailureClass.LAUNCH_FAILURE)
    assert "cancelled" in end.reason
    again = await backend.resume(name, {}, store)
    assert again.attempt == handle.attempt + 1
    await backend.cancel(again, 1.0)
    assert (await ending(backend, again)).outcome is Outcome.CANCELLED
    assert numbers(name, "pending,running") == []


@only_slurm
async def test_of_two_roots_each_has_its_job_of_the_name(
    backend: Backend, store: BlobStore, name: str, engine: OfOne, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    other = engine.place(str(tmp_path / "b")).reach()
    first = await backend.submit(order(name, "print('a')"), store)
    second = await other.submit(order(name, "print('b')"), store)
    for each, handle in ((backend, first), (other, second)):
        assert (await ending(each, handle)).outcome is Outcome.SUCCEEDED
    assert [await said(backend, first), await said(other, second)] == ["a\n", "b\n"]
    assert len(numbers(name)) == 2
    await other.close()


@only_slurm
async def test_what_slurm_would_not_have_leaves_its_name_free(
    backend: Backend, store: BlobStore, name: str
) -> None:
    with pytest.raises(CloudError, match="would not have it"):
        await backend.submit(order(name, "print()", gpus=3), store)
    assert await backend.find(name) is None
    handle = await backend.submit(order(name, RUNS, gpus=1), store)
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED


@LONG
@only_slurm
async def test_a_node_that_slurm_gives_up_keeps_its_job(
    backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    go, cluster = tmp_path / "go", slurm.shared()
    handle = await backend.submit(order(name, waits_for(go), "--nodelist=n2"), store)
    await until(backend, handle, lambda status: status.log_size)
    cluster.kill("n2")
    try:
        cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        assert numbers(name, "node_fail") or not numbers(name, "running")
        assert (await backend.status(handle)).phase is Phase.RUNNING
        go.touch()
        assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    finally:
        cluster.start("n2")  # and it is back as soon as it has told so (ReturnToService=2)
        cluster.until_ready()


@only_slurm
async def test_a_launch_of_another_engine_is_left_alone(backend: Backend, name: str) -> None:
    runner: Any = backend._slurm  # type: ignore[attr-defined]
    plain = Runner(runner.host, root=runner.root)
    await plain.launch(Launch(name, 1, JobSpec(("true",)), engine=Engine("another")))
    assert (await runner.status(name, 1)).engine_says == ""
    await plain.void(name, 1)


# --- Ray -------------------------------------------------------------------------------------------


@only_ray
async def test_each_gets_gpus_of_its_own_and_what_asks_for_none_gets_none(
    backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    go, there = tmp_path / "go", {"apart": 0.5}

    async def placed(word: str, gpus: int) -> Any:
        asked = order(f"{name}-{word}", waits_for(go), gpus=gpus, resources=there)
        return await backend.submit(asked, store)

    handles = [await placed("a", 1), await placed("b", 1), await placed("c", 0)]
    for each in handles:
        await until(backend, each, lambda status: status.log_size)
    waiting = await placed("d", 1)
    assert (await backend.status(waiting)).phase is Phase.WAITING
    seen = [(await said(backend, each)).strip() for each in handles]
    assert sorted(seen) == ["0", "1", "none"]
    assert seen[2] == "none"
    go.touch()
    for each in (*handles, waiting):
        assert (await ending(backend, each)).outcome is Outcome.SUCCEEDED
    assert (await said(backend, waiting)).strip() in ("0", "1")


@LONG
@only_ray
async def test_an_answer_that_does_not_come_is_asked_for_again_and_it_runs_once(
    backend: Backend,
    store: BlobStore,
    name: str,
    engine: OfOne,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, lost = ray_host.RayRunner._submit, iter([True])

    async def answers_late(*asked: Any) -> None:
        await real(*asked)
        if next(lost, False):
            raise OutcomeUnknown("no answer in time")

    monkeypatch.setattr(ray_host.RayRunner, "_submit", answers_late)
    handle = await backend.submit(order(name, RUNS), store)
    assert next(lost, None) is None
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert len(engine.jobs(name)) == 1
    assert await said(backend, handle) == "it ran\n"


@LONG
@only_ray
async def test_what_ray_cannot_begin_is_told_with_its_words(backend: Backend, name: str) -> None:
    runner: Any = backend._ray  # type: ignore[attr-defined]
    wrong = Engine(await runner.word(), ('{"entrypoint_num_cpus": -1}',))
    await runner.launch(Launch(name, 1, JobSpec(("true",)), engine=wrong))
    state = await runner.status(name, 1)
    assert "num_cpus cannot be negative" in state.refused.message
    assert "Traceback" not in state.refused.message


@LONG
@only_ray
async def test_with_its_node_it_is_lost_and_goes_on_from_its_checkpoint(
    backend: Backend, store: BlobStore, name: str
) -> None:
    asked = order(name, SAVES, slowly=-1.0, resources={"apart": 1})
    handle = await backend.submit(asked, store)
    await until(backend, handle, lambda status: status.log_size and status.step)
    await asyncio.to_thread(ray.shared().kill_node)
    assert (await ending(backend, handle)).outcome is Outcome.LOST
    ray.shared().start_node()
    again = await backend.resume(name, {}, store)
    assert (await ending(backend, again)).outcome is Outcome.SUCCEEDED
    assert await said(backend, again) == "one\n"


@LONG
async def test_what_ray_gives_up_it_gets_again(store: BlobStore, name: str, tmp_path: Path) -> None:
    with ray.cluster(start_timeout=3) as impatient:
        place = Place("ray", str(tmp_path), ray=(impatient.address, impatient.token))
        backend = place.reach()
        handle = await backend.submit(order(name, RUNS, resources={"apart": 1}), store)
        await asyncio.to_thread(
            impatient.until, lambda: [job["status"] for job in impatient.jobs(name)] == ["FAILED"]
        )
        status = await backend.status(handle)
        assert (status.phase, status.waits_for) == (Phase.WAITING, "it is on its way to Ray")
        impatient.start_node()
        assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
        assert await said(backend, handle) == "it ran\n"
        await backend.close()
