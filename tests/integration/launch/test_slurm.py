"""`groupwise launch slurm` with a real Slurm of two nodes, and what happens to jobs when it, or somebody, is unkind."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.clouds.port import (
    Backend,
    CloudError,
    Order,
    Outcome,
    Phase,
    Unreachable,
)
from groupwise.hosts import slurm as slurm_host
from groupwise.hosts.driver import Engine, Launch, Runner
from groupwise.hosts.failures import FailureClass
from groupwise.hosts.files import BlobStore
from groupwise.hosts.spec import JobSpec, Limits
from tests import slurm
from tests.integration.launch.person import Person
from tests.integration.launch.stopping import ctrl_c_ends_it
from tests.places import Place, ending, said, until
from tests.slurm import Cluster

pytestmark = pytest.mark.launch
LATER = "--begin=now+1hour"
WAITS = "import time; print('on', flush=True); time.sleep(1000)"
SAVES = """\
import hashlib, json, os, pathlib, signal, sys
def save(number, frame):
    folder = pathlib.Path("outputs/checkpoints/step-1")
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(b"one")
    entry = {"size": 3, "sha256": hashlib.sha256(b"one").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"step": 1, "files": {"w": entry}}))
    sys.exit(0)
if "RESUME_FROM" in os.environ:
    print(pathlib.Path(os.environ["RESUME_FROM"], "w").read_text())
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("on", flush=True)
signal.pause()
"""
SHOWS = """\
import json, os, sys
os.makedirs("outputs")
names = ("SLURM_JOB_ID", "SLURM_JOB_PARTITION", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES")
told = {name: os.environ.get(name) for name in names}
with open("outputs/told.json", "w") as file:
    json.dump({"words": sys.argv[1:], **told}, file)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm.cluster(node_timeout=10) as found:
        yield found


@pytest.fixture
def clerk(cluster: Cluster, person: Person, monkeypatch: pytest.MonkeyPatch) -> Person:
    """A person at a login node."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    return person


@pytest.fixture
async def backend(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Backend]:
    reached = Place("slurm", str(tmp_path), slurm=str(cluster.configuration)).reach()
    yield reached
    await reached.close()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.originalname.removeprefix("test_")[:60].replace("_", "-")


def order(name: str, script: str, *options: str, **asks: Any) -> Order:
    spec = JobSpec(
        ("python3", "-c", script),
        artefacts=("outputs",),
        checkpoints=("outputs",),
        limits=Limits(time_seconds=600, grace_seconds=5),
    )
    return Order(name, spec, asks.pop("gpus", 0), asks={**asks, "options": list(options)})


def numbers(cluster: Cluster, name: str, states: str = "all") -> list[str]:
    """Of its jobs, as Slurm calls them."""
    lines = cluster.run("squeue", "-h", "-t", states, "-o", "%i|%j").splitlines()
    found = [line.split("|") for line in lines]
    return [number for number, of in found if of.startswith(f"{name}.")]


# --- typed -----------------------------------------------------------------------------------------


def test_a_script_runs_on_a_node_and_comes_back(clerk: Person) -> None:
    (clerk.project / "job.py").write_text(SHOWS)
    words = ("two words", "--gpus", "-x", "it's")
    asks = ("--gpus", "2", "--cpus", "2", "--partition", "gpu", "--memory", "100M")
    typed = clerk.types("slurm", "--name", "shows", *asks, "--script", "job.py", *words)
    assert "is placed on slurm" in typed.err
    told = json.loads((clerk.project / "launches/shows/outputs/told.json").read_text())
    number = told.pop("SLURM_JOB_ID")
    assert number.isdecimal()
    assert told == {
        "words": list(words),
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_CPUS_PER_TASK": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert clerk.result("shows")["state"] == "succeeded"


def test_a_plan_asks_slurm_and_changes_nothing(clerk: Person, cluster: Cluster) -> None:
    (clerk.project / "job.py").write_text(SHOWS)
    typed = clerk.types(
        "slurm", "--name", "planned", "--dry-run", "--gpus", "2", "--script", "job.py"
    )
    options = shlex.split(next(line for line in typed.out.splitlines() if "sbatch" in line))
    assert "--gpus-per-node=2" in options
    assert "to start at" in typed.out
    assert numbers(cluster, "planned") == []
    for wrong, why in (
        (("--gpus", "3"), "Slurm would not have it"),
        (("--partition", "none-such"), "invalid partition"),
        (("--sbatch=--array=1-9",), "--array is set by groupwise"),
        (("--sbatch", "constraint"), "an option of sbatch is expected"),
        (("--shared", "relative"), "absolute path"),
        (("--user", "me"), "--host names it"),
    ):
        typed = clerk.types(
            "slurm",
            "--dry-run",
            *wrong,
            "--script",
            "job.py",
            code=2 if "Slurm" not in why and "invalid" not in why else None,
        )
        assert typed.code != 0
        assert why in typed.err
        assert "Traceback" not in typed.err


def test_ctrl_c_ends_it_in_order_and_fetches(clerk: Person, cluster: Cluster) -> None:
    ctrl_c_ends_it(clerk, "slurm", far=(cluster.folder,))


def test_what_waits_says_what_for_and_is_stopped(clerk: Person, cluster: Cluster) -> None:
    (clerk.project / "job.py").write_text("print('it ran')")
    clerk.types("slurm", "--name", "later", "--detach", f"--sbatch={LATER}", "--script", "job.py")
    listed = json.loads(clerk.types("list", "--json").out)["jobs"]
    assert [(each["state"], each["place"]) for each in listed] == [("waiting", "slurm")]
    assert "pending (BeginTime)" in listed[0]["waits_for"]
    clerk.types("stop", "later")
    assert numbers(cluster, "later", "pending,running") == []
    assert json.loads(clerk.types("list", "--json").out)["jobs"][0]["state"] == "cancelled"
    assert clerk.types("logs", "later").out == ""


def test_found_from_another_machine_by_cluster_and_folder(clerk: Person) -> None:
    (clerk.project / "job.py").write_text("print('it ran')")
    shared = clerk.home / "shared"
    where = ("--shared", str(shared))
    clerk.types("slurm", "--name", "there", "--detach", *where, "--script", "job.py")
    clerk.state = "another"
    typed = clerk.types("logs", "-f", "there", "--at", f"slurm:{shared}")
    assert "it ran" in typed.out
    assert (shared / "groupwise-launch").is_dir()


# --- unkind ----------------------------------------------------------------------------------------


async def test_cut_off_before_slurm_had_it_it_is_submitted_once(
    backend: Backend, store: BlobStore, name: str, cluster: Cluster
) -> None:
    asked = order(name, "print('it ran')")
    runner: Runner = backend._slurm  # type: ignore[attr-defined]
    real = slurm_host.SlurmRunner._submit

    async def is_cut_off(*_: object) -> None:
        raise asyncio.CancelledError

    slurm_host.SlurmRunner._submit = is_cut_off  # type: ignore[method-assign]
    try:
        with pytest.raises(asyncio.CancelledError):
            await backend.submit(asked, store)
    finally:
        slurm_host.SlurmRunner._submit = real  # type: ignore[method-assign]
    handle = await backend.find(name)
    assert handle is not None
    status = await backend.status(handle)
    assert (status.phase, status.waits_for) == (Phase.WAITING, "it is on its way to Slurm")
    assert numbers(cluster, name) == []
    assert await backend.submit(asked, store) == handle
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert len(numbers(cluster, name)) == 1
    assert await said(backend, handle) == "it ran\n"
    assert runner.root


async def test_cancelled_by_hand_in_the_queue_it_ends_and_can_be_resumed(
    backend: Backend, store: BlobStore, name: str, cluster: Cluster
) -> None:
    handle = await backend.submit(order(name, "print('it ran')", LATER), store)
    [number] = numbers(cluster, name)
    cluster.run("scancel", number)
    end = await ending(backend, handle)
    assert (end.outcome, end.failure) == (Outcome.REFUSED, FailureClass.LAUNCH_FAILURE)
    assert "cancelled" in end.reason
    again = await backend.resume(name, {}, store)
    assert again.attempt == handle.attempt + 1
    await backend.cancel(again, 1.0)
    assert (await ending(backend, again)).outcome is Outcome.CANCELLED
    assert numbers(cluster, name, "pending,running") == []


async def test_cancelled_by_hand_while_it_runs_it_saves_and_goes_on_from_there(
    backend: Backend, store: BlobStore, name: str, cluster: Cluster
) -> None:
    handle = await backend.submit(order(name, SAVES), store)
    await until(backend, handle, lambda status: status.log_size)
    cluster.run("scancel", *numbers(cluster, name))
    status = await until(backend, handle, lambda status: status.ending)
    assert status.ending is not None
    assert status.ending.failure is FailureClass.PREEMPTION
    assert status.step == 1
    again = await backend.resume(name, {}, store)
    assert (await ending(backend, again)).outcome is Outcome.SUCCEEDED
    assert await said(backend, again) == "one\n"


async def test_preempted_it_saves_and_goes_on_from_there(
    backend: Backend, store: BlobStore, name: str
) -> None:
    alone = ("--nodelist=n1", "--exclusive")
    handle = await backend.submit(order(name, SAVES, *alone, partition="gpu"), store)
    await until(backend, handle, lambda status: status.log_size)
    other = order(f"{name}-by", "print('it ran')", *alone, partition="urgent")
    urgent = await backend.submit(other, store)
    end = await ending(backend, handle)
    assert end.failure is FailureClass.PREEMPTION
    assert (await ending(backend, urgent)).outcome is Outcome.SUCCEEDED
    again = await backend.resume(name, {}, store)
    assert (await ending(backend, again)).outcome is Outcome.SUCCEEDED
    assert await said(backend, again) == "one\n"


async def test_of_two_roots_each_has_its_job_of_the_name(
    backend: Backend, store: BlobStore, name: str, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    other = Place("slurm", str(tmp_path / "b"), slurm=str(cluster.configuration)).reach()
    first = await backend.submit(order(name, "print('a')"), store)
    second = await other.submit(order(name, "print('b')"), store)
    for each, handle in ((backend, first), (other, second)):
        assert (await ending(each, handle)).outcome is Outcome.SUCCEEDED
    assert [await said(backend, first), await said(other, second)] == ["a\n", "b\n"]
    assert len(numbers(cluster, name)) == 2
    await other.close()


async def test_what_slurm_would_not_have_leaves_its_name_free(
    backend: Backend, store: BlobStore, name: str
) -> None:
    with pytest.raises(CloudError, match="would not have it"):
        await backend.submit(order(name, "print()", gpus=3), store)
    assert await backend.find(name) is None
    handle = await backend.submit(order(name, "print('it ran')", gpus=1), store)
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED


async def test_while_its_controller_is_dead_a_job_goes_on_and_nothing_is_placed_twice(
    backend: Backend, store: BlobStore, name: str, cluster: Cluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    waits = f"import os, time\nprint('on', flush=True)\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(.05)"
    handle = await backend.submit(order(name, waits), store)
    later = await backend.submit(order(f"{name}-later", "print()", LATER), store)
    running = await until(backend, handle, lambda status: status.log_size)
    cluster.until_saved(f"{name}-later.1")
    cluster.kill("controller")
    try:
        assert (await backend.status(handle)).phase is Phase.RUNNING
        with pytest.raises(Unreachable, match="Slurm does not answer"):
            await backend.status(later)
        with pytest.raises(Unreachable, match="Slurm does not answer"):
            await backend.submit(order(f"{name}-new", "print('it ran')"), store)
        go.touch()
        assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    finally:
        cluster.start("controller")
        cluster.until_ready()
    assert running.ending is None
    assert (await backend.status(later)).phase is Phase.WAITING
    new = await backend.submit(order(f"{name}-new", "print('it ran')"), store)
    assert (await ending(backend, new)).outcome is Outcome.SUCCEEDED
    assert len(numbers(cluster, f"{name}-new")) == 1
    await backend.cancel(later, 1.0)


async def test_a_node_that_slurm_gives_up_keeps_its_job(
    backend: Backend, store: BlobStore, name: str, cluster: Cluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    waits = f"import os, time\nprint('on', flush=True)\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(.05)"
    handle = await backend.submit(order(name, waits, "--nodelist=n2"), store)
    await until(backend, handle, lambda status: status.log_size)
    cluster.kill("n2")
    try:
        cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        assert numbers(cluster, name, "node_fail") or not numbers(cluster, name, "running")
        assert (await backend.status(handle)).phase is Phase.RUNNING
        go.touch()
        assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    finally:
        cluster.start("n2")  # and it is back as soon as it has told so (ReturnToService=2)
        cluster.until_ready()


async def test_a_launch_of_an_engine_that_is_not_slurm_is_left_alone(
    backend: Backend, name: str
) -> None:
    runner: Any = backend._slurm  # type: ignore[attr-defined]
    plain = Runner(runner.host, root=runner.root)
    await plain.launch(Launch(name, 1, JobSpec(("true",)), engine=Engine("another")))
    assert (await runner.status(name, 1)).engine_says == ""
    await plain.void(name, 1)
